"""Arrow arrays from Python sequences, without pandas and numpy.

``pyarrow.array`` imports pandas (0.3 s, 60 MB) wherever it is installed, only to ask whether its
argument is a Series. Recording must not do that to the program it records.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

_CODES = {pa.int16(): "h", pa.int32(): "i", pa.int64(): "q", pa.float64(): "d"}


def to_arrow(values: Sequence[Any] | pa.Array, kind: pa.DataType) -> pa.Array:
    """Build an array of one of the types that tables declare; None is null.

    An Arrow array of this type is taken as it is.

    Raises:
        TypeError: a value is not of this type.
        OverflowError: a number does not fit.
    """
    if isinstance(values, pa.Array) and values.type == kind:
        return values
    if pa.types.is_dictionary(kind):
        distinct: dict[str, int] = {}
        codes = [None if v is None else distinct.setdefault(v, len(distinct)) for v in values]
        return pa.DictionaryArray.from_arrays(
            to_arrow(codes, kind.index_type), to_arrow(list(distinct), kind.value_type)
        )
    valid, nulls = _validity(values)
    if pa.types.is_boolean(kind):
        bits, _ = _bits([bool(v) for v in values])
        return pa.Array.from_buffers(kind, len(values), [valid, bits], nulls)
    if pa.types.is_string(kind):
        texts = [b"" if v is None else str(v).encode("utf-8", "replace") for v in values]
        offsets = array("i", [0])
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))]
        return pa.Array.from_buffers(kind, len(values), buffers, nulls)
    known = values if valid is None else [0 if v is None else v for v in values]
    numbers = array(_CODES[kind], known)
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(numbers)], nulls)


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    """Return a table with other values in one of its columns."""
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.schema.field(at), values)


def _validity(values: Sequence[Any]) -> tuple[pa.Buffer | None, int]:
    if None not in values:
        return None, 0
    bits, ones = _bits([v is not None for v in values])
    return (None, 0) if ones == len(values) else (bits, len(values) - ones)


def _bits(flags: list[bool]) -> tuple[pa.Buffer, int]:
    """A bitmap, least significant bit first, and how many bits are set."""
    packed = bytearray((len(flags) + 7) // 8)
    for i, flag in enumerate(flags):
        packed[i >> 3] |= flag << (i & 7)
    return pa.py_buffer(bytes(packed)), sum(flags)
