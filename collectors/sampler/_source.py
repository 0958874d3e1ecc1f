"""Protocol of the sources that a sampler reads, and the sink that takes their rows."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Sink:
    """Takes rows from sources; the sampler adds the times."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, tuple[Any, ...]]] = []
        self._timed: list[tuple[str, tuple[Any, ...]]] = []

    def add(self, table: str, *values: Any) -> None:
        """Add a row: the declared columns after ``time_ns`` and ``span_ns``, in their order."""
        self._rows.append((table, values))

    def add_at(self, table: str, time_ns: int, span_ns: int, *values: Any) -> None:
        """Add a row whose time the driver told; the sampler adds none."""
        self._timed.append((table, (time_ns, span_ns, *values)))

    def take(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Rows since the last call."""
        rows, self._rows = self._rows, []
        return rows

    def take_timed(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Rows with times of their own since the last call."""
        rows, self._timed = self._timed, []
        return rows


class Gone(Exception):
    """The device is gone for good: it is not read again."""


class Part(NamedTuple):
    """A part of a source that is read by itself: one device."""

    label: str
    read: Callable[[Sink, int], None]
    """As ``Source.sample``; raises :class:`Gone` where it will never answer again."""


class Source(Protocol):
    """Something that can be read at a fixed rate, inside the sampler process.

    It may have more: ``parts() -> list[Part]``, read one by one with a time of its own each, so
    that one that blocks keeps no other waiting; ``plan() -> Plan`` with
    ``learn(list[DeviceTotals])``, to be read in C; ``calls() -> dict[str, Callable]``, calls of a
    driver whose cost is measured at the start.
    """

    name: ClassVar[str]
    tables: ClassVar[tuple[str, ...]]
    """Declared tables that it writes; each begins with ``time_ns`` and ``span_ns``."""

    @property
    def absent(self) -> Mapping[str, str]:
        """``table.column`` → why it stays null on this machine; may change during the run."""
        ...

    def open(self) -> None:
        """Open files or devices and take the first reading of counters.

        Raises:
            CollectorUnavailable: nothing of it can be read here.
        """
        ...

    def sample(self, sink: Sink, now_ns: int) -> None:
        """Read once and add rows. ``now_ns`` is CLOCK_MONOTONIC.

        What it raises costs this sample only; a source that fails 20 times in a row is left out.
        """
        ...

    def close(self) -> None:
        """Close what ``open`` opened; safe without it."""
        ...


class SourceSpec(msgspec.Struct, kw_only=True, frozen=True):
    """A source to be made inside the sampler process."""

    factory: str
    """``module:Class``, called with ``options`` as keywords."""
    hz: float
    options: dict[str, Any] = {}

    def make(self) -> Source:
        """Import the class and make the source."""
        module, _, name = self.factory.partition(":")
        source: Source = getattr(importlib.import_module(module), name)(**self.options)
        return source


def held(count: int | None) -> int | None:
    """Return a count that a table's 64 bits can hold; None for any other, which is no count."""
    return count if count is not None and count < 1 << 63 else None
