"""Steps in which the device waits for the host to launch small kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Detector, Sighting, spent_in
from chopper.analyzers.events.device import Events
from chopper.analyzers.replay.whatif_options import Changes

_LEAST_RATIO = 0.1
_FEWEST = 10
_REMOVED = ("idle.call", "idle.preparation.dispatch", "idle.preparation.runtime")
_CAUSES = (*_REMOVED, "idle.launch_latency")
"""Launches that wait in a graph on the device have no latency: the replay shows it."""
DETECTOR = Detector(
    title="Launch-bound: the host launches kernels more slowly than the device runs them",
    condition=f"Steps have at least {_FEWEST} kernels on average, and the device was idle for more "
    "than a tenth of the time while the host was in operators or launched kernels.",
    without="operators and launching calls take no time on the host, as in a CUDA graph; Python "
    "between operators, data loading and synchronization stay: a lower bound, since a graph runs "
    "no Python inside of it either",
    evidence="{kernels} kernels with a median of {median_ns:ns}; the device waited for operators "
    "and launches {idle_ratio:ratio} of the time, the user's Python not counted",
    remedy="Wrap the model in torch.compile(mode='reduce-overhead') or a CUDA graph "
    "(torch.cuda.make_graphed_callables), or increase the work per kernel with a larger "
    "batch.",
    view="launches",
)


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
