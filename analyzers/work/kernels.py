"""Facts in names of kernels: arithmetic of matrix kernels, families, element types.

The patterns stand in ``chopper/data/kernel_names.toml``.
"""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.work.name_search import NameSearch

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAMES = tomllib.loads(files("chopper").joinpath("data", "kernel_names.toml").read_text())
_PATTERNS = tuple((row["dtype"], re.compile(row["pattern"])) for row in _NAMES["arithmetic"])
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


_KINDS = tuple(
    (row["family"], NameSearch("|".join(row["patterns"]), ignore_case=True))
    for row in _NAMES["family"]
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
