"""Intervals hold the truth as often as they say; quantiles and tests are SciPy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import nctdtrinc, stdtr, stdtrit

from chopper.statistics import (
    Prediction,
    Sample,
    compare_means,
    compare_medians,
    discoveries,
    estimate,
    excess,
    line,
    mean_intervals,
    ratio,
    t_975,
    total_intervals,
    two_sided_p,
    welch,
)

positive = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=6)
_RUNS = 3000


def simulated(steps: int, alike: float, noise: str = "normal") -> np.ndarray:
    """(steps, runs) values around 50 whose lag-1 autocorrelation is ``alike``."""
    rng = np.random.default_rng([steps, int(100 * alike)])
    values = rng.standard_normal((steps, _RUNS))
    for i in range(1, steps):
        values[i] = alike * values[i - 1] + math.sqrt(1 - alike**2) * values[i]
    return 50 * np.exp(0.1 * values - 0.005) if noise == "lognormal" else 50 + values


def coverage(intervals: np.ndarray | None, truth: float) -> float:
    assert intervals is not None
    return float(np.mean((intervals[:, 0] <= truth) & (truth <= intervals[:, 1])))


# The standard error of a share of 3000 runs is 0.4 %.
@pytest.mark.parametrize("steps", [3, 4, 5, 8, 9, 50])
@pytest.mark.parametrize("noise", ["normal", "lognormal"])
def test_intervals_of_independent_steps_cover_the_mean(steps: int, noise: str) -> None:
    values = simulated(steps, 0.0, noise)
    assert 0.93 <= coverage(mean_intervals(values), 50) <= 0.975


@pytest.mark.parametrize(
    ("steps", "alike", "least"),
    [(4, 0.3, 0.89), (20, 0.3, 0.91), (50, 0.3, 0.93), (8, 0.6, 0.79), (50, 0.6, 0.92)],
)
def test_intervals_of_steps_that_resemble_each_other_cover_the_mean(
    steps: int, alike: float, least: float
) -> None:
    values = simulated(steps, alike)
    assert least <= coverage(mean_intervals(values), 50) <= 0.97
    half = 1.96 * values.std(axis=0, ddof=1) / math.sqrt(steps)
    naive = np.stack([values.mean(axis=0) - half, values.mean(axis=0) + half], axis=1)
    assert coverage(naive, 50) < 0.87


@pytest.mark.parametrize(("steps", "alike"), [(3, 0.0), (8, 0.0), (20, 0.0), (50, 0.6)])
def test_intervals_of_a_difference_cover_it(steps: int, alike: float) -> None:
    both = simulated(steps, alike)
    a, b = both[:, : _RUNS // 2], 1.1 * both[:, _RUNS // 2 :]
    intervals = compare_means(Sample(a, np.ones(steps)), Sample(b, np.ones(steps)))
    assert intervals is not None
    assert 0.93 <= coverage(intervals.difference.T, 5) <= 0.99
    assert 0.93 <= coverage(intervals.ratio.T, 0.1) <= 0.99


def test_intervals_of_medians_cover_their_difference() -> None:
    values = simulated(12, 0.0)[:, :400]
    covered = 0
    for i in range(0, 400, 2):
        intervals = compare_medians(values[:, i], values[:, i + 1] + 3)
        assert intervals is not None
        covered += bool(intervals.difference[0, 0] <= 3 <= intervals.difference[1, 0])
    # 200 cases at 95 %: fewer than 181 are as rare as 1 in 400.
    assert covered >= 181


def test_the_shift_of_medians_is_covered_and_one_long_step_does_not_move_it() -> None:
    values = simulated(25, 0.0)[:, :400]
    covered = 0
    for i in range(400):
        traced, others = values[:5, i] + 3, values[5:, i]
        found = excess(traced, others, "median")
        assert found is not None
        covered += found[1] <= 3 <= found[2]
        longer = excess(np.where(traced == traced.max(), 1e6, traced), others, "median")
        assert longer is not None
        assert longer[2] > 1e5 or abs(longer[0] - found[0]) < 1
    # 400 cases at 95 %: fewer than 367 are as rare as 1 in 400.
    assert covered >= 367
    assert excess(values[:2, 0], values[5:, 0], "median") is None


def test_totals_are_means_times_steps_and_never_negative() -> None:
    per_step_ns = np.array([[90, 100, 110, 100], [0, 0, 0, 40], [7, 7, 7, 7]])
    totals = total_intervals(per_step_ns)
    assert totals is not None
    means = mean_intervals(per_step_ns.T)
    assert means is not None
    assert totals[0] == tuple(np.rint(4 * means[0]).tolist())
    assert totals[1][0] == 0
    assert totals[2] == (28, 28)
    assert total_intervals(per_step_ns[:, :2]) is None
    # The time of day as a duration, as damaged traces have it: the interval ends beyond 2^63 ns.
    assert total_intervals(np.array([[0, 0, 1_751_410_836_000_016_994]])) is None


def test_totals_of_many_steps_are_narrow_and_cheap() -> None:
    per_step_ns = np.random.default_rng(0).integers(4_000, 9_000, (3, 100_000))
    totals = total_intervals(per_step_ns)
    assert totals is not None
    for (low, high), row in zip(totals, per_step_ns, strict=True):
        # Uniform values: 5000 / sqrt(12) · sqrt(100 000) on either side, times 1.96.
        assert (high - low) / 2 == pytest.approx(1.96 * 5000 / 12**0.5 * 1e5**0.5, rel=0.1)
        assert low < row.sum() < high


def test_intervals_widen_when_steps_resemble_each_other() -> None:
    rng = np.random.default_rng(3)
    drifting = np.repeat([100.0, 110.0], 20)
    weights = np.ones(40)

    def width(values: np.ndarray) -> float:
        sample = Sample(values[:, None], weights)
        intervals = compare_means(sample, sample)
        assert intervals is not None
        return float(intervals.difference[1, 0] - intervals.difference[0, 0])

    assert width(drifting) > 2 * width(rng.permutation(drifting))


def test_many_steps_are_resampled_in_blocks() -> None:
    rng = np.random.default_rng(5)
    values = 100 + rng.standard_normal((5_000, 1))
    ones = np.ones(5_000)
    intervals = compare_means(Sample(values, ones), Sample(values + 1, ones))
    assert intervals is not None
    low, high = intervals.difference[:, 0]
    # Two means of 5000 values of deviation 1: ±1.96 · sqrt(2/5000) = ±0.039 around 1.
    assert low == pytest.approx(0.961, abs=0.012)
    assert high == pytest.approx(1.039, abs=0.012)


def test_the_quantile_is_scipys() -> None:
    freedom = np.concatenate([np.linspace(1, 3, 201), np.linspace(3, 300, 500), [1e4, 1e9]])
    assert t_975(freedom) == pytest.approx(stdtrit(freedom, 0.975), rel=4e-5)
    assert t_975(np.array(0.2)) == pytest.approx(12.7062, rel=1e-4)


def test_probabilities_and_predictions_are_scipys() -> None:
    t = np.array([0.0, 1e-9, 0.1, 1.0, 3.0, 50.0, 1e8, 1e160, np.inf])
    for df in (1, 1.5, 2, 5, 30, 1e4):
        assert two_sided_p(t, np.array(df)) == pytest.approx(2 * stdtr(df, -t), rel=1e-8, abs=1e-99)
    assert np.isnan(two_sided_p(np.array(np.nan), np.array(3)))
    freedom = np.array([2, 3, 4, 5, 9, 28, 29, 200])
    further = Prediction(np.zeros(8), np.ones(8), freedom)
    for rate in (1e-5, 0.0007, 0.025):
        limit = stdtrit(freedom, 1 - rate)
        assert further.limit(rate) == pytest.approx(limit, rel=1e-9)
        expected = nctdtrinc(freedom, 0.1, limit)
        assert further.detectable(rate, 0.9) == pytest.approx(expected, rel=1e-3)


def test_welch_and_benjamini_hochberg_are_those_of_worked_examples() -> None:
    # Means 20.6 and 22.1, variances 5.8 and 3.1, 8 and 10 values: error sqrt(.725 + .31) = 1.0173,
    # df 1.0712/(.07509 + .010678) = 12.49, t = 1.4744, p = 0.165.
    half, p = welch(np.array([20.6]), np.array([5.8]), 8, np.array([22.1]), np.array([3.1]), 10)
    assert half[0] == pytest.approx(2.17 * 1.0173, rel=0.01)
    assert p[0] == pytest.approx(0.165, abs=0.001)
    none = np.zeros(2)
    assert welch(np.array([1.0, 1.0]), none, 4, np.array([1.0, 2.0]), none, 4)[1].tolist() == [1, 0]
    assert discoveries(np.array([0.9, 0.001, 0.02, 0.2])).tolist() == [False, True, True, False]
    assert discoveries(np.array([0.04, 0.9, 0.9, 0.9])).tolist() == [False] * 4
    assert discoveries(np.zeros(0)).tolist() == []


def test_one_repetition_has_no_interval() -> None:
    one = estimate([3.0])
    assert (one.value, one.ci95, one.cv_ratio, one.repeats_count) == (3.0, None, None, 1)


def test_the_interval_of_repetitions_is_students() -> None:
    # Student's t at 0.975 with 3 degrees of freedom is 3.1824.
    mean = estimate([1.0, 2.0, 3.0, 4.0])
    half = 3.1824 * np.std([1, 2, 3, 4], ddof=1) / 2
    assert mean.ci95 == pytest.approx((2.5 - half, 2.5 + half), rel=1e-4)
    assert mean.cv_ratio == pytest.approx(np.std([1, 2, 3, 4], ddof=1) / 2.5)


@given(positive, positive)
def test_a_ratio_and_its_inverse_agree(a: list[float], b: list[float]) -> None:
    there, back = ratio(a, b), ratio(b, a)
    assert there is not None
    assert back is not None
    assert there.value * back.value == pytest.approx(1)
    if there.ci95 is not None and back.ci95 is not None:
        assert there.ci95[0] <= there.value <= there.ci95[1]
        if 0 < back.ci95[1] < math.inf:
            assert there.ci95[0] == pytest.approx(1 / back.ci95[1], rel=1e-6)


def test_no_ratio_to_nothing() -> None:
    assert ratio([1.0], [0.0]) is None
    assert ratio([-1.0], [2.0]) is None


def test_intervals_of_ratios_cover_them() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        doubled = ratio((2 * rng.lognormal(0, 0.2, 4)).tolist(), rng.lognormal(0, 0.05, 4).tolist())
        assert doubled is not None
        assert doubled.ci95 is not None
        hits += doubled.ci95[0] <= 2 <= doubled.ci95[1]
    assert 0.92 <= hits / 400 <= 0.99


def test_a_line_through_two_points_has_no_interval() -> None:
    assert line([1.0, 2.0], [3.0, 5.0]) == (1.0, 2.0, None, 1.0)
    _, slope, ci95, _ = line([1.0, 2.0, 3.0], [3.0, 5.0, 7.3])
    assert ci95 is not None
    assert ci95[0] < slope < ci95[1]
