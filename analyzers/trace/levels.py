"""The forest of spans in numpy, all rows of a level or a round at once.

What ``walks.py`` computes in C, several times slower and with more memory: for where the package
was installed without a C compiler, and what the tests compare with.
"""

from __future__ import annotations

import numpy as np


def nest(
    tolerance_ns: int, start_ns: np.ndarray, dur_ns: np.ndarray, thread: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Parent, depth (int32), and clipped start and end of spans as :class:`nesting.Nesting` has.

    Args:
        tolerance_ns: how much a child may outlive its parent.
        start_ns, dur_ns: the spans, sorted by start, then longest first.
        thread: dense thread number of each.
    """
    order = np.argsort(thread, kind="stable")
    start, ordered = start_ns[order], thread[order]
    end = start + dur_ns[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = ordered[1:] != ordered[:-1]
    parent = _parents(start, end, first, tolerance_ns)
    depth = _depths(parent)
    start, end = _clip(start, end, parent, depth, ordered)
    out_parent, out_start, out_end = (np.empty(len(order), np.int64) for _ in range(3))
    out_depth = np.empty_like(depth)
    out_parent[order] = np.where(parent >= 0, order[parent], -1)
    out_depth[order] = depth
    out_start[order] = start
    out_end[order] = end
    return out_parent, out_depth, out_start, out_end


def _parents(
    start: np.ndarray, end: np.ndarray, first: np.ndarray, tolerance_ns: int
) -> np.ndarray:
    """Nearest earlier span that contains each one, by pointer jumping (log n rounds)."""
    parent = np.arange(len(start)) - 1
    parent[first] = -1
    at = np.flatnonzero(parent >= 0)
    while len(at):
        p = parent[at]
        skip = (end[p] + tolerance_ns < end[at]) | (end[p] <= start[at])
        at, p = at[skip], p[skip]
        # What lies between p and its own candidate does not reach as far as p either.
        parent[at] = parent[p]
        at = at[parent[at] >= 0]
    return parent


def _depths(parent: np.ndarray) -> np.ndarray:
    at = parent.copy()
    hops = (parent >= 0).astype(np.int32)
    # Doubling: depth = number of parents on the way up.
    live = np.flatnonzero(at >= 0)
    while len(live):
        target = at[live]
        hops[live] += hops[target]
        above = at[target]
        at[live] = above
        live = live[above >= 0]
    return hops


def _clip(
    start: np.ndarray, end: np.ndarray, parent: np.ndarray, depth: np.ndarray, thread: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    start, end = start.copy(), end.copy()
    by_depth = np.argsort(depth, kind="stable")
    for rows in np.split(by_depth, np.cumsum(np.bincount(depth))[:-1]):
        p = parent[rows]
        inside = p >= 0
        mine = rows[inside]
        end[mine] = np.minimum(end[mine], end[parent[mine]])
        start[mine] = np.minimum(start[mine], end[mine])
        # Rows of one depth come thread by thread, parent by parent, in time order.
        siblings = (p[1:] == p[:-1]) & (thread[rows[1:]] == thread[rows[:-1]])
        before, after = rows[:-1][siblings], rows[1:][siblings]
        end[before] = np.minimum(end[before], np.maximum(start[after], start[before]))
    return start, end


def nearest(parent: np.ndarray, marked: np.ndarray) -> np.ndarray:
    """As of :class:`nesting.Nesting`; so are those that follow."""
    at = np.where(marked | (parent < 0), np.arange(len(parent)), parent)
    while not np.array_equal(further := at[at], at):
        at = further
    return np.where(marked[at], at, -1)


def topmost(parent: np.ndarray, marked: np.ndarray) -> np.ndarray:
    """Farthest ancestor."""
    best = np.where(marked, np.arange(len(parent)), -1)
    at = parent
    # Doubling: of the rows up to `at`, `best` is the farthest one.
    while (at >= 0).any():
        above = np.where(at >= 0, best[at], -1)
        best = np.where(above >= 0, above, best)
        at = np.where(at >= 0, at[at], -1)
    return best


def containing(parent: np.ndarray, marked: np.ndarray) -> np.ndarray:
    """Mask of the rows above a marked one."""
    contains = np.zeros(len(parent), dtype=bool)
    rows = np.flatnonzero(marked)
    while len(rows):
        above = np.unique(parent[rows])
        rows = above[(above >= 0) & ~contains[above]]
        contains[rows] = True
    return contains


def within(parent: np.ndarray, marked: np.ndarray) -> np.ndarray:
    """Mask of the marked rows, and of those below them."""
    return nearest(parent, marked) >= 0


def inherited(parent: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Codes (int32), each negative one replaced by that of the nearest ancestor with one."""
    at = nearest(parent, codes >= 0)
    return np.where(at >= 0, codes[at], -1).astype(np.int32)


def look_up(codes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The value of each code; -1 stands for the last one, as in indexing."""
    return values[codes]


def segments(
    threads: int, start_ns: np.ndarray, end_ns: np.ndarray, parent: np.ndarray, thread: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each thread's time cut by who is innermost from when on.

    Args:
        threads: how many there are.
        start_ns, end_ns, parent: of the spans, as `nest` returned them.
        thread: dense thread number of each.

    Returns:
        Start of each segment, its innermost span (-1 for none), and the first segment of each
        thread with one more number at the end.
    """
    # Spans without a duration open and close nothing.
    rows = np.flatnonzero(end_ns > start_ns)
    # At one moment ends come before starts; deeper spans, which are later rows, end first.
    closed = rows[::-1]
    owner = np.concatenate([thread[closed], thread[rows]])
    time = np.concatenate([end_ns[closed], start_ns[rows]])
    order = np.lexsort((np.repeat([0, 1], len(rows)), time, owner))
    owner, time = owner[order], time[order]
    last = np.ones(len(order), dtype=bool)
    last[:-1] = (owner[1:] != owner[:-1]) | (time[1:] != time[:-1])
    span = np.concatenate([parent[closed], rows])[order[last]]
    return time[last], span, np.searchsorted(owner[last], np.arange(threads + 1))
