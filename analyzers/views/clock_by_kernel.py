"""SM clock, power and throttle reasons by operator, shapes and kernel.

Over all ranks. Power is the board's while the kernels ran, not the kernels' own: the sensor
averages over many of them.
"""

from __future__ import annotations

import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.clocked import Clocked
from chopper.analyzers.events.device import arguments
from chopper.analyzers.views import View, column, optional
from chopper.analyzers.views._clocks import AT_REFERENCE, COLUMNS, NO_CLOCKS, clock_table

VIEW = View(
    "clock_by_kernel",
    __doc__,
    (
        optional("op", "Operator; null for kernels that no operator launched."),
        optional("input_dims", "Shapes of the operator's inputs, JSON as recorded."),
        *COLUMNS,
        AT_REFERENCE,
        column("kernel", "Name of the kernel as recorded."),
    ),
    title="Clocks by kernel",
    section="Clocks",
    needs=NO_CLOCKS,
)


def clock_by_kernel(run: Attributed, clocked: Clocked | None) -> pa.Table:
    """PIECE, DEVICE_CLOCK -> CLOCK_BY_KERNEL, most time first."""
    if clocked is None:
        return VIEW.empty()
    dims = arguments(run, clocked.events, clocked.rows, "input_dims")
    op, kernel = clocked.texts("op"), clocked.texts("kernel")
    return clock_table(VIEW, clocked, op=op, input_dims=dims, kernel=kernel)
