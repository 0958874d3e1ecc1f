"""The forest of spans in Python and numpy: the same as ``span_forest_c``, many times slower.

For where the package was installed without a C compiler, and what the tests compare with.
"""

from __future__ import annotations

from collections import defaultdict

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
    start, end = start_ns.tolist(), (start_ns + dur_ns).tolist()
    parent, sibling = np.full((2, len(start)), -1)
    depth = np.zeros(len(start), dtype=np.int32)
    open_spans: dict[int, list[int]] = defaultdict(list)
    for row, span_thread in enumerate(thread.tolist()):
        stack, before = open_spans[span_thread], -1
        while stack and (end[stack[-1]] + tolerance_ns < end[row] or end[stack[-1]] <= start[row]):
            before = stack.pop()
        if before >= 0:
            sibling[before] = row
        parent[row], depth[row] = stack[-1] if stack else -1, len(stack)
        stack.append(row)
    for row, (above, after) in enumerate(zip(parent.tolist(), sibling.tolist(), strict=True)):
        if above >= 0:
            end[row] = min(end[row], end[above])
            start[row] = min(start[row], end[row])
        if after >= 0:
            inside = (end[after], end[above]) if above >= 0 else ()
            end[row] = min(end[row], max(min((start[after], *inside)), start[row]))
    return parent, depth, np.array(start, dtype=np.int64), np.array(end, dtype=np.int64)


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
    """Return the value of each code; -1 selects the last value, as in indexing."""
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
