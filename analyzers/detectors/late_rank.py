"""A rank for which the others wait, at work that is equal to theirs."""

from __future__ import annotations

from collections.abc import Iterator

from chopper import wording as fmt
from chopper.analyzers.detectors import Detector, Sighting
from chopper.analyzers.events.device import Events, of_class
from chopper.analyzers.replay.whatif_options import Changes
from chopper.analyzers.views.stragglers import Uneven
from chopper.causes import CAUSES

DETECTOR = Detector(
    title="Rank {rank} {late}",
    condition="Only collectives in the steps count that were matched on all ranks of the group and "
    "that some rank waited at. One rank caused more of the waiting than halfway between its share "
    "by chance and all: more than three quarters with two ranks, more than nine sixteenths with "
    "eight. Its work is no more than the others', by FLOP, bytes or calls of each operator.",
    without="no rank waits for another, and each takes as long as the median rank",
    evidence="it arrived last in {late_ratio:ratio} of the collectives and caused "
    "{share_ratio:ratio} of the waiting; without waiting, its step takes {own_ns:ns} and the "
    "others' {others_ns:ns}; {reason}",
    remedy="Compare the causes of that rank with another's (`--by rank`): its input data, clock "
    "and host cores.",
    view="stragglers",
)


def late_rank(uneven: Uneven | None, events: Events) -> Iterator[Sighting]:
    """COMMUNICATION, PIECE -> at most one sighting."""
    if uneven is None or uneven.kind not in ("late_rank", "late_entry"):
        return
    found = uneven.worst
    mine = (events.rank == found.rank) & of_class(events, "communication")
    late, reason = (
        "enters late",
        (
            f"{fmt.ratio(found.entered_ratio)} of the waiting has no cause in it: it had begun the "
            "step, or left the collective before, later than others"
        ),
    )
    if uneven.kind == "late_rank" and found.cause is not None:
        late = "is a straggler"
        reason = f"it spends more time than others on {fmt.inside(CAUSES[found.cause].label)}"
    yield Sighting(
        detector="late_rank",
        events={found.rank: events.row[mine]},
        changes=Changes(fix=("communication.wait",)),
        evidence={
            "rank": found.rank,
            "late": late,
            "late_ratio": found.late_ratio,
            "share_ratio": found.share_ratio,
            "own_ns": uneven.own_ns[found.rank],
            "others_ns": uneven.others_ns,
            "cause": found.cause,
            "reason": reason,
        },
    )
