from __future__ import annotations

import importlib.util
import json
import math

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from chopper import experiment as ex  # noqa: E402
from chopper._workloads import WorkloadUnavailable, prepare  # noqa: E402


def test_without_deepspeed_it_says_what_to_install(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "deepspeed" else find_spec(name)
    )
    with pytest.raises(WorkloadUnavailable, match=r"needs deepspeed.*pip install deepspeed"):
        prepare("offload")


@pytest.mark.parametrize(
    ("variant", "per_weight"),
    [
        # ZeRO's own table for 7.5 B weights on 64 GPUs is of mixed precision: 2 + 2 + 12 bytes.
        ("ddp", 4 + 4 + 8),
        ("zero1", 4 + 4 + 12 / 4),
        ("zero2", 4 + 4 / 4 + 12 / 4),
        ("zero3", (4 + 4 + 12) / 4),
        ("zero3-param-offload", (4 + 4 + 12) / 4),
        ("fsdp2-offload", (4 + 4 + 8) / 4),
    ],
)
def test_predictions_are_zeros_formulas(variant, per_weight):
    from chopper.workloads.offload import predicted

    assert sum(predicted(variant, 4).values()) == pytest.approx(per_weight)


@pytest.mark.slow
def test_variants_keep_what_the_formulas_say_and_lose_alike(tmp_path):
    pytest.importorskip("deepspeed")
    from chopper.cli.run_ import command

    path = tmp_path / "run"
    variants = ["ddp", "zero3", "fsdp2-offload", "activation-offload"]
    words = ["offload", "-o", str(path), "--variants", ",".join(variants), "--steps", "3", "--json"]
    words += ["--", "--batch", "1", "--sequence", "32", "--device", "cpu"]
    done = CliRunner().invoke(command, words, standalone_mode=False, catch_exceptions=False)
    assert done.return_value == 0, done.output
    document = json.loads(done.stdout)
    assert {h["claim"].partition(":")[0] for h in document["headlines"]} == set(variants)
    found = ex.load(path)

    def bytes_of(variant, category, measure="measured_bytes"):
        row = found.find(measure, variant, category=category)
        assert row is not None
        return row.estimate.value

    for variant in variants:
        for category in ("weights", "optimizer"):
            said = bytes_of(variant, category, "predicted_bytes")
            assert bytes_of(variant, category) == pytest.approx(said, rel=0.03), (variant, category)
        for step in range(3):
            of = [
                row.values[0] for v in ("ddp", variant) if (row := found.find("loss", v, step=step))
            ]
            assert len(of) == 2
            assert math.isclose(of[0], of[1], rel_tol=1e-3)
    assert bytes_of("ddp", "gradients and buffers") == pytest.approx(
        bytes_of("ddp", "gradients and buffers", "predicted_bytes"), rel=0.05
    )
    assert bytes_of("activation-offload", "activations") == 0
    assert bytes_of("ddp", "activations") > 1e6
