"""An attributed run cut into steps, the unit in which two runs are compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.device import Events, events_of
from chopper.analyzers.events.groups import rows_of, sum_by
from chopper.analyzers.trace.columns import ints, strings

_WHOLE = -1
"""Number of the only step of a rank without steps."""


@dataclass(frozen=True)
class Steps:
    """Time by leaf cause of each step that is compared, summed over ranks.

    Attributes:
        numbers: (steps,) numbers, ascending; -1 for a trace without steps.
        windows: (steps,) rank windows of each.
        causes: names of the columns.
        time_ns: (steps, causes) int64.
        events: device events of the run.
        step_of_event: index of the compared step of each event, -1 for none.
    """

    numbers: np.ndarray
    windows: np.ndarray
    causes: list[str]
    time_ns: np.ndarray
    events: Events
    step_of_event: np.ndarray

    @property
    def step_ns(self) -> np.ndarray:
        """(steps,) mean over ranks of the observed time."""
        return self.time_ns.sum(axis=1) / np.maximum(self.windows, 1)

    @property
    def window_count(self) -> int:
        """Rank windows of all steps, at least 1."""
        return max(int(self.windows.sum()), 1)


def cut(run: Attribution) -> Steps:
    """PIECE, WINDOW -> time by step and cause."""
    pieces, windows = run.pieces, run.windows
    numbers, step_of_window = np.unique(ints(windows, "number", null=_WHOLE), return_inverse=True)
    counts = np.bincount(step_of_window, minlength=len(numbers))
    codes, causes = strings(pieces, "cause")
    windows_by = [ints(windows, name) for name in ("rank", "step_index")]
    window = rows_of(windows_by, [ints(pieces, name) for name in ("rank", "step_index")])
    cell = step_of_window[window] * len(causes) + codes
    time_ns = sum_by(cell, ints(pieces, "time_ns"), len(numbers) * len(causes))
    time_ns = time_ns.reshape(len(numbers), len(causes))
    events = events_of(run)
    step_of_event = step_of_window[rows_of(windows_by, [events.rank, events.step])]
    return Steps(
        numbers,
        counts,
        causes,
        time_ns,
        events,
        step_of_event,
    )
