"""Choice of the engine that runs the stages of a run's ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chopper.engines import Engine, Serial
from chopper.errors import UsageError
from chopper.limits import LARGE_TRACE_BYTES, usable_cores
from chopper.wording import bytes_, decimal_bytes, plural

_LEAST_BYTES = 250_000_000
"""Of uncompressed trace: less takes about a second, as long as starting processes does."""
_PACKED = {".gz": 12, ".zst": 12}
"""Bytes of trace to one of a file, about."""


@dataclass(frozen=True)
class EngineOptions:
    """The user's wishes for an engine.

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


def engine_of(sizes: Sequence[int], options: EngineOptions | None = None) -> Engine:
    """Choose the engine for a run.

    Args:
        sizes: bytes of uncompressed trace, about, of each file or rank.
        options: what the user wishes.

    Raises:
        UsageError: options that contradict each other, or Ray is asked for and not installed.
    """
    options = options or EngineOptions()
    more: dict[str, Any] = {"memory_bytes": options.memory_bytes, "progress": options.progress}
    if sys.platform != "linux" and (options.workers, options.memory_bytes) != (None, None):
        raise UsageError("--workers and --memory need Linux; leave them out")
    if options.ray is not None:
        if options.workers is not None:
            raise UsageError(
                "--ray and --workers contradict each other: a cluster schedules its own workers"
            )
        from chopper.engines.on_ray import OnRay

        return OnRay(options.ray, f"--ray {options.ray}", **more)
    if sys.platform != "linux":
        return Serial("several processes need Linux")
    # A large trace is several tasks: its stretches.
    tasks = sum(max(1, 4 * (size // LARGE_TRACE_BYTES)) for size in sizes)
    workers = min(usable_cores(), max(tasks, 1))
    reason = f"{plural(len(sizes), 'trace')}, about {bytes_(sum(sizes))} of trace"
    pays = sum(sizes) >= _LEAST_BYTES
    if options.workers is not None:
        workers, reason = options.workers, f"--workers {options.workers}"
        in_several = workers > 1 or pays or options.memory_bytes is not None
    elif options.memory_bytes is not None:
        in_several, reason = True, f"--memory {decimal_bytes(options.memory_bytes)}"
    else:
        in_several = workers > 1 and pays
    if not in_several:
        return Serial(reason)
    from chopper.engines.processes import Processes

    return Processes(workers, reason, **more)


def trace_bytes(files: Iterable[Path]) -> list[int]:
    """Return about how many bytes of uncompressed trace each file holds; 0 for one not there."""
    sizes = []
    for file in files:
        try:
            sizes.append(file.stat().st_size * _PACKED.get(file.suffix, 1))
        except OSError:
            sizes.append(0)
    return sizes
