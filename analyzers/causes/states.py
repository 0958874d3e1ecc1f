"""Level 1: exclusive states of the device, and each event's share of them.

A sweep over all event boundaries. At any moment the device is in one state, by priority compute >
communication > copy > idle; events of the winning class share the moment equally.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chopper.analyzers.trace.columns import run_starts
from chopper.analyzers.trace.join import COMMUNICATION, COMPUTE, COPY
from chopper.analyzers.trace.windows import Windows


@dataclass(frozen=True, slots=True)
class States:
    """Exclusive time of one rank.

    Attributes:
        event_row, window, share_ns: one row per event and window it touches; the shares of a
            window and its idle time sum to the window exactly.
        length_ns: how long the event ran in the window, whatever ran beside it.
        gap_start_ns, gap_end_ns, gap_window: idle intervals in order.
    """

    event_row: np.ndarray
    window: np.ndarray
    share_ns: np.ndarray
    length_ns: np.ndarray
    gap_start_ns: np.ndarray
    gap_end_ns: np.ndarray
    gap_window: np.ndarray


class Shares(NamedTuple):
    """Time of fragments of `States` by leaf cause; a fragment's rows sum to its share.

    Attributes:
        fragment: index of the fragment.
        cause: code of the leaf.
        time_ns: more than 0.
    """

    fragment: np.ndarray
    cause: np.ndarray
    time_ns: np.ndarray


def stacked(parts: Iterable[tuple[np.ndarray, np.ndarray | int, np.ndarray]]) -> Shares:
    """Put parts (fragments, their cause or causes, times) one after another, zeros left out."""
    blocks = []
    for fragment, cause, time_ns in parts:
        rows = np.flatnonzero(time_ns)
        causes = np.broadcast_to(cause, len(time_ns))
        blocks.append((fragment[rows], causes[rows], time_ns[rows]))
    return Shares(*map(np.concatenate, zip(*blocks, strict=True)))


def exclusive_states(
    start_ns: np.ndarray, end_ns: np.ndarray, work_class: np.ndarray, windows: Windows
) -> States:
    """Sweep the events of one rank inside its windows.

    Args:
        start_ns, end_ns: events, sorted by start.
        work_class: COMPUTE, COMMUNICATION or COPY per event.
        windows: they tile the swept time; what lies outside is not swept.
    """
    bounds = windows.bounds_ns
    row, window, start, end = _fragments(start_ns, end_ns, bounds)
    klass = work_class[row]
    # Stable is the fast kind here: the parts are sorted, or nearly so.
    times = np.sort(np.concatenate([start, end, bounds]), kind="stable")
    times = times[run_starts(times)]
    first = np.searchsorted(times, start)
    last = np.searchsorted(times, end)
    length = np.diff(times)
    idle = np.ones(len(length), dtype=bool)
    share = np.zeros(len(row), dtype=np.int64)
    for c in (COMPUTE, COMMUNICATION, COPY):
        mine = klass == c
        if not mine.any():
            continue
        begun, ended = (np.bincount(at[mine], minlength=len(times)) for at in (first, last))
        count = np.cumsum(begun - ended)[:-1]
        wins = idle & (count > 0)
        idle &= ~wins
        each = np.zeros(len(length), dtype=np.int64)
        np.floor_divide(length, count, out=each, where=wins)
        total = np.zeros(len(times), dtype=np.int64)
        np.cumsum(each, out=total[1:])
        share[mine] = total[last[mine]] - total[first[mine]]
        rest = each
        rest *= count
        np.subtract(length, rest, out=rest, where=wins)
        if rest.any():
            _give_rest(share, rest, mine, first, last, window, times, bounds)
    hard = np.zeros(len(times), dtype=bool)
    hard[first] = True
    hard[np.searchsorted(times, bounds)] = True
    gap_start, gap_end, gap_window = _gaps(times, idle, bounds, hard)
    return States(row, window, share, end - start, gap_start, gap_end, gap_window)


def _fragments(
    start: np.ndarray, end: np.ndarray, bounds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut events at window bounds: (event row, window, start, end), events outside dropped."""
    count = len(bounds) - 1
    low = np.clip(np.searchsorted(bounds, start, side="right") - 1, 0, count - 1)
    high = np.clip(np.searchsorted(bounds, end, side="left") - 1, 0, count - 1)
    high = np.maximum(high, low)
    inside = (end >= bounds[0]) & (start <= bounds[-1])
    # A point in time on the border belongs to the window that it closes, or opens at the start.
    inside &= (end > bounds[0]) | (start >= bounds[0])
    inside &= (start < bounds[-1]) | ((start == end) & (start == bounds[-1]))
    repeat = np.where(inside, high - low + 1, 0)
    row = np.repeat(np.arange(len(start)), repeat)
    offset = np.arange(len(row)) - np.repeat(np.cumsum(repeat) - repeat, repeat)
    window = low[row] + offset
    piece_start = np.maximum(start[row], bounds[window])
    piece_end = np.minimum(end[row], bounds[window + 1])
    return row, window, piece_start, np.maximum(piece_end, piece_start)


def _give_rest(
    share: np.ndarray,
    rest: np.ndarray,
    mine: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
    window: np.ndarray,
    times: np.ndarray,
    bounds: np.ndarray,
) -> None:
    """Hand the nanoseconds that do not divide evenly to events that were running then.

    Each goes, one by one, to the events that took part in a shared moment with a rest, per
    window and in time order; no event gets more than its even part of them.
    """
    marks = np.concatenate([[0], np.cumsum(rest > 0)])
    takes_part = mine & (marks[last] > marks[first])
    interval_window = np.clip(
        np.searchsorted(bounds, times[:-1], side="right") - 1, 0, len(bounds) - 2
    )
    owed = np.zeros(len(bounds) - 1, dtype=np.int64)
    np.add.at(owed, interval_window, rest)
    for w in np.flatnonzero(owed):
        rows = np.flatnonzero(takes_part & (window == w))
        quotient, extra = divmod(int(owed[w]), len(rows))
        share[rows] += quotient
        share[rows[:extra]] += 1


def _gaps(
    times: np.ndarray, idle: np.ndarray, bounds: np.ndarray, hard: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Idle intervals, joined where nothing starts and no window ends between them.

    Args:
        hard: mask of the times at which something starts or a window ends.
    """
    index = np.flatnonzero(idle)
    if not len(index):
        return index, index, index
    new = run_starts(index - np.arange(len(index))) | hard[index]
    begin = index[new]
    stop = np.append(index[np.flatnonzero(new)[1:] - 1], index[-1])
    start = times[begin]
    window = np.clip(np.searchsorted(bounds, start, side="right") - 1, 0, len(bounds) - 2)
    return start, times[stop + 1], window
