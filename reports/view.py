"""The page of one detailed table of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper import wording as fmt
from chopper.reports.details import REASONS
from chopper.reports.page import Cell, Column, Items, Page, Paragraph, Table

if TYPE_CHECKING:
    import pyarrow as pa

    from chopper.analyzers.views import View

_ROWS = 20
_ALSO_NAMING = ("phase", "window")
"""Columns that tell rows apart, wherever they stand."""
_NAMED_ROWS = 4


def page(view: View, table: pa.Table, *, top: int | None = None) -> Page:
    """Return the page of a view.

    Columns stand in order of importance. Those without any value are named below the table; why
    rows lack a value stands there too, in full.

    Args:
        view: which one.
        table: its declared table.
        top: rows; None for 20.
    """
    return Page(
        title=view.title,
        headline="",
        summary=(
            Paragraph(view.summary, "dim"),
            *_blocks(view, table, _ROWS if top is None else top),
        ),
    )


def nothing(view: View) -> str:
    """Return why a view has no rows."""
    return f"No rows: {view.needs}." if view.needs else "No rows."


def _blocks(view: View, table: pa.Table, rows: int) -> list[Paragraph | Table | Items]:
    if not table.num_rows:
        return [Paragraph(nothing(view))]
    shown = table.slice(0, rows)
    optional = {c.name for c in view.columns if c.nullable}
    why = [n for n in REASONS if n in shown.column_names and n in optional]
    known = [n for n in shown.column_names if n not in why]
    empty = [n for n in known if table[n].null_count == table.num_rows]
    filled = [n for n in known if n not in empty]
    unknown = ", ".join(fmt.heading(n) for n in empty if n not in _ALSO_NAMING)
    more = table.num_rows - shown.num_rows
    notes = [f"… {fmt.plural(more, 'more row')} (--top N)"] if more else []
    notes += [f"… unknown in every row: {unknown}"] if unknown else []
    cells = [[fmt.cell(n, value) for value in shown[n].to_pylist()] for n in filled]
    reasons = _reasons(shown, why)
    return [
        Table(
            columns=[_column(n, shown) for n in filled],
            rows=[[Cell(text=c) for c in row] for row in zip(*cells, strict=True)],
            rest=". ".join(notes),
            overflow="named",
        ),
        *([Items(items=reasons)] if reasons else []),
    ]


def _column(name: str, table: pa.Table) -> Column:
    numeric = str(table.schema.field(name).type).startswith(("int", "double", "bool"))
    return Column(fmt.heading(name), kind="number" if numeric else "name")


def _reasons(table: pa.Table, columns: list[str]) -> list[str]:
    """Return why rows lack values: each reason once, with the rows that it is about."""
    naming = []
    for field in table.schema:
        if not (fmt.is_number_of(field.name) or str(field.type).startswith("dict")):
            break
        naming.append(field.name)
    naming += [n for n in _ALSO_NAMING if n in table.column_names and n not in naming]
    rows: dict[str, dict[str, None]] = {}
    for row in table.to_pylist():
        for name in columns:
            if row[name] is not None:
                words = ", ".join(_named(n, row[n]) for n in naming if row[n] is not None)
                rows.setdefault(row[name], {})[words] = None
    lines = []
    for reason, names in rows.items():
        distinct = list(names)
        more = f" and {len(distinct) - _NAMED_ROWS} more" if len(distinct) > _NAMED_ROWS else ""
        lines.append(f"{'; '.join(distinct[:_NAMED_ROWS])}{more}: {reason}")
    return lines


def _named(column: str, value: object) -> str:
    text = fmt.cell(column, value)
    return f"{fmt.heading(column)} {text}" if isinstance(value, int) or column == "ranks" else text
