"""The joins of one attributed rank again, from the tables that the attribution kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.trace.columns import ints, matching, strings
from chopper.analyzers.trace.join import WORK_CLASSES, Links
from chopper.analyzers.trace.tables import DeviceEvents, HostSpans

if TYPE_CHECKING:
    from chopper.attribution import Attribution


def relink(attribution: Attribution, rank: int) -> Links:
    """Links of one rank: HOST_SPAN, DEVICE_EVENT, STEP, COLLECTIVE, EVENT_LINK -> Links."""
    run, links = attribution.run, attribution.links[rank]
    collectives, step = run.table(rank, "collective"), run.table(rank, "step")
    traced = step.filter(step["traced"]) if step.num_rows else step
    made_of = matching(*strings(collectives, "source"), lambda s: s == "device_event")
    found = Links(
        HostSpans(run.table(rank, "host_span")),
        DeviceEvents(run.table(rank, "device_event")),
        ints(traced, "start_ns"),
        ints(traced, "end_ns"),
        ints(traced, "number"),
        ints(links, "launch_row"),
        ints(links, "op_row"),
        ints(collectives, "row")[made_of],
    )
    codes, names = strings(links, "work_class")
    known = np.array([WORK_CLASSES.index(n) for n in names], dtype=np.int64)
    # What was decided once is not decided again.
    found.__dict__["work_class"] = known[codes] if len(codes) else codes
    return found
