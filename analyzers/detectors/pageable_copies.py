"""Copies to the device for which the host waits, since their memory is not pinned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from chopper.analyzers.detectors import Sighting, detector
from chopper.analyzers.events.device import Events
from chopper.analyzers.events.waiting import Waiting
from chopper.analyzers.trace import names
from chopper.analyzers.trace.join import Links

DETECTOR = detector("pageable_copies")


def pageable_copies(
    events: Events, links: Mapping[int, Links], waiting: Mapping[int, Waiting]
) -> Iterator[Sighting]:
    """DEVICE_EVENT, HOST_SPAN -> at most one sighting."""
    copies, calls = {}, {}
    pageable = waited_ns = 0
    for rank, calls_of in waiting.items():
        link = links[rank]
        rows = calls_of.rows[calls_of.to_device]
        mine = np.sort(events.row[events.rank == rank])
        mine = mine[link.events.named(names.is_copy_to_device)[mine] & link.has_launch[mine]]
        from_pageable = link.events.named(lambda name: "Pageable" in name)[mine]
        chosen = mine[from_pageable | np.isin(link.launch_row[mine], rows)]
        if not len(chosen):
            continue
        copies[rank], calls[rank] = chosen, rows
        pageable += int(from_pageable.sum())
        waited_ns += int(link.host.dur_ns[rows].sum())
    if copies:
        yield Sighting(
            detector="pageable_copies",
            events=copies,
            calls=calls,
            calm=calls,
            evidence={
                "copies": sum(map(len, copies.values())),
                "pageable": pageable,
                "waited_ns": waited_ns,
            },
        )
