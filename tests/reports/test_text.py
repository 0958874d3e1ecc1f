from __future__ import annotations

import dataclasses
import re

import pytest

from chopper import reports
from chopper.analyzers.attribution import Attribution
from chopper.causes import LEAVES, inherited
from chopper.cli.analyze_ import to_csv
from chopper.errors import UsageError, printable
from chopper.reports import document, run, to_markdown, to_text
from chopper.reports.labels import color, ink
from chopper.reports.page import Cell, Fact, Facts, Item, Items, Page, Table
from chopper.reports.story import Story, step_sentences
from chopper.reports.verdict import verdict
from chopper.storage.findings import finding
from chopper.storage.manifest import Finding
from tests.reports.make import Shape, make

EXACT = make()


def shown(attribution, by=None, top=None, **how) -> str:
    """What ``chopper analyze --by`` prints."""
    if by in (None, "cause"):
        return to_text.render(run.page(attribution, "txt"), **how)
    return to_text.render(run.grouped(attribution, by, top=top), **how)


@pytest.mark.parametrize("by", [None, "cause", "step", "phase", "layer", "op", "kernel", "rank"])
@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_line_is_wider_than_asked(by, width) -> None:
    for line in shown(make(Shape(hostile=True)), by=by, width=width).splitlines():
        assert len(line) <= width


def test_plain_text_has_no_escape_codes_and_colour_has() -> None:
    assert "\x1b" not in shown(EXACT)
    assert "\x1b[" in shown(EXACT, color=True)


def test_printable_shows_control_characters_and_leaves_the_rest() -> None:
    assert printable("a\x1b[2Jb\r\nc") == r"a\x1b[2Jb\r\nc"
    # C1 controls, direction overrides, line separators, what is no character at all.
    assert printable("\x9b2J\u202e\u2028\ud800") == r"\x9b2J\u202e\u2028\ud800"
    for text_ in ("void k<4, true>(int)", "Größe · 3 µs", "1\u202f000\xa0s", "数据"):
        assert printable(text_) == text_


_EVIL = "\x1b]0;owned\x07\x9b2J\r\nk"


@pytest.fixture
def evil():
    """An attribution in which every name that comes from data tries to steer the terminal."""
    made = make(Shape())
    run = made.recording.manifest
    run.name = run.workload = _EVIL
    for part in run.ranks:
        part.backend = _EVIL
    finding = Finding(code="x.y", severity="warning", message=_EVIL)
    ranks = [dataclasses.replace(r, device=_EVIL, label=_EVIL + str(r.rank)) for r in made.ranks]
    groups = {level: made.by(level) for level in ("op", "kernel", "phase", "layer")}

    class Evil(Attribution):
        def by(self, level):
            found = groups.get(level)
            if found is None:
                return super().by(level)
            return [dataclasses.replace(g, key=f"{_EVIL}{i}") for i, g in enumerate(found)]

    fields = {f.name: getattr(made, f.name) for f in dataclasses.fields(made) if f.init}
    return Evil(**(fields | {"ranks": ranks, "findings": [*made.findings, finding]}))


@pytest.mark.parametrize("by", [None, "phase", "layer", "op", "kernel", "rank"])
def test_names_from_data_cannot_steer_the_terminal(evil, by) -> None:
    outputs = {
        "text": shown(evil, by=by),
        "markdown": reports.render(evil, "md"),
        "csv": to_csv(evil, by, None),
    }
    for kind, out in outputs.items():
        assert not set(re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out)), kind
    assert r"\x1b]0;owned" in outputs["text"]
    # Two backslashes: Markdown takes one of them.
    assert r"\\x1b\]0;owned" in outputs["markdown"]
    if by in ("phase", "layer", "op", "kernel"):
        rows = outputs["csv"].splitlines()[1:]
        assert rows
        assert all(row.startswith(r"\x1b]0;owned\x07\x9b2J\r\nk") for row in rows)


def test_the_tree_shows_every_cause_once_and_ends_with_the_sum() -> None:
    out = shown(EXACT, width=120)
    for row in EXACT.causes():
        if row.time_ns:
            assert len(re.findall(rf"^ *{re.escape(row.label)}( ~)?  ", out, re.M)) == 1, row.label
    assert re.search(r"^Observed +10\.2 ms +100 %", out, re.M)


def test_top_limits_rows_and_says_what_is_left() -> None:
    out = shown(EXACT, by="kernel", top=2)
    assert "6 more rows" in out
    assert "--top" in out


def test_verdict_with_and_without_an_ideal() -> None:
    known = Story(EXACT)
    # 81 563 786 ns over 8 windows; 29 150 794 ns of it ideal.
    assert known.observed_per_window_ns == 81_563_786 / 8
    assert known.ideal_per_window_ns == 29_150_794 / 8
    assert (
        step_sentences(known)[0]
        == "A step takes 10.2 ms on average; at peak, its math would take 3.64 ms."
    )
    unknown = Story(make(Shape(peak=False)))
    assert unknown.ideal_per_window_ns is None
    headline, detail = step_sentences(unknown)
    assert "the ideal time is unknown" in headline
    assert detail == "The peak of Unheard-of Device is unknown."


def test_the_three_largest_causes_are_the_largest_leaves_of_the_gap() -> None:
    leaves = [r for r in EXACT.leaves() if r.id != "compute.ideal"]
    found = verdict(Story(EXACT), "not replayed")
    assert [one.cause for one in found.largest] == [r.id for r in leaves[:3]]


def test_every_leaf_has_a_colour_of_its_own_hex_and_advice() -> None:
    for leaf in LEAVES:
        assert re.fullmatch(r"#[0-9a-f]{6}", color(leaf))
        assert inherited(leaf, "advice"), leaf
    assert color("compute.newer_than_this") == color("compute")
    assert ink("#ffffff") == "#000000"
    assert ink("#000000") == "#ffffff"


def test_markdown_escapes_names() -> None:
    out = reports.render(make(Shape(hostile=True)), "md")
    assert "<script" not in out.replace("\\<", "")
    assert "<img" not in out.replace("\\<", "")
    for line in out.splitlines():
        if line.startswith("|"):
            # Escaped pipes do not end a cell: as many cells as the table's header.
            assert len(re.findall(r"(?<!\\)\|", line)) in (5, 6, 7)


def test_markdown_shows_commands_as_code() -> None:
    page = Page(
        title="a_b",
        headline="Record (`chopper record --collect host_sched`).",
        summary=(
            Items(
                items=[Item("Rows: `chopper analyze a_b.json --view steps`", code="run.no_trace")]
            ),
            Facts(facts=[Fact(label="Command", value="python *.py", code=True)]),
            Table(
                columns=("Name", "Value"), rows=[("`a|b` _c_ d_e |", Cell(text="x_*", code=True))]
            ),
        ),
    )
    out = to_markdown.render(page)
    assert "# a_b\n" in out
    assert "**Record (`chopper record --collect host_sched`).**" in out
    assert "- Rows: `chopper analyze a_b.json --view steps` (`run.no_trace`)\n" in out
    assert "- Command: `python *.py`\n" in out
    assert "| `a\\|b` \\_c\\_ d_e \\| | `x_*` |\n" in out


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("@torvalds and a@b.c", "@&#8203;torvalds and a@&#8203;b.c"),
        ("#12 GH-12", r"\#&#8203;12 GH&#8203;-12"),
        ("https://e.org www.e.org", "https&#8203;://e.org www&#8203;.e.org"),
        ("_https://e.org ²www.e.org", r"\_https&#8203;://e.org ²www&#8203;.e.org"),
        ("1. list", r"1\. list"),
        ("2) list", r"2\) list"),
        ("- list", r"\- list"),
        ("+ list", r"\+ list"),
        ("--- ", r"\---"),
        ("===", r"\==="),
        ("-5 and 1.5", "-5 and 1.5"),
    ],
)
def test_markdown_pings_nobody_and_begins_no_list(text: str, markdown: str) -> None:
    assert to_markdown.escape(text) == markdown
    page = Page(title="", headline="", summary=(Items(items=[Item(text)]),))
    assert f"- {markdown}\n" in to_markdown.render(page)
    coded = Page(title="", headline="", summary=(Items(items=[Item(f"`{text}`")]),))
    assert f"- `{text.strip()}" in to_markdown.render(coded)


def test_texts_are_escaped_for_where_they_go() -> None:
    import json

    from chopper.errors import csv_text, json_text, message_line, printable

    evil = "\x1b[31m\x9b\x7f\u202e\u200b\u2066\ufeff\u3164\ufe0f\u034f\r\n\udcff ü 漢"
    assert printable(evil).endswith(" ü 漢")
    assert all(c.isascii() or c in "ü漢" for c in printable(evil))
    assert printable(evil).isprintable()
    for lead in ("=", "+", "-", "@", "\t", "\r", " =", "＝", "＋"):
        assert csv_text(f"{lead}1+1").startswith("'")
    assert csv_text("gemm=1") == "gemm=1"
    shown = json_text(json.dumps({"a": evil, "b": "\U000e0100"}, ensure_ascii=False))
    assert json.loads(shown) == {"a": evil, "b": "\U000e0100"}
    assert shown.isprintable()
    for text in ("word " * 900, "x" * 9000, "\n" * 900, f"{evil} " * 400):
        assert len(message_line(text)) <= 500
        assert message_line(text).isprintable()


def test_a_json_report_holds_nothing_that_a_terminal_obeys() -> None:
    import json

    said = {"name": "a\u202e\x9b\ud800"}
    shown = reports.formatted(lambda: Page(title="", headline=""), lambda: said, "json")
    assert shown.rstrip("\n").replace("\n", "").isprintable()
    assert json.loads(shown) == said


def test_json_is_the_documented_form() -> None:
    import json

    out = json.loads(reports.render(EXACT, "json"))
    assert out == document(EXACT)
    assert sum(c["time_ns"] for c in out["causes"] if c["id"] in LEAVES) == out["observed_ns"]


def test_the_extension_names_the_format(tmp_path) -> None:
    for name, kind in (
        ("a.html", "html"),
        ("a.HTM", "html"),
        ("a.md", "md"),
        ("a.txt", "txt"),
        ("a.json", "json"),
    ):
        assert reports.format_of(tmp_path / name) == kind
    for name in ("a.pdf", "a", "html"):
        with pytest.raises(UsageError, match=r"\.html, \.md, \.json, \.txt"):
            reports.format_of(tmp_path / name)
    with pytest.raises(UsageError, match="unknown"):
        reports.render(EXACT, "pdf")


def test_findings_about_less_than_a_thousandth_are_only_counted() -> None:
    few, some = (
        _with([finding("event.stream_overlap", count=1, share=share, longest_us=2.0)])
        for share in (0.0009, 0.0011)
    )
    assert "1 device event began before an earlier one ended" in some
    assert "1 device event" not in few
    assert "1 finding about less than 0.1 % of the time or of the events not shown" in few
    # What withholds a number is said, however little it is about.
    withholds = finding("compute.contention_unknown", share=0.0, unknown_ms=0.1, bound_ms=0.1)
    text = _with([withholds])
    assert "contention is withheld" in text


def _with(findings: list[Finding]) -> str:
    return shown(dataclasses.replace(EXACT, findings=findings), width=200)
