"""Operators by shapes, types and phase: time, rates, roofline.

Calls of operators with the same arguments in the same phase, over all ranks and steps. A call's
time is that of the device events that it launched itself. Collectives are grouped by
phase alone: sequence number and group are among their arguments, so no two calls are equal;
`collectives` has their sizes.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.calls import RATES, SHARE, SPREAD, Calls, timed_table, work_columns
from chopper.analyzers.events.device import Events, recorded_arguments
from chopper.analyzers.events.groups import Groups, text_rows
from chopper.analyzers.trace import names
from chopper.analyzers.views import View, column, optional

_ARGUMENTS = ("input_dims", "input_types", "concrete_inputs")

VIEW = View(
    "operations",
    __doc__,
    (
        optional("op", "Operator; null for events that no operator launched."),
        optional("input_dims", "Shapes of the operator's inputs, JSON as recorded."),
        column("phase", "Phase: forward, backward, optimizer, evaluation or another one."),
        column("call_count", "Number of calls."),
        column("time_ns", "Time of all calls."),
        SHARE,
        column("mean_ns", "Mean time of one call."),
        *RATES,
        optional("ideal_ns", "Time that one call of a product needs at the device's peak."),
        optional("roofline_ns", "Time that one call needs at the roofline; null where unknown."),
        optional("input_types", "Data types of the operator's inputs, JSON as recorded."),
        optional("concrete_inputs", "Values of the operator's scalar inputs, JSON as recorded."),
        optional("dtype", "Data type of a product's arithmetic, which selects its peak."),
        optional("math_flop", "Mathematical FLOP of one call; null where unknown."),
        optional("traffic_bytes", "Least bytes that one call moves to and from memory."),
        optional("flop_per_byte", "Arithmetic intensity: FLOP over least bytes moved.", "float64"),
        *SPREAD,
    ),
    title="Operations by arguments",
    section="Operators",
)


def operations(run: Attributed, events: Events, calls: Calls) -> pa.Table:
    """EVENT_LINK, DEVICE_EVENT, HOST_SPAN -> OPERATIONS, most time first.

    Events without an operator are one row per phase, each event a call.
    """
    first = calls.groups.first
    codes, values = events.op
    collective = np.array([*map(names.is_host_communication, values), False], dtype=bool)
    recorded = {}
    for name in _ARGUMENTS:
        of_call, texts = recorded_arguments(run, events, first, name)
        recorded[name] = np.where(collective[codes[first]], -1, of_call), texts
    groups = Groups(
        [events.op[0][first], events.phase[0][first], *(codes for codes, _ in recorded.values())]
    )
    one = first[groups.first]
    columns = {
        "op": text_rows(events.op, one),
        "phase": text_rows(events.phase, one),
        **{name: text_rows(texts, groups.first) for name, texts in recorded.items()},
        **work_columns(
            events, groups.of_row[calls.groups.of_row], groups.sum(calls.busy_ns), groups.count
        ),
    }
    return timed_table(VIEW, groups, calls.busy_ns, columns)
