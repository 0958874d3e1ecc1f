from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper.analyzers.trace.columns import innermost, spread, union

_intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda t: (t[0], t[0] + t[1])),
    max_size=12,
)


def _arrays(intervals: list[tuple[int, int]], shift: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.array([a + shift for a, _ in intervals], dtype=np.int64),
        np.array([b + shift for _, b in intervals], dtype=np.int64),
    )


@given(_intervals, _intervals, st.integers(0, 2 * 10**18))
def test_a_union_inside_intervals_equals_counting_nanoseconds(
    parts: list[tuple[int, int]], asked: list[tuple[int, int]], shift: int
) -> None:
    covered = {t for a, b in parts for t in range(a, b)}
    found = union(*_arrays(parts, shift)).within(*_arrays(asked, shift))
    assert found.tolist() == [sum(t in covered for t in range(a, b)) for a, b in asked]


@given(_intervals, st.lists(st.integers(0, 90), min_size=1, max_size=5), st.integers(0, 2 * 10**18))
def test_amounts_spread_evenly(parts: list[tuple[int, int]], times: list[int], shift: int) -> None:
    parts = [(a, max(b, a + 1)) for a, b in parts]
    start, end = _arrays(parts, shift)
    amount_until = spread(start, end, np.full(len(parts), 10))
    wanted = [sum(10 * min(max(t - a, 0), b - a) / (b - a) for a, b in parts) for t in times]
    got = amount_until(np.array(times, dtype=np.int64) + shift)
    assert got.tolist() == pytest.approx(wanted, abs=1e-6)


@given(
    parts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=12),
)
def test_each_nanosecond_belongs_to_the_interval_that_began_last(
    parts: list[tuple[int, int]],
) -> None:
    start = np.array([a for a, _ in parts], dtype=np.int64)
    end = start + np.array([length for _, length in parts], dtype=np.int64)
    owner: dict[int, tuple[int, int]] = {}
    for row, a, b in zip(*innermost(start, end), strict=True):
        assert a < b
        for moment in range(a, b):
            assert moment not in owner
            owner[moment] = (int(start[row]), int(end[row]))
    for moment in range(50):
        holding = [(a, -b) for a, b in zip(start, end, strict=True) if a <= moment < b]
        latest = max(holding, default=None)
        assert owner.get(moment) == (latest and (latest[0], -latest[1]))
