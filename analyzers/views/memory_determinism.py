"""Memory determinism: do steps allocate alike, and do clocks vary more where they do not?

A step's sequence is what its allocations and frees were, in order: one signed size after the other.
Two steps are identical when their sequences are; their similarity is Dice's coefficient of their
multisets of three successive events (1: the same runs of three equally often; 0: none in common),
which is linear where an edit distance is quadratic. The published observation (Chopper, arXiv
2512.08242) is that FSDP2, which frees deterministically, runs at higher and steadier clocks than
FSDP1, whose frees wait for recorded streams.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.columns import ints
from chopper.analyzers.trace.samples import of_rank
from chopper.analyzers.views.memory_timeline import (
    CPU,
    MemoryEvents,
    _device,
    _known,
    memory_events,
    traced_steps,
)
from chopper.tables import TABLES

if TYPE_CHECKING:
    from typing import Any

    from chopper.attribution import Attribution

_LEAST_STEPS = 3
"""Steps with a similarity and a clock that a correlation needs."""


def memory_determinism(attribution: Attribution) -> pa.Table:
    """MEMORY_DETERMINISM: one row per rank and device, least alike first."""
    rows = []
    for key, steps in _by_device(memory_steps(attribution)).items():
        rows.append(_summary(key, steps))
    rows.sort(key=lambda r: (r["similarity_ratio"] is None, r["similarity_ratio"] or 0, r["rank"]))
    return pa.Table.from_pylist(rows, schema=TABLES["memory_determinism"].arrow)


def memory_steps(attribution: Attribution) -> pa.Table:
    """MEMORY_STEPS: the allocations of each traced step, and the device's clock in it."""
    rows: list[dict[str, Any]] = []
    for rank in attribution.run.ranks:
        numbers, starts, ends = traced_steps(attribution, rank)
        clock = of_rank(attribution.run, rank, "device_clock")
        for events in memory_events(attribution, rank) if len(numbers) else []:
            rows += _steps(clock, rank, events, numbers, starts, ends)
    return pa.Table.from_pylist(rows, schema=TABLES["memory_steps"].arrow)


def _by_device(table: pa.Table) -> dict[tuple[int, str], list[dict[str, Any]]]:
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        found.setdefault((row["rank"], row["device"]), []).append(row)
    return found


def _steps(
    clocks: pa.Table,
    rank: int,
    events: MemoryEvents,
    numbers: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    bounds = np.searchsorted(events.step, np.arange(len(numbers) + 1)) if _sorted(events) else None
    before: np.ndarray | None = None
    clock_time, clock_hz = _readings(clocks, events)
    for i, number in enumerate(numbers.tolist()):
        mine = (
            np.flatnonzero(events.step == i)
            if bounds is None
            else np.arange(bounds[i], bounds[i + 1])
        )
        size = events.bytes_count[mine]
        low, high = np.searchsorted(clock_time, (starts[i], ends[i]))
        rows.append(
            {
                "rank": rank,
                "device": _device(events.device_type, events.device_id),
                "step": number,
                "event_count": len(size),
                "distinct_sizes_count": len(np.unique(np.abs(size))),
                "requested_bytes": int(size[size > 0].sum()),
                "peak_allocated_bytes": _known(events.allocated_bytes[mine].max(initial=-1)),
                "peak_reserved_bytes": _known(events.reserved_bytes[mine].max(initial=-1)),
                "sequence": blake2b(size.tobytes(), digest_size=8).hexdigest(),
                "same_as_previous": None
                if before is None
                else len(before) == len(size) and bool((before == size).all()),
                "similarity_ratio": None if before is None else similarity(before, size),
                **_clock(clock_hz[low:high]),
            }
        )
        before = size
    return rows


def _sorted(events: MemoryEvents) -> bool:
    return bool((np.diff(events.step) >= 0).all())


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Dice's coefficient of the multisets of three successive sizes; 1 for two empty steps."""
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


def _readings(clocks: pa.Table, events: MemoryEvents) -> tuple[np.ndarray, np.ndarray]:
    """Times, ascending, and clocks of the readings of the device that the memory is on."""
    clock = ints(clocks, "sm_clock_hz")
    mine = (clock > 0) & (ints(clocks, "device_id") == events.device_id)
    mine &= events.device_type != CPU
    return ints(clocks, "time_ns")[mine], clock[mine].astype(np.float64)


def _clock(values: np.ndarray) -> dict[str, Any]:
    """Mean and deviation of the device's clock readings inside a step."""
    count = len(values)
    if not count:
        return {"clock_count": 0, "clock_mean_hz": None, "clock_std_hz": None}
    return {
        "clock_count": count,
        "clock_mean_hz": round(float(values.mean())),
        "clock_std_hz": round(float(values.std(ddof=1))) if count > 1 else None,
    }


def _summary(key: tuple[int, str], steps: list[dict[str, Any]]) -> dict[str, Any]:
    rank, device = key
    pairs = steps[1:]
    peaks = [s["peak_allocated_bytes"] for s in steps if s["peak_allocated_bytes"] is not None]
    clocks = [s["clock_mean_hz"] for s in steps if s["clock_mean_hz"] is not None]
    within = [s["clock_std_hz"] for s in steps if s["clock_std_hz"] is not None]
    correlation, reason = _correlation(device, pairs)
    return {
        "rank": rank,
        "device": device,
        "steps_count": len(steps),
        "similarity_ratio": float(np.mean([s["similarity_ratio"] for s in pairs]))
        if pairs
        else None,
        "identical_ratio": float(np.mean([s["same_as_previous"] for s in pairs]))
        if pairs
        else None,
        "event_count": round(float(np.mean([s["event_count"] for s in steps]))),
        "distinct_sizes_count": round(float(np.mean([s["distinct_sizes_count"] for s in steps]))),
        "peak_mean_bytes": round(float(np.mean(peaks))) if peaks else None,
        "peak_std_bytes": round(float(np.std(peaks, ddof=1))) if len(peaks) > 1 else None,
        "clock_mean_hz": round(float(np.mean(clocks))) if clocks else None,
        "clock_std_hz": round(float(np.mean(within))) if within else None,
        "clock_correlation": correlation,
        "no_correlation": reason,
    }


def _correlation(device: str, steps: list[dict[str, Any]]) -> tuple[float | None, str | None]:
    """(Pearson's r of 1 − similarity and the clock's deviation over steps, or None; why not)."""
    if device == "host":
        return None, "the host's memory: it has no device clock"
    pairs = [
        (1 - s["similarity_ratio"], s["clock_std_hz"])
        for s in steps
        if s["clock_std_hz"] is not None
    ]
    if not pairs:
        return None, "no step holds two samples of the device's clock"
    if len(pairs) < _LEAST_STEPS:
        return None, f"{len(pairs)} steps with clock samples: {_LEAST_STEPS} are needed"
    unlike, varying = np.array(pairs, dtype=np.float64).T
    if np.ptp(unlike) == 0:
        return None, "every step resembles the one before equally: nothing to correlate"
    if np.ptp(varying) == 0:
        return None, "the clock varied equally in every step: nothing to correlate"
    return float(np.corrcoef(unlike, varying)[0, 1]), None
