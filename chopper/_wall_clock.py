"""Readings across a wall clock that was set back, by an administrator or at the end of summer time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

_STEP_NS = 250_000_000
"""Rows of several threads may be out of order by less."""


def in_order(table: pa.Table) -> pa.Table:
    """Rows of one device as they were taken, by time, without those of times that passed twice.

    Where the times go back the clock was set back: what stands between the two was read of two
    moments, and nobody can tell which of them a kernel saw.
    """
    import numpy as np
    import pyarrow as pa

    time_ns = table["time_ns"].to_numpy()
    latest = np.maximum.accumulate(time_ns)
    back = np.flatnonzero(time_ns[1:] < latest[:-1] - _STEP_NS) + 1
    if not len(back):
        return table if (latest == time_ns).all() else table.sort_by("time_ns")
    kept = np.ones(len(time_ns), dtype=bool)
    # Only where it goes back itself: after that, rows are late until the clock has caught up.
    for at in back[time_ns[back] < time_ns[back - 1]].tolist():
        kept &= (time_ns < time_ns[at]) | (time_ns > latest[at - 1])
    return table.filter(pa.array(kept)).sort_by("time_ns")
