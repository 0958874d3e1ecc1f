"""Patterns claim no saving that is not there: what recurs, other models, other shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chopper import pipeline
from chopper.analyzers import actions, detectors
from chopper.analyzers.actions import Material
from chopper.analyzers.detectors import Sighting
from chopper.analyzers.detectors.host import initialization_of
from chopper.analyzers.detectors.ranks import uneven_work
from chopper.analyzers.replay.replay import Replay
from chopper.analyzers.views.ranks import Kind, Uneven, Worst
from chopper.reports import actions as report
from tests.analyzers import make
from tests.analyzers.detectors.test_actions import on_host, sent
from tests.analyzers.replay.make import two_ranks
from tests.kineto_writer import Trace

MS = 1_000_000
US = 1_000


def material_of(folder: Path, trace: Trace) -> Material:
    (folder / "trace.json").write_bytes(trace.encode())
    run = pipeline.attribute(folder / "trace.json")
    return Material(run, Replay(run))


def seen_in(folder: Path, name: str, trace: Trace) -> list[Sighting]:
    return [*actions.sightings(name, material_of(folder, trace))]


def calling(name: str, steps: int, *long: int, marked: bool = True) -> Trace:
    """Steps of 100 ms with twenty short launches, and a call of 60 ms in some of them."""
    trace = Trace()
    for i in range(steps):
        at = 100 * MS * i
        if marked:
            trace.step(10 + i, at, 100 * MS)
        if i in long:
            trace.call(name, at, 60 * MS)
        for j in range(20):
            start = at + (61 + j) * MS
            op = trace.op("aten::mm", start, MS // 2)
            trace.launch("gemm", start, 5 * US, kernel_at=start + 9 * US, kernel_for=MS // 2, op=op)
    return trace


@pytest.mark.parametrize("name", ["cudaLaunchKernel", "cudaFree", "cudaMalloc", "cudaHostAlloc"])
@pytest.mark.parametrize(
    ("steps", "long", "said"),
    [
        (6, range(6), None),
        (5, (1, 3), None),
        (2, (0, 1), None),
        (6, (0, 1), "2 calls, the longest NAME of 60.0 ms"),
        (6, (0,), "one NAME call of 60.0 ms"),
        (2, (0,), "one NAME call of 60.0 ms"),
    ],
)
def test_calls_that_recur_in_later_steps_initialize_nothing(
    tmp_path: Path, name: str, steps: int, long: tuple[int, ...], said: str | None
) -> None:
    material = material_of(tmp_path, calling(name, steps, *long))
    found = initialization_of(material.run, material.links)
    assert (found and found.description.replace(name, "NAME")) == said
    titles = [
        report._title(actions._action(material, Replay(material.run), "initialization", seen)[0])
        for seen in actions.sightings("initialization", material)
    ]
    assert [title.partition(": ")[2].replace(name, "NAME") for title in titles] == (
        [] if said is None else [said]
    )


def test_a_window_without_steps_may_have_several_calls_that_initialize(tmp_path: Path) -> None:
    [seen] = seen_in(tmp_path, "initialization", calling("cudaMalloc", 3, 0, 2, marked=False))
    assert seen.evidence["what"] == "2 calls, the longest cudaMalloc of 60.0 ms"


def accumulating(
    steps: int, *, mark: str = "step", updates: tuple[int, ...] = (1,), kernels: bool = False
) -> Trace:
    """Two forward passes and equal reductions in each step, and updates after some of the passes.

    Args:
        steps: of 100 ms.
        mark: ``step`` numbers each; a name is one range around all; "" is none.
        updates: passes of a step after which the optimizer runs.
        kernels: it runs without an annotation, under a phase that the program names.
    """
    trace = Trace(rank=0, world=2)
    collective = {
        "Collective name": "allreduce",
        "dtype": "Float",
        "In msg nelems": 1_000_000,
        "Out msg nelems": 1_000_000,
        "Group size": 2,
        "Process Group Name": "0",
    }
    if mark not in ("", "step"):
        trace.annotation(mark, 0, steps * 100 * MS)
    for i in range(steps):
        if mark == "step":
            trace.step(10 + i, 100 * MS * i, 100 * MS)
        for j in range(2):
            at = 100 * MS * i + 50 * MS * j + MS
            trace.annotation("DistributedDataParallel.forward", at, 5 * MS)
            op = trace.op("aten::mm", at + MS, MS)
            trace.launch("gemm", at + MS, US, kernel_at=at + 2 * MS, kernel_for=10 * MS, op=op)
            op = trace.op("c10d::allreduce_", at + 13 * MS, MS, collective=collective)
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
            begin = at + 13 * MS
            trace.launch(
                name, begin, US, kernel_at=begin + MS, kernel_for=20 * MS, op=op, args=collective
            )
            if j in updates:
                begin = at + 36 * MS
                label = "chopper::phase::optimizer" if kernels else "Optimizer.step#Adam.step"
                trace.annotation(label, begin, 5 * MS)
                op = trace.op("aten::add_", begin + MS, MS)
                trace.launch("add", begin + MS, US, kernel_at=begin + 2 * MS, kernel_for=MS, op=op)
    return trace


@pytest.mark.parametrize(
    ("trace", "is_seen"),
    [
        (accumulating(5), True),
        (accumulating(5, updates=()), True),
        (accumulating(1), True),
        (accumulating(5, updates=(0, 1)), False),
        (accumulating(5, updates=(0, 1), kernels=True), False),
        (accumulating(1, updates=()), False),
        (accumulating(3, mark="", updates=()), False),
        (accumulating(3, mark="train_step", updates=()), False),
        (accumulating(3, mark="train_step", updates=(0, 1)), False),
    ],
    ids=[
        *("accumulates", "other-optimizer", "one-step", "two-models", "two-models-kernels"),
        *("one-step-no-optimizer", "no-steps", "range", "range-with-optimizer"),
    ],
)
def test_reductions_repeat_only_where_no_update_lies_between_them(
    tmp_path: Path, trace: Trace, is_seen: bool
) -> None:
    assert bool(seen_in(tmp_path, "repeated_reductions", trace)) is is_seen


def elementwise(*ops: tuple[str, list[Any] | None], streams: int = 1) -> Trace:
    """Three steps of 10 ms, in which kernels of 1 ms run one after the other on each stream."""
    trace = Trace()
    for i in range(3):
        trace.step(10 + i, 10 * MS * i, 10 * MS)
        for j, (name, shapes) in enumerate(ops):
            for stream in range(streams):
                host, at = 10 * MS * i + (j * streams + stream) * 10 * US, 10 * MS * i + j * MS
                op = trace.op(name, host, 8 * US, shapes=shapes)
                trace.launch(
                    "void at::native::vectorized_elementwise_kernel<4, add>",
                    *(host + US, 2 * US),
                    kernel_at=at + MS,
                    kernel_for=MS - US,
                    op=op,
                    stream=7 + stream,
                )
        trace.call("cudaDeviceSynchronize", 10 * MS * i + MS, 8 * MS)
    return trace


WIDE, TALL = [[1024, 1024], [1024, 1024]], [[4096, 256], [4096, 256]]
ADDS = [("aten::add", WIDE), ("aten::mul", WIDE)]


@pytest.mark.parametrize("streams", [1, 3])
def test_kernels_that_run_at_once_take_their_time_once(tmp_path: Path, streams: int) -> None:
    trace = elementwise(*ADDS * 4, streams=streams)
    material = material_of(tmp_path, trace)
    [seen] = actions.sightings("fusible_kernels", material)
    spent = sum(r.time_ns for r in material.run.leaves() if r.id.startswith("compute.vector."))
    assert seen.evidence["kernels"] == 24 * streams
    assert seen.evidence["share_ratio"] == pytest.approx(spent / material.run.observed_ns)
    assert seen.evidence["share_ratio"] < 1


@pytest.mark.parametrize(
    ("ops", "kernels"),
    [
        ([("aten::add", WIDE), ("aten::mul", TALL)] * 4, 0),
        ([("aten::add", None), ("aten::mul", None)] * 4, 24),
        ([("aten::add", WIDE), ("aten::mul", [[], *WIDE])] * 4, 24),
        ([("aten::_foreach_add_", [WIDE])] * 8, 0),
        ([("aten::_fused_adamw_", [WIDE])] * 8, 0),
        ([("aten::_amp_foreach_non_finite_check_and_unscale_", [WIDE])] * 8, 0),
        ([("aten::fill_", WIDE), ("aten::copy_", WIDE), ("aten::zero_", WIDE)] * 3, 0),
        ([*ADDS, ("aten::fill_", WIDE), *ADDS, ("aten::copy_", WIDE), *ADDS], 18),
    ],
)
def test_kernels_are_fused_where_their_shapes_agree(
    tmp_path: Path, ops: list[tuple[str, list[Any] | None]], kernels: int
) -> None:
    seen = seen_in(tmp_path, "fusible_kernels", elementwise(*ops))
    assert sum(s.evidence["kernels"] for s in seen) == kernels


@pytest.mark.parametrize(
    ("shapes", "left"),
    [
        ([TALL[0]], (1 / 2, 0, 1 / 2)),  # reads one and writes one: what remains is one kernel
        (WIDE, (2 / 3, 1 / 3, 2 / 3)),  # each reads a tensor of its own, too
        ([WIDE[0], [1024]], (1 / 2, 0, 1 / 2)),
        (None, (2 / 3, 1 / 3, 2 / 3)),
    ],
    ids=["unary", "binary", "broadcast", "unknown"],
)
def test_fusion_saves_what_kernels_hand_to_each_other(
    tmp_path: Path, shapes: list[Any] | None, left: tuple[float, ...]
) -> None:
    trace = elementwise(*[("aten::add", shapes)] * 3)
    [seen] = seen_in(tmp_path, "fusible_kernels", trace)
    [(_, left_ns)] = seen.run_ns.values()
    assert (left_ns[:3] / (MS - US)).tolist() == pytest.approx(left, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "ratio", "title"),
    [
        ("uneven_work", 3.0, "Uneven work: rank 1 has 3.0× the work of the others"),
        ("experts", 1.2, "Uneven experts: rank 1 has 1.2× the work of the others"),
        ("ring", 1.5, "Uneven ring: rank 1 has 1.5× the work of the others"),
        ("pipeline", 1.0, "Pipeline bubbles: stages wait for each other"),
        ("pipeline", None, "Pipeline bubbles: stages wait for each other"),
    ],
)
def test_the_title_of_uneven_work_names_the_work_where_that_differs(
    kind: Kind, ratio: float | None, title: str
) -> None:
    product = make.span(0, 10, "aten::mm")
    ranks = on_host(product, *sent(10, 20, "all_reduce", "allreduce_"), until=20)
    run = two_ranks(ranks, ranks)
    worst = Worst(1, 1.0, 1.0, None, 0)
    uneven = Uneven(
        kind=kind, worst=worst, wait_ratio=0.3, work_ratio=ratio, own_ns={0: 10 * MS, 1: 20 * MS}
    )
    material = Material(run, Replay(run))
    [seen] = uneven_work(run, uneven, material.events)
    assert (
        report._Sentence().format(detectors.detector("uneven_work").title, **seen.evidence) == title
    )


def test_an_optimizer_on_single_tensors_would_be_shorter_fused(tmp_path: Path) -> None:
    trace = Trace()
    for i in range(3):
        at = 10 * MS * i
        trace.step(10 + i, at, 10 * MS)
        trace.op("Optimizer.step#Adam.step", at, 10 * MS)
        for j, name in enumerate(("aten::lerp_", "aten::sqrt", "aten::addcdiv_")):
            op = trace.op(name, at + (10 * j + 1) * US, 8 * US, shapes=WIDE)
            kernel = "void at::native::vectorized_elementwise_kernel<4, add>"
            start = at + (j + 1) * 2 * MS
            trace.launch(
                kernel, at + (10 * j + 2) * US, US, kernel_at=start, kernel_for=2 * MS - US, op=op
            )
    [seen] = seen_in(tmp_path, "unfused_optimizer", trace)
    assert seen.evidence["kernels"] == 9
    assert seen.evidence["share_ratio"] > 0.5
