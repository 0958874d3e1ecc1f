"""Tasks one after another, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

from chopper.engines import lost
from chopper.errors import ChopperError


class Serial:
    """The engine of this process; what tasks leave stays in its memory."""

    name = "serial"
    workers = 1
    folder = None

    def __init__(self, reason: str = "in this process") -> None:
        self.reason = reason

    def map(
        self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], *, label: str
    ) -> Iterator[Any]:
        """As :meth:`chopper.engines.Engine.map`."""
        del label
        for arguments in calls:
            try:
                result = function(*arguments)
            except (ChopperError, MemoryError) as error:
                result = lost(error)
            yield result

    def rest(self) -> None:
        """Do nothing: there are no workers."""

    def close(self) -> None:
        """Do nothing: there are no workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None: ...
