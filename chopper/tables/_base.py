"""What a table is: a name, a version and typed, documented columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from chopper.errors import SchemaError

if TYPE_CHECKING:
    import pyarrow as pa

ColumnType = Literal["int64", "int32", "int16", "float64", "bool", "string", "text"]
"""``string`` is dictionary-encoded (few distinct values), ``text`` is plain UTF-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column: its type, its unit as it appears in the name, and what it means."""

    name: str
    type: ColumnType
    doc: str
    unit: str | None = None
    nullable: bool = False


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
        """A table of this schema without rows."""
        return self.arrow.empty_table()
