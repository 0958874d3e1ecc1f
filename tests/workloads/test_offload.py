from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from chopper import pipeline

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from chopper.analyzers.estimates.memory import memory  # noqa: E402
from chopper.errors import UsageError  # noqa: E402
from chopper.experiments import results as ex  # noqa: E402
from chopper.experiments.loading import load  # noqa: E402
from chopper.experiments.prepare import (  # noqa: E402
    WorkloadUnavailable,
    prepare,
)
from chopper.workloads import placement as formulas  # noqa: E402
from chopper.workloads.offload_memory import Saver, live  # noqa: E402
from chopper.workloads.placement import PLACEMENTS  # noqa: E402
from tests.experiments.test_experiment import recorded  # noqa: E402
from tests.waiting import PATIENCE_S  # noqa: E402


@pytest.fixture
def no_deepspeed(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "deepspeed" else find_spec(name)
    )


def test_without_deepspeed_it_says_what_to_install_and_runs_the_rest(no_deepspeed):
    with pytest.raises(WorkloadUnavailable, match=r"needs deepspeed.*pip install deepspeed$"):
        prepare("offload", variants="zero2,zero3")
    launch = prepare("offload", options=["--device", "cpu"])
    assert [v.name for v in launch.variants] == ["ddp", "checkpoint", "activation-offload"]
    left_out = "zero2-offload, zero2-offload-core, zero3-param-offload"
    assert any(left_out in n and "pip install deepspeed" in n for n in launch.notes)


def test_a_budget_of_the_device_leaves_out_what_needs_more():
    words = ["--size", "13b", "--dtype", "bfloat16", "--optimizer", "sgd", "--batch", "1"]
    words += ["--sequence", "4", "--device", "cpu", "--device-memory", "8GB"]
    with pytest.raises(WorkloadUnavailable) as refused:
        prepare("offload", ranks=1, variants="ddp", options=words)
    # 13.02 B weights of 4 + 4 bytes.
    assert "ddp: needs about 104.1 GB of each device, --device-memory allows 8.0" in str(
        refused.value
    )
    launch = prepare("offload", ranks=1, variants="ddp,streamed", options=words)
    assert [v.name for v in launch.variants] == ["streamed"]


def test_a_disk_that_is_too_small_is_said(monkeypatch, tmp_path):
    from types import SimpleNamespace

    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=20 * 10**9))
    words = ["--size", "13b", "--dtype", "bfloat16", "--optimizer", "sgd", "--device", "cpu"]
    words += ["--scratch", str(tmp_path)]
    # 40 layers of 317 M weights, 2 bytes each; of both ranks.
    with pytest.raises(WorkloadUnavailable, match=r"needs 50\.8 GB on disk, .* has 20\.0 GB"):
        prepare("offload", ranks=2, variants="streamed", options=words)
    with pytest.raises(UsageError, match="is not a directory"):
        prepare("offload", variants="streamed", options=[*words, "--scratch", "/nowhere"])


def test_a_device_that_nobody_knows_is_refused():
    with pytest.raises(UsageError, match="no device is called 'h1000'"):
        prepare("offload", options=["--fits", "h1000"])
    with pytest.raises(UsageError, match="--fits: is empty, expected a device"):
        prepare("offload", options=["--fits", ""])
    for option in ("--fits", "--host"):
        with pytest.raises(UsageError, match="expected a size such as"):
            prepare("offload", options=[option, "24XB"])


@pytest.mark.parametrize(
    ("variant", "per_weight"),
    [
        # ZeRO's own table for 7.5 B weights on 64 GPUs is of mixed precision: 2 + 2 + 12 bytes.
        ("ddp", 4 + 4 + 8),
        ("zero2", 4 + 4 / 4 + 12 / 4),
        ("zero3", (4 + 4 + 12) / 4),
        # DeepSpeed collects gradients beside those that the host's update reads.
        ("zero3-param-offload", (4 + 4 + 12 + 4) / 4),
        ("fsdp2-offload", (4 + 4 + 8) / 4),
    ],
)
def test_predictions_are_zeros_formulas(variant, per_weight):
    width = formulas.widths_of(PLACEMENTS[variant], "float32", "adamw")
    found = formulas.states_bytes(PLACEMENTS[variant], width, 4)
    assert sum(found.values()) == pytest.approx(per_weight)


@pytest.mark.parametrize(
    ("variant", "optimizer", "per_weight"),
    [
        # Autocast keeps all in float32; DeepSpeed has masters beside weights in 16 bits.
        ("ddp", "adamw", 4 + 4 + 8),
        ("ddp", "sgd", 4 + 4),
        # The host updates from gradients in float32.
        ("zero2-offload", "adamw", 2 + 4 / 4 + 12 / 4),
        ("fsdp2-offload", "adamw", (4 + 4 + 8) / 4),
        ("streamed", "adamw", 2 + 4),
        ("streamed", "sgd", 2),
    ],
)
def test_in_bfloat16_each_library_keeps_its_own(variant, optimizer, per_weight):
    width = formulas.widths_of(PLACEMENTS[variant], "bfloat16", optimizer)
    found = formulas.states_bytes(PLACEMENTS[variant], width, 4)
    assert sum(found.values()) == pytest.approx(per_weight)


@pytest.mark.parametrize("variant", ["ddp", "zero3", "zero2-offload", "zero3-param-offload"])
def test_the_largest_model_fits_and_one_layer_more_does_not(variant):
    import msgspec

    from chopper.models.architectures import named

    options, host = {"fits": "v100-sxm2-32gb", "host": "1TB"}, 10**12
    found = formulas.largest_of(variant, options, ranks=8, checkpoint=False)
    assert found is not None
    found_at = [
        memory(
            formulas.training(
                PLACEMENTS[variant],
                msgspec.structs.replace(named(formulas.LARGEST_SHAPE), layers_count=n),
                ranks=8,
                batch=1,
                sequence=formulas.LARGEST_SEQUENCE,
                precision="mixed",
                kernels="gpu",
            )
        )
        for n in (found.layers_count, found.layers_count + 1)
    ]
    _, capacity = formulas.capacity_bytes("v100-sxm2-32gb")
    fits = [m.peak_bytes <= capacity and 8 * m.host_bytes <= host for m in found_at]
    assert fits == [True, False]
    tiny = options | {"fits": "1GB"}
    assert formulas.largest_of(variant, tiny, ranks=8, checkpoint=False) is None


def test_views_of_weights_are_no_activations():
    model = torch.nn.Linear(8, 8, bias=False)
    saver = Saver(PLACEMENTS["ddp"], torch.device("cpu"))
    x = torch.randn(2, 3, 8, requires_grad=True)
    with saver.forward():
        # Backward needs the input, and the transposed weight, which is no Parameter.
        hidden = model(x)
        (hidden * hidden).sum()
    assert saver.kept_bytes == x.nbytes + hidden.nbytes
    assert saver.moved_bytes == 0


def test_synchronous_offload_moves_all_that_is_saved():
    saver = Saver(PLACEMENTS["activation-offload"], torch.device("cpu"))
    x = torch.randn(4, 4, requires_grad=True)
    with saver.forward():
        loss = (x * x).sum() + x.sum()
    loss.backward()
    assert saver.moved_bytes == 2 * x.nbytes  # once for each side of x · x: no copy is shared
    torch.testing.assert_close(x.grad, 2 * x.detach() + 1)


def test_each_storage_counts_once_and_the_rest_is_buffers():
    weight = torch.zeros(1000)
    gradient, moment = torch.zeros(500), torch.zeros(250)
    travels, other = torch.zeros(60), torch.zeros(125)
    with FakeTensorMode():
        of_nothing = torch.zeros(10)
    before = live([], [], [])["buffers"]["cpu"]
    found = live([weight, weight[:10]], [gradient], [moment, weight], [travels])
    assert {k: v["cpu"] for k, v in found.items() if k != "buffers"} == {
        "weights": 4000,
        "gradients": 2000,
        "optimizer": 1000,
        "staging": 240,
    }
    assert found["buffers"]["cpu"] == before - 7240 >= other.nbytes
    assert live([of_nothing], [], [])["weights"] == {}


def kept(path, numbers):
    """An experiment of one repetition of each variant, by hand; no trace."""
    for name, measures in numbers.items():
        recorded(path / f"{name}-1", measures, ranks=2)
    ex.write_plan(
        path,
        ex.Plan(
            chopper_version="0",
            workload="offload",
            summary="made by hand",
            command=["chopper"],
            created_ns=1,
            ranks=2,
            device="cpu",
            options={"fits": "24GB"},
            steps=False,
            baseline=next(iter(numbers)),
            variants=[ex.VariantPlan(name=n, summary="", runs=[f"{n}-1"]) for n in numbers],
        ),
    )
    return load(path)


@pytest.fixture
def made(tmp_path):
    """Two variants, of which one keeps the optimizer on the host."""
    numbers = {}
    for name, loss, device, host in (("ddp", 2.0, 4e6, 0.0), ("zero2-offload", 2.001, 1e6, 3e6)):
        weights = {"category": "weights", "place": "device"}
        numbers[name] = [
            *(("loss", loss, {"step": step}) for step in range(2)),
            ("median_step_ns", 1e8, {}),
            ("parameters_count", 1e6, {}),
            ("update_ns", 3e7, {}),
            ("predicted_bytes", 4e6, weights),
            ("measured_bytes", device, weights),
        ]
        if host:
            labels = {"category": "optimizer", "place": "host"}
            numbers[name].append(("measured_bytes", host, labels))
    return kept(tmp_path, numbers)


@pytest.mark.parametrize(
    ("words", "lacking", "why"),
    [
        (["--optimizer", "sgd"], (), "its optimizer is AdamW"),
        ([], ("ninja",), "DeepSpeedCPUAdam is compiled here, without ninja$"),
    ],
)
def test_an_update_that_cannot_be_compiled_is_left_out(monkeypatch, words, lacking, why):
    pytest.importorskip("deepspeed")
    monkeypatch.setattr("shutil.which", lambda tool: None if tool in lacking else f"/bin/{tool}")
    with pytest.raises(WorkloadUnavailable, match=f"zero2-offload-core: {why}"):
        prepare("offload", variants="zero2-offload-core", options=["--device", "cpu", *words])


def test_updates_alone_are_held_against_memory_and_predict_larger_ones(tmp_path):
    """28 bytes at 14 GB/s: 2 ms a million weights; 13 B in two ranks take 13 s."""
    rates = (("DeepSpeedCPUAdam", 14e9), ("torch's AdamW, fused", 7e9), ("torch's AdamW", 2e9))
    numbers = []
    for name, rate in rates:
        for count in (1_000_000, 4_000_000):
            labels = {"optimizer": name, "parameters_count": count}
            numbers.append(("host_update_ns", 28 * count / rate * 1e9, labels))
            numbers.append(("host_update_over_triad_ratio", rate / 20e9, labels))
        for count in (10**9, 3 * 10**9, 7 * 10**9, 13 * 10**9):
            labels = {"optimizer": name, "parameters_count": count}
            numbers.append(("predicted_host_update_ns", 14 * count / rate * 1e9, labels))
    found = {h.claim: h for h in kept(tmp_path, {"zero2-offload-core": numbers}).headlines}
    core = "DeepSpeedCPUAdam"
    expected = {
        f"update on the host, {core} over torch's AdamW": 7,
        f"update on the host, {core} over torch's AdamW, fused": 2,
        f"{core}: its 28 bytes per weight and second over triad's bandwidth": 0.7,
        f"{core}: update of 4 M weights over that predicted from 1 M": 1,
    }
    assert {claim: found[claim].ours for claim in expected} == pytest.approx(expected)
    assert found[f"{core}: its 28 bytes per weight and second over triad's bandwidth"].configuration
    at_this_rate = "models of 1, 3, 7 and 13 B take 1.00, 3.00, 7.00, 13.00 s to update"
    assert sum(at_this_rate in h.configuration for h in found.values()) == 1


def test_an_update_alone_exceeds_the_caches():
    from chopper.workloads import offload

    # Four times the caches over all ranks, and 128 MiB of each at least, in 16 bytes a weight.
    alone, of_two = offload.update_count(1), offload.update_count(2)
    assert of_two == max(alone // 2, (128 << 20) // 16)


def test_updates_beyond_memory_leave_their_variant_out(monkeypatch):
    from chopper.workloads import offload

    monkeypatch.setattr(offload, "usable_memory_bytes", lambda: 1 << 20)
    args = offload.WORKLOAD.parse([])
    args.variants = ("ddp", "zero2-offload-core")
    needs = offload.needs(args, 2, "cpu")
    assert "last-level caches" in needs.absent["zero2-offload-core"]
    assert "ddp" not in needs.absent


def test_a_busy_machine_withholds_the_slowdown(made):
    import msgspec

    plan = msgspec.structs.replace(made.plan, other_cores={"ddp-1": 3.0}, machine_cores=4)
    busy = replace(made, plan=plan)
    for experiment, expected in ((made, 1.0), (busy, None)):
        ours = {h.claim: h.ours for h in experiment.headlines}
        assert ours["zero2-offload: step over that of ddp"] == expected


SHORT = ("streamed", "ddp")
ALL = ("zero3-param-offload", "zero2-offload", "zero2-offload-core", *SHORT, "fsdp2-offload")


@pytest.fixture(
    scope="module",
    params=[SHORT, pytest.param(ALL, marks=pytest.mark.long)],
    ids=["short", "all"],
)
def measured(tmp_path_factory, request):
    """Variant → rank 0's measures of three steps, (name, labels) → value; one launch for all."""
    variants = request.param
    if variants == ALL:
        pytest.importorskip("deepspeed")
    directory = tmp_path_factory.mktemp("offload")
    script = Path(__file__).parent / "train_variants.py"
    words = "--batch,2,--sequence,128,--variant,"
    started = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [*started, str(script), str(directory), *(f"offload:{words}{v}" for v in variants)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return {
        variant: {
            (m.name, *sorted(m.labels.items())): m.value
            for m in pipeline.read(directory / f"offload:{words}{variant}")
            .manifest.ranks[0]
            .measures
        }
        for variant in variants
    }


@pytest.mark.slow
def test_variants_keep_what_the_formulas_say(measured):
    for variant, found in measured.items():

        def of(name, category, found=found):
            return sum(
                v
                for (n, *labels), v in found.items()
                if (n, labels[:1]) == (name, [("category", category)])
            )

        for category in ("weights", "gradients", "optimizer", "activations"):
            said = of("predicted_bytes", category)
            assert said > 0 or (variant, category) == ("streamed", "gradients")
            assert of("measured_bytes", category) == pytest.approx(said, rel=0.01), (
                variant,
                category,
            )


@pytest.mark.slow
def test_variants_lose_alike(measured):
    losses = {
        v: [found["loss", ("step", step)] for step in range(3)] for v, found in measured.items()
    }
    # A sum of two ranks' gradients does not depend on its order.
    assert all(found == pytest.approx(losses["ddp"], rel=1e-6) for found in losses.values())
    assert losses["ddp"][2] < losses["ddp"][0]


@pytest.mark.slow
@pytest.mark.long
def test_the_command_runs_its_ranks_and_draws_its_tables(tmp_path):
    from chopper.cli.bench_ import command

    words = ["offload", "-o", str(tmp_path / "run"), "--variants", "ddp", "--repeats", "1"]
    words += ["--steps", "3", "--json", "--", "--batch", "1", "--sequence", "32", "--device", "cpu"]
    done = CliRunner().invoke(command, words, standalone_mode=False, catch_exceptions=False)
    assert done.return_value == 0, done.output
    document = json.loads(done.stdout)
    assert {m["measure"] for m in document["measures"]} >= {"measured_bytes", "update_ns"}
