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
    remedy="Nothing to mend in the program: this time is gone when it is not profiled. Trust the "
    "step time of steps without a trace, and trace without shapes and stacks to lower it.",
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
