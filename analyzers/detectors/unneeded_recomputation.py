"""Activations that are computed twice although memory has room for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Sighting, detector
from chopper.analyzers.events.device import Events
from chopper.analyzers.replay.whatif_options import Changes
from chopper.analyzers.views.memory import memory
from chopper.hardware.rank_device import device_of

_LEAST_FREE_RATIO = 0.1
DETECTOR = detector("unneeded_recomputation")


def unneeded_recomputation(run: Attributed, events: Events) -> Iterator[Sighting]:
    """MEMORY, DEVICE_EVENT -> at most one sighting."""
    codes, phases = events.phase
    if "recompute" not in phases:
        return
    again = codes == phases.index("recompute")
    if not again.any():
        return
    peaks = {
        row["rank"]: row["peak_reserved_bytes"]
        for row in memory(run).to_pylist()
        if row["phase"] == "all" and row["device"].startswith("device")
    }
    rows, worst = {}, (1.0, 0, 0, 0)
    for rank in np.unique(events.rank[again]).tolist():
        mine = again & (events.rank == rank)
        device = device_of(run.recording.part(rank))
        capacity = None if device is None else device.memory_bytes
        peak = peaks.get(rank)
        if not capacity or peak is None or np.isnan(events.work_bytes[mine]).any():
            return
        steps = len(np.unique(events.step[mine]))
        activations = int(events.work_bytes[mine].sum() / steps)
        free = 1 - (peak + activations) / capacity
        if free < _LEAST_FREE_RATIO:
            return
        rows[rank] = events.row[mine]
        worst = min(worst, (free, peak, capacity, activations))
    if rows:
        _, peak, capacity, activations = worst
        yield Sighting(
            detector="unneeded_recomputation",
            events=rows,
            changes=Changes(fix=("compute.recompute",)),
            evidence={"peak": peak, "capacity": capacity, "activations": activations},
        )
