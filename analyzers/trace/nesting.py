"""The tree of host spans on each thread, and what each thread was doing at any moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chopper.analyzers.trace.columns import distinct_rows
from chopper.analyzers.trace.span_forest import forest


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
    """

    thread: np.ndarray
    thread_keys: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    parent: np.ndarray
    depth: np.ndarray

    def nearest(self, marked: np.ndarray) -> np.ndarray:
        """For each span, itself or its nearest ancestor in ``marked``; -1 when there is none."""
        return forest.nearest(self.parent, marked)

    def topmost(self, marked: np.ndarray) -> np.ndarray:
        """For each span, itself or its farthest ancestor in ``marked``; -1 when there is none."""
        return forest.topmost(self.parent, marked)

    def containing(self, marked: np.ndarray) -> np.ndarray:
        """Mask of the spans that have a marked one somewhere below them."""
        return forest.containing(self.parent, marked)

    def within(self, marked: np.ndarray) -> np.ndarray:
        """Mask of the spans that are in ``marked``, or inside one that is."""
        return forest.within(self.parent, marked)

    def inherited(self, codes: np.ndarray) -> np.ndarray:
        """For each span its code (int32), or that of its nearest ancestor with one; -1 for none."""
        return forest.inherited(self.parent, codes)


def nest(start_ns: np.ndarray, dur_ns: np.ndarray, pid: np.ndarray, tid: np.ndarray) -> Nesting:
    """Build the forest of spans sorted by start, then longest first.

    A parent is the nearest earlier span of the thread that has not ended. Traces in whole
    microseconds cut start and end, so a child may seem to outlive its parent by one; spans that
    overlap in part are made siblings, the earlier one ending where the later begins.
    """
    first, thread = distinct_rows([pid, tid])
    keys = np.stack([pid[first], tid[first]], axis=1)
    whole_us = not (start_ns % 1000).any() and not (dur_ns % 1000).any()
    parent, depth, start, end = forest.nest(1000 if whole_us else 0, start_ns, dur_ns, thread)
    return Nesting(thread, keys, start, end, parent, depth)


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
    n = nesting
    return Activity(*forest.segments(len(n.thread_keys), n.start_ns, n.end_ns, n.parent, n.thread))


def innermost_at(acts: Activity, thread: np.ndarray, time_ns: np.ndarray) -> np.ndarray:
    """The innermost span open on each thread at each time, -1 where none is.

    A span counts from its start on, so at the very start of a call the call itself is found.
    """
    span = np.full(len(thread), -1, dtype=np.int64)
    for number in np.unique(thread[thread >= 0]):
        rows = np.flatnonzero(thread == number)
        low, high = acts.first[number], acts.first[number + 1]
        at = np.searchsorted(acts.start_ns[low:high], time_ns[rows], side="right") - 1
        open_ = at >= 0
        span[rows[open_]] = acts.span[low + at[open_]]
    return span


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
    first, last = np.zeros((2, len(thread)), np.int64)
    for number in np.unique(thread[thread >= 0]):
        rows = np.flatnonzero(thread == number)
        low, high = acts.first[number], acts.first[number + 1]
        times = acts.start_ns[low:high]
        # Segment -1 of the thread (index low - 1) stands for the time before its first span.
        first[rows] = low + np.searchsorted(times, start_ns[rows], side="right") - 1
        last[rows] = low + np.searchsorted(times, end_ns[rows], side="left") - 1
    last = np.maximum(last, first)
    count = last - first + 1
    until = np.cumsum(count)
    head = until - count
    owner = np.repeat(np.arange(len(thread)), count)
    segment = np.arange(len(owner))
    segment += np.repeat(first - head, count)
    if len(acts.start_ns):
        np.clip(segment, 0, len(acts.start_ns) - 1, out=segment)
        piece_start, span = acts.start_ns[segment], acts.span[segment]
    else:
        piece_start, span = np.empty_like(owner), np.full(len(owner), -1, dtype=np.int64)
    # The first piece begins in the midst of a segment, or before its thread's first.
    piece_start[head] = start_ns
    before = thread < 0
    before[~before] = first[~before] < acts.first[thread[~before]]
    span[head[before]] = -1
    piece_end = np.empty_like(piece_start)
    piece_end[:-1] = piece_start[1:]
    piece_end[until - 1] = end_ns
    return owner, piece_start, piece_end, span
