"""Find the collectors of this folder and of other packages.

A file (or a folder with an ``__init__.py``) of ``chopper/collectors`` is a collector when it has
these two lines, and a class whose ``name`` is that name::

    NAME = "my_sensor"
    BY_DEFAULT = True

The lines are read, not executed: listing collectors imports none. Another package adds one through
an entry point::

    [project.entry-points."chopper.collectors"]
    my_sensor = "my_package.sensor:SensorCollector"

The class must follow :class:`chopper.collectors.base.Collector`. It is imported on demand;
one that cannot be imported is refused with its reason and does not affect the others.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from chopper.errors import CollectorUnavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import EntryPoint

    from chopper.collectors.base import Collector

GROUP = "chopper.collectors"
"""Entry-point group of third parties."""
_DECLARATION = re.compile(r'^NAME = "(\w+)"\nBY_DEFAULT = (True|False)$', re.MULTILINE)
_PARTS = ("name", "scope", "probe", "start", "stop")


class Declaration(NamedTuple):
    """A collector of this folder, as its file declares it."""

    module: str
    by_default: bool


def built_in() -> dict[str, Declaration]:
    """Return the collectors that come with chopper, by name, sorted."""
    return _declared(tuple(sys.modules[__package__].__path__))


@functools.cache
def _declared(folders: tuple[str, ...]) -> dict[str, Declaration]:
    declared: dict[str, Declaration] = {}
    for folder in map(Path, folders):
        for file in (*folder.glob("*.py"), *folder.glob("*/__init__.py")):
            lines = _DECLARATION.search(file.read_text(encoding="utf-8"))
            if lines is not None:
                module = file.parent.name if file.stem == "__init__" else file.stem
                declared[lines[1]] = Declaration(f"{__package__}.{module}", lines[2] == "True")
    return dict(sorted(declared.items()))


def _third_party() -> dict[str, EntryPoint]:
    """Return entry points by name. A name that chopper uses itself stays chopper's."""
    from importlib.metadata import entry_points

    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name not in built_in():
            points.setdefault(point.name, point)
    return points


def names() -> tuple[str, ...]:
    """Return the names of all collectors, those of other packages included, sorted."""
    return tuple(sorted({*built_in(), *_third_party()}))


def defaults() -> tuple[str, ...]:
    """Return the names of the collectors that a recording uses when none is named."""
    return tuple(name for name, declared in built_in().items() if declared.by_default)


def check(name: str) -> None:
    """Refuse a name that no collector has, with the nearest ones: UsageError."""
    known = names()
    if name not in known:
        close = get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
        raise UsageError(f"no collector is called {name!r}; {hint}")


def get(name: str) -> type[Collector]:
    """Import and return the class of a collector.

    Raises:
        UsageError: no collector has this name; the message names the nearest.
        CollectorUnavailable: another package offers it, but it cannot be loaded, or is no
            collector.
    """
    check(name)
    loaded: Any
    if name in built_in():
        module = importlib.import_module(built_in()[name].module)
        where = module.__name__
        loaded = next((v for v in vars(module).values() if getattr(v, "name", None) == name), None)
    else:
        point = _third_party()[name]
        where = point.value
        try:
            loaded = point.load()
        except Exception as exc:
            # Whatever another package does at its import must not stop a recording.
            raise CollectorUnavailable(
                f"collector {name} ({where}) cannot be loaded: {type(exc).__name__}: {exc}"
            ) from exc
    missing = [part for part in _PARTS if not hasattr(loaded, part)]
    if missing:
        raise CollectorUnavailable(
            f"collector {name} ({where}) is not a collector: it has no {', '.join(missing)}"
        )
    kind: type[Collector] = loaded
    return kind


def load_all(
    wanted: Iterable[str] | None = None,
) -> tuple[dict[str, type[Collector]], dict[str, str]]:
    """Return classes by name, and for each name that could not be loaded the reason."""
    loaded: dict[str, type[Collector]] = {}
    refused: dict[str, str] = {}
    for name in names() if wanted is None else wanted:
        try:
            loaded[name] = get(name)
        except CollectorUnavailable as exc:
            refused[name] = str(exc)
    return loaded, refused
