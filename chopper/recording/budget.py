"""Limits of a trace: events, memory and seconds, and the number of steps that fit into them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import NamedTuple

EVENTS = 300_000
"""Events of a trace. The program waits for 3 s, on a core of its own, while so many are written."""
MEMORY_BYTES = 1 << 29
"""Growth of the process while a trace is taken; it takes as much again when it ends."""
SECONDS = 60
DEFAULT_TEXT = "about 300,000 events, 1 GB of memory and 60 s"
"""The limits, for a help text."""
_EVENTS_PER_NODE = 12
"""Operators, forward and backward, for each node of autograd's graph."""
_EVENTS_PER_CALL = 6
"""Spans and operators for each call of a module."""


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
        self.limit_text = DEFAULT_TEXT if limit == 1 else f"{limit:g} times {DEFAULT_TEXT}"
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
