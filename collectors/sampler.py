"""The sampler: a small process of its own that reads sources at fixed rates and writes tables.

It is spawned with a fresh interpreter, never forked, loads no torch, runs at low priority, and ends
with its parent: on request, when its pipe closes, when the kernel says that the parent died, or
when it finds itself with another parent.

It writes its rows itself, as Arrow streams, batch by batch: no other process reads them while the
run goes on, so nothing has to cross a process border. A kill loses at most the rows since the last
flush.

To add a source, write a class like :class:`Source` and pass a :class:`SourceSpec` that names it to
a :class:`SamplerProcess`; it does without numpy and pandas. A source with a ``plan`` is read in C,
by a thread that fills a ring for each device (:mod:`chopper.collectors._plan`).

A driver call that hangs takes no other collector with it, since each has a process of its own, and
no other device: what blocks is left to the thread that is in it, and another one goes on with the
rest.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import msgspec

import chopper
from chopper.collectors import _plan
from chopper.errors import CaptureError, ChopperError, CollectorUnavailable, OutputError
from chopper.manifest import CallCost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from chopper.manifest import CollectorReport
    from chopper.run import StreamWriter

COMM = "chopper-sampler"
"""Name of the sampler's process as the kernel shows it; 15 characters is what fits."""

_NICE = 5
_SLICE_NS = 100_000
# A source that takes more of its period than this is read less often: a sampler must not take a
# core away from the training that it watches.
_CALL_RATIO = 0.05
_CHECK_EVERY = 32
_FAILURES_TO_STOP = 20
_BLOCKED_NS = 300_000_000
"""A reading that lasts longer holds up the others no more."""
_WATCH_S = 1.0
"""Time between looks for one; each costs a wake-up."""
_STATUS_FLUSHES = 5
"""The status is written with every fifth flush: replacing a file costs more than the rows."""
_CALIBRATION_CALLS = 50
_CALIBRATION_NS = 10_000_000
"""For each call, at the start."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29


class Sink:
    """Takes rows from sources; the sampler adds the times."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, tuple[Any, ...]]] = []
        self._timed: list[tuple[str, tuple[Any, ...]]] = []

    def add(self, table: str, *values: Any) -> None:
        """Add a row: the declared columns after ``time_ns`` and ``span_ns``, in their order."""
        self._rows.append((table, values))

    def add_at(self, table: str, time_ns: int, span_ns: int, *values: Any) -> None:
        """Add a row whose time the driver told; the sampler adds none."""
        self._timed.append((table, (time_ns, span_ns, *values)))

    def take(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Rows since the last call."""
        rows, self._rows = self._rows, []
        return rows

    def take_timed(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Rows with times of their own since the last call."""
        rows, self._timed = self._timed, []
        return rows


class Gone(Exception):
    """What is read is gone for good: it is not asked again."""


class Part(NamedTuple):
    """What is read apart from the rest of a source: one device."""

    label: str
    read: Callable[[Sink, int], None]
    """As ``Source.sample``; raises :class:`Gone` where it will never answer again."""


class Source(Protocol):
    """Something that can be read at a fixed rate, inside the sampler process.

    It may have more: ``parts() -> list[Part]``, read one by one with a time of its own each, so
    that one that blocks keeps no other waiting; ``plan() -> Plan`` with
    ``learn(list[DeviceTotals])``, to be read in C; ``calls() -> dict[str, Callable]``, calls of a
    driver whose cost is measured at the start.
    """

    name: ClassVar[str]
    tables: ClassVar[tuple[str, ...]]
    """Declared tables that it writes; each begins with ``time_ns`` and ``span_ns``."""

    @property
    def absent(self) -> Mapping[str, str]:
        """``table.column`` → why it stays null on this machine; may change during the run."""
        ...

    def open(self) -> None:
        """Open files or devices and take the first reading of counters.

        Raises:
            CollectorUnavailable: nothing of it can be read here.
        """
        ...

    def sample(self, sink: Sink, now_ns: int) -> None:
        """Read once and add rows. ``now_ns`` is CLOCK_MONOTONIC.

        What it raises costs this sample only; a source that fails 20 times in a row is left out.
        """
        ...

    def close(self) -> None:
        """Close what ``open`` opened; safe without it."""
        ...


class SourceSpec(msgspec.Struct, kw_only=True, frozen=True):
    """A source to be made inside the sampler process."""

    factory: str
    """``module:Class``, called with ``options`` as keywords."""
    hz: float
    options: dict[str, Any] = {}

    def make(self) -> Source:
        """Import the class and make the source."""
        module, _, name = self.factory.partition(":")
        source: Source = getattr(importlib.import_module(module), name)(**self.options)
        return source


class SourceStatus(msgspec.Struct, kw_only=True):
    """How well one source was read. Counts are totals since the start."""

    name: str
    requested_hz: float
    period_ns: int
    """Time between samples now; longer than requested where a reading costs too much."""
    native: bool = False
    """Read in C, by a thread of its own."""
    parts_count: int = 1
    """What is read apart (devices); samples are counted for each."""
    elapsed_ns: int = 0
    """From the first to the last sample, summed over the parts."""
    samples_count: int = 0
    late_count: int = 0
    """Samples that began more than half a period after their time."""
    dropped_count: int = 0
    """Samples left out: their time had passed, the reading failed, or the ring was full."""
    overflowed_count: int = 0
    """Those of them that the ring had no room for."""
    jitter_p50_ns: int | None = None
    jitter_p99_ns: int | None = None
    call_p50_ns: int | None = None
    call_p99_ns: int | None = None
    note: str | None = None
    """Why it was left out, slowed down, or what last failed."""

    @property
    def achieved_hz(self) -> float | None:
        """Samples per second of one part; None before its second sample."""
        if self.samples_count <= self.parts_count or self.elapsed_ns <= 0:
            return None
        return (self.samples_count - self.parts_count) / (self.elapsed_ns / 1e9)


class SamplerStatus(msgspec.Struct, kw_only=True):
    """What the sampler says about itself, written to a file with every fifth flush."""

    collector: str
    state: Literal["running", "complete", "orphaned", "failed"] = "running"
    error: str | None = None
    pid: int
    start_ns: int
    wall_ns: int = 0
    cpu_ns: int = 0
    """CPU time of its whole process in ``wall_ns``, start-up left out."""
    startup_cpu_ns: int = 0
    files: tuple[str, ...] = ()
    absent: dict[str, str] = {}
    clock_alignment_error_ns: int | None = None
    calls: dict[str, CallCost] = {}
    """Each call of the driver, measured at the start."""
    sources: list[SourceStatus] = []


class SamplerConfig(msgspec.Struct, kw_only=True):
    """What the sampler process is told at its start, as one line of JSON."""

    collector: str
    directory: str
    parent_pid: int
    specs: list[SourceSpec]
    flush_ns: int = 1_000_000_000
    nice: int = _NICE


def status_file(directory: Path, collector: str) -> Path:
    """File in which a collector's sampler keeps its status."""
    return directory / f"sampler-{collector}.json"


class Quantiles:
    """Quantiles of integers in bounded memory.

    Counts fall into buckets of 1/16 of a power of two: a quantile is within 3.2 % of the truth.

    Args:
        counts: what was counted elsewhere, by bucket.
    """

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self._counts: dict[int, int] = dict(counts or {})
        self._total = sum(self._counts.values())

    def add(self, value: int) -> None:
        """Count a value; what is negative counts as 0."""
        value = max(value, 0)
        shift = max(value.bit_length() - 5, 0)
        key = (shift << 6) | (value >> shift)
        self._counts[key] = self._counts.get(key, 0) + 1
        self._total += 1

    def at(self, ratio: float) -> int | None:
        """The value below or at which ``ratio`` of all lie; None when nothing was counted."""
        if not self._total:
            return None
        wanted = ratio * self._total
        seen = 0
        last = 0
        for key in sorted(self._counts):
            seen += self._counts[key]
            shift, mantissa = key >> 6, key & 63
            last = (mantissa << shift) + ((1 << shift) >> 1)
            if seen >= wanted:
                break
        return last


class Clock(Protocol):
    """Time as the sampler sees it; :class:`chopper.testing.FakeClock` is another one."""

    def time_ns(self) -> int:
        """CLOCK_REALTIME."""
        ...

    def monotonic_ns(self) -> int:
        """CLOCK_MONOTONIC."""
        ...

    def monotonic_raw_ns(self) -> int | None:
        """CLOCK_MONOTONIC_RAW, None where there is none."""
        ...

    def cpu_ns(self) -> int:
        """CPU time of this process."""
        ...

    def wait_until(self, deadline_ns: int) -> bool:
        """Sleep until CLOCK_MONOTONIC reads ``deadline_ns``; True when told to stop instead."""
        ...


class ClockSource:
    """Reads the host's clocks together. -> CLOCK."""

    name: ClassVar[str] = "clock"
    tables: ClassVar[tuple[str, ...]] = ("clock",)

    def __init__(self, clock: Clock | None = None) -> None:
        self.absent: dict[str, str] = {}
        self._clock = clock or SystemClock()
        self._offset_ns: int | None = None
        self.error_ns: int | None = None
        """Largest error in placing a monotonic time on the wall clock that was seen: half the time
        that reading both took, plus by how much the wall clock was stepped between readings."""

    def open(self) -> None:
        """Note which clocks there are."""
        if self._clock.monotonic_raw_ns() is None:
            self.absent["clock.monotonic_raw_ns"] = "no CLOCK_MONOTONIC_RAW on this system"

    def sample(self, sink: Sink, now_ns: int) -> None:
        """Read the triple: the wall clock between two readings of the monotonic one."""
        del now_ns
        clock = self._clock
        # The tightest of three: the first may have been interrupted.
        best: tuple[int, int, int] | None = None
        for _ in range(3):
            before_ns = clock.monotonic_ns()
            real_ns = clock.time_ns()
            after_ns = clock.monotonic_ns()
            if best is None or after_ns - before_ns < best[2]:
                best = (real_ns, (before_ns + after_ns) // 2, after_ns - before_ns)
        assert best is not None
        real_ns, mono_ns, width_ns = best
        raw_ns = clock.monotonic_raw_ns()
        if raw_ns is not None:
            # Read a little later than the pair: bring it back to the pair's moment.
            raw_ns -= clock.monotonic_ns() - mono_ns
        offset_ns = real_ns - mono_ns
        step_ns = abs(offset_ns - self._offset_ns) if self._offset_ns is not None else 0
        self._offset_ns = offset_ns
        self.error_ns = max(self.error_ns or 0, width_ns // 2 + step_ns)
        sink.add("clock", mono_ns, raw_ns)

    def close(self) -> None:
        """Nothing to close."""


class SystemClock:
    """The real clocks. Waits on a pipe, so that word to stop is heard while asleep.

    Args:
        stop_fd: a descriptor that becomes readable when the sampler must stop.
        parent_pid: process without which it must stop.
    """

    def __init__(self, stop_fd: int | None = None, parent_pid: int | None = None) -> None:
        self._stop_fds = [] if stop_fd is None else [stop_fd]
        self._parent_pid = parent_pid
        self.stop_requested = False
        self.orphaned = False

    def time_ns(self) -> int:
        """CLOCK_REALTIME."""
        return time.time_ns()

    def monotonic_ns(self) -> int:
        """CLOCK_MONOTONIC."""
        return time.monotonic_ns()

    def monotonic_raw_ns(self) -> int | None:
        """CLOCK_MONOTONIC_RAW."""
        raw = getattr(time, "CLOCK_MONOTONIC_RAW", None)
        return None if raw is None else time.clock_gettime_ns(raw)

    def cpu_ns(self) -> int:
        """CPU time of this process."""
        return time.process_time_ns()

    def wait_until(self, deadline_ns: int) -> bool:
        """Sleep until a moment, or until the pipe speaks or the parent is gone."""
        while not self.stop_requested:
            if self._parent_pid is not None and os.getppid() != self._parent_pid:
                self.orphaned = True
                return True
            left_ns = deadline_ns - time.monotonic_ns()
            if left_ns <= 0:
                return False
            # The remainder is computed from the deadline each time, so that errors do not add up.
            # At most a second, so that a parent that vanished silently is noticed.
            readable, _, _ = select.select(self._stop_fds, [], [], min(left_ns / 1e9, 1.0))
            if readable and self._heard_stop(readable[0]):
                return True
        return True

    def _heard_stop(self, fd: int) -> bool:
        try:
            heard = os.read(fd, 64)
        except BlockingIOError:
            return False
        if not heard:  # end of file: whoever held the other end has gone
            self.orphaned = True
            return True
        # A signal's handler may have set it just now: never unset it.
        self.stop_requested = self.stop_requested or b"stop" in heard
        return self.stop_requested


class _Part:
    """One part of a source while it is read."""

    def __init__(self, part: Part) -> None:
        self.label = part.label
        self.read = part.read
        self.live = True
        self.alone = False
        """A thread of its own reads it, since it blocked."""
        self.since_ns: int | None = None
        """Begin of the reading that is going on."""
        self.samples_count = 0
        self.failures = 0
        self.first_ns = 0
        self.last_ns = 0

    def blocks(self, now_ns: int) -> int | None:
        """How long its reading has lasted, where that is too long."""
        since_ns = self.since_ns
        if since_ns is None or now_ns - since_ns < _BLOCKED_NS:
            return None
        return now_ns - since_ns


class _Reader:
    """One source with its deadlines and statistics."""

    def __init__(self, source: Source, hz: float, start_ns: int) -> None:
        self.source = source
        parts = getattr(source, "parts", None)
        given = [Part("", source.sample)] if parts is None else parts()
        self.parts = [_Part(part) for part in given]
        self.status = SourceStatus(
            name=source.name,
            requested_hz=hz,
            period_ns=max(round(1e9 / hz), 1),
            parts_count=len(self.parts),
        )
        self.deadline_ns = start_ns
        self.live = True
        self._jitter = Quantiles()
        self._call = Quantiles()
        self._ticks = 0

    def sample(self, sampler: Sampler) -> _Part | None:
        """Take the samples that are due.

        Returns:
            The part that blocked for so long that another thread has taken over; None otherwise.
        """
        clock = sampler.clock
        tick_ns = clock.monotonic_ns()
        parts = [part for part in self.parts if part.live and not part.alone]
        for part in parts:
            if not self.sample_part(part, sampler, self.deadline_ns):
                return part
        after_ns = clock.monotonic_ns()
        if parts:
            self._ticks += 1
            self._call.add(after_ns - tick_ns)
        self.live = any(part.live and not part.alone for part in self.parts)
        self._schedule(after_ns)
        return None

    def sample_part(self, part: _Part, sampler: Sampler, deadline_ns: int) -> bool:
        """Read one part and keep its rows; False when another thread has taken over meanwhile."""
        clock, status, sink = sampler.clock, self.status, Sink()
        alone = part.alone
        before_ns = clock.monotonic_ns()
        real_before_ns = clock.time_ns()
        failed: Exception | None = None
        part.since_ns = before_ns
        try:
            part.read(sink, before_ns)
        except Exception as exc:  # noqa: BLE001 - one source's failure must not stop the others
            failed = exc
        # How long it took is told by the clock that nobody sets.
        span_ns = clock.monotonic_ns() - before_ns
        with sampler.lock:
            part.since_ns = None
            if part.alone and not alone:
                # What it read is as old as the call was long.
                status.dropped_count += 1 + span_ns // status.period_ns
                return False
            delay_ns = before_ns - deadline_ns
            self._jitter.add(delay_ns)
            if failed is not None:
                self._fail(part, failed)
                return True
            part.failures = 0
            part.samples_count += 1
            if part.samples_count == 1:
                part.first_ns = before_ns
            part.last_ns = before_ns
            status.late_count += delay_ns > status.period_ns // 2
            sampler.keep(sink, real_before_ns + span_ns // 2, span_ns)
        return True

    def leave_alone(self, part: _Part, for_ns: int) -> None:
        """Leave a part that blocks to the thread that is in its call."""
        part.alone = True
        self.status.note = (
            f"{part.label or 'a reading'} blocked for more than {for_ns / 1e9:.1f} s; a thread of "
            "its own reads it since"
        )

    def _fail(self, part: _Part, exc: Exception) -> None:
        label = f"{part.label}: " if part.label else ""
        self.status.dropped_count += 1
        if isinstance(exc, Gone):
            part.live = False
            self.status.note = f"{label}{exc}"
            return
        part.failures += 1
        self.status.note = f"{label}a reading failed: {type(exc).__name__}: {exc}"
        if part.failures >= _FAILURES_TO_STOP:
            part.live = False
            self.status.note = f"{label}left out after {part.failures} failures in a row: {exc}"

    def _schedule(self, now_ns: int) -> None:
        status = self.status
        if self._ticks and self._ticks % _CHECK_EVERY == 0:
            slow_down(status, self._call.at(0.5) or 0)
        self.deadline_ns += status.period_ns
        if self.deadline_ns <= now_ns:
            missed = (now_ns - self.deadline_ns) // status.period_ns + 1
            self.deadline_ns += missed * status.period_ns
            status.dropped_count += missed * sum(p.live and not p.alone for p in self.parts)

    def summary(self) -> SourceStatus:
        """The status with its quantiles brought up to date."""
        status = self.status
        status.samples_count = sum(part.samples_count for part in self.parts)
        status.elapsed_ns = sum(part.last_ns - part.first_ns for part in self.parts)
        status.jitter_p50_ns = self._jitter.at(0.5)
        status.jitter_p99_ns = self._jitter.at(0.99)
        status.call_p50_ns = self._call.at(0.5)
        status.call_p99_ns = self._call.at(0.99)
        return status

    def blocked(self, now_ns: int) -> dict[str, str]:
        """What does not answer now: ``table[part]`` → since when."""
        return {
            f"{table}[{part.label}]": _does_not_answer(for_ns)
            for part in self.parts
            if (for_ns := part.blocks(now_ns)) is not None
            for table in self.source.tables
        }


def _does_not_answer(for_ns: int) -> str:
    return f"a call of the driver has not returned for {for_ns / 1e9:.1f} s"


def slow_down(status: SourceStatus, call_ns: int) -> bool:
    """Read a source less often where one reading takes too much of its period."""
    if call_ns <= _CALL_RATIO * status.period_ns:
        return False
    status.period_ns = int(call_ns / _CALL_RATIO)
    status.note = (
        f"slowed down from {status.requested_hz:g} Hz: a reading takes {call_ns / 1e6:.2g} ms"
    )
    return True


class _BackgroundReader:
    """A source whose plan a thread in C works through; this takes what it read."""

    def __init__(self, source: Any, plan: _plan.Plan, hz: float) -> None:
        self.source = source
        self.status = SourceStatus(
            name=source.name,
            requested_hz=hz,
            period_ns=max(round(1e9 / hz), 1),
            native=True,
            parts_count=len(plan.devices),
        )
        self._table = plan.table
        self._background = _plan.Background(plan, self.status.period_ns)
        self._blocked: dict[str, str] = {}
        self._ever_blocked: set[int] = set()
        self._ticks = 0
        self._background.start()

    def take(self) -> tuple[str, dict[str, Any]] | None:
        """Table and columns of what was read since the last call."""
        columns = self._background.take()
        return None if columns is None else (self._table, columns)

    def watch(self) -> None:
        """Go on with the other devices where one blocks."""
        blocked = self._background.relieve(_BLOCKED_NS)
        self._blocked = {
            f"{self._table}[device {device}]": _does_not_answer(for_ns)
            for device, for_ns in blocked
        }
        for device, for_ns in blocked:
            if device not in self._ever_blocked:
                self._ever_blocked.add(device)
                self.status.note = (
                    f"device {device} blocked for more than {for_ns / 1e9:.1f} s; a thread of its "
                    "own reads it since"
                )

    def summary(self) -> SourceStatus:
        """The status as of now."""
        status = self.status
        devices, jitter, cost, ticks = self._background.totals()
        status.samples_count = sum(d.samples for d in devices)
        status.elapsed_ns = sum(d.elapsed_ns for d in devices)
        status.late_count = sum(d.late for d in devices)
        overflowed = sum(d.overflowed for d in devices)
        status.overflowed_count = overflowed
        status.dropped_count = sum(d.dropped for d in devices) + overflowed
        delays, costs = Quantiles(jitter), Quantiles(cost)
        status.jitter_p50_ns, status.jitter_p99_ns = delays.at(0.5), delays.at(0.99)
        status.call_p50_ns, status.call_p99_ns = costs.at(0.5), costs.at(0.99)
        if overflowed:
            status.note = f"{overflowed} samples were lost: the ring was full"
        if ticks // _CHECK_EVERY > self._ticks // _CHECK_EVERY and slow_down(
            status, status.call_p50_ns or 0
        ):
            self._background.set_period(status.period_ns)
        self._ticks = ticks
        self.source.learn(devices)
        if devices and all(d.lost for d in devices):
            status.note = "; ".join(dict.fromkeys(self.source.absent.values()))
        return status

    def blocked(self, now_ns: int) -> dict[str, str]:
        """What does not answer now: ``table[device]`` → since when."""
        del now_ns
        return self._blocked

    def stop(self) -> bool:
        """End the thread; False when it is inside a call that does not return."""
        self.watch()
        return self._background.stop(_BLOCKED_NS) == 0


class Sampler:
    """Reads sources at their rates and writes their rows, in whichever process it runs in.

    Args:
        collector: name of the collector that it works for.
        directory: where ``<table>.arrow`` and its status file go.
        sources: each with its rate in Hz.
        clock: time, and how to sleep.
        flush_ns: longest time that rows stay in memory.
        native: read in C what has a plan, in real time.
    """

    def __init__(
        self,
        collector: str,
        directory: Path,
        sources: Iterable[tuple[Source, float]],
        clock: Clock,
        flush_ns: int = 1_000_000_000,
        *,
        native: bool = False,
    ) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self._directory = directory
        self._flush_ns = flush_ns
        self._pending: dict[str, list[tuple[Any, ...]]] = {}
        self._writers: dict[str, StreamWriter] = {}
        self._elsewhere: set[str] = set()
        self._told: set[str] = set()
        """What sources said at the last flush to be absent."""
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._stuck = False
        self._flushes = 0
        self._start_cpu_ns = clock.cpu_ns()
        self.status = SamplerStatus(
            collector=collector,
            pid=os.getpid(),
            start_ns=clock.time_ns(),
            startup_cpu_ns=self._start_cpu_ns,
        )
        opened: list[tuple[Source, float]] = []
        refused: list[str] = []
        for source, hz in sources:
            try:
                source.open()
            except CollectorUnavailable as exc:
                refused.append(f"{source.name}: {exc}")
                for table in source.tables:
                    self.status.absent[table] = str(exc)
                continue
            opened.append((source, hz))
            self.status.calls |= call_costs(source, clock)
        if not opened:
            raise CollectorUnavailable("; ".join(refused) or "no source was asked for")
        self._start_ns = clock.monotonic_ns()
        self._flush_at_ns = self._start_ns + flush_ns
        self._sources = [source for source, _ in opened]
        self._readers: list[_Reader] = []
        self._background: list[_BackgroundReader] = []
        for source, hz in opened:
            plan = getattr(source, "plan", None) if native and _plan.AVAILABLE else None
            if plan is None:
                self._readers.append(_Reader(source, hz, self._start_ns))
            else:
                self._background.append(_BackgroundReader(source, plan(), hz))

    def run(self) -> SamplerStatus:
        """Sample until told to stop; what was read is on disk when it returns.

        Raises:
            OutputError: the disk is full or the directory vanished; what was flushed is kept.
        """
        self._work()
        return self._result()

    def run_watched(self, leave: Callable[[int], None]) -> SamplerStatus:
        """The same, where a call that blocks keeps no other device or source waiting.

        Args:
            leave: ends the process with an exit code; called at the end when a thread is still
                inside a call, which may never return.

        Raises:
            OutputError: the disk is full or the directory vanished; what was flushed is kept.
        """

        def watch() -> None:
            while not self._ended.wait(_WATCH_S):
                with self.lock:
                    for background in self._background:
                        background.watch()
                    self._take_over(leave)

        threading.Thread(target=watch, daemon=True, name="watch").start()
        self._work()
        status = self._result()
        if self._stuck:
            leave(0)
        return status

    def _result(self) -> SamplerStatus:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self.status

    def _take_over(self, leave: Callable[[int], None]) -> None:
        """Go on in a new thread when the present one is in a reading that blocks."""
        now_ns = self.clock.monotonic_ns()
        for reader in self._readers:
            for part in reader.parts:
                for_ns = part.blocks(now_ns)
                if part.alone or for_ns is None:
                    continue
                reader.leave_alone(part, for_ns)

                def work() -> None:
                    self._work()
                    if self._ended.is_set():
                        leave(0 if self._error is None else 1)

                threading.Thread(target=work, daemon=True, name="instead").start()
                return

    def _work(self) -> None:
        """Sample until told to stop, or until another thread has taken over."""
        try:
            superseded = self._loop()
            if superseded is not None:
                self._alone(*superseded)
                return
            clock = self.clock
            self.status.state = "orphaned" if getattr(clock, "orphaned", False) else "complete"
            stopped = [background.stop() for background in self._background]
            blocked = any(part.since_ns for r in self._readers for part in r.parts)
            self._stuck = blocked or not all(stopped)
            self.flush()
        except OutputError as exc:
            self._error = exc
            self.status.state = "failed"
            self.status.error = f"{exc}; what it had flushed is kept"
            # On a full disk this fails too; the parent then reads it from stderr.
            with contextlib.suppress(OutputError):
                self._write_status()
        except Exception as exc:  # noqa: BLE001 - raised where the result is asked for
            self._error = exc
        self._close()
        self._ended.set()

    def _loop(self) -> tuple[_Reader, _Part] | None:
        """Read what is due, again and again; what blocked, or None when told to stop."""
        clock = self.clock
        while True:
            deadlines = [r.deadline_ns for r in self._readers if r.live]
            if clock.wait_until(min([self._flush_at_ns, *deadlines])):
                return None
            # Once per wake-up: what is due together is read together.
            now_ns = clock.monotonic_ns()
            for reader in self._readers:
                if reader.live and reader.deadline_ns <= now_ns:
                    part = reader.sample(self)
                    if part is not None:
                        return reader, part
            if clock.monotonic_ns() >= self._flush_at_ns:
                self.flush()
                self._flush_at_ns = clock.monotonic_ns() + self._flush_ns

    def _alone(self, reader: _Reader, part: _Part) -> None:
        """Go on reading a part that had blocked, and nothing else."""
        period_ns = reader.status.period_ns
        deadline_ns = self.clock.monotonic_ns()
        while part.live:
            deadline_ns += period_ns
            left_ns = deadline_ns - self.clock.monotonic_ns()
            if left_ns < 0:
                missed = -left_ns // period_ns + 1
                deadline_ns += missed * period_ns
                with self.lock:
                    reader.status.dropped_count += missed
            if self._ended.wait(max(deadline_ns - self.clock.monotonic_ns(), 0) / 1e9):
                return
            reader.sample_part(part, self, deadline_ns)

    def keep(self, sink: Sink, time_ns: int, span_ns: int) -> None:
        """Keep a reading's rows for the next flush; with the lock."""
        for table, values in sink.take():
            self._pending.setdefault(table, []).append((time_ns, span_ns, *values))
        for table, row in sink.take_timed():
            self._pending.setdefault(table, []).append(row)

    def flush(self) -> None:
        """Write the rows at hand and the status."""
        from chopper.tables import TABLES

        with self.lock:
            for background in self._background:
                taken = background.take()
                if taken is not None and self._begun(taken[0]):
                    self._writers[taken[0]].write(taken[1])
            for table, rows in self._pending.items():
                if rows and self._begun(table):
                    names = [column.name for column in TABLES[table].columns]
                    self._write(table, names, rows)
                rows.clear()
            self._flushes += 1
            if self._flushes % _STATUS_FLUSHES == 1 or self.status.state != "running":
                self._write_status()

    def _write(self, table: str, names: list[str], rows: list[tuple[Any, ...]]) -> None:
        """Write rows; those with a value that the table cannot hold are left out and named."""
        try:
            columns = dict(zip(names, zip(*rows, strict=True), strict=True))
            self._writers[table].write(columns)
        except (ArithmeticError, TypeError, ValueError) as exc:
            if len(rows) == 1:
                self.status.absent[f"{table}[some rows]"] = (
                    f"a value does not fit the table: {type(exc).__name__}: {exc}"
                )
                return
            for row in rows:
                self._write(table, names, [row])

    def _begun(self, table: str) -> bool:
        """Begin a table's file, unless the sampler of another collector of the rank has one.

        All of them read the host's clocks, and two vendors' devices may sit in one host: two
        processes that wrote the same file would spoil it.
        """
        from chopper.run import StreamWriter

        if table in self._writers:
            return True
        if table in self._elsewhere:
            return False
        path = self._directory / f"{table}.arrow"
        try:
            self._writers[table] = StreamWriter(path, table, exclusive=True)
        except FileExistsError:
            self._elsewhere.add(table)
            if table != ClockSource.tables[0]:
                self.status.absent[table] = "another collector's sampler writes this table"
        return table in self._writers

    def _write_status(self) -> None:
        from chopper.run import write_atomic

        status = self.status
        now_ns = self.clock.monotonic_ns()
        status.wall_ns = now_ns - self._start_ns
        status.cpu_ns = self.clock.cpu_ns() - self._start_cpu_ns
        status.files = tuple(sorted(writer.path.name for writer in self._writers.values()))
        readers: list[_Reader | _BackgroundReader] = [*self._background, *self._readers]
        status.sources = [reader.summary() for reader in readers]
        absent = {k: v for k, v in status.absent.items() if k not in self._told}
        self._told.clear()
        for reader in readers:
            told = {**reader.source.absent, **reader.blocked(now_ns)}
            self._told.update(told)
            absent |= told
            if isinstance(reader.source, ClockSource):
                status.clock_alignment_error_ns = reader.source.error_ns
        status.absent = absent
        write_atomic(status_file(self._directory, status.collector), msgspec.json.encode(status))

    def _close(self) -> None:
        if not self._stuck:
            # Shutting a library down waits for the call that does not return.
            for source in self._sources:
                source.close()
        for writer in self._writers.values():
            try:
                writer.close()
            except OSError:
                # The disk is full: the stream keeps its open end, which readers understand.
                continue


def call_costs(source: Source, clock: Clock) -> dict[str, CallCost]:
    """What each call of the driver costs that a source makes, measured now, by name.

    Calls that fail are left out.
    """
    offered = getattr(source, "calls", None)
    found: dict[str, CallCost] = {}
    for name, call in (offered() if offered is not None else {}).items():
        costs: list[int] = []
        begun_ns = clock.monotonic_ns()
        try:
            while len(costs) < _CALIBRATION_CALLS:
                before_ns = clock.monotonic_ns()
                call()
                after_ns = clock.monotonic_ns()
                costs.append(after_ns - before_ns)
                if after_ns - begun_ns > _CALIBRATION_NS and len(costs) >= 3:
                    break
        except Exception:  # noqa: BLE001 - whatever a driver refuses now, its source names
            continue
        costs.sort()
        found[name] = CallCost(
            p50_ns=costs[len(costs) // 2],
            p99_ns=costs[min(len(costs) * 99 // 100, len(costs) - 1)],
            count=len(costs),
        )
    return found


def _prctl(option: int, value: int | bytes) -> None:
    import ctypes

    try:
        libc = ctypes.CDLL(None)
        libc.prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):  # not Linux: pipe and parent check remain
        return


def _ask_for_short_slices() -> None:
    """Make the scheduler give this process little at a time, but soon.

    Linux since 6.12 lets a task choose its time slice, and runs those with short ones first: at the
    same low priority the sampler wakes earlier on a machine whose cores are all in use. Older
    kernels ignore it.
    """
    import ctypes
    import platform
    import struct

    # sched_setattr has no wrapper in older C libraries; the numbers are those of the kernel's ABI.
    number = {"x86_64": 314, "aarch64": 274, "riscv64": 274}.get(platform.machine())
    if number is None:
        return
    normal_policy, no_flags, no_deadline, no_period = 0, 0, 0, 0
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = struct.pack(
        "IIQiIQQQ", 48, normal_policy, no_flags, nice, 0, _SLICE_NS, no_deadline, no_period
    )
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).syscall(number, 0, ctypes.create_string_buffer(attributes), 0)


def _settle(config: SamplerConfig, clock: SystemClock) -> None:
    """Make this process quiet, recognisable, and mortal with its parent."""

    def stop(_signal: int, _frame: object) -> None:
        clock.stop_requested = True

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop)
    # The kernel sends this when the parent's *thread* ends, so it only wakes the loop, which then
    # looks whether the parent process is still there.
    signal.signal(signal.SIGUSR1, lambda _signal, _frame: None)
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    clock._stop_fds.append(read_fd)
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGUSR1))
    _prctl(_PR_SET_NAME, COMM.encode())
    _prctl(_PR_SET_TIMERSLACK, 1000)
    with contextlib.suppress(OSError):
        os.nice(config.nice)
    _ask_for_short_slices()
    with contextlib.suppress(OSError, AttributeError):
        # A rank pinned to its cores passes that on; the sampler belongs wherever there is room.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _end_with_parent(parent_pid: int, begun: threading.Event) -> None:
    """End this process with its parent, also while a driver's call hangs at its start.

    Once the sampler has begun, it looks itself.
    """

    def watch() -> None:
        while not begun.wait(_WATCH_S):
            if os.getppid() != parent_pid:
                os._exit(1)

    threading.Thread(target=watch, daemon=True, name="mortal").start()


class _Refuse:
    """An import hook that makes numpy and pandas look absent."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        if name in ("numpy", "pandas"):
            raise ModuleNotFoundError(f"the sampler does without {name}", name=name)


def _load_pyarrow() -> None:
    """Load pyarrow before the first sample, without numpy and pandas.

    It would load both to see whether what it is given is theirs. Measured: 0.48 s of CPU and 112 MB
    with them, 0.09 s and 52 MB without.
    """
    refuse = _Refuse()
    sys.meta_path.insert(0, refuse)
    try:
        pyarrow = importlib.import_module("pyarrow")
        pyarrow.array([1], type=pyarrow.int64())
    except ImportError:  # before release 18 it insisted on numpy
        sys.meta_path.remove(refuse)
        for name in [n for n in sys.modules if n.partition(".")[0] == "pyarrow"]:
            del sys.modules[name]
        importlib.import_module("pyarrow")


def main() -> int:
    """Body of the sampler process: configuration on stdin, one line of answer on stdout."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65536)
        if not chunk:
            return 1
        line += chunk
    config = msgspec.json.decode(line, type=SamplerConfig)
    clock = SystemClock(0, config.parent_pid)
    _settle(config, clock)
    begun = threading.Event()
    _end_with_parent(config.parent_pid, begun)
    try:
        _load_pyarrow()
        importlib.import_module("chopper.run")
        sampler = Sampler(
            config.collector,
            Path(config.directory),
            [(spec.make(), spec.hz) for spec in config.specs],
            clock,
            config.flush_ns,
            native=True,
        )
        sampler.flush()
    except ChopperError as exc:
        os.write(1, msgspec.json.encode({"error": str(exc)}) + b"\n")
        return 1
    try:
        os.write(1, b"{}\n")
    except BrokenPipeError:  # the parent died while this process was starting
        return 1
    try:
        # Not sys.exit: a thread inside a driver's call would be waited for.
        begun.set()
        sampler.run_watched(os._exit)
    except OutputError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    return 0


# sys.path gets chopper's own parent at its end: a program that was started in a clone, or that
# changed sys.path, has a sampler all the same. -P keeps the current directory out.
_BOOTSTRAP = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from chopper.collectors.sampler import main; sys.exit(main())"
)


class SamplerProcess:
    """The sampler as its parent sees it.

    Args:
        collector: name of the collector it works for.
        directory: the rank's folder.
        specs: what to read, and how often.
        flush_ns: longest time that rows stay in the sampler's memory.
        nice: added to the sampler's niceness.
    """

    def __init__(
        self,
        collector: str,
        directory: Path,
        specs: list[SourceSpec],
        *,
        flush_ns: int = 1_000_000_000,
        nice: int = _NICE,
    ) -> None:
        self._config = SamplerConfig(
            collector=collector,
            directory=str(directory.resolve()),
            parent_pid=os.getpid(),
            specs=specs,
            flush_ns=flush_ns,
            nice=nice,
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
        package_parent = str(Path(chopper.__file__).resolve().parent.parent)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CHOPPER_")}
        # numpy comes with pyarrow; its BLAS would start a thread per core.
        environment.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOTSTRAP, package_parent],
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
            self._process.stdin.write(msgspec.json.encode(self._config) + b"\n")
        except OSError as exc:
            raise CaptureError(f"the sampler process cannot be started ({exc})") from exc
        self._await_ready(ready_timeout_s)

    def _await_ready(self, timeout_s: float) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not readable:
            return
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise CaptureError(f"the sampler process ended at its start: {self._last_words()}")
        error = msgspec.json.decode(line).get("error")
        if error is not None:
            self._process.wait()
            raise CollectorUnavailable(error)

    def stop(self, *, timeout_s: float = 5.0) -> SamplerStatus | None:
        """End the process, by force when it does not answer, and return its last status.

        None when it left none, or was stopped before. In a process forked from the one that started it this does nothing:
        the sampler is not theirs.
        """
        if self._process is None or self._stopped or os.getpid() != self._config.parent_pid:
            return None
        self._stopped = True
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        died = process.poll() is not None
        forced = False
        if not died:
            try:
                # Words, not just the end of the file: a forked data loader worker may hold a copy
                # of this end of the pipe.
                process.stdin.write(b"stop\n")
            except OSError:
                died = True
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                forced = True
        process.stdin.close()
        process.stdout.close()
        status = self.status()
        if status is not None and status.state == "running":
            status.state = "failed"
            status.error = (
                f"the sampler did not stop within {timeout_s:g} s and was killed"
                if forced
                else f"the sampler process died ({self._how_it_ended()})"
            )
            status.error += "; what it had flushed is kept"
        self._stderr.close()
        return status

    def status(self) -> SamplerStatus | None:
        """The status as it was last written."""
        try:
            data = status_file(self._directory, self._config.collector).read_bytes()
            return msgspec.json.decode(data, type=SamplerStatus)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def _how_it_ended(self) -> str:
        code = self._process.returncode if self._process is not None else None
        if code is not None and code < 0:
            return f"signal {-code}"
        return f"exit code {code}: {self._last_words()}"

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def to_report(name: str, status: SamplerStatus | None) -> CollectorReport:
    """A sampler's status as the manifest's report. The rates are those of its fastest source."""
    from chopper.manifest import CollectorReport

    if status is None or not status.sources:
        return CollectorReport(
            name=name, status="failed", reason="the sampler left no status: it died at its start"
        )
    fastest = min(status.sources, key=lambda s: 1 / s.requested_hz)
    notes = [f"{s.name}: {s.note}" for s in status.sources if s.note is not None]
    failed = status.state == "failed"
    return CollectorReport(
        name=name,
        status="failed" if failed else "obtained",
        reason=status.error if failed else "; ".join(notes) or None,
        files=status.files,
        requested_hz=fastest.requested_hz,
        achieved_hz=fastest.achieved_hz,
        samples_count=sum(s.samples_count for s in status.sources),
        dropped_count=sum(s.dropped_count for s in status.sources),
        late_count=sum(s.late_count for s in status.sources),
        jitter_p50_ns=fastest.jitter_p50_ns,
        jitter_p99_ns=fastest.jitter_p99_ns,
        call_p50_ns=_total(s.call_p50_ns for s in status.sources),
        call_p99_ns=_total(s.call_p99_ns for s in status.sources),
        calls=status.calls,
        cpu_ratio=status.cpu_ns / status.wall_ns if status.wall_ns else None,
        clock_alignment_error_ns=status.clock_alignment_error_ns,
        absent=status.absent,
    )


def _total(values: Iterable[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def measure_call_ns(
    make: Callable[[], Source], *, repeats: int = 30, clock: Clock | None = None
) -> Mapping[str, int]:
    """Cost of one reading of a source in this process: its median and 99th percentile.

    Returns:
        ``p50_ns`` and ``p99_ns``.

    Raises:
        CollectorUnavailable: it cannot be read here.
    """
    clock = clock or SystemClock()
    source = make()
    source.open()
    sink = Sink()
    costs = Quantiles()
    try:
        for _ in range(repeats):
            before_ns = clock.monotonic_ns()
            source.sample(sink, before_ns)
            costs.add(clock.monotonic_ns() - before_ns)
            sink.take()
    finally:
        source.close()
    p50_ns, p99_ns = costs.at(0.5), costs.at(0.99)
    assert p50_ns is not None
    assert p99_ns is not None
    return {"p50_ns": p50_ns, "p99_ns": p99_ns}


if __name__ == "__main__":
    sys.exit(main())
