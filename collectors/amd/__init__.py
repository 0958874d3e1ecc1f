"""AMD devices through amdsmi: clocks of each die, power, energy, temperatures, residencies, links.

``_library`` guards the vendor's binding; ``_sources`` are what the sampler process reads. This
module is the collector that starts that process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from chopper.collectors._visible import local_ranks
from chopper.collectors.amd import _library
from chopper.collectors.amd._library import AmdDevice
from chopper.collectors.sampled import CLOCKS, DeviceCollector
from chopper.collectors.sampler import SourceSpec

if TYPE_CHECKING:
    from chopper.collectors.base import CollectorContext

NAME = "amdsmi"
BY_DEFAULT = True
_FAST_HZ = 100.0
_MEDIUM_HZ = 10.0
_ONCE_HZ = 1 / 86400
"""At the start, and once a day."""
_SOURCES = "chopper.collectors.amd._sources"


class AmdCollector(DeviceCollector[AmdDevice]):
    """Samples every AMD device of the host, in a process of its own.

    -> DEVICE_CLOCK, DEVICE_COUNTER, DEVICE_DIE, DEVICE_LINK, DEVICE_LIMIT, DEVICE_PARTITION.

    Args:
        hz: rate of the fast tier: clocks, power, what holds the clock down.
    """

    name: ClassVar[str] = NAME
    driver: ClassVar[str] = "AMD's driver"
    silent_remedy: ClassVar[str] = "see whether amd-smi answers, and what dmesg says of the devices"
    absent_remedy: ClassVar[str] = (
        "none on a machine without AMD devices; else pip install 'chopper-profiler[amd]' in the "
        "version of the ROCm that is installed"
    )

    def __init__(self, *, hz: float = _FAST_HZ) -> None:
        self._hz = hz

    def devices(self) -> list[AmdDevice]:
        """Ask amdsmi for its devices."""
        with _library.session() as wrapper:
            return _library.devices(wrapper)

    def restrictions(self, devices: list[AmdDevice]) -> list[str | None]:
        """Say where devices are partitions, and what of the environment is not understood."""
        notes = [local_ranks()[1]]
        split = [d for d in devices if d.partition not in (None, "SPX")]
        if split:
            notes.append(
                f"{len(split)} of {len(devices)} devices are partitions ({split[0].partition}): "
                "power, energy and temperature are those of the whole socket"
            )
        return notes

    def specs(self, context: CollectorContext) -> list[SourceSpec]:
        """Return what its sampler reads, and how often."""
        del context
        return [
            SourceSpec(factory=f"{_SOURCES}:ClockSource", hz=self._hz),
            SourceSpec(factory=f"{_SOURCES}:CounterSource", hz=_MEDIUM_HZ),
            SourceSpec(factory=f"{_SOURCES}:PartSource", hz=_MEDIUM_HZ),
            SourceSpec(factory=f"{_SOURCES}:LimitSource", hz=_ONCE_HZ),
            SourceSpec(factory=f"{_SOURCES}:PartitionSource", hz=_ONCE_HZ),
            CLOCKS,
        ]
