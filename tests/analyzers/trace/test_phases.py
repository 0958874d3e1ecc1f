"""Phases of what a trace shows, by the names that PyTorch gave in its versions."""

from __future__ import annotations

from pathlib import Path

import pytest

import chopper
from chopper.causes import CAUSES
from tests.kineto_writer import Trace

US = 1_000


@pytest.mark.parametrize(
    "node",
    [
        "autograd::engine::evaluate_function: AddmmBackward0",
        "AddmmBackward0",
        "AddmmBackward",  # PyTorch 1.8
    ],
)
def test_what_a_backward_node_launches_is_backward(tmp_path: Path, node: str) -> None:
    trace = Trace()
    trace.step(0, 0, 1_000 * US)
    forward = trace.op("aten::addmm", 0, 100 * US, sequence=1)
    trace.launch("gemm", 10 * US, 10 * US, kernel_at=30 * US, kernel_for=90 * US, op=forward)
    trace.op(node, 200 * US, 100 * US, sequence=1, forward_tid=trace.tid, tid=99)
    op = trace.op("aten::mm", 205 * US, 90 * US, tid=99)
    trace.tid = 99
    trace.launch("gemm_t", 210 * US, 10 * US, kernel_at=230 * US, kernel_for=180 * US, op=op)
    (tmp_path / "trace.json").write_bytes(trace.encode())
    own = {group.key: group.own_ns for group in chopper.attribute(tmp_path).by("phase")}
    assert own["forward"] == 90 * US
    assert own["backward"] == 180 * US


def test_a_region_called_forward_backward_is_no_backward_node(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 1_000 * US)
    trace.annotation("ForwardBackward", 0, 300 * US)
    forward = trace.op("aten::addmm", 5 * US, 100 * US, sequence=1)
    trace.launch("gemm", 10 * US, 10 * US, kernel_at=30 * US, kernel_for=90 * US, op=forward)
    node = trace.op("AddmmBackward0", 200 * US, 100 * US, sequence=1, forward_tid=trace.tid, tid=99)
    trace.tid = 99
    trace.launch("gemm_t", 210 * US, 10 * US, kernel_at=230 * US, kernel_for=180 * US, op=node)
    (tmp_path / "trace.json").write_bytes(trace.encode())
    own = {group.key: group.own_ns for group in chopper.attribute(tmp_path).by("phase")}
    assert own["forward"] == 90 * US
    assert own["backward"] == 180 * US


def test_the_time_in_a_loaders_next_is_the_data_phase(tmp_path: Path) -> None:
    trace = Trace()
    for number in range(2):
        at = number * 1_000 * US
        trace.step(number, at, 1_000 * US)
        loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        trace.op(loader, at + 10 * US, 400 * US)
        op = trace.op("aten::mm", at + 420 * US, 50 * US)
        start = at + 440 * US
        trace.launch("gemm", at + 425 * US, 5 * US, kernel_at=start, kernel_for=500 * US, op=op)
    (tmp_path / "trace.json").write_bytes(trace.encode())
    phases = {group.key: group.causes for group in chopper.attribute(tmp_path).by("phase")}
    assert phases["data"] == {"idle.preparation.data": 2 * 400 * US}


def test_no_cause_is_called_after_a_framework_that_may_not_be_there() -> None:
    frameworks = ("FSDP", "DDP", "ZeRO", "DeepSpeed", "Megatron", "NCCL", "RCCL", "CUDA", "HIP")
    named = [c.label for c in CAUSES.values() if any(f in c.label for f in frameworks)]
    assert named == []
