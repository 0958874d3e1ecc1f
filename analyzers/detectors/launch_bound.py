"""Steps in which the device waits for the host to launch small kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Sighting, detector, spent_in
from chopper.analyzers.events.device import Events
from chopper.analyzers.replay.whatif_options import Changes

_LEAST_RATIO = 0.1
_FEWEST = 10
_REMOVED = ("idle.call", "idle.preparation.dispatch", "idle.preparation.runtime")
_CAUSES = (*_REMOVED, "idle.launch_latency")
"""Launches that wait in a graph on the device have no latency: the replay shows it."""
DETECTOR = detector("launch_bound", fewest=_FEWEST)


def launch_bound(run: Attributed, events: Events) -> Iterator[Sighting]:
    """PIECE -> at most one sighting."""
    if any(joined.host_only for joined in run.joined.values()):
        return
    if len(events) < max(_FEWEST * run.windows.num_rows, 1):
        return
    time_ns, rows = spent_in(run, _CAUSES)
    if time_ns < _LEAST_RATIO * run.observed_ns:
        return
    yield Sighting(
        detector="launch_bound",
        events=rows,
        changes=Changes(fix=_REMOVED),
        evidence={
            "kernels": len(events),
            "median_ns": int(np.median(events.dur_ns)),
            "idle_ratio": time_ns / run.observed_ns,
        },
    )
