"""SM clock, power and throttle reasons by operator: which kernels run at a low clock."""

from __future__ import annotations

import pyarrow as pa

from chopper.analyzers.events.clocked import Clocked
from chopper.analyzers.views import View, optional
from chopper.analyzers.views._clocks import AT_REFERENCE, COLUMNS, NO_CLOCKS, clock_table

VIEW = View(
    "clock_by_operator",
    __doc__,
    (
        optional("op", "Operator; null for kernels that no operator launched."),
        *COLUMNS,
        AT_REFERENCE,
    ),
    title="Clocks by operator",
    section="Clocks",
    needs=NO_CLOCKS,
)


def clock_by_operator(clocked: Clocked | None) -> pa.Table:
    """PIECE, DEVICE_CLOCK -> CLOCK_BY_OPERATOR, most time first."""
    return VIEW.empty() if clocked is None else clock_table(VIEW, clocked, op=clocked.texts("op"))
