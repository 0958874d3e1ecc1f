"""Steps and phases as they are recorded: tables ``step``, ``step_work`` and ``program_phase``.

Phases that the program or its trainer names are spans in the trace, too.
"""

from __future__ import annotations

import statistics
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

from chopper.storage import clock
from chopper.storage.manifest import Overhead
from chopper.storage.streams import RowLog

Source = Literal["mark", "optimizer", "backward"]
_MEDIAN_OF = 4096
_TRAINING = frozenset(("forward", "recompute", "backward", "optimizer", "data", "between", "other"))
"""Phases of a training step: only a trace shows them."""


class OpenPhase:
    """A phase that a thread, a coroutine or a generator is inside of."""

    __slots__ = ("ended", "log", "name", "outer", "span", "span_thread", "start_ns", "tid")

    def __init__(self, log: PhaseLog, name: str, outer: OpenPhase | None) -> None:
        self.log = log
        self.name = name
        self.outer = outer
        self.tid = threading.get_native_id()
        self.ended = False
        self.span: Any = None
        """Its span in the trace that is being taken."""
        self.span_thread = 0
        """The thread of the span, which alone can end it."""
        self.start_ns = clock.now_ns()


class Phase:
    """A ``with`` block of a phase; it may be entered again, also within itself and by threads.

    The recorder is the session, whose ``begin_phase`` and ``end_phase`` never raise.
    """

    def __init__(self, recorder: Any, name: str) -> None:
        self._recorder = recorder
        self._name = name
        self._open: list[OpenPhase] = []
        """One for each block that was entered while something was recorded."""

    def __enter__(self) -> Phase:
        if self._recorder is not None and not compiling():
            phase = self._recorder.begin_phase(self._name)
            if phase is not None:
                self._open.append(phase)
        return self

    def __exit__(self, *error: object) -> None:
        if self._recorder is not None and self._open and not compiling():
            self._recorder.end_phase(self._open)


def compiling() -> bool:
    """Return whether torch.compile is tracing this call; it does not run the program then."""
    torch: Any = sys.modules.get("torch")
    compiler = getattr(torch, "compiler", None)  # None while torch is being imported
    return compiler is not None and bool(compiler.is_compiling())


_innermost: ContextVar[OpenPhase | None] = ContextVar("chopper_phase", default=None)
"""Phase that the running code entered last: each thread and each coroutine has its own."""


class PhaseLog:
    """Records the phases of all threads of a process.

    A phase lasts from its entry to its end, whatever else is entered and left meanwhile: coroutines
    take turns in one thread, and a generator may be suspended within a phase, in which its caller
    then is as well. Called with the recording's lock held.

    Args:
        begin_span: begins the span of a phase in this thread's trace and returns it; returns None
            where none is taken.
    """

    def __init__(self, directory: Path, begin_span: Callable[[str], Any]) -> None:
        self._begin_span = begin_span
        self._over = RowLog(directory / "program_phase.arrow")
        self._open: dict[OpenPhase, None] = {}
        """Phases that have not ended, in the order of their entry."""
        self._shown: list[OpenPhase] = []
        """Those with a span, outermost first."""
        self._lost_spans: list[Any] = []
        """Spans of lost traces: only the thread that opened them may close them."""

    def current(self) -> str | None:
        """Name of the innermost phase of the running code."""
        phase = self._current()
        return phase.name if phase is not None else None

    def _current(self) -> OpenPhase | None:
        phase = _innermost.get()
        while phase is not None and (phase.ended or phase.log is not self):
            phase = phase.outer
        return phase

    def begin(self, name: str) -> OpenPhase:
        """Begin a phase of the running code."""
        phase = OpenPhase(self, str(name), self._current())
        self._open[phase] = None
        _innermost.set(phase)
        self._show(phase)
        return phase

    def end(self, entered: list[OpenPhase]) -> OpenPhase:
        """End the innermost of the phases that one block entered, and drop it from them.

        It is the latest one where the running code is in none of them: a generator may be closed
        anywhere.
        """
        phase = self._current()
        while phase is not None and phase not in entered:
            phase = phase.outer
        phase = phase or entered[-1]
        entered.remove(phase)
        if phase.ended:
            return phase
        now_ns = clock.now_ns()
        self._end(phase, now_ns)
        self._hide(phase)
        if _innermost.get() is phase:
            _innermost.set(phase.outer)
        if self._over.due(now_ns):
            self.flush()
        return phase

    def record(self, name: str, tid: int, start_ns: int, end_ns: int) -> None:
        """Record a phase that is over."""
        self._over.rows.append((name, tid, start_ns, end_ns))

    def begin_spans(self) -> None:
        """Show the phases of the running code in the step that begins, which is traced."""
        phases = []
        phase = self._current()
        while phase is not None:
            phases.append(phase)
            phase = phase.outer
        for phase in reversed(phases):
            if not phase.ended:
                self._show(phase)

    def end_spans(self) -> None:
        """End the spans, innermost first: the traced step around them ends."""
        while self._shown:
            self._hide(self._shown[-1])

    def lose_spans(self) -> None:
        """Leave the open spans to the thread that began them: its trace is lost."""
        for phase in self._shown:
            self._lost_spans.append(phase.span)
            phase.span = None
        self._shown = []

    def flush(self) -> None:
        """Write what ended since."""
        self._over.flush(clock.now_ns())

    def close(self) -> None:
        """Record the open phases up to now, and close the file."""
        now_ns = clock.now_ns()
        for phase in tuple(self._open):
            self._end(phase, now_ns)
        self._over.close()

    def _end(self, phase: OpenPhase, end_ns: int) -> None:
        phase.ended = True
        self._open.pop(phase, None)
        # What calls itself is one phase, until the outer call ends.
        if phase.name not in _TRAINING and not _repeats(phase):
            self.record(phase.name, phase.tid, phase.start_ns, end_ns)

    def _show(self, phase: OpenPhase) -> None:
        if not _repeats(phase):
            phase.span = self._begin_span(phase.name)
            if phase.span is not None:
                phase.span_thread = threading.get_ident()
                self._shown.append(phase)

    def _hide(self, phase: OpenPhase) -> None:
        """End a span. Spans nest: those inside of it end as well, and begin anew."""
        if phase not in self._shown:
            return
        if phase.span_thread != threading.get_ident():
            self._shown.remove(phase)
            self._lost_spans.append(phase.span)
            phase.span = None
            return
        inner: list[OpenPhase] = []
        while phase.span is not None:
            last = self._shown.pop()
            span, last.span = last.span, None
            span.__exit__(None, None, None)
            inner.append(last)
        for last in reversed(inner[:-1]):
            self._show(last)


def _repeats(phase: OpenPhase) -> bool:
    """Return whether a phase is within another of its name in the same thread."""
    outer = phase.outer
    return (
        outer is not None
        and not outer.ended
        and outer.name == phase.name
        and outer.tid == phase.tid
    )


class StepLog:
    """Steps as they end, flushed about once a second."""

    def __init__(self, directory: Path) -> None:
        self.number = 0
        """The step that runs."""
        self.source: Source | None = None
        """The sign that ends steps; None before the first."""
        self.optimizer = 1
        """Number of the kind of optimizer that the step began with, in order of appearance."""
        self._target = directory / "step.arrow"
        self._steps = RowLog(self._target)
        self._steps.open()
        self._start_ns = self._first_ns = 0
        self._micro_steps_ns: list[int] | None = None
        """Times of micro-steps in steps that have not ended; None until a trainer tells of one."""
        self._counted = 0
        """Micro-steps of the steps that ended."""
        self.written = 0
        """Steps that are on disk, from the first on."""
        self._work = RowLog(directory / "step_work.arrow")
        self.own_costs_ns: deque[int] = deque(maxlen=_MEDIAN_OF)
        """Time that chopper's own code took within the last steps."""
        self._durations: dict[bool, deque[int]] = {
            True: deque(maxlen=_MEDIAN_OF),
            False: deque(maxlen=_MEDIAN_OF),
        }

    def begin(self) -> None:
        """The first step begins now."""
        self._start_ns = self._first_ns = clock.now_ns()

    def end(self, end_ns: int, *, traced: bool, profiled: bool, tokens: int | None = None) -> int:
        """End the step that runs; the next one begins there. Return its length, in ns.

        Traced: a trace covers it, which may be lost or replaced yet: the manifest's
        ``traced_steps`` says which steps the trace that is kept covers. Profiled: a trace was being
        taken during some part of it.
        """
        assert self.source is not None
        length_ns = end_ns - self._start_ns
        if tokens is not None:
            self._work.rows.append(
                (self._start_ns + length_ns // 2, length_ns, self.number, tokens)
            )
        source: str = self.source
        if source == "optimizer" and self.optimizer > 1:
            source = f"{source} {self.optimizer}"
        row = (self.number, self._start_ns, end_ns, source, traced, profiled)
        self._steps.rows.append((*row, self._micro_steps(end_ns)))
        if traced or (not profiled and self.number > 1):
            self._durations[traced].append(length_ns)
        self.number += 1
        self._start_ns = end_ns
        return length_ns

    def micro_step(self) -> None:
        """Note that a trainer begins a backward pass: a step has one for each micro-step."""
        if self._micro_steps_ns is None:
            self._micro_steps_ns = []
        self._micro_steps_ns.append(clock.now_ns())

    def _micro_steps(self, end_ns: int) -> int | None:
        """Count those of the step that ends; an end that became certain late leaves others."""
        times_ns = self._micro_steps_ns
        if times_ns is None:
            return None
        self._micro_steps_ns = [time_ns for time_ns in times_ns if time_ns > end_ns]
        count = len(times_ns) - len(self._micro_steps_ns)
        self._counted += count
        return count

    def skip(self) -> None:
        """Begin the step now; the time since the last one ended belongs to none."""
        self._start_ns = clock.now_ns()

    def due(self, now_ns: int) -> bool:
        """Return whether it is time to flush, and steps that ended are not on disk."""
        return bool(self._steps.rows) and self._steps.due(now_ns)

    def flush(self) -> None:
        """Write the steps that ended since the last call."""
        now_ns = clock.now_ns()
        count = self._steps.flush(now_ns)
        if count and self._steps.path != self._target:
            self._steps.path = self._steps.path.replace(self._target)
        self.written += count
        self._work.flush(now_ns)

    def restart(self) -> None:
        """Forget all steps: they were parts of the first one, which runs still."""
        self.number = self.written = 0
        self._start_ns = self._first_ns
        if self._micro_steps_ns is not None:
            self._micro_steps_ns += [self._first_ns] * self._counted
            self._counted = 0
        self._steps.rows.clear()
        self._steps.close()
        # Replaces the file that is there once steps are in it.
        self._steps = RowLog(self._target.with_name(".step.arrow.tmp"), "step")

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self.flush()
        finally:
            self._steps.close()
            self._work.close()

    def summarize(self, overhead: Overhead) -> None:
        """Say what recording cost the steps."""
        overhead.per_step_ns = _median(self.own_costs_ns)
        overhead.traced_step_ns = _median(self._durations[True])
        overhead.untraced_step_ns = _median(self._durations[False])


def _median(values: deque[int]) -> int | None:
    return round(statistics.median(values)) if values else None
