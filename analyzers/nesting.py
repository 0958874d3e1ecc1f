"""The tree of host spans on each thread, and what each thread was doing at any moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chopper.analyzers.columns import distinct_rows


@dataclass(frozen=True, slots=True)
class Nesting:
    """Spans as trees, one forest per thread. Row numbers are those of `host_span`.

    Attributes:
        thread: dense thread number of each span.
        thread_keys: (pid, tid) of each thread number, shape (threads, 2).
        start_ns, end_ns: times clipped so that children lie inside their parents and siblings
            do not overlap.
        parent: row of the enclosing span on the same thread, -1 at the top.
        depth: 0 at the top.
        levels: rows of each depth, the top first.
    """

    thread: np.ndarray
    thread_keys: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    levels: list[np.ndarray]

    def nearest(self, marked: np.ndarray) -> np.ndarray:
        """For each span, itself or its nearest ancestor in ``marked``; -1 when there is none."""
        if not len(marked):
            return np.zeros(0, np.int64)
        at = np.full(len(marked), -1, dtype=np.int64)
        own = np.flatnonzero(marked)
        at[own] = own
        if not len(own):
            return at
        for rows in self.levels[1:]:
            above = at[self.parent[rows]]
            below = np.flatnonzero((above >= 0) & ~marked[rows])
            at[rows[below]] = above[below]
        return at

    def topmost(self, marked: np.ndarray) -> np.ndarray:
        """For each span, itself or its farthest ancestor in ``marked``; -1 when there is none."""
        best = np.full(len(marked), -1, dtype=np.int64)
        for rows in self.levels:
            parent = self.parent[rows]
            above = np.where(parent >= 0, best[parent], -1)
            best[rows] = np.where(above >= 0, above, np.where(marked[rows], rows, -1))
        return best


def nest(start_ns: np.ndarray, dur_ns: np.ndarray, pid: np.ndarray, tid: np.ndarray) -> Nesting:
    """Build the forest of spans sorted by start, then longest first.

    A parent is the nearest earlier span of the thread that has not ended. Traces in whole
    microseconds cut start and end, so a child may seem to outlive its parent by one; spans that
    overlap in part are made siblings, the earlier one ending where the later begins.
    """
    count = len(start_ns)
    if not count:
        empty = np.zeros(0, np.int64)
        return Nesting(empty, np.zeros((0, 2), np.int64), empty, empty, empty, empty, [])
    first_of, thread = distinct_rows([pid, tid])
    keys = np.stack([pid[first_of], tid[first_of]], axis=1)
    order = np.argsort(thread, kind="stable")
    start = start_ns[order]
    end = start + dur_ns[order]
    first = np.zeros(count, dtype=bool)
    first[0] = True
    first[1:] = thread[order][1:] != thread[order][:-1]
    whole_us = not (start % 1000).any() and not (dur_ns % 1000).any()
    parent = _parents(start, end, first, tolerance=1000 if whole_us else 0)
    depth = _depths(parent)
    levels = np.split(np.argsort(depth, kind="stable"), np.cumsum(np.bincount(depth))[:-1])
    start, end = _clip(start, end, parent, levels, thread[order])
    out_parent = np.empty(count, np.int64)
    out_depth = np.empty_like(depth)
    out_start = np.empty(count, np.int64)
    out_end = np.empty(count, np.int64)
    out_parent[order] = np.where(parent >= 0, order[parent], -1)
    out_depth[order] = depth
    out_start[order] = start
    out_end[order] = end
    return Nesting(
        thread,
        keys,
        out_start,
        out_end,
        out_parent,
        out_depth,
        [order[level] for level in levels],
    )


def _parents(
    start: np.ndarray, end: np.ndarray, first: np.ndarray, *, tolerance: int
) -> np.ndarray:
    """Nearest earlier span that contains each one, by pointer jumping (log n rounds)."""
    parent = np.arange(len(start)) - 1
    parent[first] = -1
    at = np.flatnonzero(parent >= 0)
    while len(at):
        p = parent[at]
        skip = (end[p] + tolerance < end[at]) | (end[p] <= start[at])
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
    start: np.ndarray,
    end: np.ndarray,
    parent: np.ndarray,
    levels: list[np.ndarray],
    thread: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    start, end = start.copy(), end.copy()
    for rows in levels:
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


@dataclass(frozen=True, slots=True)
class Activity:
    """Each thread's time cut into segments by the innermost span, in order.

    Attributes:
        start_ns: start of each segment; it lasts until the next one of the thread.
        span: row of the innermost span, -1 where none is open.
        first: index of the first segment of each thread, shape (threads + 1,).
    """

    start_ns: np.ndarray
    span: np.ndarray
    first: np.ndarray


def activity(nesting: Nesting) -> Activity:
    """Flatten the forest: who is innermost from when on."""
    threads = len(nesting.thread_keys)
    # Spans without a duration open and close nothing.
    rows = np.flatnonzero(nesting.end_ns > nesting.start_ns)
    if not len(rows):
        return Activity(rows, rows, np.zeros(threads + 1, np.int64))
    # At one moment ends come before starts; deeper spans, which are later rows, end first.
    closed = rows[::-1]
    low, high = int(nesting.start_ns[rows].min()), int(nesting.end_ns[rows].max())
    length = high - low + 1
    if 2 * length * threads < 1 << 62:
        # One number per moment sorts several times faster than thread, time and kind.
        moment = np.concatenate(
            [
                (nesting.thread[closed] * length + nesting.end_ns[closed] - low) * 2,
                (nesting.thread[rows] * length + nesting.start_ns[rows] - low) * 2 + 1,
            ]
        )
        order = np.argsort(moment, kind="stable")
        # In place: these arrays are the largest of an attribution.
        moment = moment[order]
        moment >>= 1
        last = _changes(moment)
        moment = moment[last]
        thread, time = np.divmod(moment, length)
        time += low
        del moment
    else:
        thread = np.concatenate([nesting.thread[closed], nesting.thread[rows]])
        time = np.concatenate([nesting.end_ns[closed], nesting.start_ns[rows]])
        order = np.lexsort((np.repeat([0, 1], len(rows)), time, thread))
        last = _changes(time[order]) | _changes(thread[order])
        thread, time = thread[order[last]], time[order[last]]
    order = order[last]
    span = np.concatenate([nesting.parent[closed], rows])[order]
    return Activity(time, span, np.searchsorted(thread, np.arange(threads + 1)))


def _changes(values: np.ndarray) -> np.ndarray:
    """Mask of the last of each run of equal values."""
    last = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=last[:-1])
    return last


def innermost_at(acts: Activity, thread: np.ndarray, time_ns: np.ndarray) -> np.ndarray:
    """The innermost span open on each thread at each time, -1 where none is.

    A span counts from its start on, so at the very start of a call the call itself is found.
    """
    found = np.full(len(thread), -1, dtype=np.int64)
    for number in np.unique(thread[thread >= 0]):
        rows = np.flatnonzero(thread == number)
        low, high = acts.first[number], acts.first[number + 1]
        at = np.searchsorted(acts.start_ns[low:high], time_ns[rows], side="right") - 1
        ok = at >= 0
        found[rows[ok]] = acts.span[low + at[ok]]
    return found


def cut(
    acts: Activity, thread: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut intervals, each on one thread, along that thread's segments.

    Args:
        acts: the threads' segments.
        thread: thread number per interval; -1 for none.
        start_ns, end_ns: the intervals.

    Returns:
        (interval index, start_ns, end_ns, innermost span or -1) of the pieces, in order; the
        pieces of an interval tile it exactly.
    """
    first = np.zeros(len(thread), np.int64)
    last = np.zeros(len(thread), np.int64)
    for number in np.unique(thread[thread >= 0]):
        rows = np.flatnonzero(thread == number)
        low, high = acts.first[number], acts.first[number + 1]
        times = acts.start_ns[low:high]
        # Segment -1 of the thread (index low - 1) stands for the time before its first span.
        first[rows] = low + np.searchsorted(times, start_ns[rows], side="right") - 1
        last[rows] = low + np.searchsorted(times, end_ns[rows], side="left") - 1
    last = np.maximum(last, first)
    count = last - first + 1
    owner = np.repeat(np.arange(len(thread)), count)
    offset = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    segment = first[owner] + offset
    known = thread[owner] >= 0
    low = np.where(known, acts.first[np.where(known, thread[owner], 0)], 0)
    before = ~known | (segment < low)
    safe = np.clip(segment, 0, max(len(acts.start_ns) - 1, 0))
    if len(acts.start_ns):
        piece_start = np.where(
            before, start_ns[owner], np.maximum(acts.start_ns[safe], start_ns[owner])
        )
        span = np.where(before, -1, acts.span[safe])
    else:
        piece_start = start_ns[owner].copy()
        span = np.full(len(owner), -1, dtype=np.int64)
    piece_end = np.empty_like(piece_start)
    is_last = offset == count[owner] - 1
    piece_end[~is_last] = piece_start[1:][~is_last[:-1]] if len(piece_start) > 1 else 0
    piece_end[is_last] = end_ns[owner[is_last]]
    return owner, piece_start, piece_end, span
