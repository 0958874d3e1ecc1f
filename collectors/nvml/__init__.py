"""NVIDIA devices through NVML: clocks, power, event reasons, counters, GPM activity, limits.

``_library`` wraps the vendor's binding: devices, error codes, field values. ``_sources`` are what
the sampler process reads, one class a tier. This module is the collector that starts that process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from chopper.collectors.base import Availability
from chopper.collectors.sampled import CLOCKS, SampledCollector, named
from chopper.collectors.sampler import SourceSpec
from chopper.collectors.timeouts import DRIVER_TIMEOUT_S

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


class NvmlCollector(SampledCollector):
    """Samples every NVIDIA device of the host that the job may use, in a process of its own.

    -> DEVICE_CLOCK, DEVICE_COUNTER, DEVICE_ACTIVITY, DEVICE_BUFFERED, DEVICE_LIMIT.

    Args:
        hz: rate of the fast tier: clocks, event reasons, instant power.
    """

    name: ClassVar[str] = NAME

    def __init__(self, *, hz: float = _FAST_HZ) -> None:
        self._hz = hz

    def probe(self, context: CollectorContext) -> Availability:
        """Available where NVML finds a device; asks nothing of it yet."""
        del context
        from chopper.collectors.nvml import _library as nvml

        def found() -> list[nvml.NvmlDevice]:
            with nvml.session():
                return nvml.devices()

        devices = named(
            found,
            DRIVER_TIMEOUT_S,
            driver="NVIDIA's driver",
            silent="see whether nvidia-smi answers, and what dmesg says of the devices (Xid)",
            absent="none on a machine without NVIDIA devices; else install the driver, and in a "
            "container pass the devices in (docker run --gpus all)",
        )
        if isinstance(devices, Availability):
            return devices
        self._limits = "; ".join(d.note for d in devices if d.note) or None
        return Availability(ok=True, reason=self._limits)

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
