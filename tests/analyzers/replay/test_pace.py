"""The host's pace without tracing, and what a replay at that pace answers."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

import chopper
from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.replay.replay import Replay, host_pace
from chopper.analyzers.replay.whatif_options import changes_of
from chopper.cli import cli
from chopper.reports import story as stories
from chopper.reports.verdict import verdict
from tests.golden.own import OWN

LEAD = OWN / "h100-lead"
MEASURED_WITHOUT_NS = 9.1e6
"""Median step of `lead.py RUN 0`, twice, in the same minutes on the same H100."""


@pytest.fixture(scope="module")
def lead() -> Attribution:
    return pipeline.attribute(LEAD)


def test_a_replay_without_tracing_takes_as_long_as_the_steps_without_a_trace(
    lead: Attribution,
) -> None:
    replay = Replay(lead)
    untraced = lead.step_time().untraced
    assert untraced is not None
    found = chopper.whatif(lead)
    assert found.predicted_step_ns == found.observed_step_ns
    assert found.observed_step_ns == pytest.approx(untraced.value_ns, rel=0.02)
    assert 0.4 < replay.pace < 0.7
    assert found.to_dict()["host_pace_ratio"] == replay.pace
    # The traced steps were 2.4 ms longer, because the host was behind.
    traced_ns = chopper.whatif(lead).observed.step_time().traced_mean_ns
    assert traced_ns == pytest.approx(19.3e6, rel=0.01)


def test_what_the_device_has_too_much_of_gives_back_what_was_measured(
    lead: Attribution,
) -> None:
    found = chopper.whatif(lead, without="aten::mul_")
    assert found.predicted_step_ns == pytest.approx(MEASURED_WITHOUT_NS, rel=0.15)
    causes = {c.id: c.time_ns for c in found.unchanged.causes()}
    windows = found.unchanged.windows.num_rows
    assert sum(v for c, v in causes.items() if "." not in c) / windows == pytest.approx(
        found.observed_step_ns, rel=0.01
    )
    # At the pace of the traced steps the host would hide most of it.
    slow = Replay(lead)
    slow.pace = 1.0
    steps = slow.predict(changes_of(without=["aten::mul_"])).steps.values()
    before, after = (sum(s[i] for s in steps) / 5 for i in (0, 1))
    assert before - after < 0.6 * (16.8e6 - MEASURED_WITHOUT_NS)


def test_causes_of_an_untraced_step_keep_the_work_of_the_device(lead: Attribution) -> None:
    story = stories.Story(lead)
    assert story.idle_scale is not None
    assert story.scale is not None
    times = {c.id: c for c in lead.causes() if "." not in c.id}
    assert story.untraced_ns(times["compute"]) == times["compute"].time_ns
    whole = sum(map(story.untraced_ns, times.values())) / story.windows
    leaves = sum(map(story.untraced_ns, lead.leaves())) / story.windows
    assert whole == pytest.approx(leaves)
    assert whole == pytest.approx(story.observed_per_window_ns * story.scale)
    shown = CliRunner().invoke(cli, ["analyze", str(LEAD)])
    assert "Untraced" in shown.output
    predicted = CliRunner().invoke(cli, ["whatif", str(LEAD)]).output
    assert "The host's work is taken to last" in " ".join(predicted.split())
    assert "Launch-bound" not in shown.output
    first = verdict(story, "not replayed").largest[0]
    row = next(c for c in lead.causes() if c.id == first.cause)
    assert (round(first.time_ns), first.unit) == (
        round(row.time_ns / story.windows),
        "untraced step",
    )
    assert first.share_ratio == pytest.approx((row.share_ratio or 0) / story.scale)


def test_a_lower_clock_lengthens_the_steps_without_a_trace(lead: Attribution) -> None:
    """The traced host hides that the device takes longer."""
    found = chopper.whatif(lead, clock="1500MHz")
    assert found.pace == chopper.whatif(lead).pace < 1
    assert found.predicted_step_ns > 1.01 * found.observed_step_ns
    slow = Replay(lead)
    slow.pace = 1.0
    traced = pipeline.whatif(slow.run, changes_of(clock="1500MHz"), lambda: slow)
    assert traced.predicted_step_ns == pytest.approx(traced.observed_step_ns, rel=0.001)


@pytest.mark.parametrize("change", [{"fix": "compute.clock"}, {"clock": "reference"}])
def test_nothing_of_a_clock_is_left_where_it_is_the_reference(change: dict[str, Any]) -> None:
    found = chopper.whatif(OWN / "dvfs_random", **change)
    times = {c.id: c.time_ns for c in found.attribution.causes()}
    assert times["compute.efficiency"] > 0
    assert not times.get("compute.clock")
    assert {c.id: c.time_ns for c in found.unchanged.causes()}["compute.clock"] > 0


def test_a_run_on_the_host_has_no_pace() -> None:
    replay = Replay(pipeline.attribute(OWN / "loading"))
    assert replay.pace == 1
    assert replay.untraced is replay.unmodified


DEVICE, HOST = 10e6, 20e6


def step(pace: float, alone: bool) -> float:
    """A host that launches without waiting, and a device: the slower of both decides."""
    return HOST * pace if alone else max(DEVICE, HOST * pace)


@pytest.mark.parametrize(
    ("untraced", "drained", "low", "high"),
    [
        # The host decides with and without a trace.
        (15e6, None, 0.75, 0.77),
        # The device decides: the host is at most as slow as it, or as a step without one.
        (10e6, None, 0.50, 0.52),
        (10e6, 6e6, 0.29, 0.31),
        # A drained step cannot make the steps shorter than they were.
        (15e6, 6e6, 0.73, 0.77),
        # As quick with a trace as without.
        (20e6, None, 1.0, 1.0),
        # Not even a host without work explains such a step.
        (6e6, None, 1.0, 1.0),
        (None, None, 1.0, 1.0),
    ],
)
def test_pace(untraced: float | None, drained: float | None, low: float, high: float) -> None:
    assert low <= host_pace(step, untraced, drained) <= high


def test_a_step_after_a_trace_whose_data_were_ready_tells_no_pace() -> None:
    def waiting(pace: float, alone: bool) -> float:
        return 12e6 + step(pace, alone) if alone else max(100e6, 12e6 + HOST * pace)

    assert host_pace(waiting, None, 8e6) == 1.0
    assert 0.29 <= host_pace(waiting, None, 18e6) <= 0.31


def test_a_host_that_decides_the_steps_is_no_faster_for_a_quick_one() -> None:
    assert host_pace(step, None, 15e6) == 1.0
