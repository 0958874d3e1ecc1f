"""From operators to device events: whose work a kernel does, what is known without an operator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper import pipeline
from chopper.analyzers.causes.event_work import (
    EventWork,
    event_work,
    main_cause,
    operator_work,
)
from chopper.analyzers.causes.repeated_kernels import match_instances
from chopper.analyzers.trace import names
from chopper.analyzers.trace.join import Links
from chopper.analyzers.trace.tables import DeviceEvents
from chopper.analyzers.views.works import CAUSES
from chopper.analyzers.work.kernels import element_bytes, kernel_families
from chopper.causes import LEAVES
from chopper.hardware.ceilings import Ceiling
from chopper.hardware.devices import DTYPES, lookup
from chopper.tables import TABLES
from chopper.views import view
from tests.analyzers.make import joined as joined_tables
from tests.analyzers.make import kernel, kernels, span, spans

# 1 FLOP and 1 byte per nanosecond: times can be read off the shapes.
UNIT = Ceiling(flop_per_s=dict.fromkeys(DTYPES, 1e9), memory_bytes_per_s=1e9, source="test")
FAST_MEMORY = Ceiling(flop_per_s=dict.fromkeys(DTYPES, 1e9), memory_bytes_per_s=1e18, source="test")
HALF = "c10::BFloat16"
GEMM = "ampere_sgemm_128x64_nn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, 2>"


def works(
    host: pa.Table, device: pa.Table, ceiling: Ceiling | None = FAST_MEMORY
) -> tuple[Links, EventWork]:
    links = joined_tables(
        host,
        device,
        TABLES["step"].empty(),
        TABLES["collective"].empty(),
    ).links()
    return links, event_work(links, ceiling)


def causes(links: Links, work: EventWork) -> list[str]:
    return [LEAVES[code] for code in main_cause(links, work)]


def op(start: int, end: int, name: str, *dims: list[int], **more: Any) -> dict[str, Any]:
    typed = {"input_types": json.dumps(["float"] * len(dims))}
    return span(start, end, name, input_dims=json.dumps(dims), **(typed | more))


def launch(at: int, correlation: int, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    return span(at, at + 1, name, "runtime", correlation_id=correlation)


# ---- nested operators --------------------------------------------------------------------------


def test_an_operator_above_does_not_count_again_what_one_below_counted() -> None:
    """Whatever else the operator above launches, before, after or in a chain of any depth."""
    inner = ("aten::linear", "aten::matmul", "aten::matmul", "aten::matmul")
    _, work = works(
        spans(
            *(op(i, 90 - i, name, [10, 10], [10, 10]) for i, name in enumerate(inner)),
            launch(10, 1),  # a helper of the innermost matmul
            op(20, 30, "aten::mm", [10, 10], [10, 10]),
            launch(25, 2),
            launch(88, 3),  # a helper of the second matmul
        ),
        kernels(
            kernel(100, 110, "pad_kernel", correlation_id=1),
            kernel(200, 300, GEMM, correlation_id=2),
            kernel(400, 410, "unpad_kernel", correlation_id=3),
        ),
    )
    assert np.isnan(work.work_flop).tolist() == [True, False, True]
    assert work.work_flop[1] == 2 * 10 * 10 * 10
    assert work.math.tolist() == [False, True, False]


def test_an_operator_above_counts_for_products_below_of_unknown_size() -> None:
    _, work = works(
        spans(
            op(0, 90, "aten::matmul", [10, 10], [10, 10]),
            launch(10, 1),
            span(20, 30, "aten::mm"),
            launch(25, 2),
        ),
        kernels(
            kernel(100, 150, "pad_kernel", correlation_id=1),
            kernel(200, 350, GEMM, correlation_id=2),
        ),
    )
    # Shared by time.
    assert work.work_flop.tolist() == [500, 1500]


# ---- kernels without an operator ---------------------------------------------------------------


def test_a_kernel_without_a_launch_has_the_work_of_its_like() -> None:
    _, work = works(
        spans(op(0, 10, "aten::mm", [10, 10], [10, 10]), launch(5, 1)),
        kernels(
            kernel(100, 5100, GEMM, correlation_id=1, grid="[2,1,1]", block="[64,1,1]"),
            kernel(6000, 11000, GEMM, grid="[2,1,1]", block="[64,1,1]"),  # the same
            kernel(12000, 17000, GEMM, grid="[4,1,1]", block="[64,1,1]"),  # another size
            kernel(18000, 30000, GEMM, grid="[2,1,1]", block="[64,1,1]"),  # much longer: more K
        ),
    )
    assert work.ideal_ns[:2].tolist() == [2000, 2000]
    assert work.work_flop[:2].tolist() == [2000, 2000]
    assert np.isnan(work.ideal_ns[2:]).all()
    assert work.like_row.tolist() == [-1, 0, -1, -1]
    assert work.math.all()  # what it is, its name tells


def test_likes_that_differ_tell_nothing_unless_their_neighbours_do() -> None:
    # mm of two sizes in the same kernel, one before relu, one before gelu, three times over.
    host, device = [], []
    for i in range(3):
        for j, size in enumerate((10, 20)):
            at, correlation = 100 * i + 50 * j, 1 + 4 * i + 2 * j
            host += [
                op(at, at + 10, "aten::mm", [10, size], [size, 10]),
                launch(at + 5, correlation),
                op(at + 20, at + 30, "aten::relu", [10, 10]),
                launch(at + 25, correlation + 1),
            ]
            start = 1000 * i + 500 * j + 1000
            after = ("relu_kernel", "gelu_kernel")[j]
            device += [
                kernel(start, start + 100, GEMM, correlation_id=correlation),
                kernel(start + 200, start + 210, after, correlation_id=correlation + 1),
            ]
    orphans = [
        kernel(5000, 5100, GEMM),
        kernel(5200, 5210, "relu_kernel"),
        kernel(5500, 5600, GEMM),
        kernel(5700, 5710, "gelu_kernel"),
        kernel(5800, 5810, "softmax_kernel"),
        kernel(6000, 6100, GEMM),
        kernel(6200, 6210, "softmax_kernel"),
    ]
    _, work = works(spans(*host), kernels(*device, *orphans))
    # After gelu and before relu it was the small one; between two softmaxes nobody knows.
    assert work.ideal_ns[[12, 14]].tolist() == [2000, 4000]
    assert np.isnan(work.ideal_ns[17])


@pytest.mark.parametrize("call", ["cudaGraphLaunch", "hipGraphLaunch"])
def test_a_graph_replay_has_the_work_of_what_was_captured(call: str) -> None:
    links, work = works(
        spans(
            op(0, 10, "aten::mm", [10, 10], [10, 10]),
            launch(5, 1),
            op(20, 30, "aten::add", [10, 10], [10, 10]),
            launch(25, 2),
            span(40, 60, "Torch-Compiled Region: 0/0"),
            launch(45, 3, call),
        ),
        kernels(
            kernel(100, 4100, GEMM, correlation_id=1, grid="[2,1,1]", block="[64,1,1]"),
            kernel(4200, 6200, ADD, correlation_id=2, grid="[1,1,1]", block="[64,1,1]"),
            kernel(7000, 11000, GEMM, correlation_id=3, grid="[2,1,1]", block="[64,1,1]"),
            kernel(11000, 13000, ADD, correlation_id=3, grid="[1,1,1]", block="[64,1,1]"),
            kernel(13000, 15000, "mystery", correlation_id=3),
        ),
        UNIT,
    )
    assert work.ideal_ns[2] == 2000
    assert work.roofline_ns[3] == 3 * 100 * 4
    assert causes(links, work)[2:] == [
        "compute.ideal",
        "compute.vector.roofline",
        "compute.unmodelled",
    ]


def test_graph_replays_without_a_like_are_told_by_their_names() -> None:
    links, work = works(
        spans(launch(5, 1, "hipGraphLaunch")),
        kernels(
            kernel(100, 200, "Cijk_Alik_Bljk_BBS_BH_MT32x32x256", correlation_id=1),
            kernel(200, 300, ADD, correlation_id=1),
            kernel(300, 400, "mystery", correlation_id=1),
        ),
    )
    assert causes(links, work) == [
        "compute.no_peak",
        "compute.vector.no_bytes",
        "compute.unmodelled",
    ]


@pytest.mark.parametrize(
    "trace",
    [
        "tracelens/h100-qwen1.5-0.5b-inference",
        "tracelens/mi300x-resnet-train-rank0of8-act-checkpoint",
        "kineto/v100-resnet50-dataloader0-2021",
        "hta/a100-recsys-rank3of8",
    ],
)
@pytest.mark.parametrize("grids", [True, False])
def test_hidden_operators_are_found_again(traces_dir: Path, trace: str, grids: bool) -> None:
    """The operators of the first half are hidden: nearly all are found, and none is another's."""
    run = pipeline.read(traces_dir / f"{trace}.json.gz")
    rank = run.ranks[0]
    device = run.table(rank, "device_event")
    links = joined_tables(
        run.table(rank, "host_span"),
        device,
        run.table(rank, "step"),
        run.table(rank, "collective"),
    ).links()
    operators = operator_work(links, np.unique(links.op_row[links.op_row >= 0]))
    row = np.where(links.op_row >= 0, operators.row_of[links.op_row], -1)
    truth = np.where((row >= 0) & (links.work_class == 0), operators.signature[row], -1)
    start, dur = links.events.start_ns, links.events.dur_ns
    hidden = (truth >= 0) & (start < np.median(start[truth >= 0]))
    if not grids:
        for name in ("grid", "block"):
            at = device.schema.get_field_index(name)
            null = pa.nulls(device.num_rows, device.schema.field(at).type)
            device = device.set_column(at, device.schema.field(at), null)
    like = match_instances(DeviceEvents(device), np.where(hidden, -1, truth), hidden)
    found = like >= 0
    assert dur[found].sum() > 0.85 * dur[hidden].sum()
    right = truth[like[found]] == truth[found]
    assert dur[found][right].sum() > 0.999 * dur[found].sum()


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 50)), max_size=60),
    st.data(),
)
def test_likes_have_the_same_name_and_one_work(
    made: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """Whoever is found shares name and grid with the event, and no like of that key disagrees."""
    events = DeviceEvents(
        kernels(
            *(
                kernel(i * 100, i * 100 + dur, f"k{name}", stream=stream, grid=f"[{stream}]")
                for i, (name, stream, dur) in enumerate(made)
            )
        )
    )
    known = np.array([data.draw(st.integers(-1, 2)) for _ in made], dtype=np.int64)
    wanted = known < 0
    like = match_instances(events, known, wanted)
    for row, (name, stream, _) in enumerate(made):
        if like[row] < 0:
            continue
        assert wanted[row]
        other = made[like[row]]
        assert known[like[row]] >= 0
        assert (other[0], other[1]) == (name, stream)
    # An event whose likes by name and grid all do the same work and take the same time is found.
    for row, (name, stream, dur) in enumerate(made):
        likes = [i for i, m in enumerate(made) if m[:2] == (name, stream) and known[i] >= 0]
        alike = len({(int(known[i]), made[i][2]) for i in likes}) == 1
        if wanted[row] and alike and made[likes[0]][2] == dur:
            assert like[row] in likes


# ---- what other operators tell -----------------------------------------------------------------


def test_a_convolution_of_2021_takes_its_size_from_its_backward() -> None:
    x, weight, grad = [2, 8, 16, 16], [4, 8, 3, 3], [2, 4, 8, 8]  # stride 2
    flop = 2 * 2 * 8 * 8 * 4 * 8 * 9
    arguments: tuple[Any, ...] = ("aten::cudnn_convolution", x, weight, [], [], [])
    backward: tuple[Any, ...] = ("aten::cudnn_convolution_backward", x, grad, weight, [], [])
    gradient = "aten::cudnn_convolution_backward_weight"
    device = kernels(
        kernel(1000, 2000, "volta_scudnn_128x64", correlation_id=1),
        kernel(3000, 4000, "wgrad_alg0_engine", correlation_id=2),
    )
    by_sequence = spans(
        op(0, 10, *arguments, sequence_id=7, forward_tid=0),
        launch(5, 1),
        op(20, 60, "CudnnConvolutionBackward", grad, sequence_id=7, forward_tid=1),
        op(25, 50, *backward),
        op(30, 45, gradient, [], grad, x, [], []),
        launch(35, 2),
    )
    _, work = works(by_sequence, device)
    assert work.work_flop.tolist() == [flop, flop]
    # January 2021: no sequence numbers. A backward of the same input and weight tells.
    by_shape = spans(
        op(0, 10, *arguments),
        launch(5, 1),
        op(25, 50, *backward),
        op(30, 45, gradient, [], grad, x, [], []),
        launch(35, 2),
    )
    _, work = works(by_shape, device)
    assert work.work_flop.tolist() == [flop, flop]
    # Two results of the same input and weight: two strides, and nobody knows which.
    two = spans(
        op(0, 10, *arguments),
        launch(5, 1),
        op(25, 50, *backward),
        op(60, 70, "aten::cudnn_convolution_backward", x, [2, 4, 16, 16], weight, [], []),
    )
    _, work = works(two, kernels(kernel(1000, 2000, "volta_scudnn_128x64", correlation_id=1)))
    assert np.isnan(work.work_flop).all()


def test_a_backward_node_of_a_library_has_its_forwards_arguments() -> None:
    # Transformer Engine: x[2, 5, 16] by weight[32, 16]; two products backward.
    forward = 2 * 10 * 16 * 32
    host = spans(
        op(0, 10, "_Linear", [32, 16], [2, 5, 16], [32], sequence_id=3, forward_tid=0),
        launch(5, 1),
        op(20, 40, "_LinearBackward", [2, 5, 32], sequence_id=3, forward_tid=1),
        launch(25, 2),
        launch(30, 3),
    )
    device = kernels(
        kernel(100, 200, "nvjet_tst_64x64", correlation_id=1),
        kernel(300, 400, "nvjet_tst_64x64", correlation_id=2),
        kernel(400, 500, "nvjet_tst_64x64", correlation_id=3),
    )
    _, work = works(host, device)
    assert work.work_flop.tolist() == [forward, forward, forward]
    # Without the forward call the gradient alone does not tell the inner size.
    _, alone = works(
        spans(op(20, 40, "_LinearBackward", [2, 5, 32], sequence_id=3), launch(25, 2)),
        kernels(kernel(300, 400, "nvjet_tst_64x64", correlation_id=2)),
    )
    assert np.isnan(alone.work_flop).all()


def test_element_types_come_from_the_kernel_where_the_trace_has_none() -> None:
    cat = "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 64>"
    host = spans(
        span(
            0,
            10,
            "aten::cat",
            input_dims="[[[10, 10], [10, 10]], []]",
            input_types='["TensorList", "Scalar"]',
        ),
        launch(5, 1),
        span(20, 30, "aten::add_", input_dims="[[10, 10], [10, 10], []]", input_types="[]"),
        launch(25, 2),
    )
    _, work = works(
        host,
        kernels(kernel(100, 200, cat, correlation_id=1), kernel(300, 400, ADD, correlation_id=2)),
        UNIT,
    )
    assert work.work_bytes.tolist() == [2 * 200 * 4, 3 * 100 * 4]


def test_an_operator_of_unknown_products_also_launches_other_work() -> None:
    links, work = works(
        spans(
            op(0, 20, "vllm::moe_forward", [16, 64], [16, 8]),
            launch(5, 1),
            launch(10, 2),
        ),
        kernels(
            kernel(100, 200, "bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128", correlation_id=1),
            kernel(200, 300, "void moe::dev::finalize::finalizeKernel<x>", correlation_id=2),
        ),
    )
    assert causes(links, work) == ["compute.no_peak", "compute.vector.no_bytes"]


# ---- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel_name", "family"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x128x64", "gemm"),
        ("nvjet_tst_144x128_64x6_2x1_v_bz_bias_TNN", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128>", "gemm"),
        ("void splitKreduce_kernel<32, 16, int, float, float>", "gemm"),
        ("triton_tem_fused_mm_0", "gemm"),
        ("volta_scudnn_128x64_relu_interior_nn_v1", "conv"),
        ("igemm_wrw_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x16", "conv"),
        ("void cudnn::ops::nchwToNhwcKernel<float, float>", "conv"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "sdpa"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention)", "sdpa"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob", "sdpa"),
        ("attn_fwd", "sdpa"),
        ("_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernel", "sdpa"),
        ("void paged_attention_ll4mi_QKV_mfma16_kernel<0, __hip_bfloat16>", "sdpa"),
        ("void paged_attention_ll4mi_reduce_kernel<__hip_bfloat16>", "vector"),
        ("triton_red_fused_add_mean_mul_pow_rsqrt_0", "vector"),
        ("triton_poi_fused_convolution_relu_1", "vector"),
        (ADD, "vector"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>", "vector"),
        ("void fbgemm_gpu::permute_2D_data_kernel<false, int, int>", "vector"),
        ("void cub::DeviceRadixSortOnesweepKernel<Policy800, false, long>", "vector"),
        ("at::cuda::(anonymous namespace)::spin_kernel(long)", None),
        ("my_own_kernel", None),
    ],
)
def test_families_by_kernel_name(kernel_name: str, family: str | None) -> None:
    assert kernel_families([kernel_name]) == [family]


@pytest.mark.parametrize(
    ("kernel_name", "width"),
    [
        ("CatArrayBatchedCopy<at::native::(anonymous namespace)::OpaqueType<2u>, unsigned int>", 2),
        ("CatArrayBatchedCopy<long, unsigned int, 1, 64, 64>", 8),
        ("void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>", 4),
        (
            "multi_tensor_apply_kernel<TensorListMetadata<2>, BinaryFunctor<c10::BFloat16>, float>",
            2,
        ),
        ("vectorized_elementwise_kernel<4, copy_kernel<c10::BFloat16, float>>", None),
        ("triton_poi_fused_add_0", None),
    ],
)
def test_element_widths_by_kernel_name(kernel_name: str, width: int | None) -> None:
    assert element_bytes(kernel_name) == width


@pytest.mark.parametrize(
    "around",
    [
        "FSDP::all_gather_copy_out",
        "FullyShardedDataParallel._pre_forward",
        "torch::distributed::reducer::mul_out",
        "torch.distributed.ddp.reducer::copy_bucket_to_grad",
        "aten::flatten_dense_tensors",
        "/site-packages/deepspeed/runtime/zero/stage3.py(1280): __add_grad_to_ipg_bucket",
        "deepspeed/runtime/zero/partition_parameters.py(1200): all_gather_coalesced",
        "megatron/core/distributed/param_and_grad_buffer.py(300): start_param_sync",
    ],
)
def test_copies_inside_a_wrappers_hooks_are_its_own(around: str) -> None:
    category = "python" if ".py(" in around else "cpu_op"
    host = spans(
        span(0, 50, around, category),
        op(5, 20, "aten::copy_", [10, 10], [10, 10]),
        launch(6, 1),
        op(25, 40, "aten::mm", [10, 10], [10, 10]),
        launch(26, 2),
    )
    device = kernels(kernel(100, 200, correlation_id=1), kernel(300, 400, GEMM, correlation_id=2))
    links, work = works(host, device)
    assert causes(links, work) == ["compute.fsdp_copy", "compute.ideal"]


@pytest.mark.parametrize(
    "around",
    [
        "DistributedDataParallel.forward",
        "FullyShardedDataParallel.forward",
        "deepspeed/runtime/zero/stage_1_and_2.py(2100): backward",
        "deepspeed/runtime/zero/linear.py(60): forward",
        "megatron/core/distributed/distributed_data_parallel.py(200): forward",
        "torch/nn/modules/linear.py(116): forward",
    ],
)
def test_a_wrapper_around_the_model_does_not_own_its_copies(around: str) -> None:
    assert not names.is_sharding_region(around)


# ---- generated kernels and experts -------------------------------------------------------------


def one(host_op: dict[str, Any], kernel_name: str = "k") -> EventWork:
    _, work = works(
        spans(host_op, launch(5, 1)), kernels(kernel(100, 200, kernel_name, correlation_id=1)), UNIT
    )
    return work


def test_a_product_from_a_triton_template() -> None:
    types = json.dumps([HALF] * 3)
    plain = one(op(0, 9, "triton_tem_fused_mm_3", [64, 32], [32, 48], [64, 48], input_types=types))
    assert plain.work_flop.tolist() == [2 * 64 * 32 * 48]
    assert plain.work_bytes.tolist() == [2 * (64 * 32 + 32 * 48 + 64 * 48)]
    batched = one(
        op(0, 9, "triton_tem_fused_bmm_3", [5, 64, 32], [5, 32, 48], [5, 64, 48], input_types=types)
    )
    assert batched.work_flop.tolist() == [2 * 5 * 64 * 32 * 48]
    folded = one(
        op(0, 9, "triton_tem_fused_addmm_3", [4, 16, 32], [48, 32], [64, 48], input_types=types)
    )
    assert folded.work_flop.tolist() == [2 * 64 * 32 * 48]
    conv = one(
        op(
            0,
            9,
            "triton_tem_fused_convolution_3",
            [2, 8, 16, 16],
            [4, 8, 3, 3],
            [2, 4, 8, 8],
            input_types=types,
        )
    )
    assert conv.work_flop.tolist() == [2 * 2 * 8 * 8 * 4 * 8 * 9]
    masked = one(op(0, 9, "triton_tem_fused_flex_attention_0", [1], [1], [1], input_types=types))
    assert masked.math.all()
    assert np.isnan(masked.work_flop).all()


def test_fused_experts() -> None:
    # 16 tokens, 2 experts each of 64: w1[64, 2·1024, 512], w2[64, 512, 1024].
    dims = ([16, 512], [64, 2048, 512], [64, 512, 1024], [16, 2], [16, 2])
    types = json.dumps([HALF, HALF, HALF, "float", "int"])
    work = one(op(0, 9, "vllm::inplace_fused_experts", *dims, input_types=types))
    assert work.work_flop.tolist() == [2 * 32 * (2048 * 512 + 512 * 1024)]
    # At most 32 of the 64 experts are read.
    weights = 32 * (2048 * 512 + 512 * 1024) * 2
    assert work.work_bytes.tolist() == [2 * 16 * 512 * 2 + weights + 16 * 2 * (4 + 4)]


def test_fp8_of_a_library_is_told_by_its_kernel() -> None:
    host_op = op(0, 9, "_Linear", [32, 16], [8, 16], input_types=json.dumps([HALF] * 2))
    assert one(host_op, "nvjet_qqtst_128x128_128x6").dtypes == ["fp8"]
    assert one(host_op, "nvjet_tst_128x128_64x6").dtypes == ["bf16"]


# ---- golden numbers, and what others get wrong -------------------------------------------------


def test_llama_3_8b_ideal_times_on_mi300x() -> None:
    """Batch 2, sequence 4096: up-projection 0.736, causal attention 0.210 ms at 1307.4 TFLOP/s."""
    peaks = lookup("AMD Instinct MI300X")
    assert peaks is not None
    assert peaks.flop_per_s("bf16") == 1307.4e12
    ceiling = Ceiling(
        flop_per_s={d: r for d in DTYPES if (r := peaks.flop_per_s(d))},
        memory_bytes_per_s=5.3e12,
        source="test",
    )
    q, kv = [2, 32, 4096, 128], [2, 8, 4096, 128]
    flash = "aten::_scaled_dot_product_flash_attention"
    host = spans(
        op(0, 10, "aten::mm", [8192, 4096], [4096, 14336], input_types=json.dumps([HALF] * 2)),
        launch(5, 1),
        span(
            20,
            30,
            flash,
            input_dims=json.dumps([q, kv, kv, [], [], []]),
            input_types=json.dumps([HALF] * 3 + ["Scalar"] * 3),
            concrete_inputs=json.dumps(["", "", "", "0.", "True", "False"]),
        ),
        launch(25, 2),
    )
    device = kernels(
        kernel(100, 2_000_000, "Cijk_Alik_Bljk_BBS_BH", correlation_id=1),
        kernel(2_000_000, 3_000_000, "attn_fwd", correlation_id=2),
    )
    _, work = works(host, device, ceiling)
    assert (work.ideal_ns / 1e6).round(3).tolist() == [0.736, 0.210]
    assert work.roofline_ns.tolist() == work.ideal_ns.tolist()  # neither is bound by memory


def test_a_transformer_layer_costs_what_the_formula_says() -> None:
    """Forward and backward of every product, also those inside autograd functions and per rank.

    Hooks on torch.nn.functional count a tenth of it (DeepSpeed #2565), gradients counted as a flat
    twice the forward miss attention's fifth product, and dense counts double causal attention
    (torchtitan #341). One GPT layer of tensor-parallel degree t = 2: 24·b·s·h²/t and 2·b·s(s+1)·h/t
    forward; twice and two and a half times that backward.
    """
    b, s, h, t, heads = 2, 64, 32, 2, 4
    host: list[dict[str, Any]] = []
    device: list[dict[str, Any]] = []

    def run(name: str, *dims: list[int], around: str | None = None, **more: Any) -> None:
        at, number = 100 * len(device), len(device) + 1
        if around:
            host.append(span(at, at + 90, around))
        host.extend([op(at + 5, at + 80, name, *dims, **more), launch(at + 10, number)])
        device.append(kernel(10_000 + at, 10_050 + at, GEMM, correlation_id=number))

    tokens = b * s
    for columns, rows in ((3 * h // t, h), (h, h // t), (4 * h // t, h), (h, 4 * h // t)):
        function = "LinearWithGradAccumulationAndAsyncCommunication"
        run("aten::mm", [tokens, rows], [rows, columns], around=function)
        run("aten::mm", [tokens, columns], [columns, rows], around=f"{function}Backward")
        run("aten::mm", [columns, tokens], [tokens, rows], around=f"{function}Backward")
    q = [b, heads // t, s, h // heads]
    forward = {"concrete_inputs": json.dumps(["", "", "", "0.", "True", "False"])}
    forward["input_types"] = json.dumps([HALF] * 3 + ["Scalar"] * 3)
    run("aten::_scaled_dot_product_flash_attention", q, q, q, [], [], [], **forward)
    backward = {"concrete_inputs": json.dumps([""] * 10 + ["0.", "True", "", ""])}
    backward["input_types"] = json.dumps([HALF] * 5 + ["float"] + ["Scalar"] * 8)
    run(
        "aten::_scaled_dot_product_flash_attention_backward",
        *[q] * 5,
        q[:3],
        *[[]] * 8,
        **backward,
    )
    _, work = works(spans(*host), kernels(*device))
    linear = 24 * b * s * h * h // t
    attention = 2 * b * s * (s + 1) * h // t
    assert work.work_flop.sum() == 3 * linear + 3.5 * attention


def test_operators_and_attention_count_like_products(tmp_path: Path) -> None:
    """Neither ``a @ b`` nor scaled_dot_product_attention goes through torch.nn.functional.linear.

    A profiler that hooks functions misses both (DeepSpeed #4723).
    """
    torch = pytest.importorskip("torch")
    a, b = torch.ones(8, 16), torch.ones(16, 32)
    q = torch.ones(2, 4, 24, 16)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as recorded:
        a @ b
        q @ q.transpose(-1, -2)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    work = pipeline.attribute(tmp_path / "trace.json").work[0]
    scores = 2 * 2 * 4 * 24 * 24 * 16
    assert np.nansum(work.work_flop) == 2 * 8 * 16 * 32 + scores + 2 * scores


# ---- the view ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trace",
    [
        "tracelens/b200-eager-inference-rank0of8",
        "tracelens/mi300x-sglang-qwen3-8b-decode-hipgraph",
        "hta/v100-recsys-rank1of2",
        "hta/cpu-only-gloo-rank34of300",
        "tracelens/mi210-gpu-only",
    ],
)
def test_unmodelled_time_is_shown_in_full(traces_dir: Path, trace: str) -> None:
    attribution = pipeline.attribute(traces_dir / f"{trace}.json.gz")
    rows = view(attribution, "unmodelled").to_pylist()
    times = [row["time_ns"] for row in rows]
    assert times == sorted(times, reverse=True)
    assert all(row["reason"] for row in rows)
    for cause in CAUSES:
        want = sum(leaf.time_ns for leaf in attribution.leaves() if leaf.id == cause)
        assert sum(row["time_ns"] for row in rows if row["cause"] == cause) == want


SHARES = {
    # trace: least share of its computing kernels' time with a known roofline
    "tracelens/h100-qwen1.5-0.5b-inference": 0.999,
    "tracelens/mi300x-qwen1.5-0.5b-inference": 0.999,
    "tracelens/mi300x-resnet-train-rank0of8-act-checkpoint": 0.99,
    "tracelens/mi300x-resnet18-train-no-distributedinfo": 0.999,
    "tracelens/mi300x-sglang-qwen3-8b-prefill-decode": 0.999,
    "tracelens/mi300x-torch-compile-triton": 0.999,
    "tracelens/mi300x-normalization-layers": 0.999,
    "torch-profiling-tutorial/h100-transformer-integer-us-python-stacks-a": 0.999,
    "kineto/v100-resnet50-dataloader0-2021": 0.99,
    "kineto/v100-resnet50-no-deviceproperties-2021": 0.98,
    "kineto/v100-resnet50-toplevel-list-2021": 0.98,
    "hpctrainingexamples/mi300x-op-replay": 0.85,
}


@pytest.mark.parametrize("trace", SHARES)
def test_coverage_of_real_traces(traces_dir: Path, trace: str) -> None:
    """Whatever the device: every type has a peak here, so that only the models are tested."""
    run = pipeline.read(traces_dir / f"{trace}.json.gz")
    rank = run.ranks[0]
    links = joined_tables(
        run.table(rank, "host_span"),
        run.table(rank, "device_event"),
        run.table(rank, "step"),
        run.table(rank, "collective"),
    ).links()
    work = event_work(links, UNIT)
    computing = links.work_class == 0
    known = computing & ~np.isnan(work.roofline_ns)
    dur = links.events.dur_ns
    assert dur[known].sum() >= SHARES[trace] * dur[computing].sum()


def test_a_resnet50_step_costs_what_it_should(traces_dir: Path) -> None:
    """Batch 32 of 224²: 4.09 G multiply-adds an image, three passes, no gradient of the image."""
    forward = 32 * 2 * 4.089e9
    first = 32 * 2 * 112 * 112 * 64 * 3 * 49
    for name in ("dataloader0", "no-deviceproperties", "toplevel-list"):
        run = pipeline.read(traces_dir / f"kineto/v100-resnet50-{name}-2021.json.gz")
        attribution = pipeline.attribute(run)
        links = attribution.links[run.ranks[0]]
        step = links["step_index"].to_numpy(zero_copy_only=False)
        flop = np.nan_to_num(attribution.work[run.ranks[0]].work_flop)
        per_step = [flop[step == s].sum() for s in np.unique(step[~np.isnan(step)])]
        assert np.median(per_step) == pytest.approx(3 * forward - first, rel=0.005), name
