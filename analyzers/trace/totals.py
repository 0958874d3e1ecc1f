"""Sums of pieces: small, however many events they are of, and exact when they are added up."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.trace.columns import distinct_rows, ints, matching, strings
from chopper.arrow import with_column

LEVELS: tuple[Literal["phase", "layer", "op", "kernel"], ...] = ("phase", "layer", "op", "kernel")
"""Levels whose values are strings: columns of `piece`."""
_FAN_IN = 32
"""Totals that are added up at a time."""
_OF_EVENTS = ("own_ns", "events_count")
_NO_EVENTS = {
    "number": pa.int64(),
    "key": pa.dictionary(pa.int32(), pa.string()),
    "own_ns": pa.int64(),
    "events_count": pa.int64(),
}

MAX_DETAIL_RANKS = 16
MAX_DETAIL_ROWS = 400_000
_KINDS = ("", "compute.", "communication.", "idle.", "copy.")
"""Beginnings of causes by whose time ranks are told apart."""


@dataclass(frozen=True)
class Totals:
    """Times of pieces, added up.

    Attributes:
        causes: ``rank``, ``step_index``, ``number`` (of the step), ``cause``, ``time_ns``.
        levels: level → ``number``, ``key`` (the level's value), ``cause``, ``time_ns``, over ranks.
        events: level → ``number``, ``key``, ``own_ns``, ``events_count``: sums of the durations of
            device events and their number, over ranks.
    """

    causes: pa.Table
    levels: Mapping[str, pa.Table]
    events: Mapping[str, pa.Table]

    def after(self, windows_count: int) -> Totals:
        """Return the totals with step indices offset by the number of preceding windows."""
        return replace(self, causes=counted_on(self.causes, windows_count))

    def of_steps(self, numbers: Collection[int]) -> Totals:
        """Return the part in these steps; -1 for windows without a number."""

        def within(table: pa.Table) -> pa.Table:
            return table.filter(np.isin(ints(table, "number"), [*numbers]))

        return Totals(
            within(self.causes),
            {level: within(table) for level, table in self.levels.items()},
            {level: within(table) for level, table in self.events.items()},
        )


def counted_on(table: pa.Table, windows_count: int) -> pa.Table:
    """Return a table with ``windows_count`` added to its ``step_index``."""
    index = pc.add(table["step_index"], pa.scalar(windows_count, pa.int32()))
    return with_column(table, "step_index", index)


def totals_of(
    pieces: pa.Table, windows: pa.Table, events: Mapping[int, tuple[pa.Table, pa.Table]]
) -> Totals:
    """Add up some ranks. PIECE, WINDOW, rank -> (DEVICE_EVENT, EVENT_LINK) -> totals."""
    numbered = pieces.append_column("number", _numbers(windows, pieces))
    by_rank = [_event_totals(windows, rank, *tables) for rank, tables in events.items()]
    return Totals(
        _sums(numbered, ("rank", "step_index", "number", "cause"), ("time_ns",)),
        {
            level: _sums(numbered, ("number", level, "cause"), ("time_ns",)).rename_columns(
                ["number", "key", "cause", "time_ns"]
            )
            for level in LEVELS
        },
        {level: _added([totals[level] for totals in by_rank], _OF_EVENTS) for level in LEVELS},
    )


def _numbers(windows: pa.Table, rows: pa.Table) -> pa.Array:
    """Return the step's number of each row, null where its window has none."""
    of_window = window_keys(windows)
    order = np.argsort(of_window)
    at = order[np.searchsorted(of_window[order], window_keys(rows))]
    return windows["number"].combine_chunks().take(pa.array(at))


def window_keys(table: pa.Table) -> np.ndarray:
    """Return a number for the window of each row: of its rank and its step's index."""
    keys: np.ndarray = (ints(table, "rank") << 32) + ints(table, "step_index")
    return keys


def _event_totals(
    windows: pa.Table, rank: int, device_event: pa.Table, event_link: pa.Table
) -> dict[str, pa.Table]:
    """Add up the durations of one rank's device events in its windows."""
    inside = event_link["step_index"].is_valid()
    step_index = event_link["step_index"].filter(inside)
    of_rank = pa.array(np.full(len(step_index), rank))
    columns = {
        "number": _numbers(windows, pa.table({"rank": of_rank, "step_index": step_index})),
        "own_ns": device_event["dur_ns"].filter(inside),
        "events_count": pa.array(np.ones(len(step_index), np.int64)),
    }
    keys: dict[str, pa.ChunkedArray] = {n: event_link[n] for n in LEVELS if n != "kernel"}
    return {
        level: _sums(
            pa.table({**columns, "key": key.filter(inside)}), ("number", "key"), _OF_EVENTS
        )
        for level, key in {**keys, "kernel": device_event["name"]}.items()
    }


def merged(parts: Iterable[Totals]) -> Totals:
    """Add up the totals of several ranks, one or more; taken as they come."""
    remaining = iter(parts)
    sums = []
    while batch := [*itertools.islice(remaining, _FAN_IN)]:
        sums.append(_merged(batch))
    return sums[0] if len(sums) == 1 else merged(sums)


def _merged(parts: Sequence[Totals]) -> Totals:
    return Totals(
        pa.concat_tables([part.causes for part in parts]).unify_dictionaries().combine_chunks(),
        {level: _added([p.levels[level] for p in parts], ("time_ns",)) for level in LEVELS},
        {level: _added([p.events[level] for p in parts], _OF_EVENTS) for level in LEVELS},
    )


def _added(tables: Sequence[pa.Table], values: Sequence[str]) -> pa.Table:
    """Add up tables of the same columns."""
    if not tables:
        return pa.table({n: pa.array([], t) for n, t in _NO_EVENTS.items()})
    table = pa.concat_tables(tables)
    return _sums(table, [n for n in table.column_names if n not in values], values)


def _sums(table: pa.Table, keys: Sequence[str], values: Sequence[str]) -> pa.Table:
    """Sum integer columns over the rows that agree in all keys; in the order of the keys."""
    grouped = table.select([*keys, *values]).unify_dictionaries().combine_chunks()
    first, group = distinct_rows([_codes(grouped, key) for key in keys])
    summed = grouped.select([*keys]).take(pa.array(first))
    for name in values:
        total = np.zeros(len(first), dtype=np.int64)
        np.add.at(total, group, ints(grouped, name))
        summed = summed.append_column(name, pa.array(total))
    return summed


def _codes(table: pa.Table, name: str) -> np.ndarray:
    """Return a column as numbers that are equal where its values are; nulls are -1."""
    if pa.types.is_dictionary(table.schema.field(name).type):
        return strings(table, name)[0]
    return ints(table, name)


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
