"""The host that a rank runs on: cores, memory, pressure, throttling, the ranks' processes, NICs.

Everything is read from /proc and /sys by a sampler process (:mod:`chopper.collectors.sampler`).
What a machine does not offer is left null and named with its reason; it is never 0.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

from chopper.collectors.base import CollectorContext
from chopper.collectors.sampler import CLOCKS, SampledCollector, SourceSpec

NAME = "host"
BY_DEFAULT = True
_CORE_ROWS_PER_S = 1024
"""/proc/stat counts in ticks of 10 ms, and one row is written per core: on many cores a high rate
costs disk and time and shows only the ticks."""
_THREADS_HZ = 2.0
"""Thread by thread, totals are read: nothing is lost between two samples."""


class HostCollector(SampledCollector):
    """Samples the host while a run goes on, in a process of its own.

    Writes ``cpu_core``, ``host``, ``process``, ``process_thread``, ``process_event``, ``nic``,
    ``memory_controller``, ``core_clock``, ``core_cycle``, ``host_energy`` and ``clock``.

    Args:
        hz: samples per second of each source; per-core rows are thinned on many cores.
    """

    name: ClassVar[str] = NAME

    absent_remedy: ClassVar[str] = "run on Linux with /proc mounted"

    def specs(self, context: CollectorContext) -> list[SourceSpec]:
        """Return what its sampler reads, and how often."""
        root: dict[str, Any] = {"root": self._root}
        run = root | {"run_path": str(context.run_path.resolve()), "hostname": context.hostname}
        cores_hz = min(self._hz, max(_CORE_ROWS_PER_S / (os.cpu_count() or 1), 1.0))
        threads_hz = min(self._hz, _THREADS_HZ)
        sources = [
            ("_machine:CoreSource", cores_hz, root),
            ("_processes:ProcessSource", self._hz, run),
            ("_machine:MachineSource", self._hz, root),
            ("_machine:NicSource", self._hz, root),
            ("_memory:MemorySource", self._hz, root),
            ("_machine:CoreClockSource", min(cores_hz, 1.0), root),
            ("_machine:CycleSource", min(cores_hz, 1.0), root),
            ("_machine:RaplSource", self._hz, root),
            ("_processes:ThreadSource", threads_hz, run),
        ]
        if self._root == "/":  # the kernel counts events of real processes only
            sources.append(("_processes:EventSource", threads_hz, run))
        specs = [
            SourceSpec(factory=f"{__name__}.{factory}", hz=hz, options=options)
            for factory, hz, options in sources
        ]
        return [*specs, CLOCKS]
