"""Critical path of the run by cause and name.

From a replay: the longest chain of dependencies to the end of the last step. Its times sum to the
length of the path.
"""

from __future__ import annotations

import pyarrow as pa

from chopper.analyzers.replay.path import causes_of
from chopper.analyzers.replay.replay import Replay
from chopper.analyzers.views import View, column, optional

VIEW = View(
    "critical_path",
    __doc__,
    (
        column("cause", "Id of a leaf cause."),
        column("name", "Operator, kernel or host work that ran or was waited for."),
        column("time_ns", "Time on the critical path."),
        optional("share_ratio", "Share of the critical path."),
    ),
    title="Critical path",
    section="Critical path",
    needs="the run has no device events to replay, or their launches were not recorded",
)


def critical_path(replay: Replay | str) -> pa.Table:
    """HOST_SPAN, DEVICE_EVENT, PIECE -> CRITICAL_PATH by cause and name, most time first."""
    if isinstance(replay, str):
        return VIEW.empty()
    found = causes_of(replay.unmodified, replay.critical_path(), replay.facts)
    rows = sorted(((c, n, round(t)) for (c, n), t in found.items()), key=lambda row: -row[2])
    total = sum(time for _, _, time in rows)
    return VIEW.of_rows(
        [
            {"cause": cause, "name": name, "time_ns": time, "share_ratio": time / max(total, 1)}
            for cause, name, time in rows
        ]
    )
