"""Detailed tables of an attributed run: operations, launches, stragglers …

Each is a query in SQL or a function of :mod:`chopper.analyzers.views`. ``chopper analyze RUN --view
NAME`` prints one, the HTML report shows all with rows.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chopper.analyzers import views as folder
from chopper.analyzers.views import SECTIONS, View, ViewFunction, parse
from chopper.errors import InputError, SchemaError, UsageError, reason_of
from chopper.tables import TABLES

if TYPE_CHECKING:
    import pyarrow as pa

    from chopper.analyzers.attribution import Attribution
    from chopper.analyzers.events.device import Events


def _files(suffix: str) -> dict[str, Path]:
    files = (file for path in folder.__path__ for file in Path(path).glob(f"*{suffix}"))
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}


_QUERIES = _files(".sql")
SHARED_QUERIES = {
    name.removeprefix("_"): file for name, file in _QUERIES.items() if name.startswith("_")
}
"""Tables that are queries over others, which several views share."""


_NAMED = re.compile(r"^@view\ndef (\w+)\(", re.MULTILINE)
_MODULES = {
    name: module
    for module, file in _files(".py").items()
    for name in _NAMED.findall(file.read_text(encoding="utf-8"))
}
"""View that is a function → its module, which is loaded when the view is asked for."""


def _function(name: str) -> ViewFunction[...]:
    module = importlib.import_module(f"{folder.__name__}.{_MODULES[name]}")
    function: ViewFunction[...] = getattr(module, name)
    return function


class _Views(Mapping[str, View]):
    """Views by name, in order of name; what declares one is read when it is looked up."""

    _names = sorted([*_MODULES, *(name for name in _QUERIES if not name.startswith("_"))])

    def __getitem__(self, name: str) -> View:
        if name in _MODULES or name not in self._names:
            return _function(name).view
        return _parsed(_QUERIES[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@cache
def _parsed(file: Path) -> View:
    return parse(file.read_text(encoding="utf-8"), file.stem, file.name)


VIEWS = _Views()


def own_view(path: Path) -> View:
    """Return the view of a user's SQL file, declared by the comment at its top if it has one.

    Raises:
        InputError: the file cannot be read.
        UsageError: its comment has an error.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise InputError(f"{path}: cannot be read ({reason_of(exc)})") from exc
    except UnicodeDecodeError as exc:
        raise InputError(f"{path}: is not UTF-8") from exc
    return parse(text, path.stem, str(path))


def in_sections() -> list[View]:
    """Return all views in the order of a report."""
    return sorted(VIEWS.values(), key=lambda view: SECTIONS.index(view.section))


def view(run: Attribution, name: str) -> pa.Table:
    """Return one view of an attributed run; a `UsageError` says which there are."""
    return views(run, [name])[name]


def views(run: Attribution, names: Iterable[str], **shared: Any) -> dict[str, pa.Table]:
    """Return several views; values that several of them need are made once.

    ``shared`` are such values that are there already: ``replay``, ``events`` … Of a run that is
    too large, views are of the ranks that are looked at closely.
    """
    values: dict[str, Any] = {"run": run.detail, **shared}
    tables = {}
    with contextlib.ExitStack() as held:
        for name in names:
            if name not in VIEWS:
                raise UsageError(f"view {name!r} unknown: one of {', '.join(VIEWS)}")
            declared = VIEWS[name]
            if declared.sql:
                if "database" not in values:
                    values["database"] = held.enter_context(_Database(run.detail, values))
                tables[name] = values["database"].view(declared)
            else:
                seen = {"run": run} if declared.of_all_ranks else values
                is_shared = name in _SHARED  # "links" of events, not the view of that name
                tables[name] = _call(_function(name), seen) if is_shared else _value(name, seen)
    return tables


def relations(run: Attribution, names: Iterable[str]) -> dict[str, pa.Table]:
    """Return views and tables of an attributed run by their names."""
    names = [*names]
    with _Database(run, {"run": run.detail}) as database:
        tables = {name: database.table(name) for name in names if name not in VIEWS}
    return tables | views(run, [name for name in names if name in VIEWS])


class _Database:
    """The tables of a run in one DuckDB connection, each registered when a query names it."""

    def __init__(self, run: Attribution, values: dict[str, Any]) -> None:
        self._run = run
        self._values = values
        self._names: set[str] = set()

    @cached_property
    def _connection(self) -> Any:
        from chopper.analyzers.relations import connection

        return connection(threads=1)

    def __enter__(self) -> _Database:
        return self

    def __exit__(self, *_exc: object) -> None:
        if "_connection" in vars(self):
            self._connection.close()

    def table(self, name: str) -> pa.Table:
        """Return a table of the run by its name."""
        if name == "step_event":
            events: Events = _value("events", self._values)
            return events.table
        if name in SHARED_QUERIES:
            return self.query(SHARED_QUERIES[name].read_text(encoding="utf-8"))
        from chopper.analyzers.relations import relation

        return relation(self._run, name)

    def view(self, view: View) -> pa.Table:
        """Return the table of a view; the query is not run if it can have no rows."""
        if view.source and not self.table(view.source).num_rows:
            return view.empty()
        return typed(self.query(view.sql), view, f"{view.name}.sql")

    def query(self, sql: str) -> pa.Table:
        """Return what a view's query returns."""
        for name in {*re.findall(r"\w+", sql)} & TABLES.keys() - self._names:
            self._names.add(name)
            self._connection.register(name, self.table(name))
        self._connection.execute(sql)
        with warnings.catch_warnings():
            # It says that rows are copied; Connection.sql would plan the query twice.
            warnings.simplefilter("ignore", UserWarning)
            return self._connection.to_arrow_table()


def typed(table: pa.Table, view: View, path: str) -> pa.Table:
    """Return the result of a view's query with the columns and types that its file declares.

    Raises:
        SchemaError: a column is missing or not declared, or its values are not of its type.
    """
    import pyarrow as pa

    columns = {name: table[name].combine_chunks() for name in table.column_names}
    for field in view.arrow:
        if field.name not in columns:
            raise SchemaError(
                f"{path}: declares the column {field.name}, and its query returns "
                f"{', '.join(columns)}: name it there, or declare another"
            )
        values = columns[field.name]
        try:
            if pa.types.is_dictionary(field.type):
                values = values.cast(pa.string()).dictionary_encode()
            columns[field.name] = values.cast(field.type)
        except pa.ArrowException as exc:
            raise SchemaError(f"{path}: column {field.name} is no {field.type}: {exc}") from exc
    return view.validate(pa.table(columns))


_SHARED = {
    "clocked": "chopper.analyzers.events.device:clocked_of",
    "events": "chopper.analyzers.events.device:events_of",
    "links": "chopper.analyzers.events.places:links_of",
    "members": "chopper.analyzers.events.collectives:members_of",
    "replay": "chopper.analyzers.replay.replay:replay_or_reason",
}
"""Parameters of views besides ``run`` and other views, and the functions that make their values."""


def _value(name: str, values: dict[str, Any]) -> Any:
    """Return a value that several views need; a new one is kept."""
    if name not in values:
        module, _, function = _SHARED.get(name, "").partition(":")
        make = getattr(importlib.import_module(module), function) if module else _function(name)
        values[name] = _call(make, values)
    return values[name]


def _call(function: Callable[..., Any], values: dict[str, Any]) -> Any:
    """Call a function with values by the names of its parameters."""
    return function(*(_value(name, values) for name in inspect.signature(function).parameters))
