"""Worker processes: forked from a server that has loaded the pipeline, without the user's program.

Python's own fork server is one for the whole process and imports ``__main__`` in each worker: a
training script without a guard would train again, and workers of the program's own would be
forked from what is loaded here. This one belongs to an engine.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing import (
    connection,
    context,
    parent_process,
    process,
    reduction,
    resource_tracker,
    util,
)
from multiprocessing.forkserver import ForkServer, read_signed
from multiprocessing.popen_forkserver import Popen
from pathlib import Path
from typing import Any

from chopper.errors import ChopperError
from chopper.fresh_python import PACKAGE_PARENT, environment, leave_out_pandas

_PRELOADED = ["chopper.pipeline", "pyarrow.compute", "pyarrow.parquet"]
_ENVIRONMENT = {
    # As many processes as cores: threads of each would be too many, and cannot be forked.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Nothing is imported from where the server stands.
    "PYTHONSAFEPATH": "1",
}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LONGEST_FOLDER_BYTES = 60
_LEFT_TO_PARENT = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Workers end when their parent does, and remove its files: these signals reach a whole group."""


class _Server(ForkServer):
    """A fork server whose processes leave signals to their parent and use one thread."""

    _forkserver_pid: int | None
    _forkserver_address: str | None
    _stop: Callable[[], None]

    def ensure_running(self) -> None:
        """Start the server, unless it runs."""
        resource_tracker.ensure_running()  # which unblocks signals
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)
        try:
            with _environment():
                _shorten_socket_paths()
                super().ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def end(self) -> None:
        """End the server at once; its processes are ended already."""
        if self._forkserver_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._forkserver_pid, signal.SIGKILL)
            self._stop()


def _shorten_socket_paths() -> None:
    """Have multiprocessing make its folder of sockets where their paths fit 107 bytes."""
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER_BYTES:
        before, tempfile.tempdir = tempfile.tempdir, "/tmp"
        try:
            util.get_temp_dir()
        finally:
            tempfile.tempdir = before


class _WorkerPopen(Popen):
    """A process that is started knowing nothing of ``__main__``."""

    _fds: list[int]

    def __init__(self, worker: Worker) -> None:
        self._server = worker.server
        self._reading = threading.Lock()
        super().__init__(worker)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code, None while it runs; the pool's thread asks as well.

        The code can be read once: who read it second took the process's end for exit code 255.
        """
        patience_s = 0 if flag == os.WNOHANG else None
        if self.returncode is None and connection.wait([self.sentinel], patience_s):
            with self._reading:
                super().poll()
        return self.returncode

    def _launch(self, process_obj: Any) -> None:
        known = {
            "name": process_obj.name,
            "authkey": process.current_process().authkey,
            "sys_path": [*sys.path],
        }
        with contextlib.suppress(OSError):  # a directory that was removed
            known["dir"] = os.getcwd()  # noqa: PTH109
        data = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(known, data)
            reduction.dump(process_obj, data)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, writer = self._server.connect_to_new_process(self._fds)
        # Closed when this process ends, or this object: the worker ends then.
        alive = os.dup(writer)
        self.finalizer = util.Finalize(self, _close, (alive, self.sentinel))
        try:
            with os.fdopen(writer, "wb") as file:
                file.write(data.getbuffer())
            self.pid = read_signed(self.sentinel)
        except BaseException as exc:  # an interrupt: nobody will know its id
            self.finalizer()
            if isinstance(exc, EOFError | ConnectionError):
                raise ChopperError(
                    "the process that starts workers was killed, often for lack of memory: use "
                    "fewer --workers, or run again"
                ) from exc
            raise


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class Worker(context.ForkServerProcess):
    """A worker process.

    Attributes:
        server: what it is forked from.
        is_ended: it was ended on purpose.
    """

    def __init__(self, server: _Server, **options: Any) -> None:
        super().__init__(**options)
        self.server, self.is_ended = server, False

    def _Popen(self, process_obj: Any) -> _WorkerPopen:  # type: ignore[override]
        del process_obj
        return _WorkerPopen(self)

    def terminate(self) -> None:
        """End it at once."""
        if self.is_alive():
            self.is_ended = True
            super().kill()

    kill = terminate

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "server"}


class Workers(context.ForkServerContext):
    """The context from which :class:`~concurrent.futures.ProcessPoolExecutor` starts processes."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[Worker] = []
        self._server = _Server()
        self._server.set_forkserver_preload(_PRELOADED)
        self._server.ensure_running()

    def Process(self, **options: Any) -> Worker:  # type: ignore[override]
        """Return a process that can be started."""
        worker = Worker(self._server, **options)
        self.started.append(worker)
        return worker

    def kill(self) -> None:
        """End all workers at once."""
        for worker in self.started:
            worker.kill()

    def exit_codes(self) -> list[int]:
        """Return the exit codes of workers that nobody ended, and forget all workers."""
        codes = [w.exitcode for w in self.started if not w.is_ended and not w.is_alive()]
        self.started.clear()
        return [code for code in codes if code]

    def end(self) -> None:
        """End the server that workers are forked from."""
        self._server.end()

    @property
    def socket(self) -> str:
        """Path of the server's socket."""
        return str(self._server._forkserver_address)


def prepare(folder: Path, socket: str, memory_bytes: int | None) -> None:
    """Make this process a worker: it ends with its parent, whose files it removes then."""
    work_alone()
    parent = parent_process()
    assert parent is not None
    threading.Thread(
        target=_end_with, args=(parent.sentinel, folder, Path(socket)), daemon=True
    ).start()
    if memory_bytes is not None:
        _limit(memory_bytes)


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


def _end_with(sentinel: int, folder: Path, socket: Path) -> None:
    connection.wait([sentinel])
    for _ in range(2):  # another worker may have been writing
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        socket.unlink(missing_ok=True)
        socket.parent.rmdir()
    os._exit(1)


def _environment() -> AbstractContextManager[None]:
    """Set what the server and its processes inherit."""
    path = os.pathsep.join(filter(None, (PACKAGE_PARENT, os.environ.get("PYTHONPATH"))))
    return environment({**_ENVIRONMENT, "PYTHONPATH": path})
