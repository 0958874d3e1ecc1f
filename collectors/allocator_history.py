"""The allocation history of torch's caching allocator, limited to a number of entries.

The allocator keeps it in a ring of its own, in C++, with the Python stack of each allocation; when
the recording ends it is taken once and written as the tables that a snapshot file becomes.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

from chopper.collectors.base import Availability, CollectorContext, Scope
from chopper.collectors.device_memory import NO_ACCELERATOR, device_of_rank
from chopper.errors import CollectorUnavailable
from chopper.storage.manifest import CollectorReport

NAME = "allocator_history"
BY_DEFAULT = False
MOST_ENTRIES = 200_000
"""About 40 MB of the allocator's memory with stacks; older entries make room for new ones."""


def _history(device: str | None) -> tuple[Any, bool]:
    """Return the memory module of a rank's device, and whether the program keeps a history."""
    kind = device_of_rank(device).type
    import torch

    memory = getattr(torch.get_device_module(kind), "memory", None)
    if not hasattr(memory, "_record_memory_history") or not hasattr(memory, "_snapshot"):
        raise CollectorUnavailable(f"torch's allocator records no history on a {kind} device")
    is_kept = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return memory, bool(is_kept and is_kept())


class AllocatorHistoryCollector:
    """Takes the allocator's history. -> ALLOCATOR_SEGMENT, ALLOCATOR_BLOCK, ALLOCATOR_EVENT."""

    name: ClassVar[str] = NAME
    scope: ClassVar[Scope] = "rank"

    def __init__(self) -> None:
        self._memory: Any = None
        self._context: CollectorContext | None = None

    def probe(self, context: CollectorContext) -> Availability:
        """Available where torch's allocator keeps a history, and nobody else asked for one."""
        try:
            _, is_kept = _history(context.device)
        except CollectorUnavailable as exc:
            return Availability(ok=False, reason=str(exc), remedy=NO_ACCELERATOR)
        if is_kept:
            return Availability(
                ok=False,
                reason="the program records the allocator's history itself",
                remedy="have it dump a snapshot, and import that with the run's trace",
            )
        return Availability(ok=True)

    def start(self, context: CollectorContext) -> None:
        """Let the allocator keep its history.

        Raises:
            CollectorUnavailable: it keeps none here.
        """
        self._context = context
        self._memory, _ = _history(context.device)
        self._memory._record_memory_history(
            enabled="all", context="alloc", stacks="python", max_entries=MOST_ENTRIES
        )

    def stop(self) -> CollectorReport:
        """Take it, write it, and let the allocator keep none."""
        from chopper.collectors.snapshot import tables_of
        from chopper.storage.streams import write_table

        assert self._context is not None
        began_ns = time.monotonic_ns()
        try:
            snapshot = self._memory._snapshot()
        finally:
            self._memory._record_memory_history(enabled=None)
        tables = tables_of(snapshot, self.name)
        files = [
            write_table(self._context.directory, name, table.to_pydict())
            for name, table in tables.items()
            if table.num_rows
        ]
        count = tables["allocator_event"].num_rows
        full = count >= MOST_ENTRIES
        return CollectorReport(
            name=self.name,
            status="obtained",
            reason=f"the history is full: only the last {MOST_ENTRIES} entries" if full else None,
            files=tuple(files),
            samples_count=count,
            call_p50_ns=time.monotonic_ns() - began_ns,
        )
