"""Peaks, fragmentation and allocator calls, by rank, device and phase.

From the allocator events in the trace if recorded, otherwise from the allocator's history (a
snapshot), otherwise from samples at the end of each step. An event belongs to the step and the
phase of the host at that time. Counts and times are per step; peaks are the maximum over all steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.allocations import (
    CPU,
    MemoryEvents,
    known_bytes,
    memory_events,
    phase_at,
)
from chopper.analyzers.events.steps import traced_steps
from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import ints
from chopper.analyzers.views import View, column, optional
from chopper.wording import device_name

ALL = "all"
"""The phase of rows that hold whole steps."""

VIEW = View(
    "memory",
    __doc__,
    (
        column("rank", "Global rank that the row is about.", "int32"),
        column("device", "Device of the memory: `device N`, or `host`."),
        column("phase", "Phase of the host, forward, backward, …; `all` for whole steps."),
        optional("peak_allocated_bytes", "Peak of the bytes that tensors held."),
        optional("peak_reserved_bytes", "Peak of the bytes reserved from the driver."),
        optional("fragmentation_ratio", "Share of reserved bytes not held by tensors at the peak."),
        optional(
            "median_fragmentation_ratio", "Median share of reserved bytes not held by tensors."
        ),
        optional("allocation_count", "Number of allocations per step; null without events."),
        optional("requested_bytes", "Bytes allocated per step, reused blocks included."),
        optional("allocator_call_count", "cudaMalloc, hipFree and the like per step.", "float64"),
        optional("allocator_ns", "Host time in runtime calls that allocate or free, per step."),
        column("source", "Recording that the figures come from."),
    ),
    title="Memory",
    section="Memory",
    needs="neither the allocator's events (profile with memory=True) nor its totals were recorded",
)


def memory(run: Attribution) -> pa.Table:
    """MEMORY_EVENT or ALLOCATOR_EVENT or DEVICE_MEMORY, HOST_SPAN, STEP -> MEMORY."""
    rows: list[dict[str, Any]] = []
    for rank in run.recording.ranks:
        found = memory_events(run, rank)
        for events in found:
            rows += _of_events(run, rank, events)
        if not found:
            rows += _of_readings(run.recording.table(rank, "device_memory"), rank)
    rows.sort(key=lambda r: (-(r["peak_allocated_bytes"] or 0), r["rank"], r["phase"] != ALL))
    return VIEW.of_rows(rows)


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
