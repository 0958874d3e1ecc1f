"""Tables that a run holds or that its attribution makes, declared once in the JSON files here.

Views declare their own, in ``chopper.analyzers.views``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from chopper.errors import SchemaError
from chopper.tables.ranges import NUMBER_MOST, TIME_MOST_NS, TOTAL_MOST_NS
from chopper.wording import unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

ColumnType = Literal["int64", "int32", "int16", "float64", "bool", "string", "text"]
"""``string`` is dictionary-encoded (few distinct values), ``text`` is plain UTF-8."""


TIME_OF = {
    "host_span": "start_ns",
    "device_event": "start_ns",
    "synchronization": "start_ns",
    "memory_event": "time_ns",
}
"""Tables whose rows are in the order of this column."""


_FRACTIONS = ("bytes_per_s", "flop_per_s", "w", "j", "c", "ratio", "factor")
"""Units whose values are usually no whole numbers."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its type and meaning. Its name ends in its unit."""

    name: str
    type: ColumnType
    doc: str
    nullable: bool = False

    @property
    def unit(self) -> str | None:
        """Unit of the values, None for words, names, numbers of things and plain numbers."""
        return unit(self.name)


def column(name: str, doc: str, type: ColumnType | None = None) -> Column:
    """Declare a column that is never null, of its unit's type; ``string`` without a unit."""
    if type is None and (measured := unit(name)) is not None:
        type = "float64" if measured in _FRACTIONS else "int64"
    return Column(name, type or "string", doc)


def optional(name: str, doc: str, type: ColumnType | None = None) -> Column:
    """Declare a column that is null where the value is not known."""
    return replace(column(name, doc, type), nullable=True)


@dataclass(frozen=True)
class Table:
    """A declared table. The same object validates data and generates its documentation."""

    name: str
    doc: str
    columns: tuple[Column, ...]
    version: int = 1

    @property
    def summary(self) -> str:
        """First line of the description."""
        return self.doc.partition("\n")[0]

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
        """Return ``table`` if it has the declared columns, else raise SchemaError."""
        for column, field in zip(self.columns, self.arrow, strict=True):
            name = f"table {self.name}: column {column.name}"
            if column.name not in table.schema.names:
                raise SchemaError(f"{name} is missing")
            values = table[column.name]
            if values.type != field.type:
                raise SchemaError(f"{name} is {values.type}, expected {field.type}")
            if not column.nullable and values.null_count:
                raise SchemaError(f"{name} holds nulls")
        unknown = sorted(set(table.schema.names) - set(self.arrow.names))
        if unknown:
            raise SchemaError(f"table {self.name}: undeclared column {unknown[0]}")
        return table.select([c.name for c in self.columns]).replace_schema_metadata(
            self.arrow.metadata
        )

    def check_names(self, schema: pa.Schema) -> None:
        """Raise a `SchemaError` if a column occurs twice: which of both counts, nobody knows."""
        if len({*schema.names}) < len(schema.names):
            raise SchemaError(f"table {self.name}: a column occurs twice")

    def completed(self, table: pa.Table) -> pa.Table:
        """Return ``table`` with nulls for what its older version of chopper did not record.

        Columns that this version no longer has are left out.

        Raises:
            SchemaError: a newer version wrote it, or it lacks a column that cannot be null, or has
                one twice.
        """
        import pyarrow as pa

        self.check_names(table.schema)
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
        known = [name for name in self.arrow.names if name in table.schema.names]
        return self.validate(table.select(known))

    def check_values(self, table: pa.Table, after_ns: int = -TIME_MOST_NS) -> int:
        """Check the times of rows that others may have written, before anything is computed.

        Args:
            table: the rows; columns may be missing.
            after_ns: time of the row before them.

        Returns:
            The time of the last row, of a table whose rows are in an order.

        Raises:
            SchemaError: a time or a duration is impossible, or the rows are in another order.
        """
        import numpy as np
        import pyarrow.compute as pc

        known = {
            name: table[name].drop_null().to_numpy()
            for name in ("number", "time_ns", "start_ns", "end_ns", "dur_ns", "span_ns")
            if name in table.schema.names and table.num_rows > table[name].null_count
        }
        if "number" in known and (abs(known["number"] + 0.0) > NUMBER_MOST).any():
            raise SchemaError(f"table {self.name}: column number holds one beyond {NUMBER_MOST}")
        times = {name: values for name, values in known.items() if name != "number"}
        for name, values in times.items():
            least = 0 if name in ("dur_ns", "span_ns") else -TIME_MOST_NS
            odd = values[(values < least) | (values > TIME_MOST_NS)]
            if len(odd):
                raise SchemaError(f"table {self.name}: column {name} holds {odd[0]}, no time")
            most = values.sum(dtype=float) if least == 0 else int(values.max()) - int(values.min())
            if most > TOTAL_MOST_NS:
                raise SchemaError(f"table {self.name}: column {name} covers more than four years")
        if {"start_ns", "end_ns"} <= times.keys():
            ends_early = pc.less(table["end_ns"], table["start_ns"])
            if pc.any(ends_early).as_py():
                raise SchemaError(f"table {self.name}: a row ends before it starts")
        order = TIME_OF.get(self.name)
        if order not in times:
            return after_ns
        if (np.diff(times[order], prepend=after_ns) < 0).any():
            raise SchemaError(f"table {self.name}: the rows are not in the order of {order}")
        return int(times[order][-1])

    def empty(self) -> pa.Table:
        """Return the table without rows, always the same: each would take 12 kB."""
        return self._empty

    @cached_property
    def _empty(self) -> pa.Table:
        return self.arrow.empty_table()

    def of(self, columns: Mapping[str, Any]) -> pa.Table:
        """Build the table from its columns by name: Arrow or numpy arrays, or lists."""
        import pyarrow as pa

        return pa.table({name: columns[name] for name in self.arrow.names}, schema=self.arrow)

    def of_rows(self, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
        """Build the table from rows; what a row does not name is null."""
        import pyarrow as pa

        try:
            return pa.Table.from_pylist(rows, schema=self.arrow)
        except UnicodeEncodeError:  # a file's name that is not UTF-8
            escaped = [{name: _escaped(value) for name, value in row.items()} for row in rows]
            return pa.Table.from_pylist(escaped, schema=self.arrow)

    def joined(self, parts: Sequence[pa.Table]) -> pa.Table:
        """Put tables of this schema one after the other, with one dictionary per column."""
        import pyarrow as pa

        table = pa.concat_tables([self.empty(), *parts])
        return table.unify_dictionaries().combine_chunks()


def _escaped(value: Any) -> Any:
    """Return a value of a row; surrogates in text, which UTF-8 does not have, are escaped."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _declared(group: str) -> tuple[Table, ...]:
    text = Path(__file__).with_name(f"{group}.json").read_bytes()
    return msgspec.json.decode(text, type=tuple[Table, ...])


GROUPS = {group: _declared(group) for group in ("trace", "telemetry", "memory", "analysis")}
"""Tables of kernel traces, of samplers, of the allocator's snapshots, and those analysis derives.

Rows of telemetry carry the middle of the reading and how long it took: what a row says held at
some moment in ``time_ns`` ± ``span_ns`` / 2. Samples are joined to a trace by time.
"""
TABLES = {table.name: table for tables in GROUPS.values() for table in tables}
