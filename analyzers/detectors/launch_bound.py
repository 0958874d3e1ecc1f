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
_CAUSES = (
    "idle.call",
    "idle.launch_latency",
    "idle.preparation.dispatch",
    "idle.preparation.runtime",
    "idle.preparation.python",
)
DETECTOR = Detector(
    title="Launch-bound: the host launches kernels more slowly than the device runs them",
    condition=f"Steps have at least {_FEWEST} kernels on average, and the device was idle for more "
    "than a tenth of the time while the host called operators, launched kernels or ran "
    "Python in between.",
    without="each step is launched as one graph",
    evidence="{kernels} kernels with a median of {median_ns:ns}; the device waited for the host "
    "{idle_ratio:ratio} of the time",
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
        changes=Changes(graphs=True),
        evidence={
            "kernels": len(events),
            "median_ns": int(np.median(events.dur_ns)),
            "idle_ratio": time_ns / run.observed_ns,
        },
    )
