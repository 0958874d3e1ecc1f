"""Similarity of steps' allocations, and its correlation with the clock.

The published observation (Chopper, arXiv 2512.08242) is that FSDP2, which frees deterministically,
runs at higher and steadier clocks than FSDP1, whose frees wait for recorded streams.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.views import View
from chopper.analyzers.views.memory_steps import rows_of_steps
from chopper.tables import column, optional

_LEAST_STEPS = 3
"""Steps with a similarity and a clock that a correlation needs."""

VIEW = View(
    "memory_determinism",
    __doc__,
    (
        column("rank", "Global rank that the row is about.", "int32"),
        column("device", "Device of the memory: `device N`, or `host`."),
        column("steps_count", "Number of traced steps."),
        optional("similarity_ratio", "Mean similarity of a step's allocations to the last one's."),
        optional("identical_ratio", "Share of steps that allocate exactly as the step before."),
        column("event_count", "Mean number of allocations and frees per step."),
        column("distinct_sizes_count", "Mean number of different block sizes per step."),
        optional("peak_mean_bytes", "Mean over steps of the peak bytes that tensors held."),
        optional("peak_std_bytes", "Standard deviation over steps of the peak that tensors held."),
        optional("clock_mean_hz", "Mean over steps of the device's mean clock."),
        optional("clock_std_hz", "Mean over steps of the clock's standard deviation in a step."),
        optional("clock_correlation", "Pearson's, of dissimilarity and clock_std_hz.", "float64"),
        optional("no_correlation", "Reason why there is no correlation.", "text"),
    ),
    title="Memory determinism",
    section="Memory",
    needs="the allocator's events of steps were not recorded (profile with memory=True)",
)


def memory_determinism(run: Attributed) -> pa.Table:
    """MEMORY_EVENT, ALLOCATOR_EVENT, STEP, DEVICE_CLOCK -> MEMORY_DETERMINISM."""
    by_device: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows_of_steps(run):
        by_device.setdefault((row["rank"], row["device"]), []).append(row)
    rows = [_summary(*device, steps) for device, steps in by_device.items()]
    rows.sort(key=lambda r: (r["similarity_ratio"] is None, r["similarity_ratio"] or 0, r["rank"]))
    return VIEW.of_rows(rows)


def _summary(rank: int, device: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    def mean(rows: list[dict[str, Any]], name: str) -> float | None:
        known = [row[name] for row in rows if row[name] is not None]
        return float(np.mean(known)) if known else None

    def whole(name: str) -> int | None:
        found = mean(steps, name)
        return None if found is None else round(found)

    peaks = [s["peak_allocated_bytes"] for s in steps if s["peak_allocated_bytes"] is not None]
    correlation, reason = _correlation(device, steps[1:])
    return {
        "rank": rank,
        "device": device,
        "steps_count": len(steps),
        "similarity_ratio": mean(steps[1:], "similarity_ratio"),
        "identical_ratio": mean(steps[1:], "same_as_previous"),
        "event_count": whole("event_count"),
        "distinct_sizes_count": whole("distinct_sizes_count"),
        "peak_mean_bytes": whole("peak_allocated_bytes"),
        "peak_std_bytes": round(float(np.std(peaks, ddof=1))) if len(peaks) > 1 else None,
        "clock_mean_hz": whole("clock_mean_hz"),
        "clock_std_hz": whole("clock_std_hz"),
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
