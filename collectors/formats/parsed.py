"""Traces as readers of all formats return them: declared tables, and facts beside them.

Columns go between numpy and Arrow by way of their buffers: ``pyarrow.array`` and ``to_numpy``
import pandas wherever it is installed (0.3 s, 50 MB), though nothing here is a Series.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from chopper.arrow import to_arrow as from_list
from chopper.storage.manifest import Coordinate, Device, Finding
from chopper.tables import TABLES

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


@dataclass(kw_only=True)
class ParsedTrace:
    """One device of one rank of one file.

    Attributes:
        source: name of the file.
        rank, world_size, backend, devices, process_groups, coordinates: as recorded.
        host_pid: process that launched the work.
        process: its name where several ranks are in the file, else None.
        device_id: device that ran it, None on a host-only trace.
        main: False for further devices of the same process, which are timelines of their own.
        environment: facts of the header worth keeping.
        tables: declared trace tables by name, times in Unix nanoseconds.
        findings: what must be known about it.
        borrowed: names of tables that another file gave.
        held_span_ns: first and last recorded time, where ``tables`` are held elsewhere.
    """

    source: str
    host_pid: int | None
    device_id: int | None
    main: bool
    devices: list[Device]
    environment: dict[str, str]
    tables: Mapping[str, pa.Table]
    process: str | None = None
    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None
    process_groups: list[dict[str, Any]] = field(default_factory=list)
    coordinates: list[Coordinate] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    borrowed: frozenset[str] = frozenset()
    held_span_ns: tuple[int, int] | None = None

    @property
    def span_ns(self) -> tuple[int, int] | None:
        """First and last recorded time, None for a trace without events."""
        if self.held_span_ns is not None:
            return self.held_span_ns
        bounds = []
        for name in ("host_span", "device_event"):
            table = self.tables[name]
            if table.num_rows:
                start = to_numpy(table["start_ns"])
                bounds.append((int(start[0]), int((start + to_numpy(table["dur_ns"])).max())))
        return (min(a for a, _ in bounds), max(b for _, b in bounds)) if bounds else None


def sorted_table(
    name: str, columns: dict[str, Any], mask: np.ndarray | None, base_ns: int
) -> tuple[pa.Table, np.ndarray]:
    """The declared table, sorted by start then longest first, and where each old row went.

    Rows that start and end together are ordered by their content, so that the order in which a file
    lists its events decides nothing.

    Returns:
        The table and an array old row → new row, -1 for rows that are not in it.
    """
    start, dur = columns["start_ns"], columns["dur_ns"]
    order = np.lexsort((-dur, start))
    if mask is not None:
        order = order[mask[order]]
    order = _ties_by_content(name, columns, order)
    moved = np.full(len(start), -1, dtype=np.int64)
    moved[order] = np.arange(len(order))
    declared = TABLES[name]
    arrays: list[pa.Array] = []
    for column in declared.arrow:
        value = columns[column.name]
        if column.name == "start_ns":
            arrays.append(to_arrow(start[order] + base_ns))
        elif isinstance(value, tuple):
            arrays.append(dictionary(value[0][order], value[1]))
        else:
            arrays.append(numbers(value[order], column.type))
    return pa.Table.from_arrays(arrays, schema=declared.arrow), moved


def table_of_rows(name: str, rows: Sequence[Sequence[Any]]) -> pa.Table:
    """Return the declared table of rows, their cells in the order of its columns."""
    declared = TABLES[name].arrow
    return pa.table(
        {f.name: from_list([row[i] for row in rows], f.type) for i, f in enumerate(declared)},
        schema=declared,
    )


def step_table(
    numbers: Sequence[int | None], start_ns: np.ndarray, end_ns: np.ndarray, source: str
) -> pa.Table:
    """Return STEP of traced steps; ``source`` is what told them apart."""
    bounds = zip(numbers, start_ns.tolist(), end_ns.tolist(), strict=True)
    return table_of_rows("step", [(*bound, source, True, True, None) for bound in bounds])


_OUTER_FIRST = ("annotation", "python", "cpu_op", "runtime", "driver")
"""Of spans that begin and end together on one thread, these hold those after them."""
_FIRST_KEYS = ("pid", "tid", "device_id", "stream_id", "category", "kind", "external_id")
"""An operator's id counts up from its caller's."""


def _ties_by_content(name: str, columns: dict[str, Any], order: np.ndarray) -> np.ndarray:
    """Rows in ``order``, those that start and end together sorted by their other columns."""
    start, dur = columns["start_ns"][order], columns["dur_ns"][order]
    same = (start[1:] == start[:-1]) & (dur[1:] == dur[:-1])
    if not same.any():
        return order
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    group = np.cumsum(np.append(True, ~same))[tied]
    rows = order[tied]
    names = [c.name for c in TABLES[name].columns if c.name not in ("start_ns", "dur_ns")]
    names.sort(key=lambda n: (_FIRST_KEYS.index(n) if n in _FIRST_KEYS else len(_FIRST_KEYS), n))
    keys = [group]
    for column in names:
        value = columns[column]
        keys.append(_places(value[0], value[1], rows) if isinstance(value, tuple) else value[rows])
    out = order.copy()
    out[tied] = rows[np.lexsort(keys[::-1])]
    return out


def _places(codes: np.ndarray, values: Sequence[str | None], rows: np.ndarray) -> np.ndarray:
    """Place of each row's text among those of all rows: outer categories first, then by name."""
    used, inverse = np.unique(codes[rows], return_inverse=True)
    texts = [values[code] or "" for code in used.tolist()]
    outer = {text: i for i, text in enumerate(_OUTER_FIRST)}
    ranked = sorted(set(texts), key=lambda t: (outer.get(t, len(outer)), t))
    rank = {text: i for i, text in enumerate(ranked)}
    return np.array([rank[text] for text in texts], dtype=np.int64)[inverse]


def numbers(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """A column of a table; NaN and ``NO_VALUE`` are null."""
    missing = np.isnan(values) if values.dtype == np.float64 else values == NO_VALUE
    return to_arrow(values.astype(np.int32) if kind == pa.int32() else values, missing)


def dictionary(codes: np.ndarray, values: Sequence[str | None]) -> pa.Array:
    """Codes with 0 for null → a dictionary array, its values in order of appearance."""
    first = np.full(len(values), len(codes), dtype=np.int64)
    # Of several rows with one code the last assignment stands: go backwards.
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)
    used = np.argsort(first)[: np.count_nonzero(first < len(codes))]
    distinct: dict[str, int] = {}
    remap = np.full(len(values), -1, dtype=np.int32)
    for code in used.tolist():
        value = values[code]
        if value is not None:
            remap[code] = distinct.setdefault(value, len(distinct))
    indices = remap[codes]
    texts = from_list([*distinct], pa.string())
    return pa.DictionaryArray.from_arrays(to_arrow(indices, indices < 0), texts)
