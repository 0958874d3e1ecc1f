"""Columns for the browser: typed arrays, narrowed, split into byte planes, deflated, base64.

A pack is ``uint32 header length, header (JSON), planes``, compressed as one zlib stream. The
header names each array with its type and length; its bytes follow plane by plane (all lowest
bytes first), because high bytes of small numbers are runs of zeros that deflate to nothing.
``reports/assets/unpack.js`` reads it.
"""

from __future__ import annotations

import base64
import json
import re
import sys
import zlib
from typing import Any

import numpy as np

from chopper.errors import is_shown, printable_members

_ESCAPED = re.compile(r'\\[^"\\]')


def narrow(values: np.ndarray) -> np.ndarray:
    """The same integers in the smallest type that holds them; float64 beyond 32 bits.

    float64 is exact up to 2**53 ns, which is 104 days.
    """
    if len(values) == 0:
        return values.astype(np.uint8)
    low, high = int(values.min()), int(values.max())
    for bits in (8, 16, 32):
        if low >= 0 and high < 2**bits:
            return values.astype(f"u{bits // 8}")
        if -(2 ** (bits - 1)) <= low < 0 and high < 2 ** (bits - 1):
            return values.astype(f"i{bits // 8}")
    return values.astype(np.float64)


def pack(meta: dict[str, Any], arrays: dict[str, np.ndarray], *, level: int = 6) -> str:
    """One base64 string of ``meta`` and arrays.

    Args:
        meta: small things, JSON.
        arrays: integers (narrowed here) or float32/float64.
        level: zlib's; lower is faster and larger.
    """
    described = []
    planes: list[bytes] = []
    for name, values in arrays.items():
        values = values if values.dtype.kind == "f" else narrow(values)
        if sys.byteorder == "big":
            values = values.astype(values.dtype.newbyteorder("<"))
        width = values.dtype.itemsize
        described.append(
            {"name": name, "type": f"{values.dtype.kind}{width * 8}", "count": len(values)}
        )
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1, width)
        planes.append(np.ascontiguousarray(raw.T).tobytes())
    header = compact_json({"meta": meta, "arrays": described}).encode()
    data = len(header).to_bytes(4, "little") + header + b"".join(planes)
    return deflate_text(data, level=level)


def compact_json(document: Any) -> str:
    """Return JSON for a page, whose scripts show its texts: those are printable."""

    def encoded(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    text = encoded(document)
    # JSON itself escapes control characters.
    if _ESCAPED.search(text) is None and all(map(is_shown, set(text))):
        return text
    return encoded(printable_members(document))


def deflate_text(text: bytes, *, level: int = 6) -> str:
    """Return data as deflated base64."""
    return base64.b64encode(zlib.compress(text, level)).decode("ascii")
