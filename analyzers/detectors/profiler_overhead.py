"""Time that the profiler itself takes from the steps it records."""

from __future__ import annotations

from collections.abc import Iterator

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Detector, Sighting, spent_in
from chopper.analyzers.replay.whatif_options import Changes

_CAUSE = "idle.preparation.profiler"
DETECTOR = Detector(
    title="The profiler slows the steps that it records",
    condition="The device was idle while the trace shows the host in the profiler's own work: "
    "filling, requesting or flushing its buffers.",
    without="that work takes no time",
    evidence="the device waited for the profiler for {idle_ns:ns} over ranks and steps",
    remedy="No change of the program is needed: without the profiler, this time is gone. Rely on "
    "the step time of untraced steps, and trace without shapes and stacks to reduce the overhead.",
    view="steps",
)


def profiler_overhead(run: Attributed) -> Iterator[Sighting]:
    """PIECE -> at most one sighting."""
    idle_ns, rows = spent_in(run, (_CAUSE,))
    if idle_ns:
        yield Sighting(
            detector="profiler_overhead",
            events=rows,
            changes=Changes(fix=(_CAUSE,)),
            evidence={"idle_ns": idle_ns},
        )
