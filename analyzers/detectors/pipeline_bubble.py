"""Pipeline stages that wait for what other stages send."""

from __future__ import annotations

from collections.abc import Iterator

from chopper.analyzers.detectors import Detector, Sighting
from chopper.analyzers.detectors.uneven_work import balanced
from chopper.analyzers.events.device import Events
from chopper.analyzers.replay.whatif_options import Changes
from chopper.analyzers.views.stragglers import Uneven

DETECTOR = Detector(
    title="Pipeline: stages wait {wait_ratio:ratio} of the time for each other",
    condition="More than half of the waiting in the steps is at sends and receives between two "
    "ranks, and some rank sends only after it has worked on what it received.",
    without="no stage waits for another, and all compute for as long: the same total",
    evidence="rank {rank} has {work_factor:factor} the work of the others; without waiting, its "
    "step takes {own_ns:ns} and the others' {others_ns:ns}",
    remedy="More micro-batches per step, or an interleaved or zero-bubble schedule, shorten "
    "filling and draining; stages of equal time (move layers away from rank {rank}) the rest.",
    view="outlier_ranks",
)


def pipeline_bubble(uneven: Uneven | None, events: Events) -> Iterator[Sighting]:
    """COMMUNICATION, PIECE -> at most one sighting."""
    if uneven is None or uneven.kind != "pipeline":
        return
    rank = max(uneven.work_ns, key=uneven.work_ns.__getitem__)
    rows, run_ns = balanced(events)
    yield Sighting(
        detector="pipeline_bubble",
        events={rank: rows[rank]},
        run_ns={r: (rows[r], run_ns[r]) for r in rows},
        changes=Changes(fix=("communication.wait",)),
        evidence={
            "rank": rank,
            "work_factor": uneven.work_ratio,
            "wait_ratio": uneven.wait_ratio,
            "own_ns": uneven.own_ns[rank],
            "others_ns": uneven.others_ns,
        },
    )
