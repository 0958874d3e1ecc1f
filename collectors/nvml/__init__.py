"""NVIDIA devices through NVML: clocks, power, event reasons, counters, GPM activity, limits.

``_sources`` are what the sampler process reads, one class a tier and one line a metric;
``_library`` wraps the vendor's binding: devices, error codes, field values. This module is the
collector that starts that process.
"""

from __future__ import annotations

from typing import ClassVar

from chopper.collectors.base import CollectorContext
from chopper.collectors.devices import DeviceCollector
from chopper.collectors.nvml import _library
from chopper.collectors.nvml._library import NvmlDevice
from chopper.collectors.sampler import ONCE_HZ, SourceSpec

NAME = "nvml"
BY_DEFAULT = True


class NvmlCollector(DeviceCollector[NvmlDevice]):
    """Samples every NVIDIA device of the host that the job may use, in a process of its own.

    -> DEVICE_CLOCK, DEVICE_COUNTER, DEVICE_ACTIVITY, DEVICE_BUFFERED, DEVICE_LIMIT.

    Args:
        hz: most readings per second of the fast tier: clocks, event reasons, instant power.
    """

    name: ClassVar[str] = NAME
    driver: ClassVar[str] = "NVIDIA's driver"
    silent_remedy: ClassVar[str] = (
        "check that nvidia-smi responds, and dmesg for device errors (Xid)"
    )
    absent_remedy: ClassVar[str] = (
        "none on a machine without NVIDIA devices; else install the driver, and in a container "
        "pass the devices in (docker run --gpus all)"
    )
    sources: ClassVar[str] = "chopper.collectors.nvml._sources"
    rates_hz: ClassVar[dict[str, float]] = {
        "CounterSource": 10.0,
        # GPM wants 100 ms between two snapshots: at 10 Hz a late one leaves the next too little.
        "ActivitySource": 1 / 0.11,
        "LimitSource": ONCE_HZ,
    }

    def specs(self, context: CollectorContext) -> list[SourceSpec]:
        """Return what its sampler reads, and how often."""
        # What the driver buffers is taken where it is finer than the fast tier.
        buffered = SourceSpec(
            factory=f"{self.sources}:BufferedSource", hz=1.0, options={"polled_hz": self._hz}
        )
        return [*super().specs(context), buffered]

    def devices(self) -> list[NvmlDevice]:
        """Ask NVML for its devices."""
        with _library.session():
            return _library.devices()

    def restrictions(self, devices: list[NvmlDevice]) -> list[str | None]:
        """Return the notes on devices, such as that one is partitioned."""
        return [device.note for device in devices]
