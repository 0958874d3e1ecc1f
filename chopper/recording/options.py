"""Options of a recording: what to record, and where."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chopper.errors import UsageError
from chopper.recording import claim

WindowSpec = str | tuple[int, int] | range | None
"""``"10:15"``, ``(10, 15)`` or ``range(10, 15)``: the steps to trace; None for the default."""


@dataclass(frozen=True, slots=True)
class Window:
    """Steps [start, stop) that count as traced, counted from 0."""

    start: int
    stop: int
    settle: int
    """Steps before ``start`` that are traced too, and do not count: in them, ranks that took longer
    to begin catch up. They count when the program ends before there is another."""

    @property
    def begin(self) -> int:
        """The step in which tracing begins."""
        return self.start - self.settle

    def moved(self, begin: int) -> Window:
        """The window with one step to settle in, from ``begin`` on."""
        return Window(begin + 1, begin + 1 + self.stop - self.start, settle=1)

    def fitted(self, steps: int) -> Window:
        """The window without the steps that are too many for a trace of ``steps`` steps."""
        settle = min(self.settle, max(0, steps - 1))
        return Window(self.start, min(self.stop, self.start + steps - settle), settle)


DEFAULT_WINDOWS = (Window(2, 7, settle=2), Window(50, 55, settle=1))
"""The later window's trace replaces that of the first.

A run's length is not known ahead. The first window serves short runs, of a single step even; the
second sees the steady state of long ones: buffers that a data loader filled ahead have drained by
then, and allocators have settled. A rank that is alone keeps the first trace where its steps then
take as long as the traced ones. Windows are fixed in steps, not in seconds, so that all ranks
trace the same ones.
"""


DEFAULT_WINDOWS_TEXT = "2:7, replaced by 50:55 if reached and different"
"""The default, for a help text."""
DEFAULT_LIMIT_TEXT = "about 300,000 events, 1 GB of memory and 60 s"
"""The limits of a trace (``windows``), for a help text."""


def parse_windows(spec: WindowSpec) -> tuple[Window, ...]:
    """Windows from what the user gave.

    Raises:
        UsageError: not of the form START:STOP, or empty.
    """
    if spec is None:
        return DEFAULT_WINDOWS
    try:
        if isinstance(spec, str):
            first, _, last = spec.partition(":")
            start, stop = int(first or 0), int(last)
        elif isinstance(spec, range):
            start, stop = spec.start, spec.stop
        else:
            start, stop = (int(bound) for bound in spec)
    except (TypeError, ValueError) as exc:
        raise UsageError(
            f"steps to trace: found {spec!r}, expected START:STOP, for example 10:15"
        ) from exc
    if not 0 <= start < stop:
        raise UsageError(f"steps to trace: {spec!r} holds none; expected 0 <= START < STOP")
    return (Window(start, stop, settle=min(start, 1)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a recording, checked by :func:`make_options`."""

    output: str | Path | None = None
    """Run directory; None for ``CHOPPER_OUTPUT``, else ``runs/<time>``."""
    collect: tuple[str, ...] | None = None
    """Names of collectors; None for the default ones."""
    windows: tuple[Window, ...] = field(default_factory=lambda: parse_windows(None))
    """Steps to trace."""
    shapes: bool = True
    stacks: bool = False
    memory: bool = False
    counters: bool = False
    """Measure hardware counters in steps after a traced window."""
    trace: bool = True
    trace_limit: float = 1.0
    """Limit of a trace, as a multiple of the default."""
    name: str | None = None
    force: bool = False
    from_import: bool = False
    """Record from the import of torch on, without a sign of training."""
    gather: bool = False
    """At the end, hand the files of ranks on other nodes to rank 0."""
    automatic: bool = False
    """Started by ``chopper record``'s hook: a profile in the program's own code takes part in it
    instead of being a second one."""


def make_options(
    *,
    collect: Any,
    steps: WindowSpec,
    output: str | Path | None,
    trace_limit: float = 1.0,
    **rest: Any,
) -> Options:
    """Check what the user gave.

    Raises:
        UsageError: an unknown collector, steps that cannot be traced, a limit that is not above 0,
            or an empty name.
    """
    from chopper.collectors import registry

    if output is not None and not os.fspath(output):
        # As a path, it would be the current directory.
        raise UsageError("output: an empty name (an unset variable?); name a directory")
    if not 0 < trace_limit < math.inf:
        raise UsageError(
            f"trace limit: found {trace_limit:g}, expected a factor above 0, for example 2"
        )
    if isinstance(collect, str):
        collect = [part.strip() for part in collect.split(",") if part.strip()]
    if collect is not None:
        for name in collect:
            registry.check(name)
        collect = tuple(dict.fromkeys(collect))
    if os.environ.get(claim.STACKS_VARIABLE):
        rest["stacks"] = True
    return Options(
        output=output,
        collect=collect,
        windows=parse_windows(steps),
        trace_limit=trace_limit,
        **rest,
    )


def for_children(options: Options) -> dict[str, Any]:
    """Options for the processes that this one starts, as :func:`make_options` takes them."""
    (first, *_) = options.windows
    default = options.windows == parse_windows(None)
    inherited = ("collect", "shapes", "stacks", "memory", "counters", "trace", "trace_limit")
    return {
        "steps": None if default else f"{first.start}:{first.stop}",
        **{name: getattr(options, name) for name in inherited},
    }


def numbered(options: Options, call: int) -> Options:
    """Options of a decorated function's n-th call: each has an output of its own."""
    output = options.output or os.environ.get(claim.OUTPUT_VARIABLE)
    if call == 1 or output is None or claim.launched():
        return options
    return replace(options, output=f"{os.fspath(output).rstrip('/')}-{call}")
