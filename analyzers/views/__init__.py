"""Detailed tables of an attributed run, each with what declares it.

A view that is a query is an SQL file of its name: the comment at its top declares it, as
:func:`parse` reads it. A view that is an algorithm is a function of a Python file here, decorated
with :func:`view`: its docstring declares it in the same form. Its parameters name what it needs.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeAlias, get_args

from chopper.errors import UsageError, printable
from chopper.tables import Column, ColumnType, Table, column, optional

if TYPE_CHECKING:
    import pyarrow as pa

Parameters = ParamSpec("Parameters")
Rows: TypeAlias = "pa.Table | Mapping[str, Any] | Sequence[Mapping[str, Any]]"
"""What the function of a view returns: its table, the columns of it, or its rows."""

SECTIONS = ("Operators", "Steps and host", "Memory", "Communication", "Critical path", "Clocks")
"""Parts of a report's detailed tables, in their order."""
_COLUMN = re.compile(r"  (\w+)((?:, *\w+)*): (\S.*)")
_FORM = "'--   NAME[, TYPE][, null]: what it means'"
_KEYS = ("title", "section", "needs", "from", "of", "version")


@dataclass(frozen=True, kw_only=True)
class View(Table):
    """One view: a declared table of an attributed run, most important rows first.

    Its columns stand in order of importance: a narrow terminal shows the first ones.

    Attributes:
        title: heading in reports.
        section: one of :data:`SECTIONS`.
        needs: why it has no rows where it has none.
        source: table without whose rows it has none; empty where there is no single one.
        of_all_ranks: it reads totals only, which a large run has of all ranks; other views are of
            the ranks that are looked at closely.
        sql: the query that returns it; empty for a view that is a function.
    """

    title: str
    section: str
    needs: str = ""
    source: str = ""
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
    ``from: TABLE`` (where that has no rows, neither has the view), ``of: all ranks`` and ``version:
    2`` may stand beside the title.

    Raises:
        UsageError: a line has another form.
    """
    comment = []
    for line in text.splitlines():
        if not line.startswith("--"):
            break
        comment.append(line[2:].removeprefix(" "))
    return _declared(comment, name, path, text)


def _declared(lines: Sequence[str], name: str, path: str, sql: str = "") -> View:
    """Return the view that the lines of a comment or docstring declare."""
    about: list[str] = []
    said: dict[str, str] = {}
    columns: list[Column] = []
    in_columns = False
    for number, line in enumerate(map(str.rstrip, lines), 1):
        key, colon, value = line.partition(": ")
        if in_columns and line.startswith("    ") and columns:
            columns[-1] = _continued(columns[-1], line.strip())
        elif in_columns:
            columns.append(_column(line, f"{path}, line {number}"))
        elif line == "columns:":
            in_columns = True
        elif colon and key in _KEYS:
            said[key] = value
        elif said and line.startswith("    "):
            said[[*said][-1]] += f" {line.strip()}"
        else:
            about.append(line)
    if (section := said.get("section", SECTIONS[0])) not in SECTIONS:
        raise UsageError(f"{path}: section {section!r} unknown: one of {', '.join(SECTIONS)}")
    return View(
        name,
        "\n".join(about).strip() or f"{said.get('title', name)}.",
        tuple(columns),
        version=int(said.get("version", 1)),
        title=said.get("title", name),
        section=section,
        needs=said.get("needs", ""),
        source=said.get("from", ""),
        of_all_ranks=said.get("of") == "all ranks",
        sql=sql,
    )


class ViewFunction(Generic[Parameters]):
    """A view that is an algorithm: its declaration, and the function that returns its table."""

    def __init__(self, function: Callable[Parameters, Any]) -> None:
        functools.update_wrapper(self, function)
        lines = inspect.cleandoc(function.__doc__ or "").splitlines()
        self.view = _declared(lines, function.__name__, function.__name__)
        self._function = function

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> pa.Table:
        """Return the declared table."""
        found = self._function(*args, **kwargs)
        if isinstance(found, Mapping):
            found = self.view.of(found)
        elif isinstance(found, list):
            found = self.view.of_rows(found)
        return self.view.validate(found)


def view(function: Callable[Parameters, Any]) -> ViewFunction[Parameters]:
    """Make a function a view, which its docstring declares in the form of :func:`parse`."""
    return ViewFunction(function)


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
