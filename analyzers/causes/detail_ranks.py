"""Choice of the ranks of a large run for which events are kept in detail."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.columns import ints, matching, strings

MAX_DETAIL_RANKS = 16
MAX_DETAIL_ROWS = 400_000
_KINDS = ("", "compute.", "communication.", "idle.", "copy.")
"""Beginnings of causes by whose time ranks are told apart."""


def detail_ranks(causes: pa.Table, rows_count: Mapping[int, int]) -> list[int]:
    """Choose representative ranks: with most, least and median time in each kind of cause.

    Args:
        causes: ``rank``, ``cause``, ``time_ns``, as of all ranks' totals.
        rows_count: rank → host spans and device events.

    Returns:
        At least one and at most ``MAX_DETAIL_RANKS`` ranks, ascending. Several of them have at most
        ``MAX_DETAIL_ROWS`` rows together.
    """
    chosen: list[int] = []
    rows = 0
    for rank in dict.fromkeys(_candidates(causes)):
        if len(chosen) == MAX_DETAIL_RANKS:
            break
        if not chosen or rows + rows_count[rank] <= MAX_DETAIL_ROWS:
            chosen.append(rank)
            rows += rows_count[rank]
    return sorted(chosen)


def _candidates(causes: pa.Table) -> Iterator[int]:
    """Yield ranks, those that matter most first."""
    ranks, of_row = np.unique(ints(causes, "rank"), return_inverse=True)
    time_ns, codes = ints(causes, "time_ns"), strings(causes, "cause")
    orders = []
    for kind in _KINDS:
        inside = matching(*codes, operator.methodcaller("startswith", kind))
        total = np.zeros(len(ranks), np.int64)
        np.add.at(total, of_row[inside], time_ns[inside])
        orders.append(ranks[np.lexsort((ranks, -total))].tolist())
    middle = len(ranks) // 2
    for at in (0, -1, middle):
        yield from (order[at] for order in orders)
    for at in range(1, len(ranks)):
        yield from (order[at] for order in orders)
