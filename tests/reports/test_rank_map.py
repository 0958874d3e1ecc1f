"""The heat map of a run's ranks by its steps."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chopper import pipeline
from chopper.analyzers.coordinates import with_coordinates
from chopper.reports.figures import rank_map
from chopper.reports.run import page as page_of
from chopper.reports.story import Story
from chopper.reports.to_html import render
from tests.known_causes.model.job import simulate
from tests.known_causes.model.plan import Plan
from tests.known_causes.model.writer import write
from tests.reports.test_browser import browser

__all__ = ["browser"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("ranks") / "run"
    write(simulate(Plan(ranks=4, hybrid=True)), folder)
    return pipeline.attribute(folder)


def _with(run: Any, groups: list[dict[str, Any]]) -> Any:
    manifest = run.recording.manifest
    parts = [
        msgspec.structs.replace(part, process_groups=groups, hostname=f"node{part.rank // 2}")
        for part in manifest.ranks
    ]
    recording = replace(run.recording, manifest=msgspec.structs.replace(manifest, ranks=parts))
    return replace(run, recording=recording)


def _group(description: str, *ranks: int) -> dict[str, Any]:
    return {"pg_name": str(ranks), "pg_desc": description, "ranks": list(ranks)}


def test_cells_are_the_times_of_each_rank_and_step(run: Any) -> None:
    made = rank_map(Story(run))
    steps = made["views"]["Step"]["z"]
    assert len(steps) == 4
    by_rank = {r.rank: r.observed_ns for r in run.ranks}
    for rank, row in enumerate(steps):
        assert sum(row) * 1e6 == pytest.approx(by_rank[rank], rel=1e-3)
    assert made["rows"] == {
        "rank": [f"node-{i} · {i}" for i in range(4)],
        "groups of 2 ranks, 1 apart": ["ranks 0-1", "ranks 0-1", "ranks 2-3", "ranks 2-3"],
        "groups of 2 ranks, 2 apart": ["ranks 0,2", "ranks 1,3", "ranks 0,2", "ranks 1,3"],
    }


def test_the_clock_has_its_own_unit(run: Any) -> None:
    story = Story(run)
    clock = rank_map(story)["views"]["Clock"]
    means = story.table("clocks").to_pylist()
    first = next(m for m in means if m["level"] == "step" and m["rank"] == 2)
    assert clock["z"][2][0] == pytest.approx(first["clock_mean_hz"] / 1e9, rel=1e-3)
    assert clock["colorbar"]["title"]["text"] == "GHz"


def test_ranks_are_told_by_host_and_parallel_dimension(run: Any) -> None:
    groups = [
        _group("default_pg", 0, 1, 2, 3),
        _group("mesh_tp", 0, 1),
        _group("mesh_tp", 2, 3),
        _group("undefined", 0, 2),
        _group("undefined", 1, 3),
        # These overlap, or leave ranks out: no dimension.
        _group("twice", 0, 1),
        _group("twice", 1, 2),
        _group("few", 0, 1),
    ]
    rows = rank_map(Story(_with(run, groups)))["rows"]
    assert list(rows) == ["rank", "mesh_tp", "groups of 2 ranks, 2 apart", "host"]
    assert rows["mesh_tp"] == ["ranks 0-1", "ranks 0-1", "ranks 2-3", "ranks 2-3"]
    assert rows["groups of 2 ranks, 2 apart"] == ["ranks 0,2", "ranks 1,3"] * 2
    assert rows["host"] == ["node0", "node0", "node1", "node1"]


def test_ranks_are_ordered_and_averaged_by_the_places_that_are_known(run: Any) -> None:
    groups = [
        _group("mesh_tp", 0, 2),
        _group("mesh_tp", 1, 3),
        _group("x", 0, 1),
        _group("x", 2, 3),
    ]
    shown = _with(run, groups)
    manifest = with_coordinates(shown.recording.manifest, "pp=2,tp=2")
    laid = replace(shown, recording=replace(shown.recording, manifest=manifest))
    made = rank_map(Story(laid))
    rows = made["rows"]
    assert list(rows) == ["rank", "pipeline", "tensor", "x", "host"]
    assert rows["rank"] == [
        "node0 · 0 (pipeline 0, tensor 0)",
        "node1 · 2 (pipeline 0, tensor 1)",
        "node0 · 1 (pipeline 1, tensor 0)",
        "node1 · 3 (pipeline 1, tensor 1)",
    ]
    assert rows["pipeline"] == ["pipeline 0", "pipeline 0", "pipeline 1", "pipeline 1"]
    plain = rank_map(Story(shown))["views"]["Step"]["z"]
    assert made["views"]["Step"]["z"] == [plain[rank] for rank in (0, 2, 1, 3)]


@pytest.mark.browser
def test_rows_are_means_of_their_ranks(browser: Any, run: Any, tmp_path: Path) -> None:
    shown = _with(run, [_group("mesh_tp", 0, 1), _group("mesh_tp", 2, 3)])
    file = tmp_path / "report.html"
    file.write_text(render(page_of(shown, "html")), encoding="utf-8")
    page = browser.new_page()
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready=all]")
    page.select_option("#ranks-measure", "Step")
    page.select_option("#ranks-rows", "mesh_tp")
    drawn = page.evaluate(
        "(({ y, z }) => ({ y: [...y], z }))(document.querySelector('#fig-ranks').data[0])"
    )
    each = rank_map(Story(shown))["views"]["Step"]["z"]
    assert drawn["y"] == ["ranks 0-1", "ranks 2-3"]
    for row, pair in zip(drawn["z"], (each[:2], each[2:]), strict=True):
        assert row == pytest.approx([statistics.mean(step) for step in zip(*pair, strict=True)])
    page.close()
