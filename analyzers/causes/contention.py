"""The cost of running beside something else: instances of one signature, alone and overlapped.

Durations are brought to one clock first, so that an overlapped instance at a lower clock is not
called slow twice. The baseline is the median of the instances that ran alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chopper.analyzers.trace.columns import run_starts

MIN_ALONE = 3
"""Instances that ran alone before they are a baseline."""
_ALONE_RATIO = 0.01
_ALONE_NS = 1000
"""Alone may overlap by 1 %, or by the microsecond that rounding and early launches make."""
_SIGNIFICANT = 2.0
"""Standard errors that the mean slowdown of a signature must exceed."""


@dataclass(frozen=True, slots=True)
class Contention:
    """Slowdown of overlapped instances.

    Attributes:
        factor_ln: ln of the slowdown of each instance, at least 0; 0 where none is claimed.
        alone: mask of the instances that ran alone. All that follows is per signature.
        baseline_ns: median of those, at the reference clock; NaN where there are too few, or
            nothing to compare with them.
        overlapped_ns: median of the others.
        ratio: geometric mean slowdown of the overlapped ones; NaN where not known.
        bound_ns: where none ran alone, what they took beyond the one that overlapped least:
            contention took at least that; 0 elsewhere.
    """

    factor_ln: np.ndarray
    alone: np.ndarray
    baseline_ns: np.ndarray
    overlapped_ns: np.ndarray
    alone_count: np.ndarray
    overlapped_count: np.ndarray
    ratio: np.ndarray
    bound_ns: np.ndarray


def shared_time(start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """Part of each interval in which another one ran too, on one device."""
    if not len(start_ns):
        return np.zeros(0, dtype=np.int64)
    ordered = np.concatenate([start_ns, end_ns])
    # Stable is the fast kind here: both parts are sorted, or nearly so.
    ordered.sort(kind="stable")
    first = np.searchsorted(ordered, start_ns)
    last = np.searchsorted(ordered, end_ns)
    change = np.bincount(first, minlength=len(ordered)) - np.bincount(last, minlength=len(ordered))
    # No time passes between equal times, so that all that changes then may do so at the first.
    length = np.diff(ordered)
    length[np.cumsum(change)[:-1] < 2] = 0
    total = np.concatenate([[0], np.cumsum(length)])
    return total[last] - total[first]


def ran_alone(duration_ns: np.ndarray, shared_ns: np.ndarray) -> np.ndarray:
    """Mask of the intervals in which nothing else ran for longer than clocks can tell."""
    return shared_ns <= np.maximum(_ALONE_RATIO * duration_ns, _ALONE_NS)


def contend(
    group: np.ndarray,
    count: int,
    duration_ns: np.ndarray,
    clock_ln: np.ndarray,
    shared_ns: np.ndarray,
    divided_ln: np.ndarray,
) -> Contention:
    """Slowdown of the instances of each signature that ran beside something.

    Args:
        group: signature of each instance, below ``count``.
        duration_ns: as recorded, above 0.
        clock_ln: ln of how much longer the instance took than at the reference clock; NaN where
            its clock is not known, which leaves it out.
        shared_ns: part of it in which something else ran.
        divided_ln: ln of the part of its time that is its own where kernels divide it, at most 0:
            two products that run side by side for twice their time are not slower together.
    """
    alone = ran_alone(duration_ns, shared_ns)
    usable = ~np.isnan(clock_ln)
    length = np.log(np.maximum(duration_ns, 1.0)) - np.nan_to_num(clock_ln)
    base, shared = usable & alone, usable & ~alone
    alone_count = np.bincount(group[base], minlength=count)
    beside_count = np.bincount(group[shared], minlength=count)
    base &= (beside_count > 0)[group]
    baseline = _grouped_median(length[base], group[base], count)
    baseline[alone_count < MIN_ALONE] = np.nan
    slower = length + divided_ln - baseline[group]
    compared = shared & ~np.isnan(slower)
    mean, error = _mean(slower[compared], group[compared], count)
    # The baseline's own error: a median's is √(π/2) of a mean's.
    _, rest_error = _mean((length - baseline[group])[base], group[base], count)
    error = np.hypot(error, np.sqrt(np.pi / 2) * rest_error)
    claimed = (beside_count > 0) & ~np.isnan(baseline) & (mean > _SIGNIFICANT * error) & (mean > 0)
    # Noise makes half of the instances slower than they are and half of them faster: clipped at 0
    # one by one they would sum to more than the mean. Scaled, they sum to it.
    positive = np.where(compared, np.maximum(slower, 0.0), 0.0)
    high, _ = _mean(positive[compared], group[compared], count)
    scale = np.divide(mean, high, out=np.zeros(count), where=claimed & (high > 0))
    factor = np.where(compared, positive * np.minimum(scale, 1.0)[group], 0.0)
    return Contention(
        factor,
        alone,
        np.exp(baseline),
        np.exp(_grouped_median(length[shared], group[shared], count)),
        alone_count,
        beside_count,
        np.where((beside_count > 0) & ~np.isnan(baseline), np.exp(mean), np.nan),
        _least(
            group,
            count,
            np.exp(length),
            shared_ns / np.maximum(duration_ns, 1.0),
            shared,
            baseline,
        ),
    )


def _mean(values: np.ndarray, group: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean of each group and its standard error; 0 and 0 for a group without values."""
    size = np.bincount(group, minlength=count)
    mean = np.bincount(group, weights=values, minlength=count) / np.maximum(size, 1)
    squares = np.bincount(group, weights=(values - mean[group]) ** 2, minlength=count)
    return mean, np.sqrt(squares / np.maximum(size - 1, 1) / np.maximum(size, 1))


def _least(
    group: np.ndarray,
    count: int,
    length_ns: np.ndarray,
    shared_ratio: np.ndarray,
    contended: np.ndarray,
    baseline: np.ndarray,
) -> np.ndarray:
    """Time (ns per event) beyond the instance that overlapped least, where no baseline is known."""
    rows = np.flatnonzero(contended & np.isnan(baseline)[group])
    if not len(rows):
        return np.zeros(count)
    order = rows[np.lexsort((length_ns[rows], shared_ratio[rows], group[rows]))]
    first = order[run_starts(group[order])]
    least = np.full(count, np.nan)
    least[group[first]] = length_ns[first]
    beyond = np.maximum(length_ns[rows] - least[group[rows]], 0.0)
    return np.bincount(group[rows], weights=beyond, minlength=count)


def _grouped_median(values: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    """Median of the finite values of each group, NaN for a group without any."""
    median = np.full(count, np.nan)
    if not len(values):
        return median
    # One sort of group + place in (0, 1) is several times faster than one by two keys; 30 bits are
    # left for the place among a million groups.
    low, width = float(values.min()), float(np.ptp(values)) or 1.0
    key = np.sort(group + (values - low) / width * 0.999)
    size = np.bincount(group, minlength=count)
    begin = np.cumsum(size) - size
    has = np.flatnonzero(size)
    at = (key[(begin + (size - 1) // 2)[has]] + key[(begin + size // 2)[has]]) / 2
    median[has] = (at - has) / 0.999 * width + low
    return median
