"""Sensitivity of each kernel's duration to the SM clock.

The sensitivity s is the slope in t ∝ clock^(−s): 1 for work that only the units limit, 0 for work
that only memory limits. Where one signature ran at several clocks, s is the slope of ln t on ln
clock (ordinary least squares, one pass without outliers). Elsewhere it is the kernel's place under
the roofline: ideal time over roofline time. Both are joined as two measurements, each weighted by
the inverse of its variance, so an estimate from few or similar clocks moves the value only a
little, and the roofline is believed less where a slope contradicts it.

Errors of the clock flatten a slope, by their variance over that of the clock (Fuller 1987,
Measurement Error Models, 1.1). So instances of uncertain clocks are left out, no slope is taken
where the others' clocks spread by less than three times their error, and the rest of the flattening
is part of the slope's error. Instances between the same two
readings share its error, so the slope's standard error counts them as one where their residuals
agree (Liang and Zeger 1986, doi.org/10.1093/biomet/73.1.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chopper.analyzers.trace.columns import distinct_rows

ROOFLINE_ERROR = 0.25
"""Standard error of a sensitivity that is read off the roofline."""
MIN_INSTANCES = 8
"""Instances of one signature, on their own on the device, before a slope is taken."""
MIN_SPREAD = 0.01
"""Standard deviation of ln clock among them: 1 % of the clock, about one step of it."""
_SPREAD_PER_ERROR = 3.0
"""The same, in errors of the clock: they flatten the slope by less than a tenth."""
_MAX_CLOCK_ERROR = 0.01
"""Instances whose clock is less sure flatten a slope: not used."""
_LEAST_NOISE = 0.002
"""Durations are not known better than this, as a share."""
_OUTLIER = 4.0


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Per signature.

    Attributes:
        value, error: what is used, in [0, 1], with its standard error.
        slope, slope_error: as estimated from the run, NaN where it could not be.
        roofline: place under the roofline.
        used_count, clock_low_hz, clock_high_hz: instances that the slope rests on; their clocks.
    """

    value: np.ndarray
    error: np.ndarray
    slope: np.ndarray
    slope_error: np.ndarray
    roofline: np.ndarray
    used_count: np.ndarray
    clock_low_hz: np.ndarray
    clock_high_hz: np.ndarray


def estimate(
    group: np.ndarray,
    count: int,
    duration_ns: np.ndarray,
    clock_hz: np.ndarray,
    clock_error_hz: np.ndarray,
    usable: np.ndarray,
    roofline: np.ndarray,
    reading: np.ndarray | None = None,
) -> Sensitivity:
    """Sensitivity of each signature to the clock.

    Args:
        group: signature of each instance, below ``count``.
        duration_ns, clock_hz, clock_error_hz: per instance, clocks NaN where not known.
        usable: instances that nothing ran beside.
        roofline: ideal over roofline time of each instance, NaN where not known. A signature
            without any has the slope alone, and NaN without a slope.
        reading: number of the clock reading before each instance; None: each has its own.
    """
    sure = usable & (duration_ns > 0) & (clock_error_hz <= _MAX_CLOCK_ERROR * clock_hz)
    x = np.log(clock_hz[sure])
    y = np.log(duration_ns[sure])
    of = group[sure]
    between = np.arange(len(x)) if reading is None else reading[sure]
    *_, residual = _fit(x, y, of, count, between)
    # For a normal distribution the standard deviation is √(π/2) times the mean absolute value, in
    # which outliers weigh less than in squares.
    size = np.maximum(np.bincount(of, minlength=count), 1)
    spread = np.bincount(of, weights=np.abs(residual), minlength=count) / size
    noise = np.maximum(spread * np.sqrt(np.pi / 2), _LEAST_NOISE)
    inlier = np.abs(residual) <= _OUTLIER * noise[of]
    slope, error, spread, used, _ = _fit(x[inlier], y[inlier], of[inlier], count, between[inlier])
    unsure = (clock_error_hz[sure] / clock_hz[sure])[inlier]
    unsure = np.sqrt(_mean(unsure**2, of[inlier], count))
    fitted = (used >= MIN_INSTANCES) & np.isfinite(error)
    fitted &= spread >= np.maximum(MIN_SPREAD, _SPREAD_PER_ERROR * unsure)
    flattened = np.divide(unsure, spread, out=np.zeros(count), where=fitted) ** 2
    error = np.hypot(error, slope * flattened)
    slope = np.where(fitted, -slope, np.nan)
    error = np.where(fitted, error, np.nan)
    known = ~np.isnan(roofline)
    sums = np.bincount(group[known], weights=roofline[known], minlength=count)
    prior = np.clip(sums / np.maximum(np.bincount(group[known], minlength=count), 1), 0.0, 1.0)
    trust = np.where(fitted, 1 / np.maximum(np.nan_to_num(error), 1e-6) ** 2, 0.0)
    # A roofline that the slope shows to be further off than that is believed less.
    off = np.nan_to_num(slope - prior) ** 2 - np.nan_to_num(error) ** 2
    believed = 1 / np.maximum(ROOFLINE_ERROR**2, off)
    believed[np.bincount(group[known], minlength=count) == 0] = 0.0
    weight = trust + believed
    weight[weight == 0] = np.nan
    value = (np.nan_to_num(slope) * trust + prior * believed) / weight
    low = np.full(count, np.inf)
    high = np.full(count, -np.inf)
    np.minimum.at(low, of[inlier], clock_hz[sure][inlier])
    np.maximum.at(high, of[inlier], clock_hz[sure][inlier])
    return Sensitivity(
        np.clip(value, 0.0, 1.0),
        1 / np.sqrt(weight),
        slope,
        error,
        prior,
        used,
        np.where(np.isfinite(low), low, np.nan),
        np.where(np.isfinite(high), high, np.nan),
    )


@dataclass(frozen=True, slots=True)
class UnknownWork:
    """Events whose FLOP or bytes are not known, and whose clock is: how they depend on it.

    Attributes:
        rows: the events.
        group: signature of each.
        fit: by slopes alone.
    """

    rows: np.ndarray
    group: np.ndarray
    fit: Sensitivity

    def of_events(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the sensitivity of each of all events, NaN where not measured, and its error."""
        value, error = np.full((2, count), np.nan)
        value[self.rows], error[self.rows] = self.fit.value[self.group], self.fit.error[self.group]
        return value, error


_WIDE_RATIO = 2.0
_FLAT_SLOPE = 0.1
"""Over a clock that doubles, a device's kernels together depend on it by more: caches and their
buses run at it, too."""


@dataclass(frozen=True, slots=True)
class Averaged:
    """Kernels that took the same time at any clock that was read: it was not theirs.

    Attributes:
        slope: mean over their time.
        low_hz, high_hz: clocks that were read while they ran.
        kinds_count: distinct work among them.
    """

    slope: float
    low_hz: float
    high_hz: float
    kinds_count: int


def averaged_readings(
    fits: Sequence[tuple[Sensitivity, np.ndarray, np.ndarray]],
) -> Averaged | None:
    """Tell readings that are averages over a long time from clocks of a moment.

    Some drivers smooth what they report over half a second. While a device leaves its idle clock,
    such readings rise slowly, and kernels that ran at full clock all along seem not to depend on
    it.

    Args:
        fits: sensitivities, the signature and the duration of each instance.
    """
    slopes, weights, lows, highs = [], [], [], []
    for fit, group, duration_ns in fits:
        spent = np.bincount(group, weights=duration_ns, minlength=len(fit.slope))
        wide = ~np.isnan(fit.slope) & (fit.clock_high_hz >= _WIDE_RATIO * fit.clock_low_hz)
        slopes.append(fit.slope[wide])
        weights.append(spent[wide])
        lows.append(fit.clock_low_hz[wide])
        highs.append(fit.clock_high_hz[wide])
    slope, weight = np.concatenate(slopes), np.concatenate(weights)
    if not weight.sum():
        return None
    mean = float(np.average(slope, weights=weight))
    if mean >= _FLAT_SLOPE:
        return None
    low, high = float(np.concatenate(lows).min()), float(np.concatenate(highs).max())
    return Averaged(mean, low, high, len(slope))


def _fit(
    x: np.ndarray, y: np.ndarray, group: np.ndarray, count: int, reading: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Per group: slope of y on x, its standard error, standard deviation of x, and how many.

    Last, the residual of each row.
    """
    used = np.bincount(group, minlength=count)
    dx, dy = x - _mean(x, group, count)[group], y - _mean(y, group, count)[group]
    sxx = np.bincount(group, weights=dx * dx, minlength=count)
    sxy = np.bincount(group, weights=dx * dy, minlength=count)
    slope = np.divide(sxy, sxx, out=np.zeros(count), where=sxx > 0)
    residual = dy - slope[group] * dx
    squares = np.bincount(group, weights=residual**2, minlength=count)
    noise = np.maximum(squares / np.maximum(used - 2, 1), _LEAST_NOISE**2)
    # Of sums over the instances between two readings: the variance if these share their errors.
    first, shared = distinct_rows([group, reading])
    of = group[first]
    scores = np.bincount(shared, weights=dx * residual, minlength=len(first))
    readings = np.bincount(of, minlength=count)
    # Few sums: the variance of Student's t (Cameron and Miller 2015, doi.org/10.3368/jhr.50.2.317).
    few = readings / np.maximum(readings - 3, 1)
    together = np.bincount(of, weights=scores**2, minlength=count) * few
    variance = np.where(readings > 3, np.maximum(noise * sxx, together), np.inf)
    error = np.sqrt(np.divide(variance, sxx**2, out=np.full(count, np.inf), where=sxx > 0))
    return slope, error, np.sqrt(sxx / np.maximum(used, 1)), used, residual


def _mean(values: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    size = np.maximum(np.bincount(group, minlength=count), 1)
    mean: np.ndarray = np.bincount(group, weights=values, minlength=count) / size
    return mean
