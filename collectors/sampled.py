"""Base of the collectors whose sources a sampler process reads, once per host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, TypeVar

from chopper.collectors._visible import NothingVisible
from chopper.collectors.base import Availability
from chopper.collectors.sampler import (
    SamplerProcess,
    SourceSpec,
    SystemClock,
    call_costs,
    measure_call_ns,
    to_report,
)
from chopper.collectors.timeouts import call_within
from chopper.errors import CollectorUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from chopper.collectors.base import CollectorContext, Scope
    from chopper.storage.manifest import CallCost, CollectorReport

T = TypeVar("T")
CLOCKS = SourceSpec(factory="chopper.collectors.sampler:ClockSource", hz=1.0)
"""The host's clocks, which every sampler reads to know how well its times are aligned."""


def named(
    devices: Callable[[], list[T]], timeout_s: float, *, driver: str, silent: str, absent: str
) -> list[T] | Availability:
    """The devices that a driver names; where it names none, why.

    Args:
        devices: asks it.
        timeout_s: how long it may take.
        driver: whose it is.
        silent: what to do where it does not answer.
        absent: what to do where it is not there, or has nothing.
    """
    try:
        return call_within(timeout_s, devices)
    except TimeoutError:
        reason = f"{driver} has not answered for {timeout_s:g} s"
        return Availability(ok=False, reason=reason, remedy=silent)
    except NothingVisible as exc:
        return Availability(ok=False, reason=str(exc), remedy=exc.remedy)
    except CollectorUnavailable as exc:
        return Availability(ok=False, reason=str(exc), remedy=absent)


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
        """Median cost of one reading of each source that is available, measured now."""
        costs: dict[str, int] = {}
        for spec in self.specs(context):
            try:
                costs[spec.make().name] = measure_call_ns(spec.make)["p50_ns"]
            except CollectorUnavailable:
                continue
        return costs

    def driver_calls(self, context: CollectorContext) -> dict[str, CallCost]:
        """Return the cost of each call of a driver that its sources make, measured now."""
        clock = SystemClock()
        costs: dict[str, CallCost] = {}
        for spec in self.specs(context):
            source = spec.make()
            try:
                source.open()
                costs |= call_costs(source, clock)
            except CollectorUnavailable:
                continue
            finally:
                source.close()
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
