"""Ranks that wait for one that has more work than they."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chopper.analyzers.detectors import Detector, Sighting
from chopper.analyzers.events.device import Events, of_class
from chopper.analyzers.views.stragglers import Uneven

_OF = {
    "uneven_work": ("steps", "Give each rank a batch of equal cost: lengths sorted into buckets, "
    "tokens counted instead of samples, parameters or layers divided by their time"),
    "experts": ("experts", "Balance the experts: an auxiliary loss or a bias of the router, a "
    "limit on the tokens of an expert, or popular experts on several ranks"),
    "ring": ("ring", "Give each rank an early and a late part of the sequence (zigzag or striped "
    "ring attention), so that a causal mask leaves all the same work"),
}  # fmt: skip
"""Kind of unevenness: what its work is of, and what balances that."""

DETECTOR = Detector(
    title="Uneven {of}: rank {rank} has {work_factor:factor} the work of the others",
    condition="Ranks waited for each other at collectives in the steps, the rank that they waited "
    "for most has at least 1.1 times the work of the others, by FLOP, bytes or calls of each "
    "operator at equal speed, and that explains at least half of what its step takes longer "
    "without waiting. Experts: all-to-all exchanges of unequal sizes. A ring: each rank sends its "
    "own to the next before it works on what it received.",
    without="all ranks compute for as long: the same total, shared evenly",
    evidence="the others wait {wait_ratio:ratio} of the time of all ranks; without waiting, its "
    "step takes {own_ns:ns} and the others' {others_ns:ns}",
    remedy="{remedy}.",
    view="outlier_ranks",
)


def uneven_work(uneven: Uneven | None, events: Events) -> Iterator[Sighting]:
    """COMMUNICATION, PIECE -> at most one sighting."""
    if uneven is None or uneven.kind not in _OF:
        return
    of, remedy = _OF[uneven.kind]
    rank = uneven.worst.rank
    rows, run_ns = balanced(events)
    yield Sighting(
        detector="uneven_work",
        events={rank: rows[rank]},
        run_ns={r: (rows[r], run_ns[r]) for r in rows},
        evidence={
            "of": of,
            "rank": rank,
            "work_factor": uneven.work_ratio,
            "wait_ratio": uneven.wait_ratio,
            "own_ns": uneven.own_ns[rank],
            "others_ns": uneven.others_ns,
            "remedy": remedy,
        },
    )


def balanced(events: Events) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Return the computing events of each rank, and their times if all ranks computed as long.

    Each operator takes as long on all ranks that have it, as far as that makes their sums equal.
    """
    at = np.flatnonzero(of_class(events, "compute"))
    ranks, rank = np.unique(events.rank[at], return_inverse=True)
    name, run_ns = events.op[0][at] + 1, events.dur_ns[at].astype(np.float64)
    spent_ns = np.zeros((len(ranks), len(events.op[1]) + 1))
    np.add.at(spent_ns, (rank, name), run_ns)
    has = spent_ns > 0
    mean_ns = np.where(has, spent_ns.sum(axis=0) / np.maximum(has.sum(axis=0), 1), 0.0)
    run_ns *= (mean_ns / np.maximum(spent_ns, 1))[rank, name]
    total_ns = mean_ns.sum(axis=1)
    run_ns *= (total_ns.mean() / np.maximum(total_ns, 1))[rank]
    rows, times = events.row[at], np.rint(run_ns).astype(np.int64)
    mine = {number: rank == place for place, number in enumerate(ranks.tolist())}
    return {n: rows[of] for n, of in mine.items()}, {n: times[of] for n, of in mine.items()}
