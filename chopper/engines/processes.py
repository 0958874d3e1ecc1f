"""Tasks in several processes of this machine.

As a program, this module is a worker: a new Python that does one task after another, as its parent
sends them. Calls and answers are pickles behind their length, over stdin and stdout. It knows
nothing of the parent's program, and ends when stdin does, which the parent's end closes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import resource
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, BinaryIO, cast

from chopper.engines import Engine, Lost, check_memory, in_order, lost, portable
from chopper.errors import ChopperError
from chopper.fresh_python import leave_out_pandas, own_python
from chopper.storage.results import Folder
from chopper.wording import decimal_bytes

_MOST_ATTEMPTS = 3
_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""As many processes as cores: threads of each would be too many."""
_LEFT_TO_PARENT = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Workers end when their parent does, and remove its files: these signals reach a whole group."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LENGTH_BYTES = 8


class _Worker:
    """A process that does one task after another."""

    def __init__(self, folder: Path, memory_bytes: int | None) -> None:
        # Not where the program stands: a torch.py there would be imported.
        self._process = subprocess.Popen(
            own_python("chopper.engines.processes"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT},
        )
        self._calls = cast("BinaryIO", self._process.stdin)
        self._answers = cast("BinaryIO", self._process.stdout)
        self._first: Any = ([*sys.path], folder, memory_bytes)

    def answer(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Have it do a task; return the result.

        Raises:
            EOFError: it died.
        """
        try:
            if self._first is not None:
                _send(self._calls, self._first)
                self._first = None
            _send(self._calls, (function, arguments))
            result, error = pickle.loads(_received(self._answers))
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


class Processes(Engine):
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
        self._memory_bytes = memory_bytes
        self._progress = progress or (lambda _label, _count: None)
        self._parent_folder, self._folder = folder, cast("Folder | None", None)
        self._lock = threading.Lock()
        self._running: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._turns, self._alone = threading.Semaphore(workers_count), threading.Lock()

    @property
    def folder(self) -> Path:
        """Folder for what tasks leave for later ones; it stays as long as somebody refers to it."""
        self._folder = self._folder or Folder(self._parent_folder)
        return self._folder.path

    def map(
        self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], *, label: str
    ) -> Iterator[Any]:
        """As :meth:`chopper.engines.Engine.map`."""
        running: dict[Any, int] = {}
        stopped, folder = threading.Event(), self.folder
        threads = ThreadPoolExecutor(self.workers, initializer=_leave_signals)
        try:
            yield from in_order(
                calls,
                lambda call: threads.submit(self._tried, function, call, folder, stopped),
                lambda tasks: [*wait(tasks, return_when=FIRST_COMPLETED).done],
                Future.result,
                running=running,
                at_most=2 * self.workers,
                tell=lambda count: self._progress(label, count),
            )
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
        stopped: threading.Event,
    ) -> Any:
        """Have a worker do a task, several times if it dies; return the result."""
        code = 0
        for attempt in range(_MOST_ATTEMPTS):
            # Who dies alone dies of its own.
            with self._turn(alone=attempt == _MOST_ATTEMPTS - 1):
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
        return Lost(self._reason_of_death(code), None)

    @contextlib.contextmanager
    def _turn(self, *, alone: bool) -> Iterator[None]:
        """Wait until a task may run; alone, until no other one runs."""
        count = self.workers if alone else 1
        # Of two that each had some of the turns, none would get the rest.
        with self._alone if alone else contextlib.nullcontext():
            for _ in range(count):
                self._turns.acquire()
        try:
            yield
        finally:
            self._turns.release(count)

    def _started(self, folder: Path) -> _Worker:
        try:
            own = _Worker(folder, self._memory_bytes)
        except OSError as exc:
            raise ChopperError(f"no process can be started here ({exc}): use --workers 1") from exc
        self._running.add(own)
        return own

    def _reason_of_death(self, exit_code: int) -> str:
        """Say how the process of a task died that was tried as often as may be."""
        signals = {-s.value: s.name for s in signal.Signals}
        how = signals.get(exit_code, f"exit code {exit_code}")
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


def _leave_signals() -> None:
    """Block signals in this thread, for the processes that it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)


def _send(file: BinaryIO, value: Any) -> None:
    """Write a value and the length of its pickle before it."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    file.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
    file.write(data)
    file.flush()


def _received(file: BinaryIO) -> bytes:
    """Read the pickle that :func:`_send` wrote.

    Raises:
        EOFError: the other process has ended.
    """
    head = file.read(_LENGTH_BYTES)
    length = int.from_bytes(head, "little")
    data = file.read(length)
    if len(head) < _LENGTH_BYTES or len(data) < length:
        raise EOFError
    return data


def _work() -> None:
    """Do what the parent sends until it ends, and remove its files then."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as null:  # noqa: PTH123
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)  # what a task prints is no answer
    path, folder, memory_bytes = pickle.loads(_received(calls))
    sys.path[:] = [*path, *(p for p in sys.path if p not in path)]
    work_alone()
    if memory_bytes is not None:
        _limit(memory_bytes)
    waiting = queue.SimpleQueue[bytes]()

    def read() -> None:
        try:
            while True:
                waiting.put(_received(calls))
        except EOFError:
            for _ in range(2):  # another worker may have been writing
                shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    while True:
        _send(answers, _answer(waiting.get(), memory_bytes))


def _answer(call: bytes, memory_bytes: int | None) -> tuple[Any, Exception | None]:
    """Run a task; return what it returned, and what it raised beside errors of the user's data."""
    try:
        function, arguments = pickle.loads(call)
        return function(*arguments), None
    except (ChopperError, MemoryError) as error:
        return lost(portable(error), memory_bytes), None
    except Exception as error:  # noqa: BLE001 - raised where it is answered
        sent = portable(error)
        sent.add_note(f"in a worker process:\n{''.join(traceback.format_exception(error))}")
        return None, sent


def work_alone() -> None:
    """Prepare a process for the tasks of ranks, one after the other, on one core. Idempotent."""
    import ctypes

    import pyarrow as pa

    leave_out_pandas()
    pa.set_cpu_count(1)
    # Arrow's own pool keeps what is freed, and reserves more than it uses.
    pa.set_memory_pool(pa.system_memory_pool())
    # Arrays of a rank come and go: what is freed is not returned to the system each time. Older
    # versions of glibc refuse a threshold above 32 MiB, and would then map each array anew.
    with contextlib.suppress(OSError, AttributeError):  # another libc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def _limit(memory_bytes: int) -> tuple[int, int]:
    """Limit what this process may allocate, further than the user has; return the limits before."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    least = min(n for n in (memory_bytes, *before) if n != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (least, before[1]))
    return before


@contextlib.contextmanager
def limited(memory_bytes: int | None) -> Iterator[None]:
    """Limit what is allocated in the block, beside what this process has; None for no limit."""
    if memory_bytes is None:
        yield
        return
    import psutil

    before = _limit(psutil.Process().memory_info().data + memory_bytes)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


if __name__ == "__main__":
    _work()
