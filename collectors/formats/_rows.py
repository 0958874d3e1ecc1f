"""Joins between rows that several formats need."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from chopper.collectors.counters import table_of
from chopper.collectors.formats.arrays import NO_VALUE

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa


def lookup(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Row of each wanted key, the first of equal ones; -1 for none."""
    if not len(keys):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    at = np.minimum(np.searchsorted(ordered, wanted), len(keys) - 1)
    hit = (ordered[at] == wanted) & (wanted != NO_VALUE)
    return np.where(hit, order[at], -1)


def taken(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Values of rows; ``NO_VALUE`` where there is no row."""
    if not len(values):
        return np.full(len(rows), NO_VALUE, dtype=np.int64)
    return np.where(rows >= 0, values[np.maximum(rows, 0)], NO_VALUE)


def counters_table(
    source: str, found: Iterable[tuple[int, str | None, str | None, object]]
) -> pa.Table:
    """KERNEL_COUNTER from (dispatch, kernel, counter, value); instances of a counter are added up."""
    sums: dict[tuple[int, str, str], float | None] = {}
    for dispatch, kernel, counter, cell in found:
        if kernel is None or counter is None:
            continue
        try:
            value = float(cell)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        key = (dispatch, kernel, counter)
        before = sums.get(key, 0.0)
        sums[key] = None if before is None or not math.isfinite(value) else before + value
    return table_of(
        [
            (source, dispatch, kernel, 0, None, counter, value, None)
            for (dispatch, kernel, counter), value in sums.items()
        ]
    )
