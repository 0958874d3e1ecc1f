"""Schedules: their bubbles beside the closed forms, and their order beside torch's own."""

from __future__ import annotations

import pytest

from chopper.analyzers.jobs.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
    SCHEDULES,
    Action,
    bubble_bound_ns,
    recognize,
)
from chopper.errors import UsageError
from tests.analyzers.jobs.make import run

SHAPES = [
    ("gpipe", 4, 8, 1),
    ("1f1b", 4, 8, 1),
    ("1f1b", 4, 2, 1),
    ("interleaved", 4, 8, 2),
    ("interleaved", 3, 9, 3),
    ("zb1p", 4, 8, 1),
    ("dualpipe", 4, 12, 1),
    ("dualpipe", 8, 20, 1),
]


@pytest.mark.parametrize(("name", "p", "m", "v"), SHAPES)
def test_each_micro_batch_passes_each_stage_once(name: str, p: int, m: int, v: int) -> None:
    actions = [action for order in SCHEDULES[name](p, m, v) for action in order]
    assert len(set(actions)) == len(actions)
    split = {(a.stage, a.micro_batch) for a in actions if a.kind == BACKWARD_INPUT}
    assert split == {(a.stage, a.micro_batch) for a in actions if a.kind == BACKWARD_WEIGHT}
    expected = {(stage, batch) for stage in range(p * v) for batch in range(m)}
    assert {(a.stage, a.micro_batch) for a in actions if a.kind == FORWARD} == expected
    backward = [(a.stage, a.micro_batch) for a in actions if a.kind in (BACKWARD, BACKWARD_INPUT)]
    assert sorted(backward) == sorted(expected)


@pytest.mark.parametrize(
    ("name", "p", "m", "v"), [shape for shape in SHAPES if shape[0] != "dualpipe"]
)
def test_equal_stages_idle_as_long_as_the_closed_form_says(
    name: str, p: int, m: int, v: int
) -> None:
    # F = I = W = 10 for each of a rank's stages, so F = 10 v and B = 20 v for all of them.
    time_ns = dict.fromkeys(COMPUTE, 10) | {BACKWARD: 20}
    order = SCHEDULES[name](p, m, v)
    times = run(order, lambda _, action: time_ns[action.kind])
    length = max(end for _, end in times.values())
    bound = bubble_bound_ns(name, p, v, forward_ns=10 * v, backward_ns=20 * v, weight_ns=10 * v)
    assert length - 30 * v * m == bound


def test_dualpipe_stays_within_its_closed_form() -> None:
    # Its forward and backward are run one after the other here: never longer than side by side.
    time_ns = dict.fromkeys(COMPUTE, 10) | {BACKWARD: 20}
    for p, m in ((4, 12), (8, 20)):
        times = run(SCHEDULES["dualpipe"](p, m, 1), lambda _, action: time_ns[action.kind])
        bound = bubble_bound_ns("dualpipe", p, 1, forward_ns=10, backward_ns=20, weight_ns=10)
        assert bound is not None
        assert 0 <= max(end for _, end in times.values()) - 30 * m <= bound


def test_closed_forms_are_the_published_ones() -> None:
    times = {"forward_ns": 10.0, "backward_ns": 22.0, "weight_ns": 9.0}
    assert bubble_bound_ns("1f1b", 4, 1, **times) == 3 * 32
    assert bubble_bound_ns("interleaved", 4, 2, **times) == 3 * 32 / 2
    assert bubble_bound_ns("zb1p", 4, 1, **times) == 3 * (32 - 18)
    assert bubble_bound_ns("dualpipe", 8, 1, **times) == 3 * (32 + 22 - 27)
    assert bubble_bound_ns("zb1p", 4, 1, forward_ns=10, backward_ns=20) is None


@pytest.mark.parametrize(("name", "p", "m", "v"), SHAPES)
def test_the_schedule_that_ran_is_recognized(name: str, p: int, m: int, v: int) -> None:
    ran = [[(a.kind, a.stage) for a in order] for order in SCHEDULES[name](p, m, v)]
    assert recognize(ran, 2 if name == "dualpipe" else v) == name
    assert recognize([order[::-1] for order in ran], v) is None


def test_zero_bubble_as_torch_runs_it_is_recognized() -> None:
    # Adjacent parts of a backward are run as one, and stage 0 has no input gradients.
    ran = [
        [(a.kind, a.stage) for a in order if (a.kind, a.stage) != (BACKWARD_INPUT, 0)]
        for order in SCHEDULES["zb1p"](2, 4, 2)
    ]
    assert recognize(ran, 2) == "zb1p"
    at = ran[1].index((BACKWARD_WEIGHT, 3))
    assert ran[1][at - 1] == (BACKWARD_INPUT, 3)
    ran[1][at - 1 : at + 1] = [(BACKWARD, 3)]
    assert recognize(ran, 2) == "zb1p"


@pytest.mark.parametrize(
    ("name", "p", "m", "v"),
    [("dualpipe", 3, 12, 1), ("dualpipe", 4, 6, 1), ("interleaved", 4, 9, 2), ("1f1b", 4, 8, 2)],
)
def test_a_shape_that_a_schedule_has_not_is_refused(name: str, p: int, m: int, v: int) -> None:
    with pytest.raises(UsageError):
        SCHEDULES[name](p, m, v)


@pytest.mark.parametrize(
    ("name", "class_name", "v"),
    [
        ("gpipe", "ScheduleGPipe", 1),
        ("1f1b", "Schedule1F1B", 1),
        ("gpipe", "ScheduleLoopedBFS", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 3),
        ("zb1p", "ScheduleInterleavedZeroBubble", 1),
        ("zb1p", "ScheduleInterleavedZeroBubble", 2),
    ],
)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 4)])
def test_orders_are_those_of_torch(name: str, class_name: str, v: int, p: int, m: int) -> None:
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = object.__new__(getattr(torch_schedules, class_name))
    rounds = max(1, m // p)
    attributes = {
        "pp_group_size": p,
        "n_local_stages": v,
        "_n_microbatches": m,
        "microbatches_per_round": m // rounds,
        "_num_stages": p * v,
        "_stages": [None] * v,
    }
    for key, value in attributes.items():
        setattr(schedule, key, value)
    if v == 1 and name != "zb1p":
        orders = schedule._get_pipeline_order()
    else:
        orders = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(p)}
    kinds = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD_INPUT, "W": BACKWARD_WEIGHT}
    theirs = [
        [
            Action(kinds[a.computation_type.value], a.stage_index, a.microbatch_index)
            for a in orders[rank]
            if a is not None and a.computation_type.value in kinds
        ]
        for rank in range(p)
    ]
    ours = SCHEDULES[name](p, m, v)
    if class_name == "Schedule1F1B":
        # Its listing numbers the last rank's forwards from 1; what it runs begins with 0.
        theirs = [[a._replace(micro_batch=0) for a in order] for order in theirs]
        ours = [[a._replace(micro_batch=0) for a in order] for order in ours]
    assert ours == theirs
