"""Memory of each rank: what tensors held, what the allocator held for them, and its calls.

From the allocator's events in the trace where they were recorded, else from the allocator's own
history (a snapshot), else from the readings at the end of each step. An event belongs to the step and the phase in which the host was when it came.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import links_of
from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.join import PHASES
from chopper.tables import TABLES

if TYPE_CHECKING:
    from typing import Any

    from chopper.analyzers.trace.join import Links
    from chopper.attribution import Attribution

ALL = "all"
"""The phase of rows that hold whole steps."""
CPU, DEVICE = 0, 1


@dataclass(frozen=True)
class MemoryEvents:
    """Allocator events of one rank on one device inside its traced steps, in time order.

    Attributes:
        device_type: 0 for the host's memory, 1 for a device's.
        device_id: ordinal; -1 on the host.
        step: index of the traced step of each event.
        phase: code into ``phases``.
        bytes_count: allocated (positive) or freed (negative).
        allocated_bytes, reserved_bytes: totals after the event, -1 for unknown.
        source: where they come from.
    """

    device_type: int
    device_id: int
    step: np.ndarray
    phase: np.ndarray
    bytes_count: np.ndarray
    allocated_bytes: np.ndarray
    reserved_bytes: np.ndarray
    source: str = "allocator events of the trace"
    phases: list[str] = field(default_factory=lambda: PHASES)


def memory(attribution: Attribution) -> pa.Table:
    """MEMORY: peaks, fragmentation and allocator calls by rank, device and phase."""
    rows: list[dict[str, Any]] = []
    for rank in attribution.run.ranks:
        found = memory_events(attribution, rank)
        rows += (
            [row for events in found for row in _of_trace(attribution, rank, events)]
            if found
            else _of_readings(attribution, rank)
        )
    rows.sort(key=lambda r: (-(r["peak_allocated_bytes"] or 0), r["rank"], r["phase"] != ALL))
    return pa.Table.from_pylist(rows, schema=TABLES["memory"].arrow)


def traced_steps(attribution: Attribution, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(numbers, starts, ends) of a rank's traced steps on the host; empty without steps."""
    step = attribution.run.table(rank, "step")
    step = step.filter(step["traced"]) if step.num_rows else step
    return ints(step, "number"), ints(step, "start_ns"), ints(step, "end_ns")


def memory_events(attribution: Attribution, rank: int) -> list[MemoryEvents]:
    """Allocator events of one rank, one entry per device that has any.

    MEMORY_EVENT or ALLOCATOR_EVENT, STEP, HOST_SPAN -> events with step and phase. Without steps
    the whole trace is one.
    """
    found = _recorded(attribution, rank) or _history(attribution, rank)
    if found is None:
        return []
    time, tid, kind, device, columns, source = found
    _, starts, ends = traced_steps(attribution, rank)
    if len(starts):
        step = np.searchsorted(starts, time, side="right") - 1
        inside = (step >= 0) & (time < ends[np.maximum(step, 0)])
    else:
        step, inside = np.zeros(len(time), dtype=np.int64), np.ones(len(time), dtype=bool)
    rows = np.flatnonzero(inside)
    rows = rows[np.argsort(time[rows], kind="stable")]
    if rank in attribution.links:
        links = links_of(attribution, rank)
        phase, phases = phase_at(links, time[rows], tid[rows]), links.phases
    else:
        phases = PHASES
        phase = np.full(len(rows), PHASES.index("other"), dtype=np.int64)
    kind, device = kind[rows], device[rows]
    columns = {name: values[rows] for name, values in columns.items()}
    made = []
    for type_, id_ in sorted(set(zip(kind.tolist(), device.tolist(), strict=True))):
        mine = (kind == type_) & (device == id_)
        cut = {name: values[mine] for name, values in columns.items()}
        for name in ("allocated_bytes", "reserved_bytes"):
            # A total that is never above 0 is one that the recorder does not keep.
            if not (cut[name] > 0).any():
                cut[name] = np.full(len(cut[name]), -1, dtype=np.int64)
        made.append(
            MemoryEvents(
                type_, id_, step[rows][mine], phase[mine], **cut, source=source, phases=phases
            )
        )
    return made


_Raw = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray], str]
"""Times, threads, kinds of device, devices, sizes and totals, where they come from."""


def _recorded(attribution: Attribution, rank: int) -> _Raw | None:
    table = attribution.run.table(rank, "memory_event")
    if not table.num_rows or rank not in attribution.links:
        return None
    kind = ints(table, "device_type", null=DEVICE)
    return (
        ints(table, "time_ns"),
        ints(table, "tid"),
        kind,
        np.where(kind == CPU, -1, ints(table, "device_id")),
        {n: ints(table, n) for n in ("bytes_count", "allocated_bytes", "reserved_bytes")},
        "allocator events of the trace",
    )


def _history(attribution: Attribution, rank: int) -> _Raw | None:
    table = attribution.run.table(rank, "allocator_event")
    if not table.num_rows:
        return None
    codes, actions = strings(table, "action")
    sign = np.array([_SIGNS.get(a, 0) for a in actions], dtype=np.int64)[codes]
    return (
        ints(table, "time_ns"),
        np.full(table.num_rows, -1, dtype=np.int64),
        np.full(table.num_rows, DEVICE, dtype=np.int64),
        ints(table, "device_id"),
        {
            "bytes_count": sign * ints(table, "size_bytes", null=0),
            "allocated_bytes": ints(table, "allocated_bytes"),
            "reserved_bytes": ints(table, "reserved_bytes"),
        },
        "the allocator's own history",
    )


_SIGNS = {"alloc": 1, "free_requested": -1, "free": -1}
"""Actions that change what tensors hold; a block is free when its tensor lets go of it."""


_TELLING = [PHASES.index(name) for name in ("recompute", "backward", "optimizer")]
"""Phases of one thread that hold for the rank: loading of data goes on beside the others."""


def phase_at(links: Links, time_ns: np.ndarray, tid: np.ndarray) -> np.ndarray:
    """Phase of what a thread was doing at each time, as codes into ``links.phases``.

    By the innermost span of the thread; where none tells, as `Links.unmarked_phase` says. Of a
    thread that is not known (-1), by whichever thread
    was in the backward pass, else in the optimizer.
    """
    host = links.host
    found = np.full(len(time_ns), -1, dtype=np.int64)
    if not len(host) or not len(time_ns):
        return np.full(len(time_ns), PHASES.index("other"), dtype=np.int64)
    nobody = np.flatnonzero(tid < 0)
    activity, keys = host.activity, host.nesting.thread_keys
    for thread, (_, its_tid) in enumerate(keys.tolist()):
        low, high = int(activity.first[thread]), int(activity.first[thread + 1])
        if high == low:
            continue
        mine = np.flatnonzero(tid == its_tid) if its_tid >= 0 else nobody[:0]
        for rows, chosen in ((mine, None), (nobody, _TELLING)):
            at = np.searchsorted(activity.start_ns[low:high], time_ns[rows], side="right") - 1
            row = np.where(at >= 0, activity.span[low + np.maximum(at, 0)], -1)
            phase = np.where(row >= 0, links.span_phase[np.maximum(row, 0)], -1)
            if chosen is not None:
                phase = np.where(np.isin(phase, chosen), phase, -1)
            known = phase > (-1 if chosen is None else found[rows])
            found[rows[known]] = phase[known]
    open_ = found < 0
    found[open_] = links.unmarked_phase(time_ns[open_])
    return found


def _of_trace(attribution: Attribution, rank: int, events: MemoryEvents) -> list[dict[str, Any]]:
    _, starts, _ = traced_steps(attribution, rank)
    steps = max(len(starts), 1)
    traced = bool(attribution.run.table(rank, "host_span").num_rows)
    on_device = events.device_type != CPU
    calls = _allocator_calls(attribution, rank) if traced and on_device else None
    rows = []
    phases = enumerate(events.phases) if traced else ()
    for code, phase in [(-1, ALL), *phases]:
        mine = np.ones(len(events.step), dtype=bool) if code < 0 else events.phase == code
        if not mine.any():
            continue
        allocated, reserved = events.allocated_bytes[mine], events.reserved_bytes[mine]
        size = events.bytes_count[mine]
        at = int(allocated.argmax())
        count = time_ns = None
        if calls is not None:
            chosen = calls[0] >= 0 if code < 0 else calls[0] == code
            count, time_ns = int(chosen.sum()), int(calls[1][chosen].sum())
        rows.append(
            {
                "rank": rank,
                "device": _device(events.device_type, events.device_id),
                "phase": phase,
                "peak_allocated_bytes": _known(allocated.max()),
                "peak_reserved_bytes": _known(reserved.max()),
                "fragmentation_ratio": _fragmentation(allocated[at], reserved[at]),
                "median_fragmentation_ratio": _median_fragmentation(allocated, reserved),
                "allocation_count": round(float((size > 0).sum()) / steps),
                "requested_bytes": round(float(size[size > 0].sum()) / steps),
                "allocator_call_count": None if count is None else count / steps,
                "allocator_ns": None if time_ns is None else round(time_ns / steps),
                "source": events.source,
            }
        )
    return rows


def _of_readings(attribution: Attribution, rank: int) -> list[dict[str, Any]]:
    """From `device_memory`, read at the end of each step."""
    table = attribution.run.table(rank, "device_memory")
    if not table.num_rows:
        return []
    device = ints(table, "device_id")
    rows = []
    for id_ in np.unique(device).tolist():
        mine = table.filter(pa.array(device == id_))
        allocated, reserved = ints(mine, "allocated_bytes"), ints(mine, "reserved_bytes")
        peak = max(int(ints(mine, "max_allocated_bytes").max()), int(allocated.max()))
        rows.append(
            {
                "rank": rank,
                "device": _device(DEVICE, id_),
                "phase": ALL,
                "peak_allocated_bytes": _known(peak),
                "peak_reserved_bytes": _known(
                    max(int(ints(mine, "max_reserved_bytes").max()), int(reserved.max()))
                ),
                "median_fragmentation_ratio": _median_fragmentation(allocated, reserved),
                "source": "readings at the ends of steps",
            }
        )
    return rows


def _allocator_calls(attribution: Attribution, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(phase of each runtime call that allocates or frees, -1 outside of steps; its duration)."""
    links = links_of(attribution, rank)
    host = links.host
    rows = np.flatnonzero(host.of("runtime", "driver") & host.named(names.is_allocator_call))
    phase = phase_at(links, host.start_ns[rows], ints(host.table, "tid")[rows])
    _, starts, ends = traced_steps(attribution, rank)
    if len(starts):
        step = np.searchsorted(starts, host.start_ns[rows], side="right") - 1
        inside = (step >= 0) & (host.start_ns[rows] < ends[np.maximum(step, 0)])
        phase = np.where(inside, phase, -1)
    return phase, host.dur_ns[rows]


def _device(type_: int, id_: int) -> str:
    return "host" if type_ == CPU else f"device {id_}"


def _known(value: int) -> int | None:
    return int(value) if value >= 0 else None


def _fragmentation(allocated: int, reserved: int) -> float | None:
    """Share of what the allocator holds that no tensor uses; None where a total is unknown."""
    if allocated < 0 or reserved <= 0:
        return None
    return max(0.0, 1 - int(allocated) / int(reserved))


def _median_fragmentation(allocated: np.ndarray, reserved: np.ndarray) -> float | None:
    known = (allocated >= 0) & (reserved > 0)
    if not known.any():
        return None
    return float(np.median(np.maximum(0.0, 1 - allocated[known] / reserved[known])))
