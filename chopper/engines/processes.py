"""Tasks in several processes of this machine, and what they hold in files."""

from __future__ import annotations

import itertools
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Self

from chopper.engines import Done, Kept, Lost, lost, workers
from chopper.engines.spill import Folder, Spilled, write
from chopper.errors import ChopperError, UsageError
from chopper.wording import decimal_bytes

_MOST_ATTEMPTS = 3
_LEAST_MEMORY_BYTES = 256_000_000
"""A worker takes 90 MB before it does anything."""

_Call = tuple[int, Sequence[Any]]


class Processes:
    """The engine of several processes.

    A task whose process dies is tried again in another one, the last time alone; its values are
    held in files of a temporary folder.

    Args:
        workers_count: processes.
        reason: why this engine was chosen.
        memory_bytes: what each process may allocate; None for no limit.
        folder: where temporary files go; by default where the system has them, on a disk.
        progress: called with a label and how many of its tasks are done.

    Raises:
        UsageError: the limit of memory is too small for a process that does nothing.
        OSError: processes cannot be started here.
    """

    name = "processes"

    def __init__(
        self,
        workers_count: int,
        reason: str = "",
        *,
        memory_bytes: int | None = None,
        folder: Path | None = None,
        progress: Callable[[str, int], None] | None = None,
    ) -> None:
        check_memory(memory_bytes)
        self.workers, self.reason = workers_count, reason
        self._memory_bytes, self._progress = memory_bytes, progress
        self._parent_folder = folder
        self._folder: Folder | None = None
        self._numbers = itertools.count()
        self._pool: ProcessPoolExecutor | None = None
        self._context = workers.Workers()

    def map(
        self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], *, label: str
    ) -> Iterator[Done | Lost]:
        """As :meth:`chopper.engines.Engine.map`."""
        results: dict[int, Done | Lost] = {}
        try:
            following = 0
            finished = self._results(function, enumerate(calls))
            for count, (number, result) in enumerate(finished, 1):
                results[number] = result
                if self._progress is not None:
                    self._progress(label, count)
                while following in results:
                    yield results.pop(following)
                    following += 1
        except BaseException:
            self._end_workers()
            raise

    def _results(
        self, function: Callable[..., Any], calls: Iterator[_Call]
    ) -> Iterator[tuple[int, Done | Lost]]:
        """Yield each call's number and what became of it, as they are done."""
        running: dict[Future[Any], _Call] = {}
        again: deque[_Call] = deque()
        attempts: dict[int, int] = {}
        while True:
            while len(running) < 2 * self.workers:
                call = again.popleft() if again else next(calls, None)
                if call is None:
                    break
                is_last = attempts.get(call[0], 0) == _MOST_ATTEMPTS - 1
                future = None if is_last and running else self._submitted(function, call[1])
                if future is None:
                    again.appendleft(call)
                    break
                running[future] = call
                if is_last:
                    break  # Alone: who dies now dies of its own.
            if not running:
                if not again:
                    return
                self._end_workers()  # A worker died while there was nothing to do.
                continue
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            died = []
            for future in done:
                call = running.pop(future)
                try:
                    yield call[0], self._done(future.result())
                except BrokenProcessPool:
                    died.append(call)
                except MemoryError as error:  # while its result was sent
                    yield call[0], lost(error, self._memory_bytes)
            if not died:
                continue
            codes = self._end_workers()
            for call in sorted([*died, *running.values()], key=lambda item: item[0]):
                attempts[call[0]] = attempts.get(call[0], 0) + 1
                if attempts[call[0]] < _MOST_ATTEMPTS:
                    again.append(call)
                else:
                    yield call[0], Lost(self._reason_of_death(codes), None)
            running.clear()

    def _submitted(
        self, function: Callable[..., Any], arguments: Sequence[Any]
    ) -> Future[Any] | None:
        """Give a task to a worker; None where a worker died, and the pool with it."""
        self._folder = self._folder or Folder(self._parent_folder)
        folder = self._folder.path
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self.workers,
                self._context,
                initializer=workers.prepare,
                initargs=(folder, self._context.socket, self._memory_bytes),
            )
        path = folder / str(next(self._numbers))
        try:
            return self._pool.submit(_call, function, arguments, path, self._memory_bytes)
        except BrokenProcessPool:
            return None

    def _done(self, returned: tuple[Any, Path | None] | Lost) -> Done | Lost:
        if isinstance(returned, Lost):
            return returned
        value, path = returned
        assert self._folder is not None
        return Done(value, None if path is None else self._folder.spilled(path))

    def _reason_of_death(self, codes: Sequence[int]) -> str:
        """Say how the process of a task died that was tried as often as may be."""
        how = ""
        if codes:
            signals = {s.value: s.name for s in signal.Signals}
            how = f" ({signals.get(-codes[0], f'exit code {codes[0]}')})"
        remedy = "use fewer --workers"
        if self._memory_bytes is not None:
            remedy = f"raise --memory, which is {decimal_bytes(self._memory_bytes)}"
        return f"its process died {_MOST_ATTEMPTS} times{how}, often for lack of memory: {remedy}"

    def _end_workers(self) -> list[int]:
        """End all workers at once; return the exit codes of those that had died."""
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._context.kill()
            if self._pool is not None:
                self._pool.shutdown(wait=True, cancel_futures=True)
                self._pool = None
            return self._context.exit_codes()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def rest(self) -> None:
        """End the processes; others start with the next task."""
        self._end_workers()

    def close(self) -> None:
        """End the processes; files stay as long as somebody holds a value in them."""
        self._end_workers()
        self._context.end()
        self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _call(
    function: Callable[..., Any], arguments: Sequence[Any], path: Path, memory_bytes: int | None
) -> tuple[Any, Path | None] | Lost:
    """Run a task in a worker; what is to be held goes to a file."""
    try:
        result = function(*(a.get() if isinstance(a, Spilled) else a for a in arguments))
        if not isinstance(result, Kept):
            return result, None
        if result.big is None:
            return result.value, None
        write(path, result.big)
        return result.value, path
    except (ChopperError, MemoryError) as error:
        return lost(portable(error), memory_bytes)
    except Exception as error:
        raise portable(error) from error


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
