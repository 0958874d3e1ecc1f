"""Which collectors there are: those that come with chopper, and those that other packages add.

A package adds one through an entry point::

    [project.entry-points."chopper.collectors"]
    my_sensor = "my_package.sensor:SensorCollector"

The class must follow :class:`chopper.collectors.base.Collector`. It is imported when it is asked
for; one that cannot be imported is refused with its reason and harms no other.
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from chopper.errors import CollectorUnavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import EntryPoint

    from chopper.collectors.base import Collector

GROUP = "chopper.collectors"
"""Entry-point group of third parties."""

BUILTIN: dict[str, str] = {
    "allocator_history": "chopper.collectors.allocator_history:AllocatorHistoryCollector",
    "amdsmi": "chopper.collectors.amd:AmdCollector",
    "core_wait": "chopper.collectors.core_wait:CoreWaitCollector",
    "device_memory": "chopper.collectors.device_memory:DeviceMemoryCollector",
    "fabric": "chopper.collectors.fabric:FabricCollector",
    "host": "chopper.collectors.host:HostCollector",
    "nvml": "chopper.collectors.nvml:NvmlCollector",
    "torch_trace": "chopper.collectors.torch_trace:TorchTrace",
}
"""Collectors that come with chopper, as name → ``module:Class``."""

_DEFAULTS = ("torch_trace", "host", "core_wait", "device_memory", "nvml", "amdsmi", "fabric")
_PARTS = ("name", "scope", "probe", "start", "stop")


def _third_party() -> dict[str, EntryPoint]:
    """Entry points by name. A name that chopper uses itself stays chopper's."""
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name not in BUILTIN:
            found.setdefault(point.name, point)
    return found


def names() -> tuple[str, ...]:
    """Names of all collectors, those of other packages included, sorted."""
    return tuple(sorted({*BUILTIN, *_third_party()}))


def defaults() -> tuple[str, ...]:
    """Names of the collectors that a recording uses when none is named."""
    return _DEFAULTS


def origin(name: str) -> str:
    """``module:Class`` that a name stands for.

    Raises:
        UsageError: no collector has this name.
    """
    if name in BUILTIN:
        return BUILTIN[name]
    points = _third_party()
    if name in points:
        return points[name].value
    known = names()
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"
    raise UsageError(f"no collector is called {name!r}; {hint}")


def get(name: str) -> type[Collector]:
    """The class of a collector.

    Raises:
        UsageError: no collector has this name; the message names the nearest.
        CollectorUnavailable: another package offers it, but it cannot be loaded, or is no
            collector.
    """
    where = origin(name)
    try:
        loaded = _load(where)
    except Exception as exc:
        if name in BUILTIN:
            raise
        # Whatever another package does at its import must not stop a recording.
        raise CollectorUnavailable(
            f"collector {name} ({where}) cannot be loaded: {type(exc).__name__}: {exc}"
        ) from exc
    missing = [part for part in _PARTS if not hasattr(loaded, part)]
    if missing:
        raise CollectorUnavailable(
            f"collector {name} ({where}) is not a collector: it has no {', '.join(missing)}"
        )
    found: type[Collector] = loaded
    return found


def _load(where: str) -> Any:
    module, _, attribute = where.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def load_all(
    wanted: Iterable[str] | None = None,
) -> tuple[dict[str, type[Collector]], dict[str, str]]:
    """Classes by name, and for each name that could not be loaded the reason.

    Args:
        wanted: names; None for all there are.

    Raises:
        UsageError: a wanted name does not exist at all.
    """
    loaded: dict[str, type[Collector]] = {}
    refused: dict[str, str] = {}
    for name in names() if wanted is None else wanted:
        try:
            loaded[name] = get(name)
        except CollectorUnavailable as exc:
            refused[name] = str(exc)
    return loaded, refused
