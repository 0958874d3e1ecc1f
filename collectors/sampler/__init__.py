"""The sampler: a small process of its own that reads sources at fixed rates and writes tables.

It is spawned with a fresh interpreter, loads no torch, runs at low priority, and ends with its
parent, however that ends. It writes Arrow streams, batch by batch: a kill loses at most the rows
since the last flush. To add a source, write a class like :class:`Source`, without numpy and pandas,
and a :class:`SampledCollector` whose ``specs`` name it. A driver call that hangs takes no other
collector with it, and no other device: it is left to the thread that is in it, and another one goes
on.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import msgspec

from chopper.collectors.base import Availability, CollectorContext, Scope
from chopper.collectors.sampler._loop import Sampler
from chopper.collectors.sampler._source import (
    COMM,
    ClockSource,
    Gone,
    Part,
    Quantiles,
    SamplerConfig,
    SamplerStatus,
    Sink,
    Source,
    SourceSpec,
    SourceStatus,
    SystemClock,
    call_costs,
    reading_cost_ns,
    status_file,
    to_report,
)
from chopper.errors import JSON_ERRORS, CaptureError, CollectorUnavailable
from chopper.fresh_python import own_python
from chopper.storage import clock
from chopper.storage.files import pack_message
from chopper.storage.manifest import CallCost, CollectorReport

_KILL_S = 2.0
"""Time that a killed process has to end."""


class SamplerProcess:
    """Parent's handle of a sampler process.

    Args:
        flush_ns: time between two writes of its rows.
        cpu_ratio: share of a core that it may take; None for no limit.
    """

    def __init__(
        self,
        collector: str,
        directory: Path,
        specs: list[SourceSpec],
        *,
        flush_ns: int = 1_000_000_000,
        cpu_ratio: float | None = None,
    ) -> None:
        self._config = SamplerConfig(
            collector=collector,
            directory=str(directory.resolve()),
            parent_pid=os.getpid(),
            specs=specs,
            flush_ns=flush_ns,
            cpu_ratio=cpu_ratio,
            clock_ns=clock.anchored_ns(),
        )
        self._directory = directory.resolve()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process

    @property
    def pid(self) -> int | None:
        """The sampler's process, None before the start."""
        return None if self._process is None else self._process.pid

    def start(self, *, ready_timeout_s: float = 5.0) -> None:
        """Spawn the process and wait until it samples, or has said why it cannot.

        One that is merely slow to start is left to it.

        Raises:
            CollectorUnavailable: no source can be read here.
            CaptureError: the process could not be started.
        """
        status_file(self._directory, self._config.collector).unlink(missing_ok=True)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CHOPPER_")}
        # numpy comes with pyarrow; its BLAS would start a thread per core.
        environment.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        try:
            self._process = subprocess.Popen(
                own_python("chopper.collectors.sampler._child"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=environment,
                bufsize=0,
                # Ctrl-C reaches the whole process group of the terminal; the parent decides when
                # the sampler ends.
                process_group=0,
            )
            assert self._process.stdin is not None
            self._process.stdin.write(pack_message(self._config))
        except OSError as exc:
            raise CaptureError(f"the sampler process cannot be started ({exc})") from exc
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], ready_timeout_s)
        if not readable:
            return
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise CaptureError(f"the sampler process ended during startup: {self._last_words()}")
        error = msgspec.json.decode(line).get("error")
        if error is not None:
            self._process.wait()
            raise CollectorUnavailable(error)

    def stop(self, *, timeout_s: float = 5.0) -> SamplerStatus | None:
        """End the process, by force when it does not answer, and return its last status.

        One that is inside the kernel, in a driver that hangs, outlives also that: it is left, and
        ends when the driver lets it. None when there is no status, or it was stopped before. In a
        process forked from the one that started it this does nothing: the sampler is not theirs.
        """
        if self._process is None or self._stopped or os.getpid() != self._config.parent_pid:
            return None
        self._stopped = True
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        forced = abandoned = False
        if process.poll() is None:
            # Words, not just the end of the file: a forked data loader worker may hold a copy of
            # this end of the pipe. It may have died just now.
            with contextlib.suppress(OSError):
                process.stdin.write(b"stop\n")
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                forced = True
                try:
                    process.wait(_KILL_S)
                except subprocess.TimeoutExpired:
                    abandoned = True
        process.stdin.close()
        process.stdout.close()
        status = self.status()
        if status is not None and status.state == "running":
            status.state = "failed"
            code = process.returncode
            killed = code is not None and code < 0
            ended = f"signal {-code}" if killed else f"exit code {code}: {self._last_words()}"
            status.error = (
                f"the sampler did not stop within {timeout_s:g} s and was killed"
                + ("; it hangs in the kernel and was abandoned" if abandoned else "")
                if forced
                else f"the sampler process died ({ended})"
            )
            status.error += "; samples flushed before that are kept"
        self._stderr.close()
        return status

    def status(self) -> SamplerStatus | None:
        """The status as it was last written."""
        try:
            data = status_file(self._directory, self._config.collector).read_bytes()
            return msgspec.json.decode(data, type=SamplerStatus)
        except (OSError, *JSON_ERRORS):
            return None

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it gave no reason"


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
    cpu_ratio: ClassVar[float | None] = None
    """Share of a core that its sampler may take; None for no limit."""

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
        specs = self.specs(context)
        self._sampler = SamplerProcess(
            self.name, context.directory, specs, cpu_ratio=self.cpu_ratio
        )
        self._sampler.start()

    def stop(self) -> CollectorReport:
        """End the sampler and report how well it kept its times."""
        assert self._sampler is not None
        report = to_report(self.name, self._sampler.stop())
        report.reason = "; ".join(filter(None, (self._limits, report.reason))) or None
        return report


__all__ = [
    "CLOCKS",
    "COMM",
    "ONCE_HZ",
    "ClockSource",
    "Gone",
    "Part",
    "Quantiles",
    "SampledCollector",
    "Sampler",
    "SamplerProcess",
    "SamplerStatus",
    "Sink",
    "Source",
    "SourceSpec",
    "SourceStatus",
    "SystemClock",
    "call_costs",
    "reading_cost_ns",
    "to_report",
]
