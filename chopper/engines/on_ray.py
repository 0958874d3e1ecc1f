"""Tasks on a Ray cluster, which schedules them, holds their values and does them again."""

from __future__ import annotations

import contextlib
import copyreg
import io
import itertools
import os
import pickle
import platform
import stat
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from chopper.engines import Done, Kept, Lost, lost, ray_cluster
from chopper.engines.processes import check_memory, portable
from chopper.engines.spill import Folder, Spilled, write_parts
from chopper.engines.workers import limited, work_alone
from chopper.errors import ChopperError, InputError
from chopper.limits import usable_cores
from chopper.storage import remote, values
from chopper.storage.files import is_users
from chopper.version import __version__

_Packed = tuple[bytes, int]
"""A compressed pickle, and its length."""
_MOST_RETRIES = 3
_STORE_BYTES = 500_000_000
_PART_BYTES, _MOST_PARTS = 90_000, 16
"""Ray sends what is below 100 kB with its own messages. A value of so many parts travels with its
task's result, and with the tasks that need it; a larger one lies in the object store, which takes
longer than a small task does: a request for a process, and several messages for each copy."""
_READY = 8
"""Tasks beyond two for each worker: Ray gives a process back as soon as no task waits for it."""
_ANSWER_S = 30.0
"""Patience with the nodes of a cluster, which start a process to answer."""
_ADDRESS_MOST_BYTES = 300


@dataclass(frozen=True)
class InCluster:
    """A value in the cluster's object store."""

    reference: Any

    def get(self) -> Any:
        """Fetch the value.

        Raises:
            InputError: the cluster is left, or has lost the value.
        """
        import ray

        if not ray.is_initialized():  # which would start a cluster
            raise InputError(
                "--ray: a value of the cluster was lost when its engine closed; fetch values "
                "before closing it"
            )
        try:
            return values.decode(memoryview(ray.get(self.reference)))
        except ray.exceptions.RayError as exc:
            failed = getattr(exc, "cause", None)
            why = failed.args[0].reason if isinstance(failed, _Failed) else _line(exc)
            raise InputError(f"--ray: a value of the cluster is lost ({why})") from exc


@dataclass(frozen=True)
class _Brought:
    """A value that Ray brought to the worker before its task began."""

    data: Any

    def get(self) -> Any:
        return values.decode(memoryview(self.data))


class _Failed(Exception):
    """What a task raises that is lost: its one argument.

    Were it returned, a value that is made again in vain, for its node has gone, would be None.
    """


_of_task: list[_Brought] = []
"""Values that came with the task whose arguments are being read."""


def _brought(number: int) -> _Brought:
    return _of_task[number]


class _Pickler(pickle.Pickler):
    """Arguments of a task, without the held values that are somewhere in them.

    Ray runs a task where its values are, and starts it when they are there; a task that fetched
    them itself would wait, and another process be started for the core that it does not use.
    A copy of what lies at an address goes as the address: a node that lacks it fetches it itself.

    Attributes:
        brought: the parts of each value; the reference of one that is in the object store.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.brought = brought = list[list[Any]]()

        def reduced(parts: list[Any]) -> tuple[Any, ...]:
            brought.append(parts)
            return _brought, (len(brought) - 1,)

        # By type: `persistent_id` is asked for each of thousands of objects. Nothing here refers to
        # the pickler, which would keep its parts until garbage is collected.
        self.dispatch_table: dict[type, Callable[[Any], str | tuple[Any, ...]]] = {
            **copyreg.dispatch_table,
            InCluster: lambda value: reduced([value.reference]),
            Spilled: lambda value: reduced(_parts(value.data())),
            type(Path()): _reduce_path,
        }


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
        self._copying: deque[Any] = deque(maxlen=2 * self.workers)
        self._folder: Folder | None = None
        self._numbers = itertools.count()
        self._task = ray.remote(num_returns=2 + _MOST_PARTS, max_retries=_MOST_RETRIES)(_call)

    def map(
        self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], *, label: str
    ) -> Iterator[Done | Lost]:
        """As :meth:`chopper.engines.Engine.map`."""
        import ray

        results: dict[int, Done | Lost] = {}
        running: dict[Any, tuple[int, list[Any]]] = {}
        waiting = enumerate(calls)
        following, count, directory = 0, 0, str(Path.cwd())
        # Where somebody stops asking, a few tasks go on until they end, or the cluster is left: who
        # cancels one whose result is on its way has Ray abort this process (ray 2.60).
        while True:
            while len(running) < 2 * self.workers + _READY and (call := next(waiting, None)):
                number, arguments = call
                pickler = _Pickler(packed := io.BytesIO())
                pickler.dump((function, arguments))
                brought = [_parts(packed.getbuffer()), *pickler.brought]
                value, *held = self._task.remote(
                    _version(),
                    directory,
                    self._memory_bytes,
                    [len(parts) for parts in brought],
                    *itertools.chain.from_iterable(brought),
                )
                running[value] = number, held
            if not running:
                break
            # Waiting for a value of the store copies it here: it is not lost with the node that
            # made it. A store that is full drops the copy.
            finished, _ = ray.wait([*running, *self._copying], num_returns=1)
            for reference in finished:
                if reference not in running:
                    self._copying.remove(reference)
                    continue
                number, held = running.pop(reference)
                results[number] = done = self._done(reference, held)
                count += 1
                if isinstance(done, Done) and isinstance(done.held, InCluster):
                    self._copying.append(done.held.reference)
                if self._progress is not None:
                    self._progress(label, count)
            while following in results:
                yield results.pop(following)
                following += 1

    def _done(self, reference: Any, held: list[Any]) -> Done | Lost:
        import ray

        big, *parts = held
        try:
            packed, parts_count = ray.get(reference)
            data = ray.get(parts[: parts_count or 0])
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
        if data:
            return Done(_unpacked(packed), self._spilled(data))
        return Done(_unpacked(packed), None if parts_count is None else InCluster(big))

    def _spilled(self, parts: list[bytes]) -> Spilled:
        """Hold a value in a file here: no node takes it along when it leaves."""
        self._folder = self._folder or Folder()
        path = self._folder.path / str(next(self._numbers))
        write_parts(path, parts)
        return self._folder.spilled(path)

    def rest(self) -> None:
        """Do nothing: the cluster ends workers that are idle."""

    def close(self) -> None:
        """Leave the cluster; one that was started for this ends, with what it holds.

        Files stay as long as somebody holds a value in them.
        """
        self._copying.clear()
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
    parts_counts: Sequence[int],
    *brought: Any,
) -> tuple[Any, ...]:
    """Run a task in a worker.

    Args:
        version: of chopper and Python where the command runs.
        directory: current one of the command.
        memory_bytes: what the task may allocate; None for no limit.
        parts_counts: number of parts of the function with its arguments, and of each of its values.
        brought: these parts.

    Returns:
        What travels back, with the number of parts of what is held: None where nothing is, 0 for
        a value in the store; that value; and the parts, with None for those that it does not need.

    Raises:
        _Failed: the task is lost.
    """
    if version != _version():
        raise InputError("--ray: a node of the cluster has another chopper or Python than here")
    work_alone()
    with contextlib.suppress(OSError):  # paths are relative to where the user is
        os.chdir(directory)
    try:
        each = iter(brought)
        packed, *held = (_whole([*itertools.islice(each, count)]) for count in parts_counts)
        _of_task[:] = map(_Brought, held)
        function, arguments = pickle.loads(packed)
        _of_task.clear()
        with limited(memory_bytes):
            result = function(*(a.get() if isinstance(a, _Brought) else a for a in arguments))
        no_parts = (None,) * _MOST_PARTS
        if not isinstance(result, Kept):
            return (_packed(result), None), None, *no_parts
        if result.big is None:
            return (_packed(result.value), None), None, *no_parts
        data = values.encode(result.big, compressed=True)
        if len(data) > _MOST_PARTS * _PART_BYTES:
            # Workers map the bytes of an array, and copy those of bytes.
            return (_packed(result.value), 0), np.frombuffer(data, np.uint8), *no_parts
        parts = _parts(data)
        return (_packed(result.value), len(parts)), None, *parts, *no_parts[len(parts) :]
    except (ChopperError, MemoryError) as error:
        raise _Failed(lost(portable(error), memory_bytes)) from None


def _parts(data: bytes | memoryview) -> list[bytes]:
    """Cut bytes into parts that Ray sends with its own messages."""
    return [bytes(data[at : at + _PART_BYTES]) for at in range(0, len(data), _PART_BYTES)]


def _whole(parts: list[Any]) -> Any:
    """Return what was cut into parts, or is in the store."""
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _packed(value: Any) -> _Packed:
    """Pack what travels back: what is below 100 kB goes with Ray's own message."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return pa.compress(data, "lz4", asbytes=True), len(data)


def _unpacked(packed: _Packed) -> Any:
    data, size = packed
    return pickle.loads(pa.decompress(data, size, "lz4", asbytes=True))


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
