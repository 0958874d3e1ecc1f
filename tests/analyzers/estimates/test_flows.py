from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chopper.analyzers.estimates.flows import fair_rates, simulate
from chopper.analyzers.estimates.network import ecmp, network, spread
from chopper.errors import UsageError


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


def test_without_a_bound_by_ports_the_last_flow_ends_with_the_fullest_uplink() -> None:
    """One queue pair per flow: the fullest of 8 uplinks carries max ÷ mean of its share."""
    found = simulate(64, 8, (1,), trials_count=40)[0]
    mean, error, _ = spread(64, 1, 8)
    # 40 draws scatter by √100 times as much as 4000; 1 % ends together.
    assert found.finish_ratio == pytest.approx(mean, abs=30 * error + 0.01)


def test_the_headline_of_up_to_40_percent() -> None:
    """128 flows over 16 uplinks, 16 queue pairs each: 44 %, and less where uplinks have room.

    Exactly, the fullest uplink of one queue pair carries 1.670 of its share, and of 16 1.159.
    """
    plain, found = simulate(128, 16, (1, 16))
    assert plain.finish_ratio == pytest.approx(1.670, abs=3 * plain.standard_error_ratio + 0.01)
    assert found.finish_ratio == pytest.approx(1.159, abs=3 * found.standard_error_ratio + 0.01)
    error = 3 * (plain.standard_error_ratio + found.standard_error_ratio)
    assert found.gain_ratio == pytest.approx(1.44, abs=error)
    assert error < 0.15
    gains = [
        simulate(128, 16, (16,), headroom_ratio=room)[0].gain_ratio for room in (1.2, 1.3, 2.0)
    ]
    assert gains == sorted(gains, reverse=True)
    assert 1.30 < gains[0] <= 1.40 + error
    assert gains[-1] == pytest.approx(1, abs=0.01)
    assert ecmp(128, 16, (16,))[0].gain_ratio == pytest.approx(1.44, abs=0.02)


def test_failures_cost_time_and_never_less_than_what_is_left_can_carry() -> None:
    whole = simulate(64, 8, (4,), trials_count=4)[0]
    failing = simulate(64, 8, (4,), failed_count=4, trials_count=4)[0]
    assert failing.finish_ratio > whole.finish_ratio
    # Half is sent by half time at most, the rest over half of the uplinks.
    assert failing.finish_ratio >= 0.5 + 0.5 * 2


def test_admission_bounds_who_sends_and_costs_little() -> None:
    options = {"receivers_count": 8, "trials_count": 4, "headroom_ratio": 4}
    everyone = simulate(64, 16, (4,), **options)[0]
    admitted = simulate(64, 16, (4,), admitted_count=2, **options)[0]
    assert everyone.most_at_once_count == 8
    assert admitted.most_at_once_count == 2
    # The receiver's port is the bound either way; flows end one after the other, earlier on
    # average.
    assert admitted.finish_ratio == pytest.approx(everyone.finish_ratio, rel=0.15)
    assert admitted.mean_finish_ratio < everyone.mean_finish_ratio


def test_it_stands_beside_the_table() -> None:
    found = network(sizes_bytes=(1024,), flows_count=32, trials_count=10)
    assert {s.failed_count for s in found.simulations} == {0, 1}
    assert {s.admitted_count for s in found.simulations} == {None, 4}
    assert network(sizes_bytes=(1024,), flows_count=10_000, trials_count=10).simulations == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flows_count": 0}, "flows: found 0"),
        ({"queue_pairs": (0,)}, "queue pairs: found 0"),
        ({"failed_count": 16}, "at least one must work"),
        ({"admitted_count": 0}, "admitted flows: found 0"),
        ({"receivers_count": 200}, "receivers: found 200"),
        ({"headroom_ratio": float("nan")}, "headroom"),
        ({"flows_count": 10**6}, "to be simulated"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        simulate(**{"flows_count": 128, "uplinks_count": 16, **options})
