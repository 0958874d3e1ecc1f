"""Engines, which run the stages of each rank: this process, several of them, or a Ray cluster.

A task is a function of a module and its arguments. What it returns travels back; a big value that
only later tasks need is held where it was made (:class:`Kept`), and resolved where they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from chopper.wording import decimal_bytes


class Held(Protocol):
    """A big value that stays where it was made until somebody needs it."""

    def get(self) -> Any:
        """Return the value."""


@dataclass(frozen=True)
class Kept:
    """A task's result of which a part is held.

    Attributes:
        value: small, travels back.
        big: what is held; None for nothing.
    """

    value: Any
    big: Any


@dataclass(frozen=True)
class Done:
    """The result of a task."""

    value: Any
    held: Held | None


@dataclass(frozen=True)
class Lost:
    """A task without a result.

    Attributes:
        reason: why, in a line.
        error: what it raised; None where its process died.
    """

    reason: str
    error: BaseException | None


class Engine(Protocol):
    """A place where tasks run.

    Attributes:
        name: ``serial``, ``processes`` or ``ray``.
        workers: how many tasks run at a time.
        reason: why this engine was chosen.
    """

    name: str
    workers: int
    reason: str

    def map(
        self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], *, label: str
    ) -> Iterator[Done | Lost]:
        """Call a function of a module once with each list of arguments.

        Calls begin when the first result is asked for.

        Args:
            function: what it returns is sent back, a :class:`Kept` in part.
            calls: arguments; taken when there is a worker for them. Held ones are resolved where
                the task runs.
            label: what is being done, for the terminal.

        Yields:
            What became of each call, in their order.
        """

    def rest(self) -> None:
        """Free what workers take, until there are tasks again; what is held stays."""

    def close(self) -> None:
        """End the workers and free what is held."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


def lost(error: BaseException, memory_bytes: int | None = None) -> Lost:
    """Return what becomes of a task that raised an error of the user's data or of the machine."""
    if not isinstance(error, MemoryError):
        return Lost(str(error) or type(error).__name__, error)
    if memory_bytes is None:
        return Lost("this machine has not enough memory for it: use fewer --workers", error)
    return Lost(f"it takes more than --memory {decimal_bytes(memory_bytes)}: raise it", error)
