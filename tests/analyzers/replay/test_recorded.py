"""CUDA's synchronization records: what was waited for, where the trace says it."""

from __future__ import annotations

from typing import Any

import numpy as np

from chopper.analyzers.replay.graph import EVENT, SYNCHRONIZE
from chopper.analyzers.replay.scenario import Base, Scenario
from chopper.analyzers.replay.waits import recorded_waits
from tests.analyzers import make
from tests.analyzers.replay.make import base, call, joined, tables


def record(
    start: int, name: str, correlation: int, *, recorded_by: int | None = None, **streams: Any
) -> dict[str, Any]:
    return {
        "start_ns": start,
        "dur_ns": 1,
        "name": name,
        "device_id": 0,
        "correlation_id": correlation,
        "event_correlation_id": recorded_by,
        **streams,
    }


def two_kernels_and_a_wait(*rows: dict[str, Any]) -> dict[str, Any]:
    """Stream 7 runs a kernel, its event is recorded, then a long one; stream 9 waits, runs one."""
    given = tables(
        [
            make.span(0, 1000, "loop", "python"),
            call(0, 5, 1),
            call(10, 12, 2, "cudaEventRecord"),
            call(20, 25, 3),
            call(30, 32, 4, "cudaStreamWaitEvent"),
            call(40, 45, 5),
        ],
        [
            make.kernel(10, 110, correlation_id=1),
            make.kernel(120, 160, correlation_id=3),
            make.kernel(170, 270, stream=9, correlation_id=5),
        ],
        make.steps((0, 1000)),
    )
    return given | {"synchronization": make.table("synchronization", list(rows))}


WAITS = record(30, "Stream Wait Event", 4, recorded_by=2, stream_id=9, event_stream_id=7)


def edges(found: Base, kind: int) -> list[tuple[int, int]]:
    """(source, target) of a kind, in observed time."""
    graph = found.graph
    at = found.edges(kind)
    return [(int(graph.time_ns[graph.source[e]]), int(graph.time_ns[found.target[e]])) for e in at]


def test_a_stream_waits_for_what_the_record_names() -> None:
    assert edges(base(two_kernels_and_a_wait(WAITS)), EVENT) == [(110, 170)]


def test_without_a_record_it_is_the_last_one_launched() -> None:
    assert edges(base(two_kernels_and_a_wait()), EVENT) == [(160, 170)]


def test_what_was_not_waited_for_may_take_longer() -> None:
    # Stream 9 follows the first kernel, so a longer second one does not hold it up.
    scenario = Scenario(base(two_kernels_and_a_wait(WAITS)))
    scenario.scale(0, np.array([1.0, 5.0, 1.0]))
    outcome = scenario.solve()
    node = scenario.ranks[0]
    assert outcome.time_ns[node.start[2]] == 170


def test_an_event_of_unknown_origin_tells_nothing() -> None:
    unknown = record(30, "Stream Wait Event", 4, stream_id=9)
    assert edges(base(two_kernels_and_a_wait(unknown)), EVENT) == [(160, 170)]


def synchronized(*rows: dict[str, Any]) -> dict[str, Any]:
    """The host waits from 50 to 130 for an event of stream 7, while stream 9 ends at 125."""
    given = tables(
        [
            make.span(0, 1000, "loop", "python"),
            call(0, 5, 1),
            call(10, 12, 2, "cudaEventRecord"),
            call(20, 25, 3),
            call(50, 130, 4, "cudaEventSynchronize"),
            call(140, 145, 5),
        ],
        [
            make.kernel(10, 120, correlation_id=1),
            make.kernel(30, 125, stream=9, correlation_id=3),
            make.kernel(150, 250, correlation_id=5),
        ],
        make.steps((0, 1000)),
    )
    return given | {"synchronization": make.table("synchronization", list(rows))}


def test_the_host_waits_for_what_the_record_names() -> None:
    told = record(50, "Event Sync", 4, recorded_by=2, event_stream_id=7)
    assert edges(base(synchronized(told)), SYNCHRONIZE) == [(120, 130)]
    # Without it, what ended last before the call returned.
    assert edges(base(synchronized()), SYNCHRONIZE) == [(125, 130)]


def test_a_stream_is_waited_for_up_to_the_call() -> None:
    found = recorded_waits(
        joined(synchronized(record(50, "Stream Sync", 4, stream_id=7))).links(),
        make.table("synchronization", [record(50, "Stream Sync", 4, stream_id=7)]),
    )
    assert found.awaited.tolist() == [0]


def test_calls_that_the_trace_lost_tell_nothing() -> None:
    lost = record(30, "Stream Wait Event", 99, recorded_by=98, stream_id=9, event_stream_id=7)
    assert edges(base(two_kernels_and_a_wait(lost)), EVENT) == [(160, 170)]
