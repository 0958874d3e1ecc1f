"""Operators by name: calls, kernels, time, rates.

All calls of an operator together, whatever their arguments and phase; see ``_calls``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.events.calls import (
    RATES,
    SHARE,
    SPREAD,
    time_columns,
    work_columns,
)
from chopper.analyzers.events.groups import Groups, statistics_of, text_rows
from chopper.analyzers.views import View
from chopper.tables import Table, count, ns, optional

if TYPE_CHECKING:
    import pyarrow as pa

    from chopper.analyzers.events.calls import Calls
    from chopper.analyzers.events.device import Events

VIEW = View(
    __doc__,
    title="Operators",
    section="Operators",
    table=Table(
        "operators",
        1,
        "Operators by name over all ranks and steps, whatever their arguments and phase.",
        (
            optional("op", "string", "Operator; null for events that no operator launched."),
            count("call_count", "Number of calls."),
            count("kernel_count", "Number of device events that the calls launched."),
            ns("time_ns", "Time in which these device events ran, summed over calls."),
            SHARE,
            ns("mean_ns", "Mean time of one call."),
            *RATES,
            *SPREAD,
            optional(
                "ideal_ns", "int64", "Time that all calls of a product need at the device's peak."
            ),
            optional(
                "roofline_ns",
                "int64",
                "Time that all calls need at the roofline: peak FLOP or peak bandwidth.",
            ),
            optional("math_flop", "int64", "FLOP that the mathematics of all calls needs."),
            optional(
                "traffic_bytes", "int64", "Least bytes that all calls move to and from memory."
            ),
        ),
    ),
)


def operators(events: Events, calls: Calls) -> pa.Table:
    """EVENT_LINK, DEVICE_EVENT -> OPERATORS, most time first."""
    first = calls.groups.first
    groups = Groups([events.op[0][first]])
    found = statistics_of(groups, calls.busy_ns)
    group = groups.of_row[calls.groups.of_row]
    columns = {
        "op": text_rows(events.op, first[groups.first]),
        "kernel_count": np.bincount(group, minlength=len(groups)),
        **time_columns(found),
        **work_columns(events, group, found.sum, 1),
    }
    return VIEW.table.of(columns).take(np.argsort(-found.sum, kind="stable"))
