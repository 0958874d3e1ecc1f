"""Copies to the device for which the host waits, since their memory is not pinned."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Detector, Sighting
from chopper.analyzers.detectors._waiting import TO_DEVICE, waiting_calls
from chopper.analyzers.events.device import Events

DETECTOR = Detector(
    title="The host waits while it copies to the device",
    condition="A copy to the device was made from pageable memory, or by a call that returned only "
    "when it was done.",
    evidence="{copies} copies, {pageable} of them recorded as pageable; the host waited "
    "{waited_ns:ns}",
    remedy="Set pin_memory=True on the DataLoader (or tensor.pin_memory()), and copy with "
    "non_blocking=True.",
    view="kernels",
)


def pageable_copies(run: Attributed, events: Events) -> Iterator[Sighting]:
    """DEVICE_EVENT, HOST_SPAN -> at most one sighting. Without it, the host does not wait there."""
    copies, calls = {}, {}
    pageable = waited_ns = 0
    for rank, joined in run.joined.items():
        links = joined.links()
        if joined.host_only or not len(links.host):
            continue
        waiting = waiting_calls(run, rank)
        rows = waiting.rows[waiting.to_device]
        mine = np.sort(events.row[events.rank == rank])
        mine = mine[links.events.named(TO_DEVICE.search)[mine] & links.has_launch[mine]]
        from_pageable = links.events.named(lambda name: "Pageable" in name)[mine]
        chosen = mine[from_pageable | np.isin(links.launch_row[mine], rows)]
        if not len(chosen):
            continue
        copies[rank], calls[rank] = chosen, rows
        pageable += int(from_pageable.sum())
        waited_ns += int(links.host.dur_ns[rows].sum())
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
