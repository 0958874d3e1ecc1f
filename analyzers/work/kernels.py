"""Regular expressions over many names at once, and the facts that names of kernels tell.

Those are the arithmetic of matrix kernels, families and element types; their patterns stand in
``chopper/data/kernel_names.toml``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from importlib.resources import files

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_FEW = 256
_LOOKAROUND = re.compile(r"\(\?<?[!=][^()]*\)")


class NameSearch:
    """Test of whether names contain a pattern, and not another.

    Called with a name it searches as ``re`` does. :meth:`many` gives the same for many names in a
    tenth of the time: Arrow's engine has no lookarounds, so it searches without them, which finds
    all that match and more; what it finds is searched again.
    """

    def __init__(
        self, pattern: str, *, excluded: str | None = None, ignore_case: bool = False
    ) -> None:
        flags = re.IGNORECASE if ignore_case else 0
        self.pattern = re.compile(pattern, flags)
        self.excluded = None if excluded is None else re.compile(excluded, flags)
        self._wider = _LOOKAROUND.sub("", pattern)

    def __call__(self, name: str) -> bool:
        """Tell whether one name has it."""
        if not self.pattern.search(name):
            return False
        return self.excluded is None or not self.excluded.search(name)

    def many(self, values: Sequence[str]) -> np.ndarray:
        """Mask of the names that have it."""
        if len(values) < _FEW:
            return np.array([self(v) for v in values], dtype=bool)
        matches: np.ndarray = pc.match_substring_regex(
            pa.array(values, pa.string()),
            self._wider,
            ignore_case=bool(self.pattern.flags & re.IGNORECASE),
        ).to_numpy(zero_copy_only=False)
        # The engines' classes and ends of lines differ beyond one line of ASCII.
        odd = np.array([not v.isascii() or "\n" in v for v in values], dtype=bool)
        again = odd
        if self.excluded is not None or self._wider != self.pattern.pattern:
            again = matches | odd
        rows = np.flatnonzero(again)
        matches = matches.copy()
        matches[rows] = [self(values[i]) for i in rows.tolist()]
        return matches


_NAMES = tomllib.loads(
    files("chopper").joinpath("data", "kernel_names.toml").read_text(encoding="utf-8")
)
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
    for kind, pattern in _PATTERNS:
        if pattern.search(kernel_name):
            return kind
    return dtype


_KINDS = tuple(
    (row["family"], NameSearch("|".join(row["patterns"]), ignore_case=True))
    for row in _NAMES["family"]
)


def kernel_families(values: Sequence[str]) -> list[str | None]:
    """Families that kernels' names tell: "gemm", "conv", "sdpa", "vector"; None if nothing."""
    families: list[str | None] = [None] * len(values)
    rows = np.arange(len(values))
    for family, search in _KINDS:
        hit = search.many([values[i] for i in rows.tolist()])
        for row in rows[hit].tolist():
            families[row] = family
        rows = rows[~hit]
    return families


_OPAQUE = re.compile(r"OpaqueType<(\d+)u?>", re.ASCII)
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
    widths = {_FLOAT_WIDTHS.get(float_type, 2) for float_type in _FLOATS.findall(name)}
    if widths == {2, 4} and "opy" not in name and "onvert" not in name:
        return 2
    return widths.pop() if len(widths) == 1 else None
