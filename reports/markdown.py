"""The attribution as Markdown: for pull requests, issues and logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper import wording as fmt
from chopper.errors import printable
from chopper.reports.story import KIND_HEADER, Views, kind_rows, tell, tracing_rows
from chopper.reports.text import group_label

if TYPE_CHECKING:
    from chopper.analyzers.attributed import Attributed
    from chopper.attribution import Level
    from chopper.reports.story import KIND_HEADER, Story, kind_rows, tracing_rows

_TOP = 15
_SPECIAL = str.maketrans({c: "\\" + c for c in "\\`*_{}[]<>#|~$&!"})
_LEVELS: tuple[tuple[Level, str], ...] = (
    ("phase", "Phase"),
    ("layer", "Layer"),
    ("op", "Operator"),
    ("kernel", "Kernel"),
    ("rank", "Rank"),
)


def escape(text: str) -> str:
    """A text that Markdown shows as it is: no markup, no HTML, one line."""
    return " ".join(printable(" ".join(text.split())).translate(_SPECIAL).split())


def render(attribution: Attributed) -> str:
    """The Markdown report of an attribution."""
    views = Views(attribution)
    story = tell(views)
    parts = [
        f"# {escape(story.title)}",
        escape(" · ".join(story.facts)),
        f"**{escape(story.verdict)}** {escape(story.detail)}".strip(),
        escape(story.tracing),
        *_kinds(story),
        *_findings(story),
        *_top(story),
        "## Where the time went",
        _causes(attribution, story),
        "Times are means per "
        f"{story.traced_unit} over {fmt.plural(story.windows, 'window')}; the causes sum to the observed "
        "time exactly. *model*: a model has a part in it; *measured*: recorded times alone.",
    ]
    parts.append(
        "\n".join(
            f"- {escape(line)}"
            for line in (*story.ceiling, story.utilization, story.withheld)
            if line
        )
    )
    for level, title in _LEVELS:
        parts += _groups(views, story, level, title)
    parts += _coverage(attribution)
    return "\n\n".join(p for p in parts if p) + "\n"


def _table(header: list[str], rows: list[list[str]], right: set[int]) -> str:
    rule = ["---:" if i in right else "---" for i in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def _kinds(story: Story) -> list[str]:
    rows = [[escape(cell) for cell in row] for row in kind_rows(story.step)]
    return [_table([h.capitalize() for h in KIND_HEADER], rows, {1, 2, 3})] if rows else []


def _findings(story: Story) -> list[str]:
    return [
        "\n".join(
            f"- **{f.severity}**"
            + (f", rank {f.rank}" if f.rank is not None else "")
            + f": {escape(f.message)} ({escape(f.code)})"
            for f in story.findings
        )
    ]


def _top(story: Story) -> list[str]:
    if not story.top:
        return []
    lines = ["## The largest causes"]
    for i, cause in enumerate(story.top, 1):
        lines.append(
            f"{i}. **{escape(cause.title)}**: {fmt.duration(cause.per_window_ns)} per {story.traced_unit}, "
            f"{fmt.ratio(cause.share_ratio)}. {escape(cause.meaning)} {escape(cause.advice)}"
            + (f" ({escape('; '.join(map(str, cause.evidence)))})" if cause.evidence else "")
        )
    return [lines[0], "\n".join(lines[1:])]


def _causes(attribution: Attributed, story: Story) -> str:
    rows = []
    back = attribution.recoverable()
    for row in attribution.causes():
        if row.time_ns <= 0:
            continue
        interval = fmt.UNKNOWN
        if row.ci95_ns is not None:
            low, high = (v / story.windows for v in row.ci95_ns)
            interval = f"{fmt.duration(low)} to {fmt.duration(high)}"
        depth = row.id.count(".")
        label = escape(row.label) if depth else f"**{escape(row.label)}**"
        rows.append(
            [
                "&nbsp;" * 4 * depth + label,
                fmt.duration(row.time_ns / story.windows),
                fmt.ratio(row.share_ratio),
                interval,
                fmt.duration(
                    None if (gain := back[row.id].time_ns) is None else gain / story.windows
                ),
                "measured" if row.measured else "model",
            ]
        )
    rows.append(["**Observed**", fmt.duration(story.observed_per_window_ns), "100 %", "", "", ""])
    rows += [
        [label, time, share, interval, "", ""]
        for label, time, share, interval in tracing_rows(story)
    ]
    header = ["Cause", f"Per {story.traced_unit}", "Share", "95 % interval", "Gives back", "Basis"]
    return _table(header, rows, {1, 2, 3, 4})


def _groups(views: Views, story: Story, level: Level, title: str) -> list[str]:
    groups = views.by(level)
    if len(groups) < 2:
        return []
    from chopper.causes import CAUSES

    attribution = views.attribution
    steps_of = {r.rank: max(r.steps, 1) for r in attribution.ranks}
    rows = []
    for group in groups[:_TOP]:
        divisor = story.windows
        if level == "rank" and group.key is not None:
            divisor = steps_of.get(int(group.key), 1)
        most = max(group.causes.items(), key=lambda kv: kv[1], default=None)
        rows.append(
            [
                escape(group_label(group, level)),
                fmt.duration(group.time_ns / divisor),
                fmt.ratio(group.time_ns / max(attribution.observed_ns, 1)),
                f"{escape(CAUSES[most[0]].label)}, {fmt.ratio(most[1] / group.time_ns)}"
                if most and group.time_ns
                else fmt.UNKNOWN,
            ]
        )
    note = []
    if len(groups) > _TOP:
        rest = sum(g.time_ns for g in groups[_TOP:])
        note = [
            f"{fmt.plural(len(groups) - _TOP, 'more row')}: "
            f"{fmt.duration(rest / story.windows)} per {story.traced_unit}."
        ]
    table = _table([title, f"Per {story.traced_unit}", "Share", "Mostly"], rows, {1, 2})
    return [f"## By {title.lower()}", table, *note]


def _coverage(attribution: Attributed) -> list[str]:
    if not attribution.coverage:
        return []
    from chopper.reports.story import coverage_label

    lines = [
        f"- {escape(coverage_label(name))}: {fmt.ratio(value) if value is not None else 'not known'}"
        for name, value in attribution.coverage.items()
    ]
    return ["## Coverage", "\n".join(lines)]
