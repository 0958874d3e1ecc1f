"""Weak scaling against published measurements: the same work per rank on more of them.

Sources: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3 (8 × H100 per node,
400 Gb/s per GPU); MPT, mosaicml/llm-foundry, scripts/train/benchmarking/README.md, rows that differ
in the number of GPUs only (H100; A100 40 GB with 1600 Gb/s per node). All sharded fully, in 16
bits.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import chopper
from chopper.analyzers.estimates.network import Topology
from chopper.analyzers.estimates.scaling import (
    Collective,
    Step,
    at_scale,
    late_with,
    on_device,
    recorded_step,
    waits,
)
from chopper.analyzers.estimates.waiting import (
    Place,
    expected_maximum,
    kept_ratio,
    largest_ns,
    place_of,
)
from tests.known_causes.model.job import simulate
from tests.known_causes.model.plan import Dose, Plan
from tests.known_causes.model.writer import write

H100 = Topology()
A100 = Topology(node_link_bytes_per_s=300e9, network_link_bytes_per_s=25e9)
PUBLISHED = {
    # Model: parameters, layers, tokens per GPU and step, network, tokens/s/GPU by GPUs.
    "torchtitan 8B": (8.03e9, 32, 2 * 8192, H100, {8: 5762, 128: 5605}),
    "torchtitan 8B, compiled": (8.03e9, 32, 2 * 8192, H100, {8: 6667, 128: 6514}),
    "torchtitan 8B, float8": (8.03e9, 32, 2 * 8192, H100, {8: 8532, 128: 8380}),
    "MPT 13b": (12.85e9, 40, 2 * 2048, H100, {8: 4792, 16: 4767, 32: 4811, 64: 4800}),
    "MPT 1b": (1.316e9, 24, 20 * 2048, H100, {16: 46037, 32: 45130, 64: 44402}),
    "MPT 760m": (0.76e9, 24, 24 * 2048, H100, {16: 68551, 32: 67971}),
    "MPT 7b on A100": (6.66e9, 32, 18 * 2048, A100, {32: 3725, 64: 3665, 128: 3623}),
    "MPT 13b on A100": (12.85e9, 40, 16 * 2048, A100, {64: 1976, 128: 1972}),
}


def step(parameters: float, layers: int, tokens: int, rate: float, ranks: int) -> Step:
    """What is known of the smallest run: its step, and the gathers and reductions of each layer.

    How the ranks differ, and what was exposed, is not published: neither is assumed.
    """
    size = round(2 * parameters / layers)
    return Step(
        ranks_count=ranks,
        compute_ns=tokens / rate * 1e9,
        compute_spread_ns=0.0,
        idle_ns=0.0,
        copy_ns=0.0,
        exposed_ns=0.0,
        communication_ns=0.0,
        collectives=(
            Collective(name="all_gather", count=2 * layers, size_bytes=size),
            Collective(name="reduce_scatter", count=layers, size_bytes=2 * size),
        ),
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_weak_scaling_within_4_percent(name: str) -> None:
    parameters, layers, tokens, topology, rates = PUBLISHED[name]
    fewest = min(rates)
    of = step(parameters, layers, tokens, rates[fewest], fewest)
    rows, knee, _ = at_scale(of, tuple(rates), topology)
    errors = {
        row.ranks_count: row.efficiency_ratio / (rates[row.ranks_count] / rates[fewest]) - 1
        for row in rows
    }
    assert max(abs(e) for e in errors.values()) <= 0.04, errors
    # None of them lost a fifth.
    assert knee is None


def test_a_network_a_tenth_as_fast_has_a_knee_where_transfer_shows() -> None:
    parameters, layers, tokens, _, rates = PUBLISHED["MPT 13b"]
    slow = Topology(network_link_bytes_per_s=2.5e9)
    of = step(parameters, layers, tokens, rates[8], 8)
    rows, knee, cause = at_scale(of, (8, 16, 64), slow)
    assert (knee, cause) == (16, "exposed transfer")
    # 103 GB per step at 20 GB/s of a node's ports are longer than 855 ms of compute.
    moved = 3 * 2 * parameters + 2 * parameters
    assert rows[1].step_ns == pytest.approx(moved * 15 / 16 / 20e9 * 1e9, rel=0.05)


def test_the_expected_largest_of_normal_draws() -> None:
    # David and Nagaraja, Order Statistics: 1/sqrt(pi) of 2, 3/(2 sqrt(pi)) of 3; Tippett (1925):
    # 1.42360 of 8, 2.50759 of 100, 3.24144 of 1000.
    assert [expected_maximum(n) for n in (1, 2, 3, 8, 100, 1000)] == pytest.approx(
        [0.0, np.pi**-0.5, 1.5 * np.pi**-0.5, 1.42360, 2.50759, 3.24144], abs=1e-5
    )


MS = 1e6


def recorded(*places: Place, ranks: int = 8, waited: float | None = None) -> Step:
    """A step of so many ranks, of which these places are known."""
    return Step(
        ranks_count=ranks,
        compute_ns=100 * MS,
        compute_spread_ns=0.0,
        recorded_waiting_ns=sum(p.waited_ns for p in places) if waited is None else waited,
        idle_ns=50 * MS,
        copy_ns=0.0,
        exposed_ns=0.0,
        communication_ns=0.0,
        collectives=(),
        places=places,
    )


def waiting(always: np.ndarray, chance: float, steps: int, seed: int = 0) -> np.ndarray:
    """How long each rank waits in each of so many steps: (steps, ranks)."""
    late = always + chance * np.random.default_rng(seed).standard_normal((steps, len(always)))
    waited: np.ndarray = late.max(axis=1, keepdims=True) - late
    return waited


def machines(*slow: float, ranks: int) -> np.ndarray:
    """So many ranks, the first of them slow by these."""
    return np.array([*slow, *[0.0] * (ranks - len(slow))])


CASES = {
    # What recorded ranks are late by, always; by chance.
    "chance alone": ((), 2 * MS),
    "one slow rank": ((50 * MS,), 2 * MS),
    "one slow rank, hidden by chance": ((3 * MS,), 2 * MS),
    "two slow ranks": ((50 * MS, 48 * MS), 3 * MS),
    "one slow rank, nothing else": ((20 * MS,), 0.0),
}


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("name", CASES)
def test_waiting_on_more_ranks_where_the_truth_is_known(name: str, ranks: int) -> None:
    """Recorded ranks stay, and those beyond are like the middle one."""
    slow, chance = CASES[name]
    of = recorded(place_of(waiting(machines(*slow, ranks=ranks), chance, 200)), ranks=ranks)
    with_idle = msgspec.structs.replace(of, late_with=(0, 1, 0))
    whole = waiting(machines(*slow, ranks=ranks), chance, 200).mean()
    assert waits(of, ranks).total_ns == pytest.approx(whole)
    for more in (16, 64):
        truth = waiting(machines(*slow, ranks=more), chance, 4000, seed=1).mean()
        assert waits(with_idle, more).total_ns == pytest.approx(truth, rel=0.08), more


@pytest.mark.parametrize("more", [4, 8, 64])
def test_a_slow_rank_of_two_makes_the_step_no_longer_on_more(more: int) -> None:
    """Of two the quicker is usual: more of those wait for the one that sleeps 50 of 150 ms."""
    waited = waiting(machines(50 * MS, ranks=2), 0.3 * MS, 20)
    of = msgspec.structs.replace(
        recorded(place_of(waited), ranks=2),
        idle_ns=25 * MS,
        late_with=late_with(np.array([[100, 50, 0], [100, 0, 0]]) * MS, np.array([0.0, 50 * MS])),
    )
    rows, knee, _ = at_scale(of, (2, more), ONE_PER_NODE)
    assert knee is None
    assert rows[1].step_ns == pytest.approx(150 * MS, rel=0.01)
    assert rows[1].idle_ns == pytest.approx(50 * MS / more, abs=0.2 * MS)
    assert rows[1].waiting_always_ns == pytest.approx(50 * MS * (more - 1) / more, rel=0.02)
    # Taken for draws, 50 ms between two are 28 per 0.56 standard deviations.
    drawn = 125 * MS + 25 * MS * expected_maximum(more) / expected_maximum(2)
    assert rows[1].others_differ_step_ns == pytest.approx(drawn, rel=0.01)


ONE_PER_NODE = Topology(ranks_per_node_count=1)


@pytest.mark.parametrize("steps", [5, 20])
def test_chance_is_rarely_taken_for_a_slow_rank(steps: int) -> None:
    """Of eight equal ranks, means over few steps differ; what is kept of that is small."""
    kept = []
    for seed in range(40):
        found = place_of(waiting(np.zeros(8), 1 * MS, steps, seed))
        kept.append(max(found.late_ns) / found.waited_ns)
    raw = expected_maximum(8) / steps**0.5 / expected_maximum(8)
    assert np.mean(kept) < 0.35 * raw


def test_of_many_places_none_is_a_slow_rank_by_chance() -> None:
    """Means over five steps at forty places, one by one and together; then with a slow rank."""
    nothing = [waiting(np.zeros(2), 1 * MS, 5, seed) for seed in range(40)]
    alone = sum(max(place_of(w).late_ns) for w in nothing)
    kept = kept_ratio(nothing)
    assert sum(max(place_of(w, kept_max=kept).late_ns) for w in nothing) < 0.25 * alone
    slow = waiting(machines(50 * MS, ranks=2), 1 * MS, 5)
    kept = kept_ratio([*nothing, slow])
    assert max(place_of(slow, kept_max=kept).late_ns) == pytest.approx(25 * MS, rel=0.05)


def test_stretches_of_steps_that_are_alike_are_no_slow_rank() -> None:
    """A rank that is late for a tenth of the time, now this one, now that one."""
    rng = np.random.default_rng(0)
    late = np.repeat(rng.standard_normal((10, 4)), 20, axis=0) * MS
    found = place_of(late.max(axis=1, keepdims=True) - late)
    apart = place_of(waiting(rng.permutation([1.0, 0, 0, 0]) * MS, 0.3 * MS, 200))
    assert max(found.late_ns) < 0.3 * MS
    assert max(apart.late_ns) == pytest.approx(0.75 * MS, rel=0.1)


def test_few_steps_tell_nothing_and_all_of_it_is_chance() -> None:
    found = place_of(waiting(machines(50 * MS, ranks=4), 0.0, 3))
    assert not found.told
    assert list(found.late_ns) == [0, 0, 0, 0]
    of = recorded(found, ranks=4)
    grown = found.waited_ns * expected_maximum(64) / expected_maximum(4)
    assert waits(of, 64).total_ns == pytest.approx(grown, rel=1e-3)
    assert waits(of, 64).others_differ_ns == pytest.approx(grown, rel=1e-3)


def test_lateness_that_is_not_normal_is_brought_to_what_was_recorded() -> None:
    late = np.random.default_rng(0).exponential(1 * MS, (500, 8))
    found = place_of(late.max(axis=1, keepdims=True) - late)
    of = recorded(found)
    assert waits(of, 8).total_ns == found.waited_ns
    more = np.random.default_rng(1).exponential(1 * MS, (4000, 32))
    truth = float(more.max(axis=1).mean() - 1 * MS)
    # Normal draws grow less than exponential ones; without what was recorded they would miss a
    # third.
    assert waits(of, 32).total_ns == pytest.approx(truth, rel=0.2)
    assert expected_maximum(32) * MS < 0.7 * truth


@pytest.mark.parametrize("count", [2, 3, 8, 1000, 100_000])
def test_the_last_of_equal_ranks_is_the_largest_of_normal_draws(count: int) -> None:
    x = np.linspace(-10, 10, 20001)
    normal = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x.tolist()])
    largest = float(10 - (normal**count).sum() * (x[1] - x[0]))
    for recorded_count in (1, 2, 8):
        found = largest_ns((0.0,) * recorded_count, 1.0, count)
        assert found == pytest.approx(largest, abs=2e-3)


def test_waiting_grows_with_the_group_that_waits() -> None:
    """Eight ranks as two nodes of four: in a node it stays, between 2 nodes it is that of 128."""

    def of(adjacent: bool, group: int, ratio: float) -> Place:
        waited = 1 * MS
        return Place(
            waited_ns=waited,
            late_ns=(0.0,) * group,
            chance_ns=waited / expected_maximum(group),
            share_ratio=ratio,
            group_count=group,
            adjacent=adjacent,
        )

    def at(*found: Place, ranks: int = 512) -> float:
        return waits(recorded(*found, waited=1 * MS), ranks).total_ns

    maximum = {n: expected_maximum(n) for n in (2, 8, 128, 512)}
    run, between = maximum[512] / maximum[8], maximum[128] / maximum[2]
    assert at() == pytest.approx(1e6 * run)
    assert at(of(True, 4, 1.0)) == pytest.approx(1e6)
    assert at(of(False, 2, 1.0)) == pytest.approx(1e6 * between, rel=1e-3)
    # What is not told of any goes with the run.
    both = of(True, 4, 0.25), of(False, 2, 0.5)
    assert at(*both) == pytest.approx(1e6 * (0.25 + 0.5 * between + 0.25 * run), rel=1e-3)
    assert at(*both, ranks=8) == pytest.approx(1e6)


@pytest.mark.parametrize(
    "slow",
    [{"slow": Dose(0.5, ranks=(0,))}, {"data": Dose(12e6, ranks=(1,))}],
    ids=["device", "data"],
)
def test_the_model_of_a_training_job_waits_as_was_estimated_from_two_ranks(
    slow: dict[str, Any], tmp_path: Path
) -> None:
    found = {}
    for ranks in (2, 4):
        folder = tmp_path / str(ranks)
        write(simulate(Plan(ranks=ranks, layers=1, steps=6, **slow)), folder)
        found[ranks] = recorded_step(chopper.attribute(folder))
    estimate, truth = waits(found[2], 4), found[4].recorded_waiting_ns
    assert truth is not None
    assert estimate.total_ns == pytest.approx(truth, rel=0.02)
    assert estimate.always_ns == pytest.approx(truth, rel=0.02)
    assert estimate.others_differ_ns > 1.15 * truth
    late = found[2].late_with
    assert late is not None
    assert late[0 if "slow" in slow else 1] > 0.95


@pytest.mark.parametrize("apart", [1, 4])
def test_one_rank_waits_for_nobody(apart: int) -> None:
    """The slowest of the recorded, of groups that are smaller than the run too."""
    place = place_of(
        waiting(machines(50 * MS, ranks=8 // apart), 1 * MS, 50),
        group_count=8 // apart if apart > 1 else None,
    )
    of = msgspec.structs.replace(recorded(place), late_with=(1, 0, 0))
    assert waits(of, 1).total_ns == pytest.approx(0, abs=0.5 * MS)
    assert waits(of, 2).total_ns >= 0


def test_what_compute_makes_ranks_wait_goes_with_the_device() -> None:
    place = Place(waited_ns=5 * MS, late_ns=(2 * MS, *[-2 * MS / 7] * 7), chance_ns=3 * MS)
    of = msgspec.structs.replace(recorded(place), compute_spread_ns=1 * MS)
    # Of 5 ms, 1.4236 are compute's spread; at half the time, half of them.
    quick = on_device(of, 0.5)
    assert quick.recorded_waiting_ns == pytest.approx(5e6 - 1.4236e6 / 2, abs=100)
    assert waits(quick, 8).total_ns == pytest.approx(quick.recorded_waiting_ns)
    longer = (5e6 - 1.4236e6 / 2) / 5e6
    assert waits(quick, 64).total_ns == pytest.approx(longer * waits(of, 64).total_ns, rel=1e-4)
    unseen = on_device(msgspec.structs.replace(of, recorded_waiting_ns=None, places=()), 0.5)
    assert waits(unseen, 8).total_ns == pytest.approx(0.71180e6, abs=100)


def test_what_a_late_rank_does_longer_is_told_by_the_ranks() -> None:
    own = np.array([[100, 20, 0], [100, 20, 0], [110, 50, 0]]) * MS
    found = late_with(own, np.array([40, 40, 0]) * MS)
    assert found is not None
    assert found == pytest.approx((0.25, 0.75, 0))
    assert late_with(own, np.zeros(3)) is None
    assert late_with(own[:1], np.zeros(1)) is None
