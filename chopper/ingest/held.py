"""Traces whose tables stay where an engine's task read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pyarrow as pa

from chopper.collectors.formats.kineto import ParsedTrace
from chopper.collectors.formats.kineto.large import LargeTrace, TraceStretch, WholeTrace
from chopper.engines import Done, Held, Kept
from chopper.engines.spill import Folder
from chopper.storage.store import HeldTables
from chopper.tables import TABLES

Key = TypeVar("Key", str, tuple[int, str])


@dataclass(frozen=True)
class OneOf:
    """The tables of one of the traces that a task read: number ``at`` of those that are held."""

    held: Held
    at: int

    def get(self) -> dict[str, pa.Table]:
        """Return the tables by name."""
        tables: dict[str, pa.Table] = self.held.get()[self.at]
        return tables


@dataclass(frozen=True, eq=False)
class TraceTables(Mapping[str, pa.Table]):
    """Tables that are held elsewhere, each read when it is asked for.

    Attributes:
        rows_count: rows of each.
        small: those that are in memory all the same.
        stretches: of a trace that is too large to be read as a whole.
    """

    held: HeldTables
    rows_count: Mapping[str, int]
    small: Mapping[str, pa.Table] = field(default_factory=dict)
    stretches: Sequence[TraceStretch] = ()

    def kept_by(self, folder: Folder | None) -> TraceTables:
        """Return the tables of a trace that was cut, with what keeps the folder of its rows."""
        assert isinstance(self.held, WholeTrace)
        stretches = [replace(stretch, keeper=folder) for stretch in self.stretches]
        return replace(self, held=replace(self.held, keeper=folder), stretches=stretches)

    def __getitem__(self, name: str) -> pa.Table:
        if name in self.small:
            return self.small[name]
        if name not in self.rows_count:
            raise KeyError(name)
        tables: Mapping[str, pa.Table] = self.held.get()
        return tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows_count)

    def __len__(self) -> int:
        return len(self.rows_count)


def traces_of(done: Done, folder: Folder | None = None) -> list[ParsedTrace]:
    """Return the traces that a task read, their tables held.

    Args:
        done: what the task returned.
        folder: where it put a trace that was too large.
    """
    if isinstance(done.value, LargeTrace):
        trace = done.value.trace
        return [replace(trace, tables=in_stretches(done.value).kept_by(folder))]
    assert done.held is not None
    return [
        replace(trace, tables=TraceTables(OneOf(done.held, at), rows_count))
        for at, (trace, rows_count) in enumerate(done.value)
    ]


def in_stretches(large: LargeTrace) -> TraceTables:
    """Return the tables of a trace that is read a stretch at a time."""
    first = large.stretches[0]
    whole = WholeTrace(first.path, first.folder, len(large.stretches))
    return TraceTables(whole, large.rows_count, large.trace.tables, large.stretches)


def kept(traces: Sequence[ParsedTrace]) -> Kept:
    """Return traces without their tables, with the rows of each; and the tables, to be held."""
    tables = [valid(trace.tables) for trace in traces]
    small = [
        (replace(trace, tables={}, held_span_ns=trace.span_ns), rows_of(own))
        for trace, own in zip(traces, tables, strict=True)
    ]
    return Kept(small, tables)


def loaded(trace: ParsedTrace) -> ParsedTrace:
    """Return a trace with its tables in memory."""
    held = trace.tables
    return replace(trace, tables=held.held.get() if isinstance(held, TraceTables) else held)


def valid(tables: Mapping[Key, pa.Table]) -> dict[Key, pa.Table]:
    """Return tables, by name or by (rank, name), each validated.

    Raises:
        SchemaError: a table lacks or mistypes a column.
    """
    return {
        key: TABLES[key if isinstance(key, str) else key[1]].validate(table)
        for key, table in tables.items()
    }


def rows_of(tables: Mapping[str, pa.Table]) -> dict[str, int]:
    """Return the rows of tables by name."""
    return {name: table.num_rows for name, table in tables.items()}
