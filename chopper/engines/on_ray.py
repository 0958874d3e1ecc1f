"""Tasks on a Ray cluster, which schedules them, holds their values and does them again."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from chopper.engines import Done, Kept, Lost, lost, ray_cluster
from chopper.errors import ChopperError, InputError
from chopper.storage import values
from chopper.version import __version__

_MOST_RETRIES = 3
_STORE_BYTES = 500_000_000


@dataclass(frozen=True)
class InCluster:
    """A value in the cluster's object store."""

    reference: Any

    def get(self) -> Any:
        """Fetch the value."""
        import ray

        return values.decode(ray.get(self.reference))


class OnRay:
    """The engine of a Ray cluster.

    Args:
        address: ``host:port``, ``ray://host:port``, or ``auto`` for the cluster of this machine;
            one is started where there is none.
        reason: why this engine was chosen.
        progress: called with a label and how many of its tasks are done.

    Raises:
        LoaderError: Ray is not installed, or no cluster is at the address.
        InputError: the cluster's workers have other versions.
    """

    name = "ray"

    def __init__(
        self,
        address: str = "auto",
        reason: str = "",
        *,
        progress: Callable[[str, int], None] | None = None,
    ) -> None:
        self.reason, self._progress = reason, progress
        cores = len(os.sched_getaffinity(0))
        self._cluster = contextlib.ExitStack()
        with self._cluster as cluster:
            cluster.enter_context(
                ray_cluster.cluster(
                    None if address == "auto" else address, cpus=cores, store_bytes=_STORE_BYTES
                )
            )
            import ray

            _check_workers(ray)
            self.workers = max(int(ray.cluster_resources().get("CPU", 1)), 1)  # type: ignore[no-untyped-call]
            self._cluster = cluster.pop_all()
        self._task = ray.remote(num_returns=2, max_retries=_MOST_RETRIES)(_call)

    def map(
        self, function: Callable[..., Any], calls: Iterable[Sequence[Any]], *, label: str
    ) -> list[Done | Lost]:
        """As :meth:`chopper.engines.Engine.map`."""
        import ray

        results: dict[int, Done | Lost] = {}
        running: dict[Any, tuple[int, Any]] = {}
        waiting = enumerate(calls)
        while True:
            while len(running) < 2 * self.workers and (call := next(waiting, None)) is not None:
                arguments = [a.reference if isinstance(a, InCluster) else a for a in call[1]]
                value, big = self._task.remote(function, *arguments)
                running[value] = call[0], big
            if not running:
                return [results[number] for number in sorted(results)]
            done, _ = ray.wait([*running], num_returns=1)
            for reference in done:
                number, big = running.pop(reference)
                results[number] = _done(reference, big)
                if self._progress is not None:
                    self._progress(label, len(results))

    def close(self) -> None:
        """Leave the cluster; one that was started for this ends, with what it holds."""
        self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _done(reference: Any, big: Any) -> Done | Lost:
    import ray

    try:
        returned, is_held = ray.get(reference)
    except ray.exceptions.RayError as error:
        return Lost(str(error).strip().partition("\n")[0], None)
    if isinstance(returned, Lost):
        return returned
    return Done(returned, InCluster(big) if is_held else None)


def _call(function: Callable[..., Any], *arguments: Any) -> tuple[tuple[Any, bool], bytes]:
    """Run a task in a worker; what is to be held is the second value."""
    try:
        result = function(
            *(values.decode(a) if isinstance(a, bytes | memoryview) else a for a in arguments)
        )
    except (ChopperError, MemoryError) as error:
        return (lost(error), False), b""
    if not isinstance(result, Kept):
        return (result, False), b""
    if result.big is None:
        return (result.value, False), b""
    return (result.value, True), values.encode(result.big, compressed=True)


def _check_workers(ray: Any) -> None:
    """Refuse workers that do not have this chopper."""
    try:
        theirs = ray.get(ray.remote(_versions).remote())
    except ray.exceptions.RayError as exc:
        raise InputError(
            f"--ray: the cluster's workers cannot import chopper; install chopper-profiler "
            f"{__version__} there"
        ) from exc
    if theirs != _versions():
        raise InputError(
            f"--ray: the cluster's workers run chopper {theirs[0]} on Python {theirs[1]}; here it "
            f"is {__version__} on {platform.python_version()}: install the same there"
        )


def _versions() -> tuple[str, str]:
    return __version__, platform.python_version()
