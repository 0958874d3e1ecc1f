"""Phases of what a trace shows, by the names that PyTorch gave in its versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from chopper import pipeline
from chopper.causes import CAUSES
from tests.analyzers.make import joined, span, spans, steps
from tests.kineto_writer import Trace

US = 1_000
NODE = "autograd::engine::evaluate_function: "


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
    own = {group.key: group.own_ns for group in pipeline.attribute(tmp_path).by("phase")}
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
    own = {group.key: group.own_ns for group in pipeline.attribute(tmp_path).by("phase")}
    assert own["forward"] == 90 * US
    assert own["backward"] == 180 * US


@pytest.mark.parametrize("gradients", [True, False])
def test_a_function_applied_within_backward_is_recomputed_only_where_gradients_are_recorded(
    gradients: bool,
) -> None:
    """``apply`` has a sequence number in any grad mode; an operator has one only with gradients.

    The node's gradient is accumulated without one either way, as with two micro-batches.
    """
    rank = joined(
        spans(
            span(0, 1000, "ProfilerStep#0", "annotation"),
            span(10, 100, "_AlltoAllSingle", sequence_id=3),
            span(200, 800, NODE + "_AlltoAllSingleBackward", sequence_id=3, forward_tid=1),
            span(210, 250, "aten::mul", sequence_id=4 if gradients else None),
            span(300, 600, "_AlltoAllSingle", sequence_id=5),
            span(310, 590, "c10d::alltoall_base_"),
            span(650, 700, "aten::add"),
        ),
        step=steps((0, 1000)),
    )
    links = rank.links()
    phase = {
        (start, links.phases[code])
        for start, code in zip(links.host.start_ns.tolist(), rank.span_phase, strict=True)
    }
    expected = "recompute" if gradients else "backward"
    assert {(300, expected), (310, expected), (650, "backward")} <= phase
    assert rank.double_backward_count == 0


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
    phases = {group.key: group.causes for group in pipeline.attribute(tmp_path).by("phase")}
    assert phases["data"] == {"idle.preparation.data": 2 * 400 * US}


def test_no_cause_is_called_after_a_framework_that_may_not_be_there() -> None:
    frameworks = ("FSDP", "DDP", "ZeRO", "DeepSpeed", "Megatron", "NCCL", "RCCL", "CUDA", "HIP")
    named = [c.label for c in CAUSES.values() if any(f in c.label for f in frameworks)]
    assert named == []
