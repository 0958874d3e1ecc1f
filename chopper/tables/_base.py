"""Declared tables: a name, a version and typed, documented columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from chopper.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

ColumnType = Literal["int64", "int32", "int16", "float64", "bool", "string", "text"]
"""``string`` is dictionary-encoded (few distinct values), ``text`` is plain UTF-8."""


_UNITS = (
    *("bytes_per_s", "flop_per_s", "ns", "bytes", "hz", "w", "j", "c", "flop"),
    *("ratio", "factor", "count"),
)


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its type and what it means. Its name ends in its unit."""

    name: str
    type: ColumnType
    doc: str
    nullable: bool = False

    @property
    def unit(self) -> str | None:
        """Unit of the values, None for words, names, numbers of things and plain numbers."""
        if self.name in _UNITS:
            return self.name
        return next((unit for unit in _UNITS if self.name.endswith(f"_{unit}")), None)


def column(name: str, kind: ColumnType, doc: str) -> Column:
    """Declare a column that is never null."""
    return Column(name, kind, doc)


def optional(name: str, kind: ColumnType, doc: str) -> Column:
    """Declare a column that is null where the value is not known."""
    return Column(name, kind, doc, nullable=True)


def ns(name: str, doc: str) -> Column:
    """Declare a time in nanoseconds that is never null."""
    return Column(name, "int64", doc)


def count(name: str, doc: str) -> Column:
    """Declare a number of things that is never null."""
    return Column(name, "int64", doc)


@dataclass(frozen=True)
class Table:
    """A declared table. The same object validates data and generates its documentation."""

    name: str
    version: int
    doc: str
    columns: tuple[Column, ...]

    @cached_property
    def arrow(self) -> pa.Schema:
        """The Arrow schema, with the table's name and version in its metadata."""
        import pyarrow as pa

        types = {
            "int64": pa.int64(),
            "int32": pa.int32(),
            "int16": pa.int16(),
            "float64": pa.float64(),
            "bool": pa.bool_(),
            "string": pa.dictionary(pa.int32(), pa.string()),
            "text": pa.string(),
        }
        return pa.schema(
            [pa.field(c.name, types[c.type], nullable=c.nullable) for c in self.columns],
            metadata={"chopper.table": self.name, "chopper.version": str(self.version)},
        )

    def validate(self, table: pa.Table) -> pa.Table:
        """Return ``table`` when it has exactly the declared columns, else raise.

        Raises:
            SchemaError: a column is missing, unknown, of another type, or null where it
                must not be.
        """
        have = {field.name: field.type for field in table.schema}
        want = {field.name: field.type for field in self.arrow}
        for name, kind in want.items():
            if name not in have:
                raise SchemaError(f"table {self.name}: column {name} is missing")
            if have[name] != kind:
                raise SchemaError(
                    f"table {self.name}: column {name} is {have[name]}, expected {kind}"
                )
        unknown = sorted(set(have) - set(want))
        if unknown:
            raise SchemaError(f"table {self.name}: undeclared column {unknown[0]}")
        for column in self.columns:
            if not column.nullable and table[column.name].null_count:
                raise SchemaError(f"table {self.name}: column {column.name} holds nulls")
        return table.select([c.name for c in self.columns]).replace_schema_metadata(
            self.arrow.metadata
        )

    def completed(self, table: pa.Table) -> pa.Table:
        """``table`` with nulls for what its older version of chopper did not record.

        Raises:
            SchemaError: a newer version wrote it, or it lacks a column that cannot be null.
        """
        import pyarrow as pa

        said = (table.schema.metadata or {}).get(b"chopper.version", b"0")
        if not said.isdigit() or len(said) > 9:
            raise SchemaError(f"table {self.name}: version {said!r} is not a number")
        written = int(said)
        if written > self.version:
            raise SchemaError(
                f"table {self.name}: version {written}, and this chopper knows {self.version}: "
                "read it with the version that recorded it, or a newer one"
            )
        for column, field in zip(self.columns, self.arrow, strict=True):
            if column.nullable and field.name not in table.schema.names:
                table = table.append_column(field, pa.nulls(table.num_rows, field.type))
        return self.validate(table)

    def empty(self) -> pa.Table:
        """Return the table without rows."""
        return self.arrow.empty_table()

    def of(self, columns: Mapping[str, Any]) -> pa.Table:
        """Build the table from its columns by name: Arrow or numpy arrays, or lists."""
        import pyarrow as pa

        return pa.table({name: columns[name] for name in self.arrow.names}, schema=self.arrow)

    def of_rows(self, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
        """Build the table from rows; what a row does not name is null."""
        import pyarrow as pa

        return pa.Table.from_pylist(rows, schema=self.arrow)

    def joined(self, parts: Sequence[pa.Table]) -> pa.Table:
        """Put tables of this schema one after the other, with one dictionary per column."""
        import pyarrow as pa

        found = pa.concat_tables([self.empty(), *parts])
        return found.unify_dictionaries().combine_chunks()
