"""Take traces of windows of steps, within limits; one trace is kept."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from chopper.hardware import environment
from chopper.recording import signals
from chopper.recording.counters import CounterSteps
from chopper.recording.finish import exception_text
from chopper.recording.options import DEFAULT_LIMIT_TEXT, DEFAULT_WINDOWS, Window
from chopper.recording.stack_samples import StackSampler
from chopper.storage import clock
from chopper.storage.streams import StreamWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from chopper.recording.logs import PhaseLog, StepLog
    from chopper.storage.parts import RunWriter

EVENTS = 300_000
"""Events of a trace. The program waits for 3 s, on a core of its own, while so many are written."""
MEMORY_BYTES = 1 << 29
"""Growth of the process while a trace is taken; it takes as much again when it ends."""
SECONDS = 60
_EVENTS_PER_NODE = 12
"""Operators, forward and backward, for each node of autograd's graph."""
_EVENTS_PER_CALL = 6
"""Spans and operators for each call of a module."""
# A loop that never steps would be traced to its end, which may be days away.
_STEPLESS_NS = 60 * 10**9
_STEPLESS_CALLS = 50
_STEPS_AHEAD = 4
"""A window that follows long steps is planned at least so many steps ahead."""
_LONGEST_PERIOD = 32
"""Up to here, such a window holds all steps from one long one to the next."""
_FOLLOW_UNTIL = 4096
_LATEST_STEPS = 16
_ALIKE = 0.9, 1.5
"""Least and greatest of the traced over the latest untraced step time: tracing adds to it."""
_UNEVEN = 2.0
_MOVED_TO = 8
"""A window that was too large goes to a multiple of this: ranks whose first traces ended a step
apart trace the same steps then."""
_LONG_RATIO = 3
_LONG_SHARE = 0.05
_LONG_EXCESS_NS = 500_000_000
_ALIKE_RATIO = 1.5
"""A step is long by ratio, share of the time and excess over the typical one, and those that come
again are alike: a busy machine makes single steps long, too."""
_STEPS_TO_COMPARE = 4


class _Use(NamedTuple):
    events: int
    memory_bytes: int
    seconds: float


class TraceBudget:
    """Estimates what a trace holds while it is taken.

    Kineto does not say how many events it has. They are estimated from autograd's sequence numbers
    and the calls of modules, which are equal on ranks that do the same: so their traces end at the
    same step. The growth of the process counts where these make it plausible, as a program grows
    for reasons of its own, above all in its first step.

    Args:
        limit: multiple of the default limits.
        module_calls: the number of module calls that were annotated so far.
    """

    def __init__(self, limit: float, module_calls: Callable[[], int]) -> None:
        self._limits = _Use(round(EVENTS * limit), round(MEMORY_BYTES * limit), SECONDS * limit)
        self._module_calls = module_calls
        self.limit_text = (
            DEFAULT_LIMIT_TEXT if limit == 1 else f"{limit:g} times {DEFAULT_LIMIT_TEXT}"
        )
        """The limits in words."""
        self._nodes = self._calls = self._rss_bytes = 0
        self._began_s = 0.0
        self._first, self._number = True, 0
        self._before = self._last = _Use(0, 0, 0.0)
        """Use at the end of the last step, and by the last step alone."""

    def begin(self, number: int) -> None:
        """A trace begins in a step.

        The memory and the time of the program's first step say little of later ones.
        """
        self._nodes, self._calls = _nodes(), self._module_calls()
        self._rss_bytes, self._began_s = _rss_bytes(), time.monotonic()
        self._first, self._number = number == 0, number
        self._before = self._last = _Use(0, 0, 0.0)

    def end_step(self, number: int) -> None:
        """While the trace is taken a step ended, and step ``number`` begins."""
        if self._first:
            self._first = False
            self._rss_bytes, self._began_s = _rss_bytes(), time.monotonic()
        used = self._used()
        steps = max(1, number - self._number)
        events, memory_bytes, seconds = (
            now - then for now, then in zip(used, self._before, strict=True)
        )
        self._last = _Use(round(events / steps), round(memory_bytes / steps), seconds / steps)
        self._before, self._number = used, number

    @property
    def step_events(self) -> int:
        """Events of the last step, estimated."""
        return self._last.events

    def reached(self) -> bool:
        """Return whether another step like the last one would go beyond a limit."""
        used, last, limits = self._before, self._last, self._limits
        return (
            used.events + last.events > limits.events
            or (self._plausible(used) and used.memory_bytes + last.memory_bytes > limits[1])
            or used.seconds + last.seconds > limits.seconds
        )

    def exhausted(self) -> str | None:
        """Return the use that is beyond twice its limit, in words; None for none."""
        used = self._used()
        if used.events > 2 * self._limits.events:
            return f"about {used.events:,} events"
        most_bytes = (4 if self._first else 2) * self._limits.memory_bytes
        if self._plausible(used) and used.memory_bytes > most_bytes:
            return f"{used.memory_bytes / 1e9:.1f} GB of memory"
        return None

    def fitting_steps(self) -> int:
        """Return the number of steps like the last one that fit into a trace, at least 1."""
        last = self._last
        if not self._plausible(self._before):
            last = last._replace(memory_bytes=0)
        counts = [limit // use for limit, use in zip(self._limits, last, strict=True) if use > 0]
        return max(1, int(min(counts))) if counts else 1 << 30

    def _used(self) -> _Use:
        nodes, calls = _nodes() - self._nodes, self._module_calls() - self._calls
        return _Use(
            _EVENTS_PER_NODE * nodes + _EVENTS_PER_CALL * calls,
            _rss_bytes() - self._rss_bytes,
            time.monotonic() - self._began_s,
        )

    def _plausible(self, used: _Use) -> bool:
        """Return whether enough operators ran for a trace to explain the process's growth."""
        return 4 * used.events > self._limits.events


def _nodes() -> int:
    """Nodes of autograd's graph that this thread made so far."""
    from torch._C._autograd import _get_sequence_nr

    number: int = _get_sequence_nr()
    return number


def _rss_bytes() -> int:
    """Resident memory of this process; 0 where it is not told."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm", "rb") as f:  # noqa: PTH123 - pathlib costs more than the reading
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


class LongSteps:
    """Finds steps that take much longer than the others and come again at equal distances.

    An evaluation every 50 steps, a rollout before every 16th update, a checkpoint. Only steps that
    take half a second more than the typical one count.
    """

    def __init__(self) -> None:
        self._lengths_ns: deque[int] = deque(maxlen=64)
        """Lengths of the last steps that were not long."""
        self._last: tuple[int, int] | None = None
        """Number and length of the last long step."""

    def ended(self, number: int, length_ns: int) -> tuple[int, int] | None:
        """Note a step that ran at the program's own speed.

        Returns, after the second of two long steps, the one to expect next and their distance,
        unless they take less than 5 % of the time.
        """
        # No median is needed for a step that is no longer than the excess that counts.
        if len(self._lengths_ns) < _STEPS_TO_COMPARE or length_ns < _LONG_EXCESS_NS:
            self._lengths_ns.append(length_ns)
            return None
        typical_ns = statistics.median(self._lengths_ns)
        excess_ns = length_ns - typical_ns
        if length_ns <= _LONG_RATIO * typical_ns or excess_ns < _LONG_EXCESS_NS:
            self._lengths_ns.append(length_ns)
            return None
        before, self._last = self._last, (number, length_ns)
        if before is None:
            return None
        period = number - before[0]
        alike = max(length_ns, before[1]) <= _ALIKE_RATIO * min(length_ns, before[1])
        if period < 2 or not alike or excess_ns < _LONG_SHARE * period * typical_ns:
            return None
        return number + period, period


@dataclass
class _Capture:
    """A window that is being traced, or was."""

    window: Window
    opened_ns: int
    until: int | None = None
    """The first step that ended in another thread, which this trace does not cover."""


class TraceWindows:
    """Takes the traces of one recording.

    Called with the recording's lock held, by the thread that trains except where it says so.
    ``on_overrun`` is called when the trace is to end within the step: ``stop_within_step`` follows.
    Alone, the program has one rank, whose windows no others have to share.
    """

    def __init__(
        self,
        trace: Any,
        windows: tuple[Window, ...],
        part: RunWriter,
        log: StepLog,
        phases: PhaseLog,
        limit: float,
        alone: bool,
        on_overrun: Callable[[], None],
        trained_ids: Collection[int],
        counters: bool = False,
    ) -> None:
        from chopper.recording.annotate import Annotator

        self._trace = trace
        self._stacks: StackSampler | None = None if trace.has_stacks else StackSampler()
        self._windows = windows
        self._part = part
        self._log = log
        self._phases = phases
        self._on_overrun = on_overrun
        self._annotator = Annotator(self.check, self._layers_lost, phases.current, trained_ids)
        self._counters = CounterSteps(trace, part, wanted=counters, alone=alone)
        self._budget = TraceBudget(limit, lambda: self._annotator.calls)
        self._long_steps = LongSteps()
        self._may_follow = alone and windows is DEFAULT_WINDOWS
        """True while the later window may be put where the next long step is expected.

        That is for a program of one rank: several measure other lengths, and could agree on a step
        only by messages that each has before it gets there, which nothing bounds.
        """
        self._moved = False
        """True once a window was put in the place of one that was too large."""
        self._upcoming = deque(windows)
        self._traced_ns: list[int] = []
        """Lengths of the steps that the last trace covers."""
        self._latest_ns: deque[int] = deque(maxlen=_LATEST_STEPS)
        """Lengths of the latest steps without a trace."""
        self._begun = 0
        """Traces that began."""
        self._not_before = 0
        """Step at which a window may begin, after another ended."""
        self._capture: _Capture | None = None
        self._kept: _Capture | None = None
        self._kept_steps = 0
        self.profiled = False
        """True when a trace was being taken during some part of the step that runs."""
        self._span: Any = None
        self._lost_spans: list[Any] = []
        """Spans of lost traces: only the thread that opened them may close them."""

    @property
    def tracing(self) -> bool:
        """True while a trace is being taken."""
        return self._capture is not None

    def step_ended(self) -> tuple[bool, bool]:
        """Return whether the trace covers the step that ends now, and whether one was being taken.

        Call once a step.
        """
        capture = self._capture
        profiled, self.profiled = self.profiled, capture is not None
        if capture is None:
            return False, profiled
        if not self._trace.mine:
            self._note_thread(capture)
        return capture.until is None and self._log.number >= capture.window.start, profiled

    def switch(self) -> bool:
        """Start or end tracing as the step that begins asks; whether anything was done."""
        self._trace.settle()
        number = self._log.number
        if self._capture is not None:
            if not self._trace.mine:
                return False
            self._end_span()
            self._budget.end_step(number)
            if self._stacks is not None:
                self._stacks.step_ended()
            window = self._capture.window
            if number < window.stop and not self._budget.reached():
                return False
            self._keep(self._end_capture())
            self.profiled = False
            self._fit_windows(window)
            # Not even the next window could begin at this point: see TorchTrace.left_open.
            return True
        if self._counters.step is not None:
            self._counters.end()
            return True
        if number < self._not_before:
            return False
        if self._is_free(number) and self._counters.ready():
            self.profiled = self._counters.begin(number)
            return True
        if not self._upcoming:
            return False
        if number >= self._upcoming[0].begin - 1 and self._trace.foreign:
            if number >= self._upcoming[0].begin:
                window = self._upcoming.popleft()
                first, last = window.start, window.stop - 1
                self._part.note("run.profiler_in_use", "not_begun", first=first, last=last)
            return False
        if number >= self._upcoming[0].begin:
            signals.has_traced()
            self._trace.begin()
            # Not before: a span that another thread opens outside of the trace fails at its end.
            self._annotator.install()
            if self._stacks is not None:
                self._stacks.begin()
            self._traced_ns = []
            self._capture = _Capture(self._upcoming.popleft(), clock.now_ns())
            self._begun += 1
            self._budget.begin(number)
            self.profiled = True
            self.begin_span()
            return True
        if number == self._upcoming[0].begin - 1 and self._shows_later_steps():
            self._upcoming.clear()
            self._part.note("run.window_kept", step=number - 1)
            return False
        if number == self._upcoming[0].begin - 1:
            signals.has_traced()
            self._trace.prepare()
            return True
        return False

    def _is_free(self, number: int) -> bool:
        """Return whether a trace is kept, and none is to be prepared in this step or the next."""
        following = self._upcoming[0].begin if self._upcoming else number + 3
        return self._kept is not None and number + 2 < following and not self._trace.foreign

    def _shows_later_steps(self) -> bool:
        """Return whether the trace that is kept is whole, and shows what steps are like by now.

        To end a trace stops the program for seconds. Ranks could not agree on it: one rank only.
        """
        first = DEFAULT_WINDOWS[0]
        if not self._may_follow or self._kept is None or len(self._latest_ns) < _LATEST_STEPS:
            return False
        latest_ns = statistics.median(self._latest_ns)
        traced_ns = statistics.median(self._traced_ns or (0,))
        alike = _ALIKE[0] * latest_ns <= traced_ns <= _ALIKE[1] * latest_ns
        is_complete = self._kept.window == first and self._kept_steps == first.stop - first.start
        return is_complete and alike and max(self._traced_ns) <= _UNEVEN * latest_ns

    def note_length(self, number: int, length_ns: int, profiled: bool) -> None:
        """Note how long a step took, and have the later window hold a long one that comes again."""
        if not profiled:
            self._latest_ns.append(length_ns)
            self._follow(number, length_ns)
        elif self._capture is not None and number >= self._capture.window.start:
            self._traced_ns.append(length_ns)

    def _follow(self, number: int, length_ns: int) -> None:
        if not self._may_follow or self._capture is not None or self._log.number >= _FOLLOW_UNTIL:
            return
        expected = self._long_steps.ended(number, length_ns)
        if expected is None or (self._kept is not None and self._trace.left_open):
            return
        following, period = expected
        if following < number + _STEPS_AHEAD:
            following += -(-_STEPS_AHEAD // period) * period
        last = DEFAULT_WINDOWS[-1]
        count = max(period if period <= _LONGEST_PERIOD else 0, last.stop - last.start)
        window = Window(following - 1, following - 1 + count, last.settle)
        planned = window.fitted(max(3, self._budget.fitting_steps()))
        self._may_follow = False
        self._upcoming = deque([planned])
        self._part.note(
            "run.window_follows",
            period=period,
            previous=number - period,
            step=number,
            steps=_steps_text(planned.start, planned.stop),
        )

    def begin_span(self) -> None:
        """Show the step that begins to other readers of the trace; ours read step.arrow."""
        if self._capture is not None and self._span is None and self._trace.mine:
            from torch.autograd.profiler import record_function

            name = f"ProfilerStep#{self._log.number}"
            self._span = record_function(name)
            before_ns = clock.now_ns()
            self._span.__enter__()
            self._trace.marks.append((name, before_ns, clock.now_ns()))
            self._phases.begin_spans()

    def begin_phase(self, name: str) -> Any:
        """Begin the span of a phase and return it; None where this thread is not traced."""
        if self._capture is None or not self._trace.mine:
            return None
        from torch.autograd.profiler import record_function

        from chopper.recording.annotate import PHASE_PREFIX

        span: Any = record_function(PHASE_PREFIX + name)
        span.__enter__()
        return span

    def start_over(self) -> bool:
        """Count anew: the steps found so far, if any, were parts of the first one.

        Returns:
            Whether the windows that had begun are counted anew, too.
        """
        self._counters.abort()
        begun = self._begun
        self.profiled = begun > 0
        if self._capture is not None and (begun > 1 or not self._trace.mine):
            if self._trace.mine:
                self._keep(self._end_capture())
                self._not_before = 2  # two traces never meet at one point
            begun = len(self._windows)
        elif self._capture is not None:
            begun = 0
        lost = self._capture is not None or (self._kept is not None and self._trace.left_open)
        recounts = begun > 0 and not lost
        if recounts:
            self._upcoming = deque(w for w in self._windows if w.stop > 1)
            self._begun = 0
        self._kept_steps = 0
        if self._part.manifest.traced_steps is not None:
            self._part.manifest.traced_steps = (0, 0)
        return recounts

    def finish(self) -> None:
        """End what runs, and keep it unless the trace on disk is better."""
        self._counters.abort()
        if self._capture is None:
            return
        if not self._trace.mine:
            self._trace.abandon()
            self._lose()
            self._part.note("run.trace_abandoned")
            return
        capture = self._end_capture()
        whole_steps = self._log.number - capture.window.start
        if self._kept is None or whole_steps >= self._kept_steps:
            self._keep(capture)
        else:
            self._drop()

    def close(self) -> None:
        """At the recording's end."""
        self._trace.settle()
        if self._upcoming:  # the program did not get there
            findings = self._part.manifest.findings
            findings[:] = [f for f in findings if f.code != "run.window_follows"]
        try:
            self.finish()
            self._counters.close(self._log.number)
        finally:
            self._end_watching()
        if self._part.manifest.traces:
            began_ns = time.perf_counter_ns()
            self._part.manifest.traces = (self._trace.compress(),)
            self._add_export_ns(began_ns)

    def give_way(self, lost: bool) -> None:
        """The program's own profiler begins: the trace that is taken ends here.

        It is lost where that begins in another thread, this one, which cannot end it.
        """
        self._counters.abort()
        if self._capture is None:
            return
        number = self._log.number
        if lost:
            self._lose()
            self._part.note("run.profiler_in_use", "lost", step=number)
            return
        self.finish()
        self._part.note("run.profiler_in_use", step=number)

    def before_fork(self) -> None:
        """A process is about to be forked from this thread: no trace survives in it."""
        if not signals.forks_loader_worker():
            self._counters.abort()
        if self._capture is None or not self._trace.mine or signals.forks_loader_worker():
            return
        self.finish()
        self._part.note("run.forked", step=self._log.number)

    def enter_root(self, module: Any) -> None:
        """Annotate a forward that began before the recording did, and is still running."""
        if self._capture is not None:
            self._annotator.enter(module)

    def leave_root(self, module: Any) -> None:
        """End what ``enter_root`` annotated."""
        self._annotator.leave(module)

    def stop_within_step(self) -> None:
        """End the trace of a step that is too large, or of a loop that never steps."""
        if self._capture is None:
            return
        number, window, excess = self._log.number, self._capture.window, self._budget.exhausted()
        capture = self._end_capture()
        self._upcoming.clear()
        self._keep(capture)
        if excess is None:
            self._part.note("run.no_steps", "trace_stopped")
            return
        again = ""
        if number <= 1 and not self._moved and not self._trace.left_open:
            # In the first steps much is done that later ones do not do.
            self._moved = True
            self._upcoming.append(Window(_MOVED_TO, _MOVED_TO + 1, settle=0))
            again = f"; step {_MOVED_TO} is traced in its place, if the program gets there"
        complete_steps = (
            f"complete in it: {_steps_text(window.start, number)}"
            if number > window.start
            else "it holds no complete step, only the beginning of one"
        )
        self._part.note(
            "run.trace_limited",
            "within_step",
            step=number,
            excess=excess,
            complete=complete_steps,
            again=again,
            limit=self._budget.limit_text,
        )

    def _fit_windows(self, window: Window) -> None:
        """A trace ended: plan the later ones so that they fit into the limits.

        All ranks that do the same use the same number of events, and move to the same step.
        """
        number, fitting = self._log.number, self._budget.fitting_steps()
        planned: list[Window] = []
        if number < window.stop:
            if number > window.start or self._moved or self._trace.left_open:
                covered = _steps_text(min(window.start, number - 1), number)
            else:
                self._moved = True
                begin = _MOVED_TO * -(-(number + 1) // _MOVED_TO)
                planned.append(window.moved(begin).fitted(fitting))
                later = _steps_text(planned[0].start, planned[0].stop)
                covered = f"{later}, if the program gets there"
            self._part.note(
                "run.trace_limited",
                covered=covered,
                wanted=_steps_text(window.start, window.stop),
                step_events=self._budget.step_events,
                limit=self._budget.limit_text,
            )
        for upcoming in self._upcoming:
            fitted = upcoming.fitted(fitting)
            if fitted.begin > (planned[-1].stop if planned else number):
                planned.append(fitted)
        self._upcoming = deque(planned)

    def give_up(self) -> None:
        """Let go of everything, whatever state it is in."""
        self._counters.abort()
        self._end_watching()
        self._end_span()
        self._trace.end()
        self._trace.drop()

    def forked(self) -> None:
        """In a forked child, which does not record."""
        tracing = self._capture is not None or self._counters.step is not None
        self._capture = self._counters.step = None
        self._end_watching()
        if tracing and self._trace.mine:
            # A worker of a data loader: nothing it does belongs to the trace, which cannot be ended
            # in here, as Kineto's threads are not.
            import torch

            self._trace.forget()
            enable: Any = getattr(torch.autograd, "_enable_record_function", None)
            if enable is not None:
                enable(False)

    def _layers_lost(self, error: Exception) -> None:
        self._part.note("run.layers_lost", step=self._log.number, error=exception_text(error))

    def _note_thread(self, capture: _Capture) -> None:
        """A step ended in a thread in which nothing is traced."""
        number = self._log.number
        if capture.until is None:
            capture.until = number
        self._part.note("run.other_thread", step=number)
        if number + 1 >= capture.window.stop:
            self._annotator.remove()  # only its own thread can end the trace, if it ever does

    def check(self, forwards: int = 0) -> None:
        """End the trace if it has grown too large, or no step ends in it.

        Called after each backward pass, and before each outermost forward, with their number.
        """
        capture = self._capture
        if capture is None or not self._trace.mine:
            return
        stepless = (
            forwards > _STEPLESS_CALLS
            and self._log.number == capture.window.begin
            and clock.now_ns() - capture.opened_ns > _STEPLESS_NS
        )
        if stepless or self._budget.exhausted() is not None:
            self._on_overrun()

    def _lose(self) -> None:
        """Forget the trace that is taken; its spans are left to its own thread."""
        self._capture = None
        self._end_watching()
        self._phases.lose_spans()
        if self._span is not None:
            self._lost_spans.append(self._span)
            self._span = None

    def _end_watching(self) -> None:
        self._annotator.remove()
        if self._stacks is not None:
            self._stacks.end()

    def _end_span(self) -> None:
        self._phases.end_spans()
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)

    def _end_capture(self) -> _Capture:
        capture, self._capture = self._capture, None
        assert capture is not None
        self._end_span()
        self._end_watching()
        self._trace.end()
        return capture

    def _keep(self, capture: _Capture) -> None:
        """Write a trace, in place of the one that was kept before."""
        began_ns = time.perf_counter_ns()
        written = self._trace.export()
        if written is None:
            self._trace_again(capture)
            return
        window, log, manifest = capture.window, self._log, self._part.manifest
        stop = log.number if capture.until is None else capture.until
        first = window.start if stop > window.start else min(window.begin, stop)
        self._kept, self._kept_steps = capture, stop - first
        samples = [] if self._stacks is None else self._stacks.take_rows()
        tables: tuple[tuple[str, Sequence[tuple[Any, ...]]], ...] = (
            ("layer_sequence", self._annotator.take_rows()),
            ("python_sample", samples),
        )
        for name, rows in tables:
            path = self._part.directory / f"{name}.arrow"
            with contextlib.closing(StreamWriter(path, name)) as writer:
                writer.write_rows(rows)
        if self._upcoming and self._trace.left_open:
            self._upcoming.clear()
            self._part.note("run.window_skipped")
        manifest.traces = (written.name,)
        manifest.traced_steps = (first, stop)
        manifest.steps_source = log.source
        environment.describe(manifest)
        log.flush()
        self._add_export_ns(began_ns)
        self._part.save()

    def _drop(self) -> None:
        """Forget a trace that was ended."""
        self._trace.drop()
        self._annotator.take_rows()

    def _trace_again(self, capture: _Capture) -> None:
        """Forget a trace whose times are of no use, and plan another one where that is possible."""
        self._drop()
        window = capture.window
        again = ""
        if self._trace.left_open:
            self._upcoming.clear()
        else:
            self._upcoming.appendleft(window.moved(self._log.number + 1))
            again = "; others are traced in their place, if the program gets there"
        steps = _steps_text(window.start, window.stop)
        self._part.note("run.trace_abandoned", "clock_set", steps=steps, again=again)

    def _add_export_ns(self, began_ns: int) -> None:
        overhead = self._part.manifest.overhead
        assert overhead is not None
        overhead.export_ns = (overhead.export_ns or 0) + (time.perf_counter_ns() - began_ns)


def _steps_text(start: int, stop: int) -> str:
    return f"step {start}" if stop - start == 1 else f"steps {start} to {stop - 1}"
