"""Which engine runs the stages of a run's ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from chopper.engines import Engine
from chopper.errors import UsageError

_LEAST_BYTES = 250_000_000
"""Of uncompressed trace: less takes about a second, as long as starting processes does."""
_PACKED = {".gz": 12, ".zst": 12}
"""Bytes of trace to one of a file, about."""


@dataclass(frozen=True)
class EngineOptions:
    """What the user says of engines.

    Attributes:
        workers: processes; None for all cores where that pays.
        memory_bytes: what each may allocate; None for no limit.
        ray: address of a cluster, ``auto`` for the one of this machine; None for none.
        progress: called with a label and how many of its tasks are done.
    """

    workers: int | None = None
    memory_bytes: int | None = None
    ray: str | None = None
    progress: Callable[[str, int], None] | None = None


def engine_of(files: Iterable[Path], options: EngineOptions | None = None) -> Engine:
    """Choose the engine for a run that is read from these files.

    Raises:
        UsageError: options that contradict each other, or Ray is asked for and not installed.
    """
    from chopper.engines.serial import Serial

    options = options or EngineOptions()
    if options.ray is not None:
        if options.workers is not None:
            raise UsageError("--ray and --workers contradict each other: a cluster has its own")
        from chopper.engines.on_ray import OnRay

        return OnRay(options.ray, "--ray", progress=options.progress)
    sizes = [trace_bytes(file) for file in files]
    said = f"{len(sizes)} files, about {sum(sizes) / 1e6:.0f} MB of trace"
    cores = len(os.sched_getaffinity(0))
    workers, reason = options.workers or min(cores, max(len(sizes), 1)), said
    if options.workers is None and options.memory_bytes is None:
        if len(sizes) < 2 or sum(sizes) < _LEAST_BYTES:
            return Serial(said)
    else:
        reason = f"--workers {workers}" if options.workers else "--memory"
    if options.workers == 1 and options.memory_bytes is None:
        return Serial("--workers 1")
    from chopper.engines.processes import Processes

    return Processes(workers, reason, memory_bytes=options.memory_bytes, progress=options.progress)


def trace_bytes(file: Path) -> int:
    """Return about how many bytes of uncompressed trace a file holds; 0 where it is not there."""
    try:
        return file.stat().st_size * _PACKED.get(file.suffix, 1)
    except OSError:
        return 0
