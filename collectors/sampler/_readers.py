"""A source while it is read: deadlines, statistics, what fails and what blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from chopper.collectors import _plan
from chopper.collectors.sampler._source import Gone, Part, Sink
from chopper.collectors.sampler._status import Quantiles, SourceStatus

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from chopper.collectors.sampler._clocks import Clock
    from chopper.collectors.sampler._source import Source

# A source that takes more of its period than this is read less often: a sampler must not take a
# core away from the training that it watches.
_CALL_RATIO = 0.05
_CHECK_EVERY = 32
_FAILURES_TO_STOP = 20
BLOCKED_NS = 300_000_000
"""A reading that lasts longer holds up the others no more."""


class RowKeeper(Protocol):
    """Keeps the rows of readings until they are written."""

    clock: Clock
    lock: AbstractContextManager[Any]

    def keep(self, sink: Sink, time_ns: int, span_ns: int) -> None:
        """Keep a reading's rows; called with the lock held."""
        ...


class ReadPart:
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
        """Return how long its reading has lasted, where that is too long."""
        since_ns = self.since_ns
        if since_ns is None or now_ns - since_ns < BLOCKED_NS:
            return None
        return now_ns - since_ns


class Reader:
    """One source with its deadlines and statistics."""

    def __init__(self, source: Source, hz: float, start_ns: int) -> None:
        self.source = source
        parts = getattr(source, "parts", None)
        readable = [Part("", source.sample)] if parts is None else parts()
        self.parts = [ReadPart(part) for part in readable]
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

    def sample(self, rows: RowKeeper) -> ReadPart | None:
        """Take the samples that are due.

        Returns:
            The part that blocked for so long that another thread has taken over; None otherwise.
        """
        clock = rows.clock
        tick_ns = clock.monotonic_ns()
        parts = [part for part in self.parts if part.live and not part.alone]
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

    def sample_part(self, part: ReadPart, rows: RowKeeper, deadline_ns: int) -> bool:
        """Read one part and keep its rows; False when another thread has taken over meanwhile."""
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
            rows.keep(sink, real_before_ns + span_ns // 2, span_ns)
        return True

    def leave_alone(self, part: ReadPart, for_ns: int) -> None:
        """Leave a part that blocks to the thread that is in its call."""
        part.alone = True
        _note_blocked(self.status, part.label or "a reading", for_ns)

    def _fail(self, part: ReadPart, exc: Exception) -> None:
        label = f"{part.label}: " if part.label else ""
        self.status.dropped_count += 1
        if isinstance(exc, Gone):
            part.live = False
            self.status.notes[f"failed {label}"] = f"{label}{exc}"
            return
        part.failures += 1
        reason = f"a reading failed: {type(exc).__name__}: {exc}"
        if part.failures >= _FAILURES_TO_STOP:
            part.live = False
            reason = f"left out after {part.failures} failures in a row: {exc}"
        self.status.notes[f"failed {label}"] = f"{label}{reason}"

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
        """Return what does not answer now: ``table[part]`` → since when."""
        return {
            f"{table}[{part.label}]": _does_not_answer(for_ns)
            for part in self.parts
            if (for_ns := part.blocks(now_ns)) is not None
            for table in self.source.tables
        }


def _does_not_answer(for_ns: int) -> str:
    return f"a call of the driver has not returned for {for_ns / 1e9:.1f} s"


def _note_blocked(status: SourceStatus, label: str, for_ns: int) -> None:
    status.notes.setdefault(
        f"blocked {label}",
        f"{label} blocked for more than {for_ns / 1e9:.1f} s; a thread of its own reads it since",
    )


def slow_down(status: SourceStatus, call_ns: int) -> bool:
    """Read a source less often where one reading takes too much of its period."""
    if call_ns <= _CALL_RATIO * status.period_ns:
        return False
    status.period_ns = int(call_ns / _CALL_RATIO)
    status.notes["period"] = (
        f"slowed down from {status.requested_hz:g} Hz: a reading takes {call_ns / 1e6:.2g} ms"
    )
    return True


class BackgroundReader:
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
        self._ticks = 0

    def start(self, first_ns: int) -> None:
        """Start the thread; its first deadline is told."""
        self._background.start(first_ns)

    def take(self) -> tuple[str, dict[str, Any]] | None:
        """Table and columns of what was read since the last call."""
        columns = self._background.take()
        return None if columns is None else (self._table, columns)

    def watch(self) -> None:
        """Go on with the other devices where one blocks."""
        blocked = self._background.relieve(BLOCKED_NS)
        self._blocked = {
            f"{self._table}[device {device}]": _does_not_answer(for_ns)
            for device, for_ns in blocked
        }
        for device, for_ns in blocked:
            _note_blocked(self.status, f"device {device}", for_ns)

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
            status.notes["ring"] = f"{overflowed} samples were lost: the ring was full"
        if ticks // _CHECK_EVERY > self._ticks // _CHECK_EVERY and slow_down(
            status, status.call_p50_ns or 0
        ):
            self._background.set_period(status.period_ns)
        self._ticks = ticks
        self.source.learn(devices)
        if devices and all(d.lost for d in devices):
            status.notes["lost"] = "; ".join(dict.fromkeys(self.source.absent.values()))
        return status

    def blocked(self, now_ns: int) -> dict[str, str]:
        """Return what does not answer now: ``table[device]`` → since when."""
        del now_ns
        return self._blocked

    def stop(self) -> bool:
        """End the thread; False when it is inside a call that does not return."""
        self.watch()
        return self._background.stop(BLOCKED_NS) == 0
