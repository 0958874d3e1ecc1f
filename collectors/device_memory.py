"""Device memory of a rank as torch's allocator sees it, read at the end of each step.

Between two steps is where a reading disturbs nothing: it asks the allocator's own counters on the
host, waits for no device, and resets no peak, because the program may be using them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

from chopper.collectors._accelerator import device_of_rank
from chopper.collectors.base import Availability
from chopper.collectors.step_readings import StepReadings
from chopper.errors import CollectorUnavailable
from chopper.storage.manifest import CollectorReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from chopper.collectors.base import CollectorContext, Scope

NAME = "device_memory"
BY_DEFAULT = True
_KEYS = (
    "allocated_bytes.all.current",
    "reserved_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.peak",
)

Stats = dict[str, Any]


def _allocator(device: str | None) -> tuple[int, Callable[[], Stats]]:
    """The device's ordinal, and how to read its allocator's counters.

    Raises:
        CollectorUnavailable: no torch, no accelerator, or one whose allocator does not count.
    """
    chosen = device_of_rank(device)
    import torch

    module = torch.get_device_module(chosen)
    if not hasattr(module, "memory_stats"):
        raise CollectorUnavailable(f"torch counts no memory on a {chosen.type} device")
    index = chosen.index if chosen.index is not None else torch.accelerator.current_device_index()

    def read() -> Stats:
        stats: Stats = module.memory_stats(index)
        return stats

    return index, read


class DeviceMemoryCollector:
    """Reads the allocator's counters at each step's end. -> DEVICE_MEMORY."""

    name: ClassVar[str] = NAME
    scope: ClassVar[Scope] = "rank"

    def __init__(self) -> None:
        self._device_id = 0
        self._read: Callable[[], Stats] | None = None
        self._readings = StepReadings(NAME)

    def probe(self, context: CollectorContext) -> Availability:
        """Available where torch has an accelerator whose allocator counts."""
        try:
            _allocator(context.device)
        except CollectorUnavailable as exc:
            return Availability(
                ok=False,
                reason=str(exc),
                remedy="install a build of torch for this machine's accelerator, if it has one",
            )
        return Availability(ok=True)

    def call_costs_ns(self, context: CollectorContext) -> dict[str, int]:
        """Median cost of one reading.

        Raises:
            CollectorUnavailable: there is no accelerator.
        """
        _, read = _allocator(context.device)
        costs_ns = []
        for _ in range(30):
            before_ns = time.monotonic_ns()
            read()
            costs_ns.append(time.monotonic_ns() - before_ns)
        return {"allocator": sorted(costs_ns)[len(costs_ns) // 2]}

    def start(self, context: CollectorContext) -> None:
        """Take the first reading and create the file.

        Raises:
            CollectorUnavailable: there is no accelerator.
            OutputError: the file cannot be written.
        """
        self._device_id, self._read = _allocator(context.device)
        self._readings.open(context.directory)
        self._sample(None)

    def on_step(self, step: int) -> None:
        """Read once; the rows go to disk about once a second."""
        if self._readings.problem is None:
            self._sample(step)

    def _sample(self, step: int | None) -> None:
        assert self._read is not None
        before_ns = time.monotonic_ns()
        time_ns = time.time_ns()
        try:
            stats = self._read()
        except RuntimeError as exc:
            # A lost device fails the program soon enough; this must not be what fails it.
            self._readings.problem = (
                f"the allocator's counters could not be read: {exc}".splitlines()[0]
            )
            return
        span_ns = time.monotonic_ns() - before_ns
        middle_ns = time_ns + span_ns // 2
        row = (middle_ns, span_ns, self._device_id, step, *map(stats.get, _KEYS))
        self._readings.add(row, span_ns)

    def stop(self) -> CollectorReport:
        """Take the last reading, close the file."""
        if self._readings.problem is None:
            self._sample(None)
        return self._readings.close(self.name)
