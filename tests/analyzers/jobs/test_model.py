"""The dependency model and the slowdown of jobs whose truth is known by hand."""

from __future__ import annotations

import numpy as np
import pytest

from chopper.analyzers.jobs.model import Job, job_of
from chopper.analyzers.jobs.rescheduled import Rescheduled, Shape
from chopper.analyzers.jobs.schedules import BACKWARD, FORWARD, SCHEDULES, Action
from chopper.analyzers.jobs.whatif import JobSlowdown, fixed_ns, slowdown_of
from chopper.errors import InputError, UsageError
from tests.analyzers.jobs.make import MS, Duration, Row, operations, recorded

F, B = 10 * MS, 20 * MS
P, M = 4, 8
TAIL = 3 * 5 * MS
"""Reduction, clipping and optimizer of make.recorded."""


def balanced(step: int, replica: int, rank: int, action: Action) -> int:
    return {FORWARD: F, BACKWARD: B}.get(action.kind, F)


def slowed(times: int, over: int = 1) -> Duration:
    """Replica 1's stage 2 takes times / over as long."""

    def duration(step: int, replica: int, rank: int, action: Action) -> int:
        time_ns = balanced(step, replica, rank, action)
        return time_ns * times // over if (replica, rank) == (1, 2) else time_ns

    return duration


def modelled(duration: Duration, name: str = "1f1b", v: int = 1, **how: object) -> Job:
    rows = recorded(SCHEDULES[name](P, M, v), duration, **how)  # type: ignore[arg-type]
    return job_of(operations(rows, P))


def slowdown(job: Job) -> JobSlowdown:
    found = slowdown_of(job)
    assert isinstance(found, JobSlowdown), found
    return found


@pytest.mark.parametrize(
    ("name", "v"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb1p", 1)]
)
@pytest.mark.parametrize("with_transfers", [True, False])
def test_a_balanced_job_is_its_ideal(name: str, v: int, with_transfers: bool) -> None:
    job = modelled(balanced, name, v, replicas=2, with_transfers=with_transfers)
    found = slowdown(job)
    assert job.error_ratio == 0
    assert found.slowdown_ratio == 1
    assert found.bubble is not None
    assert found.bubble.schedule == name
    assert found.bubble.recorded_ns == found.bubble.ideal_ns == found.bubble.bound_ns
    assert found.worst_workers_share_ratio is found.last_stage_share_ratio is None
    assert "ideal" in found.reasons["last_stage_share_ratio"]


def test_the_bubble_of_1f1b_is_its_bound() -> None:
    found = slowdown(modelled(balanced))
    assert found.bubble is not None
    assert found.bubble.recorded_ns == (P - 1) * (F + B)
    assert found.recorded_step_ns == (M + P - 1) * (F + B) + TAIL


def test_one_slow_worker_leads_and_takes_the_whole_excess() -> None:
    found = slowdown(modelled(slowed(2), replicas=2))
    # Stage 2, twice as slow, works for 2 m (F + B), after two forwards and before two backwards of
    # the others; once it waits for the last stage, F + B after its first forward, less its second,
    # 2 F. One of eight workers at 2 makes a mean of 9/8.
    simulated = 2 * M * (F + B) + 2 * F + 2 * B + (F + B - 2 * F) + TAIL
    ideal = (M + P - 1) * (F + B) * 9 / 8 + TAIL
    assert found.simulated_step_ns == simulated
    assert found.slowdown_ratio == pytest.approx(simulated / ideal)
    assert found.worst_workers == [6]
    assert found.workers[0].name == "rank 6"
    assert found.stages[0].name == "stage 2"
    assert found.replicas[0].name == "replica 1"
    fixed = modelled(slowed(9, 8), replicas=2).recorded_ns.mean()
    share = (simulated - fixed) / (simulated - ideal)
    assert found.worst_workers_share_ratio == pytest.approx(share)
    assert abs(found.last_stage_share_ratio or 0) < 0.1


def test_a_long_last_stage_takes_the_excess() -> None:
    def long(step: int, replica: int, rank: int, action: Action) -> int:
        return balanced(step, replica, rank, action) * (2 if rank == P - 1 else 1)

    found = slowdown(modelled(long, replicas=2))
    assert found.stages[0].name == f"stage {P - 1}"
    assert found.dimensions[0].name == "pipeline"
    assert found.last_stage_share_ratio is not None
    assert found.last_stage_share_ratio > 1


def test_uneven_micro_batches_are_told_from_slow_workers() -> None:
    def uneven(step: int, replica: int, rank: int, action: Action) -> int:
        odd = (action.micro_batch + step + replica) % 2
        return balanced(step, replica, rank, action) * (3 if odd else 1) // 2

    job = modelled(uneven, replicas=2)
    found = slowdown(job)
    assert found.slowdown_ratio > 1.1
    assert found.dimensions[0].name == "micro-batch"
    even = job.simulated_ns([fixed_ns(job, [("sequence-lengths", "")])])
    np.testing.assert_allclose(even, (M + P - 1) * (F + B) + TAIL)


def test_even_sequences_leave_a_slow_worker_slow() -> None:
    job = modelled(slowed(2), replicas=2)
    even = job.simulated_ns([fixed_ns(job, [("sequence-lengths", "")])])
    np.testing.assert_allclose(even[0], job.simulated_ns([job.own_ns])[0])


@pytest.mark.parametrize(
    "part",
    [("stage", 2), ("stages", ""), ("rank", 6), ("op", "backward"), ("replica", 1), ("all", "")],
)
def test_fixing_the_cause_takes_the_excess(part: tuple[str, str | int]) -> None:
    job = modelled(slowed(2), replicas=2)
    before, after = job.simulated_ns([job.own_ns, fixed_ns(job, [part])]).mean(axis=1)
    assert after < before
    if part[0] == "all":
        assert after == pytest.approx(slowdown(job).ideal_step_ns)


def test_what_a_job_does_not_have_is_not_fixed() -> None:
    job = modelled(balanced)
    with pytest.raises(UsageError, match=r"stage=9.*has 0, 1, 2"):
        fixed_ns(job, [("stage", 9)])


def test_launch_delays_are_replayed_and_left_out_of_the_slowdown() -> None:
    late = 40 * MS
    rows = [
        row._replace(start_ns=row.start_ns + late, end_ns=row.end_ns + late)
        if row.role == "other"
        else row
        for row in recorded(SCHEDULES["1f1b"](P, M, 1), balanced)
    ]
    found = slowdown(job_of(operations(rows, P)))
    assert found.replay_error_ratio == 0
    assert found.recorded_step_ns - found.simulated_step_ns == late
    assert found.slowdown_ratio == 1


def test_steps_that_ran_other_operations_are_left_out() -> None:
    rows = recorded(SCHEDULES["1f1b"](P, M, 1), balanced, steps=(3, 4, 9, 11))
    lost = next(row for row in rows if row.step == 9 and row.role == BACKWARD)
    job = job_of(operations([row for row in rows if row is not lost], P))
    assert job.steps.tolist() == [3, 4, 11]
    assert "1 step of 4 (9)" in job.notes[0]


def test_missing_receives_are_refused_by_name() -> None:
    rows = recorded(SCHEDULES["1f1b"](P, M, 1), balanced)
    lost = [row for row in rows if row.role != "backward_recv" or row.micro_batch != 3]
    with pytest.raises(InputError, match=r"rank \d \(stage \d\) has 7 backward-recv for 8"):
        job_of(operations(lost, P))


def test_one_stage_has_no_last_stage_and_no_bubble() -> None:
    def slow(step: int, replica: int, rank: int, action: Action) -> int:
        return balanced(step, replica, rank, action) * (2 if replica == 1 else 1)

    rows = recorded(SCHEDULES["1f1b"](1, M, 1), slow, replicas=4)
    found = slowdown(job_of(operations(rows, 1)))
    assert found.bubble is None
    assert found.worst_workers == [1]
    assert found.worst_workers_share_ratio == pytest.approx(1, abs=1e-6)
    assert found.last_stage_share_ratio is None
    assert "one pipeline stage" in found.reasons["last_stage_share_ratio"]


def test_a_job_that_is_all_waiting_is_withheld() -> None:
    rows = [
        Row(*row[:6], row.start_ns * 9, row.start_ns * 9 + row.end_ns - row.start_ns)
        for row in recorded(SCHEDULES["1f1b"](1, M, 1), balanced, with_transfers=False)
    ]
    found = slowdown_of(job_of(operations(rows, 1)))
    assert isinstance(found, str)
    assert "not recorded" in found


def test_other_shapes_take_what_their_closed_forms_say() -> None:
    job = modelled(balanced, replicas=2)
    pipeline = Rescheduled(job, job.own_ns)
    assert pipeline.shape == Shape("1f1b", 1, M)

    def mean_ns(*shape: object) -> float:
        return float(pipeline.step_ns(Shape(*shape)).mean())  # type: ignore[arg-type]

    whole = M * (F + B) + TAIL
    assert mean_ns("1f1b", 1, M) == whole + (P - 1) * (F + B)
    assert mean_ns("gpipe", 1, M) == whole + (P - 1) * (F + B)
    assert mean_ns("interleaved", 2, M) == whole + (P - 1) * (F + B) / 2
    assert mean_ns("zb1p", 1, M) == whole + (P - 1) * (F + B - B)
    assert mean_ns("1f1b", 1, 2 * M) == whole + (M + P - 1) * (F + B)
    assert mean_ns("dualpipe", 1, M) < mean_ns("1f1b", 1, M)


def test_a_recorded_interleaved_job_goes_back_to_1f1b() -> None:
    job = modelled(lambda *where: balanced(*where) // 2, "interleaved", 2)
    pipeline = Rescheduled(job, job.own_ns)
    assert pipeline.step_ns(pipeline.shape).mean() == job.recorded_ns.mean()
    back = pipeline.step_ns(Shape("1f1b", 1, M)).mean()
    assert back == (M + P - 1) * (F + B) + TAIL
