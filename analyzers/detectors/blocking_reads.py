"""Values read back from the device, for which the host waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from chopper.analyzers.detectors import Detector, Sighting
from chopper.analyzers.events.device import Events
from chopper.analyzers.events.waiting import Waiting
from chopper.analyzers.trace.join import Links

_MOST = 3
DETECTOR = Detector(
    title="{op} synchronizes with the device",
    condition="An operator that copies nothing to the device (item, nonzero, a copy to the host) "
    "makes a call that returns only when the device has finished all earlier work. The "
    "three operators that wait longest are replayed.",
    without="the host does not wait at these calls",
    evidence="{calls} calls waited {waited_ns:ns} in total",
    remedy="Read values every N steps, or after the step; keep them on the device (tensor "
    "operations instead of Python's), or copy with non_blocking=True into pinned memory.",
    view="operations",
)


def blocking_reads(
    events: Events, links: Mapping[int, Links], waiting: Mapping[int, Waiting]
) -> Iterator[Sighting]:
    """HOST_SPAN, DEVICE_EVENT -> a sighting for each reading operator, most waiting first."""
    calls: dict[str, dict[int, np.ndarray]] = {}
    copies: dict[str, dict[int, np.ndarray]] = {}
    waited: dict[str, int] = {}
    for rank, calls_of in waiting.items():
        link = links[rank]
        codes, values = link.host.names
        code = np.where(calls_of.to_device, -1, codes[calls_of.operator])
        mine = np.sort(events.row[events.rank == rank])
        for one in np.unique(code[code >= 0]).tolist():
            op, chosen = values[one], code == one
            rows = calls_of.rows[chosen]
            calls.setdefault(op, {})[rank] = rows
            copies.setdefault(op, {})[rank] = mine[np.isin(link.launch_row[mine], rows)]
            waited[op] = waited.get(op, 0) + int(link.host.dur_ns[rows].sum())
    for op in sorted(calls, key=lambda op: -waited[op])[:_MOST]:
        evidence = {"op": op, "calls": sum(map(len, calls[op].values())), "waited_ns": waited[op]}
        yield Sighting(
            detector="blocking_reads",
            events=copies[op],
            calls=calls[op],
            calm=calls[op],
            evidence=evidence,
        )
