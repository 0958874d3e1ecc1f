"""Phases that the program or its trainer names: table ``program_phase``, and spans in the trace."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from chopper.run import StreamWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from chopper._session import Session

_FLUSH_NS = 1_000_000_000
_TRAINING = frozenset(("forward", "recompute", "backward", "optimizer", "data", "between", "other"))
"""Phases of a training step: only a trace shows them."""
_COLUMNS = ("name", "tid", "start_ns", "end_ns")


class OpenPhase:
    """A phase that a thread is inside of."""

    __slots__ = ("name", "span", "start_ns", "thread_id", "tid")

    def __init__(self, name: str, start_ns: int) -> None:
        self.name = name
        self.thread_id = threading.get_ident()
        self.tid = threading.get_native_id()
        self.start_ns = start_ns
        """Start of the time that is not in the table yet."""
        self.span: Any = None
        """Its span in the trace that is being taken."""


class Phase:
    """A ``with`` block of a phase; it may be entered again, also within itself and by threads.

    Args:
        session: the recording; None where there is none.
        name: of the phase.
    """

    def __init__(self, session: Session | None, name: str) -> None:
        self._session = session
        self._name = name
        self._open: list[tuple[int, OpenPhase | None]] = []
        """For each block that was entered, its thread, and what is to be ended with it."""

    def __enter__(self) -> Phase:
        if self._session is not None and not _compiling():
            self._open.append((threading.get_ident(), self._session.begin_phase(self._name)))
        return self

    def __exit__(self, *error: object) -> None:
        if self._session is None or not self._open or _compiling():
            return
        own = [entry for entry in self._open if entry[0] == threading.get_ident()]
        # A generator may be left in another thread than it was entered in.
        entry = (own or self._open)[-1]
        self._open.remove(entry)
        if entry[1] is not None:
            self._session.end_phase(entry[1])


def _compiling() -> bool:
    """Whether torch.compile is looking at this call, which is no time of the program's."""
    torch: Any = sys.modules.get("torch")
    compiler = getattr(torch, "compiler", None)  # None while torch is being imported
    return compiler is not None and bool(compiler.is_compiling())


def _recorded(stack: list[OpenPhase]) -> OpenPhase | None:
    """Return the innermost phase that has rows; those of a training step are in traces only."""
    return next((phase for phase in reversed(stack) if phase.name not in _TRAINING), None)


class PhaseLog:
    """Records the phases of all threads of a process.

    Called with the recording's lock held.

    Args:
        directory: the rank's folder.
        begin_span: begins the span of a phase in this thread's trace and returns it; returns None
            where none is taken.
    """

    def __init__(self, directory: Path, begin_span: Callable[[str], Any]) -> None:
        self._path = directory / "program_phase.arrow"
        self._begin_span = begin_span
        self._writer: StreamWriter | None = None
        self._rows: list[tuple[str, int, int, int]] = []
        self._flushed_ns = 0
        self._stacks: dict[int, list[OpenPhase]] = {}
        """Open phases by thread, outermost first."""
        self._lost_spans: list[Any] = []
        """Spans of lost traces: only the thread that opened them may close them."""

    def current(self) -> str | None:
        """Name of the innermost phase of this thread."""
        stack = self._stacks.get(threading.get_ident())
        return stack[-1].name if stack else None

    def begin(self, name: str) -> OpenPhase | None:
        """Begin a phase in this thread; None when the thread is in one of that name already."""
        stack = self._stacks.setdefault(threading.get_ident(), [])
        if stack and stack[-1].name == name:
            return None
        now_ns = time.time_ns()
        outer = _recorded(stack)
        if outer is not None and name not in _TRAINING:
            self._record(outer, now_ns)
        phase = OpenPhase(name, now_ns)
        stack.append(phase)
        phase.span = self._begin_span(name)
        return phase

    def end(self, phase: OpenPhase) -> None:
        """End a phase; those inside of it that nobody ended end too."""
        stack = self._stacks.get(phase.thread_id, [])
        if phase not in stack:
            return
        now_ns = time.time_ns()
        innermost = _recorded(stack)
        kept, ended = stack[: stack.index(phase)], stack[stack.index(phase) :]
        if innermost is not None and innermost in ended:
            self._record(innermost, now_ns)
            outer = _recorded(kept)
            if outer is not None:
                outer.start_ns = now_ns
        for inner in reversed(ended):
            self._end_span(inner)
        stack[:] = kept
        if not stack:
            del self._stacks[phase.thread_id]
        if now_ns - self._flushed_ns > _FLUSH_NS:
            self.flush()

    def begin_spans(self) -> None:
        """Show the open phases of this thread in the step that begins, which is traced."""
        for phase in self._stacks.get(threading.get_ident(), []):
            phase.span = self._begin_span(phase.name)

    def end_spans(self) -> None:
        """End the spans of this thread, innermost first: the traced step around them ends."""
        for phase in reversed(self._stacks.get(threading.get_ident(), [])):
            self._end_span(phase)

    def lose_spans(self) -> None:
        """Leave the open spans to the thread that began them: its trace is lost."""
        for stack in self._stacks.values():
            for phase in stack:
                self._lost_spans.append(phase.span)
                phase.span = None

    def flush(self) -> None:
        """Write what ended since; the file is there once there is any."""
        self._flushed_ns = time.time_ns()
        rows, self._rows = self._rows, []
        if not rows:
            return
        if self._writer is None:
            self._writer = StreamWriter(self._path, "program_phase")
        self._writer.write(dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True)))

    def close(self) -> None:
        """Record what is open up to now, and end the file.

        Raises:
            OutputError: it cannot be written.
        """
        now_ns = time.time_ns()
        for stack in self._stacks.values():
            innermost = _recorded(stack)
            if innermost is not None:
                self._record(innermost, now_ns)
        self._stacks = {}
        self.flush()
        if self._writer is not None:
            self._writer.close()

    def _record(self, phase: OpenPhase, end_ns: int) -> None:
        if end_ns > phase.start_ns:
            self._rows.append((phase.name, phase.tid, phase.start_ns, end_ns))

    def _end_span(self, phase: OpenPhase) -> None:
        span, phase.span = phase.span, None
        if span is None:
            return
        if phase.thread_id == threading.get_ident():
            span.__exit__(None, None, None)
        else:
            self._lost_spans.append(span)
