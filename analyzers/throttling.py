"""Episodes in which something held the clock down, and the kernels that they hit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.clock_views import Clocked, clocked
from chopper.analyzers.clocks import CLOCK_LABELS, ClockSeries
from chopper.analyzers.columns import dictionary, nullable
from chopper.analyzers.events import group_of
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.attribution import Attribution

_HELD = ["power_cap", "thermal", "application"]
_COLUMNS = [CLOCK_LABELS.index(label) for label in _HELD]


def throttle_episodes(attribution: Attribution) -> pa.Table:
    """Uninterrupted readings with one reason, most attributed loss first.

    DEVICE_CLOCK, DEVICE_EVENT, PIECE -> THROTTLE_EPISODES. A reading stands for the time half-way to
    its neighbours. Of several reasons at once the first of power, heat and a set clock counts.
    """
    found = clocked(attribution)
    parts = []
    if found is not None:
        for rank, factors in attribution.factors.items():
            for device, series in factors.clocks.readers.items():
                mine = found.rows[
                    (found.events.rank[found.rows] == rank)
                    & (found.events.device_id[found.rows] == device)
                ]
                parts.append(_of_device(found, rank, series, np.isin(found.rows, mine)))
    if not parts:
        return TABLES["throttle_episodes"].empty()
    table = pa.concat_tables(parts).unify_dictionaries().combine_chunks()
    return table.sort_by([("loss_ns", "descending"), ("dur_ns", "descending")])


def _of_device(found: Clocked, rank: int, series: ClockSeries, mine: np.ndarray) -> pa.Table:
    """Episodes of one device; ``mine`` marks its events among the clocked ones."""
    held = series.labels[:, _COLUMNS]
    reason = np.where(held.any(axis=1), held.argmax(axis=1), -1)
    begins = np.flatnonzero(np.concatenate([[True], reason[1:] != reason[:-1]]))
    time = series.time_ns
    edges = np.concatenate([[time[0]], (time[:-1] + time[1:]) // 2, [time[-1]]])
    start, end = edges[begins], edges[np.append(begins[1:], len(time))]
    length = np.diff(edges).astype(np.float64)
    clock = np.add.reduceat(series.clock_hz * length, begins)
    power = np.add.reduceat(series.power_w * length, begins)
    whole = np.maximum(np.add.reduceat(length, begins), 1)
    events = found.events
    rows = found.rows[mine]
    middle = events.start_ns[rows] + events.dur_ns[rows] // 2
    at = np.clip(np.searchsorted(start, middle, side="right") - 1, 0, len(start) - 1)
    count = len(start)
    loss = np.zeros(count, dtype=np.int64)
    np.add.at(loss, at, found.loss_ns[mine])
    busy = np.zeros(count, dtype=np.int64)
    np.add.at(busy, at, found.time_ns[mine])
    kept = np.flatnonzero(reason[begins] >= 0)
    power = (power / whole)[kept]
    columns = {
        "rank": pa.array(np.full(len(kept), rank)),
        "reason": dictionary(reason[begins][kept], _HELD),
        "start_ns": pa.array(start[kept]),
        "dur_ns": pa.array((end - start)[kept]),
        "clock_mean_hz": pa.array(np.rint(clock / whole)[kept].astype(np.int64)),
        "clock_low_hz": pa.array(
            np.minimum.reduceat(series.clock_hz, begins)[kept].astype(np.int64)
        ),
        "power_mean_w": pa.array(power, mask=np.isnan(power)),
        "kernel_count": pa.array(np.bincount(at, minlength=count)[kept]),
        "time_ns": pa.array(busy[kept]),
        "loss_ns": pa.array(loss[kept]),
        "op": dictionary(
            _most(at, events.op[0][rows], found.loss_ns[mine], count)[kept], events.op[1]
        ),
        "step": nullable(_first(at, events.step[rows], count)[kept]),
    }
    declared = TABLES["throttle_episodes"].arrow
    return pa.Table.from_arrays([columns[f.name].cast(f.type) for f in declared], schema=declared)


def _most(episode: np.ndarray, op: np.ndarray, loss_ns: np.ndarray, count: int) -> np.ndarray:
    """Operator that lost most in each episode, -1 where none lost anything."""
    found = np.full(count, -1, dtype=np.int64)
    some = np.flatnonzero(loss_ns > 0)
    if not len(some):
        return found
    group, first = group_of([episode[some], op[some]])
    total = np.bincount(group, weights=loss_ns[some])
    order = np.lexsort((total, episode[some][first]))
    # Of several assignments to one place the last one stays: the largest.
    found[episode[some][first][order]] = op[some][first][order]
    return found


def _first(episode: np.ndarray, step: np.ndarray, count: int) -> np.ndarray:
    """Step of the first kernel of each episode, -1 for none."""
    found = np.full(count, -1, dtype=np.int64)
    found[episode[::-1]] = step[::-1]
    return found
