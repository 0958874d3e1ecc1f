"""Tasks in several processes of this machine, and what they hold in files."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, Self

import psutil

from chopper.engines import Done, Kept, Lost, lost
from chopper.errors import ChopperError, OutputError, reason_of
from chopper.storage import values

_MOST_ATTEMPTS = 3
_PREFIX = "chopper-"


class Folder:
    """A temporary folder, which is removed when nobody holds anything in it."""

    def __init__(self, parent: Path | None = None) -> None:
        within = parent or _temporary()
        for old in within.glob(f"{_PREFIX}[0-9]*-*"):
            # Left by a process that was killed.
            pid = old.name.split("-")[1]
            if pid.isdigit() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(old, ignore_errors=True)
        prefix = f"{_PREFIX}{os.getpid()}-"
        try:
            self._directory = tempfile.TemporaryDirectory(prefix=prefix, dir=within)
        except OSError as exc:
            raise OutputError(f"{within}: no folder can be made there ({reason_of(exc)})") from exc
        self.path = Path(self._directory.name)


@dataclass(frozen=True)
class Spilled:
    """A value in a file.

    Attributes:
        folder: keeps the file; None in a worker.
    """

    path: Path
    folder: Folder | None

    def get(self) -> Any:
        """Read the value; its tables stay in the file until they are used."""
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return values.decode(memoryview(mapped))

    def __reduce__(self) -> tuple[Any, ...]:
        return Spilled, (self.path, None)


class Processes:
    """The engine of several processes.

    A task whose process dies is tried again in another one, the last time alone; its values are
    held in files of a temporary folder.

    Args:
        workers: processes.
        reason: why this engine was chosen.
        memory_bytes: what each process may allocate; None for no limit.
        folder: where temporary files go; by default where the system has them, on a disk.
        progress: called with a label and how many of its tasks are done.
    """

    name = "processes"

    def __init__(
        self,
        workers: int,
        reason: str = "",
        *,
        memory_bytes: int | None = None,
        folder: Path | None = None,
        progress: Callable[[str, int], None] | None = None,
    ) -> None:
        self.workers, self.reason = workers, reason
        self._memory_bytes, self._progress = memory_bytes, progress
        self._folder = Folder(folder)
        self._numbers = itertools.count()
        self._pool: ProcessPoolExecutor | None = None

    def map(
        self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], *, label: str
    ) -> list[Done | Lost]:
        """As :meth:`chopper.engines.Engine.map`."""
        results: dict[int, Done | Lost] = {}
        try:
            for number, result in self._results(function, enumerate(calls)):
                results[number] = result
                if self._progress is not None:
                    self._progress(label, len(results))
        except BaseException:
            self._kill()
            raise
        return [results[number] for number in sorted(results)]

    def _results(
        self, function: Callable[..., Any], calls: Iterator[tuple[int, Sequence[Any]]]
    ) -> Iterator[tuple[int, Done | Lost]]:
        """Yield each call's number and what became of it, as they are done."""
        running: dict[Future[Any], tuple[int, Sequence[Any]]] = {}
        again: deque[tuple[int, Sequence[Any]]] = deque()
        attempts: dict[int, int] = {}
        while True:
            while len(running) < 2 * self.workers:
                call = again[0] if again else next(calls, None)
                if call is None:
                    break
                is_last = attempts.get(call[0], 0) == _MOST_ATTEMPTS - 1
                if is_last and running:
                    break  # The last attempt is alone: who dies now dies of its own.
                if again:
                    again.popleft()
                running[self._submit(function, call[1])] = call
                if is_last:
                    break
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            died = []
            for future in done:
                call = running.pop(future)
                try:
                    yield call[0], self._done(future.result())
                except BrokenProcessPool:
                    died.append(call)
            if died:
                died += running.values()
                running.clear()
                self._kill()
                for call in sorted(died, key=lambda item: item[0]):
                    attempts[call[0]] = attempts.get(call[0], 0) + 1
                    if attempts[call[0]] < _MOST_ATTEMPTS:
                        again.append(call)
                    else:
                        yield call[0], Lost("its process was killed (out of memory?)", None)

    def _done(self, returned: tuple[Any, Path | None] | Lost) -> Done | Lost:
        if isinstance(returned, Lost):
            return returned
        value, path = returned
        return Done(value, None if path is None else Spilled(path, self._folder))

    def _submit(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Future[Any]:
        path = self._folder.path / str(next(self._numbers))
        if self._pool is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["chopper.pipeline"])
            self._pool = ProcessPoolExecutor(
                self.workers, context, initializer=_prepare, initargs=(self._memory_bytes,)
            )
        with _without_main():
            return self._pool.submit(_call, function, arguments, path)

    def _kill(self) -> None:
        """End the processes at once."""
        if self._pool is not None:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def close(self) -> None:
        """End the processes; files stay as long as somebody holds a value in them."""
        self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _call(
    function: Callable[..., Any], arguments: Sequence[Any], path: Path
) -> tuple[Any, Path | None] | Lost:
    """Run a task in a worker; what is to be held goes to a file."""
    try:
        result = function(*(a.get() if isinstance(a, Spilled) else a for a in arguments))
        if not isinstance(result, Kept):
            return result, None
        if result.big is None:
            return result.value, None
        _write(path, values.encode(result.big, compressed=True))
        return result.value, path
    except (ChopperError, MemoryError) as error:
        return lost(error)


def _write(path: Path, data: bytes) -> None:
    partial = path.with_suffix(".partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise OutputError(
            f"{path.parent}: a temporary file cannot be written ({reason_of(exc)}); free space "
            "there, or set TMPDIR to another disk"
        ) from exc


def _prepare(memory_bytes: int | None) -> None:
    """Make a worker that leaves Ctrl-C to its parent and ends with it."""
    import pyarrow as pa

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pa.set_cpu_count(1)
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        threading.Thread(target=_end_with, args=(sentinel,), daemon=True).start()
    if memory_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, hard))


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep a process that starts from importing the user's script again."""
    names = sys.modules["__main__"].__dict__
    hidden: dict[str, Any] = {n: names.pop(n) for n in ("__file__", "__spec__") if n in names}
    names["__spec__"] = None
    try:
        yield
    finally:
        names.update(hidden)


def _temporary() -> Path:
    """Return the system's folder for temporary files, unless that is memory."""
    folder = Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        around = [m for m in mounts if folder.is_relative_to(m[1])]
        if around and max(around, key=lambda m: len(m[1]))[2] in ("tmpfs", "ramfs"):
            return Path("/var/tmp")
    return folder
