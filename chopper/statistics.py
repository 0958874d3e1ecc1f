"""How sure a difference between two runs is, from the variation of their steps.

Steps are resampled within each run, independently. With few steps a plain percentile interval is
too narrow, so deviations are stretched by sqrt(n/(n−1)) and by Student's t over the normal
quantile (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", section 5), degrees of
freedom by Welch and Satterthwaite. Steps that resemble the one before them say less than as many
independent ones: deviations are stretched by sqrt((1+ρ)/(1−ρ)), ρ the lag-1 autocorrelation of both
runs together, and from 10 steps on n(1−ρ)/(1+ρ) steps count for the degrees of freedom.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

MIN_STEPS = 3
"""With fewer steps a run gets no interval."""
_DRAWS = 2000
_MAX_UNITS = 1000
"""More steps are resampled in this many blocks of consecutive ones."""
_MIN_STEPS_FOR_AUTOCORRELATION = 10
_MAX_AUTOCORRELATION = 0.9
_NORMAL_975 = 1.959964
# Student's t at 0.975 by degrees of freedom (any table of the distribution).
_DF = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 30, 60, 120)
_T_975 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.1788, 2.1314, 2.0860, 2.0423, 2.0003, 1.9799),
)


@dataclass(frozen=True)
class Sample:
    """The steps of one run.

    Attributes:
        values: (steps, quantities) time of each step, summed over its rank windows.
        weights: (steps,) rank windows of each step; a mean is Σ values / Σ weights.
    """

    values: np.ndarray
    weights: np.ndarray

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.weights)

    @property
    def mean(self) -> np.ndarray:
        """(quantities,) mean per rank window."""
        return self.values.sum(axis=0) / max(self.weights.sum(), 1)


@dataclass(frozen=True)
class Intervals:
    """95 % intervals of B − A per quantity, absolute and relative to A; rows are (low, high)."""

    difference: np.ndarray
    ratio: np.ndarray
    """NaN where A's mean is 0."""


def t_975(freedom: np.ndarray) -> np.ndarray:
    """Student's t quantile at 0.975, interpolated in 1/df; at least one degree of freedom."""
    inverse = 1 / np.array([*_DF, np.inf])
    values = np.array([*_T_975, _NORMAL_975])
    at = 1 / np.maximum(freedom, 1)
    found: np.ndarray = np.interp(at, inverse[::-1], values[::-1])
    return found


def compare_means(a: Sample, b: Sample, *, seed: int = 0) -> Intervals | None:
    """95 % intervals of the differences of means; None when a run has fewer than 3 steps."""
    if min(a.steps, b.steps) < MIN_STEPS:
        return None
    rng = np.random.default_rng(seed)
    a, b = _blocked(a), _blocked(b)
    mean_a, mean_b = a.mean, b.mean
    rho = _autocorrelation(a, b)
    away_a = _deviations(a, rng) * _stretch(a, rho)
    away_b = _deviations(b, rng) * _stretch(b, rho)
    factor = t_975(_welch(a, b, rho)) / _NORMAL_975
    low, high = np.percentile(away_b - away_a, [2.5, 97.5], axis=0)
    difference = (mean_b - mean_a) + np.stack([low, high]) * factor
    with np.errstate(divide="ignore", invalid="ignore"):
        # A resampled mean near 0 would divide to nonsense: A's own mean is the least unit then.
        below = np.maximum(mean_a + factor * away_a, mean_a * 1e-3)
        ratio = np.percentile((mean_b + factor * away_b) / below - 1, [2.5, 97.5], axis=0)
    ratio[:, mean_a <= 0] = np.nan
    return Intervals(difference, ratio)


def mean_intervals(values: np.ndarray, *, seed: int = 0) -> np.ndarray | None:
    """95 % intervals of the means over steps, alike; None with fewer than 3 steps.

    Args:
        values: (steps, quantities).

    Returns:
        (quantities, 2): low and high.
    """
    if len(values) < MIN_STEPS:
        return None
    sample = _blocked(Sample(values, np.ones(len(values))))
    rho = _autocorrelation(sample)
    away = _deviations(sample, np.random.default_rng(seed)) * _stretch(sample, rho)
    n = sample.steps
    alone = (
        n * (1 - rho) / (1 + rho) if n >= _MIN_STEPS_FOR_AUTOCORRELATION else np.full(len(rho), n)
    )
    factor = t_975(alone - 1) / _NORMAL_975
    found: np.ndarray = (sample.mean + np.percentile(away, [2.5, 97.5], axis=0) * factor).T
    return found


def compare_medians(a: np.ndarray, b: np.ndarray, *, seed: int = 0) -> Intervals | None:
    """As :func:`compare_means` for the median of one quantity: (steps,) values per run."""
    if min(len(a), len(b)) < MIN_STEPS:
        return None
    rng = np.random.default_rng(seed)
    median_a, median_b = float(np.median(a)), float(np.median(b))
    samples = [Sample(v[:, None].astype(np.float64), np.ones(len(v))) for v in (a, b)]
    rho = _autocorrelation(*samples)
    away_a, away_b = (
        _median_deviations(v, rng) * float(_stretch(s, rho)[0])
        for v, s in zip((a, b), samples, strict=True)
    )
    factor = float(t_975(_welch(samples[0], samples[1], rho))[0]) / _NORMAL_975
    difference = (median_b - median_a) + factor * np.percentile(away_b - away_a, [2.5, 97.5])
    below = np.maximum(median_a + factor * away_a, max(median_a * 1e-3, 1e-9))
    ratio = np.percentile((median_b + factor * away_b) / below - 1, [2.5, 97.5])
    return Intervals(difference[:, None], ratio[:, None])


def welch(
    mean_a: np.ndarray,
    variance_a: np.ndarray,
    steps_a: int,
    mean_b: np.ndarray,
    variance_b: np.ndarray,
    steps_b: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Welch's t test of many quantities -> half widths of the 95 % intervals, p values.

    For quantities too many to resample. Student's distribution by Wallace's approximation (1959):
    z = (8ν+1)/(8ν+3) · sqrt(ν ln(1 + t²/ν)).
    """
    part_a, part_b = variance_a / steps_a, variance_b / steps_b
    error = np.sqrt(part_a + part_b)
    freedom = _satterthwaite(part_a, np.array(steps_a), part_b, np.array(steps_b))
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(error > 0, np.abs(mean_b - mean_a) / error, np.inf)
    t = np.where(mean_b == mean_a, 0.0, np.minimum(t, 1e6))
    z = (8 * freedom + 1) / (8 * freedom + 3) * np.sqrt(freedom * np.log1p(t * t / freedom))
    p = np.array([math.erfc(v / math.sqrt(2)) for v in z.tolist()])
    return t_975(freedom) * error, p


def discoveries(p: np.ndarray, rate: float = 0.05) -> np.ndarray:
    """Benjamini and Hochberg (1995): mask of rows; at most ``rate`` of them false, on average."""
    if not len(p):
        return np.zeros(0, dtype=bool)
    order = np.argsort(p, kind="stable")
    fine = np.flatnonzero(p[order] <= rate * np.arange(1, len(p) + 1) / len(p))
    found = np.zeros(len(p), dtype=bool)
    if len(fine):
        found[order[: fine[-1] + 1]] = True
    return found


def inflation(step_ns: np.ndarray) -> float:
    """By how much the variance of a mean exceeds that of independent steps; at least 1."""
    sample = Sample(step_ns[:, None].astype(np.float64), np.ones(len(step_ns)))
    if len(step_ns) < _MIN_STEPS_FOR_AUTOCORRELATION:
        return 1.0
    rho = float(_autocorrelation(sample)[0])
    return (1 + rho) / (1 - rho)


def _blocked(sample: Sample) -> Sample:
    if sample.steps <= _MAX_UNITS:
        return sample
    edges = np.linspace(0, sample.steps, _MAX_UNITS, endpoint=False).astype(np.int64)
    return Sample(
        np.add.reduceat(sample.values, edges, axis=0), np.add.reduceat(sample.weights, edges)
    )


def _deviations(sample: Sample, rng: np.random.Generator) -> np.ndarray:
    """(draws, quantities) means of resampled steps, less the mean."""
    n = sample.steps
    values = sample.values.astype(np.float64)
    drawn = rng.multinomial(n, np.full(n, 1 / n), size=_DRAWS).astype(np.float64)
    means = (drawn @ values) / (drawn @ sample.weights)[:, None]
    return means - sample.mean


def _median_deviations(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    middle = np.median(values)
    size = max(1, min(_DRAWS, 4_000_000 // len(values)))
    parts = [
        np.median(values[rng.integers(0, len(values), (size, len(values)))], axis=1)
        for _ in range(-(-_DRAWS // size))
    ]
    return np.concatenate(parts)[:_DRAWS] - middle


def _autocorrelation(*samples: Sample) -> np.ndarray:
    """(quantities,) lag-1 autocorrelation of the steps of all samples together, from 0 on."""
    along = power = np.zeros(samples[0].values.shape[1])
    for sample in samples:
        each = sample.values / np.maximum(sample.weights, 1)[:, None]
        away = each - each.mean(axis=0)
        along = along + (away[1:] * away[:-1]).sum(axis=0)
        power = power + (away**2).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        rho = np.where(power > 0, along / power, 0.0)
    n = sum(sample.steps for sample in samples) / len(samples)
    # The estimate is low by (1 + 3ρ)/n on average (Kendall 1954).
    found: np.ndarray = np.clip(rho + (1 + 3 * rho) / n, 0.0, _MAX_AUTOCORRELATION)
    return found


def _stretch(sample: Sample, rho: np.ndarray) -> np.ndarray:
    """(quantities,) factor on deviations: small samples, and steps that resemble each other."""
    n = sample.steps
    small = math.sqrt(n / (n - 1)) if n > 1 else 1.0
    found: np.ndarray = small * np.sqrt((1 + rho) / (1 - rho))
    return found


def _welch(a: Sample, b: Sample, rho: np.ndarray) -> np.ndarray:
    parts, counts = [], []
    for sample in (a, b):
        each = sample.values / np.maximum(sample.weights, 1)[:, None]
        parts.append(each.var(axis=0, ddof=1) / sample.steps)
        independent = sample.steps * (1 - rho) / (1 + rho)
        enough = sample.steps >= _MIN_STEPS_FOR_AUTOCORRELATION
        counts.append(np.maximum(independent, 2) if enough else np.full(len(rho), sample.steps))
    return _satterthwaite(parts[0], counts[0], parts[1], counts[1])


def _satterthwaite(
    part_a: np.ndarray, steps_a: np.ndarray, part_b: np.ndarray, steps_b: np.ndarray
) -> np.ndarray:
    least = np.minimum(steps_a, steps_b) - 1
    below = part_a**2 / np.maximum(steps_a - 1, 1) + part_b**2 / np.maximum(steps_b - 1, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        freedom = np.where(below > 0, (part_a + part_b) ** 2 / below, least)
    found: np.ndarray = np.maximum(freedom, np.maximum(least, 1))
    return found
