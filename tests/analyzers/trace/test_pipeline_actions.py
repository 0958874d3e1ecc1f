from __future__ import annotations

from typing import Any

import pytest

from chopper.analyzers.trace import names
from chopper.analyzers.trace.rank_join import JoinedRank
from chopper.tables import TABLES
from tests.analyzers.make import joined, kernel, kernels, launch, span, spans, steps, table

NODE = "autograd::engine::evaluate_function: MmBackward0"


def actions(rank: JoinedRank) -> list[tuple[Any, ...]]:
    """Stage, micro-batch and pass of each device event."""
    columns = ("stage_index", "micro_batch_index", "action")
    return [*zip(*(rank.event_link[name].to_pylist() for name in columns), strict=True)]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("PP:2F5", (2, 5, "forward")),
        ("PP:2B5", (2, 5, "backward")),
        ("3I0", (3, 0, "backward_input")),
        ("3W11", (3, 11, "backward_weight")),
        ("PP:1SEND_B4", (1, 4, "backward")),
        ("PP:0UNSHARD", (0, -1, None)),
        ("Forward 5", (-1, 5, "forward")),
        ("Backward 12", (-1, 12, "backward")),
        ("forward-compute", (-1, -1, "forward")),
        ("backward-recv", (-1, -1, "backward")),
        ("bwd_microstep", (-1, -1, "backward")),
        ("PipelineEngine._exec_forward_pass", (-1, -1, "forward")),
    ],
)
def test_names_of_pipeline_schedules_tell_stage_micro_batch_and_pass(
    name: str, told: tuple[Any, ...]
) -> None:
    assert names.is_pipeline_action(name)
    assert names.pipeline_action(name) == told


@pytest.mark.parametrize(
    "name",
    [
        *("forward", "backward", "forward_step", "Forward", "F5", "2F", "PP:2X5", "a2F5"),
        # Both passes at once: which of them an event is of, the name does not tell.
        *("forward-send-backward-recv", "PP:(0F1;1B0)OVERLAP_F_B"),
    ],
)
def test_other_ranges_are_no_actions(name: str) -> None:
    assert not names.is_pipeline_action(name)


def test_events_take_the_action_that_their_launch_lies_in() -> None:
    # A range of the user's within the action hides it from `annotation`, not from the pipeline.
    rank = joined(
        spans(
            span(0, 400, "ProfilerStep#3", "annotation"),
            span(10, 90, "PP:2F5", "annotation"),
            span(20, 60, "my region", "annotation"),
            launch(30, 1),
            launch(70, 2),
            launch(95, 3),
        ),
        kernels(*(kernel(100 * n, 100 * n + 50, correlation_id=n) for n in (1, 2, 3))),
        steps((0, 400), first=3),
    )
    assert actions(rank) == [(2, 5, "forward"), (2, 5, "forward"), (None, None, None)]
    assert rank.event_link["annotation"].to_pylist() == ["my region", "PP:2F5", None]


def test_kernels_of_the_autograd_thread_take_the_action_that_the_program_was_in() -> None:
    rank = joined(
        spans(
            span(0, 500, "ProfilerStep#3", "annotation"),
            span(10, 100, "PP:1B0", "annotation"),
            span(20, 90, NODE, tid=2),
            launch(30, 1, tid=2),
            # After the first action, before the second.
            span(105, 109, NODE, tid=2),
            launch(106, 2, tid=2),
            span(110, 200, "PP:1B1", "annotation"),
            span(120, 190, NODE, tid=2),
            launch(130, 3, tid=2),
            # A thread that copies batches is in no action.
            launch(140, 4, tid=3),
        ),
        kernels(*(kernel(100 * n, 100 * n + 50, correlation_id=n) for n in (1, 2, 3, 4))),
        steps((0, 500), first=3),
    )
    nothing = (None, None, None)
    assert actions(rank) == [(1, 0, "backward"), nothing, (1, 1, "backward"), nothing]


def test_an_operator_of_a_host_only_run_takes_the_action_around_it() -> None:
    rank = joined(
        spans(
            span(0, 100, "Forward 3", "annotation"),
            span(10, 90, "aten::mm"),
            span(200, 290, "aten::mm"),
        )
    )
    assert actions(rank) == [(None, 3, "forward"), (None, None, None)]


def test_what_the_file_says_comes_before_annotations_and_gives_the_phase() -> None:
    recorded = table(
        "pipeline_action",
        [
            {"event_row": 2, "stage_index": 1, "micro_batch_index": 7, "action": "backward_weight"},
            {"event_row": 0, "stage_index": 1, "action": None},
            {"event_row": 1, "stage_index": 1, "micro_batch_index": 7, "action": "forward"},
        ],
    )
    rank = joined(
        TABLES["host_span"].empty(),
        kernels(kernel(0, 10), kernel(10, 20), kernel(20, 30)),
        steps((0, 30)),
        pipeline_action=recorded,
    )
    assert actions(rank) == [(1, None, None), (1, 7, "forward"), (1, 7, "backward_weight")]
    assert rank.event_link["phase"].to_pylist() == ["other", "forward", "backward"]
