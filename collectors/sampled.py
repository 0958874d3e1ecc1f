"""Base of the collectors whose sources a sampler process reads, once per host."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

from chopper.collectors._visible import NothingVisible
from chopper.collectors.base import (
    DRIVER_TIMEOUT_S,
    Availability,
    CollectorContext,
    Scope,
    call_within,
)
from chopper.collectors.sampler import (
    SamplerProcess,
    SourceSpec,
    SystemClock,
    call_costs,
    reading_cost_ns,
    to_report,
)
from chopper.errors import CollectorUnavailable
from chopper.storage.manifest import CallCost, CollectorReport

_D = TypeVar("_D")
ONCE_HZ = 1 / 86400
"""At the start, and once a day."""
CLOCKS = SourceSpec(factory="chopper.collectors.sampler:ClockSource", hz=1.0)
"""The host's clocks, which every sampler reads to know how well its times are aligned."""


class SampledCollector(ABC):
    """A collector whose sources are read by a process of its own."""

    name: ClassVar[str]
    scope: ClassVar[Scope] = "host"
    _sampler: SamplerProcess | None = None
    _limits: str | None = None
    """Restrictions that ``probe`` saw on devices that can be read."""

    absent_remedy: ClassVar[str] = ""
    """Advice where nothing of it can be read."""

    def __init__(self, *, hz: float = 10.0, root: str = "/") -> None:
        self._hz = hz
        self._root = root

    def probe(self, context: CollectorContext) -> Availability:
        """Open each source once; the reason names what stays null."""
        why: dict[str, list[str]] = {}
        refusals: list[str] = []
        specs = [spec for spec in self.specs(context) if spec is not CLOCKS]
        for source in (spec.make() for spec in specs):
            absent: dict[str, str] = {}
            with contextlib.closing(source):
                try:
                    source.open()
                except CollectorUnavailable as exc:
                    refusals.append(str(exc))
                    absent = dict.fromkeys(source.tables, str(exc))
            for what, reason in {**absent, **source.absent}.items():
                why.setdefault(reason, []).append(what)
        if len(refusals) == len(specs):
            return Availability(False, "; ".join(refusals), self.absent_remedy)
        limits = "; ".join(f"no {', '.join(names)} ({reason})" for reason, names in why.items())
        return Availability(True, limits or None)

    @abstractmethod
    def specs(self, context: CollectorContext) -> list[SourceSpec]:
        """Return what its sampler reads, and how often."""

    def call_costs_ns(self, context: CollectorContext) -> dict[str, int]:
        """Return the median cost of one reading of each source that is available."""
        costs_ns: dict[str, int] = {}
        for source in (spec.make() for spec in self.specs(context)):
            with contextlib.suppress(CollectorUnavailable):
                costs_ns[source.name] = reading_cost_ns(source)
        return costs_ns

    def driver_calls(self, context: CollectorContext) -> dict[str, CallCost]:
        """Return the cost of each call of a driver that its sources make, measured now."""
        costs: dict[str, CallCost] = {}
        for source in (spec.make() for spec in self.specs(context)):
            with contextlib.suppress(CollectorUnavailable), contextlib.closing(source):
                source.open()
                costs |= call_costs(source, SystemClock())
        return costs

    def start(self, context: CollectorContext) -> None:
        """Spawn the sampler."""
        self._sampler = SamplerProcess(self.name, context.directory, self.specs(context))
        self._sampler.start()

    def stop(self) -> CollectorReport:
        """End the sampler and report how well it kept its times."""
        assert self._sampler is not None
        report = to_report(self.name, self._sampler.stop())
        report.reason = "; ".join(filter(None, (self._limits, report.reason))) or None
        return report


class DeviceCollector(SampledCollector, Generic[_D]):
    """A collector of devices that a vendor's driver lists."""

    driver: ClassVar[str]
    """The driver in words."""
    silent_remedy: ClassVar[str]
    """Advice where it does not answer."""
    timeout_s: ClassVar[float] = DRIVER_TIMEOUT_S
    sources: ClassVar[str]
    """Module of its sources, of which ``ClockSource`` is the fast tier."""
    rates_hz: ClassVar[dict[str, float]]
    """Rates of its other sources, by class."""

    def __init__(self, *, hz: float = 100.0) -> None:
        super().__init__(hz=hz)

    def specs(self, context: CollectorContext) -> list[SourceSpec]:
        """Return what its sampler reads, and how often."""
        del context
        rates_hz = {"ClockSource": self._hz, **self.rates_hz}
        specs = [SourceSpec(factory=f"{self.sources}:{k}", hz=hz) for k, hz in rates_hz.items()]
        return [*specs, CLOCKS]

    @abstractmethod
    def devices(self) -> list[_D]:
        """Ask the driver for its devices, which may never return."""

    @abstractmethod
    def restrictions(self, devices: list[_D]) -> list[str | None]:
        """Return what keeps these devices from being read wholly, in words."""

    def probe(self, context: CollectorContext) -> Availability:
        """Available where the driver lists a device; nothing is read of it yet."""
        del context
        try:
            devices = call_within(self.timeout_s, self.devices)
        except TimeoutError:
            reason = f"{self.driver} has not answered for {self.timeout_s:g} s"
            return Availability(ok=False, reason=reason, remedy=self.silent_remedy)
        except CollectorUnavailable as exc:
            remedy = exc.remedy if isinstance(exc, NothingVisible) else self.absent_remedy
            return Availability(ok=False, reason=str(exc), remedy=remedy)
        self._limits = "; ".join(filter(None, self.restrictions(devices))) or None
        return Availability(ok=True, reason=self._limits)
