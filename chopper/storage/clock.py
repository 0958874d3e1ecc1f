"""The clock of recordings, and readings across a wall clock that was set.

All times of a recording are of one clock that nobody sets: the monotonic one, placed on the wall
clock when the recording began. Both are slewed alike, so they differ only where the wall clock was
set, or the machine slept.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

_STEP_NS = 250_000_000
"""Rows of several threads may be out of order by less."""
_MOST_STEPS = 3
_MOST_STEPS_RATIO = 0.02
"""A clock is set back rarely: rows that go back more often than this are in no order at all."""


SET_NS = 10_000_000
"""A wall clock that differs by less was not set: both clocks are not read at one moment."""


def offset_ns() -> int:
    """Return how far the wall clock is ahead of the monotonic one."""
    readings = []
    for _ in range(3):  # any may be interrupted: the tightest counts
        before_ns = time.monotonic_ns()
        wall_ns = time.time_ns()
        after_ns = time.monotonic_ns()
        readings.append((after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2))
    return min(readings)[1]


_anchor_ns = offset_ns()


def anchor(of_others_ns: int | None = None) -> int:
    """Place the clock of recordings on the wall clock as it is now, or where another process did.

    Returns:
        What the processes of one recording have in common.
    """
    global _anchor_ns
    _anchor_ns = offset_ns() if of_others_ns is None else of_others_ns
    return _anchor_ns


def anchored_ns() -> int:
    """Return what :func:`anchor` returned last."""
    return _anchor_ns


def now_ns() -> int:
    """Return the time, in Unix ns, by a clock that nobody sets."""
    return time.monotonic_ns() + _anchor_ns


def set_by_ns() -> int:
    """Return how far the wall clock was set forward since :func:`anchor`; 0 where it was not."""
    difference_ns = offset_ns() - _anchor_ns
    return difference_ns if abs(difference_ns) > SET_NS else 0


def in_order(table: pa.Table) -> pa.Table:
    """Sort the rows of one device by time, without those of times that passed twice.

    Rows may be listed in any order, for example the newest first. Only where mostly ascending times
    go back, to times that earlier rows already cover, was the clock set back: those times were read
    of two moments, and nobody can tell which of them a kernel saw.
    """
    import numpy as np
    import pyarrow as pa

    time_ns = table["time_ns"].to_numpy()
    if len(time_ns) < 2 or (time_ns[1:] >= time_ns[:-1]).all():
        return table
    change = np.diff(time_ns)
    if (change < -_STEP_NS).sum() > (change > 0).sum():
        table = table.take(pa.array(np.arange(len(time_ns))[::-1]))
        time_ns = time_ns[::-1]
    latest = np.maximum.accumulate(time_ns)
    back = np.flatnonzero(time_ns[1:] < latest[:-1] - _STEP_NS) + 1
    # Only where it goes back itself: after that, rows are late until the clock has caught up.
    back = back[time_ns[back] < time_ns[back - 1]]
    if _is_listing_order(time_ns, back):
        return table.sort_by("time_ns")
    usable = np.ones(len(time_ns), dtype=bool)
    for at in back.tolist():
        usable &= (time_ns < time_ns[at]) | (time_ns > latest[at - 1])
    return table.filter(pa.array(usable)).sort_by("time_ns")


def _is_listing_order(time_ns: np.ndarray, back: np.ndarray) -> bool:
    """Return whether times go back by the order of the rows, not because a clock was set back.

    ``back`` are the rows at which they go back.
    """
    import numpy as np

    count = len(time_ns)
    if not len(back) or len(back) > min(max(_MOST_STEPS, _MOST_STEPS_RATIO * count), count / 4):
        return True
    begins = np.concatenate([[0], back])
    first, last = np.minimum.reduceat(time_ns, begins), np.maximum.reduceat(time_ns, begins)
    order = np.argsort(first, kind="stable")
    # Files that were put together in the wrong order cover no time twice.
    return bool((first[order][1:] >= last[order][:-1]).all())
