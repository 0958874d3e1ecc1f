"""The detailed tables of a run: the page of one, and all of them as data for a page's scripts."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from chopper import tables as declarations
from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.views import View
from chopper.reports.labels import full_label
from chopper.reports.page import Column, Items, Page, Paragraph, Table
from chopper.views import in_sections

MAX_ROWS = 500
"""Rows of one view in the page; the command line prints all."""
REASONS = ("reason", "no_correlation")
"""Columns that say why others of a row are null: they are read, not compared."""
MAX_CHARACTERS = 300
"""Longer texts (shapes of a thousand tensors) are cut in the middle."""
_ROWS = 20
_ALSO_NAMING = ("phase", "window")
"""Columns that tell rows apart, wherever they stand."""
_OFTEN_UNKNOWN = (*_ALSO_NAMING, "micro_steps")
"""Columns that few recordings can hold: nothing is said where they are empty."""
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
    blocks = _blocks(view, table, top or _ROWS)
    return Page(title=view.title, headline="", summary=(Paragraph(view.summary, "dim"), *blocks))


def _blocks(view: View, table: pa.Table, rows: int) -> list[Paragraph | Table | Items]:
    if not table.num_rows:
        return [Paragraph(f"No rows: {view.needs}." if view.needs else "No rows.")]
    first_rows = table.slice(0, rows)
    why = [c.name for c in view.columns if c.name in REASONS]
    known = [n for n in first_rows.column_names if n not in why]
    filled = [n for n in known if table[n].null_count < table.num_rows]
    unknown = [fmt.heading(n) for n in known if n not in (*filled, *_OFTEN_UNKNOWN)]
    more = table.num_rows - first_rows.num_rows
    notes = [f"… {fmt.plural(more, 'more row')} (--top N)"] if more else []
    notes += [f"… unknown in every row: {', '.join(unknown)}"] if unknown else []
    cells = [[_cell(n, value) for value in first_rows[n].to_pylist()] for n in filled]
    numbers = ("int", "double", "bool")
    kinds = [str(table.schema.field(n).type).startswith(numbers) for n in filled]
    grid = Table(
        columns=[
            Column(fmt.heading(n), kind="number" if number else "name")
            for n, number in zip(filled, kinds, strict=True)
        ],
        rows=[*zip(*cells, strict=True)],
        rest=". ".join(notes),
        overflow="named",
    )
    reasons = _reasons(first_rows, why)
    return [grid, *([Items(items=reasons)] if reasons else [])]


def _reasons(table: pa.Table, columns: list[str]) -> list[str]:
    """Return why rows lack values: each reason once, with the rows that it is about."""
    leading = itertools.takewhile(
        lambda f: fmt.is_number_of(f.name) or str(f.type).startswith("dict"), table.schema
    )
    also = (n for n in _ALSO_NAMING if n in table.column_names)
    naming = dict.fromkeys((*(field.name for field in leading), *also))
    rows: dict[str, dict[str, None]] = {}
    for row in table.to_pylist():
        words = ", ".join(_named(n, row[n]) for n in naming if row[n] is not None)
        for name in columns:
            if row[name] is not None:
                rows.setdefault(row[name], {})[words] = None
    lines = []
    for reason, names in rows.items():
        more = f" and {len(names) - _NAMED_ROWS} more" if len(names) > _NAMED_ROWS else ""
        lines.append(f"{'; '.join([*names][:_NAMED_ROWS])}{more}: {reason}")
    return lines


def _cell(column: str, value: object) -> str:
    """Return a value for people; causes by their labels."""
    known = column == "cause" and value is not None
    return full_label(str(value)) if known else fmt.cell(column, value)


def _named(column: str, value: object) -> str:
    text = _cell(column, value)
    return f"{fmt.heading(column)} {text}" if isinstance(value, int) or column == "ranks" else text


def tables(run: Attribution, views: Mapping[str, pa.Table]) -> list[dict[str, Any]]:
    """Return all views that have rows, in the order of their sections.

    A column of numbers is a list of values; a column of words is a list of codes into its
    ``names``, pairs of (as recorded, for people). Null is null. Columns without a value are left
    out.
    """
    source = shlex.quote(run.recording.source)
    return [
        {
            "id": one.name,
            "title": one.title,
            "doc": one.summary,
            "about": [part.replace("\n", " ") for part in one.doc.split("\n\n")],
            "total": table.num_rows,
            "command": f"chopper analyze {source} --view {one.name} --csv",
            "columns": [
                _column(declared, table.slice(0, MAX_ROWS))
                for declared in one.columns
                if table[declared.name].null_count < table.num_rows
            ],
        }
        for one in in_sections()
        for table in [views[one.name]]
        if table.num_rows
    ]


def _column(declared: declarations.Column, table: pa.Table) -> dict[str, Any]:
    values = table[declared.name].to_pylist()
    column: dict[str, Any] = {
        "label": fmt.heading(declared.name),
        "field": declared.name,
        "doc": declared.doc,
        "unit": fmt.unit(declared.name),
    }
    if declared.type in ("string", "text"):
        names = list(dict.fromkeys(v for v in values if v is not None))
        code = {name: i for i, name in enumerate(names)}
        column["names"] = [_name(declared.name, name) for name in names]
        column["values"] = [None if v is None else code[v] for v in values]
        column["prose"] = declared.name in REASONS
        return column
    if declared.type == "bool":
        column["unit"] = "bool"
    elif fmt.is_number_of(declared.name):
        column["unit"] = "id"
    column["values"] = [_short(v) if isinstance(v, float) else v for v in values]
    return column


def _name(column: str, text: str) -> list[str]:
    full = fmt.ellipsize(text, MAX_CHARACTERS)
    label = fmt.ellipsize(_cell(column, text), MAX_CHARACTERS)
    return [full] if label == full else [full, label]


def _short(value: float) -> float | None:
    """Six significant digits: what a table can show, and short in JSON."""
    short = float(f"{value:.6g}")
    return short if abs(short) < float("inf") else None
