"""Kernels that overlapped communication: overlap ratio and slowdown.

The overlap ratio of an instance is the share of its time with communication on the same device:
*alone* means no overlap at all, *overlapped* half of the time or more.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.device import Events, arguments, of_class
from chopper.analyzers.events.groups import Groups, real_or_null, text_rows, whole_or_null
from chopper.analyzers.trace.columns import distinct_rows, run_starts
from chopper.analyzers.trace.intervals import union
from chopper.analyzers.views import View, column, optional

_FEWEST = 5
"""Instances below which no correlation is told."""
_ALONE_RATIO, _BESIDE_RATIO = 0.0, 0.5
"""An instance ran alone with no overlap at all, beside communication with at least half of it."""

VIEW = View(
    "overlap",
    __doc__,
    (
        optional("op", "Operator that launched the kernels; null where none was recorded."),
        optional("input_dims", "Shapes of the operator's inputs, JSON as recorded."),
        column("instance_count", "Number of instances of the kernel."),
        column("overlap_ratio", "Share of the instances' time that overlapped communication."),
        optional("slowdown_factor", "Median duration with communication over the median alone."),
        optional("spearman", "Rank correlation of overlap ratio and duration.", "float64"),
        optional("pearson", "Linear correlation of overlap ratio and duration.", "float64"),
        optional("median_alone_ns", "Median duration of instances without any overlap."),
        optional("median_beside_ns", "Median duration of instances overlapped at least half."),
        column("alone_instance_count", "Number of instances without any overlap."),
        column("beside_instance_count", "Number of instances overlapped at least half."),
        column("overlap_ns", "Time of all instances that overlapped communication."),
        column("time_ns", "Time of all instances."),
        column("kernel", "Name of the kernel as recorded."),
    ),
    title="Overlap with communication",
    section="Communication",
    needs="no communication, or no compute, was recorded",
)


def overlap(run: Attributed, events: Events) -> pa.Table:
    """DEVICE_EVENT, EVENT_LINK -> OVERLAP, the longest beside communication first."""
    rows = np.flatnonzero(of_class(events, "compute") & (events.dur_ns > 0))
    if not len(rows) or not run.communication.num_rows:
        return VIEW.empty()
    dims, texts = arguments(run, events, rows, "input_dims")
    groups = Groups([events.op[0][rows], dims, events.kernel[0][rows]])
    beside, dur = _beside(events, rows), events.dur_ns[rows]
    ratio = beside / dur
    time_ns, overlap_ns = groups.sum(dur), groups.sum(beside)
    group, size = groups.of_row, len(groups)
    is_alone, is_beside = ratio <= _ALONE_RATIO, ratio >= _BESIDE_RATIO
    alone = _medians(dur[is_alone], group[is_alone], size)
    together = _medians(dur[is_beside], group[is_beside], size)
    spearman = correlations(
        ranks_within(ratio, group, size), ranks_within(dur, group, size), group, size
    )
    columns = {
        "op": text_rows(events.op, rows[groups.first]),
        "input_dims": text_rows((dims, texts), groups.first),
        "kernel": text_rows(events.kernel, rows[groups.first]),
        "instance_count": groups.count,
        "time_ns": time_ns,
        "overlap_ns": overlap_ns,
        "overlap_ratio": overlap_ns / time_ns,
        "alone_instance_count": np.bincount(group[is_alone], minlength=size),
        "beside_instance_count": np.bincount(group[is_beside], minlength=size),
        "median_alone_ns": whole_or_null(np.trunc(alone)),
        "median_beside_ns": whole_or_null(np.trunc(together)),
        "slowdown_factor": real_or_null(together / alone),
        "spearman": real_or_null(spearman),
        "pearson": real_or_null(correlations(ratio, dur.astype(np.float64), group, size)),
    }
    order = np.lexsort((-time_ns, -overlap_ns))
    return VIEW.of(columns).take(order).combine_chunks()


def _beside(events: Events, computing: np.ndarray) -> np.ndarray:
    """Time of each computing event in which communication ran on its rank's device."""
    found = np.zeros(len(computing), dtype=np.int64)
    sent = of_class(events, "communication")
    end = events.start_ns + events.dur_ns
    _, device = distinct_rows([events.rank, events.device_id])
    for one in np.unique(device[computing]):
        mine = sent & (device == one)
        at = np.flatnonzero(device[computing] == one)
        rows = computing[at]
        busy = union(events.start_ns[mine], end[mine])
        found[at] = busy.within(events.start_ns[rows], end[rows])
    return found


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
    """Return ranks from 0 on within each group, ties sharing their mean."""
    order = np.lexsort((values, group))
    new = run_starts(group[order], values[order])
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(order)) - 1
    size = np.bincount(group, minlength=count)
    begin = np.cumsum(size) - size
    found = np.empty(len(order))
    found[order] = ((first + last) / 2)[np.cumsum(new) - 1] - begin[group[order]]
    return found


def correlations(a: np.ndarray, b: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    """Return Pearson's coefficient by group; NaN below five values, or where a side is constant."""
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
