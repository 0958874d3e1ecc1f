"""The tables that the library returns: rows in Arrow, handed on to pandas, Polars or Arrow."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from chopper import wording as fmt
from chopper.errors import UsageError, printable

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

    from chopper import tables

_SHOWN_ROWS = 20
_CELL_MOST = 48
"""Characters of a cell as text; the rows hold the whole."""


_LINE_MOST = 112


class Table:
    """Rows with named columns: ``.df()``, ``.pl()`` or ``.arrow()`` hands them on.

    A column's name ends in its unit (``step_ns``, ``share_ratio``, ``message_bytes``); null is
    unknown. Programs that read Arrow streams (DuckDB, Polars, pandas) take the table itself.

    Attributes:
        name: what the rows are, for example the name of a view.
        doc: what the table shows, in words.
        columns: name of each column → what it holds; empty for columns of a query.
        reason: why there are no rows; None where there are some, or where it is not known.
    """

    def __init__(
        self,
        rows: pa.Table,
        name: str,
        *,
        doc: str = "",
        columns: Mapping[str, str] | None = None,
        reason: str | None = None,
    ) -> None:
        fields = [
            pa.field(f.name, pa.string(), f.nullable) if pa.types.is_dictionary(f.type) else f
            for f in rows.schema
        ]
        self._rows = rows.cast(pa.schema(fields))
        self.name = name
        self.doc = doc
        self.columns = {n: (columns or {}).get(n, "") for n in rows.column_names}
        self.reason = None if rows.num_rows else reason

    @classmethod
    def declared(
        cls, rows: pa.Table, declaration: tables.Table, *, reason: str | None = None
    ) -> Table:
        """Return rows of a declared table, with its words."""
        words = {column.name: column.doc for column in declaration.columns}
        return cls(rows, declaration.name, doc=declaration.doc, columns=words, reason=reason)

    def df(self) -> pd.DataFrame:
        """Return the rows as a pandas DataFrame.

        Whole numbers stay whole: a column that may hold nulls is of pandas' ``Int64`` (or
        ``boolean``), because a double would round nanoseconds since 1970 to 256 ns.
        """
        import pandas as pd

        nullable = {pa.int16(): "Int16", pa.int32(): "Int32", pa.int64(): "Int64"}
        nullable |= {pa.bool_(): "boolean"}
        columns = {}
        for field in self._rows.schema:
            values = self._rows[field.name].to_pandas(
                types_mapper={k: pd.api.types.pandas_dtype(v) for k, v in nullable.items()}.get
                if field.nullable
                else None
            )
            columns[field.name] = values
        return pd.DataFrame(columns, columns=self._rows.column_names)

    def pl(self) -> pl.DataFrame:
        """Return the rows as a Polars DataFrame.

        Raises:
            UsageError: Polars is not installed.
        """
        try:
            import polars as pl
        except ImportError as exc:
            raise UsageError(
                "a Polars frame needs polars, which is not installed: "
                "pip install 'chopper-profiler[polars]'; .df() returns pandas, .arrow() Arrow"
            ) from exc
        found = pl.from_arrow(self._rows)
        assert isinstance(found, pl.DataFrame)
        return found

    def arrow(self) -> pa.Table:
        """Return the rows as an Arrow table."""
        return self._rows

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._rows.__arrow_c_stream__(requested_schema)

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the rows, as dicts by column."""
        for batch in self._rows.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def __repr__(self) -> str:
        return f"<chopper.Table {self.name!r}: {self._size()}>\n{self}"

    def __str__(self) -> str:
        """Return the first rows and columns as text, values in units for people."""
        names, rows = self._shown()
        if not rows:
            return f"No rows: {self.reason}." if self.reason else "No rows."
        cells = [[fmt.heading(n) for n in names], *rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        ends = list(itertools.accumulate(width + 2 for width in widths))
        fitting = max(sum(end <= _LINE_MOST for end in ends), 1)
        numbers = [_is_number(self._rows.schema.field(n)) for n in names[:fitting]]
        lines = [
            "  ".join(
                cell.rjust(width) if number else cell.ljust(width)
                for cell, width, number in zip(row, widths, numbers, strict=False)
            ).rstrip()
            for row in cells
        ]
        rest = [
            f"{fmt.plural(count, f'more {kind}')}"
            for count, kind in ((len(self) - len(rows), "row"), (len(names) - fitting, "column"))
            if count
        ]
        return "\n".join([*lines, *([f"… {' and '.join(rest)}"] if rest else [])])

    def _repr_html_(self) -> str:
        """Return the first rows for a notebook; the name of a column is its tooltip."""
        names, rows = self._shown()
        if not rows:
            return f"<p>{html.escape(str(self))}</p>"
        head = "".join(
            f'<th title="{html.escape(f"{n}: {self.columns[n]}")}">'
            f"{html.escape(fmt.heading(n))}</th>"
            for n in names
        )
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in rows
        )
        return (
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            f"<p>{html.escape(self.name)}: {self._size()}</p>"
        )

    def _size(self) -> str:
        return f"{fmt.plural(len(self), 'row')}, {fmt.plural(len(self.columns), 'column')}"

    def _shown(self) -> tuple[list[str], list[Sequence[str]]]:
        """Return the columns that have values in the first rows, and these rows as text."""
        first = self._rows.slice(0, _SHOWN_ROWS)
        names = [n for n in first.column_names if first[n].null_count < first.num_rows]
        cells = [
            [fmt.ellipsize(printable(fmt.cell(n, v)), _CELL_MOST) for v in first[n].to_pylist()]
            for n in names
        ]
        return names, [*zip(*cells, strict=True)]


def _is_number(field: pa.Field) -> bool:
    return bool(pa.types.is_integer(field.type) or pa.types.is_floating(field.type))
