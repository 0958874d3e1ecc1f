from __future__ import annotations

from typing import Any

from chopper.analyzers.trace.join import WORK_CLASSES
from chopper.analyzers.trace.phases import PHASES
from chopper.analyzers.trace.rank_join import JoinedRank
from chopper.tables import TABLES
from tests.analyzers.make import joined, kernel, kernels, span, spans, steps


def launch(at: int, correlation: int, **more: Any) -> dict[str, Any]:
    return span(at, at + 1, "cudaLaunchKernel", "runtime", correlation_id=correlation, **more)


def column(rank: JoinedRank, name: str) -> list[Any]:
    values: list[Any] = rank.event_link[name].to_pylist()
    return values


def test_a_kernel_finds_its_launch_operator_annotation_layer_and_step() -> None:
    links = joined(
        spans(
            span(0, 100, "ProfilerStep#3", "annotation"),
            span(1, 90, "my region", "annotation"),
            span(2, 80, "chopper::layer::layers.2.attention.wq"),
            span(10, 70, "aten::linear"),
            span(20, 60, "aten::addmm"),
            launch(30, 1),
        ),
        kernels(kernel(200, 300, correlation_id=1)),
        steps((0, 100), first=3),
    )
    assert column(links, "op") == ["aten::addmm"]
    assert column(links, "annotation") == ["my region"]
    assert column(links, "layer") == ["layers.2"]
    assert column(links, "phase") == ["forward"]
    assert column(links, "step_index") == [0]


def test_backward_inherits_the_layer_through_the_sequence_number() -> None:
    # view made no node: it shares number 7 with the mm of the next layer, which did.
    links = joined(
        spans(
            span(0, 40, "chopper::layer::layers.0"),
            span(5, 10, "aten::mm", sequence_id=6),
            span(20, 30, "aten::view", sequence_id=7),
            span(50, 80, "chopper::layer::layers.1"),
            span(55, 60, "aten::mm", sequence_id=7),
            span(
                100,
                130,
                "autograd::engine::evaluate_function: MmBackward0",
                tid=2,
                sequence_id=7,
                forward_tid=1,
            ),
            span(105, 125, "aten::mm", tid=2),
            launch(110, 1, tid=2),
        ),
        kernels(kernel(200, 300, correlation_id=1)),
    )
    assert column(links, "layer") == ["layers.1"]
    assert column(links, "phase") == ["backward"]


def test_after_backward_comes_other_until_the_optimizer() -> None:
    links = joined(
        spans(
            span(0, 500, "ProfilerStep#0", "annotation"),
            span(10, 20, "aten::mm"),
            launch(12, 1),
            span(100, 200, "autograd::engine::evaluate_function: MmBackward0", tid=2),
            launch(150, 2, tid=2),
            span(250, 260, "aten::linalg_vector_norm"),
            launch(255, 3),
            span(300, 400, "Optimizer.step#AdamW.step", "annotation"),
            launch(310, 4),
        ),
        kernels(*(kernel(1000 + i, 1001 + i, correlation_id=i) for i in (1, 2, 3, 4))),
        steps((0, 500)),
    )
    assert column(links, "phase") == ["forward", "backward", "other", "optimizer"]


def test_classes_by_name_and_kind() -> None:
    names = {
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "communication",
        "rcclGenericKernel": "communication",
        "multimem_all_reduce_kernel": "communication",
        "void two_shot_all_reduce_kernel<float>": "communication",
        "void deep_ep::intranode::dispatch<8>": "communication",
        "nvshmemi_transfer": "communication",
        "__amd_rocclr_copyBuffer": "copy",
        "void cutlass::BlockAllReduceSoftmax": "compute",
        "void dma_Sync_kernel()": "compute",
        "split_with_sizes_copy_out_contiguous": "compute",
    }
    links = joined(
        TABLES["host_span"].empty(),
        kernels(*(kernel(i * 10, i * 10 + 5, n) for i, n in enumerate(names))),
    )
    assert column(links, "work_class") == list(names.values())
    assert [WORK_CLASSES[c] for c in links.links().work_class] == list(names.values())
    assert set(column(links, "phase")) <= set(PHASES)


def test_a_reused_correlation_id_takes_the_latest_launch_before_the_kernel() -> None:
    links = joined(
        spans(launch(10, 5), launch(1000, 5)),
        kernels(kernel(20, 30, correlation_id=5), kernel(1010, 1020, correlation_id=5)),
    )
    assert column(links, "launch_row") == [0, 1]


def test_without_a_launch_the_recorded_id_names_the_operator() -> None:
    links = joined(
        spans(span(0, 50, "aten::mm", external_id=44), span(60, 70, "aten::add", external_id=45)),
        kernels(
            kernel(100, 110, correlation_id=1, external_id=44),
            # A number that merely repeats the correlation id names nothing.
            kernel(120, 130, correlation_id=45, external_id=45),
        ),
    )
    assert column(links, "op") == ["aten::mm", None]
    assert column(links, "launch_row") == [None, None]


def test_a_launch_outside_of_any_operator_leaves_the_recorded_id() -> None:
    """The runtime's rows may be of another thread, or a moment late, than the operator's."""
    links = joined(
        spans(
            span(0, 200, "ProfilerStep#3", "annotation"),
            span(5, 90, "chopper::layer::layers.1"),
            span(10, 50, "aten::mm", external_id=44),
            span(120, 150, "aten::add", external_id=45),
            launch(20, 1, tid=9),
            launch(60, 2),
            # Some recorders write the id beside the launch only.
            launch(70, 3, external_id=44),
            # An operator that begins after its kernel did not launch it.
            launch(80, 4, tid=9),
            # The launch speaks for itself.
            launch(130, 5),
        ),
        kernels(
            kernel(100, 110, correlation_id=1, external_id=44),
            kernel(110, 120, correlation_id=2, external_id=44),
            kernel(120, 130, correlation_id=3),
            kernel(130, 140, correlation_id=4, external_id=46),
            kernel(160, 170, correlation_id=5, external_id=44),
        ),
        steps((0, 200), first=3),
    )
    assert column(links, "op") == ["aten::mm", "aten::mm", "aten::mm", None, "aten::add"]
    assert column(links, "layer")[:2] == ["layers.1", "layers.1"]
    assert None not in column(links, "launch_row")
