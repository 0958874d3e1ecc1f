"""Intervals and tests: of the steps of a run, and of repeated runs.

Steps are resampled within each run, independently. With few steps a plain percentile interval is
too narrow, so deviations are stretched by sqrt(n/(n-1)) and by Student's t over the normal
quantile (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", section 5), degrees of
freedom by Welch and Satterthwaite. Steps that resemble the one before them say less than as many
independent ones: deviations are stretched by sqrt((1+ρ)/(1-ρ)), ρ the lag-1 autocorrelation of both
runs together, and from 10 steps on n(1-ρ)/(1+ρ) steps count for the degrees of freedom. A 95 %
interval of a mean covers the truth in 94 to 97 % of simulated runs with independent steps; with
ρ = 0.3 in 90 to 94 %; with ρ = 0.6 in 80 to 85 % below 10 steps, 90 % at 20 and 93 % from 50 on.

Repetitions are whole runs, each in processes of its own, so that they are independent as the steps
of one run are not. Their intervals are Student's t; ratios are taken between logarithms, where a
factor of two up and one down are equally far (Fleming and Wallace 1986).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

MIN_STEPS = 3
"""Fewest steps of a run with an interval."""
_RESAMPLES = 2000
_MAX_UNITS = 1000
"""More steps are resampled in this many blocks of consecutive ones."""
_RESAMPLED_AT_ONCE = 4_000_000
"""Most values in memory while resampling."""
_MIN_STEPS_FOR_AUTOCORRELATION = 10
_MAX_AUTOCORRELATION = 0.9
_NORMAL_975 = 1.959964
# log t as a polynomial in 1/df, fitted to scipy.special.stdtrit(df, 0.975) from 1 degree of freedom
# on: at most 3e-5 off.
_LOG_T_975 = (0.67292575, 1.21044246, 0.70510451, 0.17569371, -0.32711781, 0.10505175)
_MAD_TO_MEDIAN_ERROR = 1.4826 * 1.2533
"""Median absolute deviation to the standard error of a median, times √n, for normal noise."""
_RUNS_PER_OUTLIER = 10
_OUTLIER_RATE = 0.001
_MIN_FREEDOM_OF_DRIFT = 9
_MOST_OVER_STEPS = 2.0
_HELD_RUNS = 5
"""So many runs in a row hold a level."""
_DRIFT_SPREADS = 5.0
"""A rise by so many spreads is no noise, even where successive runs are alike."""
_MAX_TERMS = 500
"""Of a continued fraction: it takes about the square root of its larger parameter."""


@dataclass(frozen=True)
class Sample:
    """Steps of one run.

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

    @property
    def per_window(self) -> np.ndarray:
        """(steps, quantities) mean of each step over its rank windows."""
        return self.values / np.maximum(self.weights, 1)[:, None]


@dataclass(frozen=True)
class Intervals:
    """95 % intervals of B − A per quantity, absolute and relative to A; rows are (low, high)."""

    difference: np.ndarray
    ratio: np.ndarray
    """NaN where A's mean is 0."""


def t_975(freedom: np.ndarray) -> np.ndarray:
    """Student's t quantile at 0.975; at least one degree of freedom."""
    return np.exp(np.polynomial.polynomial.polyval(1 / np.maximum(freedom, 1), _LOG_T_975))


# Steps of a run


def compare_means(a: Sample, b: Sample) -> Intervals | None:
    """95 % intervals of the differences of means; None when a run has fewer than 3 steps."""
    return _intervals(_blocked(a), _blocked(b), lambda s, rng: (s.mean, _deviations(s, rng)))


def compare_medians(a: np.ndarray, b: np.ndarray) -> Intervals | None:
    """Compare as :func:`compare_means` the medians of one quantity: (steps,) values per run."""

    def resampled(sample: Sample, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        median = np.median(sample.values, axis=0)
        return median, bootstrap(sample.values, np.median, rng) - median

    samples = [Sample(v[:, None].astype(np.float64), np.ones(len(v))) for v in (a, b)]
    return _intervals(samples[0], samples[1], resampled)


def _intervals(
    a: Sample,
    b: Sample,
    resampled: Callable[[Sample, np.random.Generator], tuple[np.ndarray, np.ndarray]],
) -> Intervals | None:
    """Intervals of B − A from means or medians and their resampled deviations."""
    if min(a.steps, b.steps) < MIN_STEPS:
        return None
    rng = np.random.default_rng(0)
    (middle_a, deviations_a), (middle_b, deviations_b) = resampled(a, rng), resampled(b, rng)
    rho = _autocorrelation(a, b)
    deviations_a = deviations_a * _stretch(a.steps, rho)
    deviations_b = deviations_b * _stretch(b.steps, rho)
    variances = [s.per_window.var(axis=0, ddof=1) / s.steps for s in (a, b)]
    counts = [np.maximum(_independent(s, rho), 2) for s in (a, b)]
    _, freedom = _satterthwaite(variances[0], counts[0], variances[1], counts[1])
    factor = t_975(freedom) / _NORMAL_975
    low_high = np.percentile(deviations_b - deviations_a, [2.5, 97.5], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        # A resampled value near 0 would divide to nonsense: A's own is the least unit then.
        base = np.maximum(middle_a + factor * deviations_a, middle_a * 1e-3)
        ratio = np.percentile((middle_b + factor * deviations_b) / base - 1, [2.5, 97.5], axis=0)
    ratio[:, middle_a <= 0] = np.nan
    return Intervals((middle_b - middle_a) + low_high * factor, ratio)


def mean_intervals(values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray | None:
    """95 % intervals of the means over steps; None with fewer than 3 steps.

    (steps, quantities) -> (quantities, 2): low and high.

    Args:
        values: of each step; with ``weights``, summed over its rank windows.
        weights: (steps,) rank windows of each step; a mean is Σ values / Σ weights.
    """
    if len(values) < MIN_STEPS:
        return None
    sample = _blocked(Sample(values, np.ones(len(values)) if weights is None else weights))
    rho = _autocorrelation(sample)
    deviations = _deviations(sample, np.random.default_rng(0)) * _stretch(sample.steps, rho)
    factor = t_975(_independent(sample, rho) - 1) / _NORMAL_975
    return (sample.mean + np.percentile(deviations, [2.5, 97.5], axis=0) * factor).T


def total_intervals(per_step_ns: np.ndarray) -> list[tuple[int, int]] | None:
    """95 % interval of the total time of each cause; None with fewer than 3 steps.

    (causes, steps) -> low and high; of times, so that no interval begins below 0. None, too, if one
    ends beyond the largest time: a step of a damaged trace may last for decades.
    """
    intervals = mean_intervals(per_step_ns.T)
    if intervals is None:
        return None
    totals_ns = np.rint(np.maximum(intervals * per_step_ns.shape[1], 0))
    if totals_ns.max(initial=0) >= 2.0**63:
        return None
    return [(low, high) for low, high in totals_ns.astype(np.int64).tolist()]


def excess(
    values: np.ndarray, base: np.ndarray, statistic: Literal["mean", "median"]
) -> tuple[float, float, float] | None:
    """Return by how much steps are longer than others, and its 95 % interval.

    None with fewer than 3 of either. For medians the Hodges-Lehmann shift, the median of all
    pairwise differences, with the interval of the Mann-Whitney test: a single long step does not
    move it. For means the difference of the means, with Student's t.
    """
    n, m = len(values), len(base)
    if min(n, m) < MIN_STEPS:
        return None
    if statistic == "mean":
        error = math.hypot(np.std(base, ddof=1) / m**0.5, np.std(values, ddof=1) / n**0.5)
        middle, half = float(np.mean(values) - np.mean(base)), float(t_975(np.array(n - 1))) * error
        return middle, middle - half, middle + half
    if n * m > _RESAMPLED_AT_ONCE:
        base = np.quantile(base, np.linspace(0, 1, max(_RESAMPLED_AT_ONCE // n, MIN_STEPS)))
        m = len(base)
    shifts = np.sort(np.subtract.outer(values, base), axis=None)
    # Normal approximation of the rank sum, exact for the sizes of traces at this level.
    outside = n * m / 2 - _NORMAL_975 * math.sqrt(n * m * (n + m + 1) / 12) - 0.5
    at = max(math.floor(outside), 0)
    return float(np.median(shifts)), float(shifts[at]), float(shifts[-1 - at])


def median_error(values: np.ndarray) -> float | None:
    """Standard error of the median of steps, from their median deviation; None below 3 steps."""
    if len(values) < MIN_STEPS:
        return None
    return _median_spread(values) * math.sqrt(inflation(values) / len(values))


def _median_spread(values: np.ndarray) -> float:
    """Standard error of the median, times √n."""
    return _MAD_TO_MEDIAN_ERROR * float(np.median(np.abs(values - np.median(values))))


def inflation(step_ns: np.ndarray) -> float:
    """Variance of the mean of steps over that of as many independent ones; at least 1."""
    if len(step_ns) < _MIN_STEPS_FOR_AUTOCORRELATION:
        return 1.0
    sample = Sample(step_ns[:, None].astype(np.float64), np.ones(len(step_ns)))
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
    """(resamples, quantities) means of resampled steps, less the mean."""
    n = sample.steps
    counts = rng.multinomial(n, np.full(n, 1 / n), size=_RESAMPLES).astype(np.float64)
    means = (counts @ sample.values.astype(np.float64)) / (counts @ sample.weights)[:, None]
    return means - sample.mean


def _autocorrelation(*samples: Sample) -> np.ndarray:
    """(quantities,) lag-1 autocorrelation of the steps of all samples together, from 0 on."""
    covariance = variance = np.zeros(samples[0].values.shape[1])
    for sample in samples:
        deviations = sample.per_window - sample.per_window.mean(axis=0)
        covariance = covariance + (deviations[1:] * deviations[:-1]).sum(axis=0)
        variance = variance + (deviations**2).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        rho = np.where(variance > 0, covariance / variance, 0.0)
    n = sum(sample.steps for sample in samples) / len(samples)
    # The estimate is low by (1 + 3ρ)/n on average (Kendall 1954).
    return np.clip(rho + (1 + 3 * rho) / n, 0.0, _MAX_AUTOCORRELATION)


def _independent(sample: Sample, rho: np.ndarray) -> np.ndarray:
    """(quantities,) independent steps that say as much as the sample's."""
    if sample.steps < _MIN_STEPS_FOR_AUTOCORRELATION:
        return np.full(len(rho), float(sample.steps))
    return sample.steps * (1 - rho) / (1 + rho)


def _stretch(steps: int, rho: np.ndarray) -> np.ndarray:
    """(quantities,) factor on deviations: small samples, and steps that resemble each other."""
    return math.sqrt(steps / (steps - 1)) * np.sqrt((1 + rho) / (1 - rho))


# Welch's test


def welch(
    mean_a: np.ndarray,
    variance_a: np.ndarray,
    steps_a: int,
    mean_b: np.ndarray,
    variance_b: np.ndarray,
    steps_b: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Welch's t test of many quantities -> half widths of the 95 % intervals, p values.

    For quantities too many to resample.
    """
    error, freedom = _satterthwaite(
        variance_a / steps_a, np.array(steps_a), variance_b / steps_b, np.array(steps_b)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(error > 0, np.abs(mean_b - mean_a) / error, np.inf)
    t = np.where(mean_b == mean_a, 0.0, t)
    return t_975(freedom) * error, two_sided_p(t, freedom)


def t_test(values: np.ndarray) -> np.ndarray:
    """Student's two-sided p of a mean of zero, by row; nan with fewer than three values.

    Args:
        values: (rows, samples), nan for what is missing.
    """
    count = np.isfinite(values).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.nansum(values, axis=1) / np.maximum(count, 1)
        deviations = np.where(np.isfinite(values), values - mean[:, None], 0.0)
        error = np.sqrt((deviations**2).sum(axis=1) / np.maximum(count - 1, 1) / count)
        t = np.where(mean == 0, 0.0, np.abs(mean) / error)
    return np.where(count < 3, np.nan, two_sided_p(t, np.maximum(count - 1, 1)))


def two_sided_p(t: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """Probability that Student's t is at least ``t`` away from zero; nan where ``t`` is nan.

    The incomplete beta function I(df/2, 1/2) at df/(df + t²), by its continued fraction (Lentz's
    method; Press et al., Numerical Recipes, section 6.4), to about ten digits.
    """
    t, freedom = np.broadcast_arrays(np.asarray(t, dtype=np.float64), freedom)
    a, b = freedom / 2, np.full(t.shape, 0.5)
    with np.errstate(all="ignore"):
        x, rest = freedom / (freedom + t * t), 1 / (1 + freedom / (t * t))
        swapped = x > (a + 1) / (a + b + 2)
        front = np.exp(a * np.log(x) + b * np.log(rest) - _log_beta(a, b))
        a, b = np.where(swapped, b, a), np.where(swapped, a, b)
        x = np.where(swapped, rest, x)
        c, d = np.ones(t.shape), 1 / (1 - (a + b) * x / (a + 1))
        fraction = d.copy()
        for m in range(1, _MAX_TERMS):
            for factor in (
                m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
                -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
            ):
                c, d = 1 + factor / c, 1 / (1 + factor * d)
                fraction *= c * d
            if not (np.abs(c * d - 1) > 1e-15).any():
                break
        p = front * fraction / a
    return np.where(np.isinf(t), 0.0, np.where(t == 0, 1.0, np.where(swapped, 1 - p, p)))


@functools.cache
def t_quantile(rate: float, freedom: int) -> float:
    """What Student's t exceeds at a rate below one half.

    Its integral for a whole number of degrees of freedom is a sum of powers of a cosine (Abramowitz
    and Stegun, 26.7.3 and 26.7.4).
    """
    odd = freedom % 2
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        term = math.cos(angle) if odd else 1.0
        total = 0.0
        for k in range(1 + odd, freedom, 2):
            total += term
            term *= k / (k + 1) * math.cos(angle) ** 2
        inside = math.sin(angle) * total
        if odd:
            inside = 2 / math.pi * (angle + inside)
        low, high = (angle, high) if 1 - inside > 2 * rate else (low, angle)
    return math.sqrt(freedom) * math.tan(high)


_t_quantiles = np.vectorize(t_quantile, otypes=[np.float64])


@functools.cache
def _t_shift(rate: float, power: float, freedom: int) -> float:
    """Shift, in standard deviations, at which t exceeds its quantile at a rate of ``power``.

    Noncentral t, as a mean over the estimated spread.
    """
    limit = t_quantile(rate, freedom)
    spread = np.linspace(0, 1 + 8 / math.sqrt(2 * freedom), 2001)[1:]
    weight = np.exp((freedom - 1) * np.log(spread) - freedom / 2 * (spread**2 - 1))
    normal = NormalDist().cdf
    low, high = 0.0, limit * float(spread[-1]) + 10
    for _ in range(40):
        shift = (low + high) / 2
        above = np.average([normal(z) for z in shift - limit * spread], weights=weight)
        low, high = (shift, high) if above < power else (low, shift)
    return high


def _log_beta(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    log_gamma = np.vectorize(math.lgamma, otypes=[np.float64])
    result: np.ndarray = log_gamma(a) + log_gamma(b) - log_gamma(a + b)
    return result


def discoveries(p: np.ndarray) -> np.ndarray:
    """Benjamini and Hochberg (1995): mask of rows; at most 5 % of them false, on average."""
    order = np.argsort(p, kind="stable")
    below = np.flatnonzero(p[order] <= 0.05 * np.arange(1, len(p) + 1) / max(len(p), 1))
    mask = np.zeros(len(p), dtype=bool)
    mask[order[: below.max(initial=-1) + 1]] = True
    return mask


def _satterthwaite(
    variance_a: np.ndarray, steps_a: np.ndarray, variance_b: np.ndarray, steps_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Standard error and degrees of freedom of a difference, from the variances of both means."""
    least = np.minimum(steps_a, steps_b) - 1
    total = variance_a + variance_b
    divisor = variance_a**2 / np.maximum(steps_a - 1, 1) + variance_b**2 / np.maximum(
        steps_b - 1, 1
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        freedom = np.where(divisor > 0, total**2 / divisor, least)
    return np.sqrt(total), np.maximum(freedom, np.maximum(least, 1))


# Repetitions


@dataclass(frozen=True, slots=True)
class Estimate:
    """One number from repetitions."""

    value: float
    """The mean; of a ratio the geometric one."""
    ci95: tuple[float, float] | None
    """None with a single repetition."""
    cv_ratio: float | None
    """Coefficient of variation: standard deviation over mean; of a ratio, the standard deviation of
    the logarithm of single quotients. None with a single repetition, of a difference, and where the
    mean is 0."""
    repeats_count: int


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % interval of at least one repetition."""
    array = np.asarray(values, dtype=np.float64)
    n, mean = len(array), float(np.mean(array))
    if n < 2:
        return Estimate(mean, None, None, n)
    deviation = float(np.std(array, ddof=1))
    half = float(t_975(np.array(n - 1))) * deviation / math.sqrt(n)
    return Estimate(mean, (mean - half, mean + half), deviation / abs(mean) if mean else None, n)


def difference(of: Sequence[float], to: Sequence[float]) -> Estimate:
    """Mean of ``of`` less that of ``to``, with Welch's interval."""
    value = float(np.mean(of) - np.mean(to))
    repeats_count = min(len(of), len(to))
    if repeats_count < 2:
        return Estimate(value, None, None, repeats_count)
    variances = np.array([np.var(v, ddof=1) / len(v) for v in (of, to)])
    counts = np.array([len(of), len(to)])
    error, freedom = _satterthwaite(variances[0], counts[0], variances[1], counts[1])
    half = float(t_975(freedom) * error)
    return Estimate(value, (value - half, value + half), None, repeats_count)


def ratio(of: Sequence[float], to: Sequence[float]) -> Estimate | None:
    """Geometric mean of ``of`` over that of ``to``; None when a value is not positive."""
    if min(*of, *to) <= 0:
        return None
    logarithm = difference(np.log(of).tolist(), np.log(to).tolist())
    ci95 = logarithm.ci95 and (math.exp(logarithm.ci95[0]), math.exp(logarithm.ci95[1]))
    cv_ratio = None
    if ci95 is not None:
        cv_ratio = math.hypot(*(float(np.std(np.log(v), ddof=1)) for v in (of, to)))
    return Estimate(math.exp(logarithm.value), ci95, cv_ratio, logarithm.repeats_count)


@dataclass(frozen=True)
class Prediction:
    """Where one further run is expected, from earlier ones; arrays hold one value per history.

    Attributes:
        level: mean of the runs of the last level.
        error: standard deviation of a further run less ``level``.
        freedom: degrees of freedom of ``error``; 0 where it is unknown (nan).
    """

    level: np.ndarray
    error: np.ndarray
    freedom: np.ndarray

    def limit(self, error_rate: float) -> np.ndarray:
        """Distance above ``level`` that noise alone exceeds so often; inf where unknown."""
        half = self.error * _t_quantiles(error_rate, np.maximum(self.freedom, 1))
        return np.where(self.freedom > 0, half, np.inf)

    def detectable(self, error_rate: float, power: float) -> np.ndarray:
        """Distance above ``level`` at which so large a share of runs is above the limit.

        If the spread between runs is as estimated: noncentral t.
        """
        freedom = np.maximum(self.freedom, 1)
        shift = np.vectorize(_t_shift, otypes=[np.float64])(error_rate, power, freedom)
        return np.where(self.freedom > 0, self.error * shift, np.inf)


def predict_run(levels: Sequence[np.ndarray], least_spread: float = 0.0) -> Prediction:
    """Predict one further run: a prediction interval of Student's t.

    The spread between runs is pooled over levels, each about a mean of its own. Of ten runs of a
    level at most one is left out, two of twenty …: the one farthest from the others, if a run like
    them lies so far off with a probability below 0.1 % (Grubbs 1950). A drift is no noise: the
    spread is at most twice that of runs about the one before (von Neumann 1941).

    Args:
        levels: (..., runs) logarithms of the runs' times, an array per level; the last is current.
        least_spread: standard deviation between runs to assume at least.
    """
    squares = np.zeros(levels[-1].shape[:-1])
    freedom = np.zeros(squares.shape, dtype=np.int64)
    steps = np.zeros(squares.shape)
    for values in levels:
        steps = steps + (np.diff(values, axis=-1) ** 2).sum(axis=-1) / 2
        used = _without_outliers(values)
        count = used.sum(axis=-1)
        level = np.where(used, values, 0.0).sum(axis=-1) / count
        squares = squares + np.where(used, (values - level[..., None]) ** 2, 0.0).sum(axis=-1)
        freedom = freedom + count - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.where(freedom < _MIN_FREEDOM_OF_DRIFT, np.inf, _MOST_OVER_STEPS**2 * steps)
        spread = np.maximum(np.sqrt(np.minimum(squares, most) / freedom), least_spread)
    return Prediction(level, spread * np.sqrt(1 + 1 / count), freedom)


@dataclass(frozen=True, slots=True)
class Drift:
    """How far the latest runs lie above the best level that was held.

    Attributes:
        held: the lowest median of five runs in a row.
        rise: of the least of the latest five runs above ``held``.
        limit: a larger rise is no noise.
    """

    held: float
    rise: float
    limit: float


def drift_of(values: np.ndarray, least_spread: float = 0.0) -> Drift | None:
    """Compare the latest runs with the best level held before; None with fewer than ten.

    The spread is that of successive differences, by their median deviation: neither a slow drift
    nor a few levels or disturbed runs widen it. Where the runs around the best level were as slow
    now and then, as on a machine of two speeds, being slow again is no drift.

    Args:
        values: logarithms of the runs' times, oldest first.
        least_spread: standard deviation between runs to assume at least.
    """
    if len(values) < 2 * _HELD_RUNS:
        return None
    steps = np.diff(values)
    spread = 1.4826 * float(np.median(np.abs(steps - np.median(steps)))) / math.sqrt(2)
    windows = np.lib.stride_tricks.sliding_window_view(values[:-_HELD_RUNS], _HELD_RUNS)
    medians = np.median(windows, axis=1)
    at = int(medians.argmin())
    held = float(medians[at])
    around = values[max(at - _HELD_RUNS, 0) : min(at + 2 * _HELD_RUNS, len(values) - _HELD_RUNS)]
    # The slowest of a few, else the second: one disturbed run hides no drift.
    slow = float(np.sort(around)[-1 if len(around) < 2 * _HELD_RUNS else -2]) - held
    rise = float(values[-_HELD_RUNS:].min()) - held
    return Drift(held, rise, max(_DRIFT_SPREADS * max(spread, least_spread), slow))


def _without_outliers(values: np.ndarray) -> np.ndarray:
    """(..., runs) mask of the runs that are no outliers."""
    used = np.ones(values.shape, dtype=bool)
    for _ in range(values.shape[-1] // _RUNS_PER_OUTLIER):
        count = used.sum(axis=-1, keepdims=True)
        mean = np.where(used, values, 0.0).sum(axis=-1, keepdims=True) / count
        farthest = np.where(used, np.abs(values - mean), -1.0).argmax(axis=-1, keepdims=True)
        others = used & (np.arange(values.shape[-1]) != farthest)
        of = count - 1
        mean = np.where(others, values, 0.0).sum(axis=-1, keepdims=True) / of
        squares = np.where(others, (values - mean) ** 2, 0.0).sum(axis=-1, keepdims=True)
        limit = _t_quantiles(_OUTLIER_RATE / 2 / count, of - 1) * np.sqrt(
            squares / (of - 1) * (1 + 1 / of)
        )
        off = np.abs(np.take_along_axis(values, farthest, -1) - mean)
        used = np.where(off > limit, others, used)
    return used


def line(
    x: Sequence[float], y: Sequence[float]
) -> tuple[float, float, tuple[float, float] | None, float]:
    """Least squares of y = a + b·x, a point per repetition -> a, b, the 95 % interval of b, and R².

    No interval with two points, through which a line always goes. x takes at least two values.
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    centred = xs - xs.mean()
    square = float(centred @ centred)
    slope = float(centred @ (ys - ys.mean())) / square
    intercept = float(ys.mean() - slope * xs.mean())
    residual = float(((ys - intercept - slope * xs) ** 2).sum())
    total = float(((ys - ys.mean()) ** 2).sum())
    freedom = len(xs) - 2
    ci95 = None
    if freedom > 0:
        half = float(t_975(np.array(freedom))) * math.sqrt(residual / freedom / square)
        ci95 = slope - half, slope + half
    return intercept, slope, ci95, 1 - residual / total if total else 1.0


def power_law(
    x: Sequence[float], y: Sequence[float]
) -> tuple[float, tuple[float, float] | None, float]:
    """Least squares of y = c·x^b between logarithms -> b, its 95 % interval, and R².

    All positive; x takes at least two values.
    """
    _, slope, ci95, r2 = line(np.log(x).tolist(), np.log(y).tolist())
    return slope, ci95, r2


def bootstrap(
    values: np.ndarray, statistic: Callable[..., np.ndarray], rng: np.random.Generator | None = None
) -> np.ndarray:
    """(resamples, ...) of a statistic that takes ``axis``, resampling the rows of ``values``."""
    rng = np.random.default_rng(0) if rng is None else rng
    n = len(values)
    size = max(1, min(_RESAMPLES, _RESAMPLED_AT_ONCE // n))
    parts = [
        statistic(values[rng.integers(0, n, (size, n))], axis=1)
        for _ in range(-(-_RESAMPLES // size))
    ]
    return np.concatenate(parts)[:_RESAMPLES]
