"""Device memory of a rank as torch's allocator sees it, read at the end of each step.

Between two steps is where a reading disturbs nothing: it asks the allocator's own counters on the
host, waits for no device, and resets no peak, because the program may be using them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from chopper.collectors.base import Availability, CollectorContext, StepCollector
from chopper.errors import CollectorUnavailable
from chopper.storage.manifest import CollectorReport

if TYPE_CHECKING:
    import torch

NAME = "device_memory"
BY_DEFAULT = True
_KEYS = (
    "allocated_bytes.all.current",
    "reserved_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.peak",
)

Stats = dict[str, Any]
NO_ACCELERATOR = "install a build of torch for this machine's accelerator, if it has one"
"""Remedy where there is none."""


def device_of_rank(named: str | None) -> torch.device:
    """Return the device that a rank named, else the machine's accelerator.

    Raises:
        CollectorUnavailable: no torch, no accelerator, or the rank computes on the host.
    """
    try:
        import torch
    except ImportError as exc:
        raise CollectorUnavailable("torch is not installed") from exc
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    if accelerator is None:
        raise CollectorUnavailable("torch sees no accelerator: the run computes on the host")
    device = torch.device(named) if named is not None else accelerator
    if device.type == "cpu":
        raise CollectorUnavailable("this rank computes on the host")
    return device


def _allocator(device: str | None) -> tuple[int, Callable[[], Stats]]:
    """Return the device's ordinal, and a function that reads its allocator's counters."""
    chosen = device_of_rank(device)
    import torch

    module = torch.get_device_module(chosen)
    if not hasattr(module, "memory_stats"):
        raise CollectorUnavailable(f"torch does not count memory on a {chosen.type} device")
    index = chosen.index if chosen.index is not None else torch.accelerator.current_device_index()

    def read() -> Stats:
        stats: Stats = module.memory_stats(index)
        return stats

    return index, read


class DeviceMemoryCollector(StepCollector):
    """Reads the allocator's counters at each step's end. -> DEVICE_MEMORY."""

    name: ClassVar[str] = NAME
    source: ClassVar[str] = "allocator"

    def __init__(self) -> None:
        super().__init__()
        self._subject = "the allocator's counters"
        self._device_id = 0
        self._stats: Callable[[], Stats] = dict

    def probe(self, context: CollectorContext) -> Availability:
        """Available where torch has an accelerator whose allocator counts."""
        try:
            self._prepare(context)
        except CollectorUnavailable as exc:
            return Availability(ok=False, reason=str(exc), remedy=NO_ACCELERATOR)
        return Availability(ok=True)

    def _prepare(self, context: CollectorContext) -> None:
        self._device_id, self._stats = _allocator(context.device)

    def _read(self) -> tuple[int, tuple[int | None, ...]]:
        return self._device_id, tuple(map(self._stats().get, _KEYS))

    def stop(self) -> CollectorReport:
        """Take the last reading, close the file."""
        self.on_step(None)
        return super().stop()
