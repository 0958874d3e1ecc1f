"""Views of memory: by phase, step by step, over time, and how alike steps are."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.allocations import (
    CPU,
    MemoryEvents,
    known_bytes,
    memory_events,
    phase_at,
)
from chopper.analyzers.events.groups import reals
from chopper.analyzers.events.steps import step_table, traced_steps
from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import ints
from chopper.analyzers.trace.samples import of_rank
from chopper.analyzers.trace.windows import Steps
from chopper.analyzers.views import Rows, view
from chopper.wording import device_name

ALL = "all"
"""The phase of rows that hold whole steps."""


@view
def memory(run: Attribution) -> Rows:
    """Peaks, fragmentation and allocator calls, by rank, device and phase.

    From the allocator events in the trace if recorded, otherwise from the allocator's history (a
    snapshot), otherwise from samples at the end of each step. An event belongs to the step and the
    phase of the host at that time. Counts and times are per step; peaks are the maximum over all
    steps.

    title: Memory
    section: Memory
    needs: neither the allocator's events (profile with memory=True) nor its totals were recorded
    columns:
      rank, int32: Global rank that the row is about.
      device: Device of the memory: `device N`, or `host`.
      phase: Phase of the host, forward, backward, …; `all` for whole steps.
      peak_allocated_bytes, null: Peak of the bytes that tensors held.
      peak_reserved_bytes, null: Peak of the bytes reserved from the driver.
      fragmentation_ratio, null: Share of reserved bytes not held by tensors at the peak.
      median_fragmentation_ratio, null: Median share of reserved bytes not held by tensors.
      allocation_count, null: Number of allocations per step; null without events.
      requested_bytes, null: Bytes allocated per step, reused blocks included.
      allocator_call_count, float64, null: cudaMalloc, hipFree and the like per step.
      allocator_ns, null: Host time in runtime calls that allocate or free, per step.
      source: Recording that the figures come from.
    """
    rows: list[dict[str, Any]] = []
    for rank in run.recording.ranks:
        found = memory_events(run, rank)
        for events in found:
            rows += _of_events(run, rank, events)
        if not found:
            rows += _of_readings(run.recording.table(rank, "device_memory"), rank)
    rows.sort(key=lambda r: (-(r["peak_allocated_bytes"] or 0), r["rank"], r["phase"] != ALL))
    return rows


def _of_events(run: Attribution, rank: int, events: MemoryEvents) -> list[dict[str, Any]]:
    """One row for whole steps, and one for each phase with events."""
    steps = max(len(traced_steps(run, rank)), 1)
    traced = rank in run.joined and run.joined[rank].host_span.num_rows > 0
    calls = _allocator_calls(run, rank) if traced and events.device_type != CPU else None
    rows = []
    phases = enumerate(events.phases) if traced else ()
    for code, phase in [(-1, ALL), *phases]:
        mine = np.ones(len(events.step), dtype=bool) if code < 0 else events.phase == code
        if not mine.any():
            continue
        allocated, reserved = events.allocated_bytes[mine], events.reserved_bytes[mine]
        size = events.bytes_count[mine]
        at = int(allocated.argmax())
        row = {
            "rank": rank,
            "device": events.device,
            "phase": phase,
            "peak_allocated_bytes": known_bytes(allocated.max()),
            "peak_reserved_bytes": known_bytes(reserved.max()),
            "fragmentation_ratio": _fragmentation(allocated[at : at + 1], reserved[at : at + 1]),
            "median_fragmentation_ratio": _fragmentation(allocated, reserved),
            "allocation_count": round(float((size > 0).sum()) / steps),
            "requested_bytes": round(float(size[size > 0].sum()) / steps),
            "source": events.source,
        }
        if calls is not None:
            call_phase, dur_ns = calls
            chosen = call_phase >= 0 if code < 0 else call_phase == code
            row["allocator_call_count"] = int(chosen.sum()) / steps
            row["allocator_ns"] = round(int(dur_ns[chosen].sum()) / steps)
        rows.append(row)
    return rows


def _of_readings(table: pa.Table, rank: int) -> list[dict[str, Any]]:
    """From `device_memory`, read at the end of each step."""
    device = ints(table, "device_id")
    rows = []
    for id_ in np.unique(device).tolist():
        mine = table.filter(pa.array(device == id_))
        allocated, reserved = ints(mine, "allocated_bytes"), ints(mine, "reserved_bytes")
        peaks = {
            "peak_allocated_bytes": max(ints(mine, "max_allocated_bytes").max(), allocated.max()),
            "peak_reserved_bytes": max(ints(mine, "max_reserved_bytes").max(), reserved.max()),
        }
        rows.append(
            {
                "rank": rank,
                "device": device_name(id_),
                "phase": ALL,
                **{name: known_bytes(peak) for name, peak in peaks.items()},
                "median_fragmentation_ratio": _fragmentation(allocated, reserved),
                "source": "readings at the ends of steps",
            }
        )
    return rows


def _allocator_calls(run: Attribution, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(phase of each runtime call that allocates or frees, -1 outside of steps; its duration)."""
    links = run.joined[rank].links()
    host = links.host
    rows = np.flatnonzero(host.of("runtime", "driver") & host.named(names.is_allocator_call))
    phase = phase_at(links, host.start_ns[rows], ints(host.table, "tid")[rows])
    steps = traced_steps(run, rank)
    return np.where(steps.index_at(host.start_ns[rows]) >= 0, phase, -1), host.dur_ns[rows]


def _fragmentation(allocated: np.ndarray, reserved: np.ndarray) -> float | None:
    """Median share of what the allocator holds that no tensor uses; None where not known."""
    known = (allocated >= 0) & (reserved > 0)
    if not known.any():
        return None
    return float(np.median(np.maximum(0.0, 1 - allocated[known] / reserved[known])))


@view
def memory_steps(run: Attribution) -> Rows:
    """Allocations of each step: similarity to the previous step, sizes, peaks, clock.

    A step's sequence is the signed sizes of its allocations and frees, in order. Two steps are
    identical if their sequences are; their similarity is Dice's coefficient of their multisets of
    three successive events (1: the same triples equally often; 0: none in common), which takes
    linear time where an edit distance takes quadratic time.

    title: Memory, step by step
    section: Memory
    needs: allocator events of steps were not recorded (profile with memory=True)
    columns:
      rank, int32: Global rank that the row is about.
      device: Device of the memory: `device N`, or `host`.
      step, int64: Number of the step.
      similarity_ratio, null: Dice similarity to the allocations of the previous step.
      same_as_previous, bool, null: True where it allocates exactly like the previous step.
      event_count: Number of allocations and frees.
      distinct_sizes_count: Number of distinct block sizes.
      requested_bytes: Bytes allocated in the step.
      peak_allocated_bytes, null: Peak bytes held by tensors.
      peak_reserved_bytes, null: Peak bytes reserved from the driver.
      clock_count: Number of clock samples in the step.
      clock_mean_hz, null: Mean of the device's clock in the step; null without samples.
      clock_std_hz, null: Standard deviation of the device's clock samples in the step.
      sequence, text: Hash of the signed sizes in order; equal for identical steps.
    """
    rows: list[dict[str, Any]] = []
    for rank in run.recording.ranks:
        steps = traced_steps(run, rank)
        clock = of_rank(run.recording, rank, "device_clock")
        for events in memory_events(run, rank) if len(steps) else []:
            rows += ({"rank": rank} | row for row in _of_device(clock, events, steps))
    return rows


def _of_device(clock: pa.Table, events: MemoryEvents, steps: Steps) -> list[dict[str, Any]]:
    """One row per step."""
    rows: list[dict[str, Any]] = []
    # Stable: in time order within each step.
    order = np.argsort(events.step, kind="stable")
    bounds = np.searchsorted(events.step[order], np.arange(len(steps) + 1))
    own = (ints(clock, "sm_clock_hz") > 0) & (ints(clock, "device_id") == events.device_id)
    clock = clock.filter(pa.array(own & (events.device_type != CPU)))
    clock_time, clock_hz = ints(clock, "time_ns"), reals(clock, "sm_clock_hz")
    before: np.ndarray | None = None
    for i, number in enumerate(steps.number.tolist()):
        mine = order[bounds[i] : bounds[i + 1]]
        size = events.bytes_count[mine]
        low, high = np.searchsorted(clock_time, (steps.start_ns[i], steps.end_ns[i]))
        read_hz = clock_hz[low:high]
        rows.append(
            {
                "device": events.device,
                "step": number,
                "event_count": len(size),
                "distinct_sizes_count": len(np.unique(np.abs(size))),
                "requested_bytes": int(size[size > 0].sum()),
                "peak_allocated_bytes": known_bytes(events.allocated_bytes[mine].max(initial=-1)),
                "peak_reserved_bytes": known_bytes(events.reserved_bytes[mine].max(initial=-1)),
                "sequence": blake2b(size.tobytes(), digest_size=8).hexdigest(),
                "same_as_previous": None if before is None else np.array_equal(before, size),
                "similarity_ratio": None if before is None else similarity(before, size),
                "clock_count": len(read_hz),
                "clock_mean_hz": round(float(read_hz.mean())) if len(read_hz) else None,
                "clock_std_hz": round(float(read_hz.std(ddof=1))) if len(read_hz) > 1 else None,
            }
        )
        before = size
    return rows


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Return Dice's coefficient of multisets of three successive sizes; 1 for empty steps."""
    if not len(a) and not len(b):
        return 1.0
    one, other = _threes(a), _threes(b)
    keys, code = np.unique(np.concatenate([one, other]), return_inverse=True)
    counts_a = np.bincount(code[: len(one)], minlength=len(keys))
    counts_b = np.bincount(code[len(one) :], minlength=len(keys))
    return float(2 * np.minimum(counts_a, counts_b).sum() / (len(one) + len(other)))


def _threes(size: np.ndarray) -> np.ndarray:
    """A number for each three successive events, the ends included."""
    # splitmix64's finalizer: sizes are multiples of large powers of two.
    x = np.concatenate([[0, 0], size, [0, 0]]).astype(np.int64).view(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x ^= x >> np.uint64(31)
    with np.errstate(over="ignore"):
        found: np.ndarray = (x[:-2] * np.uint64(3) + x[1:-1]) * np.uint64(5) + x[2:]
    return found


_MEANS = {
    "event_count": "event_count",
    "distinct_sizes_count": "distinct_sizes_count",
    "peak_mean_bytes": "peak_allocated_bytes",
    "clock_mean_hz": "clock_mean_hz",
    "clock_std_hz": "clock_std_hz",
}
_LEAST_STEPS = 3
"""Steps with a similarity and a clock that a correlation needs."""


@view
def memory_determinism(memory_steps: pa.Table) -> Rows:
    """Similarity of steps' allocations, and its correlation with the clock.

    "Chopper" (arXiv 2512.08242) observes that FSDP2, which frees deterministically, runs at higher
    and steadier clocks than FSDP1, whose frees wait for recorded streams.

    title: Memory determinism
    section: Memory
    needs: allocator events of steps were not recorded (profile with memory=True)
    columns:
      rank, int32: Global rank that the row is about.
      device: Device of the memory: `device N`, or `host`.
      steps_count: Number of traced steps.
      similarity_ratio, null: Mean similarity of a step's allocations to the last one's.
      identical_ratio, null: Share of steps that allocate exactly like the previous step.
      event_count: Mean number of allocations and frees per step.
      distinct_sizes_count: Mean number of distinct block sizes per step.
      peak_mean_bytes, null: Mean over steps of the peak bytes held by tensors.
      peak_std_bytes, null: Standard deviation over steps of the peak bytes held by tensors.
      clock_mean_hz, null: Mean over steps of the device's mean clock.
      clock_std_hz, null: Mean over steps of the clock's standard deviation in a step.
      clock_correlation, float64, null: Pearson correlation of dissimilarity and clock_std_hz.
      no_correlation, text, null: Reason why there is no correlation.
    """
    steps = memory_steps
    rows: list[dict[str, Any]] = []
    devices = zip(steps["rank"].to_pylist(), steps["device"].to_pylist(), strict=True)
    for rank, device in dict.fromkeys(devices):
        of_rank = steps.filter(pc.equal(steps["rank"], rank))
        mine = of_rank.filter(pc.equal(of_rank["device"], device))
        correlation, reason = _correlation(device, mine)
        # The first step resembles none: its similarity is null, which no mean counts.
        whole = {shown: pc.mean(mine[name]).as_py() for shown, name in _MEANS.items()}
        whole["peak_std_bytes"] = pc.stddev(mine["peak_allocated_bytes"], ddof=1).as_py()
        row = {
            "rank": rank,
            "device": device,
            "steps_count": mine.num_rows,
            "similarity_ratio": pc.mean(mine["similarity_ratio"]).as_py(),
            "identical_ratio": pc.mean(mine["same_as_previous"]).as_py(),
            "clock_correlation": correlation,
            "no_correlation": reason,
        }
        rows.append(row | {n: round(value) for n, value in whole.items() if value is not None})
    rows.sort(key=lambda r: (r["similarity_ratio"] is None, r["similarity_ratio"] or 0, r["rank"]))
    return rows


def _correlation(device: str, steps: pa.Table) -> tuple[float | None, str | None]:
    """(Pearson's r of 1 − similarity and the clock's deviation over steps, or None; why not)."""
    if device == "host":
        return None, "the host's memory: it has no device clock"
    unlike, varying = 1 - reals(steps, "similarity_ratio"), reals(steps, "clock_std_hz")
    known = np.isfinite(unlike + varying)
    unlike, varying = unlike[known], varying[known]
    if not len(unlike):
        return None, "no step has two samples of the device's clock"
    if len(unlike) < _LEAST_STEPS:
        return None, f"{len(unlike)} steps with clock samples; at least {_LEAST_STEPS} are needed"
    if np.ptp(unlike) == 0:
        return None, "all steps resemble the previous one equally: nothing to correlate"
    if np.ptp(varying) == 0:
        return None, "the clock varied equally in every step: nothing to correlate"
    return float(np.corrcoef(unlike, varying)[0, 1]), None


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


@view
def memory_over_time(run: Attribution) -> Rows:
    """Peak memory of each step, from the allocator, the driver and the host.

    With more steps than fit on a page, or without steps, rows are equal spans of time.

    title: Memory over time
    section: Memory
    needs: no memory was sampled (`device_memory` and `host` do), and there is no snapshot
    columns:
      rank, int32: Global rank that the row is about.
      step, int64, null: Step number; null for spans of time.
      since_ns: Start of the step or span, relative to the first row.
      dur_ns: Length of the step or span.
      allocated_bytes, null: Peak bytes held by tensors; null where not sampled.
      reserved_bytes, null: Peak bytes reserved from the driver.
      device_used_bytes, null: Peak bytes in use on the device, by all processes.
      host_process_bytes, null: Peak resident bytes of the rank and its children.
      host_available_bytes, null: Minimum bytes available on the host.
    """
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
    return rows


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
