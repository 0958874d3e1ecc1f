"""Traces whose tables stay where an engine's task read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from chopper.collectors.formats.kineto import ParsedTrace
from chopper.collectors.formats.kineto.chunked import LargeTrace, TraceStretch, WholeTrace
from chopper.storage.results import leave
from chopper.storage.store import HeldTables
from chopper.tables import TABLES

Key = TypeVar("Key", str, tuple[int, str])


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


def in_stretches(large: LargeTrace) -> TraceTables:
    """Return the tables of a trace that is read a stretch at a time."""
    first = large.stretches[0]
    together = WholeTrace(first.path, first.folder, len(large.stretches))
    return TraceTables(together, large.rows_count, large.trace.tables, large.stretches)


def left(trace: ParsedTrace, folder: Path | None) -> ParsedTrace:
    """Return a trace whose tables were left for later tasks: in a file, or in memory."""
    tables = left_tables(valid(trace.tables), folder)
    return replace(trace, tables=tables, held_span_ns=trace.span_ns)


def left_tables(tables: dict[str, pa.Table], folder: Path | None) -> TraceTables:
    """Leave tables for later tasks: in a file, or in memory."""
    return TraceTables(leave(tables, folder), rows_of(tables))


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
