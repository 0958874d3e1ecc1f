"""The job's part of a report, on pipelines of which every nanosecond is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from chopper import pipeline
from chopper.reports import job as reported
from chopper.reports.page import Figure, Paragraph, Section, Table
from tests.known_causes.pipelines import Job, write


def section_of(job: Job, folder: Path) -> Section:
    found = reported.section(pipeline.attribute(write(job, folder / "job.csv")))
    assert found is not None
    return found


@pytest.fixture
def slow(tmp_path: Path) -> Section:
    """A job whose first worker takes twice as long."""
    return section_of(Job().with_longer(2, replica=0, stage=0), tmp_path)


def test_the_slowest_part_comes_first_with_what_it_does_longer(slow: Section) -> None:
    worst = next(block for block in slow.blocks if isinstance(block, Table))
    names = [str(row[0]) for row in worst.rows]
    assert "rank 0" in names[:2]
    row = worst.rows[names.index("rank 0")]
    assert "2.0× as long as elsewhere" in str(row[2])
    assert "--fix rank=0" in str(row[3])


def test_the_layout_is_stages_by_replicas(slow: Section) -> None:
    grid = next(b for b in slow.blocks if isinstance(b, Figure) and b.name == "job-layout")
    [heat] = grid.figure["data"]
    assert (len(heat["y"]), len(heat["x"])) == (4, 2)
    assert heat["z"][0][0] == max(max(row) for row in heat["z"])
    assert heat["z"][0][0] > 1.3


def test_the_schedule_stands_beside_the_ideal_one(slow: Section) -> None:
    chart = next(b for b in slow.blocks if isinstance(b, Figure) and b.name == "job-schedule")
    bars = {bar["name"]: bar for bar in chart.figure["data"]}
    assert {*bars} == {"forward", "backward"}
    ends: dict[str, float] = {}
    for bar in bars.values():
        assert len(bar["x"]) == 2 * 4 * 8  # as it ran and ideal, stages, micro-batches
        for stage, base, took in zip(bar["y"], bar["base"], bar["x"], strict=True):
            ends[stage] = max(ends.get(stage, 0.0), base + took)
    # The slow worker's passes end later than in the ideal job.
    assert ends["stage 0"] > 1.3 * ends["stage 0, ideal"]


def test_the_bound_of_the_schedule_is_said(slow: Section) -> None:
    text = " ".join(str(b.text) for b in slow.blocks if isinstance(b, Paragraph))
    assert "1f1b (4 stages, 8 micro-batches)" in text
    assert "bound of the schedule" in text
