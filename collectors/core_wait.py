"""Time in which the thread of the steps ran, and had no core to run on, read after each step.

The kernel counts both per thread, in nanoseconds: the first two numbers of ``schedstat``
(Documentation/scheduler/sched-stats.rst). Samples at a rate would smear it over the steps; a
reading where steps meet does not.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import ClassVar

from chopper.collectors.base import Availability, CollectorContext, StepCollector
from chopper.storage.manifest import CollectorReport

NAME = "core_wait"
BY_DEFAULT = True
SCHEDSTAT = Path("/proc/thread-self/schedstat")


class CoreWaitCollector(StepCollector):
    """Reads the run delay of the thread that ends each step. -> CORE_WAIT."""

    name: ClassVar[str] = NAME
    source: ClassVar[str] = "schedstat"

    def __init__(self, schedstat: Path = SCHEDSTAT) -> None:
        super().__init__()
        self._subject = str(schedstat)
        self._schedstat = schedstat
        self._file: int | None = None
        self._tid = 0

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

    def _prepare(self, context: CollectorContext) -> None:
        pass  # the file is that of the thread that reads

    def _read(self) -> tuple[int, tuple[int, int]]:
        tid = threading.get_native_id()
        if self._file is None or tid != self._tid:
            self._close()
            self._file, self._tid = os.open(self._schedstat, os.O_RDONLY | os.O_CLOEXEC), tid
        run_ns, delay_ns = map(int, os.pread(self._file, 128, 0).split()[:2])
        return tid, (delay_ns, run_ns)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def call_costs_ns(self, context: CollectorContext) -> dict[str, int]:
        """Return the median cost of a reading."""
        try:
            return super().call_costs_ns(context)
        finally:
            self._close()

    def stop(self) -> CollectorReport:
        """Write the remaining rows and close the files."""
        self._close()
        return super().stop()
