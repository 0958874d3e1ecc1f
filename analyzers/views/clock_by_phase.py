"""SM clock, power and throttle reasons by rank and phase.

Percentiles are of the kernels' mean clocks, weighted by their time.
"""

from __future__ import annotations

import pyarrow as pa

from chopper.analyzers.events.clocked import Clocked
from chopper.analyzers.views import View, column
from chopper.analyzers.views._clocks import AT_REFERENCE, COLUMNS, NO_CLOCKS, clock_table

VIEW = View(
    "clock_by_phase",
    __doc__,
    (
        column("rank", "Global rank that the row is about.", "int32"),
        column("phase", "Phase: forward, backward, optimizer, evaluation or another."),
        *COLUMNS,
        AT_REFERENCE,
    ),
    title="Clocks by phase",
    section="Clocks",
    needs=NO_CLOCKS,
)


def clock_by_phase(clocked: Clocked | None) -> pa.Table:
    """PIECE, DEVICE_CLOCK -> CLOCK_BY_PHASE, most time first."""
    if clocked is None:
        return VIEW.empty()
    return clock_table(VIEW, clocked, rank=True, phase=clocked.texts("phase"))
