"""Operators of inference and training libraries, by their public signatures.

vLLM, SGLang and AITER register operators. Transformer Engine, Liger, Apex and Megatron work in
autograd functions: a trace has them under the function's name, and their backward as a node that
recorded nothing but the gradient. Such a node is modelled by the arguments of its forward call,
which its sequence number finds (`FUNCTIONS`).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from chopper.analyzers.work.attention import Attention, unrecorded
from chopper.analyzers.work.record import (
    Direction,
    Record,
    Shape,
    Unknown,
    Work,
    documented,
    with_bytes,
)
from chopper.analyzers.work.vector import Like, Model, moves, vector_work

# ---- memory-bound -----------------------------------------------------------------------------


@moves(dtype_of=1)
def _rotary(record: Record) -> int:
    """rotary_embedding(positions, query, key, head_size, cos_sin_cache, …), in place."""
    tokens, cache = record.numel(0), record.shape(4)
    rows = min(tokens, cache[0]) * prod(cache[1:]) if cache else 0
    angles = rows * record.itemsize(4)
    return record.nbytes(0) + 2 * (record.nbytes(1) + record.nbytes(2)) + angles


@documented
def _scaled(times: int) -> Model:
    """`times` tensors of the first one's size."""

    def model(record: Record) -> Work:
        return vector_work(record, lambda: times * record.nbytes(0))

    return model


_OUT_IN = Like((1,), (0,))
_OUT_IN_SCALE = Like((1, 2), (0,))

VECTOR_MODELS: dict[str, Model] = {
    "_C::rms_norm": Like((1, 2), (0,)),
    "_C::fused_add_rms_norm": Like((0, 1, 2), (0, 1)),
    "_C::static_scaled_fp8_quant": Like((1, 2), (0,)),
    "_C::dynamic_scaled_fp8_quant": Like((1,), (0, 2)),
    "_C::rotary_embedding": _rotary,
    "_C_cache_ops::reshape_and_cache_flash": Like((0, 1, 4), (0, 1)),
    "sgl_kernel::rotary_embedding": _rotary,
    "sgl_kernel::rmsnorm": Like((1, 2), (0,)),
    "sgl_kernel::fused_add_rmsnorm": Like((0, 1, 2), (0, 1)),
    "sglang::store_cache": Like((0, 1, 4), (0, 1)),
    "aiter::rmsnorm": Like((1, 2), (0,)),
    "aiter::rms_norm": Like((0, 1), (0,)),
    "aiter::add_rmsnorm": Like((1, 2, 4), (0, 3)),
    "aiter::rmsnorm2d_fwd_with_add_ck": Like((1, 2, 4), (0, 3)),
    "aiter::_groupnorm_run": Like((0, 2, 3), (0,)),
    "vllm::rocm_aiter_rms_norm": Like((0, 1), (0,)),
    "vllm::rocm_aiter_rmsnorm2d_fwd_with_add": Like((0, 1, 2), (0, 1)),
    "vllm::unified_kv_cache_update": Like((0, 1), (0, 1)),
    **{
        f"{space}::{name}": _OUT_IN
        for space in ("_C", "sgl_kernel")
        for name in [
            "silu_and_mul",
            "gelu_and_mul",
            "gelu_tanh_and_mul",
            "mul_and_silu",
            "gelu_new",
            "gelu_fast",
            "gelu_quick",
            "fatrelu_and_mul",
            "silu_and_mul_quant",
        ]
    },
    "_C::rms_norm_static_fp8_quant": Like((1, 2, 3), (0,)),
    "_C::fused_add_rms_norm_static_fp8_quant": Like((1, 2, 3), (0, 2)),
    "_C::rms_norm_dynamic_per_token_quant": Like((1, 2), (0, 3)),
    "_C::dynamic_per_token_scaled_fp8_quant": Like((1,), (0, 2)),
    "_C::static_scaled_int8_quant": _OUT_IN_SCALE,
    "_C::dynamic_scaled_int8_quant": Like((1,), (0, 2)),
    "_C::per_token_group_fp8_quant": Like((0,), (1, 2)),
    "sgl_kernel::sgl_per_token_group_quant_fp8": Like((0,), (1, 2)),
    "sgl_kernel::sgl_per_token_quant_fp8": Like((0,), (1, 2)),
    "_moe_C::topk_softmax": Like((3,), (0, 1, 2)),
    "_moe_C::moe_sum": Like((0,), (1,)),
    "_C_cache_ops::reshape_and_cache": Like((0, 1, 4), (0, 1)),
    "_C_cache_ops::concat_and_cache_mla": Like((0, 1, 3), (0, 1)),
    # Autograd functions, forward with their inputs and backward with the gradient only.
    "FusedLayerNormAffineFunction": Like((0, 1, 2), (0,)),
    "FusedLayerNormAffineFunctionBackward": _scaled(3),
    "FusedRMSNormAffineFunction": Like((0, 1), (0,)),
    "FusedRMSNormAffineFunctionBackward": _scaled(3),
    "LigerRMSNormFunction": Like((0, 1), (0,)),
    "LigerRMSNormFunctionBackward": _scaled(3),
    "LigerLayerNormFunction": Like((0, 1, 2), (0,)),
    "LigerLayerNormFunctionBackward": _scaled(3),
    "LigerSiLUMulFunction": Like((0, 1), (0,)),
    "LigerSiLUMulFunctionBackward": _scaled(5),
    "LigerGELUMulFunction": Like((0, 1), (0,)),
    "LigerGELUMulFunctionBackward": _scaled(5),
    "LigerRopeFunction": Like((0, 1, 2, 3), (0, 1)),
    # The loss' forward leaves the gradient in its input.
    "LigerCrossEntropyFunction": Like((0, 1), (0,)),
    "LigerSwiGLUFunction": Like((0, 1), (0,)),
}

# ---- products of autograd functions -----------------------------------------------------------


def _matrices(record: Record) -> list[tuple[int, Shape]]:
    found = [(i, record.shape(i)) for i in range(len(record)) if record.has(i)]
    return [(i, shape) for i, shape in found if len(shape) > 1 and all(shape)]


@documented
def _function_product(passes: int) -> Model:
    """x[..., K] and a weight [N, K] in either order, the first and last that share their K.

    Copies of the weight in other types stand between them in some versions. `passes` products:
    one forward, two backward (the gradients of x and of the weight).
    """

    def model(record: Record) -> Work:
        matrices = _matrices(record)
        if not matrices:
            raise Unknown("no matrices were recorded")
        i, left = matrices[0]
        j, right = next(((j, s) for j, s in matrices[:0:-1] if s[-1] == left[-1]), (i, ()))
        if not right:
            raise Unknown(f"no second matrix with {left[-1]} columns was recorded")
        rows, columns = prod(left[:-1]), prod(right[:-1])
        flop = 2 * rows * columns * left[-1] * passes
        work = Work("gemm", flop, flop, dtype=record.dtype(i))
        if passes > 1:
            work = replace(work, direction="backward")

        def traffic() -> int:
            one = record.nbytes(i) + record.nbytes(j) + rows * columns * record.itemsize(i)
            return passes * one

        return with_bytes(work, traffic)

    return model


@documented
def _function_mlp(passes: int) -> Model:
    """_LayerNormMLP(x, …, fc1_weight[F, H], …, fc2_weight[H, F'], …)."""

    def model(record: Record) -> Work:
        matrices = _matrices(record)
        if len(matrices) < 3:
            raise Unknown("the weights were not recorded")
        (i, x), (_, first), (_, last) = matrices[0], matrices[1], matrices[-1]
        if first[-1] != x[-1] or last[0] != x[-1]:
            raise Unknown(f"weights {list(first)} and {list(last)} do not fit {list(x)}")
        flop = 2 * prod(x[:-1]) * (prod(first) + prod(last)) * passes
        direction: Direction = "backward" if passes > 1 else "forward"
        return Work(
            "gemm",
            flop,
            flop,
            dtype=record.dtype(i),
            direction=direction,
            reason="bytes: what is kept between the two products was not recorded",
        )

    return model


GEMM_MODELS: dict[str, Model] = {
    # Transformer Engine.
    "_Linear": _function_product(1),
    "_LinearBackward": _function_product(2),
    "_LayerNormLinear": _function_product(1),
    "_LayerNormLinearBackward": _function_product(2),
    "_GroupedLinear": _function_product(1),
    "_GroupedLinearBackward": _function_product(2),
    "_LayerNormMLP": _function_mlp(1),
    "_LayerNormMLPBackward": _function_mlp(2),
    # Megatron: everything but the fused weight gradient is aten's.
    "LinearWithGradAccumulationAndAsyncCommunicationBackward": _function_product(1),
}

# ---- mixtures of experts ----------------------------------------------------------------------


def _experts(record: Record) -> Work:
    """fused_experts(hidden[T, H], w1[E, F, H], w2[E, H, F'], topk_weights, topk_ids[T, k], …).

    Each token meets k experts, whichever they are; experts that no token can reach are not read.
    """
    hidden, first, second = record.shape(0), record.shape(1), record.shape(2)
    routes = record.numel(4)
    if len(hidden) != 2 or len(first) != 3 or len(second) != 3 or first[2] != hidden[1]:
        raise Unknown(f"shapes do not fit: {list(hidden)}, {list(first)}, {list(second)}")
    if second[1] != hidden[1]:
        raise Unknown(f"shapes do not fit: {list(hidden)}, {list(second)}")
    flop = 2 * routes * (prod(first[1:]) + prod(second[1:]))
    work = Work("moe", flop, flop, dtype=record.dtype(1))

    def traffic() -> int:
        reached = min(first[0], routes)
        weights = (record.nbytes(1) + record.nbytes(2)) // max(1, first[0]) * reached
        return 2 * record.nbytes(0) + weights + record.nbytes(3) + record.nbytes(4)

    return with_bytes(work, traffic)


_ROUTED = unrecorded("moe", "expert weights and routing are not arguments")

MOE_MODELS: dict[str, Model] = {
    "vllm::inplace_fused_experts": _experts,
    "vllm::outplace_fused_experts": _experts,
    "vllm::rocm_aiter_fused_moe": _experts,
    "sglang::inplace_fused_experts": _experts,
    "sglang::outplace_fused_experts": _experts,
    "aiter::fused_moe_": _experts,
    "vllm::moe_forward": _ROUTED,
    "vllm::moe_forward_shared": _ROUTED,
    "vllm::flashinfer_fused_moe_bf16": _ROUTED,
    "sgl_kernel::fp8_blockwise_scaled_grouped_mm": _ROUTED,
}

# ---- attention --------------------------------------------------------------------------------

_CACHED = unrecorded("sdpa", "the lengths of the cached sequences are data")
_XFORMERS = Attention("blhd", bottom_right=True, lse=True, window_after_flag=True)
_XFORMERS_PACKED = replace(_XFORMERS, cu_q=3, cu_k=4, max_q=6)
_XFORMERS_BACKWARD = Attention(
    "blhd", bottom_right=True, q=1, grad=0, saved=(4, 5), window_after_flag=True
)
_XFORMERS_BACKWARD_PACKED = replace(_XFORMERS_BACKWARD, cu_q=6, cu_k=7, max_q=8)


def _xformers(record: Record) -> Work:
    """flash_fwd(q, k, v, cu_q, cu_k, seqused_k, max_q, max_k, …, is_causal, window, …, tables)."""
    if record.has(5) or record.has(14):
        raise Unknown("the lengths of the cached sequences are data")
    return (_XFORMERS_PACKED if record.has(3) else _XFORMERS)(record)


def _xformers_backward(record: Record) -> Work:
    """flash_bwd(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, …, is_causal, window, …)."""
    return (_XFORMERS_BACKWARD_PACKED if record.has(6) else _XFORMERS_BACKWARD)(record)


_FUNCTION = Attention("blhd", bottom_right=True, lse=True, window_after_flag=True)
_FUNCTION_PACKED = replace(_FUNCTION, cu_q=3, cu_k=4, max_q=5)

ATTENTION_MODELS: dict[str, Model] = {
    "FlashAttnFunc": _FUNCTION,
    "FlashAttnVarlenFunc": _FUNCTION_PACKED,
    "FlashAttnFuncBackward": replace(_FUNCTION, of_forward=True),
    "FlashAttnVarlenFuncBackward": replace(_FUNCTION_PACKED, of_forward=True),
    "FusedAttnFunc": unrecorded("sdpa", "the order of batch and sequence was not recorded"),
    "xformers_flash::flash_fwd": _xformers,
    "xformers_flash::flash_bwd": _xformers_backward,
    "vllm::unified_attention": _CACHED,
    "vllm::unified_attention_with_output": _CACHED,
    "vllm::unified_mla_attention": _CACHED,
    "vllm::unified_mla_attention_with_output": _CACHED,
    "_vllm_fa2_C::varlen_fwd": _CACHED,
    "_vllm_fa3_C::fwd": _CACHED,
    "_C::paged_attention_v1": _CACHED,
    "_C::paged_attention_v2": _CACHED,
    "_rocm_C::paged_attention": _CACHED,
    "aiter::paged_attention_rocm": _CACHED,
    "aiter::mla_decode_fwd": _CACHED,
    "sgl_kernel::fwd": _CACHED,
    "sglang_profiler::attention_paged_attention_ragged": _CACHED,
}

FUNCTIONS = frozenset(
    name.removesuffix("Backward")
    for name in (*GEMM_MODELS, *ATTENTION_MODELS)
    if name.endswith("Backward") and "::" not in name
)
"""Autograd functions whose backward nodes are modelled by their forward's arguments."""
