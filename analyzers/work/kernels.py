"""Facts in names of kernels: arithmetic of matrix kernels, families, element types."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.work.name_search import NameSearch

if TYPE_CHECKING:
    from collections.abc import Sequence

# cuBLAS, cuBLASLt, cuDNN and CUTLASS write the operand types or the tensor instruction into the
# name; hipBLASLt and Tensile ("Cijk_…") write a letter per operand after the contraction's
# indices and "MX" for xf32 (MI300's TF32). The first pattern that is found decides.
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (dtype, re.compile(pattern))
    for dtype, pattern in (
        ("tf32", r"tf32|xf32|_S_MX_|_SMX_"),
        ("fp8", r"e4m3|e5m2|nvjet_(?:sm\d+_)?[qr][qr]|(?:^|_)Cijk_\w{0,80}?_(?:F8|B8|F8B8|B8F8)"),
        ("bf16", r"bf16(?!x9)|bfloat16|nvjet_(?:sm\d+_)?t|^Cijk_[A-Za-z]+_[A-Za-z]+_B(?=[A-Z_])"),
        ("fp16", r"fp16|f16(?!x)|_h\d*(?:16816|1688|884|161616)|hgemm|h884|nvjet_(?:sm\d+_)?h"),
        ("fp16", r"^Cijk_[A-Za-z]+_[A-Za-z]+_H(?=[A-Z_])"),
        # CUTLASS's s1688gemm without a type is the TF32 instruction m16n8k8 on Ampere and newer.
        ("tf32", r"tensorop_s1688gemm|nvjet_(?:sm\d+_)?s"),
        ("fp64", r"dgemm|(?:^|_)d884gemm|f64f64|^Cijk_[A-Za-z]+_[A-Za-z]+_D(?=[A-Z_])"),
        ("int8", r"i8816|imma|s8s8|int8|^Cijk_[A-Za-z]+_[A-Za-z]+_I8"),
        ("fp32", r"sgemm|scudnn|f32f32|fp32|ffma|<float[,>]|^Cijk_[A-Za-z]+_[A-Za-z]+_S(?=[A-Z_])"),
    )
)
_FP8 = dict(_PATTERNS)["fp8"]


def matmul_dtype(dtype: str | None, kernel_name: str) -> str | None:
    """The device peak that a matrix kernel should be held against.

    Three cases need the name: fp32 operators, which may run on TF32, bf16 or fp16 tensor cores
    (``torch.backends.*.fp32_precision``), operators whose type was not recorded, and those of 16
    bits that a library computes in fp8. All other types are what the operator says. A name that
    tells nothing leaves `dtype` as it is.
    """
    if dtype in ("bf16", "fp16"):
        return "fp8" if _FP8.search(kernel_name) else dtype
    if dtype not in ("fp32", None):
        return dtype
    for found, pattern in _PATTERNS:
        if pattern.search(kernel_name):
            return found
    return dtype


# What a kernel without a modelled operator is, by its name. The first pattern that is found
# decides: attention kernels carry "gemm" and convolutions "reduce" in their template arguments.
_KINDS: tuple[tuple[str, NameSearch], ...] = tuple(
    (family, NameSearch(re.compile(pattern, re.IGNORECASE)))
    for family, pattern in (
        (
            "vector",
            r"paged_attention\w{0,80}_reduce|reshape_and_cache|merge_attn_states|store_kv|flash_bwd_(dot|convert)"
            r"|flash_fwd_splitkv_combine|_attn_bwd_preprocess|quant(ize)?_kernel|sage_quant",
        ),
        (
            "sdpa",
            r"flash(?!infer_kv)\w{0,80}_(fwd|bwd)|flash_fwd|flash_bwd|fmha|^attn_(fwd|bwd)|attention|sage_fwd|mha_(fwd|bwd)"
            r"|flashinfer::\w{0,80}(Prefill|Decode)|BatchDecodeWith|BatchPrefillWith|mla_(fwd|decode|prefill)"
            r"|_attn_fwd|_attn_bwd|^triton_tem_\w*flex_attention|cudnn_generated_fort_native_sdpa",
        ),
        # The row operations around an expert's products; the products themselves are matrix
        # kernels.
        (
            "vector",
            r"^triton_(poi|red|per|spl)_|^cpp_fused|moe::dev::(finalize|routing|activation)",
        ),
        ("vector", r"moe_align_block|topk_?gating|moe_sum|permute_kernel|grouped_topk"),
        (
            "conv",
            r"conv(?!ert)(?!_depth_?to)|igemm_(fwd|bwd|wrw)|wgrad|dgrad|fprop|winograd|scudnn|hcudnn"
            r"|im2d?2?col|col2im|fft2d|nchwToNhwc|nhwcToNchw|batched_transpose_\d|SubTensorOpWithCast"
            r"|cudnn::cnn::|xdlops_bwd_weight|miopenGcnAsm|cask_cudnn|gcgemm|transposeNCHW",
        ),
        (
            "gemm",
            r"(?<!fb)gemm|gemv|gemk1|^Cijk_|nvjet|cutlass(?!\w{0,80}elementwise)|splitK|matmul|cublas|triton_tem_|wvSplitK|LLMM1"
            r"|^bmm_|marlin|dot_kernel|_mm_kernel|s16816|s884|1688|xmma|cublasLt|epilogue::impl|Kernel2?_mm"
            r"|fused_moe_kernel|expert_ffn|machete|exllama|awq_",
        ),
        (
            "vector",
            r"elementwise|reduce|norm|softmax|CatArray|gather|scatter|index|copy|dropout|embed|sort|topk"
            r"|cub::|multi_tensor|fill|nll_loss|NLLCriterion|pool|upsample|rotary|rope|silu|gelu|act_and_mul"
            r"|swiglu|quant|transpose|kvcache|kv_cache|kv_indices|distribution|arange|tril|triu|bn_(fw|bw)|Moments"
            r"|ComputeFused|ComputeInternal|GammaBeta|grad_input|cast|cumsum|scan|where|unique|histogram"
            r"|bucketize|searchsorted|sampling|argmax|cross_entropy|CrossEntropy|position_kernel|mean_var"
            r"|scalePackedTensor|SubTensorOpWithScalar|Compute\w{0,80}FusedParams|adam|lamb|page_indices|permute|bounds_check|Tensor_?Op"
            r"|rescale_qkv|linearize_|pack_segments|dense_representation|token_ids|roi_align|nms|flip|roll",
        ),
    )
)


def kernel_family(name: str) -> str | None:
    """The family that a kernel's name tells: "gemm", "conv", "sdpa", "vector"; None if nothing."""
    return next((family for family, found in _KINDS if found(name)), None)


def kernel_families(values: Sequence[str]) -> list[str | None]:
    """The family of each of many names, as :func:`kernel_family` gives it."""
    families: list[str | None] = [None] * len(values)
    rows = np.arange(len(values))
    for family, found in _KINDS:
        hit = found.many([values[i] for i in rows.tolist()])
        for row in rows[hit].tolist():
            families[row] = family
        rows = rows[~hit]
    return families


_OPAQUE = re.compile(r"OpaqueType<(\d+)u?>")
_FIRST_TYPE = re.compile(r"CatArrayBatchedCopy\w{0,80}<([\w:]+)")
_WIDTHS = {
    "float": 4,
    "double": 8,
    "long": 8,
    "int": 4,
    "short": 2,
    "bool": 1,
    "c10::Half": 2,
    "c10::BFloat16": 2,
}
_FLOATS = re.compile(
    r"\b(?:c10::|at::)?(float|double|Half|BFloat16|__half|half|__nv_bfloat16|__hip_bfloat16)\b"
)
_FLOAT_WIDTHS = {"float": 4, "double": 8}


def element_bytes(name: str) -> int | None:
    """Bytes per element of what a kernel of PyTorch's own reads and writes, from its name.

    For operators whose element types the trace lacks (tensor lists; traces of 2021). Template
    arguments name the type; where a 16-bit one stands beside float, float is what it computes
    in. None where the name tells nothing or two storage types.
    """
    opaque = _OPAQUE.search(name)
    if opaque:
        return int(opaque.group(1))
    first = _FIRST_TYPE.search(name)
    if first:
        return _WIDTHS.get(first.group(1))
    widths = {_FLOAT_WIDTHS.get(found, 2) for found in _FLOATS.findall(name)}
    if widths == {2, 4} and "opy" not in name and "onvert" not in name:
        return 2
    return widths.pop() if len(widths) == 1 else None
