"""Overlap of kernels with communication, and whether it slows them; and who leads whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.columns import dictionary, distinct_rows, ints, strings
from chopper.analyzers.communication import members, of_links
from chopper.analyzers.events import of_run
from chopper.analyzers.intervals import union
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.analyzers.events import Events
    from chopper.attribution import Attribution

_FEWEST = 5
"""Instances below which no correlation is told."""
_ALONE_RATIO, _BESIDE_RATIO = 0.0, 0.5
"""An instance ran alone with no overlap at all, beside communication with at least half of it."""


def overlap(attribution: Attribution) -> pa.Table:
    """Overlap with communication by operator, shapes and kernel, the longest beside it first.

    DEVICE_EVENT, EVENT_LINK -> OVERLAP. The ratio of an instance is the part of its time in which
    communication ran on the same device.
    """
    events = of_run(attribution)
    classes = events.work_class[1]
    computing = np.flatnonzero(
        np.array([c == "compute" for c in classes] + [False])[events.work_class[0]]
        & (events.dur_ns > 0)
    )
    if not len(computing) or not attribution.communication.num_rows:
        return TABLES["overlap"].empty()
    beside = _beside(events, computing)
    dims, texts = input_dims(attribution, events, computing)
    keys = [events.op[0][computing], dims, events.kernel[0][computing]]
    first, group = distinct_rows(keys)
    ratio = beside / events.dur_ns[computing]
    dur = events.dur_ns[computing]
    order = np.argsort(group, kind="stable")
    bounds = np.cumsum(np.bincount(group, minlength=len(first)))[:-1]
    told = [_told(ratio[rows], dur[rows], beside[rows]) for rows in np.split(order, bounds)]
    columns = {
        "op": dictionary(keys[0][first], events.op[1]),
        "input_dims": dictionary(dims[first], texts),
        "kernel": dictionary(keys[2][first], events.kernel[1]),
    }
    declared = TABLES["overlap"].arrow
    for field in declared:
        if field.name not in columns:
            columns[field.name] = pa.array([t[field.name] for t in told], type=field.type)
    made = pa.table({f.name: columns[f.name] for f in declared}, schema=declared)
    most = np.lexsort((-ints(made, "time_ns"), -ints(made, "overlap_ns")))
    return made.take(pa.array(most)).combine_chunks()


def _beside(events: Events, computing: np.ndarray) -> np.ndarray:
    """Time of each computing event in which communication ran on its rank's device."""
    found = np.zeros(len(computing), dtype=np.int64)
    code = events.work_class[0]
    sent = np.array([c == "communication" for c in events.work_class[1]] + [False])[code]
    end = events.start_ns + events.dur_ns
    _, place = distinct_rows([events.rank, events.device_id])
    for one in np.unique(place[computing]):
        mine = sent & (place == one)
        at = np.flatnonzero(place[computing] == one)
        rows = computing[at]
        busy = union(events.start_ns[mine], end[mine])
        found[at] = busy.within(events.start_ns[rows], end[rows])
    return found


def input_dims(
    attribution: Attribution, events: Events, rows: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    """Recorded shapes of the operators of events as codes over all ranks; -1 for none."""
    found = np.full(len(rows), -1, dtype=np.int64)
    number: dict[str, int] = {}
    for rank in np.unique(events.rank[rows]):
        codes, values = strings(attribution.run.table(int(rank), "host_span"), "input_dims")
        at = np.flatnonzero((events.rank[rows] == rank) & (events.op_row[rows] >= 0))
        if len(at) and values:
            common = np.array([number.setdefault(v, len(number)) for v in values] + [-1])
            found[at] = common[codes[events.op_row[rows[at]]]]
    return found, list(number)


def _told(ratio: np.ndarray, dur: np.ndarray, beside: np.ndarray) -> dict[str, float | int | None]:
    """One signature's row."""
    alone, overlapped = dur[ratio <= _ALONE_RATIO], dur[ratio >= _BESIDE_RATIO]
    slower = None
    if len(alone) and len(overlapped):
        slower = float(np.median(overlapped) / np.median(alone))
    return {
        "instance_count": len(dur),
        "time_ns": int(dur.sum()),
        "overlap_ns": int(beside.sum()),
        "overlap_ratio": float(beside.sum() / dur.sum()),
        "alone_instance_count": len(alone),
        "beside_instance_count": len(overlapped),
        "median_alone_ns": int(np.median(alone)) if len(alone) else None,
        "median_beside_ns": int(np.median(overlapped)) if len(overlapped) else None,
        "slowdown_factor": slower,
        "spearman": correlation(ranked(ratio), ranked(dur)),
        "pearson": correlation(ratio, dur.astype(np.float64)),
    }


def correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Pearson's coefficient; None with fewer than five values, or when one side is constant."""
    if len(a) < _FEWEST or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    x, y = a - a.mean(), b - b.mean()
    found = float((x @ y) / np.sqrt((x @ x) * (y @ y)))
    return min(max(found, -1.0), 1.0) if np.isfinite(found) else None


def ranked(values: np.ndarray) -> np.ndarray:
    """Ranks from 0 on, ties sharing their mean: what Spearman's coefficient correlates."""
    _, number, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    mean = last - (count + 1) / 2
    found: np.ndarray = mean[number]
    return found


def lead(attribution: Attribution) -> pa.Table:
    """How long before the last rank each rank began, by step; the greatest leads first.

    The lead of an event is the latest start over the ranks less its own start, in one clock
    (arXiv 2512.08242). Collectives are matched as for waiting; computing kernels by step, name and
    order, where all ranks ran equally many of that name in that step. COMMUNICATION, DEVICE_EVENT
    -> LEAD.
    """
    rows = [*_lead_of_collectives(attribution), *_lead_of_kernels(attribution)]
    found = pa.Table.from_pylist(rows, schema=TABLES["lead"].arrow)
    return found.sort_by([("median_ns", "descending"), ("rank", "ascending")])


def _lead_of_collectives(attribution: Attribution) -> list[dict[str, object]]:
    found = members(attribution)
    if not len(found):
        return []
    ahead = found.ready_ns - found.arrival_ns
    links = of_links(attribution, found.rank, ints(found.table, "event_row"))
    return _by_rank_and_step("collective", found.rank, ints(links, "step"), ahead)


def _lead_of_kernels(attribution: Attribution) -> list[dict[str, object]]:
    ranks = attribution.run.ranks
    if len(ranks) < 2:
        return []
    events = of_run(attribution)
    computing = np.array([c == "compute" for c in events.work_class[1]] + [False])
    rows = np.flatnonzero(computing[events.work_class[0]])
    if not len(rows):
        return []
    rank = events.rank[rows]
    start = events.start_ns[rows] - offsets_ns(attribution)[rank]
    step = _numbers(attribution, rank, events.step[rows])
    order = np.lexsort((start, rank, events.kernel[0][rows], step))
    rank, start, step = rank[order], start[order], step[order]
    _, name = distinct_rows([step, events.kernel[0][rows][order]])
    _, run = distinct_rows([name, rank])
    new = np.ones(len(run), dtype=bool)
    new[1:] = run[1:] != run[:-1]
    first = np.flatnonzero(new)
    each = np.diff(np.append(first, len(run)))
    occurrence = np.arange(len(run)) - np.repeat(first, each)
    names = int(name.max()) + 1
    low = np.full(names, len(run) + 1, dtype=np.int64)
    high = np.zeros(names, dtype=np.int64)
    np.minimum.at(low, name[first], each)
    np.maximum.at(high, name[first], each)
    even = (low == high) & (np.bincount(name[first], minlength=names) == len(ranks))
    keep = np.flatnonzero(even[name])
    if not len(keep):
        return []
    _, instance = distinct_rows([name[keep], occurrence[keep]])
    latest = np.full(int(instance.max()) + 1, np.iinfo(np.int64).min, dtype=np.int64)
    np.maximum.at(latest, instance, start[keep])
    return _by_rank_and_step("kernel", rank[keep], step[keep], latest[instance] - start[keep])


def offsets_ns(attribution: Attribution) -> np.ndarray:
    """How far each rank's clock is ahead of the others', by number of the rank."""
    found = np.zeros(max(attribution.run.ranks, default=0) + 1, dtype=np.int64)
    table = attribution.communication
    rank, row = ints(table, "rank"), ints(table, "event_row")
    for one in np.unique(rank):
        at = int(np.flatnonzero(rank == one)[0])
        own = attribution.run.table(int(one), "device_event")["start_ns"][int(row[at])].as_py()
        found[one] = own - table["arrival_ns"][at].as_py()
    return found


def _numbers(attribution: Attribution, rank: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Step numbers of events from the index of their step within their rank; -1 for none."""
    windows = attribution.windows
    numbers = ints(windows, "number")
    if (numbers < 0).all():
        return np.full(len(rank), -1, dtype=np.int64)
    found = np.full(len(rank), -1, dtype=np.int64)
    for one in np.unique(rank):
        step = attribution.run.table(int(one), "step")
        traced = ints(step.filter(step["traced"]), "number")
        at = np.flatnonzero((rank == one) & (index >= 0) & (index < len(traced)))
        found[at] = traced[index[at]]
    return found


def _by_rank_and_step(
    kind: str, rank: np.ndarray, step: np.ndarray, ahead: np.ndarray
) -> list[dict[str, object]]:
    first, group = distinct_rows([rank, step])
    order = np.argsort(group, kind="stable")
    bounds = np.cumsum(np.bincount(group, minlength=len(first)))[:-1]
    return [
        {
            "rank": int(rank[at]),
            "step": None if step[at] < 0 else int(step[at]),
            "kind": kind,
            "event_count": len(rows),
            "median_ns": int(np.median(ahead[rows])),
            "p95_ns": int(np.quantile(ahead[rows], 0.95)),
            "last_ratio": float((ahead[rows] <= 0).mean()),
        }
        for at, rows in zip(first, np.split(order, bounds), strict=True)
    ]
