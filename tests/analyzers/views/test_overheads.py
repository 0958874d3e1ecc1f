"""Overheads of each operation: factors that multiply to the observed time, worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from chopper import pipeline
from chopper.views import view
from tests.analyzers.make import kernel, kernels, op, span, spans
from tests.analyzers.views.test_views import attributed, rows_of

MI300X = "AMD Instinct MI300X"
TOKENS, WIDTH, FFN = 8192, 4096, 14336
"""Of b2s4, two sequences of 4096 tokens, and Llama 3 8B."""
IDEAL_NS = 735_867
"""2 · 8192 · 4096 · 14336 = 9.62e11 FLOP at 1307.4 TFLOP/s."""


def product(layer: int, at: int) -> list[dict[str, Any]]:
    """The forward of a block's up projection, which launches one kernel."""
    region = f"chopper::layer::layers.{layer}.ffn.w1"
    bf16 = '["c10::BFloat16", "c10::BFloat16"]'
    shapes = ([TOKENS, WIDTH], [WIDTH, FFN])
    return [
        span(at, at + 1000, region, "user_annotation"),
        op(at + 100, at + 900, "aten::mm", *shapes) | {"input_types": bf16},
        span(at + 200, at + 210, "hipLaunchKernel", "runtime", correlation_id=layer),
    ]


def test_two_blocks_are_one_operation_whose_factors_multiply_to_its_time() -> None:
    host = spans(*product(1, 0), *product(2, 5000))
    device = kernels(
        kernel(1_000, 1_000 + 2 * IDEAL_NS, "Cijk_a", correlation_id=1),
        kernel(2_000_000, 2_000_000 + 3 * IDEAL_NS, "Cijk_a", correlation_id=2),
    )
    [row] = rows_of(attributed(host, device, name=MI300X), "overheads")
    assert (row["module"], row["op"], row["phase"]) == ("layers.*.ffn.w1", "aten::mm", "forward")
    assert row["call_count"] == 2
    assert row["ideal_ns"] == pytest.approx(IDEAL_NS, abs=1)
    assert row["observed_ns"] == pytest.approx(2.5 * IDEAL_NS, abs=1)
    assert row["time_ns"] == 5 * IDEAL_NS
    # Nothing but time is recorded: what others explain is not known, and the rest is all of it.
    assert row["clock_ratio"] is None
    assert row["tensor_core_ratio"] is None
    assert row["instructions_ratio"] is None
    assert row["rest_ratio"] == pytest.approx(2.5, rel=1e-4)
    assert row["reason"] is None
    assert row["input_dims"] is None


def test_without_modules_shapes_tell_operations_apart_and_unknown_work_has_a_reason() -> None:
    def call(at: int, name: str, number: int, *dims: list[int]) -> list[dict[str, Any]]:
        launch = span(at + 10, at + 20, "hipLaunchKernel", "runtime", correlation_id=number)
        return [op(at, at + 100, name, *dims), launch]

    host = spans(
        *call(0, "aten::mm", 1, [512, 512], [512, 512]),
        *call(200, "aten::mm", 2, [256, 512], [512, 512]),
        *call(400, "mine::odd", 3, [4]),
    )
    device = kernels(*(kernel(1000 * i, 1000 * i + 900, correlation_id=i) for i in (1, 2, 3)))
    rows = rows_of(attributed(host, device, name=MI300X), "overheads")
    dims = {(r["op"], r["input_dims"]) for r in rows}
    assert ("aten::mm", "[[512,512],[512,512]]") in dims
    assert ("aten::mm", "[[256,512],[512,512]]") in dims
    odd = next(r for r in rows if r["op"] == "mine::odd")
    assert odd["ideal_ns"] is None
    assert odd["rest_ratio"] is None
    assert odd["reason"] == "no ideal time: Unmodelled kernels"
    # The device waited 100 ns for it, after the call that launched it had returned.
    assert (odd["launch_ns"], odd["preparation_ns"]) == (100, 0)


@pytest.mark.parametrize(
    "name",
    ["kineto/v100-resnet50-dataloader4-2021", "tracelens/mi300x-qwen1.5-0.5b-inference"],
)
def test_on_real_traces_all_computing_time_is_in_it_and_factors_multiply_to_it(
    traces_dir: Path, name: str
) -> None:
    run = pipeline.attribute(pipeline.read(traces_dir / f"{name}.json.gz"))
    rows = view(run, "overheads").to_pylist()
    assert sum(r["time_ns"] for r in rows) == next(
        c.time_ns for c in run.causes() if c.id == "compute"
    )
    known = [r for r in rows if r["ideal_ns"] is not None and r["ideal_ns"] > 1000]
    assert known
    for row in known:
        factors = [row[name] for name in row if name.endswith("_ratio") and row[name] is not None]
        assert min(factors) >= 1
        assert row["ideal_ns"] * math.prod(factors) == pytest.approx(row["observed_ns"], rel=2e-3)
