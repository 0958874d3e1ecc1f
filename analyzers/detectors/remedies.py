"""What to do about a cause in a run: its advice, without what the recording itself rules out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.clock import FALSE_HEAT, POWER_BRAKE, POWER_CAPS, REASONED
from chopper.analyzers.trace.samples import of_rank
from chopper.causes import CAUSES, inherited

_SAME_RATIO = 0.995
"""Limits that differ by less are equal: drivers round them."""
_LIMITS = {
    "compute.clock.power_cap": ("power_limit_w", "power_limit_max_w"),
    "compute.clock.application": ("sm_clock_application_hz", "sm_clock_max_hz"),
    "compute.clock.host_limited": ("reference_hz", "sm_clock_max_hz"),
}
"""Cause of a low clock -> columns of its limit in force and of the largest possible one."""


def remedy(run: Attribution, cause: str) -> str:
    """Return what to do about a cause or its nearest parent; empty when nothing is known.

    Of a cause of a low clock, the limit in force is held against the largest that can be set, and
    the driver's reasons against what the cause's advice takes them to be.
    """
    condition, values = _condition(run, cause)
    text = CAUSES[cause].remedies.get(condition) if cause in CAUSES else None
    return inherited(cause, "advice") if text is None else text.format(**values)


def _condition(run: Attribution, cause: str) -> tuple[str, dict[str, str]]:
    """Return what a recording shows of a cause, "" where nothing, and the values for its words."""
    if cause in ("idle.unlaunched", "compute.unmodelled"):
        return "spans" if _is_of_spans(run) else "", {}
    if cause not in _LIMITS and cause != "compute.clock.unlabelled":
        return "", {}
    series = [s for f in run.factors.values() for s in f.clocks.readers.values()]
    reasons = np.concatenate([np.zeros(1, np.int64), *(s.reasons for s in series)])
    bits = int(np.bitwise_or.reduce(reasons[reasons >= 0])) % FALSE_HEAT
    if cause not in _LIMITS:
        unnamed = bits & ~REASONED
        return ("recorded", {"bits": hex(unnamed)}) if unnamed else ("", {})
    if "power" in cause and bits & POWER_BRAKE and not bits & POWER_CAPS:
        return "brake", {}
    name, largest = _LIMITS[cause]
    rows = [row for row in _limits(run) if row[name] and row[largest]]
    below = [row for row in rows if row[name] < _SAME_RATIO * row[largest]]
    of = min(below or rows, key=lambda row: row[name], default=None)
    if of is None:
        return "", {}
    words = {"limit": fmt.cell(name, of[name]), "maximum": fmt.cell(largest, of[largest])}
    return "below_maximum" if below else "at_maximum", words


def _is_of_spans(run: Attribution) -> bool:
    """Return whether a run has spans of operations in place of kernels, and no host."""
    recording = run.recording
    return all(
        recording.rows_count(rank, "pipeline_action")
        and not recording.rows_count(rank, "host_span")
        for rank in recording.ranks
    )


def _limits(run: Attribution) -> Iterator[dict[str, Any]]:
    """Yield the limits of each rank's device, with the clock that its peak is quoted at."""
    for rank, factors in run.factors.items():
        reference_hz = factors.reference_hz[np.isfinite(factors.reference_hz)]
        for row in of_rank(run.recording, rank, "device_limit").to_pylist()[-1:]:
            yield row | {"reference_hz": float(reference_hz.max()) if len(reference_hz) else None}
