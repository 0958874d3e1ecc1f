"""Peak memory of each step, from the allocator, the driver and the host.

With more steps than fit on a page, or without steps, rows are equal spans of time.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.allocations import CPU
from chopper.analyzers.events.steps import step_table, traced_steps
from chopper.analyzers.trace.columns import ints
from chopper.analyzers.views import View, column, optional

Series = dict[str, tuple[np.ndarray, np.ndarray]]

_MOST_SPANS = 100
_ALLOCATOR = {"allocated_bytes": "allocated_bytes", "reserved_bytes": "reserved_bytes"}
_RECORDED = {
    "device_memory": _ALLOCATOR,
    "allocator_event": _ALLOCATOR,
    "memory_event": _ALLOCATOR,
    "device_counter": {"device_used_bytes": "memory_used_bytes"},
    "process": {"host_process_bytes": "rss_bytes"},
    "host": {"host_available_bytes": "memory_available_bytes"},
}
"""Recorded tables, and the column of each that a column of the view is of."""

_SAMPLED = ("device_memory", "process", "host")
_GROWS = {
    "allocated_bytes": "device memory held by tensors",
    "host_process_bytes": "resident memory of the process",
}
_LEAST_READINGS = 12
_MOST_PAIRED = 200
_GROWTH_RATIO = 0.05
_LEAST_GROWTH_BYTES = 8 << 20

VIEW = View(
    "memory_over_time",
    __doc__,
    (
        column("rank", "Global rank that the row is about.", "int32"),
        optional("step", "Step number; null for spans of time.", "int64"),
        column("since_ns", "Start of the step or span, relative to the first row."),
        column("dur_ns", "Length of the step or span."),
        optional("allocated_bytes", "Peak bytes held by tensors; null where not sampled."),
        optional("reserved_bytes", "Peak bytes reserved from the driver."),
        optional("device_used_bytes", "Peak bytes in use on the device, by all processes."),
        optional("host_process_bytes", "Peak resident bytes of the rank and its children."),
        optional("host_available_bytes", "Minimum bytes available on the host."),
    ),
    title="Memory over time",
    section="Memory",
    needs="no memory was sampled (`device_memory` and `host` do), and there is no snapshot",
)


def memory_over_time(run: Attribution) -> pa.Table:
    """ALLOCATOR_EVENT, DEVICE_MEMORY, DEVICE_COUNTER, PROCESS, HOST, STEP -> MEMORY_OVER_TIME."""
    rows: list[dict[str, Any]] = []
    for rank in run.recording.ranks:
        series = _series(run, rank)
        if not series:
            continue
        spans = _spans(run, rank, series)
        for number, start, end in spans:
            row: dict[str, Any] = {"rank": rank, "step": number}
            row |= {"since_ns": start - spans[0][1], "dur_ns": end - start}
            for name, (time, values) in series.items():
                low, high = np.searchsorted(time, (start, end))
                if high > low:
                    extreme = np.min if name == "host_available_bytes" else np.max
                    row[name] = int(extreme(values[low:high]))
            if len(row) > 4:
                rows.append(row)
    return VIEW.of_rows(rows)


class Growth(NamedTuple):
    """Memory that grows from step to step.

    Attributes:
        first_bytes, last_bytes: medians of the first and last quarter of the steps after warm-up,
            whose middles are ``steps_count`` apart.
        bytes_per_step: median slope (Theil-Sen).
        steps_left: until no memory is left; None where what is left is not known.
    """

    rank: int
    what: str
    first_bytes: int
    last_bytes: int
    steps_count: int
    bytes_per_step: float
    steps_left: int | None


def memory_growth(run: Attribution) -> list[Growth]:
    """DEVICE_MEMORY, PROCESS, HOST, STEP -> memory that grows steadily, by rank.

    The first fifth of the steps is left out as warm-up. Memory grows if the medians of all four
    quarters of the rest rise by comparable amounts, and by 5 % and 8 MiB in all: caches that fill
    up, and pools that were enlarged once, do not.
    """
    found = []
    for rank in run.recording.ranks:
        series = _series(run, rank, _SAMPLED)
        if not series:
            continue
        ends_ns = ints(step_table(run, rank), "end_ns")
        part = run.recording.part(rank)
        sizes = [d.memory_bytes for d in part.devices if d.device_id == part.device_id]
        for name, what in _GROWS.items():
            if name not in series:
                continue
            time_ns, values = series[name]
            step = np.searchsorted(np.sort(ends_ns), time_ns, side="right")
            steady = (step > max(len(ends_ns) // 5, 2)) & (time_ns <= ends_ns.max(initial=0))
            grown = _grown(step[steady], values[steady])
            if grown is None:
                continue
            left_bytes = [size - int(values[-1]) for size in sizes if size]
            if name == "host_process_bytes":
                left_bytes = series.get("host_available_bytes", (ends_ns, ends_ns[:0]))[1].tolist()
            left = max(0, int(left_bytes[-1] / grown[-1])) if left_bytes else None
            found.append(Growth(rank, what, *grown, left))
    return found


def _grown(step: np.ndarray, values: np.ndarray) -> tuple[int, int, int, float] | None:
    """Return the first and last level, the steps between them and the slope; None if steady."""
    if len(np.unique(step)) < _LEAST_READINGS:
        return None
    levels = [float(np.median(part)) for part in np.array_split(values, 4)]
    total = levels[-1] - levels[0]
    least = max(_GROWTH_RATIO * levels[0], _LEAST_GROWTH_BYTES)
    if total < least or np.diff(levels).min() < total / 12:
        return None
    rows = np.unique(np.linspace(0, len(step) - 1, _MOST_PAIRED).astype(np.int64))
    x, y = step[rows].astype(float), values[rows].astype(float)
    a, b = np.triu_indices(len(rows), 1)
    apart = x[b] > x[a]
    slope = float(np.median((y[b] - y[a])[apart] / (x[b] - x[a])[apart]))
    middles = [int(np.median(part)) for part in np.array_split(step, 4)]
    return int(levels[0]), int(levels[-1]), middles[-1] - middles[0], slope


def _series(run: Attribution, rank: int, names: Iterable[str] = _RECORDED) -> Series:
    """(times, ascending; values) of each column that there is, of the last table that has it."""
    series: Series = {}
    for name in names:
        if not run.recording.rows_count(rank, name):
            continue
        columns = _RECORDED[name]
        table = run.recording.table(rank, name)
        if name == "memory_event":
            table = table.filter(pc.not_equal(pc.fill_null(table["device_type"], 1), CPU))
        device = run.recording.part(rank).device_id
        if name == "device_counter" and device is not None:
            table = table.filter(pc.equal(table["device_id"], device))
        if name == "process":
            table = table.filter(pc.equal(table["rank"], rank))
        for shown, recorded in columns.items():
            known = table.filter(pc.is_valid(table[recorded]))
            time, values = ints(known, "time_ns"), ints(known, recorded)
            # A recorder that does not keep a total writes zeros.
            if (values > 0).any():
                order = np.argsort(time, kind="stable")
                series[shown] = time[order], values[order]
    return series


def _spans(run: Attribution, rank: int, series: Series) -> list[tuple[int | None, int, int]]:
    """(step, start, end) of each row."""
    steps = traced_steps(run, rank)
    numbers, starts, ends = steps.number, steps.start_ns, steps.end_ns
    if not len(steps):
        step = step_table(run, rank)
        numbers, starts, ends = (ints(step, n) for n in ("number", "start_ns", "end_ns"))
    if 0 < len(numbers) <= _MOST_SPANS:
        return list(zip(numbers.tolist(), starts.tolist(), ends.tolist(), strict=True))
    first = min(int(time[0]) for time, _ in series.values())
    last = max(int(time[-1]) for time, _ in series.values())
    edges = np.linspace(0, last - first + 1, min(_MOST_SPANS, last - first + 1) + 1)
    cuts = (first + np.unique(edges.astype(np.int64))).tolist()
    return [(None, a, b) for a, b in pairwise(cuts)]
