"""Ends of training steps, and the windows of steps that are traced."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from chopper.errors import UsageError

_STALE_AFTER = 8
"""Steps of another optimizer, without one of the leader's, after which the leader is replaced."""
_LONG_RATIO = 3
_LONG_SHARE = 0.05
_LONG_EXCESS_NS = 500_000_000
_ALIKE_RATIO = 1.5
"""A step is long by ratio, share of the time and excess over the typical one, and those that come
again are alike: a busy machine makes single steps long, too."""
_STEPS_TO_COMPARE = 4
_CONTEXTS = (1, 2, 4, 8, 16, 32)
"""Lengths of the rows of optimizers whose successor is kept."""
_MOST_CONTEXTS = 1 << 14
_BACKWARD_PASSES = 4
"""Backward passes, without an optimizer of torch, after which each of them ends a step."""
_ACCUMULATED_PASSES = 1024
"""The same where there is such an optimizer, that did not step so far."""

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


class OptimizerCycle:
    """Finds the ends of steps in the sequence of optimizers that stepped.

    A step begins with the optimizer that stepped first in the program, the leader, and holds those
    that follow until the leader comes round again: with a critic C and an actor A that steps every
    other time, C C A C C A is the steps C, C A, C, C A. A step ends after the last of them. Which
    one is the last is told from what followed the same optimizers before; where nothing did, the
    end is certain only when the leader steps again, which is a step late.

    A leader that steps no more, while others go round, is replaced by the first of those; one that
    the program has dropped, as soon as another one steps.
    """

    def __init__(self) -> None:
        self.leader: int | None = None
        """The optimizer that steps begin with."""
        self._dropped: set[int] = set()
        """Optimizers that are no more."""
        self._unit: list[tuple[int, int]] = []
        """Optimizers of the step that runs, with the times at which they had stepped."""
        self._ended = False
        """True once the end of the step that runs was returned."""
        self._most: dict[int, int] = {}
        """Optimizer → most often that it stepped within one step."""
        self._recent: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}
        """Optimizers that stepped in a row → the one that stepped after them last time."""
        self._alone: int | None = None
        """The only optimizer that stepped for so long that nothing more is learned from it."""

    @property
    def tentative_ns(self) -> int | None:
        """End of the last step, if it was not returned and no optimizer is missing."""
        if self._ended or not self._unit or self._expected() not in (None, self.leader):
            return None
        return self._unit[-1][1]

    def dropped(self, optimizer_id: int) -> None:
        """Note that an optimizer is no more; called in any thread."""
        self._dropped.add(optimizer_id)

    def stepped(self, optimizer_id: int, now_ns: int) -> list[int]:
        """Note that an optimizer stepped; return the ends of steps that this made certain."""
        self._dropped.discard(optimizer_id)  # another one may have its id
        if optimizer_id == self._alone:
            self._unit = [(optimizer_id, now_ns)]
            return [now_ns]
        self._learn(optimizer_id)
        ends: list[int] = []
        if self.leader is None:
            self.leader = optimizer_id
        elif optimizer_id == self.leader:
            self._finish_unit(ends)
        self._unit.append((optimizer_id, now_ns))
        if optimizer_id != self.leader and self._leader_is_gone(optimizer_id):
            self._replace_leader(ends)
        while self.leader in self._dropped and len(self._unit) > 1:
            self._replace_leader(ends)
        if not self._ended and self._expected() == self.leader:
            self._ended = True
            ends.append(now_ns)
        known = _CONTEXTS[-1] + 1  # all rows of it alone were seen
        alone = len(self._unit) == 1 and self._recent[-known:].count(optimizer_id) == known
        self._alone = optimizer_id if alone else None
        return ends

    def _finish_unit(self, ends: list[int]) -> None:
        if not self._ended:
            ends.append(self._unit[-1][1])
        if len(self._unit) > 1:
            for which, count in Counter(which for which, _ in self._unit).items():
                self._most[which] = max(count, self._most.get(which, 0))
        self._unit = []
        self._ended = False

    def _leader_is_gone(self, optimizer_id: int) -> bool:
        most = max(_STALE_AFTER, 4 * self._most.get(optimizer_id, 0))
        if len(self._unit) <= most:
            return False
        return sum(which == optimizer_id for which, _ in self._unit) > most

    def _replace_leader(self, ends: list[int]) -> None:
        """Divide the step that runs into those of the leader that took over."""
        unit, self._most = self._unit, {}
        self.leader = unit[1][0]
        self._unit = unit[:1]
        for which, at_ns in unit[1:]:
            if which == self.leader:
                self._finish_unit(ends)
            self._unit.append((which, at_ns))

    def _learn(self, optimizer_id: int) -> None:
        """Keep what came after the optimizers that stepped last."""
        recent = self._recent
        if len(self._next) > _MOST_CONTEXTS:
            self._next.clear()
        for length in _CONTEXTS:
            if length > len(recent):
                break
            self._next[tuple(recent[-length:])] = optimizer_id
        recent.append(optimizer_id)
        if len(recent) > 2 * _CONTEXTS[-1]:
            del recent[: _CONTEXTS[-1]]

    def _expected(self) -> int | None:
        """The optimizer that steps next, by the longest row that was seen before; None: unknown."""
        for length in reversed(_CONTEXTS):
            if length <= len(self._recent):
                follower = self._next.get(tuple(self._recent[-length:]))
                if follower is not None and follower not in self._dropped:
                    return follower
        return None


class BackwardSteps:
    """Takes the ends of backward passes for the ends of steps, where no optimizer steps.

    Those that make a graph of their own count until one comes that does not: before that one they
    are a part of the forward pass.

    Args:
        optimizer_was_made: whether the program has an optimizer of torch, which may step yet:
            gradients are accumulated over many passes, but hardly over more than a thousand.
    """

    def __init__(self, optimizer_was_made: Callable[[], bool]) -> None:
        self._optimizer_was_made = optimizer_was_made
        self._pending_ns: list[int] = []
        self._count = 0
        self._all_make_graphs = True

    def ended(self, now_ns: int, makes_graph: bool) -> list[int]:
        """Note that a backward pass ended; return the ends of steps that this made certain."""
        if not makes_graph and self._all_make_graphs:
            self._all_make_graphs = False
            self._pending_ns, self._count = [], 0
        elif makes_graph and not self._all_make_graphs:
            return []
        self._count += 1
        self._pending_ns.append(now_ns)
        if self._count < _BACKWARD_PASSES:
            return []
        if self._count < _ACCUMULATED_PASSES and self._optimizer_was_made():
            return []
        if self._count == _BACKWARD_PASSES:
            self._count = _ACCUMULATED_PASSES
        return self.take()

    def take(self) -> list[int]:
        """The ends of steps that were not certain."""
        ends, self._pending_ns = self._pending_ns, []
        return ends
