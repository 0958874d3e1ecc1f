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
from chopper.collectors.step_readings import StepReadings
from chopper.storage.manifest import CollectorReport

if TYPE_CHECKING:
    from chopper.collectors.base import CollectorContext, Scope

NAME = "core_wait"
BY_DEFAULT = True
SCHEDSTAT = Path("/proc/thread-self/schedstat")
_TRIALS = 25


class CoreWaitCollector:
    """Reads the run delay of the thread that ends each step. -> CORE_WAIT."""

    name: ClassVar[str] = NAME
    scope: ClassVar[Scope] = "rank"

    def __init__(self, schedstat: Path = SCHEDSTAT) -> None:
        self._schedstat = schedstat
        self._file: int | None = None
        self._tid = 0
        self._readings = StepReadings(NAME)

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

    def call_costs_ns(self, context: CollectorContext) -> dict[str, int]:  # noqa: ARG002
        """Return the median cost of one reading."""
        file = os.open(self._schedstat, os.O_RDONLY | os.O_CLOEXEC)
        try:
            costs = []
            for _ in range(_TRIALS):
                began_ns = time.monotonic_ns()
                os.pread(file, 128, 0)
                costs.append(time.monotonic_ns() - began_ns)
        finally:
            os.close(file)
        return {"schedstat": sorted(costs)[len(costs) // 2]}

    def start(self, context: CollectorContext) -> None:
        """Create the file and take the first reading.

        Raises:
            OutputError: the file cannot be written.
        """
        self._readings.open(context.directory)
        self._read(None)

    def on_step(self, step: int) -> None:
        """Read once; the rows go to disk about once a second."""
        if self._readings.problem is None:
            self._read(step)

    def _read(self, step: int | None) -> None:
        began_ns = time.monotonic_ns()
        try:
            tid = threading.get_native_id()
            if self._file is None or tid != self._tid:
                self._close()
                self._file, self._tid = os.open(self._schedstat, os.O_RDONLY | os.O_CLOEXEC), tid
            run_ns, delay_ns = map(int, os.pread(self._file, 128, 0).split()[:2])
        except (OSError, ValueError, IndexError) as exc:
            self._readings.problem = f"{self._schedstat} could not be read: {exc}"
            return
        span_ns = time.monotonic_ns() - began_ns
        self._readings.add((time.time_ns(), span_ns, tid, step, delay_ns, run_ns), span_ns)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def stop(self) -> CollectorReport:
        """Close the file."""
        self._close()
        return self._readings.close(self.name)
