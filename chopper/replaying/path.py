"""The critical path of a run, rank by rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper.analyzers.replay.path import Lane, lane_of
from chopper.errors import InputError
from chopper.replaying.replay import Replay, replay_of

if TYPE_CHECKING:
    from chopper.attribution import Attribution


def replay_or_reason(run: Attribution) -> Replay | str:
    """Return the replay of a run, or why it cannot be replayed."""
    try:
        return replay_of(run)
    except InputError as exc:
        return str(exc)


def lanes_of(attribution: Attribution) -> dict[int, Lane]:
    """Rank → what of the critical path lies on it.

    Raises:
        InputError: the run cannot be replayed.
    """
    replay = replay_of(attribution)
    path = replay.critical_path()
    return {
        fact.node.rank: lane_of(path, place, replay.facts)
        for place, fact in enumerate(replay.facts)
    }
