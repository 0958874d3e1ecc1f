"""One recording in one process: its start, its end, and all that the program calls meanwhile.

Its parts: the collectors (``collecting``), steps, phases and traces (``steps``), signals
and forks. Everything the program calls goes through ``_safely``: whatever fails in here is said
in one line on stderr and in the manifest, recording stops, and the program goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from chopper.collectors.base import CollectorContext
from chopper.collectors.torch_trace import TorchTrace
from chopper.errors import UsageError, say
from chopper.hardware import environment, launchers
from chopper.recording import claim, handover, signals
from chopper.recording.collecting import Collecting
from chopper.recording.finish import Status, announce, ending, exception_text, finalize
from chopper.recording.hook import arming
from chopper.recording.hook.early import note
from chopper.recording.logs import OpenPhase, Phase
from chopper.recording.options import Options, Window, for_children, make_options
from chopper.recording.steps import StepTracker, keep_measure
from chopper.recording.windows import TraceWindows
from chopper.storage import clock
from chopper.storage import manifest as m
from chopper.storage.destination import no_step
from chopper.storage.parts import RunWriter
from chopper.wording import plural

_T = TypeVar("_T")
_IDLE_S = 1.0

_active: Session | None = None


def active() -> Session | None:
    """Return the recording of this process, None when there is none."""
    return _active


class Session:
    """A recording from ``start`` to ``close``."""

    def __init__(
        self,
        options: Options,
        path: Path,
        info: launchers.LaunchEnvironment,
        *,
        infers: bool = False,
    ) -> None:
        self.options = options
        self._infers = infers
        self.path = self._output = path
        self.info = info
        self.recording = False
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._busy = 0
        """Above 0 while some thread is in the recorder's own code, with the lock held."""
        self._signals_wait = True
        """True while the recording starts or ends: a signal ends the process after that."""
        self._closed = False
        self.problem: str | None = None
        """Why the recording stopped before its end."""
        self._signal_at_close: int | None = None
        """The signal that ends the process once the recording is closed."""
        self._collecting = Collecting(options)
        self._steps: StepTracker
        """Set from the claim of the rank's folder on, before ``recording`` is."""
        self._guard = signals.TerminationGuard(self._terminated)
        self._children: arming.ChildrenRecorded | None = None
        self._store: Any = None
        """Connection to the store of the job, where ranks are to be gathered."""
        self._over = threading.Event()

    @property
    def tracing(self) -> bool:
        """True while a trace is being taken."""
        return self.recording and self._steps.windows.tracing

    # -- start --------------------------------------------------------------------------------

    def start(self) -> None:
        """Claim the rank's folder, start the collectors, begin the first step."""
        self._guard.arm()
        try:
            self._start()
        except BaseException as exc:
            self._give_up(exc)
            if not isinstance(exc, Exception):  # Ctrl-C is the program's
                raise
        self._signals_wait = False
        if self._signal_at_close is not None:  # it came meanwhile
            self._terminated(self._signal_at_close, True)
            os.kill(os.getpid(), self._signal_at_close)

    def _safely(self, part: Callable[..., _T], *args: Any) -> _T | None:
        """Run a part of the recording, with its lock held; no failure reaches the program."""
        try:
            with self._lock:
                self._busy += 1
                try:
                    return part(*args)
                finally:
                    self._busy -= 1
        except Exception as exc:  # noqa: BLE001 - the profiler never changes the program
            self._give_up(exc)
            return None

    def _while_recording(self, part: Callable[..., _T], *args: Any) -> _T | None:
        return self._safely(part, *args) if self.recording else None

    def _start(self) -> None:
        global _active
        began_ns = time.perf_counter_ns()
        clock.anchor()
        claimed = claim.claim(self.path, self.info, force=self.options.force)
        self._replaced = self._output.resolve()
        self.path = claimed.path
        self._place = self.path.resolve()  # the program may change its directory
        self._part = RunWriter(self._place, self.info.rank, claimed.part)
        self._manifest = self._part.manifest
        self._overhead = self._manifest.overhead = m.Overhead()
        self._steps = steps = StepTracker(
            self._part,
            self._while_recording,
            functools.partial(Phase, self),
            self._collecting.step_ended,
        )
        steps.infers = self._infers
        steps.windows = self._trace_windows(steps, TorchTrace(), ())  # never begun
        self.recording = True
        _active = self
        self._part.reserve()
        self._describe_start(claimed.finding)
        self._collecting.start(self._context())
        self._manifest.collectors = self._collecting.reports()
        if self._collecting.trace is not None:
            steps.windows = self._trace_windows(steps, self._collecting.trace, self.options.windows)
        steps.watch()
        if not claim.launched():
            hooked = arming.hooked(
                str(self._output.absolute()), claim.IN_PROFILE, for_children(self.options)
            )
            self._children = arming.ChildrenRecorded(hooked)
        threading.Thread(target=self._flush_idle, daemon=True, name="chopper").start()
        atexit.register(self.close)
        # Multiprocessing's children leave without atexit.
        if signals.in_multiprocessing_child():
            from multiprocessing.util import Finalize

            Finalize(None, self.close, exitpriority=100)
        self._part.save()
        self._overhead.setup_ns = time.perf_counter_ns() - began_ns
        self._safely(steps.begin)

    def _describe_start(self, moved: m.Finding | None) -> None:
        manifest = self._manifest
        manifest.command = tuple(sys.orig_argv)
        manifest.clock_anchors.append(environment.clock_anchor())
        environment.describe(manifest)
        if self.options.gather:
            self._store = handover.job_store()
        if moved is not None:
            manifest.findings.append(moved)
        if self.info.ignored is not None:
            self._part.note("run.rank_unknown", "environment", ignored=self.info.ignored)

    def _context(self) -> CollectorContext:
        return CollectorContext(
            directory=self._part.directory,
            run_path=self._place,
            rank=self.info.rank,
            local_rank=self.info.local_rank,
            world_size=self.info.world_size,
            pid=os.getpid(),
            device=environment.current_device(),
            hostname=socket.gethostname(),
        )

    def _trace_windows(
        self, steps: StepTracker, trace: Any, windows: tuple[Window, ...]
    ) -> TraceWindows:
        trace.lock = self._lock
        trace.on_foreign = lambda lost: self._safely(steps.windows.give_way, lost)
        return TraceWindows(
            trace,
            windows,
            self._part,
            steps.log,
            steps.phases,
            limit=self.options.trace_limit,
            alone=self.info.world_size == 1,
            on_overrun=lambda: self._safely(steps.windows.stop_within_step),
            trained_ids=steps.optimizers.trained_ids,
            counters=self.options.counters and bool(windows),
        )

    # -- steps --------------------------------------------------------------------------------

    def micro_step(self) -> None:
        """Note that a trainer begins a backward pass."""
        if self.recording:
            self._steps.micro_step()

    def mark(self, tokens: int | None = None) -> None:
        """End a step where the program says so, with the tokens that it worked through."""
        began_ns = time.perf_counter_ns()
        if self.recording:
            self._safely(self._steps.marked, tokens, clock.now_ns(), began_ns)

    def measure(self, name: str, value: float, labels: dict[str, str | int | float]) -> None:
        """Keep a number that the program measured itself."""
        if self.recording:
            self._safely(keep_measure, self._part, name, value, labels)

    def _flush_idle(self) -> None:
        """Write the last steps and phases of a program that does other things meanwhile.

        It may be killed: workers of Ray and of pools are ended so, long after they trained.
        """
        while not self._over.wait(_IDLE_S):
            with self._lock:
                if not self.recording:
                    return
                log = self._steps.log
                self._watch_clock()
                try:
                    self._steps.phases.flush()
                    if log.due(clock.now_ns()):
                        log.flush()
                except Exception:  # noqa: BLE001 - the next step says so, in its own thread
                    return

    def _watch_clock(self) -> None:
        """Note that the wall clock was set; no time of the recording is of it."""
        set_by_ns = clock.set_by_ns()
        if set_by_ns:
            self._part.note(
                "run.clock_set",
                own_rank=self.info.rank,
                set_by_s=set_by_ns / 1e9,
                step=self._steps.log.number,
            )

    # -- phases -------------------------------------------------------------------------------

    def begin_phase(self, name: str) -> OpenPhase | None:
        """Begin a phase of the running code; None when nothing is recorded."""
        return self._while_recording(self._steps.phases.begin, name)

    def end_phase(self, entered: list[OpenPhase]) -> None:
        """End the innermost of the phases that ``begin_phase`` returned to one block."""
        if self.recording:
            self._steps.end_phase(entered)

    # -- traces -------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """End a trace before this thread forks a process."""
        if self.tracing and not self._busy:
            self._safely(self._steps.windows.before_fork)

    def enter_root(self, module: Any) -> None:
        """Annotate a forward that began before the recording did, and is still running."""
        if self.recording:
            self._safely(self._steps.windows.enter_root, module)

    def leave_root(self, module: Any) -> None:
        """End what ``enter_root`` annotated."""
        if self.recording:
            self._safely(self._steps.windows.leave_root, module)

    # -- end ----------------------------------------------------------------------------------

    def _terminated(self, number: int, in_main_thread: bool) -> bool:
        """Close, as a signal ends the process; return whether to die now. Called by the guard."""
        self._signal_at_close = number
        if self._signals_wait:
            return False
        if not self._lock.acquire(timeout=2.0):
            return True
        try:
            # Within the recorder's own code the profiler may be in the middle of something.
            self.close(
                "interrupted",
                f"ended by {signal.Signals(number).name}",
                tracer=in_main_thread and not self._busy,
            )
        finally:
            self._lock.release()
        return True

    def close(
        self, status: Status | None = None, error: str | None = None, *, tracer: bool = True
    ) -> None:
        """End the recording. Idempotent.

        Without a status it is found out, at the interpreter's exit. ``tracer`` is False in other
        threads than the main one, where the trace must not be touched.
        """
        global _active
        if os.getpid() != self._pid or not self.recording:
            return
        with self._lock, signals.no_interrupts():
            signal_before = self._signal_at_close
            self._signals_wait = True
            self.recording = False
            if status is None:
                status, error = ending(getattr(sys, "last_value", None) or sys.exc_info()[1])
            self._manifest.status = "interrupted" if self._guard.told_to_end() else status
            self._manifest.error = error
            self._watch_clock()
            closing_ns = clock.now_ns()
            self._safely(self._steps.finish)
            self._safely(self._leave_children)
            if tracer:
                self._safely(self._steps.windows.close)
            for close_file in (self._steps.log.close, self._steps.phases.close):
                self._safely(close_file)
            self._collecting.stop()
            self._collecting.say_of_trace(self._manifest.traces, self._why_no_trace())
            self._safely(self._close_files, closing_ns)
            self._safely(self._settle)
            if self.options.gather and self._store is None:
                self._store = self._safely(handover.job_store)
            self._closed = self._manifest.end_ns is not None and _active is self
            _active = None
            atexit.unregister(self.close)
            self._guard.disarm()
            self._over.set()
            self._signals_wait = False
        if self._signal_at_close is not None and signal_before is None:  # it came meanwhile
            os.kill(os.getpid(), self._signal_at_close)
        if self.options.gather and self.info.world_size > 1 and self._manifest.status == "complete":
            line = handover.hand_over(self._store, self._part.directory, self._manifest)
            if line is not None and self.info.local_rank == 0:
                say(line)

    def end_with(self, exc: BaseException | None) -> None:
        """Close, at the end of the program's block; nothing that fails in here leaves."""
        try:
            self.close(*ending(exc))
        except Exception as own:  # noqa: BLE001 - the profiler never changes the program
            self.recording = True
            self._give_up(own)

    def _leave_children(self) -> None:
        children, self._children = self._children, None
        if children is not None:
            children.end()

    def _why_no_trace(self) -> str:
        if self._manifest.status == "interrupted":
            return "the program was ended before a trace was written"
        first, number = self.options.windows[0], self._steps.log.number
        wanted = f"{first.start}:{first.stop}"
        if number == 0:
            return (
                f"no step was detected, so steps {wanted} never came; leave --steps out, or call "
                "prof.step() of chopper.profile after each batch or request"
            )
        steps = f"{number} step" + "s" * (number != 1)
        last = max(number - 5, 0)
        return (
            f"the program ended after {steps}, before steps {wanted} were traced; ask for earlier "
            f"ones, such as --steps {last}:{number}"
        )

    def _close_files(self, closing_ns: int) -> None:
        manifest, log = self._manifest, self._steps.log
        environment.describe(manifest)
        manifest.calibration = environment.calibration(manifest)
        now = launchers.rank_info()
        if now.known and (now.rank, now.world_size) != (self.info.rank, self.info.world_size):
            self._part.note(
                "run.rank_changed",
                own_rank=self.info.rank,
                actual_rank=now.rank,
                world=now.world_size,
            )
        manifest.end_ns = clock.now_ns()
        manifest.clock_anchors.append(environment.clock_anchor())
        self._count_steps()
        manifest.collectors = self._collecting.reports()
        log.summarize(self._overhead)
        self._overhead.close_ns = manifest.end_ns - closing_ns
        self._part.release()
        self._part.save()
        # The run that a launcher was told to make is closed by it.
        if self.info.world_size == 1 and not (
            self.path == self._output and claim.launched(self.path)
        ):
            finalize(self._place, command=manifest.command, workload=self.options.name)

    def _count_steps(self) -> None:
        """Note how many steps are on disk: all of them, unless writing them failed."""
        log = self._steps.log
        self._manifest.steps_source = log.source if log.written else None
        self._manifest.steps_count = log.written

    def _settle(self) -> None:
        """Have this recording replace the run that was there, if it was told to and has a step."""
        if not self.options.force or claim.launched(self._output):
            return
        no_steps_dir = claim.settled(self._replaced)
        if no_steps_dir is not None:
            no_steps_path = self._output.with_name(no_steps_dir.name)
            inside = self.path.relative_to(self._output)
            self.path, self._place = no_steps_path / inside, no_steps_dir / inside
            say(no_step(self._output, no_steps_path))

    def announce(self) -> None:
        """Say on stderr, at the end of a profile, where the run is and what its findings warn of.

        One rank of a job speaks; where a command of chopper launched the program, that command.
        """
        if self.info.rank == 0 and self._closed and not claim.launched():
            with contextlib.suppress(Exception):  # the profiler never changes the program
                announce(self._place, self.path, self._manifest)

    def _give_up(self, exc: BaseException) -> None:
        """Stop recording for good; the program goes on."""
        global _active
        was_recording, self.recording = self.recording, False
        self._over.set()
        _active = None if _active is self else _active
        if self.problem is None:
            self._say_stopped(exc)
        if not was_recording:
            self._guard.disarm()
            return
        steps = self._steps
        atexit.unregister(self.close)
        for let_go in (
            self._guard.disarm,
            self._leave_children,
            steps.unwatch,
            steps.windows.give_up,
            self._collecting.stop,
            steps.phases.close,
        ):
            with contextlib.suppress(Exception):
                let_go()
        with contextlib.suppress(Exception):
            self._manifest.end_ns = clock.now_ns()
            self._count_steps()
            self._manifest.collectors = self._collecting.reports()
            self._part.release()
            self._part.save()
            self._settle()

    def _say_stopped(self, exc: BaseException) -> None:
        """Say why the recording stopped: on stderr, in the manifest and to ``chopper record``."""
        self.problem = exception_text(exc)
        say(f"recording stopped: {self.problem}; the program goes on")
        note("failed", f"recording stopped: {self.problem}")
        with contextlib.suppress(AttributeError):  # there is no folder to say it in
            self._manifest.status = ending(exc)[0]
            self._manifest.error = f"recording stopped: {self.problem}"
            if isinstance(exc, Exception):
                log = self._steps.log
                with contextlib.suppress(Exception):
                    log.close()
                self._part.note(
                    "run.stopped",
                    own_rank=self.info.rank,
                    step=log.number,
                    problem=self.problem,
                    steps=plural(log.written, "step"),
                )

    def forked(self) -> None:
        """Stop, in a forked child: this process does not record."""
        global _active
        self.recording = False
        _active = None
        # Another thread may have held it: that thread is not in here.
        self._lock = threading.RLock()
        self._busy = 0
        if self._collecting.trace is not None:
            self._collecting.trace.lock = self._lock
        atexit.unregister(self.close)
        self._guard.disarm()
        self._steps.unwatch()
        self._steps.windows.forked()
        if not signals.forks_loader_worker():
            arming.arm_forked(start_from_environment)


def open_session(options: Options, *, infers: bool = False) -> Session:
    """Start to record in this process, which ``infers`` where it showed no sign of training.

    A cell of a notebook may run again: in an interactive interpreter a recording that an earlier
    cell left open ends here, and one that stands in the output stays: the new one goes beside it.

    Raises:
        UsageError: this process records already.
        OutputError: the output would overwrite something.
    """
    interactive = hasattr(sys, "ps1")
    if _active is not None and interactive and not _active.options.automatic:
        say(f"the recording to {_active.path}, which was left open, ends here")
        _active.end_with(None)
    if _active is not None:
        raise UsageError(
            f"chopper.profile: this process is recording to {_active.path} already; leave that "
            "profile before entering another"
        )
    info = launchers.rank_info()
    path = claim.choose_output(options.output, options.name, info)
    if interactive and not options.force and not claim.launched():
        path = claim.unused(path, info.rank)
    with contextlib.suppress(OSError):  # what cannot be read is found out, harmlessly, by start()
        claim.check_rank_output(path, info.rank, force=options.force)
    if options.trace and "torch" not in sys.modules:
        # The program is about to train: it will import torch anyhow.
        with contextlib.suppress(ImportError):
            import torch  # noqa: F401
    if not options.automatic:
        arming.disarm()
    session = Session(options, path, info, infers=infers)
    session.start()
    return session


def start_from_environment(*, infers: bool = False) -> Session | None:
    """Start the recording that ``chopper record`` asks for; say on stderr why it cannot begin."""
    try:
        wanted = json.loads(os.environ[arming.HOOK_VARIABLE])
        options = make_options(output=None, automatic=True, **wanted)
        session = open_session(options, infers=infers)
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


signals.watch_forks(_before_fork, _in_forked_child)
