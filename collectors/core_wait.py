"""Time in which the thread of the steps ran, and had no core to run on, read after each step.

The kernel counts both per thread, in nanoseconds: the first two numbers of ``schedstat``
(Documentation/scheduler/sched-stats.rst). Samples at a rate would smear it over the steps; a
reading where steps meet does not.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from chopper.collectors.base import Availability
from chopper.manifest import CollectorReport

if TYPE_CHECKING:
    from chopper.collectors.base import CollectorContext, Scope
    from chopper.run import StreamWriter

TABLE = "core_wait"
SCHEDSTAT = Path("/proc/thread-self/schedstat")
_FLUSH_NS = 1_000_000_000


class CoreWaitCollector:
    """Reads the run delay of the thread that ends each step. -> CORE_WAIT."""

    name: ClassVar[str] = "core_wait"
    scope: ClassVar[Scope] = "rank"

    def __init__(self, schedstat: Path = SCHEDSTAT) -> None:
        self._schedstat = schedstat
        self._file: int | None = None
        self._tid = 0
        self._writer: StreamWriter | None = None
        self._rows: list[tuple[int, int, int, int | None, int, int]] = []
        self._costs_ns: list[int] = []
        self._flushed_ns = 0
        self._problem: str | None = None

    def probe(self, context: CollectorContext) -> Availability:  # noqa: ARG002
        """Available where the kernel counts run delays."""
        try:
            counts = len(self._schedstat.read_bytes().split()) > 1
        except OSError as exc:
            return Availability(ok=False, reason=f"{self._schedstat}: {exc.strerror}")
        if not counts:
            return Availability(
                ok=False,
                reason=f"{self._schedstat}: the kernel counts no run delays",
                remedy="a kernel with CONFIG_SCHED_INFO",
            )
        return Availability(ok=True)

    def start(self, context: CollectorContext) -> None:
        """Create the file and take the first reading.

        Raises:
            OutputError: the file cannot be written.
        """
        from chopper.run import StreamWriter

        self._writer = StreamWriter(context.directory / f"{TABLE}.arrow", TABLE)
        self._read(None)
        self._flush()

    def on_step(self, step: int) -> None:
        """Read once; the rows go to disk about once a second."""
        if self._problem is None:
            self._read(step)
            if time.monotonic_ns() - self._flushed_ns > _FLUSH_NS:
                self._flush()

    def _read(self, step: int | None) -> None:
        began_ns = time.monotonic_ns()
        try:
            tid = threading.get_native_id()
            if self._file is None or tid != self._tid:
                self._close()
                self._file, self._tid = os.open(self._schedstat, os.O_RDONLY | os.O_CLOEXEC), tid
            run_ns, delay_ns = map(int, os.pread(self._file, 128, 0).split()[:2])
        except (OSError, ValueError, IndexError) as exc:
            self._problem = f"{self._schedstat} could not be read: {exc}"
            return
        span_ns = time.monotonic_ns() - began_ns
        self._costs_ns.append(span_ns)
        self._rows.append((time.time_ns(), span_ns, tid, step, delay_ns, run_ns))

    def _flush(self) -> None:
        self._flushed_ns = time.monotonic_ns()
        if self._rows and self._writer is not None:
            columns = zip(*self._rows, strict=True)
            self._rows = []
            names = ("time_ns", "span_ns", "tid", "step", "run_delay_ns", "run_ns")
            self._writer.write(dict(zip(names, columns, strict=True)))

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def stop(self) -> CollectorReport:
        """Close the file."""
        assert self._writer is not None
        try:
            self._flush()
        finally:
            self._close()
            self._writer.close()
        costs_ns = sorted(self._costs_ns)
        return CollectorReport(
            name=self.name,
            status="obtained" if self._problem is None else "failed",
            reason=self._problem,
            files=(f"{TABLE}.arrow",),
            samples_count=len(costs_ns),
            dropped_count=0,
            call_p50_ns=costs_ns[len(costs_ns) // 2] if costs_ns else None,
            call_p99_ns=costs_ns[len(costs_ns) * 99 // 100] if costs_ns else None,
        )
