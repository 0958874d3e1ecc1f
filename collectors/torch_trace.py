"""The torch profiler (Kineto) as a collector: traces a window of steps, writes it outside them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import gc
import gzip
import json
import mmap
import os
import re
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

from chopper.collectors.base import Availability, CollectorContext, Scope
from chopper.errors import CaptureError, reason_of
from chopper.storage import clock
from chopper.storage.files import create
from chopper.storage.manifest import CollectorReport

NAME = "torch_trace"
BY_DEFAULT = True
TRACE = "trace.json"
_GZIP_LEVEL = 1  # 8 times smaller at 150 MB/s; the default level gains 15 % for 5 times the time
_STRAGGLERS_S = 0.002
_SENTINEL = "chopper::end"
_UNFINISHED = b'"finished": false'
_CLOSE_SOON = (_SENTINEL.encode(), b"Optimizer.step#", b"gloo:")
"""Spans that are open when a trace ends and closed long before another can begin."""


class TorchTrace:
    """Traces when told to: ``prepare`` (a step ahead), ``begin``, ``end``, ``export``.

    What ``end`` leaves in memory is exported or dropped before anything else begins: two traces
    at a time in one process crash Kineto. So the program's own profilers go first: between
    ``start`` and ``stop`` this sees them begin (``foreign``, ``on_foreign``).

    Args:
        shapes: record operators' input shapes and dtypes; FLOP and bytes rest on them.
        stacks: record Python's call stacks; costs much.
        memory: record allocations.
    """

    name: ClassVar[str] = NAME
    scope: ClassVar[Scope] = "rank"

    def __init__(self, *, shapes: bool = True, stacks: bool = False, memory: bool = False) -> None:
        self._options = {"record_shapes": shapes, "with_stack": stacks, "profile_memory": memory}
        self.has_stacks = stacks
        self._profiler: Any = None
        self._held: Any = None
        self._directory: Path | None = None
        self._owner: threading.Thread | None = None
        """The thread that is traced, which alone can end the trace; None when all of them are."""
        self._all_threads = False
        """True where all threads are to be traced: the program trains outside its main one."""
        self._any_can_end = False
        """True where they are, so that any of them can end the trace."""
        self._own_call = False
        self._foreign_runs = False
        """Or is prepared."""
        self._patched: dict[str, tuple[Any, Any]] = {}
        self._log_level_set = False
        self.lock: AbstractContextManager[Any] = threading.RLock()
        """Held while a profiler of the program's is given way to."""
        self.on_foreign: Callable[[bool], None] | None = None
        """Called when a profiler of the program's is about to begin while a trace is taken. With
        False in the thread that takes it: it must have ended, and be exported or dropped, on
        return. With True in another thread: the trace is lost."""
        self.active = False
        self.marks: list[tuple[str, int, int]] = []
        """Spans of the trace with the time just before and just after they began."""
        self._offset_ns = 0
        """How far the wall clock, by which Kineto tells times, was set before the trace began."""
        self.clock_was_set = False
        """True where it was set while the last trace was taken: Kineto places the processor's count
        of cycles on it by its time at the start and the end."""
        self.alignment_error_ns: int | None = None
        """The trace's clock differs from the wall clock by no more."""
        self.left_open = False
        """True where spans were open when the last exported trace ended, or may have been.

        When such a span closes while another trace is being taken, torch writes its end into the
        freed memory of the first.
        """

    def probe(self, context: CollectorContext) -> Availability:  # noqa: ARG002
        """Available where torch was built with Kineto."""
        from importlib.util import find_spec

        if find_spec("torch") is None:
            return Availability(False, "torch is not installed", "pip install torch")
        from torch.profiler import kineto_available

        if not kineto_available():
            return Availability(
                False, "this torch was built without Kineto", "install an official build of torch"
            )
        return Availability(True)

    def start(self, context: CollectorContext) -> None:
        """Remember where to write; nothing is traced before ``begin``."""
        self._directory = context.directory
        # Each start and stop of a trace would otherwise print a line into the program's stderr.
        if "KINETO_LOG_LEVEL" not in os.environ:
            os.environ["KINETO_LOG_LEVEL"] = "99"
            self._log_level_set = True
        self.settle()
        self._watch_profilers()
        self._all_threads = threading.current_thread() is not threading.main_thread()

    @property
    def mine(self) -> bool:
        """True where this thread can end the trace: it began in this one, or is of all threads."""
        return self._owner is None or self._owner is threading.current_thread()

    @property
    def foreign(self) -> bool:
        """True while a profiler of the program's is being prepared, or runs."""
        if self.active:
            return False
        from torch.autograd import profiler

        enabled = getattr(profiler, "_is_profiler_enabled", False) or _profiler_enabled()
        return self._foreign_runs or enabled

    @staticmethod
    def uncountable() -> str | None:
        """Return why torch's profiler counts no hardware events here; None where it may."""
        import torch
        from torch.profiler import ProfilerActivity

        if torch.version.hip is not None:
            return (
                "torch's profiler has none on AMD; run the command once more under rocprofv3 --pmc "
                "NAME --output-format csv, and import its tables with the trace"
            )
        torch_profiler: Any = torch.profiler
        if ProfilerActivity.CUDA not in torch_profiler.supported_activities():
            return "torch's profiler sees no NVIDIA device here"
        return None

    def prepare(self, metrics: Sequence[str] = ()) -> None:
        """Set the device's tracing up, which takes a while, one step ahead of ``begin``."""
        if self._profiler is None:
            self._profiler = self._make(metrics)
            with self._own_calls(), _compiler_left_alone():
                self._profiler.prepare_trace()

    def begin(self, metrics: Sequence[str] = ()) -> None:
        """Trace from here on, or count what ``metrics`` name while each kernel runs."""
        self.prepare(metrics)
        with self._own_calls():
            self._profiler.start_trace()
            # Tells who imports traces of several ranks without their run that they share a clock.
            self._profiler.add_metadata_json("host_name", json.dumps(socket.gethostname()))
        self._owner = None if self._any_can_end else threading.current_thread()
        if not metrics:
            self.marks = []
        self._offset_ns, self.clock_was_set = clock.set_by_ns(), False
        self.active = True

    def end(self) -> None:
        """Stop tracing; the events stay in memory for ``export``.

        Raises CaptureError, and the trace is lost, in another thread than it began in, or when
        another profiler ended it.
        """
        if not self.active:
            return
        if not self.mine:
            self.abandon()
            raise CaptureError("the trace must be ended by the thread that began it")
        self.active = False
        if self._owner is not None and not _profiler_enabled():
            self.abandon()
            raise CaptureError("the trace was ended by another profiler in the program")
        import torch
        from torch.autograd.profiler import record_function

        with self._own_calls():
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                # gloo's threads close their spans some µs after they woke the one that waited.
                time.sleep(_STRAGGLERS_S)
            with record_function(_SENTINEL):
                self._profiler.stop_trace()
        self.clock_was_set = abs(clock.set_by_ns() - self._offset_ns) > clock.SET_NS
        self._held, self._profiler = self._profiler, None
        self._owner = None

    @contextlib.contextmanager
    def _own_calls(self) -> Iterator[None]:
        """The block in which the profiler is called from here, and not by the program."""
        before, self._own_call = self._own_call, True
        try:
            yield
        finally:
            self._own_call = before

    def abandon(self, *, lost: bool = False) -> None:
        """Leave a trace that cannot be ended from here; its own thread ends it when it comes by.

        To free it would crash, and so would the end of the process while it runs.

        Args:
            lost: another profiler took Kineto's session from it.
        """
        if self.active and self._owner is not None:
            if not _abandoned:
                atexit.register(self._settle_at_exit)
            _abandoned.append(_Abandoned(self._owner, self._profiler, lost))
        self.forget()

    def forget(self) -> None:
        """Have no trace, whatever runs: in a forked child, nothing does."""
        self.active = False
        self._profiler = None
        self._owner = None

    def settle(self) -> None:
        """Stop the abandoned traces of this thread, unless the program's own profiler runs."""
        for entry in _abandoned.copy() if _abandoned else ():
            if entry.owner is not threading.current_thread() or not _profiler_enabled():
                continue
            if entry.lost and self._foreign_runs:
                continue
            with self._own_calls():
                if entry.lost:
                    _end_lost()
                else:
                    entry.profiler.stop_trace()
            _abandoned.remove(entry)
            self._held = entry.profiler
            self.drop()

    def _settle_at_exit(self) -> None:
        self._foreign_runs = False  # whatever runs in other threads, it ends here
        try:
            self.settle()
        except RuntimeError:  # no thread can be started any more
            leave_without_destructors()
        if _abandoned:
            leave_without_destructors()

    def drop(self) -> None:
        """Free the trace in memory, now.

        torch's profile object is part of a reference cycle, and Kineto's results are unsafe to free
        once another trace began or the interpreter winds down: they cannot be left to the garbage
        collector.
        """
        held, self._held = self._held, None
        if held is not None and held.profiler is not None:
            held.profiler.kineto_results = None
            held.profiler = None

    def export(self) -> Path | None:
        """Write the trace as plain JSON, which is fast; ``compress`` follows later.

        Returns None where its times are of no use, as the wall clock was set meanwhile.

        Raises CaptureError where it could not be written whole; the disk may be full.
        """
        assert self._directory is not None
        target = self._directory / TRACE
        temporary = self._directory / f".{TRACE}.tmp"
        try:
            temporary.unlink(missing_ok=True)  # it may be a link
            with _as_utf8(temporary) as path:
                self._held.export_chrome_trace(path)
            self.drop()
            # Kineto's writer does not say when the disk is full: look for the closing brace.
            with temporary.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 16))
                if not file.read().rstrip().endswith(b"}"):
                    raise OSError("it was cut short")
                self.left_open = _left_open(file)
            if self.clock_was_set:
                temporary.unlink()
                return None
            if self._offset_ns:
                _shift(temporary, -self._offset_ns)
            temporary.replace(target)
        except (OSError, RuntimeError) as exc:
            reason = _why_cut(temporary, exc)
            temporary.unlink(missing_ok=True)
            raise CaptureError(f"{target}: the trace cannot be written ({reason})") from exc
        return target

    def counted(self) -> list[tuple[int, str, dict[str, float]]]:
        """Return device, name and counters of each kernel since ``begin``, which are then dropped.

        CUPTI runs the kernels one after the other; torch's events say in which order, at times that
        it made up.
        """
        assert self._directory is not None
        temporary = self._directory / ".counters.json.tmp"
        try:
            with _as_utf8(temporary) as path:
                self._held.export_chrome_trace(path)
            events = json.loads(temporary.read_bytes())["traceEvents"]
        except (OSError, RuntimeError, ValueError) as exc:
            raise CaptureError(f"the counters cannot be read ({exc})") from exc
        finally:
            self.drop()
            temporary.unlink(missing_ok=True)
        ranges = [event for event in events if event.get("cat") == "cuda_profiler_range"]
        ranges.sort(key=lambda event: event["ts"])
        return [(event["pid"], event["name"], event["args"]) for event in ranges]

    def compress(self) -> str:
        """Replace the trace by its gzip, if the disk lets it; return the name that stands now."""
        assert self._directory is not None
        plain = self._directory / TRACE
        packed = self._directory / f"{TRACE}.gz"
        temporary = self._directory / f".{TRACE}.gz.tmp"
        try:
            with (
                plain.open("rb") as source,
                create(temporary) as file,
                gzip.open(file, "wb", _GZIP_LEVEL) as sink,
            ):
                with mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as text:
                    self.alignment_error_ns = alignment_error_ns(text, self.marks)
                shutil.copyfileobj(source, sink, 1 << 20)
            temporary.replace(packed)
        except OSError:
            temporary.unlink(missing_ok=True)
            return plain.name
        plain.unlink()
        return packed.name

    def stop(self) -> CollectorReport:
        """End a trace that still runs, or was prepared, and drop it."""
        if not _abandoned:
            self._unwatch_profilers()
        if self._log_level_set and os.environ.get("KINETO_LOG_LEVEL") == "99":
            del os.environ["KINETO_LOG_LEVEL"]
        if self.active and not self.mine:
            self.abandon()
        else:
            self._discard()
        return CollectorReport(
            name=self.name,
            status="obtained",
            clock_alignment_error_ns=self.alignment_error_ns,
        )

    def _discard(self) -> None:
        """End and drop a trace, also one that was only prepared."""
        if self._profiler is not None and not self.active and not self.foreign:
            self.begin()  # what is prepared ends in no other way
        self._profiler = self._profiler if self.active else None
        self.end()
        self.drop()

    def _watch_profilers(self) -> None:
        """See the program's own profilers begin and end."""
        from torch.autograd import profiler

        for name, before in (
            ("_prepare_profiler", self._before_prepare),
            ("_enable_profiler", self._before_enable),
            ("_disable_profiler", self._before_disable),
        ):
            original = getattr(profiler, name, None)
            if original is not None:
                wrapped = self._wrapped(original, before)
                self._patched[name] = (original, wrapped)
                setattr(profiler, name, wrapped)

    def _wrapped(self, original: Any, before: Callable[..., None]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._own_call:
                before(*args, **kwargs)
            return original(*args, **kwargs)

        return call

    def _unwatch_profilers(self) -> None:
        from torch.autograd import profiler

        for name, (original, wrapped) in self._patched.items():
            # Somebody may have wrapped it once more: then it stays, and only passes on.
            if getattr(profiler, name, None) is wrapped:
                setattr(profiler, name, original)
        self._patched = {}
        self.on_foreign = None

    def _before_prepare(self, *_args: Any, **_kwargs: Any) -> None:
        self._give_way()
        self._foreign_runs = True

    def _before_enable(self, config: Any, activities: Any, *_args: Any, **_kwargs: Any) -> None:
        from torch.autograd import profiler

        if activities or self.mine:
            # One that was prepared before this trace was: Kineto has forgotten that.
            if self._give_way() and activities and self._patched:
                self._patched["_prepare_profiler"][0](config, activities)
                profiler._set_is_profiler_enabled(True)
            self._foreign_runs = bool(activities)

    def _before_disable(self, *_args: Any, **_kwargs: Any) -> None:
        self._foreign_runs = False

    def _give_way(self) -> bool:
        """Stop our trace, if any, before another profiler starts; return whether there was one."""
        with self.lock:
            self.settle()
            if self._profiler is None:
                return False
            if not self.mine:
                # Kineto has one session, which the other profiler takes over; torch's own side of
                # the trace can only be ended by its own thread, later (``settle``).
                self.abandon(lost=True)
                if self.on_foreign is not None:
                    self.on_foreign(True)
                return True
            if self.active:
                _end_spans()
                if self.on_foreign is not None:
                    self.on_foreign(False)
            self._discard()
            return True

    def _make(self, metrics: Sequence[str]) -> Any:
        import torch.profiler
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity

        torch_profiler: Any = torch.profiler
        if metrics:
            # Alone: CUPTI counts and traces at different times only.
            return torch_profiler.profile(
                activities=[ProfilerActivity.CUDA],
                experimental_config=_ExperimentalConfig(
                    profiler_metrics=[*metrics], profiler_measure_per_kernel=True
                ),
            )
        config, self._any_can_end = _experimental_config(
            trace_only=not self.has_stacks, all_threads=self._all_threads
        )
        wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU}
        return torch_profiler.profile(
            activities=list(wanted & torch_profiler.supported_activities()),
            experimental_config=config,
            **self._options,
        )


class _Abandoned(NamedTuple):
    """A profiler that must not be freed."""

    owner: threading.Thread
    """The thread that it runs in."""
    profiler: Any
    lost: bool
    """True where another profiler took Kineto's session from it."""


_abandoned: list[_Abandoned] = []


def _end_lost() -> None:
    """End torch's side of a trace whose session in Kineto is gone, in the thread that began it.

    Without a session that collects, torch's end of a trace reads what is not there. So another
    thread begins one, which this end takes; what is left of the other's holds nothing, and may end
    in a session that is only prepared.
    """
    from torch.autograd import profiler as torch_profiler
    from torch.profiler import ProfilerActivity

    module: Any = torch_profiler
    _end_spans()
    spare = module.profile(use_kineto=True)
    config, activities = spare.config(), {ProfilerActivity.CPU}
    begun, ended = threading.Event(), threading.Event()
    lent = False

    def lend() -> None:
        nonlocal lent
        try:
            module._prepare_profiler(config, activities)
            module._enable_profiler(config, activities)
            lent = True
        finally:
            begun.set()
        ended.wait()
        module._prepare_profiler(config, activities)
        module._disable_profiler()

    thread = threading.Thread(target=lend, name="chopper")
    thread.start()
    begun.wait()
    if not lent:
        raise RuntimeError("Kineto has no session to end the trace in")
    module._disable_profiler()
    ended.set()
    thread.join()
    module._run_on_profiler_stop()


@contextlib.contextmanager
def _compiler_left_alone() -> Iterator[None]:
    """Keep torch.profiler from importing torch's compiler, which takes seconds, for one setting.

    A program that compiles has it loaded: its setting is read as ever.
    """
    import torch

    names = vars(torch)
    load = names.get("__getattr__")
    if load is None or "torch._inductor" in sys.modules:
        yield
        return
    here = threading.get_ident()

    def load_others(name: str) -> Any:
        if name == "_inductor" and threading.get_ident() == here:
            raise AttributeError(name)
        return load(name)

    names["__getattr__"] = load_others
    try:
        yield
    finally:
        names["__getattr__"] = load


def _profiler_enabled() -> bool:
    """Return whether a profiler runs in this thread."""
    from torch._C._autograd import _profiler_enabled as enabled

    return enabled()


def _end_spans() -> None:
    """End every ``record_function`` that is open, as far as this trace goes.

    One that closed while the next trace is taken would write into freed memory of this one. Its
    own end, later on, does nothing then.
    """
    import torch
    from torch.autograd.profiler import record_function

    leave = torch.ops.profiler._record_function_exit._RecordFunction
    for thing in gc.get_objects():
        if type(thing) is record_function:
            record = getattr(thing, "record", None)
            if record is not None:
                leave(record)


@contextlib.contextmanager
def _as_utf8(path: Path) -> Iterator[str]:
    """Give a path that Kineto can open: torch takes no other than UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{directory}/{path.name}"
        finally:
            os.close(directory)
    else:
        yield str(path)


def _why_cut(path: Path, exc: Exception) -> str:
    """Return why Kineto could not write a file whole, which it does not say."""
    try:
        with path.open("ab") as file:
            file.write(bytes(1 << 16))
    except OSError as found:
        return reason_of(found)
    most_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most_bytes != resource.RLIM_INFINITY:
        return f"{os.strerror(errno.EFBIG)}: more than the {most_bytes} bytes of ulimit -f"
    return str(exc)


def _left_open(file: BinaryIO) -> bool:
    """Return whether a trace has spans that were open at its end, but for those that close soon.

    The sentinel was: a version of Kineto that does not say so of it cannot be relied on.
    """
    file.seek(0)
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        open_spans = []
        at = data.find(_UNFINISHED)
        while at != -1:
            start = data.rfind(b'"name":', 0, at)
            open_spans.append(data[start : start + 120])
            at = data.find(_UNFINISHED, at + 1)
    if not any(_SENTINEL.encode() in span for span in open_spans):
        return True
    return any(not any(known in span for known in _CLOSE_SOON) for span in open_spans)


def _experimental_config(*, trace_only: bool, all_threads: bool) -> tuple[Any, bool]:
    """The options that this version of torch has, and whether all threads are traced with them.

    Autograd's and gloo's threads are always recorded. A program that trains outside of its main
    thread may run the forward in one thread and the optimizer in another, and any of them may be
    gone when the trace is to end: there all threads are traced. ``record_python_gc_info`` only
    works together with stacks, so the garbage collector is annotated by ``annotate``.
    """
    from torch._C._profiler import _ExperimentalConfig

    wanted = {
        "enable_cuda_sync_events": True,
        "trace_only": trace_only,
        "profile_all_threads": all_threads,
    }
    options: dict[str, Any] = {}
    for name in (name for name, value in wanted.items() if value):
        with contextlib.suppress(TypeError):
            trial: dict[str, Any] = {name: True}
            _ExperimentalConfig(**trial)
            options[name] = True
    return _ExperimentalConfig(**options), "profile_all_threads" in options


def leave_without_destructors() -> None:
    """Have this process end, when its time comes, without the C++ destructors.

    In a forked child, Kineto's wait for its thread, which is not in the child: they hang, or abort.
    Where a trace can no longer be ended, they crash. Python has ended in order by then; what C
    holds in its buffers is written.
    """
    libc = ctypes.CDLL(None)
    try:
        flush, leave, on_exit, at_exit = libc.fflush, libc._exit, libc.on_exit, libc.__cxa_atexit
    except AttributeError:  # not glibc
        return
    on_exit(leave, None)  # called with the exit status
    at_exit(flush, None, None)  # the last one registered is called first; NULL: all of them


_BASE = re.compile(rb'"baseTimeNanoseconds": *(\d+)[,\s}]')
_TS = re.compile(rb'"ts": *(\d+)(?:\.(\d+))?[,\s}]')
_NEAR = 1024
"""Bytes of an event's text after its name in which its time stands."""


def _shift(path: Path, by_ns: int) -> None:
    """Move all times of a Kineto trace."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as text:
        base = _BASE.search(text)
        if base is None:
            raise OSError("the wall clock was set, and this torch writes no baseTimeNanoseconds")
        moved = str(int(base[1]) + by_ns).encode()
        start, end = base.span(1)
        if len(moved) > end - start:
            raise OSError("the wall clock was set to times before those of computers")
        text[start:end] = moved.rjust(end - start)


def alignment_error_ns(
    trace: bytes | mmap.mmap, marks: Iterable[tuple[str, int, int]]
) -> int | None:
    """Return by how much the clock of a Kineto trace differs from the recording's at most, in ns.

    The span that was clocked most tightly says so; None where the trace has none of them. A mark is
    the name of a span, and the time just before and just after it began, in ns.
    """
    base = _BASE.search(trace)
    base_ns = int(base[1]) if base else 0
    errors_ns = []
    for name, before_ns, after_ns in marks:
        at = trace.find(f'"{name}"'.encode())
        began = _TS.search(trace, at, at + _NEAR) if at >= 0 else None
        if began is not None:
            fraction_ns = int((began[2] or b"").ljust(3, b"0")[:3])
            began_ns = base_ns + int(began[1]) * 1000 + fraction_ns
            errors_ns.append(max(abs(began_ns - before_ns), abs(began_ns - after_ns)))
    return min(errors_ns, default=None)
