"""Level 2 compute: what each kernel's time was spent on.

For a kernel of model math t = t_ideal · f_roofline · f_clock · f_contention · f_waves ·
f_instructions · f_tensor · f_rest; for memory-bound work t = t_roofline · f_clock · f_contention ·
f_rest. All other work has causes of its own.

Products become sums of whole nanoseconds: t − t₀ = Σ shareᵢ with shareᵢ = L(t, t₀) · ln fᵢ and the
logarithmic mean L(a, b) = (a − b) / ln(a / b): exact, and independent of the order of the factors
(Ang, LMDI, https://doi.org/10.1016/j.enpol.2004.10.007). Since Σ ln fᵢ = ln(t / t₀), a share is the
part ln fᵢ / Σ ln fⱼ of t − t₀.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chopper.analyzers.causes.clock import CLOCK_LABELS
from chopper.analyzers.causes.event_work import EventWork, main_cause
from chopper.analyzers.causes.factors import Factors
from chopper.analyzers.causes.states import Shares, States, stacked
from chopper.analyzers.trace.join import COMPUTE, Links
from chopper.causes import CODES

_IDEAL = CODES["compute.ideal"]
_ROOFLINE = CODES["compute.roofline"]
_REST = CODES["compute.efficiency.rest"]
_CONTENTION = CODES["compute.contention"]
_WAVES = CODES["compute.efficiency.wave_quantization"]
_INSTRUCTIONS = CODES["compute.efficiency.instructions"]
_TENSOR = CODES["compute.efficiency.tensor_core"]
_CLOCK = [CODES[f"compute.clock.{label}"] for label in CLOCK_LABELS]
_NO_REASON = CODES["compute.clock.unlabelled"]
_VECTOR_ROOFLINE = CODES["compute.vector.roofline"]
_VECTOR_EXCESS = CODES["compute.vector.excess"]
MATH = [_IDEAL, _ROOFLINE, *_CLOCK, _CONTENTION, _WAVES, _INSTRUCTIONS, _TENSOR, _REST]
"""What model math with a known peak is split into."""
_SCALE_SAID = 0.98
"""Factors scaled by less are rounding and noise."""


@dataclass(frozen=True, slots=True)
class ComputeSplit:
    """Compute time of a rank by cause.

    Attributes:
        too_fast: fragments of kernels that beat their ideal time, which no peak allows.
        of_peak_ratio: what all products need at the peak, over the time that they took.
        scaled: fragments whose measured factors explain more than was observed.
        split_ns: time of those fragments and of all that were split into factors.
    """

    shares: Shares
    too_fast: int
    of_peak_ratio: float
    scaled: int
    split_ns: tuple[int, int]


def split_compute(states: States, links: Links, work: EventWork, factors: Factors) -> ComputeSplit:
    """Attribute the exclusive compute time of one rank."""
    computing = np.flatnonzero(links.work_class[states.event_row] == COMPUTE)
    event = states.event_row[computing]
    share = states.share_ns[computing]
    cause = main_cause(links, work)[event]
    plain = ~np.isin(cause, [_IDEAL, _VECTOR_ROOFLINE])
    rows = np.flatnonzero(~plain)
    fragment, event, share = computing[rows], event[rows], share[rows]
    math = cause[rows] == _IDEAL
    length = states.length_ns[fragment]
    # What a kernel had to do does not shrink because others ran beside it: by time run, not shared.
    fraction = length / np.maximum(links.events.dur_ns[event], 1)
    roofline = work.roofline_ns[event] * fraction
    ideal = np.where(math, work.ideal_ns[event] * fraction, roofline)
    roofline = np.fmax(roofline, ideal)
    allowed = ideal * np.exp(factors.boost_ln[event])
    base_ns = np.minimum(np.floor(ideal), share).astype(np.int64)
    gap = share - base_ns
    shares, scaled = _shares(gap, share, ideal, roofline, math, event, factors)
    clock = shares.pop(_NO_REASON, None)
    rest = shares.pop(_REST)
    parts = [
        *_of_unknown_work(states, links, computing[plain], cause[plain], factors),
        (fragment, cause[rows], base_ns),
        (fragment, np.where(math, _REST, _VECTOR_EXCESS), rest),
        *((fragment, name, time) for name, time in shares.items()),
        *(() if clock is None else _labelled(fragment, event, clock, links, factors)),
    ]
    return ComputeSplit(
        stacked(parts),
        int((math & (allowed > length * 1.02 + 1000)).sum()),
        float(allowed[math].sum() / max(int(length[math].sum()), 1)),
        int(scaled.sum()),
        (int(share[scaled].sum()), int(share.sum())),
    )


_UNKNOWN_WORK = (CODES["compute.no_peak"], CODES["compute.vector.no_bytes"])


def _of_unknown_work(
    states: States, links: Links, fragment: np.ndarray, cause: np.ndarray, factors: Factors
) -> list[tuple[np.ndarray, np.ndarray | int, np.ndarray]]:
    """Time without a split; of work of unknown amount, what the clock took is apart.

    Without an ideal time t₀ there is no share of t − t₀: the clock took t − t / f_clock, what the
    kernel would save at the reference clock.
    """
    event, share = states.event_row[fragment], states.share_ns[fragment]
    ratio = np.where(np.isin(cause, _UNKNOWN_WORK), -np.expm1(-factors.clock_ln[event]), 0.0)
    clock = np.rint(share * ratio).astype(np.int64)
    parts = _labelled(fragment, event, clock, links, factors)
    return [(fragment, cause, share - clock), *parts]


def _shares(
    gap: np.ndarray,
    share: np.ndarray,
    ideal: np.ndarray,
    roofline: np.ndarray,
    math: np.ndarray,
    event: np.ndarray,
    factors: Factors,
) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Divide what kernels took beyond their ideal among their factors.

    Where the known factors explain more than was observed (bytes that came from a cache, a model
    that does not fit), their logarithms are scaled down, those of models first, so that none is
    negative and nothing is left for the rest.

    Returns:
        Time by cause, the rest among them (all of the clock's under one); and a mask of the rows
        where a factor other than the roofline was scaled by more than rounding.
    """
    some = (ideal > 0) & (gap > 0)
    observed = np.log(np.divide(share, ideal, out=np.ones(len(gap)), where=some))
    np.maximum(observed, 0.0, out=observed)
    limit = np.log(np.divide(roofline, ideal, out=np.ones(len(gap)), where=some))
    measured = {
        cause: np.where(math, factor[event], 0.0) if of_math else factor[event]
        for cause, factor, of_math in (
            (_NO_REASON, factors.clock_ln, False),
            (_CONTENTION, factors.contention_ln, False),
            (_INSTRUCTIONS, factors.instructions_ln, True),
            (_TENSOR, factors.tensor_ln, True),
        )
        if factor.any()
    }
    modelled = {_ROOFLINE: limit}
    if factors.wave_ln.any():
        modelled[_WAVES] = np.where(math, factors.wave_ln[event], 0.0)
    rest, measured_scale, modelled_scale = fit(
        observed, list(measured.values()), list(modelled.values())
    )
    # The roofline counts all bytes as read from memory, and a kernel may beat it: that is no news.
    scaled = some & (measured_scale < _SCALE_SAID)
    if _WAVES in modelled:
        scaled |= some & (modelled_scale < _SCALE_SAID) & (modelled[_WAVES] > 0)
    # Work without FLOP has no ratio to take a logarithm of: its bytes, and what is beyond them.
    nothing = np.flatnonzero(~(ideal > 0))
    for known, scale in ((measured, measured_scale), (modelled, modelled_scale)):
        for factor in known.values():
            factor *= scale
            factor[nothing] = 0.0
    limit[nothing] = np.minimum(np.nan_to_num(roofline[nothing]), share[nothing])
    rest[nothing] = share[nothing] - limit[nothing]
    parts = apportion(gap, [*modelled.values(), *measured.values(), rest])
    return dict(zip([*modelled, *measured, _REST], parts, strict=True)), scaled


def _labelled(
    fragment: np.ndarray, event: np.ndarray, clock: np.ndarray, links: Links, factors: Factors
) -> list[tuple[np.ndarray, int, np.ndarray]]:
    """Clock loss by what held the clock down."""
    rows = np.flatnonzero(clock > 0)
    if not len(rows):
        return []
    blame = factors.blame(links, event[rows])
    times = apportion(clock[rows], list(blame.T))
    return [(fragment[rows], cause, time) for cause, time in zip(_CLOCK, times, strict=True)]


def fit(
    observed_ln: np.ndarray,
    measured_ln: Sequence[np.ndarray],
    modelled_ln: Sequence[np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the unexplained factor, and scales for factors that exceed the observed slowdown.

    What was measured comes first: models get what it leaves, and are scaled down alike where they
    explain more. Only where measurements alone exceed what was observed, they are scaled too.

    Args:
        observed_ln: ln(t / t₀), at least 0.
        measured_ln, modelled_ln: logarithms of the known factors, at least 0 each.

    Returns:
        ln of the remaining factor, at least 0; the scale in [0, 1] of the measured factors, and
        that of the modelled ones.
    """
    remainder, measured_scale = _take(observed_ln, measured_ln)
    remainder, modelled_scale = _take(remainder, modelled_ln)
    return remainder, measured_scale, modelled_scale


def _take(available: np.ndarray, factors: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    known = np.zeros(len(available))
    for factor in factors:
        known += factor
    scale = np.divide(available, known, out=np.ones(len(known)), where=known > available)
    return np.maximum(available - known, 0.0), scale


def apportion(total: np.ndarray, weights: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Split whole numbers in proportion to weights; each part is within 1 of its exact share.

    Cumulative sums are rounded, so the parts sum to the total exactly and no rounding error
    gathers in one of them. Where all weights are 0, everything goes to the last part.

    Args:
        total: int64, at least 0 and below 2**53.
        weights: at least 0, one array per part.
    """
    weight_sum = np.zeros(len(total))
    for weight in weights:
        weight_sum += weight
    running = np.zeros(len(total))
    before = np.zeros(len(total), dtype=np.int64)
    parts = []
    for weight in weights[:-1]:
        running += weight
        share = np.divide(running, weight_sum, out=np.zeros(len(total)), where=weight_sum > 0)
        edge = np.rint(total * np.minimum(share, 1.0)).astype(np.int64)
        parts.append(edge - before)
        before = edge
    parts.append(total - before)
    return parts
