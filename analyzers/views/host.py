"""Views of the host: cores, threads, launch queues and functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.groups import Groups, reals
from chopper.analyzers.events.meter import Counter, counter_of
from chopper.analyzers.events.places import functions_in
from chopper.analyzers.events.steps import steps_of, windows_of
from chopper.analyzers.trace.columns import ints, matching, run_starts, strings
from chopper.analyzers.trace.join import Links
from chopper.analyzers.trace.rank_join import HOST_KINDS
from chopper.analyzers.trace.samples import (
    LEAST_THREAD_SPAN_NS,
    table_beside,
    thread_growth,
    working_tids,
)
from chopper.analyzers.views import Rows, view
from chopper.causes import LEAVES

Span = tuple[int | None, str | None, np.ndarray, np.ndarray]
"""Step, phase, starts, ends."""

_COVERED_RATIO = 0.5
"""Least share of a span that samples must cover before they speak for it."""
_SHARES = {
    "active_cores": "active_ratio",
    "minimum_cores": "busy_ratio",
    "system_cores": "system_ratio",
    "stolen_cores": "steal_ratio",
}


class Sampled(msgspec.Struct, frozen=True):
    """A quantity that holds from each sample back to the one before, integrated over time."""

    integral: Counter
    covered: Counter
    period_ns: float

    def mean(self, start_ns: np.ndarray, end_ns: np.ndarray) -> float | None:
        """Return the mean over disjoint spans; None where samples cover less than half."""
        known = float(self.covered.growth(start_ns, end_ns).sum())
        if known < _COVERED_RATIO * float((end_ns - start_ns).sum()) or known <= 0:
            return None
        return float(self.integral.growth(start_ns, end_ns).sum()) / known


def _sampled(time_ns: np.ndarray, value: np.ndarray) -> Sampled | None:
    """Samples in order of time, NaN for unknown; None with fewer than two."""
    known = np.isfinite(value[1:])
    if not known.any():
        return None
    span = np.diff(time_ns).astype(np.float64)

    def integrated(values: np.ndarray) -> Counter:
        total = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0) * span)])
        return Counter(time_ns, total, ~known)

    return Sampled(integrated(value[1:]), integrated(known), float(np.median(span)))


@view
def cpu_use(run: Attribution) -> Rows:
    """CPU cores in use: active, minimum and each rank's own, per phase and step.

    As defined in "Chopper" (arXiv 2512.08242), *active cores* were busy at all during a sample, and
    *minimum cores* would suffice for the same work (Σ busy share). Both are means over time. A
    sample covers the time since the previous one, so shorter spans are not evaluated. Time until a
    launch belongs to the phase of that launch.

    title: CPU use
    section: Steps and host
    needs: the host's cores were not sampled (the collector `host` does in recorded runs)
    columns:
      rank, int32: Rank whose steps and phases the row is about.
      step, int64, null: Step number; null for all steps together.
      phase, null: Phase of the host; null for all phases.
      time_ns: Time of the step or phase.
      active_cores, float64, null: Mean number of cores that were busy at all during a sample.
      minimum_cores, float64, null: Mean number of cores that would suffice for the work.
      rank_cores, float64, null: Cores that the rank and its child processes used.
      children_cores, float64, null: Cores that the rank's child processes used.
      system_cores, float64, null: Cores busy in the operating system kernel.
      stolen_cores, float64, null: Cores taken by the hypervisor.
      reason, text, null: Reason why values are null.
    """
    rows: list[dict[str, object]] = []
    for rank in run.recording.ranks:
        known = sampled(run, rank)
        if not known:
            continue
        period = max(s.period_ns for s in known.values())
        for step, phase, start, end in _spans(run, rank):
            row: dict[str, object] = {"rank": rank, "step": step, "phase": phase}
            row["time_ns"] = int((end - start).sum())
            long = (end - start) >= period
            resolved = float((end - start)[long].sum())
            if resolved < _COVERED_RATIO * float((end - start).sum()):
                row["reason"] = f"shorter than the {period / 1e6:.0f} ms between samples"
            else:
                means = {name: s.mean(start[long], end[long]) for name, s in known.items()}
                row |= means
                if all(value is None for value in means.values()):
                    row["reason"] = "samples cover less than half of it"
            rows.append(row)
    return rows


def sampled(run: Attribution, rank: int) -> dict[str, Sampled]:
    """Return the view's quantities that were sampled on a rank's host, by column."""
    both = {**_cores(run, rank), **_process(run, rank)}
    return {name: s for name, s in both.items() if s is not None}


def _cores(run: Attribution, rank: int) -> dict[str, Sampled | None]:
    """Samples of the cores of a rank's host, taken by whichever of its ranks sampled them."""
    table = table_beside(run.recording, rank, "cpu_core")
    if not table.num_rows:
        return {}
    active = pc.greater(table["busy_ratio"], 0).cast(pa.float64())
    table = table.append_column("active_ratio", active)
    by_time = table.group_by("time_ns").aggregate([(n, "sum") for n in _SHARES.values()])
    by_time = by_time.sort_by("time_ns")
    time_ns = ints(by_time, "time_ns")
    shares = {name: reals(by_time, f"{share}_sum") for name, share in _SHARES.items()}
    return {name: _sampled(time_ns, share) for name, share in shares.items()}


def _process(run: Attribution, rank: int) -> dict[str, Sampled | None]:
    """Samples of the rank's own processes, taken by whichever rank watched them."""
    watchers = run.recording.watchers.get(rank)
    if not watchers:
        return {}
    host = run.recording.part(rank).host
    beside = (other for other in watchers if run.recording.part(other).host == host)
    table = run.recording.table(rank if rank in watchers else next(beside, watchers[0]), "process")
    mine = table.filter(pa.array(ints(table, "rank") == rank))
    mine = mine.take(np.argsort(ints(mine, "time_ns"), kind="stable"))
    time = ints(mine, "time_ns")
    return {
        "rank_cores": _sampled(time, reals(mine, "cpu_ratio")),
        "children_cores": _sampled(time, reals(mine, "child_cpu_ratio")),
    }


def _spans(run: Attribution, rank: int) -> Iterator[Span]:
    """The run, phases by time, steps in order."""
    windows = windows_of(run, rank)
    if not windows.num_rows:
        return
    start, end = ints(windows, "start_ns"), ints(windows, "end_ns")
    yield None, None, start, end
    phases = _phases(run, rank, int(start.min()), int(end.max()))
    yield from sorted(phases, key=lambda span: -int((span[3] - span[2]).sum()))
    numbers = windows["number"].to_pylist()
    if len(numbers) > 1:
        for i, number in enumerate(numbers):
            yield number, None, start[i : i + 1], end[i : i + 1]


def _phases(run: Attribution, rank: int, start_ns: int, end_ns: int) -> list[Span]:
    """Spans of the host's phases: the time until a launch is of the phase of that launch."""
    links = run.links.get(rank)
    if links is None or not links.num_rows:
        return []
    launch = ints(links, "launch_row")
    known = launch >= 0
    if not known.any():
        return []
    time = ints(run.joined[rank].host_span, "start_ns")[launch[known]]
    phase, phases = strings(links, "phase")
    order = np.argsort(time, kind="stable")
    time, phase = np.clip(time[order], start_ns, end_ns), phase[known][order]
    last = np.concatenate([phase[1:] != phase[:-1], [True]])
    ends = time[last]
    starts = np.concatenate([[start_ns], ends[:-1]])
    of = phase[last]
    found: list[Span] = []
    for code in np.unique(of).tolist():
        mine = (of == code) & (ends > starts)
        if mine.any():
            found.append((None, phases[code], starts[mine], ends[mine]))
    return found


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


@view
def scheduling(run: Attribution) -> Rows:
    """Running and waiting of each rank and its threads; throttling, steal, switches, faults.

    From totals of the Linux kernel over the time of all recorded steps, so that a sample more or
    less at the edges does not matter. A row without a thread is the rank: its waiting is that of
    the training thread that waited most, its running that of all its threads; switches, faults and
    misses include its children.

    title: CPU contention
    section: Steps and host
    needs: neither threads nor the host were sampled (the collector `host` does in recorded runs)
    columns:
      rank, int32: Global rank whose threads they are.
      thread, null: Name of the thread; null in the row of the whole rank.
      training, bool, null: True where the thread ran operators or launched kernels.
      waiting_ratio, null: Share of the time ready to run, but without a core.
      running_ratio, null: Share of the time in which the thread was on a core.
      throttled_ratio, null: Share of the time throttled by the cgroup's CPU quota.
      steal_ratio, null: Share of the time taken by the hypervisor, mean over the cores.
      pressure_cpu_ratio, null: Share of the time in which a task waited for a core.
      waiting_ns, null: Total time ready without a core; null where threads were not read.
      running_ns, null: Total time on a core; null where threads were not read.
      span_ns: Time from the start of the first step to the end of the last.
      slice_count, null: Number of times that the thread was scheduled.
      context_switch_count, null: Number of context switches; null where not counted.
      migration_count, null: Number of migrations to another core; null where not counted.
      page_fault_count, null: Number of page faults; null where not counted.
      major_fault_count, null: Number of page faults that read from disk.
      cache_miss_count, null: Number of misses of the last-level cache.
      instructions_per_cycle, float64, null: Instructions executed per CPU cycle.
      pressure_memory_ratio, null: Share of the time in which a task waited for memory.
      pressure_io_ratio, null: Share of the time in which a task waited for I/O.
      tid, int64, null: Thread id in the operating system; null for the whole rank.
      reason, text, null: Reason why values are null.
    """
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
    return [*ranks, *threads]


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


FULL_COUNT = 1024
"""Entries at which CUDA's launch queue is full."""


class Depth(msgspec.Struct, frozen=True):
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


@view
def queue_depth(run: Attribution) -> Rows:
    """Depth of each stream's launch queue over time, by phase.

    A launch enters its stream's queue when the host calls it and leaves when its work has ended. A
    replayed graph is one entry until its last kernel ends. At depth 0 the device has nothing to do
    on that stream; at 1024, where CUDA's queue is full, the launching call blocks until an entry
    completes (as in Holistic Trace Analysis).

    The phase at a time is that of the latest launch before it.

    title: Queue depth
    section: Steps and host
    needs: no launch was recorded, or the host ran everything itself
    columns:
      rank, int32: Global rank that the row is about.
      stream_id, int64: Stream whose queue it is.
      phase: Phase that the host was launching.
      time_ns: Time of launching in that phase, between the first and the last step.
      empty_ratio: Share of the time with nothing queued.
      mean_depth, float64: Mean number of queued launches over time.
      median_depth, int64: Median number of queued launches, weighted by time.
      p95_depth, int64: 95th percentile of the queued launches, weighted by time.
      max_depth, int64: Largest number of queued launches.
      full_ratio: Share of the time with CUDA's queue full (1024 entries or more).
      device_id, int32: Ordinal of the stream's device.
    """
    rows: list[dict[str, object]] = []
    for rank in run.recording.ranks:
        windows = windows_of(run, rank)
        if windows.num_rows:
            start, end = ints(windows, "start_ns").min(), ints(windows, "end_ns").max()
            for depth in depths(run, rank):
                rows += _distributions(depth, int(start), int(end))
    found = queue_depth.view.of_rows(rows)
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


_IDLE = tuple(cause for cause in LEAVES if cause.startswith("idle."))


@view
def functions(run: Attribution, links: Mapping[int, Links]) -> Rows:
    """Functions of the program by the time of the steps that they hold, over all ranks and steps.

    On a device, the time in which it waited for the host; without one, the whole step.

    title: Functions of the program
    section: Operators
    needs: no Python stacks of the program's own functions were recorded (with_stack=True)
    columns:
      function: File, line and name of the function, as the Python stacks have it.
      time_ns: Time in the function and in what it calls.
      own_ns: Time in the function and in the libraries that it calls.
      share_ratio: Time in the function as a share of the observed time.
    """
    on_host = all(joined.host_only for joined in run.joined.values())
    found = functions_in(run, links, None if on_host else _IDLE)
    names = sorted(found.total, key=lambda name: (-found.total[name], name))
    time_ns = np.array([found.total[name] for name in names], dtype=np.int64)
    return {
        "function": names,
        "time_ns": time_ns,
        "own_ns": np.array([found.own[name] for name in names], dtype=np.int64),
        "share_ratio": time_ns / max(run.observed_ns, 1),
    }
