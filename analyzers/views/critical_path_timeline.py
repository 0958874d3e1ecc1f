"""Critical path of the run in order of time, with rank, cause and name.

It shows which rank everything waited for, and why. Host work lies on the path where the device
waited for the host.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.replay.replay import Replay, lanes_of
from chopper.analyzers.trace.columns import dictionary, nullable
from chopper.analyzers.views import View, column, optional
from chopper.causes import LEAVES

VIEW = View(
    "critical_path_timeline",
    __doc__,
    (
        column("rank", "Global rank on which the stretch lies.", "int32"),
        column("start_ns", "Start relative to the start of the path, in the clock of the rank."),
        column("dur_ns", "Duration of the stretch."),
        column("cause", "Id of the leaf cause with most of the time."),
        column("name", "Operator, kernel, host span, or what a wait led to."),
        optional("event_row", "Row of the device event that ran; null where none did.", "int64"),
        optional("span_row", "Row of the host span that ran; null where none did.", "int64"),
    ),
    title="Critical path over time",
    section="Critical path",
    needs="the run has no device events to replay, or their launches were not recorded",
)


def critical_path_timeline(replay: Replay | str) -> pa.Table:
    """HOST_SPAN, DEVICE_EVENT, PIECE -> CRITICAL_PATH_TIMELINE, in order of time."""
    if isinstance(replay, str):
        return VIEW.empty()
    lanes = lanes_of(replay)
    begin = min((int(lane.start_ns[0]) for lane in lanes.values() if len(lane.event)), default=0)
    parts = []
    for rank, lane in lanes.items():
        columns = {
            "rank": np.full(len(lane.event), rank),
            "start_ns": lane.start_ns - begin,
            "dur_ns": lane.end_ns - lane.start_ns,
            "cause": dictionary(lane.cause, LEAVES),
            "name": dictionary(lane.name, lane.names),
            "event_row": nullable(np.where(lane.runs, lane.event, -1)),
            "span_row": nullable(lane.span),
        }
        parts.append(VIEW.of(columns))
    return VIEW.joined(parts).sort_by("start_ns")
