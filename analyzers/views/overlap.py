"""Overlap of kernels with communication, and whether it slows them; and who leads whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.columns import dictionary, distinct_rows, ints, strings
from chopper.analyzers.trace.intervals import union
from chopper.analyzers.views.communication import members, of_links
from chopper.analyzers.views.events import of_run
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.analyzers.views.events import Events
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
    columns = {
        "op": dictionary(keys[0][first], events.op[1]),
        "input_dims": dictionary(dims[first], texts),
        "kernel": dictionary(keys[2][first], events.kernel[1]),
        **_told(ratio, dur, beside, group, len(first)),
    }
    declared = TABLES["overlap"].arrow
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


def _told(
    ratio: np.ndarray, dur: np.ndarray, beside: np.ndarray, group: np.ndarray, count: int
) -> dict[str, pa.Array]:
    """The columns of all signatures: of their instances, whose signature ``group`` numbers."""
    is_alone, is_overlapped = ratio <= _ALONE_RATIO, ratio >= _BESIDE_RATIO
    alone = _medians(dur[is_alone], group[is_alone], count)
    overlapped = _medians(dur[is_overlapped], group[is_overlapped], count)
    time, overlap = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.add.at(time, group, dur)
    np.add.at(overlap, group, beside)

    def whole(values: np.ndarray) -> pa.Array:
        known = ~np.isnan(values)
        return pa.array(np.where(known, values, 0).astype(np.int64), mask=~known)

    return {
        "instance_count": pa.array(np.bincount(group, minlength=count)),
        "time_ns": pa.array(time),
        "overlap_ns": pa.array(overlap),
        "overlap_ratio": pa.array(overlap / time),
        "alone_instance_count": pa.array(np.bincount(group[is_alone], minlength=count)),
        "beside_instance_count": pa.array(np.bincount(group[is_overlapped], minlength=count)),
        "median_alone_ns": whole(alone),
        "median_beside_ns": whole(overlapped),
        "slowdown_factor": _real(overlapped / alone),
        "spearman": _real(
            correlations(
                ranks_within(ratio, group, count), ranks_within(dur, group, count), group, count
            )
        ),
        "pearson": _real(correlations(ratio, dur.astype(np.float64), group, count)),
    }


def _real(values: np.ndarray) -> pa.Array:
    return pa.array(values, mask=np.isnan(values))


def _medians(values: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    """Median of each group's whole numbers, NaN for a group without any."""
    ordered = values[np.lexsort((values, group))]
    size = np.bincount(group, minlength=count)
    has = np.flatnonzero(size)
    begin, of = (np.cumsum(size) - size)[has], size[has]
    found = np.full(count, np.nan)
    found[has] = (ordered[begin + (of - 1) // 2] + ordered[begin + of // 2]) / 2
    return found


def ranks_within(values: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    """Ranks from 0 on within each group, ties sharing their mean."""
    order = np.lexsort((values, group))
    new = np.ones(len(order), dtype=bool)
    new[1:] = (group[order][1:] != group[order][:-1]) | (values[order][1:] != values[order][:-1])
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(order)) - 1
    size = np.bincount(group, minlength=count)
    begin = np.cumsum(size) - size
    found = np.empty(len(order))
    found[order] = ((first + last) / 2)[np.cumsum(new) - 1] - begin[group[order]]
    return found


def correlations(a: np.ndarray, b: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    """Pearson's coefficient in each group.

    NaN with fewer than five values, or when one side is constant.
    """
    size = np.bincount(group, minlength=count)
    told = size >= _FEWEST
    centred = []
    for values in (a, b):
        low, high = np.full(count, np.inf), np.full(count, -np.inf)
        np.minimum.at(low, group, values)
        np.maximum.at(high, group, values)
        told &= high > low
        mean = np.bincount(group, weights=values, minlength=count) / np.maximum(size, 1)
        centred.append(values - mean[group])
    x, y = centred
    xx, yy, xy = (
        np.bincount(group, weights=product, minlength=count) for product in (x * x, y * y, x * y)
    )
    told &= (xx > 0) & (yy > 0)
    found = np.full(count, np.nan)
    found[told] = np.clip(xy[told] / np.sqrt(xx[told] * yy[told]), -1.0, 1.0)
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
