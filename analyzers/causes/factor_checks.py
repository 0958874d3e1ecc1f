"""Findings on the measured factors: what was refused, and what stays a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from chopper.analyzers.causes.clock import MAX_GAP_NS, NO_OVERLAP, SPARSE
from chopper.storage.manifest import Finding

if TYPE_CHECKING:
    from chopper.analyzers.causes.compute import ComputeSplit
    from chopper.analyzers.causes.factors import Factors
    from chopper.analyzers.trace.join import Links

_SHARE_SAID = 0.01
"""Less of the time is not worth a line."""
_CLOCK = ("compute.clock",)


def check_factors(rank: int, links: Links, factors: Factors, split: ComputeSplit) -> list[Finding]:
    """Checks of one rank's factors."""
    found = _clocks(rank, links, factors)
    found += [msgspec.structs.replace(finding, rank=rank) for finding in factors.findings]
    found += _contention(rank, links, factors)
    scaled, whole = split.split_ns
    if whole and scaled > _SHARE_SAID * whole:
        found.append(
            Finding(
                code="compute.factors_exceed",
                severity="info",
                message=f"the factors of {split.scaled} kernels ({scaled / 1e6:.1f} ms) explain "
                "more than they took: those of models (roofline, waves) were scaled down, then the "
                "others",
                rank=rank,
                count=split.scaled,
            )
        )
    return found


def _contention(rank: int, links: Links, factors: Factors) -> list[Finding]:
    """Kernels that ran beside others, and nothing like them alone: the bound."""
    contention, dur_ns = factors.contention, links.events.dur_ns
    never = np.isnan(contention.baseline_ns) & (contention.overlapped_count > 0)
    # The events that were compared and ran beside something.
    beside = factors.signature >= 0
    beside[beside] = ~contention.alone
    rows = beside.copy()
    rows[beside] = never[factors.signature[beside]]
    unknown = float(dur_ns[rows].sum())
    if unknown <= _SHARE_SAID * float(dur_ns[factors.signature >= 0].sum()):
        return []
    bound = contention.bound_ns[never].sum()
    return [
        Finding(
            code="compute.contention_unknown",
            severity="info",
            message=f"{int(rows.sum())} kernels ({unknown / 1e6:.1f} ms) ran beside other work and "
            "too few of their like ran alone: their contention is not claimed; beyond the "
            f"instance that overlapped least they took {bound / 1e6:.1f} ms",
            rank=rank,
            count=int(rows.sum()),
            withholds=("compute.contention",) if unknown > 0.5 * dur_ns[beside].sum() else (),
        )
    ]


def clock_coverage(links: Links, factors: Factors) -> tuple[float, float]:
    """Time of kernels whose clock is known, of all that a clock would explain; 0 of 0 without."""
    if not factors.clocks.readers:
        return 0.0, 0.0
    wanted = (factors.signature >= 0) & ~np.isnan(factors.reference_hz)
    time = links.events.dur_ns
    return float(time[wanted & factors.clocks.known].sum()), float(time[wanted].sum())


def _clocks(rank: int, links: Links, factors: Factors) -> list[Finding]:
    """Clock samples that are missing, elsewhere in time, or too far apart."""
    clocks = factors.clocks
    asked = (factors.signature >= 0) & ~np.isnan(factors.reference_hz)
    if not asked.any():
        return []
    if not clocks.readers and not (clocks.state[asked] == NO_OVERLAP).any():
        return [
            Finding(
                code="telemetry.clock_missing",
                severity="info",
                message="no clock samples of the device: a low clock cannot be told from an "
                "inefficient kernel; record with chopper on the machine to sample it",
                rank=rank,
                withholds=_CLOCK,
            )
        ]
    time = links.events.dur_ns
    whole = float(time[asked].sum())
    found = []
    for state, code, why in (
        (NO_OVERLAP, "telemetry.clock_elsewhere", "no clock samples before and after them"),
        (SPARSE, "telemetry.clock_sparse", _sparse(factors)),
    ):
        rows = asked & (clocks.state == state)
        refused = float(time[rows].sum())
        if refused and refused > _SHARE_SAID * whole:
            found.append(
                Finding(
                    code=code,
                    severity="warning" if refused > 0.5 * whole else "info",
                    message=f"the clock of {int(rows.sum())} kernels ({refused / whole:.0%} of "
                    f"their time) is not claimed: {why}",
                    rank=rank,
                    count=int(rows.sum()),
                    withholds=_CLOCK if refused > 0.5 * whole else (),
                )
            )
    return found


def _sparse(factors: Factors) -> str:
    """Say how far apart samples are, and how far they may be."""
    gaps = [float(np.median(series.gap_ns)) for series in factors.clocks.readers.values()]
    bounds = [series.bound_ns for series in factors.clocks.readers.values()]
    if not gaps:
        return "samples are too far apart"
    bound = min(bounds)
    reason = (
        "whatever they say" if bound >= MAX_GAP_NS else "as fast as the clock changes between them"
    )
    return (
        f"samples are {max(gaps) / 1e6:.0f} ms apart in the median, at most {bound / 1e6:.0f} ms "
        f"would do, {reason}"
    )
