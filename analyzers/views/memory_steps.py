"""Allocations of each step: similarity to the previous step, sizes, peaks, clock.

A step's sequence is the signed sizes of its allocations and frees, in order. Two steps are
identical if their sequences are; their similarity is Dice's coefficient of their multisets of three
successive events (1: the same triples equally often; 0: none in common), which takes linear time
where an edit distance takes quadratic time.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.allocations import CPU, MemoryEvents, known_bytes, memory_events
from chopper.analyzers.events.groups import reals
from chopper.analyzers.events.steps import TracedSteps, traced_steps
from chopper.analyzers.trace.columns import ints
from chopper.analyzers.trace.samples import of_rank
from chopper.analyzers.views import View, column, optional

VIEW = View(
    "memory_steps",
    __doc__,
    (
        column("rank", "Global rank that the row is about.", "int32"),
        column("device", "Device of the memory: `device N`, or `host`."),
        column("step", "Number of the step.", "int64"),
        optional("similarity_ratio", "Dice similarity to the allocations of the previous step."),
        optional(
            "same_as_previous", "True where it allocates exactly like the previous step.", "bool"
        ),
        column("event_count", "Number of allocations and frees."),
        column("distinct_sizes_count", "Number of distinct block sizes."),
        column("requested_bytes", "Bytes allocated in the step."),
        optional("peak_allocated_bytes", "Peak bytes held by tensors."),
        optional("peak_reserved_bytes", "Peak bytes reserved from the driver."),
        column("clock_count", "Number of clock samples in the step."),
        optional("clock_mean_hz", "Mean of the device's clock in the step; null without samples."),
        optional("clock_std_hz", "Standard deviation of the device's clock samples in the step."),
        column("sequence", "Hash of the signed sizes in order; equal for identical steps.", "text"),
    ),
    title="Memory, step by step",
    section="Memory",
    needs="allocator events of steps were not recorded (profile with memory=True)",
)


def memory_steps(run: Attribution) -> pa.Table:
    """MEMORY_EVENT or ALLOCATOR_EVENT, STEP, DEVICE_CLOCK -> MEMORY_STEPS, in this order."""
    rows: list[dict[str, Any]] = []
    for rank in run.recording.ranks:
        steps = traced_steps(run, rank)
        clock = of_rank(run.recording, rank, "device_clock")
        for events in memory_events(run, rank) if len(steps) else []:
            rows += ({"rank": rank} | row for row in _of_device(clock, events, steps))
    return VIEW.of_rows(rows)


def _of_device(clock: pa.Table, events: MemoryEvents, steps: TracedSteps) -> list[dict[str, Any]]:
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
