"""Steps that wait for the next batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Detector, Sighting, spent_in
from chopper.analyzers.events.steps import spans_in_steps
from chopper.analyzers.replay.whatif_options import Changes
from chopper.analyzers.trace.join import Links

CAUSE = "idle.preparation.data"
DETECTOR = Detector(
    title="The data loader is the bottleneck",
    condition="The device was idle while the host waited for a batch or prepared one.",
    without="every batch is ready when it is requested",
    evidence="{stall_ns:ns} waiting for data, most of it in {function}",
    remedy="Raise num_workers, set pin_memory=True and persistent_workers=True; if one function "
    "dominates, make it cheaper or precompute its result.",
    view="steps",
)


def data_loading(run: Attributed, links: Mapping[int, Links]) -> Iterator[Sighting]:
    """PIECE, HOST_SPAN -> at most one sighting."""
    stall_ns, rows = spent_in(run, (CAUSE,))
    if not stall_ns:
        return
    calls: dict[int, np.ndarray] = {}
    spent: dict[str, float] = {}
    for rank, link in links.items():
        host = link.host
        if not len(host):
            continue
        loading = host.named(lambda name: name.startswith("enumerate(DataLoader)"))
        loading &= spans_in_steps(run, rank)[0]
        if not loading.any():
            continue
        calls[rank] = np.flatnonzero(loading)
        inside = host.nesting.within(loading)
        codes, values = host.names
        nested = np.bincount(
            host.nesting.parent[inside & (host.nesting.parent >= 0)],
            weights=host.dur_ns[inside & (host.nesting.parent >= 0)],
            minlength=len(host),
        )
        own = np.where(inside, host.dur_ns - nested, 0)
        for code, time in enumerate(np.bincount(codes, weights=own, minlength=len(values))):
            spent[values[code]] = spent.get(values[code], 0) + time
    yield Sighting(
        detector="data_loading",
        events=rows,
        calls=calls,
        changes=Changes(fix=(CAUSE,)),
        evidence={
            "stall_ns": stall_ns,
            "function": max(spent, key=spent.__getitem__, default=None),
        },
    )
