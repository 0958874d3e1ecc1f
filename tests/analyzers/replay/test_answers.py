"""Intervals of a prediction hold the truth as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from chopper.analyzers.replay.answers import summary

_RUNS = 150


def covered(steps: int, alike: float) -> tuple[float, float]:
    """Share of runs whose intervals hold the mean of the predicted step, and of what is saved."""
    rng = np.random.default_rng(0)
    hits = np.zeros(2)
    for _ in range(_RUNS):
        e = rng.standard_normal((steps, 2))
        for i in range(1, steps):
            e[i] = alike * e[i - 1] + np.sqrt(1 - alike**2) * e[i]
        pairs = np.rint(np.array([100e6, 60e6]) + e * [3e6, 2e6]).astype(int)
        _, _, predicted, saved = summary([(a, b, 1) for a, b in pairs.tolist()])
        assert predicted is not None
        assert saved is not None
        hits += predicted[0] <= 60e6 <= predicted[1], saved[0] <= 40e6 <= saved[1]
    first, second = (hits / _RUNS).tolist()
    return first, second


@pytest.mark.parametrize(("steps", "alike"), [(3, 0.0), (4, 0.0), (8, 0.0), (30, 0.0), (30, 0.5)])
def test_intervals_hold_the_truth_in_their_share_of_runs(steps: int, alike: float) -> None:
    # 150 runs: of 95 % at least 90 % in all but one of a thousand.
    assert min(covered(steps, alike)) >= 0.9


def test_steps_of_unlike_many_ranks_count_by_their_windows() -> None:
    observed, predicted, *_ = summary([(10, 8, 1), (60, 30, 3)])
    assert (observed, predicted) == (70 / 4, 38 / 4)


def test_two_steps_tell_no_interval_and_many_need_no_memory() -> None:
    assert summary([(2, 1, 1), (4, 3, 1)])[2:] == (None, None)
    assert summary([]) == (0.0, 0.0, None, None)
    drawn = np.random.default_rng(0).integers(4, 9, 100_000)
    _, predicted, interval, _ = summary([(10, int(v), 1) for v in drawn])
    assert interval is not None
    # 1.41 ÷ √100 000, twice to either side.
    assert interval == pytest.approx((predicted - 0.0088, predicted + 0.0088), abs=0.001)
