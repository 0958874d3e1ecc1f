"""An attributed run: the value that views, replay, comparison and reports are fed from."""

from __future__ import annotations

import numpy as np

from chopper.analyzers.trace.columns import ints, matching, strings
from chopper.analyzers.trace.join import WORK_CLASSES, Links
from chopper.analyzers.trace.tables import DeviceEvents, HostSpans
from chopper.attribution import Attribution

Attributed = Attribution


def links_of(run: Attributed, rank: int) -> Links:
    """Return the joined events of one rank as arrays."""
    trace, table = run.joined[rank], run.links[rank]
    traced = trace.step.filter(trace.step["traced"]) if trace.step.num_rows else trace.step
    of_event = matching(*strings(trace.collective, "source"), lambda s: s == "device_event")
    links = Links(
        HostSpans(trace.host_span),
        DeviceEvents(trace.device_event),
        ints(traced, "start_ns"),
        ints(traced, "end_ns"),
        ints(traced, "number"),
        ints(table, "launch_row"),
        ints(table, "op_row"),
        ints(trace.collective, "row")[of_event],
    )
    codes, names = strings(table, "work_class")
    known = np.array([WORK_CLASSES.index(n) for n in names], dtype=np.int64)
    # What was decided once is not decided again.
    links.__dict__["work_class"] = known[codes] if len(codes) else codes
    return links


__all__ = ["Attributed", "links_of"]
