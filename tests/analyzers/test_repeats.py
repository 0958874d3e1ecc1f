from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper.analyzers.trace.repeats import estimate, ratio

positive = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=6)


def test_one_repetition_has_no_interval():
    one = estimate([3.0])
    assert (one.value, one.ci95, one.cv_ratio, one.repeats_count) == (3.0, None, None, 1)


def test_mean_interval_is_students():
    # Student's t at 0.975 with 3 degrees of freedom is 3.1824.
    found = estimate([1.0, 2.0, 3.0, 4.0])
    half = 3.1824 * np.std([1, 2, 3, 4], ddof=1) / 2
    assert found.ci95 == pytest.approx((2.5 - half, 2.5 + half), rel=1e-4)
    assert found.cv_ratio == pytest.approx(np.std([1, 2, 3, 4], ddof=1) / 2.5)


@given(positive, positive)
def test_a_ratio_and_its_inverse_agree(a, b):
    there, back = ratio(a, b), ratio(b, a)
    assert there is not None
    assert back is not None
    assert there.value * back.value == pytest.approx(1)
    if there.ci95 is not None and back.ci95 is not None:
        assert there.ci95[0] <= there.value <= there.ci95[1]
        if 0 < back.ci95[1] < math.inf:
            assert there.ci95[0] == pytest.approx(1 / back.ci95[1], rel=1e-6)


def test_no_ratio_to_nothing():
    assert ratio([1.0], [0.0]) is None
    assert ratio([-1.0], [2.0]) is None


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        found = ratio((2 * rng.lognormal(0, 0.2, 4)).tolist(), rng.lognormal(0, 0.05, 4).tolist())
        assert found is not None
        assert found.ci95 is not None
        hits += found.ci95[0] <= 2 <= found.ci95[1]
    assert 0.92 <= hits / 400 <= 0.99
