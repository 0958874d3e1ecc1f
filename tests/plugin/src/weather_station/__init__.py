"""A collector of another package: how hot it is beside the rack, once every 20 ms.

The collector says whether it can run and what its sampler reads; the source is read in the
sampler's process, one part a sensor, so that one that hangs keeps no other waiting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from chopper.collectors.base import Availability
from chopper.collectors.sampler import CLOCKS, Part, SampledCollector, SourceSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from chopper.collectors.base import CollectorContext
    from chopper.collectors.sampler import Sink


class WeatherSource:
    """Two thermometers. -> DEVICE_COUNTER."""

    name: ClassVar[str] = "thermometers"
    tables: ClassVar[tuple[str, ...]] = ("device_counter",)

    def __init__(self, warm_c: float) -> None:
        self.absent = {"device_counter.energy_j": "a thermometer counts no energy"}
        self._warm_c = warm_c
        self._readings = 0

    def open(self) -> None:
        """Nothing to open."""

    def parts(self) -> list[Part]:
        """One part a thermometer."""

        def part(number: int) -> Part:
            return Part(f"thermometer {number}", lambda sink, _now: self._read(sink, number))

        return [part(0), part(1)]

    def calls(self) -> dict[str, Callable[[], object]]:
        """What is timed when sampling begins."""
        return {"look": lambda: self._warm_c}

    def _read(self, sink: Sink, number: int) -> None:
        self._readings += 1
        values = {"temperature_c": self._warm_c + number}
        columns = _columns()
        sink.add("device_counter", number, f"weather-{number}", *map(values.get, columns))

    def sample(self, sink: Sink, now_ns: int) -> None:
        """Read both."""
        for part in self.parts():
            part.read(sink, now_ns)

    def close(self) -> None:
        """Nothing to close."""


def _columns() -> list[str]:
    from chopper.tables import TABLES

    return [column.name for column in TABLES["device_counter"].columns][4:]


class WeatherCollector(SampledCollector):
    """Temperature beside the rack. -> DEVICE_COUNTER."""

    name: ClassVar[str] = "weather"

    def probe(self, context: CollectorContext) -> Availability:
        """It can be read anywhere."""
        del context
        return Availability(ok=True)

    def specs(self, context: CollectorContext) -> list[SourceSpec]:
        """What its sampler reads, and how often."""
        del context
        factory = "weather_station:WeatherSource"
        return [SourceSpec(factory=factory, hz=50.0, options={"warm_c": 21.5}), CLOCKS]
