"""What a thread waited for a core is taken out of what it was doing, and nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper.analyzers.causes.attribute import RankResult, attribute_rank
from chopper.analyzers.causes.core_wait import awake, taken, wait_of_steps, waits_within
from chopper.analyzers.trace.rank_join import join_rank
from chopper.analyzers.trace.tables import RankTables
from chopper.tables import TABLES
from tests.analyzers.make import attributed, kernel, kernels, span, spans, steps, table


def readings(*rows: tuple[int | None, int], tid: int = 7) -> pa.Table:
    """(step, run delay) as they were read."""
    made: list[dict[str, Any]] = [
        {"time_ns": at, "span_ns": 0, "tid": tid, "step": step, "run_delay_ns": delay}
        for at, (step, delay) in enumerate(rows)
    ]
    return table("core_wait", made)


def waits(core_wait: pa.Table | None, *numbers: int) -> list[int]:
    found: list[int] = wait_of_steps(core_wait, np.array(numbers))[0].tolist()
    return found


def test_a_reading_of_another_thread_begins_anew() -> None:
    read = pa.concat_tables([readings((None, 0), (0, 50)), readings((1, 60), (2, 75), tid=8)])
    assert waits(read, 0, 1, 2) == [50, 0, 15]


def test_steps_counted_anew_count() -> None:
    read = readings((None, 0), (0, 5), (1, 9), (0, 100), (1, 107))
    assert waits(read, 1) == [7]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10**10), st.booleans()), min_size=1),
    st.lists(st.integers(0, 10**11), min_size=4, max_size=4),
)
def test_a_windows_pieces_hold_its_wait_and_no_more_than_they_have(
    pieces: list[tuple[int, int, bool]], wait: list[int]
) -> None:
    window, time, may = (np.array(column) for column in zip(*pieces, strict=True))
    found = taken(window, np.where(may, time, 0), np.array(wait))
    assert ((found >= 0) & (found <= time)).all()
    assert not found[~may].any()
    for at in range(4):
        here = (window == at) & may
        assert found[here].sum() == min(wait[at], time[here].sum())


HOST = spans(
    span(0, 1000, "ProfilerStep#0", "annotation"),
    span(1000, 2000, "ProfilerStep#1", "annotation"),
    span(100, 500, "aten::addmm"),
    span(1100, 2000, "aten::addmm"),
    span(600, 1000, "gloo:all_reduce", "annotation", tid=9),
)


def with_waits(core_wait: pa.Table | None, device: pa.Table | None = None) -> RankResult:
    return attributed(HOST, device, steps((0, 1000), (1000, 2000)), core_wait=core_wait)


def sums(result: RankResult) -> dict[tuple[int, str], int]:
    found: dict[tuple[int, str], int] = {}
    for row in result.piece.to_pylist():
        key = (row["step_index"], row["cause"])
        found[key] = found.get(key, 0) + row["time_ns"]
    return found


def test_computing_and_preparing_wait_and_communication_does_not() -> None:
    # Step 0: 400 ns of addmm, 200 of Python around it, 400 of a collective, which waits for no
    # core; a wait of 300 is half of each of the others.
    without = sums(with_waits(None))
    found = sums(with_waits(readings((None, 0), (0, 300), (1, 300))))
    assert found[0, "compute.core_wait"] == 200
    assert found[0, "idle.preparation.core_wait"] == 100
    assert found[0, "compute.no_peak"] == without[0, "compute.no_peak"] - 200
    assert {k: v for k, v in found.items() if k[0] == 1} == {
        k: v for k, v in without.items() if k[0] == 1
    }
    assert sum(found.values()) == sum(without.values()) == 2000


def test_who_sleeps_for_data_does_not_wait_for_a_core() -> None:
    """A step of 1000: 400 computing, 600 of data, of which the thread slept 450 and ran 50.

    It ran 350 and waited for a core for 200: 400 of computing and 150 of data share those.
    """
    host = spans(
        span(0, 1000, "ProfilerStep#0", "annotation"),
        span(0, 600, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "annotation"),
        span(600, 1000, "aten::addmm"),
    )
    rows = [
        {"time_ns": t, "span_ns": 0, "tid": 7, "step": s, "run_delay_ns": d, "run_ns": r}
        for t, s, d, r in ((0, None, 0, 0), (1000, 0, 200, 350))
    ]
    given = RankTables(
        rank=0,
        host_span=host,
        device_event=TABLES["device_event"].empty(),
        step=steps((0, 1000)),
        collective=TABLES["collective"].empty(),
        ceiling=None,
        no_peak_remedy="",
        devices_listed=False,
        core_wait=table("core_wait", rows),
    )
    found = sums(attribute_rank(join_rank(given)))
    preparing = found.get((0, "idle.preparation.core_wait"), 0)
    computing = found.get((0, "compute.core_wait"), 0)
    assert preparing + computing == 200
    assert abs(preparing - 200 * 150 / 550) <= 1
    assert found[0, "idle.preparation.data"] == 600 - preparing


def slept(samples: pa.Table | None) -> dict[tuple[int, str], int]:
    """A step of 1000: 300 computing, 500 in a callback that slept, 200 computing; waited 250.

    It ran 250 and slept 500, so all that it waited was in computing: by the samples 50 in the first
    part and 200 in the second.
    """
    host = spans(
        span(0, 1000, "ProfilerStep#0", "annotation"),
        span(0, 300, "aten::addmm"),
        span(800, 1000, "aten::mul"),
    )
    rows = [
        {"time_ns": t, "span_ns": 0, "tid": 7, "step": s, "run_delay_ns": d, "run_ns": r}
        for t, s, d, r in ((0, None, 0, 0), (1000, 0, 250, 250))
    ]
    waits = table("core_wait", rows)
    return sums(attributed(host, None, steps((0, 1000)), core_wait=waits, python_sample=samples))


def test_a_callback_that_sleeps_does_not_wait_for_a_core() -> None:
    found = slept(None)
    assert found[0, "compute.core_wait"] == 250
    assert found[0, "idle.preparation.python"] == 500
    assert sum(found.values()) == 1000


def test_samples_tell_when_a_thread_waited() -> None:
    """The count grew by 50 in the first 300, and by 200 in the last: dated back from its end."""
    rows = [
        {"time_ns": t, "tid": 1, "function": f, "is_data": False, "run_delay_ns": d}
        for t, f, d in (
            (0, "f", 7),
            (300, "f", 57),
            (800, "f", 57),
            (900, "f", 57),
            (1000, "f", 257),
        )
    ]
    samples = table("python_sample", rows)
    start, end = np.array([0, 300, 800, -5, 900]), np.array([300, 800, 1000, 300, 1000])
    assert waits_within(samples, start, end).tolist() == [50, 0, 200, -1, 100]
    assert waits_within(None, start, end).tolist() == [-1] * 5
    found = slept(samples)
    assert found[0, "compute.core_wait"] == 250
    assert found[0, "idle.preparation.python"] == 500


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10**10), st.booleans()), min_size=1),
    st.lists(st.integers(-1, 10**11), min_size=3, max_size=3),
)
def test_nobody_is_awake_for_longer_than_he_was_there(
    pieces: list[tuple[int, int, bool]], sleep: list[int]
) -> None:
    window, time, may = (np.array(column) for column in zip(*pieces, strict=True))
    found = awake(window, time, may, np.zeros(3), np.array(sleep))
    assert ((found >= 0) & (found <= time)).all()
    assert (found[~may] == time[~may]).all()
    for at in (i for i in range(3) if sleep[i] <= 0):
        assert (found[window == at] == time[window == at]).all()


def test_a_piece_that_only_waited_is_gone() -> None:
    found = sums(with_waits(readings((None, 0), (0, 10**6))))
    assert (0, "compute.no_peak") not in found
    assert found[0, "compute.core_wait"] == 400


@pytest.mark.parametrize("delay", [0, 300])
def test_beside_a_device_nothing_is_taken(delay: int) -> None:
    device = kernels(kernel(100, 500), kernel(1200, 1700))
    found = sums(with_waits(readings((None, 0), (0, delay), (1, delay)), device))
    assert not any(cause.endswith("core_wait") for _, cause in found)
