"""The detailed tables of a run as data for the page: whatever views are registered."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from chopper import wording as fmt
from chopper.views import in_sections

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from chopper.analyzers.attributed import Attributed
    from chopper.tables import Column

MAX_ROWS = 500
"""Rows of one view in the page; the command line prints all."""
REASONS = ("reason", "no_correlation")
"""Columns that say why others of a row are null: they are read, not compared."""
MAX_CHARACTERS = 300
"""Longer texts (shapes of a thousand tensors) are cut in the middle."""


def tables(run: Attributed, views: Mapping[str, pa.Table]) -> list[dict[str, Any]]:
    """Return all views that have rows, in the order of their sections.

    A column of numbers is a list of values; a column of words is a list of codes into its
    ``names``, pairs of (as recorded, for people). Null is null. Columns without a value are left
    out.
    """
    shown_views = []
    for one in in_sections():
        table = views[one.name]
        if table.num_rows:
            shown = table.slice(0, MAX_ROWS)
            shown_views.append(
                {
                    "id": one.name,
                    "title": one.title,
                    "doc": one.summary,
                    "about": one.doc,
                    "total": table.num_rows,
                    "command": command(run, one.name),
                    "columns": [
                        _column(declared, shown)
                        for declared in one.columns
                        if table[declared.name].null_count < table.num_rows
                    ],
                }
            )
    return shown_views


def command(run: Attributed, name: str) -> str:
    """Return the command line that prints all rows of a view."""
    return f"chopper analyze {shlex.quote(run.recording.source)} --view {name} --csv"


def _column(declared: Column, table: pa.Table) -> dict[str, Any]:
    values = table[declared.name].to_pylist()
    column: dict[str, Any] = {
        "label": fmt.heading(declared.name),
        "doc": declared.doc,
        "unit": fmt.unit(declared.name),
    }
    if declared.type in ("string", "text"):
        names = list(dict.fromkeys(v for v in values if v is not None))
        code = {name: i for i, name in enumerate(names)}
        column["names"] = [_name(declared.name, name) for name in names]
        column["values"] = [None if v is None else code[v] for v in values]
        column["prose"] = declared.name in REASONS and declared.nullable
        return column
    if declared.type == "bool":
        column["unit"] = "bool"
    elif fmt.is_number_of(declared.name):
        column["unit"] = "id"
    column["values"] = [_short(v) if isinstance(v, float) else v for v in values]
    return column


def _name(column: str, text: str) -> list[str]:
    full = fmt.ellipsize(text, MAX_CHARACTERS)
    shown = fmt.ellipsize(fmt.cell(column, text), MAX_CHARACTERS)
    return [full] if shown == full else [full, shown]


def _short(value: float) -> float | None:
    """Six significant digits: what a table can show, and short in JSON."""
    short = float(f"{value:.6g}")
    return short if abs(short) < float("inf") else None
