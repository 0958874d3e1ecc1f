"""Tasks one after another, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from chopper.engines import Done, Held, Kept, Lost, lost
from chopper.errors import ChopperError


@dataclass(frozen=True)
class InMemory:
    """A value of this process."""

    value: Any

    def get(self) -> Any:
        """Return the value."""
        return self.value


class Serial:
    """The engine of this process, which holds values in its memory."""

    name = "serial"
    workers = 1

    def __init__(self, reason: str = "in this process") -> None:
        self.reason = reason

    def map(
        self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], *, label: str
    ) -> Iterator[Done | Lost]:
        """As :meth:`chopper.engines.Engine.map`."""
        del label
        return (self._done(function, arguments) for arguments in calls)

    def _done(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Done | Lost:
        try:
            result = function(*resolved(arguments))
        except (ChopperError, MemoryError) as error:
            return lost(error)
        if not isinstance(result, Kept):
            return Done(result, None)
        held: Held | None = None if result.big is None else InMemory(result.big)
        return Done(result.value, held)

    def rest(self) -> None:
        """Do nothing: there are no workers."""

    def close(self) -> None:
        """Free nothing: values live as long as somebody has them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def resolved(arguments: Sequence[Any]) -> list[Any]:
    """Return arguments with the values of those that are held."""
    return [a.get() if isinstance(a, InMemory) else a for a in arguments]
