"""Values read back from the device, for which the host waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from chopper.analyzers.detectors import Sighting, detector
from chopper.analyzers.events.device import Events
from chopper.analyzers.events.waiting import Waiting
from chopper.analyzers.trace.join import Links

_MOST = 3
DETECTOR = detector("blocking_reads")


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
