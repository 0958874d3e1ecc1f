"""Tasks in several processes of this machine."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from chopper.engines import Lost, check_memory, worker
from chopper.errors import ChopperError
from chopper.fresh_python import own_python
from chopper.storage.results import Folder
from chopper.wording import decimal_bytes

_MOST_ATTEMPTS = 3
_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""As many processes as cores: threads of each would be too many."""
_LEFT_TO_PARENT = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Workers end when their parent does, and remove its files: these signals reach a whole group."""


class _Worker:
    """A process that does one task after another."""

    def __init__(self, folder: Path, memory_bytes: int | None) -> None:
        # Not where the program stands: a torch.py there would be imported.
        self._process = subprocess.Popen(
            own_python("chopper.engines.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT},
        )
        self._calls = cast("BinaryIO", self._process.stdin)
        self._answers = cast("BinaryIO", self._process.stdout)
        self._first = [*sys.path], folder, memory_bytes
        self._is_new = True

    def answer(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Have it do a task; return the result.

        Raises:
            EOFError: it died.
        """
        try:
            if self._is_new:
                worker.send(self._calls, self._first)
                self._is_new = False
            worker.send(self._calls, (function, arguments))
            result, error = pickle.loads(worker.received(self._answers))
        except BrokenPipeError as exc:
            raise EOFError from exc
        if error is not None:
            raise error
        return result

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def exit_code(self) -> int:
        """Return the exit code of one that died or was killed."""
        for pipe in (self._calls, self._answers):
            with contextlib.suppress(OSError):  # what was written and never read
                pipe.close()
        return self._process.wait()


@dataclass(frozen=True)
class _Died:
    """The exit code of the last process that a task was tried in."""

    exit_code: int


class Processes:
    """The engine of several processes.

    They are new interpreters, which know nothing of the program that started them. A task whose
    process dies is tried again in another one, the last time alone.

    Args:
        workers_count: processes.
        reason: why this engine was chosen.
        memory_bytes: what each process may allocate; None for no limit.
        folder: where temporary files go; by default where the system has them, on a disk.
        progress: called with a label and how many of its tasks are done.

    Raises:
        UsageError: the limit of memory is too small for a process that does nothing.
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
        self._parent_folder, self._folder = folder, cast("Folder | None", None)
        self._lock = threading.Lock()
        self._running: set[_Worker] = set()
        self._idle: list[_Worker] = []

    @property
    def folder(self) -> Path:
        """Folder for what tasks leave for later ones; it stays as long as somebody refers to it."""
        self._folder = self._folder or Folder(self._parent_folder)
        return self._folder.path

    def map(
        self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], *, label: str
    ) -> Iterator[Any]:
        """As :meth:`chopper.engines.Engine.map`."""
        results: dict[int, Any] = {}
        running: dict[Future[Any], tuple[int, Sequence[Any]]] = {}
        alone: list[tuple[int, Sequence[Any]]] = []
        waiting, following, count = enumerate(calls), 0, 0
        stopped, folder = threading.Event(), self.folder
        threads = ThreadPoolExecutor(self.workers, initializer=_leave_signals)

        def submit(call: tuple[int, Sequence[Any]], attempts: int) -> None:
            attempt = threads.submit(self._tried, function, call[1], folder, attempts, stopped)
            running[attempt] = call

        try:
            while True:
                # Who dies alone dies of its own.
                while (
                    not alone and len(running) < 2 * self.workers and (call := next(waiting, None))
                ):
                    submit(call, _MOST_ATTEMPTS - 1)
                last = alone.pop() if alone and not running else None
                if last is not None:
                    submit(last, 1)
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    call, result = running.pop(future), future.result()
                    if isinstance(result, _Died):
                        if last is None:
                            alone.append(call)
                            continue
                        result = Lost(self._reason_of_death(result), None)
                    results[call[0]] = result
                    count += 1
                    if self._progress is not None:
                        self._progress(label, count)
                while following in results:
                    yield results.pop(following)
                    following += 1
        finally:
            stopped.set()
            if running:
                self.rest()
            threads.shutdown(wait=True, cancel_futures=True)

    def _tried(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        folder: Path,
        attempts: int,
        stopped: threading.Event,
    ) -> Any:
        """Have a worker do a task, up to so many times; return its result or how they died."""
        code = 0
        for _ in range(attempts):
            with self._lock:
                if stopped.is_set():
                    break
                own = self._idle.pop() if self._idle else self._started(folder)
            try:
                result = own.answer(function, arguments)
            except EOFError:
                code = own.exit_code()
                self._running.discard(own)
                continue
            except BaseException:
                self._idle.append(own)
                raise
            self._idle.append(own)
            return result
        return _Died(code)

    def _started(self, folder: Path) -> _Worker:
        try:
            own = _Worker(folder, self._memory_bytes)
        except OSError as exc:
            raise ChopperError(f"no process can be started here ({exc}): use --workers 1") from exc
        self._running.add(own)
        return own

    def _reason_of_death(self, died: _Died) -> str:
        """Say how the process of a task died that was tried as often as may be."""
        signals = {-s.value: s.name for s in signal.Signals}
        how = signals.get(died.exit_code, f"exit code {died.exit_code}")
        remedy = "use fewer --workers"
        if self._memory_bytes is not None:
            remedy = f"raise --memory, which is {decimal_bytes(self._memory_bytes)}"
        return (
            f"its process died {_MOST_ATTEMPTS} times ({how}), often for lack of memory: {remedy}"
        )

    def rest(self) -> None:
        """End the processes; others start with the next task."""
        with self._lock:  # one that is being started is among them then
            ended, self._running, self._idle = self._running, set(), []
        for own in ended:
            own.kill()
        for own in ended:
            own.exit_code()

    def close(self) -> None:
        """End the processes; files stay as long as somebody refers to them."""
        self.rest()
        self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _leave_signals() -> None:
    """Block signals in this thread, for the processes that it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)
