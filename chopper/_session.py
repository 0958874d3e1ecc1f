"""One recording in one process: collectors, steps, the trace's windows, the manifest part.

Everything the program calls goes through ``_harmless``: whatever fails in here is said in one line
on stderr and in the manifest, recording stops, and the program goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

from chopper import _claim, _environment
from chopper import manifest as m
from chopper._signals import TerminationGuard, no_interrupts
from chopper._steps import OptimizerCycle, Window, WindowSpec, parse_windows
from chopper.errors import ChopperError, UsageError
from chopper.run import RunWriter, StreamWriter, finalize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from chopper.collectors.base import Collector, CollectorContext

_Row = tuple[int, int, int, str, bool]
"""Of the table ``step``."""
Status = Literal["complete", "interrupted", "failed"]
_P = ParamSpec("_P")
_T = TypeVar("_T")

_FLUSH_NS = 1_000_000_000
_MEDIAN_OF = 4096
_TRACE = "torch_trace"
# A loop that never steps would be traced to its end, which may be days away.
_STEPLESS_NS = 60 * 10**9
_STEPLESS_CALLS = 50

_active: Session | None = None
_traced_pids: set[int] = set()
"""This process, and those it was forked from, where they traced."""


def active() -> Session | None:
    """The recording of this process, None when there is none."""
    return _active


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to record, and where."""

    output: str | Path | None = None
    """Run directory; None for ``CHOPPER_OUTPUT``, else ``runs/<time>``."""
    collect: tuple[str, ...] | None = None
    """Names of collectors; None for the default ones."""
    windows: tuple[Window, ...] = field(default_factory=lambda: parse_windows(None))
    """Steps to trace."""
    shapes: bool = True
    stacks: bool = False
    memory: bool = False
    trace: bool = True
    name: str | None = None
    force: bool = False
    automatic: bool = False
    """Started by ``chopper record``'s hook: a profile in the program's own code takes part in it
    instead of being a second one."""


def make_options(
    *, collect: Any, steps: WindowSpec, output: str | Path | None, **rest: Any
) -> Options:
    """Check what the user gave.

    Raises:
        UsageError: an unknown collector, or steps that cannot be traced.
    """
    from chopper import registry

    if isinstance(collect, str):
        collect = [part.strip() for part in collect.split(",") if part.strip()]
    if collect is not None:
        for name in collect:
            registry.origin(name)
        collect = tuple(dict.fromkeys(collect))
    return Options(output=output, collect=collect, windows=parse_windows(steps), **rest)


def say(message: str) -> None:
    """One line on stderr: the only way to reach the user of a program that must go on."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"chopper: {message}\n")


def _reason(exc: BaseException) -> str:
    kind = type(exc).__name__
    try:
        text = str(exc).strip().splitlines()
    except Exception:  # noqa: BLE001 - the program's own class, which may do anything
        return kind
    if isinstance(exc, ChopperError):
        return text[0] if text else kind
    return f"{kind}: {text[0]}" if text else kind


def _harmless(
    method: Callable[Concatenate[Session, _P], _T],
) -> Callable[Concatenate[Session, _P], _T | None]:
    """Let no failure of the recording reach the program."""

    def guarded(self: Session, /, *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        try:
            return method(self, *args, **kwargs)
        except Exception as exc:  # noqa: BLE001 - the profiler never changes the program
            self._give_up(_reason(exc))
            return None

    functools.update_wrapper(guarded, method)
    return guarded


@dataclass
class _Capture:
    """A window that is being traced, or was."""

    window: Window
    opened_ns: int
    until: int | None = None
    """The first step that ended in another thread, which this trace does not cover."""
    rows: dict[str, list[Any]] = field(default_factory=dict)
    """``layer_sequence``."""


class Session:
    """A recording from ``start`` to ``close``.

    Args:
        options: what to record.
        path: the run directory.
        info: which rank this is.
    """

    def __init__(self, options: Options, path: Path, info: _environment.RankInfo) -> None:
        self.options = options
        self.path = path
        self.info = info
        self.recording = False
        self.source: Literal["mark", "optimizer"] | None = None
        self.number = 0
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._busy = False
        self._closing = False
        self._doomed = False
        self._collectors: list[Collector] = []
        self._on_step: list[tuple[str, Callable[[int], None]]] = []
        self._reports: dict[str, m.CollectorReport] = {}
        self._overhead = m.Overhead()
        self._cycle = OptimizerCycle()
        self._optimizer_handle: Any = None
        self._trace: Any = None
        self._annotator: Any = None
        self._upcoming = deque(options.windows)
        self._not_before = 0
        """Step at which a window may begin, after another ended."""
        self._noted: set[str] = set()
        self._saw_torch = False
        self._capture: _Capture | None = None
        self._kept: _Capture | None = None
        self._kept_steps = 0
        self._span: Any = None
        self._writer: StreamWriter | None = None
        self._rows: list[_Row] = []
        self._history: list[_Row] = []
        self._flushed_ns = 0
        self._own_ns: deque[int] = deque(maxlen=_MEDIAN_OF)
        self._durations: dict[bool, deque[int]] = {
            True: deque(maxlen=_MEDIAN_OF),
            False: deque(maxlen=_MEDIAN_OF),
        }
        self._guard = TerminationGuard(self._terminated)

    @property
    def tracing(self) -> bool:
        """Whether a trace is being taken."""
        return self._capture is not None

    # -- start --------------------------------------------------------------------------------

    @_harmless
    def start(self) -> None:
        """Claim the rank's folder, start the collectors, begin the first step."""
        began_ns = time.perf_counter_ns()
        finding = _claim.claim(
            self.path, self.info.rank, self.info.world_size, force=self.options.force
        )
        self._part = RunWriter(self.path, self.info.rank)
        self._manifest = self._part.manifest
        self._describe_start()
        if finding is not None:
            self._manifest.findings.append(finding)
        self._writer = StreamWriter(self._part.directory / "step.arrow", "step")
        self.recording = True
        global _active
        _active = self
        self._start_collectors()
        self._hook_optimizers()
        self._guard.arm()
        atexit.register(self.close)
        # Multiprocessing's children leave without atexit.
        if "multiprocessing.util" in sys.modules and _in_multiprocessing_child():
            from multiprocessing.util import Finalize

            Finalize(None, self.close, exitpriority=100)
        if self._trace is None:
            self._upcoming.clear()
        self._save()
        self._overhead.setup_ns = time.perf_counter_ns() - began_ns
        self._switch_windows()
        self._step_start_ns = self._start_ns = time.time_ns()

    def _describe_start(self) -> None:
        manifest = self._manifest
        manifest.world_size = self.info.world_size
        manifest.local_rank = self.info.local_rank
        manifest.hostname = socket.gethostname()
        manifest.command = tuple(sys.orig_argv)
        manifest.clock_anchors.append(_environment.clock_anchor())
        manifest.overhead = self._overhead
        _environment.describe(manifest)

    def _context(self) -> CollectorContext:
        from chopper.collectors.base import CollectorContext

        return CollectorContext(
            directory=self._part.directory,
            run_path=self.path,
            rank=self.info.rank,
            local_rank=self.info.local_rank,
            world_size=self.info.world_size,
            pid=os.getpid(),
            device=_environment.current_device(),
            hostname=socket.gethostname(),
        )

    def _start_collectors(self) -> None:
        from chopper import registry

        names = self.options.collect if self.options.collect is not None else registry.defaults()
        if not self.options.trace:
            names = tuple(name for name in names if name != _TRACE)
            self._report_refused(_TRACE, "not asked for (trace=False)")
        classes, unloadable = registry.load_all(names)
        for name, reason in unloadable.items():
            self._report_refused(name, reason)
        context = self._context()
        for name, kind in classes.items():
            if kind.scope == "host" and self.info.local_rank != 0:
                continue
            self._start_collector(name, kind, context)
        self._collect_reports()

    def _start_collector(self, name: str, kind: type[Collector], context: CollectorContext) -> None:
        stage = "making it"
        try:
            if name == _TRACE:
                options = self.options
                collector: Any = kind(  # type: ignore[call-arg]
                    shapes=options.shapes, stacks=options.stacks, memory=options.memory
                )
            else:
                collector = kind()
            stage = "probe"
            available = collector.probe(context)
            if not available.ok:
                self._report_refused(name, available.reason, available.remedy)
                return
            stage = "start"
            collector.start(context)
        except Exception as exc:  # noqa: BLE001 - a collector must not harm the program
            self._report_failed(name, stage, exc)
            return
        self._collectors.append(collector)
        self._reports[name] = m.CollectorReport(name=name, status="obtained")
        if hasattr(collector, "on_step"):
            self._on_step.append((name, collector.on_step))
        if name == _TRACE:
            from chopper.collectors.annotate import Annotator

            self._trace = collector
            collector.on_foreign = self._give_way
            self._annotator = Annotator(
                on_root=self._check_stepless, on_failure=self._annotator_failed
            )

    def _report_refused(self, name: str, reason: str | None, remedy: str | None = None) -> None:
        self._reports[name] = m.CollectorReport(
            name=name, status="refused", reason=reason, remedy=remedy
        )

    def _report_failed(self, name: str, stage: str, exc: BaseException) -> None:
        self._reports[name] = m.CollectorReport(
            name=name, status="failed", reason=f"{stage}: {_reason(exc)}"
        )

    def _collect_reports(self) -> None:
        self._manifest.collectors = list(self._reports.values())

    def _hook_optimizers(self) -> None:
        self._saw_torch = "torch" in sys.modules
        if not self._saw_torch:
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._optimizer_handle = register_optimizer_step_post_hook(self._optimizer_stepped)

    # -- steps --------------------------------------------------------------------------------

    def _optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if self.recording and self.source != "mark" and os.getpid() == self._pid:
            self._note_optimizer(id(optimizer))

    @_harmless
    def _note_optimizer(self, optimizer_id: int) -> None:
        began_ns = time.perf_counter_ns()
        with self._at_work():
            ends = self._cycle.stepped(optimizer_id, time.time_ns())
            for end_ns in ends:
                self.source = "optimizer"
                self._end_step(end_ns, began_ns)
                began_ns = time.perf_counter_ns()

    @_harmless
    def mark(self) -> None:
        """The program says that a step ended."""
        began_ns = time.perf_counter_ns()
        now_ns = time.time_ns()
        if not self.recording:
            return
        with self._at_work():
            if self.source != "mark":
                if self._optimizer_handle is not None:
                    self._optimizer_handle.remove()
                    self._optimizer_handle = None
                if self.source == "optimizer":
                    self._start_over()
                self.source = "mark"
            self._end_step(now_ns, began_ns)

    def _start_over(self) -> None:
        """The program has steps of its own: those found so far were parts of its first."""
        windows = self.options.windows
        begun = len(windows) - len(self._upcoming)
        if self._capture is not None and (begun > 1 or not self._trace.mine):
            if self._trace.mine:
                self._keep(self._end_capture())
                self._not_before = 2  # two traces never meet at one point
            begun = len(windows)
        elif self._capture is not None:
            begun = 0
        if begun and self._trace is not None:
            self._start_windows_over()
        self._rows, self._history = [], []
        self._kept_steps = 0
        self.number = 0
        self._step_start_ns = self._start_ns
        self._rewrite_steps()

    def _start_windows_over(self) -> None:
        """Trace the windows again that were spent on parts of the first step."""
        if self._capture is not None or (self._kept is not None and self._trace.left_open):
            return
        self._upcoming = deque(w for w in self.options.windows if w.stop > 1)
        self._note(
            "run.steps_recounted",
            f"the first prof.step() came after {self.number} steps of the optimizer: those were "
            "one step, and the steps to trace are counted from it",
            severity="info",
        )

    def _note(
        self, code: str, message: str, *, severity: Literal["info", "warning"] = "warning"
    ) -> None:
        """A finding, once."""
        if code not in self._noted:
            self._noted.add(code)
            self._manifest.findings.append(m.Finding(code=code, severity=severity, message=message))

    def _end_step(self, end_ns: int, began_ns: int) -> None:
        assert self.source is not None
        capture = self._capture
        mine = self._trace is None or self._trace.mine
        if capture is not None and not mine:
            self._note_thread(capture)
        traced = (
            capture is not None and capture.until is None and self.number >= capture.window.start
        )
        self._rows.append((self.number, self._step_start_ns, end_ns, self.source, traced))
        if traced or (capture is None and self.number > 1):
            self._durations[traced].append(end_ns - self._step_start_ns)
        for name, on_step in tuple(self._on_step):
            try:
                on_step(self.number)
            except Exception as exc:  # noqa: BLE001 - a collector must not harm the program
                self._report_failed(name, "on_step", exc)
                self._on_step = [entry for entry in self._on_step if entry[0] != name]
        self.number += 1
        if self._span is not None and mine:
            self._span.__exit__(None, None, None)
            self._span = None
        if self._switch_windows():
            # Starting, stopping and writing a trace belongs to no step.
            self._step_start_ns = time.time_ns()
        else:
            self._step_start_ns = end_ns
            self._own_ns.append(time.perf_counter_ns() - began_ns)
        self._begin_span()
        # Also while a trace is taken: a process that is killed then leaves nothing else.
        if end_ns - self._flushed_ns > _FLUSH_NS:
            self._flush_steps()

    def _note_thread(self, capture: _Capture) -> None:
        """A step ended in a thread in which nothing is traced."""
        if capture.until is None:
            capture.until = self.number
        self._note(
            "run.other_thread",
            f"step {self.number} ended in another thread than the one that is traced: its "
            "operators are not in the trace; enter chopper.profile in the thread that trains",
        )
        if self.number + 1 >= capture.window.stop:
            self._annotator.remove()  # only its own thread can end the trace, if it ever does

    def _begin_span(self) -> None:
        # step.arrow holds the steps; these spans show them to other readers of the trace.
        if self._capture is not None and self._span is None and self._trace.mine:
            from torch.autograd.profiler import record_function

            self._span = record_function(f"ProfilerStep#{self.number}")
            self._span.__enter__()

    def _flush_steps(self) -> None:
        self._flushed_ns = time.time_ns()
        rows, self._rows = self._rows, []
        # A later window may yet take the trace from these steps.
        if self._upcoming or self._capture is not None:
            self._history.extend(rows)
        else:
            self._history = []
        self._write_steps(rows)

    def _write_steps(self, rows: list[_Row]) -> None:
        if rows and self._writer is not None:
            names = ("number", "start_ns", "end_ns", "source", "traced")
            columns = zip(*rows, strict=True)
            self._writer.write(dict(zip(names, map(list, columns), strict=True)))

    def _rewrite_steps(self) -> None:
        """Write step.arrow anew: what was said of the steps so far no longer holds."""
        target = self._part.directory / "step.arrow"
        if self._writer is not None:
            self._writer.close()
        self._writer = StreamWriter(target.with_name(".step.arrow.tmp"), "step")
        self._write_steps(self._history)
        self._writer.path.replace(target)

    # -- windows ------------------------------------------------------------------------------

    def _switch_windows(self) -> bool:
        """Start or end tracing as the step that begins asks; whether anything was done."""
        if self._trace is None:
            return False
        if self._capture is not None:
            if self.number < self._capture.window.stop or not self._trace.mine:
                return False
            capture = self._end_capture()
            self._keep(capture)
            # Not even the next window could begin at this point: see TorchTrace.left_open.
            return True
        if not self._upcoming or self.number < self._not_before:
            return False
        if self.number >= self._upcoming[0].begin - 1 and self._trace.foreign:
            if self.number >= self._upcoming[0].begin:
                window = self._upcoming.popleft()
                self._note(
                    "run.profiler_in_use",
                    f"steps {window.start} to {window.stop - 1} were not traced: the program's "
                    "own profiler was in use, and torch has room for one",
                )
            return False
        if self.number >= self._upcoming[0].begin:
            self._annotator.install()
            _traced_pids.add(self._pid)
            self._trace.begin()
            self._capture = _Capture(self._upcoming.popleft(), time.time_ns())
            self._begin_span()
            return True
        if self.number == self._upcoming[0].begin - 1:
            _traced_pids.add(self._pid)
            self._trace.prepare()
            return True
        return False

    def _end_capture(self) -> _Capture:
        capture, self._capture = self._capture, None
        assert capture is not None
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None
        self._annotator.remove()
        capture.rows = self._annotator.take_rows()
        self._trace.end()
        return capture

    def _correct(self, steps: range, traced: bool) -> None:
        """Say of ``steps`` whether the trace that is kept covers them."""

        def corrected(rows: list[_Row]) -> list[_Row]:
            return [(*row[:4], traced) if row[0] in steps else row for row in rows]

        self._rows = corrected(self._rows)
        if any(row[4] != traced and row[0] in steps for row in self._history):
            self._history = corrected(self._history)
            self._rewrite_steps()

    def _keep(self, capture: _Capture) -> None:
        """Write a trace, in place of the one that was kept before."""
        began_ns = time.perf_counter_ns()
        written = self._trace.export()
        window = capture.window
        stop = self.number if capture.until is None else capture.until
        first = window.start if stop > window.start else min(window.begin, stop)
        if self._kept is not None:
            self._correct(range(first), False)
        self._correct(range(first, stop), True)
        self._kept, self._kept_steps = capture, stop - first
        layers = StreamWriter(self._part.directory / "layer_sequence.arrow", "layer_sequence")
        try:
            if capture.rows["layer"]:
                layers.write(capture.rows)
        finally:
            layers.close()
        if self._upcoming and self._trace.left_open:
            self._upcoming.clear()
            self._manifest.findings.append(
                m.Finding(
                    code="run.window_skipped",
                    severity="info",
                    message="the later steps were not traced: the program was inside of a "
                    "record_function when the first trace ended, and Kineto does not survive a "
                    "second one then",
                )
            )
        self._manifest.traces = (written.name,)
        self._manifest.steps_source = self.source
        _environment.describe(self._manifest)
        self._flush_steps()
        self._overhead.export_ns = (self._overhead.export_ns or 0) + (
            time.perf_counter_ns() - began_ns
        )
        self._save()

    def _finish_windows(self) -> None:
        """At the end: keep the trace that runs, unless the one on disk is better."""
        if self._capture is None:
            return
        if not self._trace.mine:
            capture, self._capture = self._capture, None
            self._annotator.remove()
            self._trace.abandon()
            self._correct(range(capture.window.begin, self.number), False)
            self._note(
                "run.trace_abandoned",
                "the last trace is lost: the recording ended in another thread than the one that "
                "was traced; leave chopper.profile in the thread that entered it",
            )
            return
        capture = self._end_capture()
        whole_steps = self.number - capture.window.start
        if self._kept is None or whole_steps >= self._kept_steps:
            self._keep(capture)
        else:
            self._trace.drop()
            self._correct(range(capture.window.begin, self.number), False)

    @_harmless
    def _give_way(self) -> None:
        """The program's own profiler begins: the trace that is taken ends here."""
        with self._at_work():
            self._finish_windows()
            self._note(
                "run.profiler_in_use",
                f"the trace ended in step {self.number}: the program's own profiler began, and "
                "torch has room for one",
            )

    @_harmless
    def before_fork(self) -> None:
        """A process is about to be forked from this thread: no trace survives in it."""
        if self._capture is None or self._busy or not self._trace.mine or _forks_loader_worker():
            return
        with self._at_work():
            self._finish_windows()
            self._note(
                "run.forked",
                f"the trace ended in step {self.number}: the program forked, and the new process "
                "could not go on with a trace",
            )

    @_harmless
    def _annotator_failed(self, error: Exception) -> None:
        self._note(
            "run.layers_lost",
            f"layers have no names from step {self.number} on: {_reason(error)}",
        )

    @_harmless
    def enter_root(self, module: Any) -> None:
        """Annotate a forward that began before the recording did, and is still running."""
        if self._capture is not None:
            self._annotator.enter(module)

    def _check_stepless(self, calls: int) -> None:
        """Called before each outermost forward while a trace is taken."""
        capture = self._capture
        if (
            capture is not None
            and calls > _STEPLESS_CALLS
            and self.number == capture.window.begin
            and time.time_ns() - capture.opened_ns > _STEPLESS_NS
        ):
            self._stop_stepless()

    @_harmless
    def _stop_stepless(self) -> None:
        with self._at_work():
            capture = self._end_capture()
            self._upcoming.clear()
            self._keep(capture)
            self._note(
                "run.no_steps",
                "no step ended within a minute: the trace was stopped there; call prof.step() at "
                "the end of each step",
            )

    # -- end ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        with self._lock:
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    def _terminated(self, in_main_thread: bool) -> bool:
        """SIGTERM came: close, and say whether to die now. Called by the guard."""
        self._doomed = True
        if self._closing:  # which is what is to be done; it dies at its end
            return False
        if not self._lock.acquire(timeout=2.0):
            return True
        try:
            # Within the recorder's own code the profiler may be in the middle of something.
            self.close("interrupted", "ended by SIGTERM", tracer=in_main_thread and not self._busy)
        finally:
            self._lock.release()
        return True

    def close(
        self, status: Status | None = None, error: str | None = None, *, tracer: bool = True
    ) -> None:
        """End the recording. Idempotent.

        Args:
            status: how the program ended; None to find out, at the interpreter's exit.
            error: the exception that ended it, one line.
            tracer: whether the trace may be touched: not from another thread.
        """
        global _active
        if os.getpid() != self._pid or not self.recording:
            return
        with self._lock, no_interrupts():
            doomed_before = self._doomed
            self._closing = True
            self.recording = False
            if status is None:
                status, error = _how_it_ended()
            self._manifest.status = status
            self._manifest.error = error
            self._close_parts(tracer=tracer)
            _active = None
            atexit.unregister(self.close)
            self._guard.disarm()
            self._closing = False
        if self._doomed and not doomed_before:  # SIGTERM came meanwhile
            os.kill(os.getpid(), signal.SIGTERM)

    def end_with(self, exc: BaseException | None) -> None:
        """Close, at the end of the program's block; nothing that fails in here leaves."""
        try:
            self.close(*describe_exception(exc))
        except Exception as own:  # noqa: BLE001 - the profiler never changes the program
            self.recording = True
            self._give_up(_reason(own))

    def _close_parts(self, *, tracer: bool) -> None:
        self._stop_hooks()
        self._last_step()
        if tracer:
            self._close_trace()
        self._stop_collectors()
        self._close_files()

    @_harmless
    def _stop_hooks(self) -> None:
        if self._optimizer_handle is not None:
            self._optimizer_handle.remove()
            self._optimizer_handle = None

    @_harmless
    def _last_step(self) -> None:
        if self.source is None and self._cycle.tentative_ns is not None:
            # One optimizer stepped once: nothing came that could have told a cycle, this was it.
            self.source = "optimizer"
            traced = self._capture is not None
            end_ns = self._cycle.tentative_ns
            self._rows.append((0, self._step_start_ns, end_ns, self.source, traced))
            self.number = 1
        if self.number == 0 and "run.no_steps" not in self._noted:
            self._note(
                "run.no_steps",
                "no step was seen: "
                + (
                    "no optimizer of torch stepped"
                    if self._saw_torch
                    else "torch's optimizers are not watched when torch is imported later than the "
                    "recording begins"
                )
                + "; call prof.step() at the end of each step",
            )

    @_harmless
    def _close_trace(self) -> None:
        if self._trace is None:
            return
        try:
            self._finish_windows()
        finally:
            self._annotator.remove()
        if self._manifest.traces:
            began_ns = time.perf_counter_ns()
            self._manifest.traces = (self._trace.compress(),)
            self._overhead.export_ns = (self._overhead.export_ns or 0) + (
                time.perf_counter_ns() - began_ns
            )

    def _stop_collectors(self) -> None:
        for collector in self._collectors:
            try:
                report = collector.stop()
            except Exception as exc:  # noqa: BLE001 - a collector must not harm the program
                self._report_failed(collector.name, "stop", exc)
                continue
            if self._reports[collector.name].status == "obtained":
                self._reports[collector.name] = report
        if self._trace is not None and self._reports[_TRACE].status == "obtained":
            self._reports[_TRACE].files = self._manifest.traces
            if not self._manifest.traces:
                self._reports[_TRACE].reason = self._why_no_trace()

    def _why_no_trace(self) -> str:
        if self._manifest.status == "interrupted":
            return "the program was ended before a trace was written"
        first = self.options.windows[0].begin
        return f"the program ended after {self.number} steps; steps from {first} on are traced"

    @_harmless
    def _close_files(self) -> None:
        manifest = self._manifest
        self._history = []
        self._flush_steps()
        if self._writer is not None:
            self._writer.close()
        _environment.describe(manifest)
        manifest.calibration = _environment.calibration(manifest)
        self._check_rank()
        manifest.end_ns = time.time_ns()
        manifest.clock_anchors.append(_environment.clock_anchor())
        manifest.steps_source = self.source
        self._collect_reports()
        overhead = self._overhead
        overhead.per_step_ns = _median(self._own_ns)
        overhead.traced_step_ns = _median(self._durations[True])
        overhead.untraced_step_ns = _median(self._durations[False])
        self._part.save()
        if self.info.world_size == 1 and not _claim.launched():
            finalize(self.path, command=manifest.command, workload=self.options.name)

    def _check_rank(self) -> None:
        now = _environment.rank_info()
        if now.known and (now.rank, now.world_size) != (self.info.rank, self.info.world_size):
            self._manifest.findings.append(
                m.Finding(
                    code="run.rank_changed",
                    severity="warning",
                    message=f"recorded as rank {self.info.rank}, but this is rank {now.rank} of "
                    f"{now.world_size}: enter chopper.profile after init_process_group, or set "
                    "RANK",
                )
            )

    def _save(self) -> None:
        self._part.save()

    def _give_up(self, reason: str) -> None:
        """Stop recording for good; the program goes on."""
        global _active
        was_recording, self.recording = self.recording, False
        _active = None if _active is self else _active
        say(f"recording stopped: {reason}; the program goes on")
        if not was_recording:
            return
        with contextlib.suppress(Exception):
            atexit.unregister(self.close)
            self._guard.disarm()
        with contextlib.suppress(Exception):
            self._stop_hooks()
        with contextlib.suppress(Exception):
            self._give_up_trace()
        self._stop_collectors()
        with contextlib.suppress(Exception):
            if self._writer is not None:
                self._writer.close()
        with contextlib.suppress(Exception):
            manifest = self._manifest
            manifest.status = "failed"
            manifest.error = f"recording stopped: {reason}"
            manifest.end_ns = time.time_ns()
            self._collect_reports()
            self._part.save()

    def _give_up_trace(self) -> None:
        if self._trace is None:
            return
        self._annotator.remove()
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None
        self._trace.end()
        self._trace.drop()

    def forked(self) -> None:
        """In a forked child: this process does not record."""
        global _active
        self.recording = False
        _active = None
        atexit.unregister(self.close)
        self._guard.disarm()
        if self._optimizer_handle is not None:
            self._optimizer_handle.remove()
        tracing, self._capture = self._capture is not None, None
        if self._annotator is not None:
            self._annotator.remove()
        if tracing and self._trace.mine:
            # A worker of a data loader: nothing it does belongs to the trace, which cannot be ended
            # in here, as Kineto's threads are not.
            import torch

            self._trace.forget()
            enable: Any = getattr(torch.autograd, "_enable_record_function", None)
            if enable is not None:
                enable(False)


def _median(values: deque[int]) -> int | None:
    return round(statistics.median(values)) if values else None


def _in_multiprocessing_child() -> bool:
    import multiprocessing

    return multiprocessing.parent_process() is not None


def _how_it_ended() -> tuple[Status, str | None]:
    """At the interpreter's exit: whether an exception brought it here."""
    exc = getattr(sys, "last_value", None)
    if exc is None:
        return "complete", None
    if isinstance(exc, KeyboardInterrupt):
        return "interrupted", "KeyboardInterrupt"
    return "failed", _reason(exc)


def describe_exception(exc: BaseException | None) -> tuple[Status, str | None]:
    """Status and one line for the exception that left a profile, if any."""
    if exc is None or (isinstance(exc, SystemExit) and exc.code in (None, 0)):
        return "complete", None
    if isinstance(exc, KeyboardInterrupt):
        return "interrupted", "KeyboardInterrupt"
    return "failed", _reason(exc)


def numbered(options: Options, call: int) -> Options:
    """Options of a decorated function's n-th call: each has an output of its own."""
    output = options.output or os.environ.get(_claim.OUTPUT_VARIABLE)
    if call == 1 or output is None or _claim.launched():
        return options
    return replace(options, output=f"{os.fspath(output).rstrip('/')}-{call}")


def _forks_loader_worker() -> bool:
    """Whether torch's data loader is about to fork a worker, which only loads."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.data.dataloader":
            return True
        frame = frame.f_back
    return False


def open_session(options: Options) -> Session:
    """Start to record in this process.

    Raises:
        UsageError: this process records already.
        OutputError: the output would overwrite something.
    """
    if _active is not None:
        raise UsageError(
            f"chopper.profile: this process is recording to {_active.path} already; leave that "
            "profile before entering another"
        )
    path = _claim.choose_output(options.output, options.name)
    info = _environment.rank_info()
    with contextlib.suppress(OSError):  # what cannot be read is found out, harmlessly, by start()
        _claim.check_output(path, info.rank, force=options.force)
    if options.trace and "torch" not in sys.modules:
        # The program is about to train: it will import torch anyhow.
        with contextlib.suppress(ImportError):
            import torch  # noqa: F401
    if not options.automatic and "chopper._hook.arming" in sys.modules:
        sys.modules["chopper._hook.arming"].disarm()
    session = Session(options, path, info)
    session.start()
    return session


def _after_fork_in_child() -> None:
    if _traced_pids:
        _leave_without_destructors()
    if _active is not None:
        _active.forked()


def _leave_without_destructors() -> None:
    """In a forked child: end, when its time comes, without the C++ destructors.

    Kineto's wait for its thread, which is not in the child: they hang, or abort. Python has ended
    in order by then; what C holds in its buffers is written.
    """
    libc = ctypes.CDLL(None)
    try:
        flush, leave, on_exit, at_exit = libc.fflush, libc._exit, libc.on_exit, libc.__cxa_atexit
    except AttributeError:  # not glibc
        return
    on_exit(leave, None)  # called with the exit status
    at_exit(flush, None, None)  # the last one registered is called first; NULL: all of them


def _before_fork() -> None:
    if _active is not None and _active.recording:
        _active.before_fork()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
