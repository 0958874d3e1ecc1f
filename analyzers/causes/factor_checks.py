"""Findings on the measured factors: rejected measurements, and factors that are only bounds."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from chopper import wording as fmt
from chopper.analyzers.causes.clock import MAX_GAP_NS, NO_OVERLAP, SPARSE
from chopper.analyzers.causes.compute import ComputeSplit
from chopper.analyzers.causes.factors import Factors
from chopper.analyzers.trace.join import COMPUTE, Links
from chopper.claims import finding
from chopper.storage.manifest import Finding

_SHARE_SAID = 0.01
"""Less of the time is not worth a line."""


def check_factors(rank: int, links: Links, factors: Factors, split: ComputeSplit) -> list[Finding]:
    """Checks of one rank's factors."""
    scaled, total_ns = split.split_ns
    notes = [
        *_clocks(links, factors),
        *_unsplit(links, factors),
        *factors.findings,
        *_contention(links, factors),
    ]
    if total_ns and scaled > _SHARE_SAID * total_ns:
        notes.append(finding("compute.factors_exceed", count=split.scaled, scaled_ms=scaled / 1e6))
    return [msgspec.structs.replace(one, rank=rank) for one in notes]


def _contention(links: Links, factors: Factors) -> Iterator[Finding]:
    """Kernels that ran beside others, and nothing like them alone: the bound."""
    contention, dur_ns = factors.contention, links.events.dur_ns
    never = np.isnan(contention.baseline_ns) & (contention.overlapped_count > 0)
    # The events that were compared and ran beside something.
    contended = factors.signature >= 0
    contended[contended] = ~contention.alone
    rows = contended.copy()
    rows[contended] = never[factors.signature[contended]]
    unknown_ns = float(dur_ns[rows].sum())
    if unknown_ns > _SHARE_SAID * float(dur_ns[factors.signature >= 0].sum()):
        yield finding(
            "compute.contention_unknown",
            count=int(rows.sum()),
            withholds=unknown_ns > 0.5 * dur_ns[contended].sum(),
            share=unknown_ns / float(dur_ns.sum()),
            unknown_ms=unknown_ns / 1e6,
            bound_ms=contention.bound_ns[never].sum() / 1e6,
        )


def _unsplit(links: Links, factors: Factors) -> Iterator[Finding]:
    """Clocks that are averages, and what a clock may have cost kernels of unknown work."""
    averaged = factors.averaged
    if averaged is not None:
        yield finding(
            "telemetry.clock_averaged",
            count=averaged.kinds_count,
            low=fmt.hertz(averaged.low_hz),
            high=fmt.hertz(averaged.high_hz),
            exponent=f"{0.0 - round(averaged.slope, 2):.2f}",
        )
        return
    ratio = factors.clocks.clock_hz / factors.reference_hz
    unsure = (factors.signature < 0) & np.isnan(factors.slope) & (links.work_class == COMPUTE)
    rows = np.flatnonzero(unsure & ~np.isnan(ratio))
    time = links.events.dur_ns[rows].astype(np.float64)
    bound_ns = float((time * np.maximum(1 - ratio[rows], 0.0)).sum())
    if bound_ns > _SHARE_SAID * float(time.sum()):
        yield finding(
            "compute.clock_bound",
            count=len(rows),
            clock=fmt.hertz(float(np.average(factors.clocks.clock_hz[rows], weights=time))),
            ratio=fmt.ratio(float(np.average(ratio[rows], weights=time))),
            bound=fmt.duration(bound_ns),
            time=fmt.duration(float(time.sum())),
        )


def clock_coverage(links: Links, factors: Factors, is_own: np.ndarray) -> tuple[float, float]:
    """Time of own kernels whose clock is known, of what a clock would explain; 0 of 0 without."""
    if not factors.clocks.readers:
        return 0.0, 0.0
    wanted = is_own & (factors.signature >= 0) & ~np.isnan(factors.reference_hz)
    time = links.events.dur_ns
    return float(time[wanted & factors.clocks.known].sum()), float(time[wanted].sum())


def _clocks(links: Links, factors: Factors) -> Iterator[Finding]:
    """Clock samples that are missing, elsewhere in time, or too far apart."""
    clocks = factors.clocks
    wanted = (factors.signature >= 0) & ~np.isnan(factors.reference_hz)
    if not wanted.any():
        return
    if not clocks.readers and not (clocks.state[wanted] == NO_OVERLAP).any():
        yield finding("telemetry.clock_missing")
        return
    time = links.events.dur_ns
    total_ns = float(time[wanted].sum())
    for state, code in (
        (NO_OVERLAP, "telemetry.clock_elsewhere"),
        (SPARSE, "telemetry.clock_sparse"),
    ):
        rows = wanted & (clocks.state == state)
        refused = float(time[rows].sum())
        if refused and refused > _SHARE_SAID * total_ns:
            most = refused > 0.5 * total_ns
            yield finding(
                code,
                count=int(rows.sum()),
                severity="warning" if most else None,
                withholds=most,
                share=refused / total_ns,
                reason=_sparse(factors),
            )


def _sparse(factors: Factors) -> str:
    """Say how far apart samples are, and how far they may be."""
    gaps = [float(np.median(series.gap_ns)) for series in factors.clocks.readers.values()]
    bounds = [series.bound_ns for series in factors.clocks.readers.values()]
    if not gaps:
        return "samples are too far apart"
    bound = min(bounds)
    limit = "can be bridged" if bound >= MAX_GAP_NS else "would resolve how the clock changes"
    return (
        f"samples are {max(gaps) / 1e6:.0f} ms apart (median); at most {bound / 1e6:.0f} ms {limit}"
    )
