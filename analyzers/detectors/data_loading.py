"""Steps that wait for the next batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Detector, Sighting
from chopper.analyzers.events.steps import spans_in_steps
from chopper.analyzers.replay.whatif_options import Changes
from chopper.analyzers.trace.columns import strings

CAUSE = "idle.preparation.data"
DETECTOR = Detector(
    title="The loader does not keep up",
    condition="The device was idle while the host waited for a batch or made one.",
    evidence="{stall_ns:ns} of waiting, most of it in {function}",
    remedy="Raise num_workers, set pin_memory=True and persistent_workers=True; where one "
    "function takes the time, make it cheaper or do it ahead of training.",
    view="steps",
)


def data_loading(run: Attributed) -> Iterator[Sighting]:
    """PIECE, HOST_SPAN -> at most one sighting. Without it, batches are there when asked for."""
    cause, causes = strings(run.pieces, "cause")
    if CAUSE not in causes:
        return
    mine = run.pieces.filter(cause == causes.index(CAUSE))
    if not mine.num_rows:
        return
    stall_ns = int(mine["time_ns"].to_numpy().sum())
    calls: dict[int, np.ndarray] = {}
    spent: dict[str, float] = {}
    for rank, joined in run.joined.items():
        host = joined.links().host
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
    rows = mine["event_row"].to_numpy()
    ranks = mine["rank"].to_numpy()
    yield Sighting(
        detector="data_loading",
        events={int(r): np.unique(rows[(ranks == r) & (rows >= 0)]) for r in np.unique(ranks)},
        calls=calls,
        changes=Changes(fix=(CAUSE,)),
        evidence={
            "stall_ns": stall_ns,
            "function": max(spent, key=spent.__getitem__) if spent else "the loader",
        },
    )
