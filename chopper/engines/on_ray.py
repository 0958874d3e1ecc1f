"""Tasks on a Ray cluster, which schedules them and does them again.

What a task leaves comes here with its result, goes to a file, and travels with the tasks that need
it: nothing is lost with a node.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import os
import pickle
import platform
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chopper.engines import Engine, Lost, check_memory, in_order, lost, portable, ray_cluster
from chopper.engines.processes import limited, work_alone
from chopper.errors import ChopperError, InputError
from chopper.limits import usable_cores
from chopper.storage import remote
from chopper.storage.files import is_users
from chopper.storage.results import Folder, InFile, InMemory, Result, decode, encode, written
from chopper.version import __version__

_Packed = tuple[bytes, list[Any]]
"""A pickle, and the results in it, each encoded."""
_MOST_RETRIES = 3
_STORE_BYTES = 500_000_000
_READY = 8
"""Tasks beyond two for each worker: Ray gives a process back as soon as no task waits for it."""
_OTHER_NODE = "chopper: another node"
"""Second argument of the error of a node that cannot run tasks."""
_ADDRESS_MOST_BYTES = 300


class _Failed(Exception):
    """What a task raises that is lost: its one argument."""


@dataclass(frozen=True)
class _Brought:
    """A result that came with the task."""

    data: Any

    def get(self) -> Any:
        return decode(memoryview(self.data))


_unpacked_results: list[Result] = []
"""The results in the pickle that is being read."""


def _unpacked_result(number: int) -> Result:
    return _unpacked_results[number]


def _packed(value: Any) -> _Packed:
    """Pack a value for another node, with the results that are somewhere in it.

    A copy of what lies at an address goes as the address: a node that lacks it fetches it itself.
    """
    results: list[Any] = []

    def reduced(data: Any) -> tuple[Any, ...]:
        # Workers map the bytes of an array, and copy those of bytes.
        results.append(np.frombuffer(data, np.uint8))
        return _unpacked_result, (len(results) - 1,)

    pickler = pickle.Pickler(packed := io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL)
    # By type: `persistent_id` is asked for each of thousands of objects.
    pickler.dispatch_table = {
        **copyreg.dispatch_table,
        InMemory: lambda result: reduced(encode(result.value, compressed=True)),
        InFile: lambda result: reduced(result.data()),
        type(Path()): _reduce_path,
    }
    pickler.dump(value)
    return packed.getvalue(), results


def _unpacked(packed: bytes, results: Sequence[Result]) -> Any:
    _unpacked_results[:] = results
    try:
        return pickle.loads(packed)
    finally:
        _unpacked_results.clear()


def _reduce_path(path: Path) -> str | tuple[Any, ...]:
    copied = remote.origin(path)
    return path.__reduce__() if copied is None else (remote.restored, copied)


class OnRay(Engine):
    """The engine of a Ray cluster.

    A node without chopper, or with another version, is an :class:`~chopper.errors.InputError` of
    :meth:`map` when a task runs there.

    Args:
        address: ``host:port``, or ``auto`` for the cluster of ``RAY_ADDRESS``, or the one that this
            user has on this machine; one is started where there is none.
        reason: why this engine was chosen.
        memory_bytes: what a task may allocate; None for no limit.
        progress: called with a label and how many of its tasks are done.

    Raises:
        UsageError: the limit of memory is too small for a task.
        LoaderError: Ray is not installed, or no cluster is at the address.
    """

    name = "ray"

    def __init__(
        self,
        address: str = "auto",
        reason: str = "",
        *,
        memory_bytes: int | None = None,
        progress: Callable[[str, int], None] | None = None,
    ) -> None:
        check_memory(memory_bytes)
        self.reason, self._memory_bytes = reason, memory_bytes
        self._progress = progress or (lambda _label, _count: None)
        joined = _running() if address == "auto" else address
        with contextlib.ExitStack() as cluster:
            cluster.enter_context(
                ray_cluster.cluster(joined, cpus=usable_cores(), store_bytes=_STORE_BYTES)
            )
            import ray

            self.workers = max(int(ray.cluster_resources().get("CPU", 1)), 1)  # type: ignore[no-untyped-call]
            self._cluster = cluster.pop_all()
        self._folder: Folder | None = None
        self._task = ray.remote(max_retries=_MOST_RETRIES)(_sent_task())

    def map(
        self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], *, label: str
    ) -> Iterator[Any]:
        """As :meth:`chopper.engines.Engine.map`."""
        import ray

        directory = str(Path.cwd())
        # Where somebody stops asking, a few tasks go on until they end, or the cluster is left: who
        # cancels one whose result is on its way has Ray abort this process (ray 2.60).
        return in_order(
            calls,
            lambda call: self._task.remote(
                directory, self._memory_bytes, *_packed((function, call))
            ),
            lambda tasks: ray.wait(tasks, num_returns=1)[0],
            self._result,
            running={},
            at_most=2 * self.workers + _READY,
            tell=lambda count: self._progress(label, count),
        )

    def _result(self, task: Any) -> Any:
        import ray

        try:
            packed, left = ray.get(task)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, _Failed):
                of_task: Lost = error.cause.args[0]
                return of_task
            if isinstance(error.cause, ImportError) and error.cause.args[1:] == (_OTHER_NODE,):
                raise InputError(f"--ray: {error.cause.args[0]}") from None
            raise error.as_instanceof_cause() from None  # type: ignore[no-untyped-call]
        except ray.exceptions.RayError as error:
            return Lost(
                f"its process or node died {1 + _MOST_RETRIES} times ({_line(error)})", None
            )
        if not left:
            return _unpacked(packed, ())
        self._folder = self._folder or Folder()
        return _unpacked(packed, [written([data], self._folder.path) for data in left])

    def close(self) -> None:
        """Leave the cluster; one that was started for this ends.

        Files stay as long as somebody refers to them.
        """
        self._folder = None
        self._cluster.close()


def _sent_task() -> Callable[..., _Packed]:
    """Return what runs a task on a node. Ray sends it as code: chopper may be missing there."""
    here, other_node = (__version__, platform.python_version()), _OTHER_NODE

    def task(*arguments: Any) -> _Packed:
        import platform
        import socket

        host = socket.gethostname()
        try:
            from chopper.version import __version__
        except ImportError as exc:
            message = (
                f"node {host} of the cluster cannot import chopper ({exc}); install "
                f"chopper-profiler {here[0]} there"
            )
            raise ImportError(message, other_node) from None
        version = platform.python_version()
        if (__version__, version) != here:
            message = (
                f"node {host} of the cluster has chopper {__version__} and Python {version}, here "
                f"are {here[0]} and {here[1]}; install the same there"
            )
            raise ImportError(message, other_node)
        from chopper.engines.on_ray import run_task

        return run_task(*arguments)

    return task


def run_task(
    directory: str,
    memory_bytes: int | None,
    packed: bytes,
    brought: Sequence[Any],
) -> _Packed:
    """Run a task in a worker; return its result.

    Args:
        directory: current one of the command.
        memory_bytes: what the task may allocate; None for no limit.
        packed: the function with its arguments.
        brought: the results among them.

    Raises:
        _Failed: the task is lost.
    """
    work_alone()
    with contextlib.suppress(OSError):  # paths are relative to where the user is
        os.chdir(directory)
    try:
        function, arguments = _unpacked(packed, [*map(_Brought, brought)])
        with limited(memory_bytes):
            return _packed(function(*arguments))
    except (ChopperError, MemoryError) as error:
        raise _Failed(lost(portable(error), memory_bytes)) from None


def _running() -> str | None:
    """Return the address of the cluster that this process is meant to use, where there is one."""
    if named := os.environ.get("RAY_ADDRESS"):
        return named
    for folder in {os.environ.get("RAY_TMPDIR", "/tmp"), tempfile.gettempdir()}:
        with contextlib.suppress(OSError, ValueError, ChopperError):
            address = _own_text(Path(folder) / "ray" / "ray_current_cluster").strip()
            ray_cluster.answers(address)
            return address
    return None


def _own_text(file: Path) -> str:
    """Read a short file that only this user can have written, in a folder that is open to all.

    Raises:
        OSError: it is not there, or a link, a pipe, or another user's.
    """
    opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(opened)
        others = status.st_mode & stat.S_IWOTH or status.st_nlink != 1 or not is_users(status)
        if others or not stat.S_ISREG(status.st_mode):
            raise PermissionError(file)
        return os.read(opened, _ADDRESS_MOST_BYTES).decode()
    finally:
        os.close(opened)


def _line(error: BaseException) -> str:
    """Return the line of a message of Ray that says what failed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line]
    return (named or lines or [type(error).__name__])[-1 if named else 0]
