"""The torch profiler (Kineto) as a collector: traces a window of steps, writes it outside them."""

from __future__ import annotations

import gzip
import mmap
import os
import shutil
import time
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from chopper.collectors.base import Availability, CollectorContext, Scope
from chopper.errors import CaptureError
from chopper.manifest import CollectorReport

if TYPE_CHECKING:
    from pathlib import Path

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
    at a time in one process crash Kineto.

    Args:
        shapes: record operators' input shapes and dtypes; FLOP and bytes rest on them.
        stacks: record Python's call stacks; costs much.
        memory: record allocations.
    """

    name: ClassVar[str] = "torch_trace"
    scope: ClassVar[Scope] = "rank"

    def __init__(self, *, shapes: bool = True, stacks: bool = False, memory: bool = False) -> None:
        self._options = {"record_shapes": shapes, "with_stack": stacks, "profile_memory": memory}
        self._stacks = stacks
        self._profiler: Any = None
        self._held: Any = None
        self._directory: Path | None = None
        self.active = False
        self.left_open = False
        """Whether spans were open when the last exported trace ended, or may have been.

        When such a span closes while another trace is being taken, torch writes its end into the
        freed memory of the first.
        """

    def probe(self, context: CollectorContext) -> Availability:  # noqa: ARG002
        """Whether torch is there and was built with Kineto."""
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
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    def prepare(self) -> None:
        """Set the device's tracing up, which takes a while, one step ahead of ``begin``."""
        if self._profiler is None:
            self._profiler = self._make()
            self._profiler.prepare_trace()

    def begin(self) -> None:
        """Trace from here on."""
        self.prepare()
        self._profiler.start_trace()
        self.active = True

    def end(self) -> None:
        """Trace no longer; what was traced stays in memory for ``export``."""
        if not self.active:
            return
        self.active = False
        import torch

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # gloo's threads close their spans some µs after they woke the one that waited.
            time.sleep(_STRAGGLERS_S)
        from torch.autograd.profiler import record_function

        with record_function(_SENTINEL):
            self._profiler.stop_trace()
        self._held, self._profiler = self._profiler, None

    def drop(self) -> None:
        """Free what is held in memory, now.

        torch's profile object is part of a reference cycle, and Kineto's results are unsafe to free
        once another trace began or the interpreter winds down: they cannot be left to the garbage
        collector.
        """
        held, self._held = self._held, None
        if held is not None and held.profiler is not None:
            held.profiler.kineto_results = None
            held.profiler = None

    def export(self) -> Path:
        """Write what is held as plain JSON, which is fast; ``compress`` follows later.

        Raises:
            CaptureError: it could not be written whole; the disk may be full.
        """
        assert self._directory is not None
        target = self._directory / TRACE
        temporary = self._directory / f".{TRACE}.tmp"
        try:
            self._held.export_chrome_trace(str(temporary))
            self.drop()
            # Kineto's writer does not say when the disk is full: look for the closing brace.
            with temporary.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 16))
                if not file.read().rstrip().endswith(b"}"):
                    raise CaptureError(f"{target}: the trace was cut short; is the disk full?")
                self.left_open = _left_open(file)
            temporary.replace(target)
        except (OSError, RuntimeError) as exc:
            temporary.unlink(missing_ok=True)
            raise CaptureError(f"{target}: the trace cannot be written ({exc})") from exc
        except CaptureError:
            temporary.unlink(missing_ok=True)
            raise
        return target

    def compress(self) -> str:
        """Replace the trace by its gzip, if the disk lets it; return the name that stands now."""
        assert self._directory is not None
        plain = self._directory / TRACE
        packed = self._directory / f"{TRACE}.gz"
        temporary = self._directory / f".{TRACE}.gz.tmp"
        try:
            with plain.open("rb") as source, gzip.open(temporary, "wb", _GZIP_LEVEL) as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            temporary.replace(packed)
        except OSError:
            temporary.unlink(missing_ok=True)
            return plain.name
        plain.unlink()
        return packed.name

    def stop(self) -> CollectorReport:
        """End a trace that still runs, or was prepared, and drop it."""
        if self._profiler is not None and not self.active:
            self.begin()
        self.end()
        self.drop()
        return CollectorReport(name=self.name, status="obtained")

    def _make(self) -> Any:
        import torch.profiler
        from torch.profiler import ProfilerActivity

        torch_profiler: Any = torch.profiler

        wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
        if hasattr(ProfilerActivity, "XPU"):
            wanted.add(ProfilerActivity.XPU)
        return torch_profiler.profile(
            activities=list(wanted & torch_profiler.supported_activities()),
            experimental_config=_experimental_config(trace_only=not self._stacks),
            **self._options,
        )


def _left_open(file: BinaryIO) -> bool:
    """Whether a trace has spans that were open at its end, other than those that close soon.

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


def _experimental_config(*, trace_only: bool) -> Any:
    """The options that this version of torch has.

    ``profile_all_threads`` is not among them: autograd's and gloo's threads are recorded without
    it (it adds threads that the program started by hand). ``record_python_gc_info`` only works
    together with stacks, so the garbage collector is annotated by ``annotate``.
    """
    from torch._C._profiler import _ExperimentalConfig

    options: dict[str, Any] = {}
    wanted = {"enable_cuda_sync_events": True, "trace_only": trace_only}
    for name, value in wanted.items():
        if value:
            try:
                trial: dict[str, Any] = {name: value}
                _ExperimentalConfig(**trial)
            except TypeError:
                continue
            options[name] = value
    return _ExperimentalConfig(**options)
