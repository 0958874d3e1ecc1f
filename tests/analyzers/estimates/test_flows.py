from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chopper.analyzers.estimates.flows import fair_rates


def test_rates_are_max_min_fair_by_hand() -> None:
    # Two pairs share link 0 of rate 1; the third has link 1 with the second, rate 2.
    links = np.array([[0, 2, 2], [0, 1, 2], [1, 1, 2]])
    rates = fair_rates(links, np.array([1.0, 2.0, 100.0]), np.ones(3, dtype=bool))
    # Each entry of a row uses its link once: the third row counts link 1 twice.
    assert rates[0] == rates[1] == pytest.approx(0.5)
    assert rates[2] == pytest.approx(0.75)


@settings(max_examples=25)
@given(flows=st.integers(1, 40), links=st.integers(1, 8), seed=st.integers(0, 2**31))
def test_no_link_carries_more_than_it_can_and_no_rate_can_grow(
    flows: int, links: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    path = np.stack([rng.permutation(links + 2)[:3] for _ in range(flows)])
    capacity = rng.uniform(0.1, 2, links + 2)
    rates = fair_rates(path, capacity, np.ones(flows, dtype=bool))
    load = np.zeros(links + 2)
    np.add.at(load, path.ravel(), np.repeat(rates, 3))
    assert (load <= capacity * (1 + 1e-6)).all()
    # Each goes through a link that is full.
    assert ((load >= capacity * (1 - 1e-6))[path].any(1)).all()
