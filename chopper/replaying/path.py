"""The critical path of a run, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from chopper.analyzers.replay.path import causes_of, path_of
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
    found = causes_of(replay.unmodified, path_of(replay.unmodified), replay.facts)
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


__all__ = ["critical_path"]
