"""Base of the collectors whose sources a sampler process reads, once per host."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from chopper.collectors._visible import NothingVisible
from chopper.collectors.base import Availability
from chopper.collectors.sampler import (
    SamplerProcess,
    SourceSpec,
    SystemClock,
    call_costs,
    reading_cost_ns,
    to_report,
)
from chopper.collectors.timeouts import DRIVER_TIMEOUT_S, call_within
from chopper.errors import CollectorUnavailable

if TYPE_CHECKING:
    from chopper.collectors.base import CollectorContext, Scope
    from chopper.storage.manifest import CallCost, CollectorReport

_D = TypeVar("_D")
CLOCKS = SourceSpec(factory="chopper.collectors.sampler:ClockSource", hz=1.0)
"""The host's clocks, which every sampler reads to know how well its times are aligned."""


class SampledCollector(ABC):
    """A collector whose sources are read by a process of its own."""

    name: ClassVar[str]
    scope: ClassVar[Scope] = "host"
    _sampler: SamplerProcess | None = None
    _limits: str | None = None
    """Restrictions that ``probe`` saw on devices that can be read."""

    @abstractmethod
    def probe(self, context: CollectorContext) -> Availability:
        """Say whether anything of it can be read here."""

    @abstractmethod
    def specs(self, context: CollectorContext) -> list[SourceSpec]:
        """Return what its sampler reads, and how often."""

    def try_sources(self, context: CollectorContext) -> tuple[dict[str, str], list[str], int]:
        """Open each source once, but for the clocks, which can be read anywhere.

        Returns:
            ``table.column`` or table → why it stays null; why sources cannot be read; how many can.
        """
        absent: dict[str, str] = {}
        refusals: list[str] = []
        specs = [spec for spec in self.specs(context) if spec is not CLOCKS]
        for source in (spec.make() for spec in specs):
            try:
                source.open()
            except CollectorUnavailable as exc:
                refusals.append(str(exc))
                absent.update(dict.fromkeys(source.tables, str(exc)))
            finally:
                source.close()
            absent.update(source.absent)
        return absent, refusals, len(specs) - len(refusals)

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
        """Spawn the sampler.

        Raises:
            CollectorUnavailable: nothing can be read here.
            CaptureError: the sampler process cannot be started.
        """
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
    absent_remedy: ClassVar[str]
    """Advice where it is not there, or has no device."""
    timeout_s: ClassVar[float] = DRIVER_TIMEOUT_S

    @abstractmethod
    def devices(self) -> list[_D]:
        """Ask the driver for its devices, which may never return.

        Raises:
            CollectorUnavailable: there is none that the program may use; the message says why.
        """

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
