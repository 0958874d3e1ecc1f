"""Columns of Arrow tables as the numpy arrays that analyzers compute on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.span_forest import forest
from chopper.analyzers.work.kernels import NameSearch


def ints(table: pa.Table, name: str, *, null: int = -1) -> np.ndarray:
    """An integer column as int64; nulls become ``null``, which must not occur as a value."""
    return _numbers(table[name].chunks, null, np.dtype(np.int64))


def strings(table: pa.Table, name: str, *, narrow: bool = False) -> tuple[np.ndarray, list[str]]:
    """A dictionary column as (codes, values); nulls are code -1.

    Codes are int64; with ``narrow`` as the table holds them, int32: half the memory, but no room
    to compute with them.
    """
    chunks = table[name].unify_dictionaries().chunks
    codes = _numbers([c.indices for c in chunks], -1, np.dtype(np.int32 if narrow else np.int64))
    return codes, chunks[0].dictionary.to_pylist() if chunks else []


def _numbers(chunks: list[pa.Array], null: int, dtype: np.dtype[Any]) -> np.ndarray:
    """The values of all chunks: not copied where one of this type has no nulls, else once."""
    if len(chunks) == 1 and not chunks[0].null_count:
        return chunks[0].to_numpy().astype(dtype, copy=False)
    values = np.empty(sum(map(len, chunks)), dtype=dtype)
    at = 0
    for chunk in chunks:
        filled = chunk.fill_null(null) if chunk.null_count else chunk
        values[at : at + len(chunk)] = filled.to_numpy()
        at += len(chunk)
    return values


def matching(codes: np.ndarray, values: list[str], predicate: Callable[[str], Any]) -> np.ndarray:
    """Mask of the rows whose string satisfies ``predicate``, evaluated once per value."""
    if isinstance(predicate, NameSearch):
        table = np.append(predicate.many(values), False)
    else:
        table = np.array([bool(predicate(v)) for v in values] + [False], dtype=bool)
    return forest.look_up(codes, table)


def dictionary(codes: np.ndarray, values: Sequence[str]) -> pa.DictionaryArray:
    """Codes (-1 is null) and distinct values → a dictionary array as tables declare it."""
    mask = codes < 0
    return pa.DictionaryArray.from_arrays(
        pa.array(np.where(mask, 0, codes).astype(np.int32), mask=mask),
        pa.array(values, type=pa.string()),
    )


def compact(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct values ascending, their number per row), like ``np.unique`` with its inverse.

    Without sorting the rows: by a table where the values lie close together, else by hashing.
    """
    if not len(values):
        return values[:0], np.zeros(0, np.int64)
    low, high = int(values.min()), int(values.max())
    if high - low <= 4 * len(values) + 65_536:
        number = np.zeros(high - low + 1, dtype=np.int64)
        places = values - low if low else values
        number[places] = 1
        distinct = np.flatnonzero(number)
        number[distinct] = np.arange(len(distinct))
        return distinct + low, number[places]
    encoded = pa.array(values).dictionary_encode()
    distinct = encoded.dictionary.to_numpy()
    order = np.argsort(distinct)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return distinct[order], rank[encoded.indices.to_numpy()]


def distinct_rows(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows that agree in all columns get the same number.

    Args:
        columns: at least one, all of the same length, of integers.

    Returns:
        (the first row of each number, the number of each row); numbers follow the columns' order.
    """
    number = np.zeros(len(columns[0]), dtype=np.int64)
    size = 1
    for column in columns if len(number) else ():
        low, high = int(column.min()), int(column.max())
        width = high - low + 1
        if size * width >= 1 << 62:
            distinct, number = compact(number)
            size = len(distinct)
        if size * width >= 1 << 62:
            distinct, column = compact(column)
            low, width = 0, len(distinct)
        if width > 1:
            # In place: there may be many rows.
            number *= width
            number += column
            number -= low
            size *= width
    distinct, number = compact(number)
    first = np.empty(len(distinct), dtype=np.int64)
    rows = np.arange(len(number), dtype=np.int32 if len(number) < 1 << 31 else np.int64)
    # Of several assignments to one place the last one stays: going backwards, the first row's.
    first[number[::-1]] = rows[::-1]
    return first, number


def row_set(rows: np.ndarray, count: int) -> np.ndarray:
    """Mask of ``count`` rows that are named in ``rows``; negative ones name none."""
    mask = np.zeros(count, dtype=bool)
    mask[rows[rows >= 0]] = True
    return mask


def nullable(values: np.ndarray) -> pa.Array:
    """Return an int64 column with -1 as null."""
    return pa.array(values.astype(np.int64), mask=values == -1)


def pick(values: np.ndarray, rows: np.ndarray, otherwise: np.ndarray | float = -1) -> np.ndarray:
    """Return the values of rows, ``otherwise`` for row -1."""
    picked = np.full(len(rows), otherwise, dtype=values.dtype)
    known = rows >= 0
    picked[known] = values[rows[known]]
    return picked


def first_with(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the index of the first key that equals each wanted one; -1 for none, and below 0."""
    order = np.argsort(keys, kind="stable")
    at = np.searchsorted(keys[order], wanted)
    hit = (wanted >= 0) & (np.append(keys[order], -1)[at] == wanted)
    return np.where(hit, np.append(order, -1)[at], -1)


def run_starts(*columns: np.ndarray) -> np.ndarray:
    """Mask of the rows that differ in some column from the row before; the first one does."""
    new = np.ones(len(columns[0]), dtype=bool)
    new[1:] = columns[0][1:] != columns[0][:-1]
    for column in columns[1:]:
        new[1:] |= column[1:] != column[:-1]
    return new


@dataclass(frozen=True, slots=True)
class Union:
    """A union of intervals: disjoint, ascending; ``before_ns`` is the length of all before each."""

    start_ns: np.ndarray
    end_ns: np.ndarray
    before_ns: np.ndarray

    def until(self, time_ns: np.ndarray) -> np.ndarray:
        """Length of the union before each time."""
        if not len(self.start_ns):
            return np.zeros(len(time_ns), dtype=np.int64)
        at = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        row = np.maximum(at, 0)
        inside = np.minimum(time_ns, self.end_ns[row]) - self.start_ns[row]
        return np.where(at >= 0, self.before_ns[row] + inside, 0)

    def within(self, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """Length of the union inside each interval."""
        return self.until(end_ns) - self.until(start_ns)


def union(start_ns: np.ndarray, end_ns: np.ndarray) -> Union:
    """The union of intervals in any order; those without a length add nothing."""
    order = np.argsort(start_ns, kind="stable")
    order = order[end_ns[order] > start_ns[order]]
    if not len(order):
        return Union(*np.zeros((3, 0), np.int64))
    start, reach = start_ns[order], np.maximum.accumulate(end_ns[order])
    first = np.append(0, np.flatnonzero(start[1:] > reach[:-1]) + 1)
    last = np.append(first[1:], len(order)) - 1
    begin, end = start[first], reach[last]
    length = end - begin
    return Union(begin, end, np.cumsum(length) - length)


def innermost(
    start_ns: np.ndarray, end_ns: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give each nanosecond to one of the intervals that hold it: to the one that began last.

    Of those that began together it is the shortest.

    Returns:
        The interval's row, start and end of each piece. Pieces are disjoint, ascending, not empty.
    """
    ends = end_ns.tolist()
    pieces: list[tuple[int, int, int]] = []
    running: list[int] = []  # rows, the one that began last on top
    now_ns = 0

    def run_until(time_ns: int) -> None:
        nonlocal now_ns
        while running and now_ns < time_ns:
            row = running[-1]
            stop_ns = min(ends[row], time_ns)
            if stop_ns > now_ns:
                pieces.append((row, now_ns, stop_ns))
                now_ns = stop_ns
            if ends[row] <= now_ns:
                running.pop()

    order = np.lexsort((-end_ns, start_ns))
    order = order[end_ns[order] > start_ns[order]]
    for row, begin_ns in zip(order.tolist(), start_ns[order].tolist(), strict=True):
        run_until(begin_ns)
        now_ns = begin_ns
        running.append(row)
    run_until(max(ends, default=0))
    rows, starts, stops = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
    return rows, starts, stops


def spread(
    start_ns: np.ndarray, end_ns: np.ndarray, amount_ns: np.ndarray
) -> Callable[[np.ndarray], np.ndarray]:
    """Spread each amount evenly over its interval -> a function: what lies before each time.

    It returns floats, good to a few nanoseconds.
    """
    end_ns = np.maximum(end_ns, start_ns + 1)
    rate = amount_ns / (end_ns - start_ns)
    origin = int(start_ns.min(initial=np.iinfo(np.int64).max))

    def growth(bounds: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """Return the sum of the rates of all bounds before a time, each times the time since."""
        order = np.argsort(bounds, kind="stable")
        edges, rates = bounds[order], rate[order]
        total = np.append(0.0, np.cumsum(rates))
        moment = np.append(0.0, np.cumsum(rates * (edges - origin)))

        def until(time_ns: np.ndarray) -> np.ndarray:
            at = np.searchsorted(edges, time_ns, side="right")
            return (time_ns - origin).astype(np.float64) * total[at] - moment[at]

        return until

    begun, ended = growth(start_ns), growth(end_ns)
    return lambda time_ns: begun(time_ns) - ended(time_ns)
