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
from typing import Any, Self

import numpy as np

from chopper.engines import Lost, check_memory, lost, portable, ray_cluster
from chopper.engines.worker import limited, work_alone
from chopper.errors import ChopperError, InputError
from chopper.limits import usable_cores
from chopper.storage import remote, values
from chopper.storage.files import is_users
from chopper.storage.results import Folder, InFile, InMemory, Result, written
from chopper.version import __version__

_Packed = tuple[bytes, list[Any]]
"""A pickle, and the results in it, each encoded."""
_MOST_RETRIES = 3
_STORE_BYTES = 500_000_000
_READY = 8
"""Tasks beyond two for each worker: Ray gives a process back as soon as no task waits for it."""
_ANSWER_S = 30.0
"""How long the nodes of a cluster, which start a process to answer, may take."""
_ADDRESS_MOST_BYTES = 300


class _Failed(Exception):
    """What a task raises that is lost: its one argument."""


@dataclass(frozen=True)
class _Brought:
    """A result that came with the task."""

    data: Any

    def get(self) -> Any:
        return values.decode(memoryview(self.data))


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
        InMemory: lambda result: reduced(values.encode(result.value, compressed=True)),
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


class OnRay:
    """The engine of a Ray cluster.

    A node without chopper, or with another version, is an :class:`~chopper.errors.InputError` of
    :meth:`map` when a task runs there. Asking every node beforehand would start a second process
    on each: Ray has none that is ready when a command comes.

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
    folder = None

    def __init__(
        self,
        address: str = "auto",
        reason: str = "",
        *,
        memory_bytes: int | None = None,
        progress: Callable[[str, int], None] | None = None,
    ) -> None:
        check_memory(memory_bytes)
        self.reason, self._progress, self._memory_bytes = reason, progress, memory_bytes
        joined = _running() if address == "auto" else address
        with contextlib.ExitStack() as cluster:
            cluster.enter_context(
                ray_cluster.cluster(joined, cpus=usable_cores(), store_bytes=_STORE_BYTES)
            )
            import ray

            self.workers = max(int(ray.cluster_resources().get("CPU", 1)), 1)  # type: ignore[no-untyped-call]
            self._cluster = cluster.pop_all()
        self._folder: Folder | None = None
        self._task = ray.remote(max_retries=_MOST_RETRIES)(_call)

    def map(
        self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], *, label: str
    ) -> Iterator[Any]:
        """As :meth:`chopper.engines.Engine.map`."""
        import ray

        results: dict[int, Any] = {}
        running: dict[Any, int] = {}
        waiting = enumerate(calls)
        following, count, directory = 0, 0, str(Path.cwd())
        # Where somebody stops asking, a few tasks go on until they end, or the cluster is left: who
        # cancels one whose result is on its way has Ray abort this process (ray 2.60).
        while True:
            while len(running) < 2 * self.workers + _READY and (call := next(waiting, None)):
                packed, brought = _packed((function, call[1]))
                task = self._task.remote(_version(), directory, self._memory_bytes, packed, brought)
                running[task] = call[0]
            if not running:
                break
            finished, _ = ray.wait([*running], num_returns=1)
            for task in finished:
                results[running.pop(task)] = self._done(task)
                count += 1
                if self._progress is not None:
                    self._progress(label, count)
            while following in results:
                yield results.pop(following)
                following += 1

    def _done(self, task: Any) -> Any:
        import ray

        try:
            packed, left = ray.get(task)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, _Failed):
                of_task: Lost = error.cause.args[0]
                return of_task
            _check_nodes()  # what another chopper raises says less
            if isinstance(error.cause, InputError):  # of a node that has left by now
                raise error.cause from None
            raise error.as_instanceof_cause() from None  # type: ignore[no-untyped-call]
        except ray.exceptions.RayError as error:
            return Lost(
                f"its process or node died {1 + _MOST_RETRIES} times ({_line(error)})", None
            )
        if not left:
            return _unpacked(packed, ())
        self._folder = self._folder or Folder()
        return _unpacked(packed, [written([data], self._folder.path) for data in left])

    def rest(self) -> None:
        """Do nothing: the cluster ends workers that are idle."""

    def close(self) -> None:
        """Leave the cluster; one that was started for this ends.

        Files stay as long as somebody refers to them.
        """
        self._folder = None
        self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _call(
    version: tuple[str, str],
    directory: str,
    memory_bytes: int | None,
    packed: bytes,
    brought: Sequence[Any],
) -> _Packed:
    """Run a task in a worker; return its result.

    Args:
        version: of chopper and Python where the command runs.
        directory: current one of the command.
        memory_bytes: what the task may allocate; None for no limit.
        packed: the function with its arguments.
        brought: the results among them.

    Raises:
        _Failed: the task is lost.
    """
    if version != _version():
        raise InputError("--ray: a node of the cluster has another chopper or Python than here")
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


def _check_nodes() -> None:
    """Ask each node for its chopper; refuse a cluster of which one does not have this one."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Without a core of its own: it does not wait for what else the cluster does.
    task = ray.remote(num_cpus=0, max_retries=0)(_version)
    asked = {
        task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(): node["NodeManagerHostname"]
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    }
    # A node that is silent may be busy: the task's own error is shown then.
    answered, _ = ray.wait([*asked], num_returns=len(asked), timeout=_ANSWER_S)
    for reference in answered:
        _check_node(reference, asked[reference])


def _check_node(reference: Any, host: str) -> None:
    """Refuse a cluster of which a node does not have this chopper."""
    import ray

    here = _version()
    try:
        theirs = ray.get(reference)
    except ray.exceptions.RayTaskError as exc:
        raise InputError(
            f"--ray: node {host} of the cluster cannot import chopper ({_line(exc)}); install "
            f"chopper-profiler {__version__} there"
        ) from exc
    except ray.exceptions.RayError:
        return  # a node that has just left the cluster
    if theirs != here:
        raise InputError(
            f"--ray: node {host} of the cluster has chopper {theirs[0]} and Python "
            f"{theirs[1]}, here are {here[0]} and {here[1]}; install the same there"
        )


def _version() -> tuple[str, str]:
    """Return the versions of chopper and Python of this process."""
    return __version__, platform.python_version()


def _line(error: BaseException) -> str:
    """Return the line of a message of Ray that says what failed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line]
    return (named or lines or [type(error).__name__])[-1 if named else 0]
