from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper.analyzers.intervals import spread, union

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
    amounts = spread(start, end, np.full(len(parts), 10))
    wanted = [sum(10 * min(max(t - a, 0), b - a) / (b - a) for a, b in parts) for t in times]
    got = amounts.until(np.array(times, dtype=np.int64) + shift)
    assert got.tolist() == pytest.approx(wanted, abs=1e-6)
