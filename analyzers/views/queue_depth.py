"""Depth of each stream's launch queue over time, by phase.

A launch enters its stream's queue when the host calls it and leaves when its work has ended. A
replayed graph is one entry until its last kernel ends. At depth 0 the device has nothing to do on
that stream; at 1024, where CUDA's queue is full, the launching call blocks until an entry completes
(as in Holistic Trace Analysis).

The phase at a time is that of the latest launch before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.groups import Groups
from chopper.analyzers.events.steps import windows_of
from chopper.analyzers.trace.columns import ints, matching, run_starts, strings
from chopper.analyzers.trace.host_device import HOST_KINDS
from chopper.analyzers.views import View, column

FULL_COUNT = 1024
"""Entries at which CUDA's launch queue is full."""

VIEW = View(
    "queue_depth",
    __doc__,
    (
        column("rank", "Global rank that the row is about.", "int32"),
        column("stream_id", "Stream whose queue it is.", "int64"),
        column("phase", "Phase that the host was launching."),
        column("time_ns", "Time of launching in that phase, between the first and the last step."),
        column("empty_ratio", "Share of the time with nothing queued."),
        column("mean_depth", "Mean number of queued launches over time.", "float64"),
        column("median_depth", "Median number of queued launches, weighted by time.", "int64"),
        column("p95_depth", "95th percentile of the queued launches, weighted by time.", "int64"),
        column("max_depth", "Largest number of queued launches.", "int64"),
        column("full_ratio", "Share of the time with CUDA's queue full (1024 entries or more)."),
        column("device_id", "Ordinal of the stream's device.", "int32"),
    ),
    title="Queue depth",
    section="Steps and host",
    needs="no launch was recorded, or the host ran everything itself",
)


@dataclass(frozen=True)
class Depth:
    """Depth of one stream's queue: constant from each time to the next, 0 before the first.

    ``phase`` is the code of that of the latest launch so far.
    """

    rank: int
    device_id: int
    stream_id: int
    time_ns: np.ndarray
    count: np.ndarray
    phase: np.ndarray
    phases: list[str]


def queue_depth(run: Attribution) -> pa.Table:
    """EVENT_LINK, DEVICE_EVENT, HOST_SPAN, WINDOW -> QUEUE_DEPTH, the fullest first."""
    rows: list[dict[str, object]] = []
    for rank in run.recording.ranks:
        windows = windows_of(run, rank)
        if windows.num_rows:
            start, end = ints(windows, "start_ns").min(), ints(windows, "end_ns").max()
            for depth in depths(run, rank):
                rows += _distributions(depth, int(start), int(end))
    found = VIEW.of_rows(rows)
    entries = ints(found, "time_ns") * found["mean_depth"].to_numpy()
    return found.take(np.argsort(-entries, kind="stable"))


def depths(run: Attribution, rank: int) -> list[Depth]:
    """Return the depth of the queue of each stream of a rank, the busiest first.

    Events whose launch was not recorded, and what the host ran itself, are in no queue.
    """
    links = run.links.get(rank)
    if links is None or not links.num_rows:
        return []
    events = run.joined[rank].device_event
    on_host = matching(*strings(events, "kind"), HOST_KINDS.__contains__)
    launch = ints(links, "launch_row")
    rows = np.flatnonzero((launch >= 0) & ~on_host)
    if not len(rows):
        return []
    device, stream = ints(events, "device_id")[rows], ints(events, "stream_id")[rows]
    ended = (ints(events, "start_ns") + ints(events, "dur_ns"))[rows]
    entries = Groups([device, stream, launch[rows]])
    leaves = np.full(len(entries), np.iinfo(np.int64).min, dtype=np.int64)
    np.maximum.at(leaves, entries.of_row, ended)
    first = rows[entries.first]
    enters = ints(run.joined[rank].host_span, "start_ns")[launch[first]]
    phase, phases = strings(links, "phase")
    streams = Groups([device[entries.first], stream[entries.first]])
    found = []
    for i in np.argsort(-streams.count, kind="stable").tolist():
        mine = np.flatnonzero(streams.of_row == i)
        one = entries.first[streams.first[i]]
        over_time = _over_time(enters[mine], leaves[mine], phase[first[mine]])
        found.append(Depth(rank, int(device[one]), int(stream[one]), *over_time, phases))
    return found


def _over_time(
    enters: np.ndarray, leaves: np.ndarray, phase: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(times, entries from then on, phase of the latest entry) of a queue."""
    order = np.argsort(enters, kind="stable")
    enters, leaves, phase = enters[order], leaves[order], phase[order]
    time = np.sort(np.concatenate([enters, leaves]))
    # np.unique without an index hashes, which takes seconds for a million distinct times.
    time = time[run_starts(time)]
    inside = np.searchsorted(enters, time, side="right")
    count = inside - np.searchsorted(np.sort(leaves), time, side="right")
    return time, np.maximum(count, 0), phase[np.maximum(inside - 1, 0)]


def _distributions(depth: Depth, start_ns: int, end_ns: int) -> list[dict[str, object]]:
    """One row per phase: how deep the queue was for how long, within [start, end)."""
    time = np.clip(np.concatenate([[start_ns], depth.time_ns, [end_ns]]), start_ns, end_ns)
    length = np.diff(time)
    count = np.concatenate([[0], depth.count])
    # Before the first launch the queue is empty in the phase that comes.
    phase = np.concatenate([depth.phase[:1], depth.phase])
    rows: list[dict[str, object]] = []
    for code in np.unique(phase[length > 0]).tolist():
        mine = (phase == code) & (length > 0)
        span, deep = length[mine], count[mine]
        order = np.argsort(deep, kind="stable")
        reached = np.cumsum(span[order])
        total = int(reached[-1])
        at = np.searchsorted(reached, [total / 2, total * 0.95])
        rows.append(
            {
                "rank": depth.rank,
                "stream_id": depth.stream_id,
                "phase": depth.phases[code],
                "time_ns": total,
                "mean_depth": float((span * deep).sum() / total),
                "median_depth": int(deep[order[at[0]]]),
                "p95_depth": int(deep[order[at[1]]]),
                "max_depth": int(deep.max()),
                "empty_ratio": float(span[deep == 0].sum() / total),
                "full_ratio": float(span[deep >= FULL_COUNT].sum() / total),
                "device_id": depth.device_id,
            }
        )
    return rows
