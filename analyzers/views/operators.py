"""Operators by name: calls, kernels, time, rates.

All calls of an operator together, whatever their arguments and phase, over all ranks and steps. A
call's time is the time of the device events that it launched itself.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.events.calls import RATES, SHARE, SPREAD, Calls, timed_table, work_columns
from chopper.analyzers.events.device import Events
from chopper.analyzers.events.groups import Groups, text_rows
from chopper.analyzers.views import View, column, optional

VIEW = View(
    "operators",
    __doc__,
    (
        optional("op", "Operator; null for events that no operator launched."),
        column("call_count", "Number of calls."),
        column("kernel_count", "Number of device events that the calls launched."),
        column("time_ns", "Time of these device events, summed over calls."),
        SHARE,
        column("mean_ns", "Mean time of one call."),
        *RATES,
        *SPREAD,
        optional("ideal_ns", "Time that all calls of a product need at the device's peak."),
        optional("roofline_ns", "Time that all calls need at the roofline; null where unknown."),
        optional("math_flop", "Mathematical FLOP of all calls; null where unknown."),
        optional("traffic_bytes", "Least bytes that all calls move to and from memory."),
    ),
    title="Operators",
    section="Operators",
)


def operators(events: Events, calls: Calls) -> pa.Table:
    """EVENT_LINK, DEVICE_EVENT -> OPERATORS, most time first."""
    first = calls.groups.first
    groups = Groups([events.op[0][first]])
    group = groups.of_row[calls.groups.of_row]
    columns = {
        "op": text_rows(events.op, first[groups.first]),
        "kernel_count": np.bincount(group, minlength=len(groups)),
        **work_columns(events, group, groups.sum(calls.busy_ns), 1),
    }
    return timed_table(VIEW, groups, calls.busy_ns, columns)
