"""Running and waiting of each rank and its threads; throttling, steal, switches, faults.

From totals of the Linux kernel over the time of all recorded steps, so that a sample more or less
at the edges does not matter. A row without a thread is the rank: its waiting is that of the
training thread that waited most, its running that of all its threads; switches, faults and misses
include its children.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.groups import reals
from chopper.analyzers.events.meter import counter_of
from chopper.analyzers.events.steps import steps_of
from chopper.analyzers.trace.columns import ints
from chopper.analyzers.trace.samples import (
    LEAST_THREAD_SPAN_NS,
    table_beside,
    thread_growth,
    working_tids,
)
from chopper.analyzers.views import View, column, optional

_THREADS = 24
_LEAST_RATIO = 0.001
_EVENTS = (
    *("context_switch_count", "migration_count", "page_fault_count", "major_fault_count"),
    *("cycle_count", "instruction_count", "cache_miss_count"),
)
_HELD = {
    "throttled_ratio": "cgroup_throttled_ns",
    "pressure_cpu_ratio": "pressure_cpu_some_ns",
    "pressure_memory_ratio": "pressure_memory_some_ns",
    "pressure_io_ratio": "pressure_io_some_ns",
}

VIEW = View(
    "scheduling",
    __doc__,
    (
        column("rank", "Global rank whose threads they are.", "int32"),
        optional("thread", "Name of the thread; null in the row of the whole rank."),
        optional("training", "True where the thread ran operators or launched kernels.", "bool"),
        optional("waiting_ratio", "Share of the time ready to run, but without a core."),
        optional("running_ratio", "Share of the time in which the thread was on a core."),
        optional("throttled_ratio", "Share of the time throttled by the cgroup's CPU quota."),
        optional("steal_ratio", "Share of the time taken by the hypervisor, mean over the cores."),
        optional("pressure_cpu_ratio", "Share of the time in which a task waited for a core."),
        optional(
            "waiting_ns", "Total time ready without a core; null where threads were not read."
        ),
        optional("running_ns", "Total time on a core; null where threads were not read."),
        column("span_ns", "Time from the start of the first step to the end of the last."),
        optional("slice_count", "Number of times that the thread was scheduled."),
        optional("context_switch_count", "Number of context switches; null where not counted."),
        optional(
            "migration_count", "Number of migrations to another core; null where not counted."
        ),
        optional("page_fault_count", "Number of page faults; null where not counted."),
        optional("major_fault_count", "Number of page faults that read from disk."),
        optional("cache_miss_count", "Number of misses of the last-level cache."),
        optional("instructions_per_cycle", "Instructions executed per CPU cycle.", "float64"),
        optional("pressure_memory_ratio", "Share of the time in which a task waited for memory."),
        optional("pressure_io_ratio", "Share of the time in which a task waited for I/O."),
        optional("tid", "Thread id in the operating system; null for the whole rank.", "int64"),
        optional("reason", "Reason why values are null.", "text"),
    ),
    title="CPU contention",
    section="Steps and host",
    needs="neither threads nor the host were sampled (the collector `host` does in recorded runs)",
)


def scheduling(run: Attribution) -> pa.Table:
    """PROCESS_THREAD, PROCESS_EVENT, HOST, CPU_CORE -> SCHEDULING: ranks, then their threads."""
    ranks: list[dict[str, Any]] = []
    threads: list[dict[str, Any]] = []
    for rank in run.recording.ranks:
        steps = steps_of(run, rank)
        if not steps.num_rows:
            continue
        start, end = int(ints(steps, "start_ns").min()), int(ints(steps, "end_ns").max())
        mine = _threads(run, rank, start, end)
        host = _host(run, rank, start, end)
        events = _events(run, rank, start, end)
        if not mine and all(v is None for v in (*host.values(), *events.values())):
            continue
        row: dict[str, Any] = {"rank": rank, "span_ns": end - start, **host, **events}
        ranks.append(row)
        if end - start < LEAST_THREAD_SPAN_NS:
            row["reason"] = "the steps last less than a second; threads are sampled twice a second"
            continue
        if mine:
            worst = max(
                [t for t in mine if t["training"]] or mine, key=lambda t: int(t["waiting_ns"])
            )
            running_ns = sum(t["running_ns"] for t in mine)
            row |= {
                "waiting_ratio": worst["waiting_ratio"],
                "running_ratio": running_ns / (end - start),
                "waiting_ns": worst["waiting_ns"],
                "running_ns": running_ns,
                "slice_count": sum(t["slice_count"] for t in mine),
            }
        shown = [t for t in mine if max(t["running_ratio"], t["waiting_ratio"]) >= _LEAST_RATIO]
        shown.sort(key=lambda t: (not t["training"], -t["waiting_ns"], -t["running_ns"]))
        threads += shown[:_THREADS]
    return VIEW.of_rows([*ranks, *threads])


def _threads(run: Attribution, rank: int, start: int, end: int) -> list[dict[str, Any]]:
    """Running and waiting of each thread of a rank between two moments."""
    working = working_tids(run.joined[rank].host_span) if rank in run.joined else set()
    return [
        {
            "rank": rank,
            "thread": thread.name,
            "tid": thread.tid,
            "training": thread.tid in working,
            "waiting_ratio": thread.wait_ns / (end - start),
            "running_ratio": thread.run_ns / (end - start),
            "waiting_ns": thread.wait_ns,
            "running_ns": thread.run_ns,
            "span_ns": end - start,
            "slice_count": thread.slice_count,
        }
        for thread in thread_growth(run.recording, rank, start, end)
    ]


def _growth(table: pa.Table, names: Iterable[str], start: int, end: int) -> dict[str, float | None]:
    """Growth of totals between the readings nearest to two moments; None where not known."""
    time_ns, span = ints(table, "time_ns"), (np.array([start]), np.array([end]))
    read = {name: counter_of(time_ns, reals(table, name)) for name in names}
    return {
        name: float(one.growth(*span)[0]) if one and not one.broken.any() else None
        for name, one in read.items()
    }


def _host(run: Attribution, rank: int, start: int, end: int) -> dict[str, float | None]:
    """Steal, throttling and pressure of the rank's host in that time."""
    growth = _growth(table_beside(run.recording, rank, "host"), _HELD.values(), start, end)
    found = {name: _ratio(growth[total], end - start) for name, total in _HELD.items()}
    cores = table_beside(run.recording, rank, "cpu_core")
    steal = reals(cores, "steal_ratio")
    at = ints(cores, "time_ns")
    inside = (at >= start) & (at <= end) & np.isfinite(steal)
    found["steal_ratio"] = float(steal[inside].mean()) if inside.any() else None
    return found


def _events(run: Attribution, rank: int, start: int, end: int) -> dict[str, Any]:
    """Switches, faults and misses of the rank's processes in that time."""
    table = table_beside(run.recording, rank, "process_event")
    table = table.filter(pa.array(ints(table, "rank") == rank))
    growth = _growth(table, _EVENTS, start, end)
    counted = {name: None if value is None else round(value) for name, value in growth.items()}
    cycles, instructions = counted.pop("cycle_count"), counted.pop("instruction_count")
    return counted | {"instructions_per_cycle": _ratio(instructions or None, cycles)}


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
