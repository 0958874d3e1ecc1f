"""Between numpy and Arrow by way of their buffers.

``pyarrow.array`` and ``to_numpy`` import pandas wherever it is installed (0.3 s, 50 MB), though
nothing here is a Series.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

NO_VALUE = -(2**63)
"""Stands for an integer that is absent."""

_TYPES: dict[np.dtype[Any], pa.DataType] = {
    np.dtype(np.int64): pa.int64(),
    np.dtype(np.int32): pa.int32(),
    np.dtype(np.int16): pa.int16(),
    np.dtype(np.float64): pa.float64(),
}
_DTYPES = {kind: dtype for dtype, kind in _TYPES.items()}


def to_arrow(values: np.ndarray, missing: np.ndarray | None = None) -> pa.Array:
    """Numbers or booleans as an Arrow array, null where ``missing``; numbers are not copied."""
    validity = None
    if missing is not None and missing.any():
        validity = _bits(~missing)
    if values.dtype == np.bool_:
        return pa.Array.from_buffers(pa.bool_(), len(values), [validity, _bits(values)])
    kind = _TYPES[values.dtype]
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(values)])


def strings(values: Collection[str]) -> pa.Array:
    """Texts, none of them null."""
    encoded = [value.encode() for value in values]
    offsets = np.zeros(len(encoded) + 1, dtype=np.int32)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def to_numpy(column: pa.Array | pa.ChunkedArray, missing: int = 0) -> np.ndarray:
    """Numbers as a numpy array, null as ``missing``.

    They are not copied where they lie together and none is null.
    """
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [_numbers(chunk, missing) for chunk in chunks if len(chunk)]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([np.zeros(0, _DTYPES[column.type]), *parts])


def _numbers(chunk: pa.Array, missing: int) -> np.ndarray:
    dtype = _DTYPES[chunk.type]
    validity, data = chunk.buffers()
    values = np.frombuffer(data, dtype)[chunk.offset : chunk.offset + len(chunk)]
    if not chunk.null_count:
        return values
    bits = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
    return np.where(bits[chunk.offset : chunk.offset + len(chunk)], values, dtype.type(missing))


def is_one_of(column: tuple[np.ndarray, Sequence[str | None]], *texts: str) -> np.ndarray:
    """Return the mask of the rows of a column, as codes and their values, that hold these texts."""
    codes, values = column
    return np.isin(codes, [code for code, value in enumerate(values) if value in texts])


def most_frequent(values: np.ndarray) -> int:
    """Return the most frequent number, the lowest of several; there must be one."""
    distinct, counts = np.unique(values, return_counts=True)
    return int(distinct[np.argmax(counts)])


def _bits(flags: np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))
