"""Which arithmetic a matrix kernel really used, from its name."""

from __future__ import annotations

import re

# cuBLAS, cuBLASLt, cuDNN and CUTLASS write the operand types or the tensor instruction into the
# name; hipBLASLt and Tensile ("Cijk_…") write a letter per operand after the contraction's
# indices and "MX" for xf32 (MI300's TF32). The first pattern that is found decides.
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (dtype, re.compile(pattern))
    for dtype, pattern in (
        ("tf32", r"tf32|xf32|_S_MX_|_SMX_"),
        ("fp8", r"e4m3|e5m2|(?:^|_)Cijk_\w*?_(?:F8|B8|F8B8|B8F8)"),
        ("bf16", r"bf16(?!x9)|bfloat16|nvjet_(?:sm\d+_)?t|^Cijk_[A-Za-z]+_[A-Za-z]+_B(?=[A-Z_])"),
        ("fp16", r"fp16|f16(?!x)|_h\d*(?:16816|1688|884|161616)|hgemm|h884|nvjet_(?:sm\d+_)?h"),
        ("fp16", r"^Cijk_[A-Za-z]+_[A-Za-z]+_H(?=[A-Z_])"),
        # CUTLASS's s1688gemm without a type is the TF32 instruction m16n8k8 on Ampere and newer.
        (
            "tf32",
            r"cutlass_(?:8|9|10)\d\w*tensorop_s1688gemm|tensorop_s1688gemm|nvjet_(?:sm\d+_)?s",
        ),
        ("fp64", r"dgemm|(?:^|_)d884gemm|f64f64|^Cijk_[A-Za-z]+_[A-Za-z]+_D(?=[A-Z_])"),
        ("int8", r"i8816|imma|s8s8|int8|^Cijk_[A-Za-z]+_[A-Za-z]+_I8"),
        ("fp32", r"sgemm|scudnn|f32f32|fp32|ffma|<float[,>]|^Cijk_[A-Za-z]+_[A-Za-z]+_S(?=[A-Z_])"),
    )
)


def matmul_dtype(dtype: str | None, kernel_name: str) -> str | None:
    """The device peak that a matrix kernel should be held against.

    Only two cases need the name: fp32 operators, which may run on TF32, bf16 or fp16 tensor
    cores (``torch.backends.*.fp32_precision``), and operators whose type was not recorded. All
    other types are what the operator says. A name that tells nothing leaves `dtype` as it is.
    """
    if dtype not in ("fp32", None):
        return dtype
    for found, pattern in _PATTERNS:
        if pattern.search(kernel_name):
            return found
    return dtype
