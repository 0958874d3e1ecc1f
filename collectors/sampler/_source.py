"""Sources that a sampler reads, the sink that takes their rows, time, costs, and its status."""

from __future__ import annotations

import importlib
import os
import select
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

import msgspec

from chopper.storage import clock
from chopper.storage.manifest import CallCost, CollectorReport
from chopper.tables.ranges import Count, Duration, Time


class Sink:
    """Takes rows from sources; the sampler adds the times."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: list[tuple[str, tuple[int, int] | None, tuple[Any, ...]]] = []

    def add(self, table: str, *values: Any) -> None:
        """Add a row: the declared columns after ``time_ns`` and ``span_ns``, in their order."""
        self.rows.append((table, None, values))

    def add_at(self, table: str, time_ns: int, span_ns: int, *values: Any) -> None:
        """Add a row whose time the driver told; the sampler adds none."""
        self.rows.append((table, (time_ns, span_ns), values))

    def take(self, times_ns: tuple[int, ...] = ()) -> list[tuple[str, tuple[Any, ...]]]:
        """Return the rows since the last call, those without a time behind ``times_ns``."""
        rows, self.rows = self.rows, []
        return [(table, (*(own_ns or times_ns), *values)) for table, own_ns, values in rows]


class Gone(Exception):
    """The device is gone for good: it is not read again."""


BLOCKED_NS = 300_000_000
"""A reading that lasts longer holds up the others no more."""


@dataclass(eq=False, slots=True)
class Part:
    """A part of a source that is read by itself: one device; and how its readings went."""

    label: str
    read: Callable[[Sink, int], None]
    """As ``Source.sample``; raises :class:`Gone` where it will never answer again."""
    live: bool = True
    alone: bool = False
    """A thread of its own reads it, since it blocked."""
    since_ns: int | None = None
    """Begin of the reading that is going on."""
    samples_count: int = 0
    failures: int = 0
    first_ns: int = 0
    last_ns: int = 0

    def blocks(self, now_ns: int) -> int | None:
        """Return how long its reading has lasted, where that is too long."""
        since_ns = self.since_ns
        if since_ns is None or now_ns - since_ns < BLOCKED_NS:
            return None
        return now_ns - since_ns


class Source(Protocol):
    """A source that the sampler process reads at a fixed rate.

    Optional methods: ``parts() -> list[Part]``, read one by one with a time of its own each, so
    that one that blocks does not delay the others; ``calls() -> dict[str, Callable]``, calls of a
    driver whose cost is measured at the start; ``refresh_ns() -> int | None``, the time in which
    its fastest sensor is renewed, once that is known: it is read twice as often at most.
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
    """Specification of a source that the sampler process creates."""

    factory: str
    """``module:Class``, called with ``options`` as keywords."""
    hz: float
    options: dict[str, Any] = {}

    def make(self) -> Source:
        """Import the class and create the source."""
        module, _, name = self.factory.partition(":")
        source: Source = getattr(importlib.import_module(module), name)(**self.options)
        return source


class SystemClock:
    """The system's clocks; :class:`chopper.testing.FakeClock` replaces them in tests.

    They wait on a pipe, so that word to stop is heard while asleep: ``stop_fd`` becomes readable.
    They stop without the process ``parent_pid``, too.
    """

    def __init__(self, stop_fd: int | None = None, parent_pid: int | None = None) -> None:
        self._stop_fds = [] if stop_fd is None else [stop_fd]
        self._parent_pid = parent_pid
        self.stop_requested = False
        self.orphaned = False

    # Called again and again for every device: no frame of Python in between.
    time_ns = staticmethod(clock.now_ns)
    monotonic_ns = staticmethod(time.monotonic_ns)
    cpu_ns = staticmethod(time.process_time_ns)

    def monotonic_raw_ns(self) -> int | None:
        raw = getattr(time, "CLOCK_MONOTONIC_RAW", None)
        return None if raw is None else time.clock_gettime_ns(raw)

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


class ClockSource:
    """Reads the host's clocks together. -> CLOCK."""

    name: ClassVar[str] = "clock"
    tables: ClassVar[tuple[str, ...]] = ("clock",)

    def __init__(self, clock: SystemClock | None = None) -> None:
        self.absent: dict[str, str] = {}
        self._clock = clock or SystemClock()
        self._offset_ns: int | None = None
        self.error_ns: int | None = None
        """Largest error in placing a monotonic time on the wall clock that was seen: half the time
        that reading both took, plus by how much the wall clock was stepped between readings."""

    def open(self) -> None:
        if self._clock.monotonic_raw_ns() is None:
            self.absent["clock.monotonic_raw_ns"] = "no CLOCK_MONOTONIC_RAW on this system"

    def sample(self, sink: Sink, _now_ns: int) -> None:
        """Read the triple: the wall clock between two readings of the monotonic one."""
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


_READINGS = 30
_CALIBRATION_CALLS = 50
_CALIBRATION_NS = 10_000_000
"""For each call, at the start."""


def call_costs(source: Source, clock: SystemClock) -> dict[str, CallCost]:
    """Return the cost of each call of the driver that a source makes, if it works."""
    offered = getattr(source, "calls", None)
    costs_by_call: dict[str, CallCost] = {}
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
        costs_by_call[name] = CallCost(
            p50_ns=costs[len(costs) // 2],
            p99_ns=costs[min(len(costs) * 99 // 100, len(costs) - 1)],
            count=len(costs),
        )
    return costs_by_call


def reading_cost_ns(source: Source) -> int:
    """Open a source and return the median cost of one reading in this process.

    Raises:
        CollectorUnavailable: it cannot be read here.
    """
    sink = Sink()
    costs_ns = []
    try:
        source.open()
        for _ in range(_READINGS):
            before_ns = time.monotonic_ns()
            source.sample(sink, before_ns)
            costs_ns.append(time.monotonic_ns() - before_ns)
            sink.take()
    finally:
        source.close()
    return sorted(costs_ns)[len(costs_ns) // 2]


COMM = "chopper-sampler"
"""Name of the sampler's process as the kernel shows it; 15 characters is what fits."""


class SourceStatus(msgspec.Struct):
    """Statistics of one source. Counts are totals since the start."""

    name: str
    requested_hz: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    parts_count: Count = 1
    """Number of parts that are read by themselves (devices); each counts its samples."""
    period_ns: Duration = 0
    """Time between samples now; longer than requested where a reading costs too much, or where the
    sensors are renewed less often."""
    elapsed_ns: Duration = 0
    """From the first to the last sample, summed over the parts."""
    samples_count: Count = 0
    late_count: Count = 0
    """Samples that began more than half a period after their time."""
    dropped_count: Count = 0
    """Samples left out: their time had passed, or the reading failed."""
    jitter_p50_ns: Duration | None = None
    jitter_p99_ns: Duration | None = None
    call_p50_ns: Duration | None = None
    call_p99_ns: Duration | None = None
    notes: dict[str, str] = {}
    """Why it was left out, slowed down, or what last failed; by what it is about, so that one fact
    never stands in for another."""

    def __post_init__(self) -> None:
        self.period_ns = self.period_ns or max(round(1e9 / self.requested_hz), 1)

    def tell(self, jitter: Quantiles, call: Quantiles) -> None:
        """Take over the quantiles of the delays and of the costs of readings, in ns."""
        self.jitter_p50_ns, self.jitter_p99_ns = jitter.at(0.5), jitter.at(0.99)
        self.call_p50_ns, self.call_p99_ns = call.at(0.5), call.at(0.99)

    @property
    def note(self) -> str | None:
        return "; ".join(dict.fromkeys(self.notes.values())) or None

    @property
    def achieved_hz(self) -> float | None:
        """Samples per second of one part; None before its second sample."""
        if self.samples_count <= self.parts_count or self.elapsed_ns <= 0:
            return None
        return (self.samples_count - self.parts_count) / (self.elapsed_ns / 1e9)


class SamplerStatus(msgspec.Struct, kw_only=True):
    """The sampler's own status, written to a file with every fifth flush."""

    collector: str
    state: Literal["running", "complete", "orphaned", "failed"] = "running"
    error: str | None = None
    pid: Count
    start_ns: Time
    wall_ns: Duration = 0
    cpu_ns: Duration = 0
    """CPU time of its whole process in ``wall_ns``, start-up left out."""
    startup_cpu_ns: Duration = 0
    files: tuple[str, ...] = ()
    absent: dict[str, str] = {}
    clock_alignment_error_ns: Time | None = None
    calls: dict[str, CallCost] = {}
    """Each call of the driver, measured at the start."""
    sources: list[SourceStatus] = []


class SamplerConfig(msgspec.Struct, kw_only=True):
    """Configuration of a sampler process: one line of JSON at its start."""

    collector: str
    directory: str
    parent_pid: int
    specs: list[SourceSpec]
    flush_ns: int = 1_000_000_000
    cpu_ratio: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    """Share of a core that it may take."""
    clock_ns: int | None = None
    """The anchor of the recording's clock."""


def status_file(directory: Path, collector: str) -> Path:
    return directory / f"sampler-{collector}.json"


class Quantiles:
    """Quantiles of integers in bounded memory.

    Counts fall into buckets of 1/16 of a power of two: a quantile is within 3.2 % of the truth.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._total = 0

    def add(self, value: int) -> None:
        """Count a value; negative values count as 0."""
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
        cumulative = 0
        last = 0
        for key in sorted(self._counts):
            cumulative += self._counts[key]
            shift, mantissa = key >> 6, key & 63
            last = (mantissa << shift) + ((1 << shift) >> 1)
            if cumulative >= wanted:
                break
        return last


def to_report(name: str, status: SamplerStatus | None) -> CollectorReport:
    """A sampler's status as the manifest's report. The rates are those of its fastest source."""
    from chopper.storage.manifest import CollectorReport

    if status is None or not status.sources:
        return CollectorReport(
            name=name, status="failed", reason="the sampler left no status: it died during startup"
        )
    fastest = min(status.sources, key=lambda s: 1 / s.requested_hz)
    notes = [f"{s.name}: {s.note}" for s in status.sources if s.note is not None]
    failed = status.state == "failed"
    if failed and status.error is not None:
        notes.insert(0, status.error)
    return CollectorReport(
        name=name,
        status="failed" if failed else "obtained",
        reason="; ".join(notes) or None,
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
