"""How many launches wait or run on each stream, over time.

A launch enters its stream's queue when the host calls it and leaves when what it launched has
ended. A replayed graph is one entry until its last kernel ends. At depth 0 the device had nothing
to do on that stream; at 1024, where CUDA's queue is full, the launching call blocks until an entry
is done (Holistic Trace Analysis counts the same).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.host_device import HOST_KINDS
from chopper.analyzers.views.events import group_of
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.attribution import Attribution

FULL_COUNT = 1024
"""Entries at which CUDA's launch queue is full."""


@dataclass(frozen=True)
class Depth:
    """Depth of one stream's queue: constant from each time to the next, 0 before the first.

    Attributes:
        time_ns: ascending.
        count: entries from that time on.
        phase: code of the phase of the latest launch so far.
        phases: their names.
    """

    rank: int
    device_id: int
    stream_id: int
    time_ns: np.ndarray
    count: np.ndarray
    phase: np.ndarray
    phases: list[str]


def queue_depth(attribution: Attribution) -> pa.Table:
    """Time-weighted depth of each stream's queue in each phase, the fullest first.

    EVENT_LINK, DEVICE_EVENT, HOST_SPAN, WINDOW -> QUEUE_DEPTH.
    """
    rows: list[dict[str, object]] = []
    for rank in attribution.run.ranks:
        windows = attribution.windows.filter(_equal(attribution.windows["rank"], rank))
        if windows.num_rows:
            span = ints(windows, "start_ns").min(), ints(windows, "end_ns").max()
            for depth in depths(attribution, rank):
                rows += _distributions(depth, int(span[0]), int(span[1]))
    found = pa.Table.from_pylist(rows, schema=TABLES["queue_depth"].arrow)
    entries = ints(found, "time_ns") * found["mean_depth"].to_numpy()
    return found.take(pa.array(np.argsort(-entries, kind="stable")))


def _equal(column: pa.ChunkedArray, value: int) -> pa.Array:
    return pa.array(column.to_numpy() == value)


def depths(attribution: Attribution, rank: int) -> list[Depth]:
    """Depth of the queue of each stream of a rank, the busiest first.

    Events whose launch was not recorded, and what the host ran itself, are in no queue.
    """
    links = attribution.links.get(rank)
    events = attribution.run.table(rank, "device_event")
    if links is None or not links.num_rows:
        return []
    kind, kinds = strings(events, "kind")
    on_host = np.array([k in HOST_KINDS for k in kinds] + [False])[kind]
    launch = ints(links, "launch_row")
    rows = np.flatnonzero((launch >= 0) & ~on_host)
    if not len(rows):
        return []
    device, stream = ints(events, "device_id")[rows], ints(events, "stream_id")[rows]
    ended = (ints(events, "start_ns") + ints(events, "dur_ns"))[rows]
    entry, first = group_of([device, stream, launch[rows]])
    leaves = np.full(len(first), np.iinfo(np.int64).min, dtype=np.int64)
    np.maximum.at(leaves, entry, ended)
    enters = ints(attribution.run.table(rank, "host_span"), "start_ns")[launch[rows][first]]
    phase, phases = strings(links, "phase")
    place, example = group_of([device[first], stream[first]])
    found = []
    for i in np.argsort(-np.bincount(place), kind="stable").tolist():
        mine = np.flatnonzero(place == i)
        one = first[example[i]]
        found.append(
            Depth(
                rank,
                int(device[one]),
                int(stream[one]),
                *_steps(enters[mine], leaves[mine], phase[rows][first[mine]]),
                phases,
            )
        )
    return found


def _steps(
    enters: np.ndarray, leaves: np.ndarray, phase: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(times, entries from then on, phase of the latest entry) of a queue."""
    order = np.argsort(enters, kind="stable")
    enters, leaves, phase = enters[order], leaves[order], phase[order]
    time = np.sort(np.concatenate([enters, leaves]))
    # np.unique without an index hashes, which takes seconds for a million distinct times.
    time = time[np.concatenate([[True], time[1:] != time[:-1]])]
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
