"""Step windows: device time cut so that the windows tile it exactly.

Let c_s be the latest end of the events of steps ≤ s. Step s owns (c_{s-1}, c_s]; the first step
starts at its host start, or at the end of what ran before it. In steady state that is the step's
period, however far the host runs ahead.

Where step numbers jump and the host's steps leave a hole, the trace was not being taken in between:
that stretch, up to the host start of the step after it, is a window of no step (``UNRECORDED``). It
keeps the windows tiling while they are attributed, and is left out of what is attributed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from chopper.analyzers.trace.join import Links


UNRECORDED = -2
"""Number of a window between two stretches of the trace."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of one rank.

    Attributes:
        bounds_ns: shape (windows + 1,), ascending; window i is [bounds[i], bounds[i + 1]).
        numbers: step number of each window, -1 for the single window of a trace without steps.
        after_ns: device time recorded after the last window, shown apart.
        before_ns: device time recorded before the first window.
        empty_steps: steps that ran nothing of their own and so have no window.
    """

    bounds_ns: np.ndarray
    numbers: np.ndarray
    after_ns: int
    before_ns: int
    empty_steps: int = 0
    steps: np.ndarray | None = None
    """Step of each window, an index; below zero between stretches. None without steps."""

    def __len__(self) -> int:
        return max(len(self.bounds_ns) - 1, 0)

    @property
    def recorded(self) -> np.ndarray:
        """Return a mask of the windows that are attributed: all but those between stretches."""
        mask: np.ndarray = self.numbers != UNRECORDED
        return mask

    def of_steps(self, step: np.ndarray) -> np.ndarray:
        """Return, for each index of a step, that of its attributed window; -1 for none."""
        if self.steps is None:
            return np.where(step < 0, -1, 0 if len(self) else -1)
        own = self.steps[self.recorded]
        window = np.full(max(int(own.max(initial=-1)), int(step.max(initial=-1))) + 2, -1)
        window[own] = np.arange(len(own))
        of_step: np.ndarray = np.where(step < 0, -1, window[step])
        return of_step


def holes(numbers: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """Return the indices of the steps before which the trace was not being taken."""
    jumps = np.diff(numbers) > 1
    return np.flatnonzero(jumps & (start_ns[1:] > end_ns[:-1])) + 1


def cut_windows(links: Links, numbers: np.ndarray) -> Windows:
    """Windows of one rank from the steps of its device events.

    Args:
        links: the rank's joined events.
        numbers: step numbers, one per step of ``links``.
    """
    events = links.events
    if not len(events):
        return Windows(np.zeros(0, np.int64), np.zeros(0, np.int64), 0, 0)
    start, end = events.start_ns, events.end_ns
    first_ns, last_ns = int(start.min()), int(end.max())
    steps = len(links.steps_start_ns)
    step = links.step
    inside = (step >= 0) & (step < steps)
    if not steps or not inside.any():
        return Windows(np.array([first_ns, last_ns]), np.array([-1]), 0, 0)
    latest = np.full(steps, np.iinfo(np.int64).min, dtype=np.int64)
    np.maximum.at(latest, step[inside], end[inside])
    begin = int(links.steps_start_ns[0])
    before = step < 0
    if before.any():
        begin = max(begin, int(end[before].max()))
    # A device event cannot precede the step that launched it, but clocks may disagree a little.
    begin = min(begin, int(start[inside].min())) if not before.any() else begin
    after_hole = holes(numbers, links.steps_start_ns, links.steps_end_ns)
    latest = np.insert(latest, after_hole, links.steps_start_ns[after_hole])
    numbers = np.insert(numbers, after_hole, UNRECORDED)
    own = np.insert(np.arange(steps), after_hole, UNRECORDED)
    bounds = np.maximum.accumulate(np.concatenate([[begin], latest]))
    # A step that ran nothing of its own ends where the one before it did: it owns no time.
    lasting = np.diff(bounds) > 0
    if not lasting.any():
        return Windows(np.array([first_ns, last_ns]), np.array([-1]), 0, 0)
    empty_steps = int((~lasting & (numbers != UNRECORDED)).sum())
    # Nothing is recorded before the first step that holds work, nor after the last one.
    steps_with_work = np.flatnonzero(lasting & (numbers != UNRECORDED))
    if not len(steps_with_work):
        return Windows(np.array([first_ns, last_ns]), np.array([-1]), 0, 0)
    first, last = steps_with_work[0], steps_with_work[-1] + 1
    bounds, numbers, lasting = bounds[first : last + 1], numbers[first:last], lasting[first:last]
    return Windows(
        np.concatenate([bounds[:1], bounds[1:][lasting]]),
        numbers[lasting],
        after_ns=max(last_ns - int(bounds[-1]), 0),
        before_ns=max(int(bounds[0]) - first_ns, 0),
        empty_steps=empty_steps,
        steps=own[first:last][lasting],
    )
