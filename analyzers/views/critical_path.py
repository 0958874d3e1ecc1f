"""Views of the critical path."""

from __future__ import annotations

import numpy as np

from chopper.analyzers.replay.path import causes_of
from chopper.analyzers.replay.replay import Replay, lanes_of
from chopper.analyzers.trace.columns import dictionary, nullable
from chopper.analyzers.views import Rows, view
from chopper.causes import LEAVES


@view
def critical_path(replay: Replay | str) -> Rows:
    """Critical path of the run by cause and name.

    From a replay: the longest chain of dependencies to the end of the last step. Its times sum to
    the length of the path.

    title: Critical path
    section: Critical path
    needs: the run has no device events to replay, or their launches were not recorded
    columns:
      cause: Id of a leaf cause.
      name: Operator, kernel or host work that ran or was waited for.
      time_ns: Time on the critical path.
      share_ratio, null: Share of the critical path.
    """
    if isinstance(replay, str):
        return []
    found = causes_of(replay.unmodified, replay.critical_path(), replay.facts)
    rows = sorted(((c, n, round(t)) for (c, n), t in found.items()), key=lambda row: -row[2])
    total = sum(time for _, _, time in rows)
    return [
        {"cause": cause, "name": name, "time_ns": time, "share_ratio": time / max(total, 1)}
        for cause, name, time in rows
    ]


@view
def critical_path_timeline(replay: Replay | str) -> Rows:
    """Critical path of the run in order of time, with rank, cause and name.

    It shows which rank everything waited for, and why. Host work lies on the path where the device
    waited for the host.

    title: Critical path over time
    section: Critical path
    needs: the run has no device events to replay, or their launches were not recorded
    columns:
      rank, int32: Global rank on which the stretch lies.
      start_ns: Start relative to the start of the path, in the clock of the rank.
      dur_ns: Duration of the stretch.
      cause: Id of the leaf cause with most of the time.
      name: Operator, kernel, host span, or what a wait led to.
      event_row, int64, null: Row of the device event that ran; null where none did.
      span_row, int64, null: Row of the host span that ran; null where none did.
    """
    if isinstance(replay, str):
        return critical_path_timeline.view.empty()
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
        parts.append(critical_path_timeline.view.of(columns))
    return critical_path_timeline.view.joined(parts).sort_by("start_ns")
