"""What the documentation shows below a command is what the command prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import find_traces_dir
from tests.docs.blocks import FENCE, ROOT, Command
from tests.docs.transcripts import agrees, lay_out, printed, renewed, transcripts

QUANTITY = re.compile(r"\d[\d ]*(?:\.\d+)? (?:ns|µs|ms|s|%)(?!\w)")


@pytest.mark.parametrize("shown", transcripts(), ids=lambda c: f"{c.source}: {c.text}")
def test_transcript(shown: Command, tmp_path: Path) -> None:
    if missing := lay_out(shown, find_traces_dir(), tmp_path):
        pytest.skip(missing)
    said = printed(shown, tmp_path)
    assert agrees(shown.printed or "", said), (
        f"python -m tests.docs.transcripts writes it anew\n{said}"
    )


def test_every_quantity_of_the_tutorial_is_printed_by_its_commands() -> None:
    text = (ROOT / "docs/first-report.md").read_text(encoding="utf-8")
    shown = "\n".join(" ".join(fence[3].split()) for fence in FENCE.finditer(text))
    quantities = QUANTITY.findall(" ".join(FENCE.sub("", text).split()))
    assert len(quantities) > 10
    assert [q for q in quantities if q not in shown] == []


def test_left_out_lines_may_be_anything_and_others_not() -> None:
    said = "a 1\nb 2\nc 3\nd 4"
    assert agrees(said, said)
    assert agrees("a 1\n…\nc 3\n…", said)
    assert agrees("…\nd 4", said)
    for wrong in ("a 1\nb 2", "a 1\n…\nc 4\n…", "b 2\n…", "…\nc 3", "c 3\n…\na 1\n…"):
        assert not agrees(wrong, said)
    assert renewed("a 0\n…\nc 0\n…", said) == "a 1\n…\nc 3\n…"
