#!/usr/bin/env bash
# The steps of action.yml: gate.sh history | record | compare | comment.
# Whatever a workflow passes comes in variables, never in the text of a script.
set -euo pipefail

place=$RUNNER_TEMP/chopper/${NAME:-}
mkdir -p "$place"

# The latest history that a run of the default branch of this repository has left: a fork may have a
# branch of the same name.
history() {
    local jq newest
    jq="[.artifacts[] | select((.expired | not) and .workflow_run.head_branch == env.BRANCH
        and .workflow_run.head_repository_id == .workflow_run.repository_id)]
        | sort_by(.created_at) | last | .workflow_run.id // empty"
    newest=$(gh api "repos/$GITHUB_REPOSITORY/actions/artifacts?name=$NAME-history&per_page=100" --jq "$jq")
    if [[ -z $newest ]]; then
        echo "::notice::$NAME: no earlier run on $BRANCH has left a history; this one begins it"
        return
    fi
    gh run download "$newest" --repo "$GITHUB_REPOSITORY" --name "$NAME-history" --dir "$place/history"
}

record() {
    chopper record -o "$RUN" --force -- bash -c "$COMMAND"
}

compare() {
    rm -f "$place"/verdict.* "$place/junit.xml"
    local options=(--history "$place/history" --find "$FIND" --junit "$place/junit.xml" --force) code=0
    if [[ $ADD == true ]]; then options+=(--add); fi
    if [[ $ACCEPT == true ]]; then options+=(--accept); fi
    if [[ $STRICT == true ]]; then options+=(--strict); fi
    chopper gate "$RUN" "${options[@]}" -o "$place/verdict.md" --json >"$place/verdict.json" || code=$?
    echo "code=$code" >>"$GITHUB_OUTPUT"
    sed -n 's/^  "verdict": "\(.*\)",$/verdict=\1/p' "$place/verdict.json" >>"$GITHUB_OUTPUT"
    # Without a verdict (a damaged file) the step's log has the reason, in one line.
    if [[ -e $place/verdict.md ]]; then cat "$place/verdict.md" >>"$GITHUB_STEP_SUMMARY"; fi
}

# One comment for each job, written anew: found by its first line. Anybody may write such a line, so
# it must be of an application or of a member.
comment() {
    local mark="<!-- chopper compare: $NAME -->" comments found jq
    if [[ ! -e $place/verdict.md ]]; then return; fi
    { echo "$mark"; cat "$place/verdict.md"; } >"$place/comment.md"
    comments=repos/$GITHUB_REPOSITORY/issues
    export mark
    jq='.[] | select((.body | startswith(env.mark)) and (.user.type == "Bot" or
        (.author_association | IN("OWNER", "MEMBER", "COLLABORATOR")))) | .id'
    if ! found=$(gh api "$comments/$NUMBER/comments?per_page=100" --paginate \
        --jq "$jq"); then
        echo "::warning::$NAME: the comments of the pull request cannot be read; the verdict is in the summary"
        return
    fi
    found=${found%%$'\n'*}
    # A pull request from a fork has a token that cannot write: its verdict is in the summary.
    if [[ -n $found ]]; then
        gh api --method PATCH "$comments/comments/$found" -F "body=@$place/comment.md" --silent
    else
        gh api --method POST "$comments/$NUMBER/comments" -F "body=@$place/comment.md" --silent
    fi || echo "::warning::$NAME: the comment cannot be written (a fork's token cannot); the verdict is in the summary"
}

"$1"
