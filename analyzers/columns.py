"""Columns of Arrow tables as the numpy arrays that analyzers compute on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable


def ints(table: pa.Table, name: str, *, null: int = -1) -> np.ndarray:
    """An integer column as int64; nulls become ``null``, which must not occur as a value."""
    column = table[name].combine_chunks()
    if column.null_count:
        column = column.fill_null(null)
    return column.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)


def strings(table: pa.Table, name: str) -> tuple[np.ndarray, list[str]]:
    """A dictionary column as (int64 codes, values); nulls are code -1."""
    column = table[name].unify_dictionaries().combine_chunks()
    indices = column.indices
    if indices.null_count:
        indices = indices.fill_null(-1)
    codes = indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes, column.dictionary.to_pylist()


def matching(codes: np.ndarray, values: list[str], predicate: Callable[[str], Any]) -> np.ndarray:
    """Mask of the rows whose string satisfies ``predicate``, evaluated once per value."""
    table = np.array([bool(predicate(v)) for v in values] + [False], dtype=bool)
    return table[codes]


def dictionary(codes: np.ndarray, values: list[str]) -> pa.DictionaryArray:
    """Codes (-1 is null) and distinct values → a dictionary array as tables declare it."""
    mask = codes < 0
    return pa.DictionaryArray.from_arrays(
        pa.array(np.where(mask, 0, codes).astype(np.int32), mask=mask),
        pa.array(values, type=pa.string()),
    )


def nullable(values: np.ndarray, *, null: int = -1) -> pa.Array:
    """An int64 array in which ``null`` stands for null."""
    return pa.array(values.astype(np.int64), mask=values == null)
