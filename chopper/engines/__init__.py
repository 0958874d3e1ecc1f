"""Engines run a function of each rank: in this process, in several, or on a Ray cluster.

A task is a function of a module and its arguments; what it returns travels back. A large value that
only later tasks need is left in a file of the engine's folder (:mod:`chopper.storage.results`).
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from chopper.errors import ChopperError, UsageError
from chopper.wording import decimal_bytes

_LEAST_MEMORY_BYTES = 256_000_000
"""A worker takes 90 MB before it does anything."""


@dataclass(frozen=True)
class Lost:
    """A task without a result.

    Attributes:
        reason: why, in a line.
        error: what it raised; None where its process died.
    """

    reason: str
    error: BaseException | None


class Engine(ABC):
    """Runs tasks.

    Attributes:
        name: ``serial``, ``processes`` or ``ray``.
        workers: how many tasks run at a time.
        reason: why this engine was chosen.
    """

    name: str
    workers: int
    reason: str

    @property
    def folder(self) -> Path | None:
        """Folder for what tasks leave for later ones; None: in memory."""
        return None

    @abstractmethod
    def map(
        self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], *, label: str
    ) -> Iterator[Any]:
        """Call a function of a module once with each list of arguments.

        Calls begin when the first result is asked for.

        Args:
            function: what to call.
            calls: arguments; taken when there is a worker for them.
            label: what is being done, for the terminal.

        Yields:
            What each call returned, or :class:`Lost`, in their order.
        """

    def rest(self) -> None:  # noqa: B027 - not every engine has workers of its own
        """Free what workers take, until there are tasks again."""

    def close(self) -> None:  # noqa: B027
        """End the workers; files stay as long as somebody refers to them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Serial(Engine):
    """The engine of this process; what tasks leave stays in its memory."""

    name = "serial"
    workers = 1

    def __init__(self, reason: str = "in this process") -> None:
        self.reason = reason

    def map(
        self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], *, label: str
    ) -> Iterator[Any]:
        """As :meth:`Engine.map`."""
        del label
        for arguments in calls:
            try:
                result = function(*arguments)
            except (ChopperError, MemoryError) as error:
                result = lost(error)
            yield result


def in_order(
    calls: Iterable[Sequence[Any]],
    submit: Callable[[Sequence[Any]], Any],
    finished: Callable[[list[Any]], list[Any]],
    result_of: Callable[[Any], Any],
    *,
    running: dict[Any, int],
    at_most: int,
    tell: Callable[[int], object],
) -> Iterator[Any]:
    """Run calls and yield their results in order.

    Args:
        calls: their arguments.
        submit: begins a call; returns its task.
        finished: waits for one of the tasks at least; returns those that ended.
        result_of: result of a task that ended.
        running: empty; holds the tasks that run.
        at_most: number of tasks that run or wait.
        tell: told how many ended.
    """
    results: dict[int, Any] = {}
    waiting, following, count = enumerate(calls), 0, 0
    while True:
        while len(running) < at_most and (call := next(waiting, None)):
            running[submit(call[1])] = call[0]
        if not running:
            return
        for task in finished([*running]):
            results[running.pop(task)] = result_of(task)
            count += 1
            tell(count)
        while following in results:
            yield results.pop(following)
            following += 1


def lost(error: BaseException, memory_bytes: int | None = None) -> Lost:
    """Return what becomes of a task that raised an error of the user's data or of the machine."""
    if not isinstance(error, MemoryError):
        return Lost(str(error) or type(error).__name__, error)
    if memory_bytes is None:
        return Lost("this machine has not enough memory for it: use fewer --workers", error)
    return Lost(f"it takes more than --memory {decimal_bytes(memory_bytes)}: raise it", error)


def check_memory(memory_bytes: int | None) -> None:
    """Refuse a limit of memory that is too small for a worker."""
    if memory_bytes is not None and memory_bytes < _LEAST_MEMORY_BYTES:
        raise UsageError(
            f"--memory {decimal_bytes(memory_bytes)}: too little for a worker; give at least 256MB"
        )


def portable(error: Exception) -> Exception:
    """Return an exception that another process can read: itself, or its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its class raises
        kind = ChopperError if isinstance(error, ChopperError) else RuntimeError
        return kind(f"{type(error).__name__}: {error}")
    return error
