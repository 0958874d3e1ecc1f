"""SM clock, power and throttle reasons by operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper.analyzers.events.groups import Groups, text_rows
from chopper.analyzers.views import View
from chopper.analyzers.views._clocks import (
    AT_REFERENCE,
    COLUMNS,
    NO_CLOCKS,
    clock_columns,
    most_time_first,
)
from chopper.tables import optional

if TYPE_CHECKING:
    import pyarrow as pa

    from chopper.analyzers.events.clocked import Clocked

VIEW = View(
    "clock_by_operator",
    1,
    "SM clock, power and what held the clock, by operator: which kernels run at a low clock.",
    (
        optional("op", "Operator; null for kernels that no operator launched."),
        *COLUMNS,
        AT_REFERENCE,
    ),
    module_doc=__doc__,
    title="Clocks by operator",
    section="Clocks",
    needs=NO_CLOCKS,
)


def clock_by_operator(clocked: Clocked | None) -> pa.Table:
    """PIECE, DEVICE_CLOCK -> CLOCK_BY_OPERATOR, most time first."""
    if clocked is None:
        return VIEW.empty()
    op = clocked.events.op
    groups = Groups([op[0][clocked.rows]])
    columns = {
        "op": text_rows(op, clocked.rows[groups.first]),
        **clock_columns(clocked, groups),
    }
    return most_time_first(VIEW.of(columns))
