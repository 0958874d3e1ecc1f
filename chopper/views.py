"""Detailed tables of an attributed run: operations, launches, stragglers …

Each is one file of :mod:`chopper.analyzers.views`, loaded when it is asked for.
``chopper analyze RUN --view NAME`` prints one, the HTML report shows all that have rows.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chopper.analyzers import views as folder
from chopper.analyzers.views import SECTIONS, View
from chopper.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from chopper.analyzers.attributed import Attributed


_FILES = {
    file.stem: file
    for file in sorted(file for path in folder.__path__ for file in Path(path).glob("[!_]*.py"))
}


class _Views(Mapping[str, View]):
    """Views by name, in order of name; a view's file is imported when it is looked up."""

    def __getitem__(self, name: str) -> View:
        if name not in _FILES:
            raise KeyError(name)
        view: View = importlib.import_module(f"{folder.__name__}.{name}").VIEW
        return view

    def __iter__(self) -> Iterator[str]:
        return iter(_FILES)

    def __len__(self) -> int:
        return len(_FILES)


VIEWS = _Views()


def summaries() -> dict[str, str]:
    """Return what each view shows, one line each, without importing any of them."""
    lines = {}
    for name, path in _FILES.items():
        with path.open(encoding="utf-8") as file:
            lines[name] = file.readline().strip().strip('"')
    return lines


def in_sections() -> list[View]:
    """Return all views in the order of a report."""
    return sorted(VIEWS.values(), key=lambda view: SECTIONS.index(view.section))


def view(run: Attributed, name: str) -> pa.Table:
    """Return one view of an attributed run; a `UsageError` says which there are."""
    return views(run, [name])[name]


def views(run: Attributed, names: Iterable[str], **shared: Any) -> dict[str, pa.Table]:
    """Return several views; values that several of them need are made once.

    ``shared`` are such values that are there already: ``replay``, ``events`` … Of a run that is
    too large, views are of the ranks that are looked at closely.
    """
    values: dict[str, Any] = {"run": run.detailed, **shared}
    tables = {}
    for name in names:
        if name not in VIEWS:
            raise UsageError(f"view {name!r} unknown: one of {', '.join(VIEWS)}")
        declared = VIEWS[name]
        seen = {"run": run} if declared.of_all_ranks else values
        tables[name] = declared.validate(_call(f"{folder.__name__}.{name}:{name}", seen))
    return tables


_SHARED = {
    "calls": "chopper.analyzers.events.calls:calls_of",
    "clocked": "chopper.analyzers.events.clocked:clocked_of",
    "events": "chopper.analyzers.events.device:events_of",
    "links": "chopper.analyzers.events.places:links_of",
    "members": "chopper.analyzers.events.collectives:members_of",
    "replay": "chopper.analyzers.replay.replay:replay_or_reason",
}
"""Parameters of views besides ``run``, and the functions that make their values."""


def _call(target: str, values: dict[str, Any]) -> Any:
    """Call ``module:function`` with values by the names of its parameters; new ones are kept."""
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    parameters = list(inspect.signature(function).parameters)
    for parameter in parameters:
        if parameter not in values:
            values[parameter] = _call(_SHARED[parameter], values)
    return function(*(values[parameter] for parameter in parameters))
