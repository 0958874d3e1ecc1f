"""The sampler: a small process of its own that reads sources at fixed rates and writes tables.

It is spawned with a fresh interpreter, never forked, loads no torch, runs at low priority, and ends
with its parent: on request, when its pipe closes, when the kernel says that the parent died, or
when it finds itself with another parent.

It writes its rows itself, as Arrow streams, batch by batch: no other process reads them while the
run goes on, so nothing has to cross a process border and no ring buffer is needed. A kill loses at
most the rows since the last flush.

To add a source, write a class like :class:`Source` and pass a :class:`SourceSpec` that names it to
a :class:`SamplerProcess`; it does without numpy and pandas. Each collector has its own sampler process, so that a driver call that
hangs takes nothing else with it.
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
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import msgspec

import chopper
from chopper.errors import CaptureError, ChopperError, CollectorUnavailable, OutputError

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

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29


class Sink:
    """Takes rows from sources; the sampler adds the times."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, tuple[Any, ...]]] = []

    def add(self, table: str, *values: Any) -> None:
        """Add a row: the declared columns after ``time_ns`` and ``span_ns``, in their order."""
        self._rows.append((table, values))

    def take(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Rows since the last call."""
        rows, self._rows = self._rows, []
        return rows


class Source(Protocol):
    """Something that can be read at a fixed rate, inside the sampler process."""

    name: ClassVar[str]
    tables: ClassVar[tuple[str, ...]]
    """Declared tables that it writes; each begins with ``time_ns`` and ``span_ns``."""
    absent: dict[str, str]
    """``table.column`` → why it stays null on this machine; may grow during the run."""

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
    elapsed_ns: int = 0
    """From the first to the last sample."""
    samples_count: int = 0
    late_count: int = 0
    """Samples that began more than half a period after their time."""
    dropped_count: int = 0
    """Samples left out because their time had passed, or because the reading failed."""
    jitter_p50_ns: int | None = None
    jitter_p99_ns: int | None = None
    call_p50_ns: int | None = None
    call_p99_ns: int | None = None
    note: str | None = None
    """Why it was left out, slowed down, or what last failed."""

    @property
    def achieved_hz(self) -> float | None:
        """Samples per second; None before the second sample."""
        if self.samples_count < 2 or self.elapsed_ns <= 0:
            return None
        return (self.samples_count - 1) / (self.elapsed_ns / 1e9)


class SamplerStatus(msgspec.Struct, kw_only=True):
    """What the sampler says about itself, written to a file at each flush."""

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
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._total = 0

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


class _Reader:
    """One source with its deadlines and statistics."""

    def __init__(self, source: Source, hz: float, start_ns: int) -> None:
        self.source = source
        self.status = SourceStatus(
            name=source.name, requested_hz=hz, period_ns=max(round(1e9 / hz), 1)
        )
        self.deadline_ns = start_ns
        self.live = True
        self._jitter = Quantiles()
        self._call = Quantiles()
        self._first_ns: int | None = None
        self._failures = 0

    def sample(self, sink: Sink, clock: Clock) -> list[tuple[str, tuple[Any, ...]]]:
        """Take the sample that is due; rows come back with their times."""
        status = self.status
        before_ns = clock.monotonic_ns()
        real_before_ns = clock.time_ns()
        try:
            self.source.sample(sink, before_ns)
            failed: Exception | None = None
        except Exception as exc:  # noqa: BLE001 - one source's failure must not stop the others
            failed = exc
        span_ns = max(clock.time_ns() - real_before_ns, 0)
        after_ns = clock.monotonic_ns()
        rows = sink.take()
        delay_ns = before_ns - self.deadline_ns
        self._jitter.add(delay_ns)
        if failed is None:
            self._failures = 0
            status.samples_count += 1
            status.late_count += delay_ns > status.period_ns // 2
            self._call.add(after_ns - before_ns)
            if self._first_ns is None:
                self._first_ns = before_ns
            status.elapsed_ns = before_ns - self._first_ns
        else:
            self._fail(failed)
            rows = []
        self._schedule(after_ns)
        time_ns = real_before_ns + span_ns // 2
        return [(table, (time_ns, span_ns, *values)) for table, values in rows]

    def _fail(self, exc: Exception) -> None:
        self._failures += 1
        self.status.dropped_count += 1
        self.status.note = f"a reading failed: {type(exc).__name__}: {exc}"
        if self._failures >= _FAILURES_TO_STOP:
            self.live = False
            self.status.note = f"left out after {self._failures} failures in a row: {exc}"

    def _schedule(self, now_ns: int) -> None:
        status = self.status
        taken = status.samples_count
        if taken and taken % _CHECK_EVERY == 0:
            call_ns = self._call.at(0.5) or 0
            if call_ns > _CALL_RATIO * status.period_ns:
                status.period_ns = int(call_ns / _CALL_RATIO)
                status.note = (
                    f"slowed down from {status.requested_hz:g} Hz: a reading takes "
                    f"{call_ns / 1e6:.2g} ms"
                )
        self.deadline_ns += status.period_ns
        if self.deadline_ns <= now_ns:
            missed = (now_ns - self.deadline_ns) // status.period_ns + 1
            self.deadline_ns += missed * status.period_ns
            status.dropped_count += missed

    def summary(self) -> SourceStatus:
        """The status with its quantiles brought up to date."""
        status = self.status
        status.jitter_p50_ns = self._jitter.at(0.5)
        status.jitter_p99_ns = self._jitter.at(0.99)
        status.call_p50_ns = self._call.at(0.5)
        status.call_p99_ns = self._call.at(0.99)
        return status


class Sampler:
    """Reads sources at their rates and writes their rows, in whichever process it runs in.

    Args:
        collector: name of the collector that it works for.
        directory: where ``<table>.arrow`` and its status file go.
        sources: each with its rate in Hz.
        clock: time, and how to sleep.
        flush_ns: longest time that rows stay in memory.
    """

    def __init__(
        self,
        collector: str,
        directory: Path,
        sources: Iterable[tuple[Source, float]],
        clock: Clock,
        flush_ns: int = 1_000_000_000,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._flush_ns = flush_ns
        self._sink = Sink()
        self._pending: dict[str, list[tuple[Any, ...]]] = {}
        self._writers: dict[str, StreamWriter] = {}
        self._elsewhere: set[str] = set()
        self._start_ns = clock.monotonic_ns()
        self._start_cpu_ns = clock.cpu_ns()
        self.status = SamplerStatus(
            collector=collector,
            pid=os.getpid(),
            start_ns=clock.time_ns(),
            startup_cpu_ns=self._start_cpu_ns,
        )
        self._readers: list[_Reader] = []
        refused: list[str] = []
        for source, hz in sources:
            try:
                source.open()
            except CollectorUnavailable as exc:
                refused.append(f"{source.name}: {exc}")
                for table in source.tables:
                    self.status.absent[table] = str(exc)
                continue
            self._readers.append(_Reader(source, hz, self._start_ns))
        if not self._readers:
            raise CollectorUnavailable("; ".join(refused) or "no source was asked for")

    def run(self) -> SamplerStatus:
        """Sample until told to stop; what was read is on disk when it returns.

        Raises:
            OutputError: the disk is full or the directory vanished; what was flushed is kept.
        """
        clock = self._clock
        flush_at_ns = self._start_ns + self._flush_ns
        try:
            while True:
                deadlines = [r.deadline_ns for r in self._readers if r.live]
                if clock.wait_until(min([flush_at_ns, *deadlines])):
                    break
                # Once per wake-up: what is due together is read together.
                now_ns = clock.monotonic_ns()
                for reader in self._readers:
                    if reader.live and reader.deadline_ns <= now_ns:
                        for table, row in reader.sample(self._sink, clock):
                            self._pending.setdefault(table, []).append(row)
                if clock.monotonic_ns() >= flush_at_ns:
                    self.flush()
                    flush_at_ns = clock.monotonic_ns() + self._flush_ns
            self.status.state = "orphaned" if getattr(clock, "orphaned", False) else "complete"
            self.flush()
        except OutputError as exc:
            self.status.state = "failed"
            self.status.error = f"{exc}; what it had flushed is kept"
            # On a full disk this fails too; the parent then reads it from stderr.
            with contextlib.suppress(OutputError):
                self._write_status()
            raise
        finally:
            self._close()
        return self.status

    def flush(self) -> None:
        """Write the rows at hand and the status."""
        from chopper.tables import TABLES

        for table, rows in self._pending.items():
            if not rows:
                continue
            if table not in self._writers and table not in self._elsewhere:
                self._create(table)
            if table in self._elsewhere:
                rows.clear()
                continue
            names = [column.name for column in TABLES[table].columns]
            self._writers[table].write(dict(zip(names, zip(*rows, strict=True), strict=True)))
            rows.clear()
        self._write_status()

    def _create(self, table: str) -> None:
        """Begin a table's file, unless the sampler of another collector of the rank has one.

        All of them read the host's clocks, and two vendors' devices may sit in one host: two
        processes that wrote the same file would spoil it.
        """
        from chopper.run import StreamWriter

        path = self._directory / f"{table}.arrow"
        try:
            self._writers[table] = StreamWriter(path, table, exclusive=True)
        except FileExistsError:
            self._elsewhere.add(table)
            if table != ClockSource.tables[0]:
                self.status.absent[table] = "another collector's sampler writes this table"

    def _write_status(self) -> None:
        from chopper.run import write_atomic

        status = self.status
        status.wall_ns = self._clock.monotonic_ns() - self._start_ns
        status.cpu_ns = self._clock.cpu_ns() - self._start_cpu_ns
        status.files = tuple(sorted(writer.path.name for writer in self._writers.values()))
        status.sources = [reader.summary() for reader in self._readers]
        for reader in self._readers:
            status.absent.update(reader.source.absent)
            if isinstance(reader.source, ClockSource):
                status.clock_alignment_error_ns = reader.source.error_ns
        write_atomic(status_file(self._directory, status.collector), msgspec.json.encode(status))

    def _close(self) -> None:
        for reader in self._readers:
            reader.source.close()
        for writer in self._writers.values():
            try:
                writer.close()
            except OSError:
                # The disk is full: the stream keeps its open end, which readers understand.
                continue


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
    try:
        _load_pyarrow()
        importlib.import_module("chopper.run")
        sampler = Sampler(
            config.collector,
            Path(config.directory),
            [(spec.make(), spec.hz) for spec in config.specs],
            clock,
            config.flush_ns,
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
        sampler.run()
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
        """The status as of the last flush."""
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
