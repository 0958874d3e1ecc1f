"""Similarity of steps' allocations, and its correlation with the clock.

"Chopper" (arXiv 2512.08242) observes that FSDP2, which frees deterministically, runs at higher and
steadier clocks than FSDP1, whose frees wait for recorded streams.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.groups import reals
from chopper.analyzers.views import View, column, optional
from chopper.analyzers.views.memory_steps import memory_steps

_MEANS = {
    "event_count": "event_count",
    "distinct_sizes_count": "distinct_sizes_count",
    "peak_mean_bytes": "peak_allocated_bytes",
    "clock_mean_hz": "clock_mean_hz",
    "clock_std_hz": "clock_std_hz",
}
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
        optional("identical_ratio", "Share of steps that allocate exactly like the previous step."),
        column("event_count", "Mean number of allocations and frees per step."),
        column("distinct_sizes_count", "Mean number of distinct block sizes per step."),
        optional("peak_mean_bytes", "Mean over steps of the peak bytes held by tensors."),
        optional(
            "peak_std_bytes", "Standard deviation over steps of the peak bytes held by tensors."
        ),
        optional("clock_mean_hz", "Mean over steps of the device's mean clock."),
        optional("clock_std_hz", "Mean over steps of the clock's standard deviation in a step."),
        optional(
            "clock_correlation", "Pearson correlation of dissimilarity and clock_std_hz.", "float64"
        ),
        optional("no_correlation", "Reason why there is no correlation.", "text"),
    ),
    title="Memory determinism",
    section="Memory",
    needs="allocator events of steps were not recorded (profile with memory=True)",
)


def memory_determinism(run: Attribution) -> pa.Table:
    """MEMORY_EVENT, ALLOCATOR_EVENT, STEP, DEVICE_CLOCK -> MEMORY_DETERMINISM."""
    steps = memory_steps(run)
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
    return VIEW.of_rows(rows)


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
