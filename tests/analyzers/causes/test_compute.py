from __future__ import annotations

from math import log
from typing import Any

import pyarrow as pa
import pytest

from chopper.analyzers.causes.attribute import RankResult
from chopper.hardware.ceilings import Ceiling
from chopper.hardware.devices import DTYPES
from tests.analyzers.make import attributed, by_cause, kernel, kernels, launch, op, span, spans

# 1 FLOP and 1 byte per nanosecond: times can be read off the shapes.
UNIT = Ceiling(flop_per_s=dict.fromkeys(DTYPES, 1e9), memory_bytes_per_s=1e9, source="test")
FAST_MEMORY = Ceiling(flop_per_s=dict.fromkeys(DTYPES, 1e9), memory_bytes_per_s=1e18, source="test")


def attribute(
    host: pa.Table, device: pa.Table, ceiling: Ceiling | None = UNIT
) -> tuple[dict[str, int], RankResult]:
    result = attributed(host, device, ceiling=ceiling)
    # Before the first kernel the device was idle.
    busy = {c: time_ns for c, time_ns in by_cause(result).items() if not c.startswith("idle.")}
    return busy, result


def test_a_product_at_memory_speed_splits_by_the_logarithmic_mean() -> None:
    # mm [10,10]x[10,10]: 2000 FLOP -> 2000 ns; 3*100*4 = 1200 bytes -> 1200 ns: not memory-bound.
    times, _ = attribute(
        spans(op(0, 10, "aten::mm", [10, 10], [10, 10]), launch(5, 1)),
        kernels(kernel(100, 5100, correlation_id=1)),
    )
    assert times == {"compute.ideal": 2000, "compute.efficiency.rest": 3000}


def test_a_memory_bound_product() -> None:
    # mm [100,1]x[1,100]: 20 000 FLOP; (100 + 100 + 10 000)*4 = 40 800 bytes: roofline 40 800 ns.
    # Observed 60 000: gap 40 000 ns, split by ln(40800/20000) : ln(60000/40800).
    times, _ = attribute(
        spans(op(0, 10, "aten::mm", [100, 1], [1, 100]), launch(5, 1)),
        kernels(kernel(100, 60_100, correlation_id=1)),
    )
    roofline = int(40_000 * log(40_800 / 20_000) / log(60_000 / 20_000))
    assert times == {
        "compute.ideal": 20_000,
        "compute.roofline": roofline,
        "compute.efficiency.rest": 40_000 - roofline,
    }


def test_kernels_of_one_operator_share_its_work_by_time() -> None:
    # 2000 FLOP over two kernels of 3000 and 1000 ns.
    times, _ = attribute(
        spans(op(0, 20, "aten::mm", [10, 10], [10, 10]), launch(5, 1), launch(8, 2)),
        kernels(kernel(100, 3100, correlation_id=1), kernel(3100, 4100, correlation_id=2)),
        FAST_MEMORY,
    )
    assert times == {"compute.ideal": 2000, "compute.efficiency.rest": 2000}


def test_the_innermost_modelled_operator_counts_once() -> None:
    times, _ = attribute(
        spans(
            op(0, 30, "aten::linear", [10, 10], [10, 10]),
            op(2, 28, "aten::mm", [10, 10], [10, 10]),
            launch(5, 1),
        ),
        kernels(kernel(100, 4100, correlation_id=1)),
    )
    assert times["compute.ideal"] == 2000


def test_faster_than_the_peak_is_capped_and_said() -> None:
    # 2 000 000 FLOP need 2 ms at this peak; the kernel claims 50 µs.
    times, result = attribute(
        spans(op(0, 10, "aten::mm", [100, 100], [100, 100]), launch(5, 1)),
        kernels(kernel(100, 50_100, correlation_id=1)),
    )
    assert times == {"compute.ideal": 50_000}
    assert [f.count for f in result.findings if f.code == "compute.above_peak"] == [1]


def test_memory_bound_work_at_and_above_its_roofline() -> None:
    # add of two [100]: reads 800 bytes, writes 400: 1200 ns.
    times, _ = attribute(
        spans(op(0, 10, "aten::add", [100], [100]), launch(5, 1)),
        kernels(kernel(100, 2100, correlation_id=1)),
    )
    assert times == {"compute.vector.roofline": 1200, "compute.vector.excess": 800}


@pytest.mark.parametrize(
    ("around", "expected"),
    [
        ([span(0, 50, "Optimizer.step#AdamW.step", "annotation")], "compute.optimizer"),
        (
            [
                span(0, 50, "autograd::engine::evaluate_function: AddBackward0"),
                span(1, 45, "aten::linear", sequence_id=9, forward_tid=0),
                span(46, 49, "aten::mul"),
            ],
            "compute.recompute",
        ),
        ([span(0, 50, "chopper::recompute::layers.3.w1")], "compute.recompute"),
    ],
)
def test_work_that_is_not_model_math(around: list[dict[str, Any]], expected: str) -> None:
    times, _ = attribute(
        spans(*around, op(5, 40, "aten::mm", [10, 10], [10, 10]), launch(6, 1)),
        kernels(kernel(100, 5100, correlation_id=1)),
    )
    assert times == {expected: 5000}


def test_fsdp_copies_are_told_by_where_they_happen() -> None:
    times, _ = attribute(
        spans(
            span(0, 20, "FSDP::all_gather_copy_out", "annotation"),
            op(2, 10, "aten::copy_", [10], [10]),
            launch(5, 1),
            op(30, 40, "aten::copy_", [10], [10]),
            launch(35, 2),
        ),
        kernels(kernel(100, 200, correlation_id=1), kernel(200, 300, correlation_id=2)),
    )
    assert times["compute.fsdp_copy"] == 100
    assert times["compute.vector.roofline"] == 80


def test_concurrent_products_keep_their_whole_work() -> None:
    # Two products of 2000 FLOP run side by side for 4000 ns: 4000 ns of ideal in 4000 ns of time.
    times, _ = attribute(
        spans(
            op(0, 10, "aten::mm", [10, 10], [10, 10]),
            launch(5, 1),
            op(20, 30, "aten::mm", [10, 10], [10, 10]),
            launch(25, 2),
        ),
        kernels(kernel(100, 4100, correlation_id=1), kernel(100, 4100, correlation_id=2, stream=8)),
        FAST_MEMORY,
    )
    assert times == {"compute.ideal": 4000}


def test_an_operator_above_is_not_asked_for_what_another_below_it_told() -> None:
    # matmul [10,10]x[10,10] over an mm that recorded its shapes and a bmm that did not.
    times, _ = attribute(
        spans(
            op(0, 100, "aten::matmul", [10, 10], [10, 10]),
            op(10, 20, "aten::mm", [10, 10], [10, 10]),
            launch(12, 1),
            span(30, 40, "aten::bmm"),
            launch(32, 2),
        ),
        kernels(kernel(200, 4200, correlation_id=1), kernel(4200, 8200, correlation_id=2)),
        FAST_MEMORY,
    )
    assert times["compute.ideal"] == 2000
    assert times["compute.no_peak"] == 4000


def test_the_forward_inside_an_optimizer_closure_is_no_optimizer_work() -> None:
    # LBFGS: two closures with its own math between them, which no backward goes through.
    def closure(at: int, sequence: int) -> list[Any]:
        return [
            op(at + 10, at + 20, "aten::mm", [10, 10], [10, 10], sequence_id=sequence),
            launch(at + 12, sequence),
            span(
                at + 40,
                at + 60,
                "autograd::engine::evaluate_function: MmBackward0",
                tid=2,
                sequence_id=sequence,
                forward_tid=1,
            ),
        ]

    times, _ = attribute(
        spans(
            span(0, 500, "Optimizer.step#LBFGS.step", "annotation"),
            *closure(0, 1),
            op(100, 110, "aten::add", [100], [100]),
            launch(105, 3),
            *closure(200, 2),
            op(300, 310, "aten::add", [100], [100]),
            launch(305, 4),
        ),
        kernels(
            kernel(1000, 3000, correlation_id=1),
            kernel(3000, 4000, correlation_id=3),
            kernel(4000, 6000, correlation_id=2),
            kernel(6000, 7000, correlation_id=4),
        ),
    )
    assert times == {"compute.ideal": 4000, "compute.optimizer": 2000}


def test_the_longest_kernel_tells_the_arithmetic_of_all_of_its_operator() -> None:
    # fp32 runs at a tenth of tf32's rate: the split-K helper's name says nothing of its own.
    rates = {"fp32": 1e8, "tf32": 1e9}
    times, result = attribute(
        spans(op(0, 20, "aten::mm", [10, 10], [10, 10]), launch(5, 1), launch(8, 2)),
        kernels(
            kernel(100, 1900, "ampere_sgemm_tf32_128x128", correlation_id=1),
            kernel(1900, 2100, "splitKreduce_kernel<float>", correlation_id=2),
        ),
        Ceiling(rates, None, "test"),
    )
    assert times["compute.ideal"] == 2000
    assert "compute.above_peak" not in [f.code for f in result.findings]
