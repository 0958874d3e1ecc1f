"""Record a training loop: the context manager, the decorator, the handle inside."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from chopper.errors import CaptureError, UsageError
from chopper.recording import session as _session
from chopper.recording.logs import Phase
from chopper.recording.options import Options, WindowSpec, make_options, numbered

_T = TypeVar("_T")
_F = TypeVar("_F", bound="Callable[..., Any]")


def profile(
    output: str | Path | None = None,
    *,
    collect: str | Iterable[str] | None = None,
    steps: WindowSpec = None,
    shapes: bool = True,
    stacks: bool = False,
    memory: bool = False,
    counters: bool = False,
    trace: bool = True,
    trace_limit: float = 1.0,
    name: str | None = None,
    force: bool = False,
) -> Profile:
    """Record the training loop in a ``with`` block, or a decorated function.

        with chopper.profile("runs/mine") as prof:
            for batch in prof.watch(loader):   # optional: shows the wait for input
                train_step(batch)
                prof.step()                    # optional: else found through optimizers

    Every rank enters it; each writes its own part of the run. Telemetry runs throughout; a window
    of steps is traced. The program is never changed: its exceptions propagate, and a failure of
    the recording itself is one line on stderr while the program continues. At the end, rank 0
    prints to stderr where the run is, and the warnings among its findings.

    Processes that the block starts and that train are recorded too, with the same options: ranks of
    a job as ranks of this run, others as runs inside it (``<output>/process-2``, …).

    Args:
        output: the run directory; ``CHOPPER_OUTPUT`` or else ``runs/<time>`` by default.
        collect: names of the collectors to use, as a list or comma-separated; those that
            ``chopper doctor`` marks as default otherwise.
        steps: the steps to trace, from 0: ``(10, 15)``, ``range(10, 15)`` or ``"10:15"``. By
            default ``2:7``, replaced by ``50:55`` when the program gets that far, unless it has one
            rank whose steps still take as long as the traced ones; the first step when it is
            shorter.
        shapes: record operators' shapes; needed for FLOP and bytes.
        stacks: record Python's call stacks in the trace; slow.
        memory: record each allocation in the trace, and the allocator's own history where it
            keeps one (NVIDIA, AMD).
        counters: measure hardware counters of each kernel (NVIDIA) in three steps of their own
            after a traced window, which run slower.
        trace: False for telemetry and steps only.
        trace_limit: size limit of a trace, as a multiple of the default: about 300,000 events,
            1 GB of memory and 60 s. Tracing ends before a step that would exceed it.
        name: stored in the run, and part of the default path.
        force: replace an earlier run in ``output``. A recording without a step replaces none: it is
            kept as ``<output>.no-steps``.

    Raises:
        CaptureError: this is not Linux, where nothing can be recorded.
        UsageError: unknown collector, or empty ``steps``. Entering raises it if this process is
            already recording, and OutputError if ``output`` holds a run.
    """
    if sys.platform != "linux":
        raise CaptureError(
            f"recording needs Linux, this is {sys.platform}; analysis and reports work here"
        )
    return Profile(
        make_options(
            output=output,
            collect=collect,
            steps=steps,
            shapes=shapes,
            stacks=stacks,
            memory=memory,
            counters=counters,
            trace=trace,
            trace_limit=trace_limit,
            name=name,
            force=force,
        )
    )


class Profile:
    """A recording before, during and after it runs, created by :func:`profile`."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._session: _session.Session | None = None
        self._guest = False
        self._quiet = False
        self._output: Path | None = None

    @property
    def output(self) -> Path | None:
        """The run directory; None before the recording starts."""
        return self._output

    @property
    def recording(self) -> bool:
        """True while it records: false before it is entered and after it failed."""
        session = self._session
        return session is not None and session.recording

    def __enter__(self) -> Profile:
        running = _session.active()
        # `chopper record` may have begun before the program's own profile: there is one recording.
        self._guest = running is not None and running.options.automatic
        self._session = running if self._guest else _session.open_session(self._options)
        assert self._session is not None
        self._output = self._session.path
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        session, self._session = self._session, None
        if session is not None and not self._guest:
            session.end_with(exc)
            self._output = session.path
            if not self._quiet:
                session.announce()

    def __call__(self, function: _F) -> _F:
        """Record each call of ``function``.

        The first one goes to ``output``, the next to ``<output>-2`` and so on. A call made while
        this process records already, an inner one say, is part of that recording.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise UsageError(
                f"chopper.profile: {function.__qualname__} is a generator; decorate the function "
                "that runs the loop, or use a with block"
            )
        calls = itertools.count(1)

        def next_recording() -> AbstractContextManager[Any]:
            if _session.active() is not None:
                return contextlib.nullcontext()
            return self.again(next(calls))

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def recorded_async(*args: Any, **kwargs: Any) -> Any:
                with next_recording():
                    return await function(*args, **kwargs)

            return recorded_async  # type: ignore[return-value]

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with next_recording():
                return function(*args, **kwargs)

        return recorded  # type: ignore[return-value]

    def again(self, call: int) -> Profile:
        """Return the recording for the n-th call, from 1: the second one is ``<output>-2``."""
        profile = Profile(numbered(self._options, call))
        profile._quiet = call > 1  # only the first one speaks at its end
        return profile

    def step(self, *, tokens: int | None = None) -> None:
        """Mark the end of a training step. After the first call, steps are no longer inferred.

        Args:
            tokens: number that this rank processed in the step, for energy per token.
        """
        session = self._session
        if session is not None:
            session.mark(tokens)

    def watch(self, iterable: Iterable[_T]) -> Watched[_T]:
        """Iterate over ``iterable`` so that the trace shows the wait for each item.

        The wait is a span ``chopper::data``. The result has the length and the attributes of
        ``iterable``.
        """
        return Watched(iterable, self)

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        """Return a ``with`` block that appears as ``name`` in the trace; free without a trace."""
        # Read once: a thread that loads data may ask while the block ends.
        session = self._session
        if session is None or not session.tracing:
            return contextlib.nullcontext()
        from torch.autograd.profiler import record_function

        span: AbstractContextManager[Any] = record_function(name)
        return span

    def phase(self, name: str) -> Phase:
        """Return a ``with`` block for work outside training steps, such as evaluation.

            with prof.phase("evaluation"):
                evaluate(model)

        It is recorded with and without a trace. Its time has the phase ``name`` in all results,
        and its work does not count for the step's ideal time or model FLOP. Phases may nest: the
        innermost has the time. Forward passes with gradients, backward and the optimizer's step
        keep their own phases inside it.

        Args:
            name: ``evaluation``, ``generation``, ``rollout``, ``checkpoint``, ``inference``, or any
                other.
        """
        return Phase(self._session, name)

    def measure(self, name: str, value: float, **labels: str | int | float) -> None:
        """Store a number that the program measured in the run.

            prof.measure("tokens_per_s", 48_000)
            prof.measure("bus_bytes_per_s", 2.1e9, collective="all_reduce", size_bytes=1 << 20)

        Args:
            name: what it is, with its unit as suffix. ``link_bytes_per_s`` without labels states
                the rate of the link between the ranks, in one direction: their transfers are then
                compared with it.
            value: the number; NaN, infinity and non-numbers are dropped, with a finding.
            labels: what was measured; stored as text if not numbers.
        """
        session = self._session
        if session is not None:
            session.measure(name, value, labels)

    def __repr__(self) -> str:
        state = "recording to" if self.recording else "not recording; output"
        return f"<chopper.Profile {state} {self._output or self._options.output}>"


class Watched(Generic[_T]):
    """An iterable that lets the trace see how long each item took to come."""

    def __init__(self, iterable: Iterable[_T], profile: Profile) -> None:
        self._iterable = iterable
        self._profile = profile

    def __iter__(self) -> Iterator[_T]:
        from chopper.recording.annotate import DATA

        with self._profile.annotate(DATA):
            items = iter(self._iterable)
        while True:
            with self._profile.annotate(DATA):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item

    def __next__(self) -> _T:
        from chopper.recording.annotate import DATA

        with self._profile.annotate(DATA):
            return next(self._iterable)  # type: ignore[call-overload, no-any-return]

    def __bool__(self) -> bool:
        return bool(self._iterable)

    def __getitem__(self, key: Any) -> Any:
        return self._iterable[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask before there is anything to ask
            raise AttributeError(name)
        return getattr(self._iterable, name)
