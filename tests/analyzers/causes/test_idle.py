from __future__ import annotations

from typing import Any

import pytest

from chopper.analyzers.causes.attribute import RankResult
from chopper.tables import TABLES
from tests.analyzers.make import attributed, joined, kernel, kernels, span, spans, steps


def gaps(result: RankResult) -> list[tuple[int, int, str]]:
    """Gaps of the steps, or of a trace without any between its first device event and its last."""
    rows: list[dict[str, Any]] = result.gap.to_pylist()
    if result.window["number"].null_count:
        rows = [g for g in rows if g["event_row"] != 0 and g["cause"] != "idle.no_step"]
    return [(g["start_ns"], g["end_ns"], g["cause"].removeprefix("idle.")) for g in rows]


def sums_of(result: RankResult) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in result.piece.to_pylist():
        found[row["cause"]] = found.get(row["cause"], 0) + row["time_ns"]
    return found


def launch(at: int, end: int, correlation: int, **more: Any) -> dict[str, Any]:
    return span(at, end, "cudaLaunchKernel", "runtime", correlation_id=correlation, **more)


def test_the_host_was_late_and_what_it_did() -> None:
    # Kernel 1 ends at 100. The host: data loading until 150, Python until 170 (inside the step
    # only), operator from 170, its launch call [190, 198], kernel 2 starts at 200.
    host = spans(
        span(0, 1000, "ProfilerStep#0", "annotation"),
        launch(10, 15, 1),
        span(90, 150, "enumerate(DataLoader)#_Iter.__next__", "annotation"),
        span(170, 220, "aten::relu"),
        launch(190, 198, 2),
    )
    device = kernels(kernel(50, 100, correlation_id=1), kernel(200, 260, correlation_id=2))
    assert gaps(attributed(host, device)) == [
        (100, 150, "preparation.data"),
        (150, 170, "preparation.python"),
        (170, 190, "preparation.dispatch"),
        (190, 198, "call"),
        (198, 200, "launch_latency"),
    ]


def test_the_device_waited_on_itself() -> None:
    # Both launched early. Kernel 2 follows on the same stream: launch latency. Kernel 3 is on
    # another stream than what ended before it: a dependency.
    host = spans(launch(1, 2, 1), launch(3, 4, 2), launch(5, 6, 3))
    device = kernels(
        kernel(10, 20, correlation_id=1),
        kernel(25, 40, correlation_id=2),
        kernel(48, 60, correlation_id=3, stream=9),
    )
    assert gaps(attributed(host, device)) == [
        (20, 25, "launch_latency"),
        (40, 48, "dependency"),
    ]


def test_only_a_stream_that_was_told_to_wait_depends_on_another() -> None:
    # Stream 9 is told to wait for an event before kernel 4, not before kernel 2: what kept kernel 2
    # was the device itself. Kernel 5 was launched when everything before it had ended, and the call
    # that launched kernel 6 returned only then.
    host = spans(
        launch(1, 2, 1),
        launch(3, 4, 2),
        launch(5, 6, 3),
        span(7, 8, "cudaStreamWaitEvent", "runtime", correlation_id=9),
        launch(9, 10, 4),
        launch(105, 110, 5),
        span(111, 112, "cudaStreamWaitEvent", "runtime", correlation_id=9),
        launch(113, 130, 6),
    )
    device = kernels(
        kernel(12, 20, correlation_id=1, stream=9),
        kernel(20, 24, correlation_id=3),
        kernel(30, 40, correlation_id=2, stream=9),
        kernel(40, 60, correlation_id=3),
        kernel(70, 90, correlation_id=4, stream=9),
        kernel(115, 120, correlation_id=5),
        kernel(140, 150, correlation_id=6, stream=9),
    )
    assert gaps(attributed(host, device)) == [
        (24, 30, "launch_latency"),
        (60, 70, "dependency"),
        (90, 105, "preparation.unobserved"),
        (105, 110, "call"),
        (110, 115, "launch_latency"),
        (120, 130, "call"),
        (130, 140, "launch_latency"),
    ]


def test_synchronization_allocator_gc_and_runtime() -> None:
    host = spans(
        span(0, 1000, "ProfilerStep#0", "annotation"),
        launch(1, 2, 1),
        span(100, 200, "aten::item"),
        span(110, 190, "cudaStreamSynchronize", "runtime", correlation_id=77),
        span(200, 260, "cudaMalloc", "runtime", correlation_id=78),
        span(260, 300, "gc", "gc"),
        span(300, 330, "cudaEventRecord", "runtime", correlation_id=79),
        span(330, 350, "overhead", "overhead"),
        launch(350, 360, 2),
    )
    device = kernels(kernel(10, 100, correlation_id=1), kernel(380, 390, correlation_id=2))
    assert gaps(attributed(host, device)) == [
        (100, 200, "preparation.synchronization"),
        (200, 260, "preparation.allocator"),
        (260, 300, "preparation.gc"),
        (300, 330, "preparation.runtime"),
        (330, 350, "preparation.profiler"),
        (350, 360, "call"),
        (360, 380, "launch_latency"),
    ]


def test_overhead_whose_thread_is_not_told_is_of_the_thread_that_works() -> None:
    # CUPTI's overhead comes as of process -1. A buffer is asked for inside an operator; code is
    # loaded, which the driver does without a profiler too; a flush may be on a thread of its own;
    # waiting for the device stays what it was.
    host = spans(
        span(0, 1000, "ProfilerStep#0", "annotation"),
        launch(1, 2, 1),
        span(100, 200, "aten::mul"),
        span(120, 150, "Activity Buffer Request", "overhead", pid=-1, tid=0),
        span(160, 175, "Lazy Function Loading", "overhead", pid=-1, tid=0),
        span(180, 190, "Buffer Flush", "overhead", pid=-1, tid=0),
        span(205, 230, "cudaStreamSynchronize", "runtime", correlation_id=78),
        span(210, 220, "Activity Buffer Request", "overhead", pid=-1, tid=0),
        launch(230, 240, 2),
    )
    device = kernels(kernel(10, 100, correlation_id=1), kernel(250, 260, correlation_id=2))
    assert gaps(attributed(host, device)) == [
        (100, 120, "preparation.dispatch"),
        (120, 150, "preparation.profiler"),
        (150, 160, "preparation.dispatch"),
        (160, 175, "preparation.runtime"),
        (175, 200, "preparation.dispatch"),
        (200, 205, "preparation.python"),
        (205, 230, "preparation.synchronization"),
        (230, 240, "call"),
        (240, 250, "launch_latency"),
    ]


def test_a_kernel_without_a_launch_leaves_its_gap_unexplained() -> None:
    host = spans(launch(1, 2, 1))
    device = kernels(kernel(10, 20, correlation_id=1), kernel(50, 60, correlation_id=99))
    assert gaps(attributed(host, device)) == [(20, 50, "unlaunched")]


def test_backward_is_launched_by_another_thread() -> None:
    # The main thread waits inside backward (nothing but the step is open); the autograd thread
    # starts working at 140. Before that, only the main thread can say what happened: dispatch.
    host = spans(
        span(0, 1000, "ProfilerStep#0", "annotation"),
        launch(1, 2, 1),
        span(100, 130, "aten::mean"),
        span(140, 300, "autograd::engine::evaluate_function: MeanBackward0", tid=2),
        launch(180, 185, 2, tid=2),
    )
    device = kernels(kernel(10, 100, correlation_id=1), kernel(190, 200, correlation_id=2))
    assert gaps(attributed(host, device)) == [
        (100, 130, "preparation.dispatch"),
        (130, 140, "preparation.python"),
        (140, 180, "preparation.dispatch"),
        (180, 185, "call"),
        (185, 190, "launch_latency"),
    ]


def test_the_first_window_begins_with_the_host_step() -> None:
    host = spans(span(0, 100, "ProfilerStep#4", "annotation"), launch(30, 35, 1))
    device = kernels(kernel(40, 90, correlation_id=1))
    result = attributed(host, device, steps((0, 100), first=4))
    assert gaps(result) == [
        (0, 30, "preparation.python"),
        (30, 35, "call"),
        (35, 40, "launch_latency"),
    ]
    assert result.observed_ns == 90
    assert result.window.to_pylist()[0]["number"] == 4


def test_a_host_only_run_computes_in_its_operators() -> None:
    # linear holds addmm: only addmm works; as_strided touches no data; the loader's own
    # operators are data loading, not the model's work.
    host = spans(
        span(0, 1000, "ProfilerStep#0", "annotation"),
        span(10, 100, "enumerate(DataLoader)#_Iter.__next__", "annotation"),
        span(20, 90, "aten::stack"),
        span(100, 200, "aten::linear"),
        span(110, 115, "aten::t"),
        span(120, 190, "aten::addmm"),
        span(125, 126, "aten::as_strided"),
        span(300, 400, "gloo:all_reduce", "annotation", tid=9),
    )
    result = attributed(host, step=steps((0, 1000)))
    derived = joined(host, TABLES["device_event"].empty()).device_event.to_pylist()
    events = [(e["name"], e["start_ns"], e["dur_ns"]) for e in derived]
    assert events == [("aten::addmm", 120, 70), ("gloo:all_reduce", 300, 100)]
    assert gaps(result) == [
        (0, 10, "preparation.python"),
        (10, 100, "preparation.data"),
        (100, 120, "preparation.dispatch"),
        (190, 200, "preparation.dispatch"),
        (200, 300, "preparation.python"),
    ]
    assert result.observed_ns == 400


def test_a_call_that_blocks_is_the_call_even_when_it_began_before_the_gap() -> None:
    host = spans(launch(1, 2, 1), launch(90, 480, 2))
    device = kernels(kernel(10, 100, correlation_id=1), kernel(500, 510, correlation_id=2))
    assert gaps(attributed(host, device)) == [(100, 480, "call"), (480, 500, "launch_latency")]


@pytest.mark.parametrize(
    ("copy", "call", "waits"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "cudaMemcpyAsync", True),
        ("Memcpy DtoH (Device -> Pageable)", "cudaMemcpyAsync", True),
        ("Memcpy HtoD (Pinned -> Device)", "cudaMemcpy", True),
        ("CopyDeviceToHost", "hipMemcpyAsync", True),
        ("CopyHostToDevice", "hipMemcpyWithStream", True),
        # A copy of pinned memory does not hold up its call, which was only slow.
        ("Memcpy HtoD (Pinned -> Device)", "cudaMemcpyAsync", False),
        ("Memcpy DtoH (Device -> Pinned)", "cudaMemcpyAsync", False),
        ("CopyHostToDevice", "hipMemcpyAsync", False),
    ],
)
def test_a_copy_call_that_returns_after_its_copy_waited_for_it(
    copy: str, call: str, waits: bool
) -> None:
    host = spans(
        span(0, 1000, "ProfilerStep#0", "annotation"),
        launch(1, 2, 1),
        span(100, 310, call, "runtime", correlation_id=2),
        launch(320, 325, 3),
    )
    device = kernels(
        kernel(10, 100, correlation_id=1),
        kernel(200, 300, copy, correlation_id=2, kind="memcpy"),
        kernel(330, 340, correlation_id=3),
    )
    assert gaps(attributed(host, device)) == [
        (100, 200, "call"),
        (300, 310, "preparation.synchronization" if waits else "preparation.runtime"),
        (310, 320, "preparation.python"),
        (320, 325, "call"),
        (325, 330, "launch_latency"),
    ]


def test_a_function_of_the_programs_own_is_python_around_its_operators() -> None:
    def idle(node: str) -> dict[str, int]:
        host = spans(
            span(0, 1000, "ProfilerStep#0", "annotation"),
            span(0, 100, "AddmmBackward0"),
            span(0, 100, "aten::mm"),
            span(100, 900, node),
            span(800, 900, "aten::mul"),
        )
        return sums_of(attributed(host, None, steps((0, 1000))))

    assert idle("SlowBackward")["idle.preparation.python"] == 700
    assert idle("SlowBackward0")["idle.preparation.dispatch"] == 700


def test_what_ends_the_trace_is_not_the_programs() -> None:
    host = spans(span(0, 400, "aten::mm"), span(500, 900, "chopper::end", "annotation"))
    [window] = attributed(host, None).window.to_pylist()
    assert (window["start_ns"], window["end_ns"]) == (0, 500)
