"""What repetitions of the same measurement say: a mean, how sure it is, how repeatable.

Repetitions are whole runs, each in processes of its own, so that they are independent as the steps
of one run are not. Intervals are Student's t; ratios are taken between logarithms, where a factor
of two up and one down are equally far (Fleming and Wallace 1986), with Welch's degrees of freedom.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chopper.statistics import t_975

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Estimate:
    """One number from repetitions."""

    value: float
    """The mean; of a ratio the geometric one."""
    ci95: tuple[float, float] | None
    """None with a single repetition."""
    cv_ratio: float | None
    """Coefficient of variation: standard deviation over mean; None with a single repetition, of a
    ratio or difference, and where the mean is 0."""
    repeats_count: int


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % interval of at least one repetition."""
    array = np.asarray(values, dtype=np.float64)
    n, mean = len(array), float(np.mean(array))
    if n < 2:
        return Estimate(mean, None, None, n)
    spread = float(np.std(array, ddof=1))
    half = float(t_975(np.array([n - 1]))[0]) * spread / math.sqrt(n)
    return Estimate(mean, (mean - half, mean + half), spread / abs(mean) if mean else None, n)


def difference(of: Sequence[float], to: Sequence[float]) -> Estimate:
    """How much more the values of ``of`` are than those of ``to``, by their means."""
    return _between(np.asarray(of, dtype=np.float64), np.asarray(to, dtype=np.float64))


def line(
    x: Sequence[float], y: Sequence[float]
) -> tuple[float, float, tuple[float, float] | None, float]:
    """Least squares of y = a + b·x, a point per repetition -> a, b, the 95 % interval of b, and R².

    No interval with two points, through which a line always goes. x takes at least two values.
    """
    at, found = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    around = at - at.mean()
    square = float(around @ around)
    slope = float(around @ (found - found.mean())) / square
    start = float(found.mean() - slope * at.mean())
    left = float(((found - start - slope * at) ** 2).sum())
    whole = float(((found - found.mean()) ** 2).sum())
    freedom = len(at) - 2
    ci95 = None
    if freedom > 0:
        half = float(t_975(np.array([freedom]))[0]) * math.sqrt(left / freedom / square)
        ci95 = slope - half, slope + half
    return start, slope, ci95, 1 - left / whole if whole else 1.0


def ratio(of: Sequence[float], to: Sequence[float]) -> Estimate | None:
    """How many times ``to`` the values of ``of`` are; None when one of them is not positive."""
    over, under = np.asarray(of, dtype=np.float64), np.asarray(to, dtype=np.float64)
    if min(over.min(), under.min()) <= 0:
        return None
    found = _between(np.log(over), np.log(under))
    ci95 = found.ci95 and (math.exp(found.ci95[0]), math.exp(found.ci95[1]))
    return Estimate(math.exp(found.value), ci95, None, found.repeats_count)


def _between(over: np.ndarray, under: np.ndarray) -> Estimate:
    """Difference of two means, with Welch's interval."""
    middle = float(over.mean() - under.mean())
    least = min(len(over), len(under))
    if least < 2:
        return Estimate(middle, None, None, least)
    parts = [v.var(ddof=1) / len(v) for v in (over, under)]
    freedom = float(least - 1)
    below = sum(p**2 / (len(v) - 1) for p, v in zip(parts, (over, under), strict=True))
    if below > 0:
        freedom = max(freedom, sum(parts) ** 2 / below)
    half = float(t_975(np.array([freedom]))[0]) * math.sqrt(sum(parts))
    return Estimate(middle, (middle - half, middle + half), None, least)
