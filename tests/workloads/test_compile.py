"""How portable a block is: its kernels compiled for absent GPUs, and run in the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chopper.errors import UsageError
from chopper.experiments.prepare import find
from chopper.workloads.compile import TARGETS, needs, portability_ratio
from tests.waiting import PATIENCE_S

pytest.importorskip("torch")
pytest.importorskip("triton")

PROGRAM = """
import json
import sys

import torch

from chopper.errors import CaptureError
from chopper.workloads.compiled_kernels import Pass, compile_kernels, interpreter_errors


class Gate(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(32, 64, bias=False)
        self.down = torch.nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(16, 32))
        self.u, self.v = (torch.nn.Parameter(torch.randn(32, 32)) for _ in range(2))

    def forward(self, x):
        return (((x.exp() @ self.u) * self.w) @ self.v).square()


torch.manual_seed(1)
x = torch.randn(16, 32)
if sys.argv[1] == "interpreted":
    print(json.dumps([interpreter_errors(Pass(module(), x)) for module in (Gate, Twice)]))
    sys.exit()
step = Pass(Gate(), x)
found = compile_kernels(step)
kernels = list(found.kernels.values())
try:
    kernels[0].code_bytes("sm_1")
    refused = ""
except CaptureError as exc:
    refused = str(exc)
print(json.dumps({
    "eager": found.eager,
    "compiled": found.compiled,
    "captured_count": found.captured_count,
    "code_bytes": {k.name: [k.code_bytes(t) for t in ("sm_90", "gfx942")] for k in kernels},
    "refused": refused,
    "same_names": sorted(compile_kernels(Pass(Twice(), x)).kernels),
}))
"""


def answer(task: str, folder: Path) -> Any:
    """Run the program in a process of its own: it changes Inductor and Triton for good."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, task],
        env={
            **os.environ,
            "TRITON_INTERPRET": str(int(task == "interpreted")),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TRITON_CACHE_DIR": str(folder / "triton"),
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return answer("ahead", tmp_path_factory.mktemp("ahead"))


def calls(rows: list[dict[str, Any]], name: str) -> int:
    return sum(row["call_count"] for row in rows if row["op"] == name)


def test_fusion_leaves_the_products_and_writes_the_rest_anew(captured: Any) -> None:
    # Two products forward; backward two for weights, and one for the input of the second.
    assert calls(captured["eager"], "aten::mm") == calls(captured["compiled"], "aten::mm") == 5
    assert calls(captured["eager"], "aten::silu") == 1
    assert calls(captured["compiled"], "aten::silu") == 0
    of_triton = sum(calls(captured["compiled"], name) for name in captured["code_bytes"])
    others = sum(row["call_count"] for row in captured["eager"]) - 5
    assert 0 < of_triton < others <= captured["captured_count"]


def test_each_kernel_has_machine_code_of_both_vendors(captured: Any) -> None:
    assert captured["code_bytes"]
    assert all(size > 0 for sizes in captured["code_bytes"].values() for size in sizes)


def test_a_kernel_that_does_not_compile_is_named_with_its_target(captured: Any) -> None:
    first = next(iter(captured["code_bytes"]))
    assert captured["refused"].startswith(f"{first} does not compile for sm_1: ")


def test_kernels_of_the_same_name_are_told_apart(captured: Any) -> None:
    """The second kernel of forward is a product, and that of backward is two."""
    assert {"triton_poi_fused_mul_1", "triton_poi_fused_mul_1.2"} <= {*captured["same_names"]}


@pytest.mark.long
def test_the_kernels_compute_what_eager_pytorch_does(tmp_path: Path) -> None:
    for loss_ratio, gradient_ratio in answer("interpreted", tmp_path):
        assert 0 <= loss_ratio < 1e-5
        assert 0 < gradient_ratio < 1e-4


def test_portability_is_the_harmonic_mean_of_efficiencies() -> None:
    assert portability_ratio([0.5, 0.25]) == pytest.approx(1 / 3)
    assert portability_ratio([0.5, None]) == 0  # it does not run on one of them
    assert portability_ratio([]) == 0


def test_a_device_without_a_target_is_refused() -> None:
    args = find("compile").parse(["--devices", "h100-sxm,l4"])
    with pytest.raises(UsageError, match=r"NVIDIA L4.* has no target here: one of nvidia-a100"):
        needs(args, 1, "cpu")
    assert needs(find("compile").parse([]), 1, "cpu").absent == {}
    assert TARGETS["nvidia-h100-sxm"] == "sm_90"
