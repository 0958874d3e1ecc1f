"""Exact sums and statistics by group, and numbers of tables with NaN for what is not known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.columns import dictionary, distinct_rows, ints, matching, strings

Texts = tuple[np.ndarray, list[str]]
"""Codes and the texts that they stand for; code -1 is null."""


def reals(table: pa.Table, name: str) -> np.ndarray:
    """Return a numeric column as float64, NaN for null."""
    return table[name].to_numpy(zero_copy_only=False).astype(np.float64)


def real_or_null(values: np.ndarray) -> pa.Array:
    """Return floats as an Arrow array, null for NaN."""
    return pa.array(values, mask=np.isnan(values))


def whole_or_null(values: np.ndarray) -> pa.Array:
    """Return floats rounded to int64, null for NaN."""
    unknown = np.isnan(values)
    return pa.array(np.rint(np.where(unknown, 0, values)).astype(np.int64), mask=unknown)


def text_rows(texts: Texts, rows: np.ndarray) -> pa.DictionaryArray:
    """Return the texts of the given rows."""
    return dictionary(texts[0][rows], texts[1])


def sum_by(group: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Return the exact int64 sum of the values of each of ``size`` groups."""
    total = np.zeros(size, dtype=np.int64)
    np.add.at(total, group, values)
    return total


class Groups:
    """Rows that agree in several integer keys (``of_row``), numbered in the order of the keys."""

    def __init__(self, keys: Sequence[np.ndarray]) -> None:
        self.first, self.of_row = distinct_rows(keys)

    def __len__(self) -> int:
        return len(self.first)

    @cached_property
    def count(self) -> np.ndarray:
        """Rows of each group."""
        return np.bincount(self.of_row, minlength=len(self))

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the exact int64 sum of each group."""
        return sum_by(self.of_row, values, len(self))

    def mean(self, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the weighted mean of each group, over the values that are not NaN."""
        known = ~np.isnan(values)
        weight = weights[known].astype(np.float64)
        whole = np.bincount(self.of_row[known], weights=weight, minlength=len(self))
        total = np.bincount(self.of_row[known], weights=weight * values[known], minlength=len(self))
        mean: np.ndarray = np.full(len(self), np.nan)
        np.divide(total, whole, out=mean, where=whole > 0)
        return mean


def rows_of(keys: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> np.ndarray:
    """Return the first row with each wanted combination of integer keys, -1 for none."""
    _, number = distinct_rows([np.concatenate(pair) for pair in zip(keys, wanted, strict=True)])
    size = len(keys[0])
    row = np.full(int(number.max(initial=-1)) + 1, -1, dtype=np.int64)
    row[number[:size][::-1]] = np.arange(size)[::-1]
    return row[number[size:]]


def time_in(pieces: pa.Table, rank: np.ndarray, row: np.ndarray, cause: str) -> np.ndarray:
    """Return the exclusive time of device events in the causes whose id begins so. PIECE -> ns."""
    codes, causes = strings(pieces, "cause")
    event = ints(pieces, "event_row")
    wanted = matching(codes, causes, lambda name: name.startswith(cause)) & (event >= 0)
    at = rows_of([rank, row], [ints(pieces, "rank")[wanted], event[wanted]])
    known = at >= 0
    return sum_by(at[known], ints(pieces, "time_ns")[wanted][known], len(rank))
