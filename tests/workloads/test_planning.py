from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chopper.workloads.planning import (
    METHODS,
    Autoscaler,
    Cost,
    Planner,
    balance,
    imbalance,
    loads,
    pack,
)
from chopper.workloads.sources import SourceError
from tests.workloads.small_mixtures import draw, of_lengths

costs = st.lists(st.integers(0, 10_000), min_size=1, max_size=60).map(
    lambda values: np.array(values, dtype=np.float64)
)
ranks = st.integers(1, 9)


def drawn(seed: int, count: int) -> np.ndarray:
    """Costs of documents of log-normal length, as data has them."""
    lengths = np.random.default_rng(seed).lognormal(4, 1, count).astype(int) + 1
    return Cost(1.0, 0.01)(lengths)


def made(sizes=(50, 7, 90), weights=(5.0, 1.0, 2.0), **changes) -> Planner:
    """Sources a, b and c, in row groups of 12 documents."""
    specs = []
    for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        lengths = 4 + np.random.default_rng(number).integers(60, size=size)
        spec = of_lengths("abc"[number], tuple(lengths.tolist()), 12, number)
        specs.append(replace(spec, weight=weight))
    options: dict[str, Any] = {"seed": 0, "cost": Cost(1.0, 0.1), "method": "kk"}
    return Planner(draw(tuple(specs), **options | changes))


def test_two_packs_of_100_tokens_cost_differently():
    # 30² + 70² = 5800 and 50² + 50² = 5000: as many tokens, 1.16 times the attention.
    square = Cost(alpha=0, beta=1)
    rank_loads = loads(square(np.array([30, 70, 50, 50])), np.array([0, 0, 1, 1]), 2)
    assert rank_loads.tolist() == [5800, 5000]
    assert rank_loads[0] / rank_loads[1] == pytest.approx(1.16)
    # Over the mean, as a step sees it: 5800 ÷ 5400.
    assert imbalance(square(np.array([30, 70, 50, 50])), np.array([0, 0, 1, 1]), 2) == (
        pytest.approx(5800 / 5400)
    )


@given(costs, ranks, st.sampled_from(METHODS))
def test_every_sample_goes_to_one_rank_that_exists(values, n, method):
    ranks_of = balance(values, n, method)
    assert len(ranks_of) == len(values)
    assert ((ranks_of >= 0) & (ranks_of < n)).all()
    assert loads(values, ranks_of, n).sum() == pytest.approx(values.sum())


@pytest.mark.parametrize("n", [2, 4, 8])
def test_karmarkar_karp_is_no_worse_than_greedy_on_average(n):
    batches = [drawn(seed, 16 * n) for seed in range(150)]
    mean = {
        method: np.mean([imbalance(v, balance(v, n, method), n) for v in batches])
        for method in METHODS
    }
    assert mean["kk"] <= mean["greedy"] < mean["random"]


def test_karmarkar_karp_on_the_textbook_example():
    # 8 7 6 5 4 → differences 1 6 5 4, then 5 and 1 4, 4 … → 2: parts of 16 and 14.
    values = np.array([8.0, 7, 6, 5, 4])
    assert sorted(loads(values, balance(values, 2, "kk"), 2).tolist()) == [14, 16]


@given(st.lists(st.integers(1, 64), max_size=50))
def test_packing_keeps_each_document_whole_and_once(lengths):
    rows = pack(np.array(lengths, dtype=np.int64), 64)
    assert sorted(d for row in rows for d in row) == list(range(len(lengths)))
    filled = [sum(lengths[d] for d in row) for row in rows]
    assert all(0 < n <= 64 for n in filled)
    # First fit: no two rows would fit into one.
    assert sum(n <= 32 for n in filled) <= 1


@settings(max_examples=40)
@given(st.integers(0, 1000), st.integers(1, 6), st.integers(1, 4), st.integers(0, 40))
def test_a_plan_does_not_depend_on_who_asks_when(seed, batch, n, step):
    one, other = (made(seed=seed, batch=batch, ranks=n) for _ in range(2))
    for before in range(step):
        one.plan(before)
    a, b = one.plan(step), other.plan(step)  # the other as after a restart
    again = one.plan(step)
    for field in ("source", "index", "length", "rank"):
        assert getattr(a, field).tolist() == getattr(b, field).tolist()
        assert getattr(a, field).tolist() == getattr(again, field).tolist()


@pytest.mark.parametrize("method", METHODS)
def test_each_reading_of_a_source_holds_each_sample_once(method):
    planner = made(method=method)
    read = [
        (s, i)
        for step in range(60)
        for s, i in zip(planner.plan(step).source, planner.plan(step).index, strict=True)
    ]
    for source, size in ((0, 50), (1, 7)):
        mine = [int(i) for s, i in read if s == source]
        assert len(mine) > 2 * size
        orders = [mine[k : k + size] for k in range(0, len(mine) - size + 1, size)]
        assert all(sorted(order) == list(range(size)) for order in orders)
        assert orders[0] != orders[1]
        # Row group after row group, so that a reader holds one or two.
        groups = [[i // 12 for i in order] for order in orders]
        assert all(len(list(itertools.groupby(order))) == -(-size // 12) for order in groups)


def scaler(*, latencies=(0.1, 0.1), **changes) -> Autoscaler:
    """Two sources of the same weight and 1 GB, read by loaders of 4 threads."""
    specs = [
        replace(of_lengths("ab"[n], (4,) * 20, 10, n), latency_s=s, state_bytes=10**9)
        for n, s in enumerate(latencies)
    ]
    return Autoscaler(specs, **{"threads": 4, "least": 1, "most": 9} | changes)


def seen(made: Autoscaler, *, samples: int, wait_s=0.1, core_s=0.0) -> Autoscaler:
    """As much of each source in a second, many times over."""
    counts = np.array([samples, samples])
    for _ in range(40):
        made.observe(1.0, counts, counts * wait_s, counts * core_s)
    return made


def test_loaders_follow_littles_law_the_core_and_the_memory():
    # 40 samples/s × 0.1 s are 4 in flight; 4 threads may be busy for 3: two loaders, of 2 sources.
    assert seen(scaler(), samples=20).loaders(1, starving=True) == 2
    assert seen(scaler(), samples=14).loaders(1, starving=True) == 1
    # 40 samples/s × 25 ms take a core; it may be busy for 0.75 of it.
    assert seen(scaler(threads=99), samples=20, core_s=0.025).loaders(1, starving=True) == 2
    # More sources than loaders, and no more loaders than are allowed.
    assert seen(scaler(), samples=999).loaders(1, starving=True) == 2
    assert seen(scaler(most=1), samples=999).loaders(1, starving=True) == 1


def test_no_loader_is_added_for_trainers_that_do_not_wait_and_one_taken_away_late():
    busy = seen(scaler(), samples=20)
    assert busy.loaders(1, starving=False) == 1
    idle = seen(scaler(), samples=1)
    found = [idle.loaders(2, starving=False) for _ in range(30)]
    assert found == [2] * 29 + [1]


def test_the_mixture_and_latency_that_count_are_moving_averages():
    made = scaler(latencies=(0.1, 0.3))
    made.observe(1.0, np.array([10, 0]), np.array([2.0, 0.0]), np.array([0.0, 0.0]))
    # 0.8 of before and 0.2 of now; what was not read keeps its latency.
    assert made.share.tolist() == pytest.approx([0.8 * 0.5 + 0.2, 0.8 * 0.5])
    assert made.wait_s.tolist() == pytest.approx([0.8 * 0.1 + 0.2 * 0.2, 0.3])


def test_how_samples_are_given_to_ranks_changes_nothing_of_what_a_step_takes():
    plans = {method: made(method=method).plan(9) for method in METHODS}
    taken = [sorted(zip(p.source.tolist(), p.index.tolist(), strict=True)) for p in plans.values()]
    assert taken[0] == taken[1] == taken[2]
    assert Counter(plans["random"].rank.tolist()) == {0: 4, 1: 4}
    both = plans["kk"].of(0) + plans["kk"].of(1)
    assert sorted(both) == taken[0]


def test_the_mixture_is_drawn_as_it_is_weighted():
    planner = made(batch=16, sizes=(10_000, 10_000, 10_000))
    sources = [planner.plan(step).source for step in range(200)]
    counts = np.bincount(np.concatenate(sources), minlength=3)
    assert counts / counts.sum() == pytest.approx([5 / 8, 1 / 8, 2 / 8], abs=0.02)


def test_a_source_too_short_for_its_share_of_a_step_is_helped_out():
    planner = made(sizes=(2, 100, 100), weights=(100.0, 1.0, 1.0), batch=20)
    counts = np.bincount(planner.plan(0).source, minlength=3)
    assert counts[0] == 2
    assert counts.sum() == 40


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((50, 0, 9), "source b has no document: leave it out"),
        ((3, 3, 1), r"a step takes 8 samples \(2 ranks × 4\), all sources together hold 7"),
    ],
)
def test_a_mixture_that_cannot_be_drawn_from(sizes, message):
    with pytest.raises(SourceError, match=message):
        made(sizes=sizes)


def test_planning_and_sources_need_no_torch_and_no_ray():
    code = (
        "import sys\nsys.modules['torch'] = sys.modules['ray'] = None\n"
        "import chopper.workloads.planning, chopper.workloads.sources\n"
        "import chopper.workloads.disaggregated"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
