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
    title="Rank {rank} comes last",
    condition="Of the collectives that all ranks of the group were seen in and some waited at, one "
    "rank came last in more than halfway from its share by chance to all of them: in more than "
    "three quarters with two ranks, in more than nine of sixteen with eight.",
    without="no rank waits for another, and each takes as long as the middle one",
    evidence="it came last in {late_ratio:ratio} of the collectives and caused "
    "{share_ratio:ratio} of the waiting; more time than the others' goes to {cause}",
    remedy="Look at that rank's causes beside another's (`--by rank`): its data, its clock, its "
    "host's cores, or more work than the others have.",
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
