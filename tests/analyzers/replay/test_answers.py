"""Means and intervals of a prediction; tests/test_statistics.py shows how often they hold."""

from __future__ import annotations

import numpy as np
import pytest

from chopper.analyzers.replay.answers import summary


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
