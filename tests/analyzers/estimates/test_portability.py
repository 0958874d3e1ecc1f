"""One program on several devices: captured and compiled for real, and a recorded run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from chopper.analyzers.estimates.portability import of_module, portability_ratio
from chopper.analyzers.estimates.project import Side
from chopper.cli.estimates.portability import page
from chopper.collectors.compiled_kernels import TARGETS, compiled_kernels, differences
from chopper.hardware.devices import Reach, named
from chopper.reports import formatted
from tests.command import run
from tests.waiting import PATIENCE_S, until

pytest.importorskip("torch")
pytest.importorskip("triton")

FULL = Reach(products=1.0, memory=1.0, source="none is lost")
MODULE = """
import torch


class Gate(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(32, 64, bias=False)
        self.down = torch.nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return (x + self.down(torch.nn.functional.silu(self.up(x)))).square().mean(-1)


def make(batch, sequence):
    return Gate(), torch.randn(batch * sequence, 32)
"""


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("module")
    (folder / "gated.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return compiled_kernels(
            "gated:make", batch=2, sequence=8, precision="fp32", targets=["sm_90", "gfx942"]
        )


def calls(rows: list[dict[str, Any]], name: str) -> int:
    return sum(row["call_count"] for row in rows if row["op"] == name)


def test_fusion_leaves_the_products_and_writes_the_rest_anew(captured: dict[str, Any]) -> None:
    # Two products forward; backward two for weights, and one for the input of the second.
    assert calls(captured["eager"], "aten::mm") == calls(captured["compiled"], "aten::mm") == 5
    assert calls(captured["eager"], "aten::silu") == 1
    assert calls(captured["compiled"], "aten::silu") == 0
    fused = " ".join(kernel["operators"] for kernel in captured["kernels"])
    assert "silu" in fused
    assert "silu_backward" in fused
    of_triton = sum(kernel["call_count"] for kernel in captured["kernels"])
    others = sum(row["call_count"] for row in captured["eager"]) - 5
    assert 0 < of_triton < others


def test_each_kernel_has_machine_code_of_both_vendors(captured: dict[str, Any]) -> None:
    for kernel in captured["kernels"]:
        assert set(kernel["targets"]) == {"sm_90", "gfx942"}
        for target in kernel["targets"].values():
            assert target["code_bytes"] > 0
            assert 0 < target["registers_count"] <= 255


def test_the_kernels_compute_what_eager_pytorch_does(captured: dict[str, Any]) -> None:
    assert captured["reference"]["tokens_count"] == 16
    assert captured["reference"]["loss_difference_ratio"] < 1e-5
    assert 0 <= captured["reference"]["gradient_difference_ratio"] < 1e-4
    assert captured["cpu"]["kernel_count"] >= 1
    assert captured["cpu"]["library_call_count"] == 5


def test_efficiency_is_the_rooflines_share_and_portability_their_harmonic_mean(
    captured: dict[str, Any],
) -> None:
    sides = [Side(named(name), FULL) for name in ("h100-sxm", "mi300x", "l4")]
    result = of_module(captured, module="gated:make", sides=sides, architectures=TARGETS)
    first, second, third = result.devices
    assert (first.architecture, second.architecture, third.architecture) == (
        "sm_90",
        "gfx942",
        None,
    )
    # Fewer kernels have fewer launches of 4.5 µs, and move no more bytes.
    kernels = sum(row["call_count"] for row in captured["compiled"])
    assert first.compiled_ns is not None
    assert first.compiled_ns == pytest.approx(kernels * 4500 + first.roofline_ns, rel=0.01)
    assert first.compiled_ns < first.eager_ns
    assert third.compiled_ns is None  # nothing was compiled for it
    assert result.compiled_portability_ratio is None
    text = formatted(lambda: page(result), result.to_dict, "txt")
    assert "Triton has no target here for NVIDIA L4" in " ".join(text.split())
    alike = of_module(captured, module="gated:make", sides=sides[:2], architectures=TARGETS)
    assert alike.compiled_portability_ratio == pytest.approx(
        portability_ratio(d.compiled_efficiency_ratio for d in alike.devices)
    )
    efficiencies = [device.roofline_ns / device.eager_ns for device in result.devices]
    assert result.eager_portability_ratio == pytest.approx(3 / sum(1 / e for e in efficiencies))
    assert json.dumps(result.to_dict())


def test_a_kernel_that_does_not_compile_leaves_the_device_without_a_time(
    captured: dict[str, Any],
) -> None:
    broken = json.loads(json.dumps(captured))
    broken["kernels"][0]["targets"]["gfx942"] = {"reason": "out of resources"}
    sides = [Side(named(n), FULL) for n in ("h100-sxm", "mi300x")]
    result = of_module(broken, module="gated:make", sides=sides, architectures=TARGETS)
    assert result.devices[0].compiled_ns is not None
    assert result.devices[1].compiled_ns is None
    assert result.compiled_portability_ratio == 0  # it does not run on one of them
    assert result.kernels[0].targets[1].reason == "out of resources"


def test_a_module_without_kernels_of_its_own_is_no_recorded_run(captured: dict[str, Any]) -> None:
    bare = captured | {"kernels": []}
    bare["reference"] = {"tokens_count": 16, "loss_difference_ratio": None}
    sides = [Side(named("h100-sxm"), FULL)]
    result = of_module(bare, module="gated:make", sides=sides, architectures=TARGETS)
    text = " ".join(formatted(lambda: page(result), result.to_dict, "txt").split())
    assert "nothing is calibrated" in text
    assert "loss differs from eager by – of it, gradients by at most –" in text


def test_a_gradient_that_is_no_number_is_not_hidden_by_others() -> None:
    import torch

    ones, none = torch.ones(2), torch.full((2,), torch.nan)
    assert differences((2.0, [ones, None]), (1.0, [2 * ones, None])) == {
        "loss_difference_ratio": 0.5,
        "gradient_difference_ratio": 1.0,
    }
    assert differences((0.0, []), (1.0, []))["loss_difference_ratio"] is None
    for wrong in ([2 * ones, none], [none, ones]):
        with pytest.raises(ArithmeticError, match=r"their loss or gradient is not a finite"):
            differences((2.0, [ones, ones]), (2.0, wrong))


BREAKS = """
import torch


class Breaks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.one(x)
        torch._dynamo.graph_break()
        return y.relu().square()


def make():
    return Breaks(), torch.randn(4, 8)


def fixed():
    module = torch.nn.Linear(8, 8)
    return module.requires_grad_(False), torch.randn(4, 8)
"""


@pytest.mark.parametrize(
    ("factory", "said"), [("make", "graph"), ("fixed", "no parameter that requires a gradient")]
)
def test_what_cannot_be_counted_whole_is_refused_in_one_line(
    factory: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "breaks.py").write_text(BREAKS)
    outcome = run("estimate", "portability", "--module", f"breaks:{factory}", cwd=tmp_path)
    assert outcome.code == 1
    assert said in outcome.line


SAME_NAMES = """
import torch


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(4, 8))
        self.u, self.v = (torch.nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    def forward(self, x):
        return (((x.exp() @ self.u) * self.w) @ self.v).square()


def make():
    torch.manual_seed(1)
    return Twice(), torch.randn(4, 8)
"""


def test_kernels_of_the_same_name_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second kernel of forward is a product, and that of backward is two."""
    (tmp_path / "twice.py").write_text(SAME_NAMES)
    monkeypatch.chdir(tmp_path)
    found = compiled_kernels("twice:make", batch=1, sequence=8, precision="fp32", targets=["sm_90"])
    names = [kernel["name"] for kernel in found["kernels"]]
    assert {"triton_poi_fused_mul_1", "triton_poi_fused_mul_1.2"} <= {*names}
    assert all(
        kernel["operators"] == "mul" for kernel in found["kernels"] if "mul_1" in kernel["name"]
    )
    assert found["reference"]["gradient_difference_ratio"] < 1e-5


def test_what_is_compiled_is_removed_when_the_command_is_ended(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path('pid.new').write_text(str(os.getpid()))\n"
        "os.rename('pid.new', 'pid')\n"
        "time.sleep(600)\n"
    )
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "chopper", "estimate", "portability", "--module", "slow:make"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        until((tmp_path / "pid").exists, "the module is loaded")
        assert [*(tmp_path / "temporary").glob("chopper-kernels-*")]
        process.terminate()
        assert "ended by SIGTERM" in process.communicate(timeout=PATIENCE_S)[1]
    assert not [*(tmp_path / "temporary").iterdir()]
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_portability_by_hand() -> None:
    assert portability_ratio([0.5, 0.25]) == pytest.approx(1 / 3)
    assert portability_ratio([0.5, None]) == 0
    assert portability_ratio([]) == 0


def test_the_page_says_what_was_captured_measured_and_checked(captured: dict[str, Any]) -> None:
    sides = [Side(named(n), FULL) for n in ("h100-sxm", "mi300x")]
    result = of_module(captured, module="gated:make", sides=sides, architectures=TARGETS)
    text = formatted(lambda: page(result), result.to_dict, "txt")
    assert "operators forward and backward" in text
    assert "measured on this CPU: eager" in text
    assert "loss differs from eager by" in text
    assert "gfx942" in text


def test_a_module_that_cannot_be_captured_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def make():\n    raise ValueError('no such size')\n")
    outcome = run("estimate", "portability", "--module", "broken:make", cwd=tmp_path)
    assert outcome.code == 1
    assert outcome.line == "chopper: --module broken:make: ValueError: no such size"


def test_a_recorded_run_stands_on_its_device_as_measured(traces_dir: Path) -> None:
    file = str(traces_dir / "tracelens" / "h100-bert-small-inference.json.gz")
    outcome = run("estimate", "portability", file, "--device", "mi300x", "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    own, other = document["devices"]
    assert own["device"] == "NVIDIA H100 SXM 80 GB"
    assert own["recorded_ns"] > own["roofline_ns"] > 0
    assert other["recorded_ns"] is None
    shares = own["roofline_ns"] / own["recorded_ns"], other["roofline_ns"] / other["eager_ns"]
    assert document["eager_portability_ratio"] == pytest.approx(2 / sum(1 / s for s in shares))
    refused = run("estimate", "portability", file, "--batch", "2")
    assert refused.line == "chopper: --batch needs --module; a run has its own"
