"""Ranks that wait for one that has more work than they, and stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chopper import wording as fmt
from chopper.analyzers.detectors import Sighting, detector
from chopper.analyzers.events.device import Events, of_class
from chopper.analyzers.replay.whatif_options import Changes
from chopper.analyzers.views.stragglers import Uneven

_MORE = "rank {rank} has {factor} the work of the others"
_OF = {
    "uneven_work": (
        f"Uneven work: {_MORE}",
        "Give each rank a batch of equal cost (tokens counted instead of samples, lengths in "
        "buckets), or divide parameters and layers by their time",
    ),
    "experts": (
        f"Uneven experts: {_MORE}",
        "Balance the experts: an auxiliary loss or a bias of the router, a limit on the tokens of "
        "an expert, or popular experts on several ranks",
    ),
    "ring": (
        f"Uneven ring: {_MORE}",
        "Give each rank an early and a late part of the sequence (zigzag or striped ring "
        "attention), so that a causal mask leaves all the same work",
    ),
    "pipeline": (
        "Pipeline bubbles: stages wait for each other",
        "More micro-batches per step, or an interleaved or zero-bubble schedule, shorten filling "
        "and draining; stages of equal time the rest",
    ),
}
"""Kind of unevenness: its title, and what mends it."""

DETECTOR = detector("uneven_work")


def uneven_work(uneven: Uneven | None, events: Events) -> Iterator[Sighting]:
    """COMMUNICATION, PIECE -> at most one sighting."""
    if uneven is None or uneven.kind not in _OF:
        return
    what, remedy = _OF[uneven.kind]
    run_ns = _balanced(events)
    rank = uneven.worst.rank
    yield Sighting(
        detector="uneven_work",
        events={rank: run_ns[rank][0]},
        run_ns=run_ns,
        changes=Changes(fix=("communication.wait",)) if uneven.kind == "pipeline" else None,
        evidence={
            "what": what.format(rank=rank, factor=fmt.factor(uneven.work_ratio)),
            "rank": rank,
            "work_factor": uneven.work_ratio,
            "wait_ratio": uneven.wait_ratio,
            "own_ns": uneven.own_ns[rank],
            "others_ns": uneven.others_ns,
            "remedy": remedy,
        },
    )


def _balanced(events: Events) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return the computing events of each rank, and their times if all ranks computed as long.

    Each operator takes as long on all ranks that have it, as far as that makes their sums equal.
    """
    at = np.flatnonzero(of_class(events, "compute"))
    ranks, rank = np.unique(events.rank[at], return_inverse=True)
    name = events.op[0][at] + 1
    spent_ns = np.zeros((len(ranks), len(events.op[1]) + 1))
    np.add.at(spent_ns, (rank, name), events.dur_ns[at])
    mean_ns = (spent_ns > 0) * (spent_ns.sum(axis=0) / np.maximum((spent_ns > 0).sum(axis=0), 1))
    total_ns = mean_ns.sum(axis=1, keepdims=True)
    factor = mean_ns / np.maximum(spent_ns, 1) * total_ns.mean() / np.maximum(total_ns, 1)
    run_ns = np.rint(events.dur_ns[at] * factor[rank, name]).astype(np.int64)
    mine = [(number, rank == position) for position, number in enumerate(ranks.tolist())]
    return {number: (events.row[at][of], run_ns[of]) for number, of in mine}
