"""AMD devices through amdsmi: clocks of each die, power, energy, temperatures, residencies, links.

``_library`` guards the vendor's binding; ``_sources`` are what the sampler process reads. This
module is the collector that starts that process.
"""

from __future__ import annotations

from typing import ClassVar

from chopper.collectors.amd import _library
from chopper.collectors.amd._library import AmdDevice
from chopper.collectors.devices import DeviceCollector, local_ranks
from chopper.collectors.sampler import ONCE_HZ

NAME = "amdsmi"
BY_DEFAULT = True


class AmdCollector(DeviceCollector[AmdDevice]):
    """Samples every AMD device of the host, in a process of its own.

    -> DEVICE_CLOCK, DEVICE_COUNTER, DEVICE_DIE, DEVICE_LINK, DEVICE_LIMIT, DEVICE_PARTITION.

    Args:
        hz: most readings per second of the fast tier: clocks, power, what holds the clock down.
    """

    name: ClassVar[str] = NAME
    driver: ClassVar[str] = "AMD's driver"
    silent_remedy: ClassVar[str] = "check that amd-smi responds, and dmesg for device errors"
    absent_remedy: ClassVar[str] = (
        "none on a machine without AMD devices; else pip install 'chopper-profiler[amd]' in the "
        "version of the ROCm that is installed"
    )
    sources: ClassVar[str] = "chopper.collectors.amd._sources"
    rates_hz: ClassVar[dict[str, float]] = {
        "CounterSource": 10.0,
        "PartSource": 10.0,
        "LimitSource": ONCE_HZ,
        "PartitionSource": ONCE_HZ,
    }

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
