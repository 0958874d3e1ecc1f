"""NVIDIA devices through NVML: clocks, power, event reasons, counters, GPM activity, limits.

``_library`` wraps the vendor's binding: devices, error codes, field values. ``_sources`` are what
the sampler process reads, one class a tier. This module is the collector that starts that process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from chopper.collectors.nvml import _library
from chopper.collectors.nvml._library import NvmlDevice
from chopper.collectors.sampled import CLOCKS, DeviceCollector
from chopper.collectors.sampler import SourceSpec

if TYPE_CHECKING:
    from chopper.collectors.base import CollectorContext

NAME = "nvml"
BY_DEFAULT = True
_FAST_HZ = 100.0
_MEDIUM_HZ = 10.0
_GPM_HZ = 1 / 0.11
"""GPM wants 100 ms between two snapshots: at 10 Hz a late one would leave the next too little."""
_SLOW_HZ = 1.0
_ONCE_HZ = 1 / 86400
"""At the start, and once a day."""
_SOURCES = "chopper.collectors.nvml._sources"


class NvmlCollector(DeviceCollector[NvmlDevice]):
    """Samples every NVIDIA device of the host that the job may use, in a process of its own.

    -> DEVICE_CLOCK, DEVICE_COUNTER, DEVICE_ACTIVITY, DEVICE_BUFFERED, DEVICE_LIMIT.

    Args:
        hz: rate of the fast tier: clocks, event reasons, instant power.
    """

    name: ClassVar[str] = NAME
    driver: ClassVar[str] = "NVIDIA's driver"
    silent_remedy: ClassVar[str] = (
        "see whether nvidia-smi answers, and what dmesg says of the devices (Xid)"
    )
    absent_remedy: ClassVar[str] = (
        "none on a machine without NVIDIA devices; else install the driver, and in a container "
        "pass the devices in (docker run --gpus all)"
    )

    def __init__(self, *, hz: float = _FAST_HZ) -> None:
        self._hz = hz

    def devices(self) -> list[NvmlDevice]:
        """Ask NVML for its devices."""
        with _library.session():
            return _library.devices()

    def restrictions(self, devices: list[NvmlDevice]) -> list[str | None]:
        """Return the notes on devices, such as that one is partitioned."""
        return [device.note for device in devices]

    def specs(self, context: CollectorContext) -> list[SourceSpec]:
        """Return what its sampler reads, and how often."""
        del context
        return [
            SourceSpec(factory=f"{_SOURCES}:ClockSource", hz=self._hz),
            SourceSpec(factory=f"{_SOURCES}:CounterSource", hz=_MEDIUM_HZ),
            SourceSpec(factory=f"{_SOURCES}:ActivitySource", hz=_GPM_HZ),
            SourceSpec(
                factory=f"{_SOURCES}:BufferedSource", hz=_SLOW_HZ, options={"polled_hz": self._hz}
            ),
            SourceSpec(factory=f"{_SOURCES}:LimitSource", hz=_ONCE_HZ),
            CLOCKS,
        ]
