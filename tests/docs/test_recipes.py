"""Every recipe of the page runs, in its order, on recordings of the project."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
from plotly.graph_objects import Figure

from chopper.tables.frames import Table
from tests.docs.blocks import FENCE, ROOT
from tests.reports.test_browser import browser

__all__ = ["browser"]

PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
RECIPES = [fence[3] for fence in FENCE.finditer(PAGE) if fence[2] == "python"]
RUNS = {
    "mine": ROOT / "tests" / "golden" / "own" / "fsdp2",
    "before": ROOT / "docs" / "recordings" / "overlap" / "sequential-1",
    "after": ROOT / "docs" / "recordings" / "overlap" / "chunked-1",
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The folder of the recipes, their variables at the end, and what they print."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "runs").mkdir()
    for name, path in RUNS.items():
        (folder / "runs" / name).symlink_to(path)
    before, variables, printed = Path.cwd(), {}, io.StringIO()  # type: ignore[var-annotated]
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed):
            for number, recipe in enumerate(RECIPES, start=1):
                exec(compile(recipe, f"recipe {number}", "exec"), variables)
    finally:
        os.chdir(before)
    return folder, variables, printed.getvalue()


def test_there_are_ten() -> None:
    numbers = re.findall(r"^## (\d+)\. ", PAGE, flags=re.MULTILINE)
    assert [*map(int, numbers)] == [*range(1, len(RECIPES) + 1)] == [*range(1, 11)]


def test_recipes_answer_their_questions(done: tuple[Path, dict[str, Any], str]) -> None:
    folder, found, printed = done
    attribution = found["attribution"]
    windows = found["run"].scan("window").df()
    leaves, layers = found["leaves"], found["layers"]
    mean_ns = (windows["end_ns"] - windows["start_ns"]).sum() // len(windows)
    assert leaves["step_ns"].sum() == layers["step_ns"].sum() == mean_ns
    assert leaves["time_ns"].sum() == attribution.observed_ns
    costliest = layers[layers["layer"].notna()].iloc[0]
    assert costliest["layer"] in printed
    assert found["comparison"].verdict in printed
    assert found["by_cause"].shape == (2, len(leaves))
    sums = found["by_cause"].sum(axis=1) * 1e6
    assert sums.round().astype("int64").tolist() == attribution.by("rank").df()["step_ns"].tolist()
    assert isinstance(found["slowest"], Table)
    assert len(found["slowest"]) == 3
    assert 0 < found["spans"].num_rows < len(found["run"].scan("host_span"))
    assert (folder / "report.html").stat().st_size > 1_000_000
    assert all(isinstance(found[n], Figure) for n in ("waterfall", "timeline", "heat_map"))


def test_the_timeline_covers_the_step_without_overlap(
    done: tuple[Path, dict[str, Any], str],
) -> None:
    _, found, _ = done
    run, bars = found["run"], found["timeline"].data
    (label,) = re.findall(r"Rank 1, step (\d+)", found["timeline"].layout.title.text)
    window = next(w for w in run.scan("window") if (w["rank"], w["number"]) == (1, int(label)))
    length_ms = (window["end_ns"] - window["start_ns"]) / 1e6
    of = [(b, x, lane) for t in bars for b, x, lane in zip(t.base, t.x, t.y, strict=True)]
    assert all(base >= -1e-3 and base + x <= length_ms + 1e-3 for base, x, _ in of)
    idle_ms = sum(x for _, x, lane in of if lane == "idle")
    mine = run.scan("gap", ranks=[1], steps=[int(label)]).df()
    assert idle_ms == pytest.approx((mine["end_ns"] - mine["start_ns"]).sum() / 1e6, rel=1e-3)


@pytest.mark.browser
def test_a_figure_is_drawn(done: tuple[Path, dict[str, Any], str], browser: Any) -> None:
    folder, found, _ = done
    context = browser.new_context(offline=True)
    page = context.new_page()
    messages: list[str] = []
    page.on("pageerror", lambda error: messages.append(str(error)))
    for name in ("waterfall", "timeline"):
        found[name].write_html(folder / f"{name}.html", include_plotlyjs=True)
        page.goto((folder / f"{name}.html").as_uri())
        page.wait_for_selector(".main-svg")
        bars = page.locator(".barlayer .point path").count()
        assert bars == sum(len(trace.x) for trace in found[name].data)
    context.close()
    assert not messages
