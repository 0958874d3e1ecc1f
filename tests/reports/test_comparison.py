from __future__ import annotations

import re

import pytest

import chopper
from chopper.analyzers.compare.gate import decide, parse
from chopper.analyzers.compare.runs import compare
from chopper.reports import comparison as report
from chopper.reports import to_text
from chopper.reports.comparison import waterfall
from chopper.reports.figures import GREY
from chopper.reports.labels import color
from chopper.reports.page import Table
from tests.comparing import attribution, trace
from tests.reports.make import HOSTILE, Shape, make


@pytest.fixture(scope="module")
def pair():
    a, b = (
        make(Shape(ranks=2, steps=6, layers=2, seed=seed, hostile=True), source=source)
        for seed, source in enumerate(("runs/synthetic", "runs/\x1b[31mred"))
    )
    a.recording.manifest.name = HOSTILE[1]
    return compare(a, b)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_text_fits_and_cannot_steer_the_terminal(pair, width) -> None:
    text = to_text.render(report.page(pair, gate=decide(pair, parse("step>+5%"))), width=width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "\x1b" not in text
    assert r"runs/\x1b[31mred" in text
    assert "the gate" in text


def test_markdown_shows_names_as_they_are(pair) -> None:
    text = report.render(pair, "md")
    assert text.startswith("# ")
    assert not re.search(r"(?<!\\)<script", text)
    assert "## Where the runs differ" in text


def test_the_page_escapes_what_a_trace_says(pair) -> None:
    page = report.render(pair, "html")
    body = page[page.index("<main>") : page.index("</main>")]
    assert "<script" not in body
    assert "&lt;script&gt;" in body
    assert "<img" not in body
    assert page.count("<script>") == 1
    assert "http://" not in page.replace("http://www.w3.org", "")[: page.index("</main>")]


def test_the_waterfall_ends_at_the_difference() -> None:
    a = attribution({"compute.ideal": [1000] * 4, "copy.memset": [50] * 4, "idle.call": [9] * 4})
    b = attribution({"compute.ideal": [400] * 4, "copy.memset": [80] * 4, "idle.call": [10] * 4})
    (bars,) = waterfall(compare(a, b))["data"]
    # In ms: −600 ns, +30 ns, and +1 ns that is too small for a bar of its own name.
    assert bars["x"] == [-0.0006, 3e-05, 1e-06, -0.000569]
    assert bars["base"] == [0, -0.0006, -0.00057, 0]
    assert waterfall(compare(a, a)) == {"data": [], "layout": {}}


def test_what_is_within_noise_is_grey() -> None:
    a = attribution({"compute.ideal": [1000, 1010] * 8, "idle.call": [400, 600] * 8})
    b = attribution({"compute.ideal": [400, 410] * 8, "idle.call": [420, 640] * 8})
    found = compare(a, b)
    assert {c.id: c.told for c in found.leaves()} == {"compute.ideal": True, "idle.call": False}
    (bars,) = waterfall(found)["data"]
    assert bars["marker"]["color"] == [color("compute.ideal"), GREY, ""]
    table = next(
        block
        for section in report.page(found).sections
        if section.id == "causes"
        for block in section.blocks
        if isinstance(block, Table) and "html" in block.formats
    )
    rows = {row[0].text: row for row in table.typed_rows()}
    ideal, launch = rows["Model math at peak"], rows["Launch overhead"]
    assert not any(cell.dim for cell in ideal)
    assert all(cell.dim for cell in launch)
    assert [cell.color for cell in launch if cell.share_ratio is not None] == [GREY]
    # What has no colour says the same in words.
    markdown = report.render(found, "md")
    assert "grey, here" not in markdown.lower()
    assert "includes 0 is within noise" in markdown


def test_a_comparison_has_a_table(tmp_path) -> None:
    found = chopper.compare(trace(tmp_path / "a.json"), trace(tmp_path / "b.json", adds=2))
    frame = found.causes.df()
    assert [*frame["id"]] == [c.id for c in found.changes]
    assert frame["difference_step_ns"].dtype == "int64"
    leaves = frame[frame["is_leaf"]]
    assert leaves["difference_step_ns"].sum() == found.step.difference_ns
    assert "chopper.Comparison" in repr(found)


def test_an_unknown_format_is_refused(pair) -> None:
    with pytest.raises(chopper.ChopperError, match="unknown"):
        report.render(pair, "pdf")
