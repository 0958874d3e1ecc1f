"""Times of collectives and the spread of flows, worked by hand, and beside published numbers."""

from __future__ import annotations

from math import lgamma

import numpy as np
import pytest

from chopper.cli.estimates.network import (
    Options,
    Topology,
    bus_factor,
    collective_times_s,
    ecmp,
    estimate,
)
from chopper.errors import UsageError

H100 = Topology()


def test_the_headline_of_up_to_40_percent() -> None:
    """128 flows over 16 uplinks, 16 queue pairs each: 44 %, less where uplinks have room.

    Exactly, the fullest uplink of one queue pair carries 1.670 of its share, and of 16 1.159: with
    20 % of room, about 1.670 / 1.2 = 1.39 to 1, for few draws of 16 are above 1.2.
    """
    plain, found = ecmp(128, 16, (1, 16))
    assert plain.gain_ratio == plain.gain_with_headroom_ratio == 1
    assert found.gain_ratio == pytest.approx(1.44, abs=0.02)
    assert found.gain_with_headroom_ratio == pytest.approx(1.38, abs=0.02)
    assert ecmp(10, 1, (4,))[0].max_over_mean_ratio == 1


def fullest_over_mean(pieces: int, links: int) -> float:
    """The expectation, exactly: given their sum, Poisson counts are multinomial.

    P(max ≤ k) is the probability that `links` counts, each at most k, sum to `pieces`, over that
    without the bound.
    """
    mean = pieces / links
    counts = np.arange(pieces + 1)
    log_factorial = np.array([lgamma(c + 1.0) for c in counts])
    mass = np.exp(counts * np.log(mean) - mean - log_factorial)
    size = 2 ** int(np.ceil(np.log2(links * pieces + 1)))
    whole = np.exp(pieces * np.log(pieces) - pieces - lgamma(pieces + 1.0))
    expected = 0.0
    for most in range(pieces):
        if mass[most:].sum() < 1e-12 and most > mean:
            break
        power = np.fft.irfft(np.fft.rfft(mass[: most + 1], size) ** links, size)
        expected += 1 - min(1.0, power[pieces] / whole)
    return expected / mean


@pytest.mark.parametrize(
    ("flows", "queue_pairs", "published", "exact"),
    [
        (1000, 1, 1.23, 1.2296),
        (128, 1, 1.67, 1.6696),
        (128, 4, 1.33, 1.3241),
        (128, 16, 1.16, 1.1592),
        (64, 1, 1.97, 1.9701),
        (64, 4, 1.46, 1.4648),
        (64, 16, 1.23, 1.2268),
        (16, 1, 3.05, 3.0782),
        (16, 4, 1.97, 1.9701),
        (16, 16, 1.47, 1.4648),
    ],
)
def test_flows_on_16_uplinks(flows: int, queue_pairs: int, published: float, exact: float) -> None:
    assert fullest_over_mean(flows * queue_pairs, 16) == pytest.approx(exact, abs=6e-5)
    # A table by simulation is off by its draw: 1 %.
    assert published == pytest.approx(exact, rel=0.01)
    (found,) = ecmp(flows, 16, (queue_pairs,))
    assert found.max_over_mean_ratio == pytest.approx(exact, rel=0.015)


@pytest.mark.parametrize(
    ("collective", "moved", "factor"),
    [
        # Of 16 GB over 16 ranks; S is the whole array for gathers too.
        ("all_reduce", 30e9, 1.875),
        ("reduce_scatter", 15e9, 0.9375),
        ("all_gather", 15e9, 0.9375),
        ("broadcast", 16e9, 1.0),
        ("reduce", 16e9, 1.0),
    ],
)
def test_bandwidths_of_nccl_tests(collective: str, moved: float, factor: float) -> None:
    options = Options(collective=collective, size_bytes=(16 * 10**9,), flows_count=1)
    found = estimate(options).times[0]
    # Of 30 or 15 steps, 2 or 1 cross the nodes; eight ports of 50 GB/s leave a node.
    steps = (28 * 3.4e-6 + 2 * 9.6e-6) / (1 if collective == "all_reduce" else 2)
    expected = 8.4e-6 + steps + moved / 400e9
    assert found.time_s == pytest.approx(expected)
    assert found.algorithm_bytes_per_s == pytest.approx(16e9 / expected)
    assert found.bus_bytes_per_s / found.algorithm_bytes_per_s == pytest.approx(factor)
    assert bus_factor(collective, 16) == pytest.approx(factor)
    # What bus bandwidth is for: it does not depend on the collective.
    assert found.bus_bytes_per_s == pytest.approx(400e9, rel=0.005)


def test_times_by_hand() -> None:
    def all_reduce(size: float, ranks: int, topology: Topology = H100) -> dict[str, float]:
        return collective_times_s("all_reduce", size, ranks, topology)

    # 14 steps of 3.4 µs, over PCIe 5.7; base 8.4 µs; 2 × 7/8 of 1 GB at 450 GB/s.
    assert all_reduce(1e9, 8)["ring"] == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 1.75e9 / 450e9)
    pcie = all_reduce(1, 8, Topology(node_latency_s=5.7e-6))["ring"]
    assert pcie - all_reduce(1, 8)["ring"] == pytest.approx(14 * 2.3e-6)
    # Reduce-scatter and all-gather in the node, a ring of one eighth between nodes.
    inside = 2 * (7 * 3.4e-6 + 1e9 * 7 / 8 / 450e9)
    between = 2 * 9.6e-6 + 1e9 / 8 / 50e9
    assert all_reduce(1e9, 16)["hierarchical"] == pytest.approx(8.4e-6 + inside + between)
    # Trees win for small messages on many nodes, rings for large ones.
    small, large = all_reduce(1024, 64), all_reduce(2**34, 64)
    assert (min(small, key=small.__getitem__), min(large, key=large.__getitem__)) == (
        "tree",
        "ring",
    )


def test_an_all_to_all_leaves_the_node_through_each_ranks_own_port() -> None:
    def time_s(ranks: int) -> float:
        return collective_times_s("all_to_all", 1e9, ranks, H100)["ring"]

    # Of 16 pieces of S/16, 8 go to the other node at 50 GB/s; 7 stay within, at 450 GB/s.
    # All peers are served at once: one latency. 127 peers are two rounds of 64.
    assert time_s(16) == pytest.approx(8.4e-6 + 9.6e-6 + 8 / 16 * 1e9 / 50e9)
    assert time_s(8) == pytest.approx(8.4e-6 + 3.4e-6 + 7 / 8 * 1e9 / 450e9)
    assert time_s(128) == pytest.approx(8.4e-6 + 2 * 9.6e-6 + 120 / 128 * 1e9 / 50e9)


def test_ranks_that_fill_no_nodes_are_refused() -> None:
    with pytest.raises(UsageError, match="multiple of 8"):
        collective_times_s("all_reduce", 1, 12, H100)
