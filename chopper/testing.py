"""Test helpers for code built on Chopper: a controlled clock, a collector that replays.

Neither needs torch or a device::

    clock = FakeClock()
    sampler = Sampler("mine", tmp_path, [(MySource(), 100.0)], clock)
    clock.stop_after_ns(1_000_000_000)
    assert sampler.run().sources[0].samples_count == 100
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from chopper.collectors.base import Availability
from chopper.collectors.sampler import SystemClock
from chopper.storage.manifest import CollectorReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pyarrow as pa

    from chopper.collectors.base import CollectorContext, Scope

__all__ = ["FakeClock", "ReplayCollector"]


class FakeClock(SystemClock):
    """A clock that advances only on request.

    Args:
        realtime_ns: Unix time at the start.
        monotonic_ns: CLOCK_MONOTONIC at the start.
        lags_ns: by how much each sleep oversleeps, in turn; then not at all.

    Attributes:
        orphaned: set it to signal that the parent process has ended.
    """

    def __init__(
        self,
        *,
        realtime_ns: int = 1_700_000_000_000_000_000,
        monotonic_ns: int = 1_000_000_000,
        lags_ns: Iterable[int] = (),
    ) -> None:
        super().__init__()
        self._realtime_ns = realtime_ns
        self._monotonic_ns = monotonic_ns
        self._raw_ns = monotonic_ns
        self._cpu_ns = 0
        self._lags_ns = iter(lags_ns)
        self._stop_ns: int | None = None

    def time_ns(self) -> int:
        """CLOCK_REALTIME."""
        return self._realtime_ns

    def monotonic_ns(self) -> int:
        """CLOCK_MONOTONIC."""
        return self._monotonic_ns

    def monotonic_raw_ns(self) -> int | None:
        """CLOCK_MONOTONIC_RAW."""
        return self._raw_ns

    def cpu_ns(self) -> int:
        """CPU time of the process: the amounts passed to ``work``."""
        return self._cpu_ns

    def advance(self, duration_ns: int) -> None:
        """Let time pass.

        Raises:
            ValueError: time does not run backwards; ``step_wall_clock`` does.
        """
        if duration_ns < 0:
            raise ValueError(f"time cannot advance by {duration_ns} ns")
        self._realtime_ns += duration_ns
        self._monotonic_ns += duration_ns
        self._raw_ns += duration_ns

    def work(self, duration_ns: int) -> None:
        """Let time pass in which the process uses a core."""
        self.advance(duration_ns)
        self._cpu_ns += duration_ns

    def step_wall_clock(self, by_ns: int) -> None:
        """Set CLOCK_REALTIME ahead, or back, as an administrator or NTP would."""
        self._realtime_ns += by_ns

    def stop_after_ns(self, duration_ns: int) -> None:
        """Make ``wait_until`` return True once this much more time would have passed."""
        self._stop_ns = self._monotonic_ns + duration_ns

    def wait_until(self, deadline_ns: int) -> bool:
        """Sleep until CLOCK_MONOTONIC reads ``deadline_ns``, or longer; True means stop."""
        if self._stop_ns is not None and deadline_ns >= self._stop_ns:
            self.advance(max(self._stop_ns - self._monotonic_ns, 0))
            return True
        if self.orphaned:
            return True
        if deadline_ns > self._monotonic_ns:
            self.advance(deadline_ns - self._monotonic_ns + next(self._lags_ns, 0))
        return False


class ReplayCollector:
    """A collector that writes given tables as if it had just recorded them.

    Args:
        tables: declared table's name → its rows; validated when it starts.
        refuse: a reason to be unavailable, for tests of how that is reported.
    """

    name: ClassVar[str] = "replay"
    scope: ClassVar[Scope] = "rank"

    def __init__(self, tables: Mapping[str, pa.Table], *, refuse: str | None = None) -> None:
        self._tables = dict(tables)
        self._refuse = refuse
        self._files: tuple[str, ...] = ()

    def probe(self, context: CollectorContext) -> Availability:
        """Return available unless ``refuse`` is set."""
        del context
        return Availability(ok=self._refuse is None, reason=self._refuse)

    def start(self, context: CollectorContext) -> None:
        """Write the tables into the rank's folder.

        Raises:
            CollectorUnavailable: ``refuse`` is set.
            SchemaError: a table is not as declared.
            KeyError: no table of this name is declared.
        """
        from chopper.errors import CollectorUnavailable
        from chopper.storage.streams import write_table
        from chopper.tables import TABLES

        if self._refuse is not None:
            raise CollectorUnavailable(self._refuse)
        checked = {name: TABLES[name].validate(table) for name, table in self._tables.items()}
        for name, table in checked.items():
            self._files += (write_table(context.directory, name, table.to_pydict()),)

    def stop(self) -> CollectorReport:
        """Report the files and the samples written."""
        return CollectorReport(
            name=self.name,
            status="obtained",
            files=self._files,
            samples_count=sum(table.num_rows for table in self._tables.values()),
        )
