"""The sampler's loop: reads what is due, flushes rows and status, goes on where a call blocks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from chopper.collectors import _plan
from chopper.collectors.sampler._clocks import ClockSource
from chopper.collectors.sampler._costs import call_costs
from chopper.collectors.sampler._readers import BackgroundReader, Reader
from chopper.collectors.sampler._status import SamplerStatus, status_file
from chopper.errors import CollectorUnavailable, OutputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from chopper.collectors.sampler._clocks import Clock
    from chopper.collectors.sampler._readers import ReadPart
    from chopper.collectors.sampler._source import Sink, Source
    from chopper.storage.streams import StreamWriter

WATCH_S = 1.0
"""Time between looks for a call that blocks; each costs a wake-up."""
_LEAD_NS = 2_000_000
"""From when all threads are ready to their first deadline."""
_STATUS_FLUSHES = 5
"""The status is written with every fifth flush: replacing a file costs more than the rows."""


class Sampler:
    """Reads sources at their rates and writes their rows, in whichever process it runs in.

    Args:
        directory: where ``<table>.arrow`` and its status file go.
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
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self._directory = directory
        self._flush_ns = flush_ns
        self._pending: dict[str, list[tuple[Any, ...]]] = {}
        self._writers: dict[str, StreamWriter] = {}
        self._elsewhere: set[str] = set()
        self._told: set[str] = set()
        """Tables and columns that sources said to be absent, at the last flush."""
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
                for table in source.tables:
                    self.status.absent[table] = str(exc)
                continue
            opened.append((source, hz))
            self.status.calls |= call_costs(source, clock)
        if not opened:
            raise CollectorUnavailable("; ".join(refused) or "no source was asked for")
        self._start_ns = clock.monotonic_ns()
        self._start_cpu_ns = self.status.startup_cpu_ns = clock.cpu_ns()
        self._flush_at_ns = self._start_ns + flush_ns
        self._sources = [source for source, _ in opened]
        self._readers: list[Reader] = []
        self._background: list[BackgroundReader] = []
        for source, hz in opened:
            plan = getattr(source, "plan", None) if native and _plan.AVAILABLE else None
            if plan is None:
                self._readers.append(Reader(source, hz, self._start_ns))
            else:
                self._background.append(BackgroundReader(source, plan(), hz))
        # All of them count from one moment: what is due together shares a wake-up of the core.
        first_ns = time.monotonic_ns() + _LEAD_NS
        for background in self._background:
            background.start(first_ns)

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
            while not self._ended.wait(WATCH_S):
                with self.lock:
                    if self.status.state != "running":
                        return  # what is stopped no longer says what blocks
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
            with self.lock:
                orphaned = getattr(clock, "orphaned", False)
                self.status.state = "orphaned" if orphaned else "complete"
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

    def _loop(self) -> tuple[Reader, ReadPart] | None:
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

    def _alone(self, reader: Reader, part: ReadPart) -> None:
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
                self.status.absent[table] = "another collector's sampler writes this table"
        return table in self._writers

    def _write_status(self) -> None:
        from chopper.storage.files import encode_json, write_atomic

        status = self.status
        now_ns = self.clock.monotonic_ns()
        status.wall_ns = now_ns - self._start_ns
        status.cpu_ns = self.clock.cpu_ns() - self._start_cpu_ns
        status.files = tuple(sorted(writer.path.name for writer in self._writers.values()))
        readers: list[Reader | BackgroundReader] = [*self._background, *self._readers]
        status.sources = [reader.summary() for reader in readers]
        absent = {k: v for k, v in status.absent.items() if k not in self._told}
        self._told.clear()
        for reader in readers:
            absent_now = {**reader.source.absent, **reader.blocked(now_ns)}
            self._told.update(absent_now)
            absent |= absent_now
            if isinstance(reader.source, ClockSource):
                status.clock_alignment_error_ns = reader.source.error_ns
        status.absent = absent
        write_atomic(status_file(self._directory, status.collector), encode_json(status))

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
