"""Detailed tables of an attributed run: one file for each view, which declares itself.

The file's name is the view's name. A view that is a query is an SQL file: its comment at the top
declares it, as :func:`parse` reads it. A view that is an algorithm is a Python file: its docstring
describes it, ``VIEW`` declares its table, and a function of the same name fills it. Python modules
that begin with an underscore are shared by several views.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

from chopper.errors import UsageError, printable
from chopper.tables import Column, ColumnType, Table, column, optional

__all__ = ["SECTIONS", "View", "column", "optional", "parse"]

SECTIONS = ("Operators", "Steps and host", "Memory", "Communication", "Critical path", "Clocks")
"""Parts of a report's detailed tables, in their order."""
_COLUMN = re.compile(r"  (\w+)((?:, *\w+)*): (\S.*)")
_FORM = "'--   NAME[, TYPE][, null]: what it means'"


@dataclass(frozen=True, kw_only=True)
class View(Table):
    """One view: a declared table of an attributed run, most important rows first.

    Its columns stand in order of importance: a narrow terminal shows the first ones. Its
    description is the docstring of its module, or the comment of its SQL file.

    Attributes:
        title: heading in reports.
        section: one of :data:`SECTIONS`.
        needs: why it has no rows where it has none.
        of_all_ranks: it reads totals only, which a large run has of all ranks; other views are of
            the ranks that are looked at closely.
        sql: the query that returns it; empty for a view of a Python file.
    """

    title: str
    section: str
    needs: str = ""
    of_all_ranks: bool = False
    sql: str = ""


def parse(text: str, name: str, path: str) -> View:
    """Return the view that an SQL file declares in the comment at its top::

        -- One sentence that says what the view shows.
        --
        -- More about it, in paragraphs.
        --
        -- title: Heading
        -- section: Operators
        -- needs: why it has no rows where it has none
        -- columns:
        --   op, null: Operator; null where none was recorded.
        --   step, int64, null: Step number.
        --   time_ns: Time of all calls.

    Everything may be left out; a view without columns has those that its query returns. A column's
    type follows from the unit in its name, as in :func:`chopper.tables.column`, unless it is named.

    Raises:
        UsageError: a line has another form.
    """
    about: list[str] = []
    said: dict[str, str] = {}
    columns: list[Column] = []
    in_columns = False
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("--"):
            break
        line = line[2:].removeprefix(" ").rstrip()
        key, colon, value = line.partition(": ")
        if in_columns and line.startswith("    ") and columns:
            columns[-1] = _continued(columns[-1], line.strip())
        elif in_columns:
            columns.append(_column(line, f"{path}, line {number}"))
        elif line == "columns:":
            in_columns = True
        elif colon and key in ("title", "section", "needs"):
            said[key] = value
        else:
            about.append(line)
    if (section := said.get("section", SECTIONS[0])) not in SECTIONS:
        raise UsageError(f"{path}: section {section!r} unknown: one of {', '.join(SECTIONS)}")
    return View(
        name,
        "\n".join(about).strip() or f"{said.get('title', name)}.",
        tuple(columns),
        title=said.get("title", name),
        section=section,
        needs=said.get("needs", ""),
        sql=text,
    )


def _column(line: str, place: str) -> Column:
    """Return the column that a line of a header declares."""
    found = _COLUMN.fullmatch(line)
    if found is None:
        raise UsageError(f"{place}: found {printable(line)!r}, expected {_FORM}")
    name, words, doc = found.groups()
    kinds = [word.strip() for word in words.split(",") if word.strip()]
    nullable = kinds[-1:] == ["null"]
    kinds = kinds[:-1] if nullable else kinds
    types: tuple[ColumnType, ...] = get_args(ColumnType)
    kind = next((t for t in types if kinds == [t]), None)
    if kinds and kind is None:
        raise UsageError(f"{place}: type {', '.join(kinds)!r} unknown: one of {', '.join(types)}")
    return (optional if nullable else column)(name, doc, kind)


def _continued(declared: Column, more: str) -> Column:
    """Return a column whose description goes on in another line."""
    make = optional if declared.nullable else column
    return make(declared.name, f"{declared.doc} {more}", declared.type)
