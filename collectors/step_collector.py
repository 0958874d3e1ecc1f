"""Base of the collectors that read at the end of each step, in the process that trains."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from chopper.storage import clock
from chopper.storage.manifest import CollectorReport

if TYPE_CHECKING:
    from chopper.collectors.base import CollectorContext, Scope
    from chopper.storage.streams import RowLog

_TRIALS = 25


class StepCollector(ABC):
    """Rows of one table, on disk about once a second, and the cost of each reading.

    ``name`` is that of the table and its file, too. A reading that fails is the last one.
    """

    name: ClassVar[str]
    scope: ClassVar[Scope] = "rank"
    source: ClassVar[str]
    """Name of what is read, for ``chopper doctor``."""

    def __init__(self) -> None:
        self._subject = self.source
        """Subject of the message that a reading failed."""
        self._problem: str | None = None
        self._log: RowLog
        self._costs_ns: list[int] = []

    @abstractmethod
    def _prepare(self, context: CollectorContext) -> None:
        """Find what is to be read; CollectorUnavailable where it is not there."""

    @abstractmethod
    def _read(self) -> tuple[int, tuple[int | None, ...]]:
        """Return thread or device, and the values of the table's columns after ``step``."""

    def start(self, context: CollectorContext) -> None:
        """Take the first reading."""
        from chopper.storage.streams import RowLog

        self._prepare(context)
        self._log = RowLog(context.directory / f"{self.name}.arrow")
        self.on_step(None)

    def on_step(self, step: int | None) -> None:
        """Read once, at the end of a step; None: before the first or after the last one."""
        if self._problem is not None:
            return
        before_ns = time.monotonic_ns()
        time_ns = clock.now_ns()
        try:
            owner, values = self._read()
        except (OSError, RuntimeError, ValueError) as exc:
            # A lost device fails the program soon enough; this must not be what fails it.
            self._problem = f"{self._subject} could not be read: {exc}".splitlines()[0]
            return
        span_ns = time.monotonic_ns() - before_ns
        self._costs_ns.append(span_ns)
        self._log.rows.append((time_ns + span_ns // 2, span_ns, owner, step, *values))
        if self._log.due(before_ns):
            self._log.flush(before_ns)

    def call_costs_ns(self, context: CollectorContext) -> dict[str, int]:
        """Return the median cost of a reading."""
        self._prepare(context)
        costs_ns = []
        for _ in range(_TRIALS):
            before_ns = time.monotonic_ns()
            self._read()
            costs_ns.append(time.monotonic_ns() - before_ns)
        return {self.source: sorted(costs_ns)[len(costs_ns) // 2]}

    def stop(self) -> CollectorReport:
        """Write what is left and close the file."""
        self._log.close()
        costs_ns = sorted(self._costs_ns)
        return CollectorReport(
            name=self.name,
            status="obtained" if self._problem is None else "failed",
            reason=self._problem,
            files=(f"{self.name}.arrow",) if costs_ns else (),
            samples_count=len(costs_ns),
            dropped_count=0,
            call_p50_ns=costs_ns[len(costs_ns) // 2] if costs_ns else None,
            call_p99_ns=costs_ns[len(costs_ns) * 99 // 100] if costs_ns else None,
        )
