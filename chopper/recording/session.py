"""One recording in one process: what the program calls, from its start to its end.

The parts: the collectors (``_collecting``), the steps (``_step_log``, told by ``_optimizers`` or
by the program), the traces (``_windows``), signals and forks.

Everything the program calls goes through ``_harmless``: whatever fails in here is said in one line
on stderr and in the manifest, recording stops, and the program goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import shlex
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from chopper.errors import UsageError
from chopper.hardware import environment
from chopper.recording import claim, forking
from chopper.recording.collecting import Collecting
from chopper.recording.hook import arming
from chopper.recording.hook.early import note
from chopper.recording.optimizers import OptimizerWatch, optimizer_was_made
from chopper.recording.options import (
    Options,
    Status,
    describe_exception,
    for_children,
    how_it_ended,
    make_options,
    numbered,
    reason_of,
    say,
)
from chopper.recording.phases import Phase, PhaseLog
from chopper.recording.signals import TerminationGuard, no_interrupts
from chopper.recording.step_log import StepLog
from chopper.recording.steps import BackwardSteps, OptimizerCycle
from chopper.recording.trainers import Evaluations, TrainerPhases
from chopper.recording.windows import TraceWindows
from chopper.storage import manifest as m
from chopper.storage import processes
from chopper.storage.run import Run, RunWriter, finalize

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from chopper.collectors.base import CollectorContext
    from chopper.recording.phases import OpenPhase

__all__ = ["Options", "Session", "active", "make_options", "numbered", "open_session", "say"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_MAX_MEASURES = 10_000
_OPTIMIZER = "optimizer"
"""Phase in which an engine steps its optimizers."""
_IDLE_S = 1.0
_NO_BLOCK = contextlib.nullcontext()

_active: Session | None = None


def active() -> Session | None:
    """The recording of this process, None when there is none."""
    return _active


def _harmless(
    method: Callable[Concatenate[Session, _P], _T],
) -> Callable[Concatenate[Session, _P], _T | None]:
    """Let no failure of the recording reach the program."""

    def guarded(self: Session, /, *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        try:
            return method(self, *args, **kwargs)
        except Exception as exc:  # noqa: BLE001 - the profiler never changes the program
            self._give_up(reason_of(exc))
            return None

    functools.update_wrapper(guarded, method)
    return guarded


def _number(value: Any) -> float | int | None:
    """What the program measured as a manifest can hold it; None when it is no finite number."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63:
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of several values
        return None
    return number if math.isfinite(number) else None


def _label(value: Any) -> str | int | float:
    """What a measure is of as a manifest can hold it: anything but a number as text."""
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int | float) and (number := _number(value)) is not None:
        return number
    return str(value)


class _AtWork:
    """The block in which the recorder's own code runs, with its lock held. It may be nested.

    Args:
        lock: the recording's.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._depth = 0

    @property
    def busy(self) -> bool:
        """Whether some thread is in it."""
        return self._depth > 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        self._lock.release()


class Session:
    """A recording from ``start`` to ``close``.

    Args:
        options: what to record.
        path: the run directory.
        info: which rank this is.
    """

    def __init__(self, options: Options, path: Path, info: environment.RankInfo) -> None:
        self.options = options
        self.path = self._output = path
        self.info = info
        self.recording = False
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._at_work = _AtWork(self._lock)
        self._closing = False
        self._closing_ns = 0
        self._doomed: int | None = None
        """The signal that ends the process once the recording is closed."""
        self._collecting = Collecting(options)
        self._cycle = OptimizerCycle()
        self._backwards: BackwardSteps | None = BackwardSteps(optimizer_was_made)
        self._optimizers = OptimizerWatch(
            self._optimizer_stepped,
            self._in_backward,
            self._backward_ended,
            self._cycle.dropped,
        )
        self._log: StepLog | None = None
        self._phases: PhaseLog | None = None
        self._inner_optimizers: list[int] = []
        """Optimizers that stepped within a phase of that name that a thread is inside of."""
        self._trainers = TrainerPhases(functools.partial(Phase, self))
        self._evaluations = Evaluations(self._evaluated, lambda: self._phase_name() is not None)
        self._windows: TraceWindows | None = None
        self._guard = TerminationGuard(self._terminated)
        self._children: arming.ChildrenRecorded | None = None
        self._closed = False
        self._over = threading.Event()

    @property
    def tracing(self) -> bool:
        """Whether a trace is being taken."""
        return self._windows is not None and self._windows.tracing

    # -- start --------------------------------------------------------------------------------

    @_harmless
    def start(self) -> None:
        """Claim the rank's folder, start the collectors, begin the first step."""
        began_ns = time.perf_counter_ns()
        claimed = claim.claim(self.path, self.info, force=self.options.force)
        self.path = claimed.path
        self._part = RunWriter(self.path, self.info.rank, claimed.part)
        self._manifest = self._part.manifest
        self._overhead = self._manifest.overhead = m.Overhead()
        self._describe_start()
        if claimed.finding is not None:
            self._manifest.findings.append(claimed.finding)
        if self.info.ignored is not None:
            self._part.note(
                "run.rank_unknown",
                f"recorded as rank 0 of 1: the environment names no rank ({self.info.ignored}); "
                "expected 0 <= RANK < WORLD_SIZE",
            )
        self._log = StepLog(self._part.directory)
        self._phases = PhaseLog(self._part.directory, self._begin_phase_span)
        self.recording = True
        global _active
        _active = self
        self._collecting.start(self._context())
        self._manifest.collectors = self._collecting.reports()
        if self._collecting.trace is not None:
            self._watch_trace(self._collecting.trace)
        self._optimizers.begin()
        self._trainers.begin()
        self._evaluations.begin()
        if not claim.launched():
            hooked = arming.hooked(
                str(self._output.absolute()), claim.IN_PROFILE, for_children(self.options)
            )
            self._children = arming.ChildrenRecorded(hooked)
        self._guard.arm()
        threading.Thread(target=self._flush_idle, daemon=True, name="chopper").start()
        atexit.register(self.close)
        # Multiprocessing's children leave without atexit.
        if forking.in_multiprocessing_child():
            from multiprocessing.util import Finalize

            Finalize(None, self.close, exitpriority=100)
        self._part.save()
        self._overhead.setup_ns = time.perf_counter_ns() - began_ns
        with self._at_work:
            if self._windows is not None:
                self._windows.switch()
            self._log.begin()

    def _describe_start(self) -> None:
        manifest = self._manifest
        manifest.command = tuple(sys.orig_argv)
        manifest.clock_anchors.append(environment.clock_anchor())
        environment.describe(manifest)

    def _context(self) -> CollectorContext:
        from chopper.collectors.base import CollectorContext

        return CollectorContext(
            directory=self._part.directory,
            run_path=self.path,
            rank=self.info.rank,
            local_rank=self.info.local_rank,
            world_size=self.info.world_size,
            pid=os.getpid(),
            device=environment.current_device(),
            hostname=socket.gethostname(),
        )

    def _watch_trace(self, trace: Any) -> None:
        assert self._log is not None
        assert self._phases is not None
        trace.lock = self._lock
        trace.on_foreign = self._give_way
        self._windows = TraceWindows(
            trace,
            self.options.windows,
            self._part,
            self._log,
            self._phases,
            limit=self.options.trace_limit,
            alone=self.info.world_size == 1,
            on_overrun=self._stop_within_step,
            on_layers_lost=self._layers_lost,
            trained_ids=self._optimizers.trained_ids,
        )

    # -- steps --------------------------------------------------------------------------------

    def _optimizer_stepped(self, optimizer_id: int) -> None:
        log = self._log
        self._evaluations.trained()
        if self.recording and log is not None and log.source != "mark":
            self._note_optimizer(log, optimizer_id)

    @_harmless
    def _note_optimizer(self, log: StepLog, optimizer_id: int) -> None:
        began_ns = time.perf_counter_ns()
        self._backwards = None  # from here on optimizers end steps
        with self._at_work:
            if self._phase_name() == _OPTIMIZER:
                # DeepSpeed's engine steps torch's optimizer once for each group of parameters, and
                # gathers the parameters after it: the step ends when the engine returns.
                self._inner_optimizers.append(optimizer_id)
                return
            now_ns = time.time_ns()
            ends = self._cycle.stepped(optimizer_id, now_ns)
            log.optimizer = self._optimizers.kind_of(self._cycle.leader)
            for end_ns in ends:
                log.source = "optimizer"
                self._end_step(log, end_ns, began_ns, late=end_ns < now_ns)
                began_ns = time.perf_counter_ns()

    def _backward_ended(self, makes_graph: bool) -> None:
        log = self._log
        self._evaluations.trained()
        if not self.recording or log is None:
            return
        # Where optimizers or the program end steps, only a trace has to be looked after.
        if (self._backwards is not None and log.source != "mark") or self.tracing:
            self._note_backward(log, makes_graph)

    @_harmless
    def _note_backward(self, log: StepLog, makes_graph: bool) -> None:
        began_ns = time.perf_counter_ns()
        with self._at_work:
            if self._windows is not None:
                self._windows.check()
            if self._backwards is None or log.source == "mark":
                return
            now_ns = time.time_ns()
            for end_ns in self._backwards.ended(now_ns, makes_graph):
                log.source = "backward"
                self._end_step(log, end_ns, began_ns, late=end_ns < now_ns)
                began_ns = time.perf_counter_ns()

    @_harmless
    def mark(self, tokens: int | None = None) -> None:
        """The program says that a step ended, and how many tokens it was."""
        began_ns = time.perf_counter_ns()
        now_ns = time.time_ns()
        log = self._log
        if not self.recording or log is None:
            return
        with self._at_work:
            if log.source != "mark":
                if log.source is not None:
                    if self._windows is not None:
                        self._windows.start_over()
                    log.restart()
                log.source = "mark"
            count = None if tokens is None else _number(tokens)
            if tokens is not None and count is None:
                self._part.note("measures.dropped", f"tokens of a step: {tokens!r} is not a number")
            self._end_step(log, now_ns, began_ns, None if count is None else int(count))

    @_harmless
    def measure(self, name: str, value: float, labels: dict[str, str | int | float]) -> None:
        """The program measured something itself."""
        if not self.recording:
            return
        number = _number(value)
        measures = self._manifest.measures
        if number is not None and len(measures) < _MAX_MEASURES:
            kept = {str(key): _label(label) for key, label in labels.items()}
            measures.append(m.Measure(name=str(name), value=number, labels=kept))
            return
        why = "is not a number" if number is None else f"is past the {_MAX_MEASURES}th"
        self._part.note("measures.dropped", f"measure {name!r} {why}: not kept, nor others like it")

    # -- phases -------------------------------------------------------------------------------

    @_harmless
    def begin_phase(self, name: str) -> OpenPhase | None:
        """Begin a phase of the running code; None when nothing is recorded."""
        if not self.recording or self._phases is None:
            return None
        with self._at_work:
            return self._phases.begin(str(name))

    @_harmless
    def end_phase(self, entered: list[OpenPhase]) -> None:
        """End the innermost of the phases that ``begin_phase`` returned to one block."""
        if not self.recording or self._phases is None:
            return
        with self._at_work:
            phase = self._phases.end(entered)
            if phase.name == _OPTIMIZER and self._phase_name() != _OPTIMIZER:
                inner, self._inner_optimizers = self._inner_optimizers, []
                for optimizer_id in dict.fromkeys(inner):
                    self._optimizer_stepped(optimizer_id)

    def _phase_name(self) -> str | None:
        """Name of the phase that the running code is in, None for none."""
        return self._phases.current() if self._phases is not None else None

    @_harmless
    def _evaluated(self, tid: int, start_ns: int, end_ns: int) -> None:
        """Record an evaluation that no phase names."""
        if self.recording and self._phases is not None:
            with self._at_work:
                self._phases.record("evaluation", tid, start_ns, end_ns)

    def _in_backward(self) -> contextlib.AbstractContextManager[Any]:
        """Return the block that a backward pass runs in: a phase, of which only traces tell."""
        return Phase(self, "backward") if self.tracing else _NO_BLOCK

    def _begin_phase_span(self, name: str) -> Any:
        return self._windows.begin_phase(name) if self._windows is not None else None

    def _end_step(
        self,
        log: StepLog,
        end_ns: int,
        began_ns: int,
        tokens: int | None = None,
        *,
        late: bool = False,
    ) -> None:
        """End the step that runs.

        Args:
            log: the recording's steps.
            end_ns: when it ended.
            began_ns: when chopper's own code began (``perf_counter_ns``).
            tokens: how many this rank worked through in it.
            late: the next step runs already, and no trace can begin or end at its start.
        """
        windows = self._windows
        traced = windows is not None and windows.covers_step()
        profiled = windows is not None and windows.profiled_step()
        length_ns = log.end(end_ns, traced=traced, profiled=profiled, tokens=tokens)
        if windows is not None and not profiled:
            windows.follow(log.number - 1, length_ns)
        self._collecting.step_ended(log.number - 1)
        if windows is not None and not late and windows.switch():
            log.skip()  # starting, stopping and writing a trace belongs to no step
        else:
            log.cost(time.perf_counter_ns() - began_ns)
        if windows is not None:
            windows.begin_span()
        # Also while a trace is taken: a process that is killed then leaves nothing else.
        if log.due(end_ns):
            if self._phases is not None:
                self._phases.flush()
            log.flush()

    def _flush_idle(self) -> None:
        """Write the last steps of a program that does other things, and may be killed meanwhile.

        Workers of Ray and of pools are ended so, without a word, long after they trained.
        """
        while not self._over.wait(_IDLE_S):
            with self._lock:
                log = self._log
                if not self.recording or log is None:
                    return
                if log.due(time.time_ns()) and log.pending:
                    try:
                        log.flush()
                    except Exception:  # noqa: BLE001 - the next step says so, in its own thread
                        return

    # -- what the traces meet -----------------------------------------------------------------

    @_harmless
    def _give_way(self, lost: bool) -> None:
        with self._at_work:
            if self._windows is not None:
                self._windows.give_way(lost=lost)

    @_harmless
    def before_fork(self) -> None:
        """A process is about to be forked from this thread."""
        if self._windows is None or self._at_work.busy or not self._windows.tracing:
            return
        with self._at_work:
            self._windows.before_fork()

    @_harmless
    def enter_root(self, module: Any) -> None:
        """Annotate a forward that began before the recording did, and is still running."""
        if self._windows is not None:
            self._windows.enter_root(module)

    @_harmless
    def leave_root(self, module: Any) -> None:
        """End what ``enter_root`` annotated."""
        if self._windows is not None:
            self._windows.leave_root(module)

    @_harmless
    def _layers_lost(self, error: Exception) -> None:
        assert self._log is not None
        self._part.note(
            "run.layers_lost",
            f"layers have no names from step {self._log.number} on: {reason_of(error)}",
        )

    @_harmless
    def _stop_within_step(self) -> None:
        with self._at_work:
            if self._windows is not None:
                self._windows.stop_within_step()

    # -- end ----------------------------------------------------------------------------------

    def _terminated(self, number: int, in_main_thread: bool) -> bool:
        """A signal ends the process: close, and say whether to die now. Called by the guard."""
        self._doomed = number
        if self._closing:  # which is what is to be done; it dies at its end
            return False
        if not self._lock.acquire(timeout=2.0):
            return True
        try:
            # Within the recorder's own code the profiler may be in the middle of something.
            self.close(
                "interrupted",
                f"ended by {signal.Signals(number).name}",
                tracer=in_main_thread and not self._at_work.busy,
            )
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
                status, error = how_it_ended()
            self._manifest.status = status
            self._manifest.error = error
            self._close_parts(tracer=tracer)
            self._closed = self._manifest.end_ns is not None and _active is self
            _active = None
            atexit.unregister(self.close)
            self._guard.disarm()
            self._over.set()
            self._closing = False
        if self._doomed is not None and doomed_before is None:  # the signal came meanwhile
            os.kill(os.getpid(), self._doomed)

    def end_with(self, exc: BaseException | None) -> None:
        """Close, at the end of the program's block; nothing that fails in here leaves."""
        try:
            self.close(*describe_exception(exc))
        except Exception as own:  # noqa: BLE001 - the profiler never changes the program
            self.recording = True
            self._give_up(reason_of(own))

    def _close_parts(self, *, tracer: bool) -> None:
        self._closing_ns = time.time_ns()
        self._stop_watching()
        self._last_step()
        if tracer:
            self._close_trace()
        self._collecting.stop()
        self._collecting.say_of_trace(self._manifest.traces, self._why_no_trace())
        self._close_files()

    @_harmless
    def _stop_watching(self) -> None:
        self._optimizers.end()
        self._trainers.end()
        self._evaluations.end()
        self._leave_children()

    def _leave_children(self) -> None:
        """Processes that start from here on are no part of the recording."""
        children, self._children = self._children, None
        if children is not None:
            children.end()

    @_harmless
    def _last_step(self) -> None:
        log = self._log
        assert log is not None
        # Nothing came after these that could have said so: they were the ends of steps.
        ends: list[int] = []
        if log.source != "mark" and self._cycle.tentative_ns is not None:
            log.source, ends = "optimizer", [self._cycle.tentative_ns]
        elif log.source is None and self._backwards is not None and not self._with_optimizer():
            ends = self._backwards.take()
            log.source = "backward" if ends else None
        for end_ns in ends:
            profiled = self._windows is not None and self._windows.profiled_step()
            log.end(end_ns, traced=False, profiled=profiled)  # until the trace is kept
        if log.number == 0:
            self._part.note(
                "run.no_steps",
                "no step was seen: "
                + (
                    "no optimizer of torch stepped"
                    if self._optimizers.saw_torch
                    else "torch was never imported"
                )
                + "; call prof.step() at the end of each step",
            )

    def _with_optimizer(self) -> bool:
        return not self._optimizers.saw_torch or optimizer_was_made()

    @_harmless
    def _close_trace(self) -> None:
        if self._windows is not None:
            self._windows.close()

    def _why_no_trace(self) -> str:
        if self._manifest.status == "interrupted":
            return "the program was ended before a trace was written"
        first = self.options.windows[0].begin
        number = self._log.number if self._log is not None else 0
        return f"the program ended after {number} steps; steps from {first} on are traced"

    @_harmless
    def _close_files(self) -> None:
        manifest = self._manifest
        assert self._log is not None
        assert self._phases is not None
        self._log.close()
        self._phases.close()
        environment.describe(manifest)
        manifest.calibration = environment.calibration(manifest)
        self._check_rank()
        manifest.end_ns = time.time_ns()
        manifest.clock_anchors.append(environment.clock_anchor())
        manifest.steps_source = self._log.source
        manifest.steps_count = self._log.number
        manifest.collectors = self._collecting.reports()
        self._log.summarize(self._overhead)
        self._overhead.close_ns = manifest.end_ns - self._closing_ns
        self._part.save()
        # The run that a launcher was told to make is closed by it.
        if self.info.world_size == 1 and not (
            self.path == self._output and claim.launched(self.path)
        ):
            finalize(self.path, command=manifest.command, workload=self.options.name)

    def announce(self) -> None:
        """Say on stderr, at the end of a profile, where the run is and what its findings warn of.

        One rank of a job speaks; where a command of chopper launched the program, that command.
        """
        if self.info.rank != 0 or not self._closed or claim.launched():
            return
        with contextlib.suppress(Exception):  # the profiler never changes the program
            others = processes.findings(self.path)
            run = Run.open(self.path) if self.info.world_size == 1 else None
            parts = run.manifest.ranks if run is not None else [self._manifest]
            steps = max((part.steps_count or 0) for part in parts)
            ranks = f"{len(parts)} rank{'s' if len(parts) > 1 else ''}"
            say(
                f"recorded {ranks if run is not None else 'rank 0'}, {steps} steps; "
                f"next: chopper analyze {shlex.quote(os.fspath(self.path))}"
            )
            for finding in (*others, *(f for part in parts for f in part.findings)):
                if finding.severity != "info" or finding.code == "run.processes":
                    say(f"{finding.severity}: {finding.message}")
            for report in parts[0].collectors:
                if report.status == "failed":
                    say(f"collector {report.name} failed: {report.reason}")

    def _check_rank(self) -> None:
        now = environment.rank_info()
        if now.known and (now.rank, now.world_size) != (self.info.rank, self.info.world_size):
            self._part.note(
                "run.rank_changed",
                f"recorded as rank {self.info.rank}, but this is rank {now.rank} of "
                f"{now.world_size}: enter chopper.profile after init_process_group, or set RANK",
            )

    def _give_up(self, reason: str) -> None:
        """Stop recording for good; the program goes on."""
        global _active
        was_recording, self.recording = self.recording, False
        self._over.set()
        _active = None if _active is self else _active
        say(f"recording stopped: {reason}; the program goes on")
        if not was_recording:
            return
        with contextlib.suppress(Exception):
            atexit.unregister(self.close)
            self._guard.disarm()
            self._leave_children()
        with contextlib.suppress(Exception):
            self._optimizers.end()
            self._trainers.end()
            self._evaluations.end()
        with contextlib.suppress(Exception):
            if self._windows is not None:
                self._windows.give_up()
        self._collecting.stop()
        with contextlib.suppress(Exception):
            if self._log is not None:
                self._log.abandon()
        with contextlib.suppress(Exception):
            if self._phases is not None:
                self._phases.close()
        with contextlib.suppress(Exception):
            manifest = self._manifest
            manifest.status = "failed"
            manifest.error = f"recording stopped: {reason}"
            manifest.end_ns = time.time_ns()
            manifest.steps_source = self._log.source if self._log is not None else None
            manifest.collectors = self._collecting.reports()
            self._part.save()

    def forked(self) -> None:
        """In a forked child: this process does not record."""
        global _active
        self.recording = False
        _active = None
        # Another thread may have held it: that thread is not in here.
        self._lock = threading.RLock()
        self._at_work = _AtWork(self._lock)
        if self._collecting.trace is not None:
            self._collecting.trace.lock = self._lock
        atexit.unregister(self.close)
        self._guard.disarm()
        self._optimizers.end()
        self._trainers.end()
        self._evaluations.end()
        if self._windows is not None:
            self._windows.forked()
        if not forking.forks_loader_worker():
            arming.arm_forked(start_from_environment)


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
    info = environment.rank_info()
    path = claim.choose_output(options.output, options.name, info)
    with contextlib.suppress(OSError):  # what cannot be read is found out, harmlessly, by start()
        claim.check_output(path, info.rank, force=options.force)
    if options.trace and "torch" not in sys.modules:
        # The program is about to train: it will import torch anyhow.
        with contextlib.suppress(ImportError):
            import torch  # noqa: F401
    if not options.automatic:
        arming.disarm()
    session = Session(options, path, info)
    session.start()
    return session


def start_from_environment() -> Session | None:
    """Start the recording that ``chopper record`` asks for; say on stderr why it cannot begin."""
    try:
        wanted = json.loads(os.environ[arming.HOOK_VARIABLE])
        session = open_session(make_options(output=None, automatic=True, **wanted))
    except Exception as exc:  # noqa: BLE001 - the profiler never changes the program
        say(f"not recorded: {str(exc) or type(exc).__name__}")
        note("failed", str(exc))
        return None
    note("recording")
    return session


def _before_fork() -> None:
    if _active is not None and _active.recording:
        _active.before_fork()


def _in_forked_child() -> None:
    if _active is not None:
        _active.forked()


forking.watch(_before_fork, _in_forked_child)
