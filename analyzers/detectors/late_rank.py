"""A rank for which the others wait."""

from __future__ import annotations

from collections.abc import Iterator

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Detector, Sighting
from chopper.analyzers.events.collectives import members_of
from chopper.analyzers.events.device import Events, of_class
from chopper.analyzers.replay.whatif_options import Changes
from chopper.analyzers.views.stragglers import stragglers, worst

DETECTOR = Detector(
    title="Rank {rank} is a straggler",
    condition="Only collectives that were matched on all ranks of the group and that some rank "
    "waited at count. One rank arrived last in more of them than halfway between its "
    "share by chance and all: more than three quarters with two ranks, more than nine "
    "sixteenths with eight.",
    without="no rank waits for another, and each takes as long as the median rank",
    evidence="it arrived last in {late_ratio:ratio} of the collectives and caused "
    "{share_ratio:ratio} of the waiting; compared with other ranks, it spends more time "
    "on {cause}",
    remedy="Compare the causes of that rank with another's (`--by rank`): its input data, clock, "
    "host cores, or a larger share of the work.",
    view="stragglers",
)


def late_rank(run: Attributed, events: Events) -> Iterator[Sighting]:
    """COMMUNICATION, PIECE -> at most one sighting."""
    if len(run.joined) < 2:
        return
    members = members_of(run)
    found = worst(stragglers(run, members))
    if found is None or found.late_ratio <= (1 + 1 / members.rank_count.min()) / 2:
        return
    mine = events.row[(events.rank == found.rank) & of_class(events, "communication")]
    yield Sighting(
        detector="late_rank",
        events={found.rank: mine},
        changes=Changes(fix=("communication.wait",)),
        evidence={
            "rank": found.rank,
            "late_ratio": found.late_ratio,
            "share_ratio": found.share_ratio,
            "cause": found.cause,
        },
    )
