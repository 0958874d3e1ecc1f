"""Sets of intervals of time: their length before a moment or inside another one, and nesting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Union:
    """A union of intervals: disjoint, ascending; ``before_ns`` is the length of all before each."""

    start_ns: np.ndarray
    end_ns: np.ndarray
    before_ns: np.ndarray

    def until(self, time_ns: np.ndarray) -> np.ndarray:
        """Length of the union before each time."""
        if not len(self.start_ns):
            return np.zeros(len(time_ns), dtype=np.int64)
        at = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        row = np.maximum(at, 0)
        inside = np.minimum(time_ns, self.end_ns[row]) - self.start_ns[row]
        return np.where(at >= 0, self.before_ns[row] + inside, 0)

    def within(self, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """Length of the union inside each interval."""
        return self.until(end_ns) - self.until(start_ns)


def union(start_ns: np.ndarray, end_ns: np.ndarray) -> Union:
    """The union of intervals in any order; those without a length add nothing."""
    order = np.argsort(start_ns, kind="stable")
    order = order[end_ns[order] > start_ns[order]]
    if not len(order):
        return Union(*np.zeros((3, 0), np.int64))
    start, reach = start_ns[order], np.maximum.accumulate(end_ns[order])
    first = np.append(0, np.flatnonzero(start[1:] > reach[:-1]) + 1)
    last = np.append(first[1:], len(order)) - 1
    begin, end = start[first], reach[last]
    length = end - begin
    return Union(begin, end, np.cumsum(length) - length)


def innermost(
    start_ns: np.ndarray, end_ns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give each nanosecond to one of the intervals that hold it: to the one that began last.

    Of those that began together it is the shortest.

    Returns:
        The interval's row, start and end of each piece. Pieces are disjoint, ascending, not empty.
    """
    ends = end_ns.tolist()
    pieces: list[tuple[int, int, int]] = []
    running: list[int] = []  # rows, the one that began last on top
    now_ns = 0

    def run_until(time_ns: int) -> None:
        nonlocal now_ns
        while running and now_ns < time_ns:
            row = running[-1]
            stop_ns = min(ends[row], time_ns)
            if stop_ns > now_ns:
                pieces.append((row, now_ns, stop_ns))
                now_ns = stop_ns
            if ends[row] <= now_ns:
                running.pop()

    order = np.lexsort((-end_ns, start_ns))
    order = order[end_ns[order] > start_ns[order]]
    for row, begin_ns in zip(order.tolist(), start_ns[order].tolist(), strict=True):
        run_until(begin_ns)
        now_ns = begin_ns
        running.append(row)
    run_until(max(ends, default=0))
    rows, starts, stops = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
    return rows, starts, stops


def spread(
    start_ns: np.ndarray, end_ns: np.ndarray, amount_ns: np.ndarray
) -> Callable[[np.ndarray], np.ndarray]:
    """Spread each amount evenly over its interval -> a function: what lies before each time.

    It returns floats, good to a few nanoseconds.
    """
    end_ns = np.maximum(end_ns, start_ns + 1)
    rate = amount_ns / (end_ns - start_ns)
    origin = int(start_ns.min(initial=np.iinfo(np.int64).max))

    def growth(bounds: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """Return the sum of the rates of all bounds before a time, each times the time since."""
        order = np.argsort(bounds, kind="stable")
        edges, rates = bounds[order], rate[order]
        total = np.append(0.0, np.cumsum(rates))
        moment = np.append(0.0, np.cumsum(rates * (edges - origin)))

        def until(time_ns: np.ndarray) -> np.ndarray:
            at = np.searchsorted(edges, time_ns, side="right")
            return (time_ns - origin).astype(np.float64) * total[at] - moment[at]

        return until

    begun, ended = growth(start_ns), growth(end_ns)
    return lambda time_ns: begun(time_ns) - ended(time_ns)
