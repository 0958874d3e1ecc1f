"""How predictions are held against measurements: robust means, intervals, verdicts."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.predictions import Prediction, error_interval, level


def prediction(predicted: float, interval: tuple[float, float] | None = None) -> Prediction:
    return Prediction(
        suite="real",
        name="slow_dataset",
        magnitude="30 ms",
        flavour="cpu",
        change="--fix data",
        observed_ns=90e6,
        predicted_ns=predicted,
        truth_ns=50e6,
        bar_ratio=0.05,
        ci95_ratio=interval,
        pairs_count=36,
    )


@pytest.mark.parametrize(
    ("predicted", "interval", "verdict"),
    [
        (51e6, (-0.01, 0.06), "within the bar"),
        (54e6, (0.04, 0.12), "not shown: the interval reaches the bar"),
        (54e6, (0.06, 0.12), "outside the bar"),
        (46e6, (-0.12, -0.06), "outside the bar"),
        (46e6, (-0.12, -0.04), "not shown: the interval reaches the bar"),
        (54e6, None, "outside the bar"),
    ],
)
def test_the_verdict_tells_error_from_chance(
    predicted: float, interval: tuple[float, float] | None, verdict: str
) -> None:
    assert prediction(predicted, interval).verdict == verdict


def test_a_machine_that_was_slower_in_one_recording_is_no_error() -> None:
    pairs = np.array([[30.0, 11.0, 10.0]] * 5)
    both = level([pairs, 3 * pairs])
    assert both.shape == (10, 3)
    assert np.allclose(both, [[60.0, 22.0, 20.0]])
    assert level([]).shape == (0, 3)


def test_the_interval_holds_the_error_and_is_none_without_noise() -> None:
    rng = np.random.default_rng(1)
    truth = rng.normal(100.0, 5.0, 200)
    pairs = np.stack([truth + 30, 1.03 * truth, truth], axis=1)
    assert error_interval(pairs) == pytest.approx((0.03, 0.03))
    pairs[:, 1] += rng.normal(0.0, 5.0, 200)
    low, high = error_interval(pairs)
    assert low < 0.03 < high
    assert high - low < 0.04
