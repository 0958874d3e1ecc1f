"""Published numbers that carry a formula: worked out in a comment, and asked of the program.

Beside those that have tests with their estimate; docs/concepts/estimates/numbers.md lists all.
"""

from __future__ import annotations

import json
from math import lgamma

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from chopper import quantities
from chopper.analyzers.estimates.network import (
    INTERCONNECTS,
    bus_factor,
    collective_time_s,
    ecmp,
    interconnect_table,
    network,
)
from chopper.analyzers.estimates.offload import Machine, offload
from chopper.cli import cli
from chopper.cli.estimates import limits
from chopper.cli.estimates.cost import Throughput, cost
from chopper.hardware import devices, prices
from chopper.models.architectures import named
from tests.analyzers.estimates import published

GB = 10**9
MACHINE = Machine(
    device="by hand",
    flop_per_s=500e12,
    memory_bytes=32 * GB,
    memory_bytes_per_s=900e9,
    to_device_bytes_per_s=50e9,
    to_host_bytes_per_s=50e9,
    host_bytes_per_s=150e9,
    source="test",
)


def test_40_b_on_one_v100_need_0_8_terabytes_of_host_memory() -> None:
    """Adam's 12 bytes per parameter, gradients of 4, weights of 2 and a copy of 2: 20."""
    for host, largest in ((1500 * GB, 75e9), (800 * GB, 40e9)):
        machine = msgspec.structs.replace(MACHINE, host_memory_bytes=host)
        variant = offload(named("llama3-8b"), machine).variants[-1]
        assert variant.largest_parameters_count == pytest.approx(largest, rel=0.005)
        assert variant.host_bytes == 20 * named("llama3-8b").parameters_count


def test_29_percent_of_activations_hide_behind_a_width_of_4096() -> None:
    """24/34 · 4096 · 50 GB/s ÷ 500 TFLOP/s = 0.289; with 0.71, as printed, 0.291."""
    found = offload(named("llama2-7b"), MACHINE).activations
    assert found.bound_ratio == pytest.approx(0.2891, abs=5e-5)
    assert f"{found.bound_ratio:.0%}" == "29%"


@pytest.mark.parametrize(
    ("device", "rates"),
    [
        ("h100-sxm", [54.8e9, 46.8e9]),
        ("v100-sxm2-32gb", [54.8e9 / 4, 46.8e9 / 4]),
        ("gh200-96gb", [375e9, 297e9]),
        # Half of the 900 GB/s that are quoted, of 5.325 TB/s of a memory read and written.
        ("gb200", [450e9, 450e9]),
        ("mi300a", [2.6625e12, 2.6625e12]),
    ],
)
def test_links_to_the_host(device: str, rates: list[float]) -> None:
    done = CliRunner().invoke(
        cli, ["estimate", "offload", "gpt2", "--sequence", "512", "--device", device, "--json"]
    )
    machine = json.loads(done.stdout)["machine"]
    assert [machine["to_device_bytes_per_s"], machine["to_host_bytes_per_s"]] == rates


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


TABLE = {
    # Flows, queue pairs over 16 uplinks: as published, and exactly.
    (1000, 1): (1.23, 1.2296),
    (128, 1): (1.67, 1.6696),
    (128, 4): (1.33, 1.3241),
    (128, 16): (1.16, 1.1592),
    (64, 1): (1.97, 1.9701),
    (64, 4): (1.46, 1.4648),
    (64, 16): (1.23, 1.2268),
    (16, 1): (3.05, 3.0782),
    (16, 4): (1.97, 1.9701),
    (16, 16): (1.47, 1.4648),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_flow_table_is_a_draw_of_what_it_is_exactly(case: tuple[int, int]) -> None:
    published, exact = TABLE[case]
    assert fullest_over_mean(case[0] * case[1], 16) == pytest.approx(exact, abs=6e-5)
    # A table by simulation is off by its draw: 1 %.
    assert published == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("case", TABLE)
def test_the_programs_draw_agrees_with_the_exact_flow_table(case: tuple[int, int]) -> None:
    flows, queue_pairs = case
    (found,) = ecmp(flows, 16, (queue_pairs,))
    assert found.standard_error_ratio < 0.015
    error = 4 * found.standard_error_ratio
    assert found.max_over_mean_ratio == pytest.approx(TABLE[case][1], abs=error)


@pytest.mark.parametrize(
    ("flows", "published", "exact"), [(128, 1.44, 1.4404), (64, 1.60, 1.6059), (16, 2.08, 2.1015)]
)
def test_the_gain_of_16_queue_pairs_exactly(flows: int, published: float, exact: float) -> None:
    (found,) = ecmp(flows, 16, (16,))
    assert found.gain_ratio == pytest.approx(exact, rel=0.015)
    assert published == pytest.approx(exact, rel=0.015)


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
    found = network(
        collective=collective,
        sizes_bytes=(16 * GB,),
        flows_count=1,
    ).times[0]
    steps = (28 * 3.4e-6 + 2 * 9.6e-6) / (1 if collective == "all_reduce" else 2)
    # Eight ports of 50 GB/s leave a node.
    expected = 8.4e-6 + steps + moved / 400e9
    assert found.time_s == pytest.approx(expected)
    assert found.algorithm_bytes_per_s == pytest.approx(16e9 / expected)
    assert found.bus_bytes_per_s / found.algorithm_bytes_per_s == pytest.approx(factor)
    # What bus bandwidth is for: it does not depend on the collective.
    assert found.bus_bytes_per_s == pytest.approx(400e9, rel=0.005)


def test_per_step_of_nvlink_pcie_and_network() -> None:
    """One more rank in a node is two more steps of an all-reduce: 6.8 µs, over PCIe 11.4."""
    from chopper.analyzers.estimates.network import Topology

    def more(topology: Topology) -> float:
        return collective_time_s("all_reduce", 1, 8, topology) - collective_time_s(
            "all_reduce", 1, 7, topology
        )

    assert more(Topology()) == pytest.approx(6.8e-6, rel=1e-5)
    assert more(Topology(node_latency_s=5.7e-6)) == pytest.approx(11.4e-6, rel=1e-5)
    nodes = Topology(ranks_per_node_count=1)
    assert more(nodes) == pytest.approx(19.2e-6, rel=1e-5)
    # Nothing is left but the base: one byte, no steps.
    assert collective_time_s("all_reduce", 1, 2) - 2 * 3.4e-6 == pytest.approx(8.4e-6, rel=1e-3)


def test_the_interconnect_table_by_hand() -> None:
    """2 · 15/16 · 2 bytes · 12 B = 45 GB; ÷ 1.25 GB/s = 36 s, ÷ 400 GB/s = 0.1125 s, + 4.29 s."""
    port = quantities.rate_bytes_per_s("400Gb/s")
    assert port == 50e9
    assert [rate for _, rate, _ in INTERCONNECTS] == [
        quantities.rate_bytes_per_s("10Gb/s"),
        8 * port,
    ]
    slow, fast = interconnect_table()
    assert slow.step_s == pytest.approx(40.29)
    assert fast.step_s == pytest.approx(4.4025)
    assert bus_factor("all_reduce", 16) * 2 * 12 * GB == 45 * GB
    assert slow.published_s is not None
    assert fast.published_s is not None
    assert f"{slow.published_s / fast.published_s:.0f}" == f"{slow.step_s / fast.step_s:.0f}" == "9"


def test_the_laws_at_their_reference() -> None:
    """1.8e12 parameters: 3.6e13 tokens, 120 · 1.8e12² FLOP, 120 layers, batches of 6e7."""
    found = limits.model_of(3.888e26)
    assert found.parameters_count == pytest.approx(1.8e12)
    assert found.layers_count == pytest.approx(120)
    assert found.batch_tokens_count == pytest.approx(6e7)
    # √(1.8e12 ÷ (12 · 120))
    assert found.width == pytest.approx(35_355, rel=1e-4)
    # 8 times the parameters: twice the layers, twice the batch.
    larger = limits.model_of(64 * 3.888e26)
    assert larger.layers_count == pytest.approx(240)
    assert larger.batch_tokens_count == pytest.approx(1.2e8)


def test_the_latency_wall_by_hand() -> None:
    """N = 7.776e6 s · 6e7 ÷ (20 · 120 · 400 µs) = 4.86e14; 120 N² = 2.834e31."""
    assert limits.latency_wall_flop() == pytest.approx(2.834e31, rel=1e-3)
    assert f"{limits.latency_wall_flop():.1e}" == "2.8e+31"


LAYOUT = limits.Model(parameters_count=1.0, layers_count=100.0, width=1e4, batch_tokens_count=1e6)
ROUND = limits.Hardware(
    flop_per_s=1e15, memory_bytes_per_s=1e12, node_link_bytes_per_s=1e11, network_bytes_per_s=1e10
)


@pytest.mark.parametrize(
    ("tp", "compute", "memory", "tensor", "hop_us"),
    [
        # mℓ = 160, b = 12500, bh = 1.25e8: 160·72e8·12500 ÷ 1e15 = 14.4 s of compute, 160·(72e8 +
        # 3e10) ÷ 1e12 = 5.952 s of memory over tp.
        (1, 14.4, 5.952, 0.0, 0.0),
        # 160·16·1.25e8·3/4 ÷ 1e11
        (4, 3.6, 1.488, 2.4, 9.2),
        # 160·96·1.25e8 ÷ 8 · ½(1e−11 + 1e−10); 3 + 2(1.65 + 5·log₂(8/2.75))
        (64, 0.225, 0.093, 13.2, 21.706),
    ],
)
def test_a_layouts_step_by_hand(
    tp: int, compute: float, memory: float, tensor: float, hop_us: float
) -> None:
    """100 layers of 1e4 over 5 stages, 8 microbatches, 10 data parallel, 1e6 tokens."""
    step, parts = limits.step_times(LAYOUT, ROUND, np.array([[10.0], [tp], [5.0], [8.0]]))
    # 8·20·4·1.25e8 ÷ 1e10 between stages, 48·1e8·100 ÷ (5·1e10) of gradients, both over tp.
    network_s = tensor + (8.0 + 9.6) / tp
    latency = 160 * 8 * (4.5 + hop_us) * 1e-6
    assert parts[:, 0] == pytest.approx([compute, memory, network_s, latency], rel=1e-4)
    # The bubble: 4 of 160.
    assert step[0] == pytest.approx(max(compute, memory, network_s) * 1.025, rel=1e-4)


def test_a_step_is_no_shorter_than_its_layers() -> None:
    """8 · 100 · (4.5 + 9.2 µs), however the layers are cut: 24 of them would do otherwise."""
    thin = LAYOUT._replace(width=1.0, batch_tokens_count=10.0)
    step, _ = limits.step_times(thin, ROUND, np.array([[10.0], [4.0], [5.0], [1.0]]))
    assert step[0] == pytest.approx(0.01096)


@pytest.mark.parametrize(
    ("options", "in_sbh"),
    [
        # GPT-3, 2048 tokens: 5as/h = 5·96·2048/12288 = 80.
        ({}, 114),
        ({"checkpoint": "selective"}, 34),
        ({"checkpoint": "full"}, 2),
        ({"tensor_parallel_count": 8}, 10 + 3 + 10),
        ({"tensor_parallel_count": 8, "sequence_parallel": True}, 14.25),
    ],
)
def test_activations_of_a_gpt_3_layer(options: dict[str, object], in_sbh: float) -> None:
    found = published.layer_activation_bytes(
        sequence_count=2048,
        batch_count=1,
        width=12288,
        heads_count=96,
        **options,  # type: ignore[arg-type]
    )
    assert found == in_sbh * 2048 * 12288


def test_activations_and_logits_of_llama_3_8b() -> None:
    """12 + 4·8/32 + 8·14336/4096 = 41; 41·8192·4096 = 1.376e9; 8192·128256·10 = 1.051e10."""
    found = published.llama_layer_activation_bytes(
        sequence_count=8192,
        batch_count=1,
        width=4096,
        heads_count=32,
        kv_heads_count=8,
        ffn_width=14336,
    )
    assert found == 41 * 8192 * 4096 == 1_375_731_712
    layer = offload(named("llama3-8b"), MACHINE, sequence_count=8192).activations.layer_bytes
    # Beside them, in float32 per token: attention's sum of each of 32 heads, the scale of both
    # norms.
    assert layer == found + 4 * 8192 * (32 + 2)
    logits = published.logits_bytes(sequence_count=8192, batch_count=1, vocabulary_count=128256)
    assert logits == 10_506_731_520


def test_heads_that_do_not_make_up_the_width_count_as_they_are() -> None:
    """Gemma 7B: 16 heads of 256 over a width of 3072: 8·3072 + 8·16·256 + 8·24576 bytes a token."""
    found = published.llama_layer_activation_bytes(
        sequence_count=1,
        batch_count=1,
        width=3072,
        heads_count=16,
        kv_heads_count=16,
        head_width=256,
        ffn_width=24576,
    )
    assert found == 24_576 + 32_768 + 196_608


def test_gpt_3_on_h100_and_gb200() -> None:
    """1.42 · 1e6 ÷ (3600 · 728) = 0.5418; 1.42 · 1.6 = 2.272."""
    listed = prices.load()
    mine, other = listed.devices["nvidia-h100-sxm"], listed.devices["nvidia-gb200"]
    assert mine.value == 1.42
    assert other.value == pytest.approx(1.6 * mine.value, abs=0.005)
    found = cost(
        Throughput(tokens_per_s=728, source="test"),
        prices=listed,
        price_per_hour=mine,
        device=devices.named("h100-sxm"),
        against=devices.named("gb200"),
    )
    assert f"{100 * found.per_million_tokens:.1f}" == "54.2"
    rival = found.against
    assert rival is not None
    assert f"{rival.break_even_ratio:.1f}" == "1.6"
    # 2500 / 989.4 TFLOP/s: 2.27 · 1e6 ÷ (3600 · 728 · 2.527).
    assert rival.per_million_tokens_at_peak_ratio == pytest.approx(0.3428, rel=0.001)
