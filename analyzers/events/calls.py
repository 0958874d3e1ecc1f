"""Calls of operators and their statistics: what the views of operators share.

A call's time is the time in which device events that it launched itself (as their innermost
operator) ran: their union, as TraceLens' *direct kernel time* has it. What others ran beside them
counts in full, so the sums over calls can exceed the attributed time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from chopper.analyzers.events.device import Events
from chopper.analyzers.events.groups import Groups, busy_of, text_rows, whole_or_null
from chopper.tables import Table, column, optional

SHARE = optional("share_ratio", "Share of the sum of times over all rows; null for no time.")
RATES = (
    optional("compute_rate_flop_per_s", "FLOP over the time of the device events."),
    optional("memory_rate_bytes_per_s", "Bytes over the time of the device events."),
)
SPREAD = (
    column("median_ns", "Median time of one call."),
    column("min_ns", "Time of the fastest call."),
    column("max_ns", "Time of the slowest call."),
    column("std_ns", "Standard deviation of the time over calls (n − 1); 0 for a single one."),
)


@dataclass(frozen=True)
class Calls:
    """Calls of operators: the call of each event, and the time of each call."""

    groups: Groups
    busy_ns: np.ndarray


def calls_of(events: Events) -> Calls:
    """Group events by operator call; an event without an operator is a call of its own."""
    alone = events.op_row < 0
    groups = Groups([events.rank, np.where(alone, -1 - events.row, events.op_row)])
    return Calls(groups, busy_of(groups.of_row, len(groups), events.start_ns, events.dur_ns))


def timed_table(
    table: Table, groups: Groups, time_ns: np.ndarray, columns: dict[str, object]
) -> pa.Table:
    """Return one row per group with exact statistics of its times, most time first.

    The median of an even number is half-way between the two in the middle, rounded down.
    """
    if not len(groups):
        return table.empty()
    count = groups.count
    ordered = time_ns[np.lexsort((time_ns, groups.of_row))]
    begin = np.cumsum(count) - count
    total = np.add.reduceat(ordered, begin)
    mean = total / count
    squares = np.add.reduceat((ordered - np.repeat(mean, count)) ** 2, begin)
    whole = int(total.sum())
    times = {
        "call_count": count,
        "time_ns": total,
        "share_ratio": pa.array(total / whole) if whole else pa.nulls(len(total), pa.float64()),
        "mean_ns": np.rint(mean).astype(np.int64),
        "median_ns": (ordered[begin + (count - 1) // 2] + ordered[begin + count // 2]) // 2,
        "min_ns": ordered[begin],
        "max_ns": ordered[begin + count - 1],
        "std_ns": np.rint(np.sqrt(squares / np.maximum(count - 1, 1))).astype(np.int64),
    }
    return table.of(times | columns).take(np.argsort(-total, kind="stable"))


def work_columns(
    events: Events, group: np.ndarray, time_ns: np.ndarray, divisor: np.ndarray | int
) -> dict[str, pa.Array]:
    """Columns of modelled work; null where it is not known of all products of a group.

    Work is told per ``divisor`` calls of a group.
    """
    size = len(time_ns)
    flop = _sum_if_known(events.work_flop, events.modelled, group, size)
    traffic = _sum_if_known(events.work_bytes, events.modelled, group, size)
    ideal_ns = _sum_if_known(events.ideal_ns, events.math, group, size)
    roofline_ns = _sum_if_known(events.roofline_ns, events.modelled, group, size)
    seconds = np.where(time_ns > 0, time_ns, np.nan) / 1e9
    with np.errstate(divide="ignore", invalid="ignore"):
        intensity = np.where(traffic > 0, flop / traffic, np.nan)
    return {
        "dtype": text_rows((_main_dtype(events, group, size), events.dtype[1]), np.arange(size)),
        "math_flop": whole_or_null(flop / divisor),
        "traffic_bytes": whole_or_null(traffic / divisor),
        "compute_rate_flop_per_s": pa.array(flop / seconds, from_pandas=True),
        "memory_rate_bytes_per_s": pa.array(traffic / seconds, from_pandas=True),
        "flop_per_byte": pa.array(intensity, from_pandas=True),
        "ideal_ns": whole_or_null(ideal_ns / divisor),
        "roofline_ns": whole_or_null(roofline_ns / divisor),
    }


def _main_dtype(events: Events, group: np.ndarray, size: int) -> np.ndarray:
    """Data type in which most of each group's time was spent, -1 for none."""
    codes, names = events.dtype
    known = codes >= 0
    time = np.bincount(
        group[known] * len(names) + codes[known],
        weights=events.dur_ns[known],
        minlength=size * len(names),
    ).reshape(size, len(names))
    # Arguments tell the type, and the kernel which arithmetic stands in for it: most time.
    return np.where(time.any(axis=1), time.argmax(axis=1), -1) if names else np.full(size, -1)


def _sum_if_known(values: np.ndarray, of: np.ndarray, group: np.ndarray, size: int) -> np.ndarray:
    """Sum by group over the events ``of``; NaN for groups with none, or with one unknown."""
    total: np.ndarray = np.bincount(group[of], weights=values[of], minlength=size)
    some = np.bincount(group[of], minlength=size) > 0
    return np.where(some, total, np.nan)
