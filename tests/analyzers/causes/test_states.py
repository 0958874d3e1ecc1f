from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper.analyzers.causes.states import exclusive_states
from chopper.analyzers.trace.join import COMMUNICATION, COMPUTE, COPY
from chopper.analyzers.trace.windows import Windows

_PRIORITY = [COMPUTE, COMMUNICATION, COPY]


def windows(*bounds: int) -> Windows:
    return Windows(np.array(bounds), np.arange(len(bounds) - 1), 0, 0)


def sweep(events: list[tuple[int, int, int]], *bounds: int):
    events = sorted(events, key=lambda e: (e[0], e[0] - e[1]))
    start = np.array([e[0] for e in events], dtype=np.int64)
    end = np.array([e[1] for e in events], dtype=np.int64)
    klass = np.array([e[2] for e in events], dtype=np.int64)
    return exclusive_states(start, end, klass, windows(*bounds)), klass


def test_priority_and_sharing_by_hand() -> None:
    # compute [0,10]; communication [5,30] shows only in [10,30]; two copies share [30,41]
    # after it: 11 ns do not halve, one of them gets the odd one; idle [41,50].
    states, _ = sweep(
        [(0, 10, COMPUTE), (5, 30, COMMUNICATION), (20, 41, COPY), (25, 41, COPY)], 0, 50
    )
    shares = dict(zip(states.event_row.tolist(), states.share_ns.tolist(), strict=True))
    assert shares[0] == 10
    assert shares[1] == 20
    assert sorted((shares[2], shares[3])) == [5, 6]
    assert states.gap_start_ns.tolist() == [41]
    assert states.gap_end_ns.tolist() == [50]


_events = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 25), st.sampled_from(_PRIORITY)).map(
        lambda t: (t[0], t[0] + t[1], t[2])
    ),
    max_size=25,
)


def brute_force(
    events: list[tuple[int, int, int]], low: int, high: int
) -> tuple[dict[int, int], int]:
    """Exclusive time per class and idle time, nanosecond by nanosecond."""
    times = dict.fromkeys(_PRIORITY, 0)
    idle = 0
    for t in range(low, high):
        running = {k for a, b, k in events if a <= t < b}
        for k in _PRIORITY:
            if k in running:
                times[k] += 1
                break
        else:
            idle += 1
    return times, idle


@given(_events, st.lists(st.integers(0, 80), min_size=2, max_size=5, unique=True))
def test_states_equal_brute_force_in_every_window(
    events: list[tuple[int, int, int]], bounds: list[int]
) -> None:
    bounds = sorted(bounds)
    states, klass = sweep(events, *bounds)
    assert (states.share_ns >= 0).all()
    for w, (low, high) in enumerate(itertools.pairwise(bounds)):
        times, idle = brute_force(events, low, high)
        mine = states.window == w
        for k in _PRIORITY:
            of_class = klass[states.event_row] == k
            assert states.share_ns[mine & of_class].sum() == times[k]
        gaps = states.gap_window == w
        assert (states.gap_end_ns - states.gap_start_ns)[gaps].sum() == idle


@pytest.mark.parametrize(
    "events",
    [
        [(10, 10, COMPUTE)],
        [(0, 0, COMPUTE), (50, 50, COMPUTE)],
        [(5, 20, COMPUTE), (5, 20, COMPUTE), (5, 20, COPY)],
        [(5, 20, COMMUNICATION), (5, 5, COMPUTE), (5, 30, COPY)],
        [(0, 50, COPY), (10, 10, COMPUTE), (20, 30, COMMUNICATION), (30, 30, COMMUNICATION)],
        [(7, 8, COMPUTE), (7, 8, COMMUNICATION), (8, 9, COPY), (9, 9, COMPUTE)],
    ],
    ids=[
        "a point",
        "points at both ends",
        "same interval",
        "same start",
        "points inside",
        "touching",
    ],
)
def test_points_and_equal_starts(events: list[tuple[int, int, int]]) -> None:
    states, klass = sweep(events, 0, 50)
    times, idle = brute_force(events, 0, 50)
    for k in _PRIORITY:
        assert states.share_ns[klass[states.event_row] == k].sum() == times[k]
    assert (states.gap_end_ns - states.gap_start_ns).sum() == idle
    assert sorted(states.event_row.tolist()) == list(range(len(events)))
