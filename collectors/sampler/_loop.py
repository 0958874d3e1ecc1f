"""The sampler's loop: takes due readings, writes rows and status, survives blocked calls."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

from chopper.collectors.sampler._source import (
    ClockSource,
    Gone,
    Part,
    Quantiles,
    SamplerStatus,
    Sink,
    SourceStatus,
    call_costs,
    status_file,
)
from chopper.errors import CollectorUnavailable, OutputError
from chopper.wording import percent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from chopper.collectors.sampler._source import Source, SystemClock
    from chopper.storage.streams import StreamWriter

# A source that takes more of its period than this is read less often: a sampler must not take a
# core away from the training that it watches.
_CALL_RATIO = 0.05
_CHECK_EVERY = 16
_SLOWEST_NS = 100_000_000
"""Longest period that a slow sensor or a full share of a core leads to, where the one asked for is
shorter than half of it: that a sensor changes faster later is soon noticed."""
_MOST_STRETCH = 10.0
_REPAY_S = 5.0
"""Time in which CPU time beyond the share is saved again."""
_SELDOM_HZ = 1.0
"""Sources of this rate and less are never slowed down for the sampler's share of a core."""
_FAILURES_TO_STOP = 20


class Reader:
    """One source with its deadlines and statistics."""

    def __init__(self, source: Source, hz: float, start_ns: int) -> None:
        self.source = source
        parts = getattr(source, "parts", None)
        self.parts: list[Part] = [Part("", source.sample)] if parts is None else parts()
        self.status = SourceStatus(source.name, hz, len(self.parts))
        self.deadline_ns = start_ns
        self._requested_ns = self.status.period_ns
        self._refresh_ns = getattr(source, "refresh_ns", None)
        self._bounds: dict[str, tuple[int, str]] = {}
        """What the period depends on -> its least length in ns for that, and why."""
        self._stretch = (1.0, "")
        self.live = True
        self._jitter = Quantiles()
        self._call = Quantiles()
        self._ticks = 0

    def sample(self, rows: Sampler) -> Part | None:
        """Take the due readings; return a part that blocked until another thread took over."""
        clock = rows.clock
        tick_ns = clock.monotonic_ns()
        parts = [part for part in self.parts if part.live and not part.alone]
        if parts:
            self._jitter.add(tick_ns - self.deadline_ns)
        for part in parts:
            if not self.sample_part(part, rows, self.deadline_ns):
                return part
        after_ns = clock.monotonic_ns()
        if parts:
            self._ticks += 1
            self._call.add(after_ns - tick_ns)
        self.live = any(part.live and not part.alone for part in self.parts)
        self._schedule(after_ns)
        return None

    def sample_part(self, part: Part, rows: Sampler, deadline_ns: int) -> bool:
        clock, status, sink = rows.clock, self.status, Sink()
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
        with rows.lock:
            part.since_ns = None
            if part.alone and not alone:
                # What it read is as old as the call was long.
                status.dropped_count += 1 + span_ns // status.period_ns
                return False
            if failed is not None:
                self._fail(part, failed)
                return True
            part.failures = 0
            part.samples_count += 1
            if part.samples_count == 1:
                part.first_ns = before_ns
            part.last_ns = before_ns
            status.late_count += before_ns - deadline_ns > status.period_ns // 2
            if sink.rows:
                rows.keep(sink, real_before_ns + span_ns // 2, span_ns)
        return True

    def _fail(self, part: Part, exc: Exception) -> None:
        label = f"{part.label}: " if part.label else ""
        self.status.dropped_count += 1
        part.failures += 1
        reason = f"a reading failed: {type(exc).__name__}: {exc}"
        if isinstance(exc, Gone):
            part.live = False
            reason = str(exc)
        elif part.failures >= _FAILURES_TO_STOP:
            part.live = False
            reason = f"left out after {part.failures} failures in a row: {exc}"
        self.status.notes[f"failed {label}"] = f"{label}{reason}"

    def _schedule(self, now_ns: int) -> None:
        status = self.status
        if self._ticks and self._ticks % _CHECK_EVERY == 0:
            self._check_cost()
            self._check_refresh()
        self.deadline_ns += status.period_ns
        if self.deadline_ns <= now_ns:
            missed = (now_ns - self.deadline_ns) // status.period_ns + 1
            self.deadline_ns += missed * status.period_ns
            status.dropped_count += missed * sum(p.live and not p.alone for p in self.parts)

    def _check_cost(self) -> None:
        """Read a source less often where one reading takes too much of its period."""
        call_ns = self._call.at(0.5) or 0
        if call_ns > _CALL_RATIO * self.status.period_ns:
            note = f"a reading takes {call_ns / 1e6:.2g} ms"
            self._bound("cost", int(call_ns / _CALL_RATIO), note)

    def _check_refresh(self) -> None:
        """Read a source at twice the rate at most at which its fastest sensor is renewed."""
        refresh_ns = None if self._refresh_ns is None else self._refresh_ns()
        if refresh_ns is not None:
            note = f"the sensors are renewed every {refresh_ns / 1e6:.3g} ms"
            self._bound("refresh", _shared(refresh_ns // 2), note)

    def _bound(self, what: str, least_ns: int, note: str) -> None:
        self._bounds[what] = (least_ns, note)
        self._set_period()

    def stretch(self, factor: float, note: str) -> None:
        """Read a source less often than it could be, so that all take their share of a core."""
        self._stretch = (factor, note)
        self._set_period()

    def _set_period(self) -> None:
        status = self.status
        least_ns, note = max(self._bounds.values(), default=(0, ""))
        factor, share_note = self._stretch
        bound_ns = max(self._requested_ns, least_ns)
        fast = 2 * self._requested_ns <= _SLOWEST_NS
        longest_ns = max(2 * bound_ns, _SLOWEST_NS) if fast else 4 * bound_ns
        stretched_ns = min(round(bound_ns * factor), longest_ns)
        status.period_ns = max(bound_ns, stretched_ns)
        status.notes.pop("period", None)
        notes = [note] if least_ns > self._requested_ns else []
        notes += [share_note] if factor > 1 else []
        if notes:
            why = " and ".join(notes)
            status.notes["period"] = f"slowed down from {status.requested_hz:g} Hz: {why}"

    def summary(self) -> SourceStatus:
        status = self.status
        status.samples_count = sum(part.samples_count for part in self.parts)
        status.elapsed_ns = sum(part.last_ns - part.first_ns for part in self.parts)
        status.tell(self._jitter, self._call)
        return status

    def blocked(self, now_ns: int) -> dict[str, str]:
        """Return what does not answer now: ``table[part]`` → since when."""
        return {
            f"{table}[{part.label}]": _does_not_answer(for_ns)
            for part in self.parts
            if (for_ns := part.blocks(now_ns)) is not None
            for table in self.source.tables
        }


def _shared(period_ns: int) -> int:
    """Return the next longer period that divides the longest, so that wake-ups are shared."""
    return _SLOWEST_NS // max(_SLOWEST_NS // max(period_ns, 1), 1)


def _does_not_answer(for_ns: int) -> str:
    return f"a call of the driver has not returned for {for_ns / 1e9:.1f} s"


def _note_blocked(status: SourceStatus, label: str, for_ns: int) -> None:
    status.notes.setdefault(
        f"blocked {label}",
        f"{label} blocked for more than {for_ns / 1e9:.1f} s; a separate thread reads it from now "
        f"on",
    )


WATCH_S = 1.0
"""Time between looks for a call that blocks; each costs a wake-up."""
_STATUS_FLUSHES = 5
"""The status is written with every fifth flush: replacing a file costs more than the rows."""


class Sampler:
    """Reads sources at their rates and writes their rows and status, in whichever process.

    Args:
        cpu_ratio: share of a core that the process may take; all are read less often to keep it.
    """

    def __init__(
        self,
        collector: str,
        directory: Path,
        sources: Iterable[tuple[Source, float]],
        clock: SystemClock,
        flush_ns: int = 1_000_000_000,
        *,
        cpu_ratio: float | None = None,
    ) -> None:
        self.clock = clock
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self._directory = directory
        self._flush_ns = flush_ns
        self._pending: dict[str, list[tuple[Any, ...]]] = {}
        self._writers: dict[str, StreamWriter] = {}
        self._elsewhere: set[str] = set()
        self._absent: dict[str, str] = {}
        """Tables that are not written, and why; sources say the rest themselves."""
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._stuck = False
        self._flushes = 0
        self.status = SamplerStatus(
            collector=collector,
            pid=os.getpid(),
            start_ns=clock.time_ns(),
        )
        opened: list[tuple[Source, float]] = []
        refused: list[str] = []
        for source, hz in sources:
            try:
                source.open()
            except CollectorUnavailable as exc:
                refused.append(f"{source.name}: {exc}")
                self._absent |= dict.fromkeys(source.tables, str(exc))
                continue
            opened.append((source, hz))
            self.status.calls |= call_costs(source, clock)
        if not opened:
            raise CollectorUnavailable("; ".join(refused) or "no source was requested")
        self._start_ns = clock.monotonic_ns()
        self._start_cpu_ns = self.status.startup_cpu_ns = clock.cpu_ns()
        # The first look at the share of a core comes soon: until then all are read as asked.
        first_ns = flush_ns if cpu_ratio is None else flush_ns // 4
        self._flush_at_ns = self._start_ns + first_ns
        self._sources = [source for source, _ in opened]
        # All of them count from one moment: what is due together shares a wake-up of the core.
        self._readers = [Reader(source, hz, self._start_ns) for source, hz in opened]
        self._cpu_ratio = cpu_ratio
        self._stretch = 1.0
        """Factor by which all periods are longer, to take no more than its share of a core."""
        self._excess_s = 0.0
        """CPU time that it took beyond its share, and has not saved since."""
        self._share_from = self._start_ns, self._start_cpu_ns
        """Time and CPU time at the last look at its share of a core."""

    def run(self) -> SamplerStatus:
        """Sample until told to stop; on return all readings are on disk."""
        self._work()
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self.status

    def run_watched(self, leave: Callable[[int], None]) -> SamplerStatus:
        """The same, where a call that blocks keeps no other device or source waiting.

        ``leave`` ends the process with an exit code, when a thread is still inside a call.
        """

        def watch() -> None:
            while not self._ended.wait(WATCH_S):
                with self.lock:
                    if self.status.state != "running":
                        return  # what is stopped no longer says what blocks
                    self._take_over(leave)

        threading.Thread(target=watch, daemon=True, name="watch").start()
        status = self.run()
        if self._stuck:
            leave(0)
        return status

    def _take_over(self, leave: Callable[[int], None]) -> None:
        """Go on in a new thread when the present one is in a reading that blocks."""
        now_ns = self.clock.monotonic_ns()
        for reader in self._readers:
            for part in reader.parts:
                for_ns = part.blocks(now_ns)
                if part.alone or for_ns is None:
                    continue
                part.alone = True  # left to the thread that is in its call
                _note_blocked(reader.status, part.label or "a reading", for_ns)

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
            with self.lock:
                orphaned = getattr(self.clock, "orphaned", False)
                self.status.state = "orphaned" if orphaned else "complete"
            self._stuck = any(part.since_ns for r in self._readers for part in r.parts)
            self.flush()
        except OutputError as exc:
            self._error = exc
            self.status.state = "failed"
            self.status.error = f"{exc}; samples flushed before that are kept"
            # On a full disk this fails too; the parent then reads it from stderr.
            with contextlib.suppress(OutputError):
                self._write_status()
        except Exception as exc:  # noqa: BLE001 - raised where the result is asked for
            self._error = exc
        if not self._stuck:
            # Shutting a library down waits for the call that does not return.
            for source in self._sources:
                source.close()
        for writer in self._writers.values():
            # On a full disk the stream keeps its open end, which readers understand.
            with contextlib.suppress(OSError):
                writer.close()
        self._ended.set()

    def _loop(self) -> tuple[Reader, Part] | None:
        """Take due readings until one blocks, which is returned, or None when told to stop."""
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
                self._keep_share()
                self._flush_at_ns = clock.monotonic_ns() + self._flush_ns

    def _keep_share(self) -> None:
        """Compare the CPU time since the last look with the share of a core that it may take."""
        now = self.clock.monotonic_ns(), self.clock.cpu_ns()
        before, self._share_from = self._share_from, now
        if self._cpu_ratio is None:
            return
        passed_ns = max(now[0] - before[0], 1)
        used_ratio = (now[1] - before[1]) / passed_ns
        # What it took too much is saved in the next seconds, so that the whole run keeps the share.
        excess = self._excess_s + (used_ratio - self._cpu_ratio) * passed_ns / 1e9
        self._excess_s = min(max(excess, 0.0), self._cpu_ratio * _REPAY_S / 2)
        allowed_ratio = self._cpu_ratio - self._excess_s / _REPAY_S
        stretch = self._stretch * used_ratio / allowed_ratio
        self._stretch = min(max(stretch, 1.0), _MOST_STRETCH)
        note = f"the sampler takes at most {percent(self._cpu_ratio, '.0f')} of a core"
        for reader in self._readers:
            if reader.status.requested_hz > _SELDOM_HZ:
                reader.stretch(self._stretch, note)

    def _alone(self, reader: Reader, part: Part) -> None:
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
        for table, times_ns, values in sink.rows:
            row = (*(times_ns or (time_ns, span_ns)), *values)
            self._pending.setdefault(table, []).append(row)

    def flush(self) -> None:
        """Write the rows at hand and the status."""
        with self.lock:
            for table, rows in self._pending.items():
                if rows and self._begun(table):
                    self._write(table, rows)
                rows.clear()
            self._flushes += 1
            if self._flushes % _STATUS_FLUSHES == 1 or self.status.state != "running":
                self._write_status()

    def _write(self, table: str, rows: list[tuple[Any, ...]]) -> None:
        """Write rows; those with a value that the table cannot hold are left out and named."""
        try:
            self._writers[table].write_rows(rows)
        except (ArithmeticError, TypeError, ValueError) as exc:
            if len(rows) == 1:
                self._absent[f"{table}[some rows]"] = (
                    f"a value does not fit the table: {type(exc).__name__}: {exc}"
                )
                return
            for row in rows:
                self._write(table, [row])

    def _begun(self, table: str) -> bool:
        """Begin a table's file, unless the sampler of another collector of the rank has one.

        All read the host's clocks, and two vendors' devices may sit in one host.
        """
        from chopper.storage.streams import StreamWriter

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
                self._absent[table] = "another collector's sampler writes this table"
        return table in self._writers

    def _write_status(self) -> None:
        from chopper.storage.files import encode_json, write_atomic

        status = self.status
        now_ns = self.clock.monotonic_ns()
        status.wall_ns = now_ns - self._start_ns
        status.cpu_ns = self.clock.cpu_ns() - self._start_cpu_ns
        status.files = tuple(sorted(writer.path.name for writer in self._writers.values()))
        readers = self._readers
        status.sources = [reader.summary() for reader in readers]
        status.absent = self._absent.copy()
        for reader in readers:
            status.absent |= {**reader.source.absent, **reader.blocked(now_ns)}
            if isinstance(reader.source, ClockSource):
                status.clock_alignment_error_ns = reader.source.error_ns
        write_atomic(status_file(self._directory, status.collector), encode_json(status))
