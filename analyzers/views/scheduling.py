"""Whether the ranks' threads had the cores that they wanted: by process, and by thread.

From totals of the kernel over the time of all recorded steps, so that a sample more or less at the
edges does not matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.columns import ints, matching, strings
from chopper.analyzers.trace.samples import table_beside
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.attribution import Attribution

_LEAST_SPAN_NS = 1_000_000_000
"""Threads are read twice a second."""
_THREADS = 24
_LEAST_RATIO = 0.001
_EVENTS = (
    "context_switch_count",
    "migration_count",
    "page_fault_count",
    "major_fault_count",
    "cycle_count",
    "instruction_count",
    "cache_miss_count",
)
_WORK = frozenset(("cpu_op", "runtime", "driver"))


def scheduling(attribution: Attribution) -> pa.Table:
    """Running and waiting of each rank and its threads. PROCESS_THREAD, PROCESS_EVENT, HOST,
    CPU_CORE -> SCHEDULING.

    Ranks first, then threads: those of training on top, most waiting first.
    """
    ranks: list[dict[str, Any]] = []
    threads: list[dict[str, Any]] = []
    for rank in attribution.run.ranks:
        span = _span(attribution, rank)
        if span is None:
            continue
        mine = _threads(attribution, rank, *span)
        host = _host(attribution, rank, *span)
        events = _events(attribution, rank, *span)
        if not mine and all(v is None for v in (*host.values(), *events.values())):
            continue
        row: dict[str, Any] = {"rank": rank, "span_ns": span[1] - span[0], **host, **events}
        if span[1] - span[0] < _LEAST_SPAN_NS:
            row["reason"] = "the steps last less than a second; threads are read twice in one"
            ranks.append(row)
            continue
        training = [t for t in mine if t["training"]] or mine
        if mine:
            worst = max(training, key=lambda t: t["waiting_ns"])
            row |= {
                "waiting_ratio": worst["waiting_ratio"],
                "running_ratio": sum(t["running_ns"] for t in mine) / (span[1] - span[0]),
                "waiting_ns": worst["waiting_ns"],
                "running_ns": sum(t["running_ns"] for t in mine),
                "slice_count": sum(t["slice_count"] for t in mine),
            }
        ranks.append(row)
        shown = [t for t in mine if max(t["running_ratio"], t["waiting_ratio"]) >= _LEAST_RATIO]
        shown.sort(key=lambda t: (not t["training"], -t["waiting_ns"], -t["running_ns"]))
        threads += shown[:_THREADS]
    return pa.Table.from_pylist([*ranks, *threads], schema=TABLES["scheduling"].arrow)


def _span(attribution: Attribution, rank: int) -> tuple[int, int] | None:
    """From the first step's start to the last one's end, traced or not."""
    table = attribution.run.table(rank, "step")
    if not table.num_rows:
        table = attribution.windows.filter(pa.array(attribution.windows["rank"].to_numpy() == rank))
    if not table.num_rows:
        return None
    return int(ints(table, "start_ns").min()), int(ints(table, "end_ns").max())


def _threads(attribution: Attribution, rank: int, start: int, end: int) -> list[dict[str, Any]]:
    table = table_beside(attribution.run, rank, "process_thread")
    table = table.filter(pa.array(ints(table, "rank") == rank))
    if not table.num_rows:
        return []
    host = attribution.run.table(rank, "host_span")
    category, names = strings(host, "category")
    working = set(
        np.unique(ints(host, "tid")[matching(category, names, _WORK.__contains__)]).tolist()
    )
    tids, time = ints(table, "tid"), ints(table, "time_ns")
    codes, labels = strings(table, "name")
    totals = np.stack([ints(table, n) for n in ("run_ns", "run_delay_ns", "slice_count")])
    found = []
    for tid in np.unique(tids).tolist():
        mine = np.flatnonzero(tids == tid)
        # A row stands where something grew: the last one before a moment still holds then.
        first = max(int(np.searchsorted(time[mine], start, side="right")) - 1, 0)
        last = int(np.searchsorted(time[mine], end, side="right")) - 1
        if last < first:
            continue
        run, wait, slices = (totals[:, mine[last]] - totals[:, mine[first]]).tolist()
        if min(run, wait, slices) < 0:
            continue
        found.append(
            {
                "rank": rank,
                "thread": labels[codes[mine[0]]],
                "tid": tid,
                "training": tid in working,
                "waiting_ratio": wait / (end - start),
                "running_ratio": run / (end - start),
                "waiting_ns": wait,
                "running_ns": run,
                "span_ns": end - start,
                "slice_count": slices,
            }
        )
    return found


def _grown(time: np.ndarray, total: np.ndarray, start: int, end: int) -> float | None:
    """Growth of a total between the readings nearest to two moments; None where not known."""
    good = np.isfinite(total)
    time, total = time[good], total[good]
    if len(time) < 2:
        return None
    zero = time[0]
    low, high = np.interp([start - zero, end - zero], time - zero, total).tolist()
    return None if high < low or (np.diff(total) < 0).any() else high - low


def _host(attribution: Attribution, rank: int, start: int, end: int) -> dict[str, float | None]:
    """Steal, throttling and pressure of the rank's host in that time."""
    host = table_beside(attribution.run, rank, "host")
    time = ints(host, "time_ns")
    found: dict[str, float | None] = {}
    for name, column in (
        ("throttled_ratio", "cgroup_throttled_ns"),
        ("pressure_cpu_ratio", "pressure_cpu_some_ns"),
        ("pressure_memory_ratio", "pressure_memory_some_ns"),
        ("pressure_io_ratio", "pressure_io_some_ns"),
    ):
        grown = _grown(time, _real(host, column), start, end)
        found[name] = None if grown is None else grown / (end - start)
    cores = table_beside(attribution.run, rank, "cpu_core")
    steal = _real(cores, "steal_ratio")
    at = ints(cores, "time_ns")
    inside = (at >= start) & (at <= end) & np.isfinite(steal)
    found["steal_ratio"] = float(steal[inside].mean()) if inside.any() else None
    return found


def _events(attribution: Attribution, rank: int, start: int, end: int) -> dict[str, Any]:
    table = table_beside(attribution.run, rank, "process_event")
    table = table.filter(pa.array(ints(table, "rank") == rank))
    time = ints(table, "time_ns")
    found: dict[str, Any] = {}
    for name in _EVENTS:
        grown = _grown(time, _real(table, name), start, end)
        found[name] = None if grown is None else round(grown)
    cycles = found.pop("cycle_count")
    instructions = found.pop("instruction_count")
    found["instructions_per_cycle"] = instructions / cycles if instructions and cycles else None
    return found


def _real(table: pa.Table, name: str) -> np.ndarray:
    values: np.ndarray = table[name].to_numpy(zero_copy_only=False).astype(np.float64)
    return values
