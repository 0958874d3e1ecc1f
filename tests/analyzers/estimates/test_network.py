from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from chopper.analyzers.estimates.network import (
    Topology,
    bus_factor,
    collective_time_s,
    ecmp,
    interconnect_table,
    network,
    ring_steps,
)
from chopper.cli.estimates.network import read_topology
from chopper.errors import InputError, UsageError


def test_the_draw_agrees_with_hashing_one_by_one() -> None:
    rng = np.random.default_rng(1)
    loads = [np.bincount(rng.integers(0, 8, 40), minlength=8).max() / 5 for _ in range(3000)]
    (found,) = ecmp(40, 8, (1,))
    error = 5 * found.standard_error_ratio
    assert found.max_over_mean_ratio == pytest.approx(float(np.mean(loads)), abs=error)


def test_the_headline_of_up_to_40_percent() -> None:
    """128 flows over 16 uplinks, 16 queue pairs each: 44 %, less where uplinks have room.

    Exactly, the fullest uplink of one queue pair carries 1.670 of its share, and of 16 1.159: with
    20 % of room, about 1.670 / 1.2 = 1.39 to 1, for few draws of 16 are above 1.2.
    """
    plain, found = ecmp(128, 16, (1, 16))
    assert plain.gain_ratio == plain.gain_with_headroom_ratio == 1
    assert found.gain_ratio == pytest.approx(1.44, abs=0.02)
    assert found.gain_with_headroom_ratio == pytest.approx(1.38, abs=0.02)


def test_one_uplink_cannot_be_uneven() -> None:
    assert ecmp(10, 1, (4,))[0].max_over_mean_ratio == 1


@pytest.mark.parametrize(
    ("collective", "factor", "steps"),
    [
        ("all_reduce", 2 * 15 / 16, 30),
        ("reduce_scatter", 15 / 16, 15),
        ("all_gather", 15 / 16, 15),
        ("all_to_all", 15 / 16, 15),
        ("broadcast", 1, 15),
        ("reduce", 1, 15),
    ],
)
def test_conventions_of_nccl_tests(collective: str, factor: float, steps: int) -> None:
    assert bus_factor(collective, 16) == pytest.approx(factor)
    assert ring_steps(collective, 16) == steps


def test_constants_of_nccls_simple_ring() -> None:
    """Base 8.4 µs; per step NVLink 3.4, network 9.6; PCIe's 5.7 is in the field's words."""
    found = Topology()
    assert found.base_latency_s == 8.4e-6
    assert (found.node_latency_s, found.network_latency_s) == (3.4e-6, 9.6e-6)
    over_pcie = Topology(node_latency_s=5.7e-6)
    slower = collective_time_s("all_reduce", 1, 8, over_pcie) - collective_time_s(
        "all_reduce", 1, 8
    )
    assert slower == pytest.approx(14 * (5.7e-6 - 3.4e-6))


def test_a_ring_by_hand() -> None:
    one_node = Topology()
    # 14 steps of 3.4 µs, base 8.4 µs, 2 × 7/8 of 1 GB at 450 GB/s.
    expected = 8.4e-6 + 14 * 3.4e-6 + 1.75e9 / 450e9
    assert collective_time_s("all_reduce", 1e9, 8, one_node) == pytest.approx(expected)
    # Two nodes: of 30 steps 2 cross; eight ports of 50 GB/s are slower than 450 GB/s.
    expected = 8.4e-6 + 28 * 3.4e-6 + 2 * 9.6e-6 + 1.875e9 / 400e9
    assert collective_time_s("all_reduce", 1e9, 16, one_node) == pytest.approx(expected)


def test_an_all_to_all_leaves_the_node_through_each_ranks_own_port() -> None:
    # Of 16 pieces of S/16, 8 go to the other node at 50 GB/s; 7 stay within, at 450 GB/s.
    # All peers are served at once: one latency.
    latency = 8.4e-6 + 9.6e-6
    found = collective_time_s("all_to_all", 1e9, 16)
    assert found == pytest.approx(latency + 8 / 16 * 1e9 / 50e9)
    within = collective_time_s("all_to_all", 1e9, 8)
    assert within == pytest.approx(8.4e-6 + 3.4e-6 + 7 / 8 * 1e9 / 450e9)
    # 127 peers are two rounds of 64.
    many = collective_time_s("all_to_all", 1e9, 128)
    assert many == pytest.approx(8.4e-6 + 2 * 9.6e-6 + 120 / 128 * 1e9 / 50e9)


def test_hierarchical_by_hand() -> None:
    inside = 2 * (7 * 3.4e-6 + 1e9 * 7 / 8 / 450e9)
    between = 2 * 9.6e-6 + 1e9 / 8 / 50e9
    found = collective_time_s("all_reduce", 1e9, 16, algorithm="hierarchical")
    assert found == pytest.approx(8.4e-6 + inside + between)


def test_trees_win_for_small_messages_on_many_nodes_and_rings_for_large() -> None:
    found = network(ranks_count=64, sizes_bytes=(1024, 2**34), flows_count=1)
    fastest = {t.size_bytes: t.algorithm for t in found.times if t.fastest}
    assert fastest == {1024: "tree", 2**34: "ring"}
    for t in found.times:
        assert t.bus_bytes_per_s == pytest.approx(
            t.size_bytes / t.time_s * bus_factor("all_reduce", 64)
        )


def test_the_interconnect_table() -> None:
    slow, fast = interconnect_table()
    assert slow.communication_s * slow.node_bytes_per_s == pytest.approx(45e9)
    assert round(slow.step_s, 1) == 40.3
    assert round(fast.step_s, 2) == 4.40
    assert slow.step_s / fast.step_s == pytest.approx(9, rel=0.05)
    assert slow.published_s == 39.8
    assert slow.step_s == pytest.approx(39.8, rel=0.02)
    assert fast.step_s == pytest.approx(4.4, rel=0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bus_factor("all_reduce", 1), "ranks: found 1"),
        (lambda: bus_factor("allreduce", 8), "did you mean all_reduce"),
        (lambda: collective_time_s("all_reduce", 0, 8), "size"),
        (lambda: collective_time_s("all_reduce", 1, 12), "multiple of 8"),
        (lambda: collective_time_s("all_gather", 1, 8, algorithm="tree"), "tree: not of"),
        (
            lambda: collective_time_s("all_gather", 1, 8, algorithm="hierarchical"),
            "hierarchical: not of",
        ),
        (lambda: ecmp(0, 16), "flows: found 0"),
        (lambda: ecmp(10, 16, (0,)), "queue pairs: found 0"),
        (lambda: ecmp(10**9, 16), "more than can be drawn"),
        (lambda: Topology(node_latency_s=-1), "node_latency_s"),
    ],
)
def test_what_cannot_be_is_refused(call: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()  # type: ignore[operator]


def test_a_described_network(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text('{"ranks_per_node_count": 4, "network_link_bytes_per_s": 25e9}')
    found = read_topology(file)
    assert found.ranks_per_node_count == 4
    assert found.source == "described in cluster.json"
    for text, message in (
        ("{", "truncated"),
        ('{"ports": 3}', "unknown field"),
        ('{"node_latency_s": "fast"}', "Expected"),
        ('{"uplinks_count": 0}', "more than zero"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            read_topology(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_topology(tmp_path / "absent.json")


def test_a_network_in_yaml(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "cluster.yaml"
    file.write_text("ranks_per_node_count: 4\nnetwork_latency_s: 2.0e-5\n")
    assert read_topology(file).network_latency_s == 2e-5
