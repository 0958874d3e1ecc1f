"""Offload: steps and memory by hand, and beside published numbers."""

from __future__ import annotations

import json

import msgspec
import pytest
from click.testing import CliRunner

from chopper.analyzers.estimates.memory import fit
from chopper.analyzers.estimates.training import Training
from chopper.cli import cli
from chopper.cli.estimates.offload import Machine, offload
from chopper.errors import UsageError
from chopper.hardware.devices import named as named_device
from chopper.models.architectures import named
from chopper.workloads.placement import largest_of

GB = 10**9
LLAMA = named("llama3-8b")
V100_BYTES = named_device("v100-sxm2-32gb").usable_bytes or 0

V100 = Machine(
    device="V100 32 GB",
    flop_per_s=60e12,
    memory_bytes=32 * 10**9,
    memory_bytes_per_s=900e9,
    to_device_bytes_per_s=12e9,
    to_host_bytes_per_s=12e9,
    host_bytes_per_s=150e9,
    source="test",
)


def test_what_does_not_fit_comes_with_ranks_that_do() -> None:
    small = msgspec.structs.replace(V100, memory_bytes=8 * 10**9)
    small = msgspec.structs.replace(small, host_memory_bytes=10**9)
    found = offload(named("llama2-13b"), small)
    assert found.fitting_ranks_count
    enough = offload(named("llama2-13b"), small, ranks_count=found.fitting_ranks_count)
    fewer = offload(named("llama2-13b"), small, ranks_count=found.fitting_ranks_count // 2)
    assert enough.fitting_ranks_count is None
    assert any(v.fits for v in enough.variants)
    assert not any(v.fits for v in fewer.variants)


def test_13_b_fit_one_v100_with_offload_only() -> None:
    v100 = msgspec.structs.replace(V100, memory_bytes=V100_BYTES)
    host = msgspec.structs.replace(v100, host_memory_bytes=1500 * 10**9)
    found = offload(named("llama2-13b"), host)
    assert [v.fits for v in found.variants] == [False, True, False, True, True]
    # Layers of Llama 3 8B are 218 M parameters, and embedding and head 1.05 B: 56 layers, 339.
    largest = {v.name: v.largest_parameters_count for v in offload(LLAMA, host).variants}
    assert largest == {
        "stage 2, all on the device": 1_268_789_248,
        "stage 2, optimizer on the host": 1_050_677_248 + 56 * 218_112_000,
        "stage 3, all on the device": 1_486_901_248,
        "stage 3, optimizer on the host": 1_050_677_248 + 56 * 218_112_000,
        "stage 3, optimizer and parameters on the host": 1_050_677_248 + 339 * 218_112_000,
    }
    # With weights on a host of unknown memory there is no largest.
    assert offload(LLAMA, v100).variants[-1].largest_parameters_count is None


def test_every_answer_to_the_largest_model_is_one() -> None:
    """The estimates of offload and of memory, the workload's table: one definition."""
    machine = msgspec.structs.replace(V100, memory_bytes=V100_BYTES)
    of_offload = offload(LLAMA, machine).variants[1].largest_parameters_count
    training = Training(
        architecture=LLAMA, strategy="zero2", offload=("optimizer",), checkpoint="full"
    )
    assert fit(training, V100_BYTES, {}).largest_parameters_count == of_offload
    options = {"fits": "v100-sxm2-32gb", "host": "1500GB"}
    said = largest_of("zero2-offload", options, ranks=1, checkpoint=True)
    assert said is not None
    assert said.parameters_count == of_offload


def test_a_coherent_link_lets_the_device_update_the_hosts_states() -> None:
    # 12 bytes per parameter each way at the slower 297 GB/s, or 24 of DRAM at 486 GB/s: 49.4 ps.
    gh200 = msgspec.structs.replace(
        V100,
        to_device_bytes_per_s=375e9,
        to_host_bytes_per_s=297e9,
        host_bytes_per_s=486e9,
        memory_bytes_per_s=4e12,
        coherent=True,
    )
    found = offload(LLAMA, gh200)
    last = found.variants[-1]
    assert last.name.endswith("updated by the device")
    assert last.optimizer_s == pytest.approx(LLAMA.parameters_count * 24 / 486e9)
    assert (last.exposed_transfer_s, last.link_bytes) == (0, 24 * LLAMA.parameters_count)
    assert last.step_s < found.variants[1].step_s


def test_within_one_memory_nothing_is_offloaded() -> None:
    apu = msgspec.structs.replace(V100, coherent=True, shared=True)
    found = offload(LLAMA, apu)
    assert [v.name for v in found.variants] == [
        "stage 2, all on the device",
        "stage 3, all on the device",
    ]
    assert {v.host_bytes for v in found.variants} == {0}
    assert found.activations.best == "recompute"


def test_the_step_is_zero_offloads_and_moves_4_bytes_per_parameter() -> None:
    """t_fwd + max(t_bwd, 2Ψ/B_d2h) + 30Ψ/DRAM + 2Ψ/B_h2d, here 12 GB/s each way and 150 GB/s."""
    model = named("llama2-7b")
    plain, variant = offload(model, V100, batch_count=4, sequence_count=2048).variants[:2]
    crossing_s = 2 * model.parameters_count / 12e9
    expected = plain.forward_s + max(plain.backward_s, crossing_s) + crossing_s
    assert variant.step_s == pytest.approx(expected + 30 * model.parameters_count / 150e9)
    assert variant.link_bytes == 4 * model.parameters_count


def test_gradients_hide_from_the_break_even_on() -> None:
    model = named("llama2-7b")
    found = offload(model, V100, batch_count=1, sequence_count=1)
    tokens = int(found.tokens_to_hide_gradients)

    def waits(count: int) -> float:
        v = offload(model, V100, batch_count=1, sequence_count=count).variants[1]
        return v.backward_s - 3 * v.forward_s

    assert waits(tokens + 1) == pytest.approx(0, abs=1e-9)
    assert waits(tokens // 2) > 0.1


def test_layers_keep_what_the_estimate_of_memory_says() -> None:
    """gpt-oss's clamped gate keeps 14f for each of 4 experts, 28 % of a layer more than 8f."""
    layer, tokens = offload(named("gpt-oss-20b"), V100).activations.layer_bytes, 2048
    width, heads, keys = 2880, 64, 8
    attention = 2 * (4 * width + 2 * 64 * (heads + keys)) + 4 * (heads + 2)
    mixture = 4 * (4 * width + 14 * 2880 + 36) + 4 * 32
    assert layer == pytest.approx(tokens * (attention + mixture), rel=1e-2)


def test_layers_of_positions_that_a_model_has_not() -> None:
    found = offload(named("gpt2"), V100, batch_count=1, sequence_count=4096).activations
    assert found.layer_bytes == pytest.approx(34 * 4096 * 768, rel=5e-3)


def test_activations() -> None:
    found = offload(named("llama3-8b"), V100, batch_count=1, sequence_count=8192).activations
    assert found.layer_bytes / 1e9 == pytest.approx(1.38, abs=0.01)
    assert found.kept_s <= found.overlapped_s <= found.synchronous_s
    assert found.recomputed_s > found.kept_s
    assert found.hideable_ratio == pytest.approx(12e9 / found.link_for_all_bytes_per_s)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="batch"):
        offload(named("gpt2"), V100, batch_count=0)
    with pytest.raises(UsageError, match="too large"):
        offload(named("gpt2"), V100, batch_count=2**30, sequence_count=2**30)
    with pytest.raises(UsageError, match="link"):
        offload(named("gpt2"), msgspec.structs.replace(V100, to_host_bytes_per_s=0))


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
        cli,
        ["estimate", "offload", "llama3-70b", "--sequence", "512", "--device", device, "--json"],
    )
    machine = json.loads(done.stdout)["machine"]
    assert [machine["to_device_bytes_per_s"], machine["to_host_bytes_per_s"]] == rates


def test_activations_of_llama_3_8b() -> None:
    """12 + 4·8/32 + 8·14336/4096 = 41; 41·8192·4096 = 1.376e9 bytes of a layer."""
    layer = offload(named("llama3-8b"), MACHINE, sequence_count=8192).activations.layer_bytes
    # Beside them, in float32 per token: attention's sum of each of 32 heads, the scale of both
    # norms.
    assert layer == 41 * 8192 * 4096 + 4 * 8192 * (32 + 2)
