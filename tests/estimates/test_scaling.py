"""Weak scaling against published measurements: the same work per rank on more of them.

Sources: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3 (8 × H100 per node, 400
Gb/s per GPU); MPT, mosaicml/llm-foundry, scripts/train/benchmarking/README.md, rows that differ in the
number of GPUs only (H100; A100 40 GB with 1600 Gb/s per node). All sharded fully, in 16 bits.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from chopper.analyzers.estimates.network import Topology
from chopper.analyzers.estimates.scaling import (
    Collective,
    Step,
    at_scale,
    expected_maximum,
    on_device,
    waiting_ns,
)

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
    # David and Nagaraja, Order Statistics: 1/sqrt(pi) of 2, 3/(2 sqrt(pi)) of 3; Tippett (1925): 1.42360
    # of 8, 2.50759 of 100, 3.24144 of 1000.
    assert [expected_maximum(n) for n in (1, 2, 3, 8, 100, 1000)] == pytest.approx(
        [0.0, np.pi**-0.5, 1.5 * np.pi**-0.5, 1.42360, 2.50759, 3.24144], abs=1e-5
    )


def lateness(spread: tuple[float, float], ranks: int, steps: int, at_once: int) -> float:
    """Mean waiting per step where ranks differ always and in each of so many collectives."""
    rng = np.random.default_rng(0)
    always, each = spread
    late = always * rng.standard_normal((200, 1, ranks, 1)) + each * rng.standard_normal(
        (200, steps, ranks, at_once)
    )
    return float((late.max(axis=2, keepdims=True) - late).mean(axis=2).sum(axis=-1).mean())


@pytest.mark.parametrize(("spread", "at_once"), [((0.0, 1e6), 1), ((0.0, 1e6), 5), ((1e6, 3e5), 2)])
def test_waiting_recorded_on_few_ranks_is_that_of_many(
    spread: tuple[float, float], at_once: int
) -> None:
    """Whether ranks come late by chance or always, once or several times in a step."""
    parameters, layers, tokens, _, rates = PUBLISHED["MPT 13b"]
    recorded = msgspec.structs.replace(
        step(parameters, layers, tokens, rates[8], 8),
        recorded_waiting_ns=lateness(spread, 8, 20, at_once),
    )
    assert waiting_ns(recorded, 8) == recorded.recorded_waiting_ns
    assert waiting_ns(recorded, 64) == pytest.approx(lateness(spread, 64, 20, at_once), rel=0.06)


def test_waiting_grows_with_the_group_that_waits() -> None:
    """Eight ranks as two nodes of four: in a node it stays, between 2 nodes it is that of 128."""
    parameters, layers, tokens, _, rates = PUBLISHED["MPT 13b"]
    recorded = msgspec.structs.replace(
        step(parameters, layers, tokens, rates[8], 8), recorded_waiting_ns=1e6
    )

    def of(adjacent: bool, group: int, ratio: float) -> Collective:
        return Collective(
            name="all_reduce",
            count=1,
            size_bytes=1,
            group_count=group,
            adjacent=adjacent,
            waiting_ratio=ratio,
        )

    def at(*found: Collective, ranks: int = 512) -> float:
        return waiting_ns(msgspec.structs.replace(recorded, collectives=found), ranks)

    maximum = {n: expected_maximum(n) for n in (2, 8, 128, 512)}
    run, between = maximum[512] / maximum[8], maximum[128] / maximum[2]
    assert at() == pytest.approx(1e6 * run)
    assert at(of(True, 4, 1.0)) == pytest.approx(1e6)
    assert at(of(False, 2, 1.0)) == pytest.approx(1e6 * between)
    # What is not told of any goes with the run.
    assert at(of(True, 4, 0.25), of(False, 2, 0.5)) == pytest.approx(
        1e6 * (0.25 + 0.5 * between + 0.25 * run)
    )
    assert at(of(True, 4, 0.25), of(False, 2, 0.5), ranks=8) == pytest.approx(1e6)


def test_what_compute_makes_ranks_wait_goes_with_the_device() -> None:
    parameters, layers, tokens, _, rates = PUBLISHED["MPT 13b"]
    recorded = msgspec.structs.replace(
        step(parameters, layers, tokens, rates[8], 8),
        compute_spread_ns=1e6,
        recorded_waiting_ns=5e6,
    )
    # Of 5 ms, 1.4236 are compute's spread; at half the time, half of them.
    quick = on_device(recorded, 0.5)
    assert quick.recorded_waiting_ns == pytest.approx(5e6 - 1.4236e6 / 2, abs=10)
    unseen = on_device(msgspec.structs.replace(recorded, recorded_waiting_ns=None), 0.5)
    assert waiting_ns(unseen, 8) == pytest.approx(0.71180e6, abs=10)
