"""Steps in which the device waits for the host to launch small kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Detector, Sighting
from chopper.analyzers.events.device import Events
from chopper.analyzers.replay.whatif_options import Changes
from chopper.analyzers.trace.columns import ints, strings

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
    title="The host cannot launch kernels as fast as the device runs them",
    condition=f"Steps hold at least {_FEWEST} kernels in the mean, and the device was idle for "
    "more than a tenth of the time while the host called operators, launched kernels or ran Python "
    "between them.",
    evidence="{kernels} kernels of {median_ns:ns} in the middle; {idle_ratio:ratio} of the time "
    "nothing ran",
    remedy="Wrap the model in torch.compile(mode='reduce-overhead') or a CUDA graph "
    "(torch.cuda.make_graphed_callables), or give each kernel more work: a larger batch.",
    view="launches",
)


def launch_bound(run: Attributed, events: Events) -> Iterator[Sighting]:
    """PIECE -> at most one sighting. Without the pattern, each step is launched as one graph."""
    if any(joined.host_only for joined in run.joined.values()) or not run.observed_ns:
        return
    if len(events) < _FEWEST * run.windows.num_rows:
        return
    cause, causes = strings(run.pieces, "cause")
    waiting = np.isin(cause, [causes.index(c) for c in _CAUSES if c in causes])
    pieces = run.pieces.filter(waiting)
    time_ns = int(ints(pieces, "time_ns").sum())
    if time_ns < _LEAST_RATIO * run.observed_ns:
        return
    rank, row = ints(pieces, "rank"), ints(pieces, "event_row")
    yield Sighting(
        detector="launch_bound",
        events={int(r): np.unique(row[(rank == r) & (row >= 0)]) for r in np.unique(rank)},
        changes=Changes(graphs=True),
        evidence={
            "kernels": len(events),
            "median_ns": int(np.median(events.dur_ns)) if len(events) else 0,
            "idle_ratio": time_ns / run.observed_ns,
        },
    )
