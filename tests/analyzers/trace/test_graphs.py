"""Kernels that graphs replay: their operators are those of the captured calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from tests.kineto_writer import TODAY, Trace

GEMM, ADD = "ampere_fp16_s16816gemm_fp16_128x64_f2f_stages_32x6_tn", "vectorized_elementwise_kernel"
OPERATORS = (("aten::mm", [[64, 64], [64, 64]], GEMM), ("aten::add", [[64, 64], [64, 64]], ADD))
"""Operators of the model, their shapes and kernels."""


def captured(
    path: Path,
    replays: Sequence[Sequence[str]],
    *,
    captures: int = 1,
    numbered: bool = True,
    streams: int = 1,
    started: bool = False,
) -> Attribution:
    """Attribute a trace of a model that is captured, and of replays that ran some kernels."""
    trace = Trace(dialect=TODAY)
    at = 1_000
    for number in range(captures):
        trace.call("cudaStreamBeginCapture", at, 100)
        trace.python("nn.Module: Block_0", at + 200, 4_500)
        for name, shapes, _ in OPERATORS:
            shapes = [[n * (number + 1) for n in shape] for shape in shapes]
            trace.op(name, at + 400, 1_000, shapes=shapes)
            trace.call("cudaLaunchKernel", at + 600, 100)
            at += 2_000
        if started:
            trace.launch("other", at, 50, kernel_at=at + 300, kernel_for=100)
        trace.call("cudaStreamEndCapture", at + 2_000, 100)
        at += 4_000
    device_at = at + 20_000
    for step, kernels in enumerate(replays):
        trace.step(step, at, 9_000)
        correlation = trace.call("cudaGraphLaunch", at + 1_000, 500)
        for node, name in enumerate(kernels):
            numbers: dict[str, Any] = {"graph id": 3, "graph node id": 70 + node}
            trace.work(
                "kernel",
                name,
                device_at + 2_000 * node,
                1_500,
                correlation,
                stream=7 + node % streams,
                args=numbers if numbered else {},
            )
        device_at += 30_000
        at += 10_000
    path.write_bytes(trace.encode())
    return pipeline.attribute(path)


def operators(run: Attribution) -> list[str | None]:
    ops: list[str | None] = run.links[0]["op"].to_pylist()
    return ops


def test_a_replay_has_the_operators_of_its_capture(tmp_path: Path) -> None:
    run = captured(tmp_path / "trace.json", [[GEMM, ADD]] * 3)
    assert operators(run) == ["aten::mm", "aten::add"] * 3
    assert run.coverage["operator_known_ratio"] == 1.0
    # Each replay is the operator's work again: 2·64³ FLOP.
    assert run.work[0].work_flop[::2].tolist() == [2 * 64**3] * 3
    assert [f.code for f in run.findings if f.code.startswith("graph")] == []
    # Steps are those of the replays.
    assert run.links[0]["step_index"].to_pylist() == [0, 0, 1, 1, 2, 2]


def test_nothing_is_guessed_where_counts_differ(tmp_path: Path) -> None:
    run = captured(tmp_path / "trace.json", [[GEMM, ADD, ADD]] * 2)
    assert operators(run) == [None] * 6
    [found] = [f for f in run.findings if f.code == "graph.without_capture"]
    assert found.count == 6
    assert "several could be meant" in found.message


def test_a_launch_that_starts_its_own_kernel_is_not_captured(tmp_path: Path) -> None:
    run = captured(tmp_path / "trace.json", [[GEMM, ADD]], started=True)
    assert operators(run)[-2:] == ["aten::mm", "aten::add"]
    run = captured(tmp_path / "other.json", [[GEMM, ADD, ADD]], started=True)
    assert operators(run)[-3:] == [None] * 3


def test_two_captures_of_other_shapes_are_not_told_apart(tmp_path: Path) -> None:
    run = captured(tmp_path / "trace.json", [[GEMM, ADD]], captures=2)
    assert operators(run) == [None] * 2


@pytest.mark.parametrize(("streams", "expected"), [(1, ["aten::mm", "aten::add"]), (2, [None] * 2)])
def test_without_node_numbers_one_stream_keeps_the_order(
    tmp_path: Path, streams: int, expected: list[str | None]
) -> None:
    run = captured(tmp_path / "trace.json", [[GEMM, ADD]], numbered=False, streams=streams)
    assert operators(run) == expected
