"""The job's part of a report, on pipelines of which every nanosecond is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from chopper import pipeline
from chopper.reports import job as reported
from chopper.reports.page import Figure, Paragraph, Section, Table
from chopper.reports.run import page as page_of
from tests.known_causes.pipelines import Job, write


def section_of(job: Job, folder: Path) -> Section:
    found = reported.section(pipeline.attribute(write(job, folder / "job.csv")))
    assert found is not None
    return found


@pytest.fixture
def slow(tmp_path: Path) -> Section:
    """A job whose first worker takes twice as long."""
    return section_of(Job().with_longer(2, replica=0, stage=0), tmp_path)


def worst_of(section: Section) -> list[list[str]]:
    worst = next(block for block in section.blocks if isinstance(block, Table))
    return [[cell.text for cell in row] for row in worst.typed_rows()]


def test_a_slow_rank_is_named_alone_with_what_it_does_longer(slow: Section) -> None:
    # Its stage and its replica are slow by this rank only.
    [[name, _, evidence, command]] = worst_of(slow)
    assert name == "rank 0"
    assert evidence.endswith("takes 2.0× as long as the others of its stage")
    assert command.endswith("--fix rank=0")


def test_a_long_stage_is_named_without_its_ranks(tmp_path: Path) -> None:
    [[name, _, evidence, _]] = worst_of(section_of(Job().with_longer(2, stage=3), tmp_path))
    assert name == "stage 3"
    assert evidence.endswith("takes 2.0× as long as in other stages")


def test_a_slow_replica_is_named_without_its_ranks(tmp_path: Path) -> None:
    job = Job(replicas=3).with_longer(2, replica=1)
    names = [row[0] for row in worst_of(section_of(job, tmp_path))]
    assert names == ["replica 1"]


def test_ranks_that_are_alike_are_not_named(tmp_path: Path) -> None:
    even = section_of(Job(), tmp_path)
    assert any("takes 5 % longer" in b.text for b in even.blocks if isinstance(b, Paragraph))


def test_some_of_the_ranks_are_not_taken_for_the_job(tmp_path: Path) -> None:
    run = pipeline.attribute(write(Job(), tmp_path / "job.csv"), ranks=[0, 1])
    [reason] = next(s for s in page_of(run, "html").sections if s.id == "job").blocks
    assert isinstance(reason, Paragraph)
    assert "it needs all ranks and steps" in reason.text


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
