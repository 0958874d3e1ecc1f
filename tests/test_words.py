"""All texts that users see: one list for review, and rules of style that can be checked."""

from __future__ import annotations

import ast
import difflib
import re
import tomllib

import pytest

from chopper.causes import CAUSES
from tests.words import LIST, ROOT, files, lines

# What must not be said, and what is said instead.
BANNED = {
    r"\bgives? back\b": "saves; recoverable",
    r"\bthis alone were gone\b": "if only this cause were removed",
    r"\bof their like\b|\bits like\b|\bmore like it\b|\bof its kind\b": "similar instances",
    r"\bso no [\w ]+ is:|\bof no product\b": "the subject first: 'the … is unknown, because …'",
    r"\bnot told from\b|\btold from\b|\btold apart\b": "separated; distinguished; within noise",
    r"\bthe survey\b|\bthe paper\b|\bsurvey says\b": "the title, or leave it out",
    r"\bas given\b|\ball else as\b": "unchanged; as specified",
    r"\bnobody (can|could)\b|\bnobody waited\b": "cannot; no rank",
    r"\bhungr|\bdearer\b|\bkin\b|\bsaid of\b": "the plain word",
    r"\btaken away\b|\btake a cause away\b|\bleft away\b|\bleave away\b": "removed; omit",
    r"\bin the middle of all\b|\bin the mean\b": "median; on average",
    r"\bnot believed\b|\bwere taken\b": "rejected; the term of the field",
    r"\bto be mended\b|\bmend(s|ed)?\b": "fix",
    r"\bcannot be meant\b|\bno factor;": "is not a factor",
    r"\bblamed on\b": "attributed to",
    r"\bwhatever they say\b|\bhas to be faster by\b": "the quantity",
    r"\bthe FLOP of no\b": "no FLOP are known",
    r"\bNot claimed\b|\bnot claimed\b": "withheld",
}
# British spelling with -ize, as most texts have it: American forms and -ise are the exceptions.
SPELLING = {
    r"\b(?<!-)colors?\b(?!:\{)|\bcolored\b": "colour",
    r"\bneighbors?\b|\bneighboring\b": "neighbour",
    r"\bbehaviors?\b": "behaviour",
    r"\b(un)?model(ed|ing)\b|\blabel(ed|ing)\b|\bcancel(ed|ing)\b": "modelled, labelled",
    r"\bgray\b|\bcenter(ed|s)?\b": "grey, centre",
    r"\b(recogn|optim|util|synchron|quant|real|normal|general|parallel|initial)is(e[drs]?|ing"
    r"|ation|er)\b": "-ize",
    r"\bdata sheets?\b": "datasheet",
    r"\bspeed-up\b|\bback end\b": "speedup, backend",
}
LONGEST_SENTENCE = 60
"""Words; what stands in parentheses and after semicolons and colons counts as its own."""


def test_the_list_for_review_holds_every_text() -> None:
    stored, now = LIST.read_text("utf-8").splitlines(), lines()
    # As sets: a merge of two branches may leave the order to the next one that writes the list.
    diff = difflib.unified_diff(sorted(set(stored)), now, "tests/words.txt", "the code", n=0)
    changes = [line for line in diff if not line.startswith("@@")]
    assert not changes, "read them aloud, then: python -m tests.words\n" + "\n".join(changes)


@pytest.mark.parametrize(("pattern", "instead"), [*(BANNED | SPELLING).items()])
def test_no_text_has_a_word_that_is_not_ours(pattern: str, instead: str) -> None:
    wrong = [line for line in lines() if re.search(pattern, line, re.IGNORECASE)]
    assert not wrong, f"say: {instead}\n" + "\n".join(wrong)


def test_sentences_are_short() -> None:
    long = [
        sentence
        for line in lines()
        if " = " not in line  # formulas
        for sentence in re.split(r"[.!?;:]\s|\(|\)", line)
        if len(sentence.split()) > LONGEST_SENTENCE
    ]
    assert not long, "\n".join(long)


def test_no_word_stands_twice() -> None:
    doubled = [line for line in lines() if re.search(r"(?<!-)\b([a-z]{2,}) \1\b", line)]
    assert not doubled, "\n".join(doubled)


def test_labels_have_no_article_and_no_full_stop() -> None:
    labels = [cause.label for cause in CAUSES.values()]
    checks = tomllib.loads((ROOT / "chopper/data/checks.toml").read_text("utf-8"))
    claims = tomllib.loads((ROOT / "chopper/data/claims.toml").read_text("utf-8"))
    labels += [entry["title"] for entry in (*checks.values(), *claims.values())]
    wrong = [text for text in labels if re.match(r"(The|An) |[^A-Z]", text) or text.endswith(".")]
    assert not wrong, "\n".join(wrong)


def test_measured_numbers_have_a_unit() -> None:
    # A number with a format of its own is a measurement: a unit follows.
    number = re.compile(
        r"\{\w+:\.\d+[fg]\}(?! ?(ns|µs|us|ms|s|%|B|GB|MB|W|J|°C|GHz|MHz|Hz|×|times)\b)"
    )
    wrong = [line for line in lines() if number.search(line.replace("%", "% "))]
    assert not wrong, "\n".join(wrong)


def test_messages_show_no_id_where_there_is_a_label() -> None:
    """Ids of causes stand in texts only where the user types them or reads them in JSON."""
    ids = [id for id in CAUSES if "." in id]
    shown = [
        line
        for line in lines()
        for id in ids
        if re.search(rf"(?<![\w.`'>]){re.escape(id)}(?![\w.`>])", line) and "--" not in line
    ]
    assert not shown, "\n".join(shown)


def test_percentages_have_one_spelling() -> None:
    """``19.6 %``, by ``chopper.wording``: never without the space, never formatted by hand."""
    typed = [line for line in lines() if re.search(r"[\d}]%", line) and ">+5%" not in line]
    assert not typed, "\n".join(typed)
    by_hand = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in files(".py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.FormattedValue)
        and node.format_spec is not None
        and re.search(r"\d%'$", ast.unparse(node.format_spec))
    ]
    assert not by_hand, "chopper.wording.ratio or .percent: " + ", ".join(by_hand)
