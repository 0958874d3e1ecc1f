"""The critical path of a run, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.replay.path import Lane, causes_of, lane_of
from chopper.analyzers.trace.columns import dictionary, nullable
from chopper.errors import InputError
from chopper.replaying.replay import replay_of
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.attribution import Attribution


def critical_path(attribution: Attribution) -> pa.Table:
    """The critical path of a run by cause and name. -> CRITICAL_PATH."""
    declared = TABLES["critical_path"]
    try:
        replay = replay_of(attribution)
    except InputError:
        return declared.empty()
    found = causes_of(replay.unmodified, replay.critical_path(), replay.facts)
    rows = sorted(((c, n, round(t)) for (c, n), t in found.items()), key=lambda row: -row[2])
    total = sum(time for _, _, time in rows)
    return declared.validate(
        pa.table(
            {
                "cause": pa.array([r[0] for r in rows], pa.string()).dictionary_encode(),
                "name": pa.array([r[1] for r in rows], pa.string()).dictionary_encode(),
                "time_ns": pa.array([r[2] for r in rows], pa.int64()),
                "share_ratio": pa.array([r[2] / max(total, 1) for r in rows], pa.float64()),
            }
        )
    )


def critical_path_timeline(attribution: Attribution) -> pa.Table:
    """The critical path of a run in time order. -> CRITICAL_PATH_TIMELINE."""
    declared = TABLES["critical_path_timeline"]
    try:
        lanes = lanes_of(attribution)
    except InputError:
        return declared.empty()
    begin = min((int(lane.start_ns[0]) for lane in lanes.values() if len(lane.event)), default=0)
    parts = []
    for rank, lane in lanes.items():
        parts.append(
            pa.table(
                {
                    "rank": pa.array(np.full(len(lane.event), rank), pa.int32()),
                    "start_ns": pa.array(lane.start_ns - begin),
                    "dur_ns": pa.array(lane.end_ns - lane.start_ns),
                    "cause": dictionary(lane.cause, lane.causes),
                    "name": dictionary(lane.name, lane.names),
                    "event_row": nullable(np.where(lane.runs, lane.event, -1)),
                    "span_row": nullable(lane.span),
                },
                schema=declared.arrow,
            )
        )
    found = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
    return declared.validate(found.sort_by("start_ns"))


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


__all__ = ["critical_path", "critical_path_timeline", "lanes_of"]
