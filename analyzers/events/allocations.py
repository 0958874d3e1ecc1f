"""Allocator events of each rank, with the step and the phase that the host was in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.steps import traced_steps
from chopper.analyzers.trace.columns import ints, matching, strings
from chopper.analyzers.trace.join import Links
from chopper.analyzers.trace.phases import PHASES
from chopper.wording import device_name

CPU, DEVICE = 0, 1
SIGNS = {"alloc": 1, "free_requested": -1, "free": -1}
"""Actions that change what tensors hold; a block is free when its tensor lets go of it."""
_THREAD_PHASES = [PHASES.index(name) for name in ("recompute", "backward", "optimizer")]
"""Phases of one thread that hold for the rank: loading of data goes on beside the others."""


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
        source: the recording that they come from.
    """

    device_type: int
    device_id: int
    step: np.ndarray
    phase: np.ndarray
    phases: list[str]
    bytes_count: np.ndarray
    allocated_bytes: np.ndarray
    reserved_bytes: np.ndarray
    source: str

    @property
    def device(self) -> str:
        """``device N``, or ``host``."""
        return "host" if self.device_type == CPU else device_name(self.device_id)


def known_bytes(value: int) -> int | None:
    """Return a total of the allocator, None for unknown (-1)."""
    return int(value) if value >= 0 else None


def is_held(blocks: pa.Table) -> np.ndarray:
    """Return the mask of a snapshot's blocks that tensors hold, or that wait for a stream."""
    return matching(*strings(blocks, "state"), lambda state: state.startswith("active"))


def memory_events(run: Attribution, rank: int) -> list[MemoryEvents]:
    """Return the allocator events of one rank, one entry per device that has any.

    MEMORY_EVENT or ALLOCATOR_EVENT, STEP, HOST_SPAN -> events with step and phase. Without steps
    the whole trace is one.
    """
    linked = rank in run.links
    table, source = run.recording.table(rank, "memory_event"), "allocator events of the trace"
    if table.num_rows and linked:
        columns = _of_trace(table)
    else:
        table, source = run.recording.table(rank, "allocator_event"), "the allocator's history"
        if not table.num_rows:
            return []
        columns = _of_history(table)
    step = traced_steps(run, rank).index_at(columns["time_ns"])
    rows = np.flatnonzero(step >= 0)
    rows = rows[np.argsort(columns["time_ns"][rows], kind="stable")]
    columns = {name: values[rows] for name, values in columns.items()} | {"step": step[rows]}
    time_ns, tid = columns.pop("time_ns"), columns.pop("tid")
    phases = PHASES
    columns["phase"] = np.full(len(rows), PHASES.index("other"), dtype=np.int64)
    if linked:
        links = run.joined[rank].links()
        phases, columns["phase"] = links.phases, phase_at(links, time_ns, tid)
    kind, device = columns.pop("device_type"), columns.pop("device_id")
    found = []
    for type_, id_ in sorted(set(zip(kind.tolist(), device.tolist(), strict=True))):
        mine = (kind == type_) & (device == id_)
        cut = {name: values[mine] for name, values in columns.items()}
        for name in ("allocated_bytes", "reserved_bytes"):
            # A total that is never above 0 is one that the recorder does not keep.
            if not (cut[name] > 0).any():
                cut[name] = np.full(len(cut[name]), -1, dtype=np.int64)
        found.append(MemoryEvents(type_, id_, phases=phases, source=source, **cut))
    return found


def _of_trace(table: pa.Table) -> dict[str, np.ndarray]:
    kind = ints(table, "device_type", null=DEVICE)
    names = ("time_ns", "tid", "bytes_count", "allocated_bytes", "reserved_bytes")
    return {name: ints(table, name) for name in names} | {
        "device_type": kind,
        "device_id": np.where(kind == CPU, -1, ints(table, "device_id")),
    }


def _of_history(table: pa.Table) -> dict[str, np.ndarray]:
    codes, actions = strings(table, "action")
    sign = np.array([SIGNS.get(a, 0) for a in actions], dtype=np.int64)[codes]
    names = ("time_ns", "device_id", "allocated_bytes", "reserved_bytes")
    return {name: ints(table, name) for name in names} | {
        "tid": np.full(table.num_rows, -1, dtype=np.int64),
        "device_type": np.full(table.num_rows, DEVICE, dtype=np.int64),
        "bytes_count": sign * ints(table, "size_bytes", null=0),
    }


def phase_at(links: Links, time_ns: np.ndarray, tid: np.ndarray) -> np.ndarray:
    """Return the phase of what a thread was doing at each time, as codes into ``links.phases``.

    By the innermost span of the thread; where none tells, as `Links.unmarked_phase` says. Of a
    thread that is not known (-1), by whichever thread was in the backward pass, else in the
    optimizer.
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
        for rows, chosen in ((mine, None), (nobody, _THREAD_PHASES)):
            at = np.searchsorted(activity.start_ns[low:high], time_ns[rows], side="right") - 1
            row = np.where(at >= 0, activity.span[low + np.maximum(at, 0)], -1)
            phase = np.where(row >= 0, links.span_phase[np.maximum(row, 0)], -1)
            if chosen is not None:
                phase = np.where(np.isin(phase, chosen), phase, -1)
            known = phase > (-1 if chosen is None else found[rows])
            found[rows[known]] = phase[known]
    open_ = found < 0
    found[open_] = links.program.unmarked(time_ns[open_])
    return found
