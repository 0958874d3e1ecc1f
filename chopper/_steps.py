"""Where a training step ends, and which steps are traced."""

from __future__ import annotations

from dataclasses import dataclass

from chopper.errors import UsageError

_FORGET_AFTER = 100
"""Steps of one optimizer, without its cycle's last one, after which the cycle is learned anew."""

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


DEFAULT_WINDOWS = (Window(2, 7, settle=2), Window(50, 55, settle=1))
"""The later window's trace replaces that of the first.

A run's length is not known ahead. The first window serves short runs, of a single step even; the
second sees the steady state of long ones: buffers that a data loader filled ahead have drained by
then, and allocators have settled. Windows are fixed in steps, not in seconds, so that all ranks
trace the same ones.
"""


def describe_windows(windows: tuple[Window, ...]) -> str:
    """Windows as ``--steps`` would have them, for a help text."""
    return ", then ".join(f"{w.start}:{w.stop}" for w in windows)


DEFAULT_WINDOWS_TEXT = f"{describe_windows(DEFAULT_WINDOWS)} in their place"
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


class OptimizerCycle:
    """Finds the ends of steps in the sequence of optimizers that stepped.

    With several optimizers (a GAN's two, one for each parameter) a step ends after the last of
    them. Which one that is, is known when the first one comes round again.
    """

    def __init__(self) -> None:
        self._seen: list[int] = []
        self._since_end = 0
        self._tentative_ns: int | None = None
        self._learned = False

    @property
    def tentative_ns(self) -> int | None:
        """When the first step ended, as far as is known, before the cycle is learned."""
        return self._tentative_ns

    def stepped(self, optimizer_id: int, now_ns: int) -> list[int]:
        """Note that an optimizer stepped; return the ends of steps that this made certain."""
        ends: list[int] = []
        if not self._learned:
            if optimizer_id not in self._seen:
                self._seen.append(optimizer_id)
                self._tentative_ns = now_ns
                return ends
            assert self._tentative_ns is not None
            ends.append(self._tentative_ns)
            self._tentative_ns = None
            self._learned = True
        if optimizer_id not in self._seen:
            # A new one: it was idle so far, or the program goes on with other optimizers.
            self._seen.append(optimizer_id)
        self._since_end += 1
        if self._since_end > _FORGET_AFTER * len(self._seen):
            self._seen = [optimizer_id]
        if optimizer_id == self._seen[-1]:
            self._since_end = 0
            ends.append(now_ns)
        return ends
