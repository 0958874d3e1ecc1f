"""Published numbers that carry a formula: worked out in a comment, and asked of the program.

Beside those that have tests with their estimate; docs/concepts/estimates/numbers.md lists all.
"""

from __future__ import annotations

import json

import msgspec
import pytest
from click.testing import CliRunner

from chopper.analyzers.estimates.offload import Machine, offload
from chopper.cli import cli
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
