"""A rank for which the others wait, at work that is equal to theirs."""

from __future__ import annotations

from collections.abc import Iterator

from chopper import wording as fmt
from chopper.analyzers.detectors import Sighting, detector
from chopper.analyzers.events.device import Events, of_class
from chopper.analyzers.replay.whatif_options import Changes
from chopper.analyzers.views.stragglers import Uneven
from chopper.causes import CAUSES

DETECTOR = detector("late_rank")


def late_rank(uneven: Uneven | None, events: Events) -> Iterator[Sighting]:
    """COMMUNICATION, PIECE -> at most one sighting."""
    if uneven is None or uneven.kind not in ("late_rank", "late_entry"):
        return
    worst = uneven.worst
    mine = (events.rank == worst.rank) & of_class(events, "communication")
    late, reason = (
        "enters late",
        (
            f"{fmt.ratio(worst.entered_ratio)} of the waiting has no cause in it: it had begun the "
            "step, or left the collective before, later than others"
        ),
    )
    if uneven.kind == "late_rank" and worst.cause is not None:
        late = "is a straggler"
        reason = f"it spends more time than others on {fmt.inside(CAUSES[worst.cause].label)}"
    yield Sighting(
        detector="late_rank",
        events={worst.rank: events.row[mine]},
        changes=Changes(fix=("communication.wait",)),
        evidence={
            "rank": worst.rank,
            "late": late,
            "late_ratio": worst.late_ratio,
            "share_ratio": worst.share_ratio,
            "own_ns": uneven.own_ns[worst.rank],
            "others_ns": uneven.others_ns,
            "cause": worst.cause,
            "reason": reason,
        },
    )
