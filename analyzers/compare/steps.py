"""An attributed run cut into steps, the unit in which two runs are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.causes.step_time import warm_up_steps
from chopper.analyzers.events.device import events_of as events_of_run
from chopper.analyzers.trace.columns import ints, strings

if TYPE_CHECKING:
    from chopper.analyzers.attributed import Attributed
    from chopper.analyzers.events.device import Events

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
        left_out: numbers of the leading steps that were left out.
        ranks_left_out: ranks without steps in a run whose other ranks have some.
    """

    numbers: np.ndarray
    windows: np.ndarray
    causes: list[str]
    time_ns: np.ndarray
    left_out: tuple[int, ...]
    ranks_left_out: tuple[int, ...] = ()

    @property
    def step_ns(self) -> np.ndarray:
        """(steps,) mean over ranks of the observed time."""
        found: np.ndarray = self.time_ns.sum(axis=1) / np.maximum(self.windows, 1)
        return found


def cut(run: Attributed, *, warm_up: bool) -> Steps:
    """PIECE, WINDOW -> time by step and cause.

    Args:
        warm_up: keep leading steps that took much longer than those after them.
    """
    pieces, windows = run.pieces, run.windows
    of_window = ints(windows, "number", null=_WHOLE)
    numbers, window_step = np.unique(of_window, return_inverse=True)
    counts = np.bincount(window_step, minlength=len(numbers))
    codes, causes = strings(pieces, "cause")
    width = int(ints(windows, "step_index").max(initial=0)) + 1
    place = ints(windows, "rank") * width + ints(windows, "step_index")
    order = np.argsort(place)
    wanted = ints(pieces, "rank") * width + ints(pieces, "step_index")
    step = window_step[order][np.searchsorted(place[order], wanted)] if len(order) else wanted
    flat = np.zeros(len(numbers) * len(causes), dtype=np.int64)
    np.add.at(flat, step * len(causes) + codes, ints(pieces, "time_ns"))
    time_ns = flat.reshape(len(numbers), len(causes))
    without_steps = ranks_without_steps(run)
    if without_steps:
        # A rank whose whole trace is one window has nothing that compares to the others' steps.
        numbers, counts, time_ns = numbers[1:], counts[1:], time_ns[1:]
    first = 0 if warm_up else warm_up_steps(time_ns.sum(axis=1) / np.maximum(counts, 1))
    return Steps(
        numbers[first:],
        counts[first:],
        causes,
        time_ns[first:],
        tuple(int(n) for n in numbers[:first]),
        without_steps,
    )


def ranks_without_steps(run: Attributed) -> tuple[int, ...]:
    """Return the ranks whose whole trace is one window while other ranks have steps."""
    numbers = ints(run.windows, "number", null=_WHOLE)
    whole = numbers == _WHOLE
    if whole.all():
        return ()
    return tuple(np.unique(ints(run.windows, "rank")[whole]).tolist())


def events_of(run: Attributed, steps: Steps) -> tuple[Events, np.ndarray]:
    """The run's device events, and the index of the compared step of each (-1 for none)."""
    found = events_of_run(run)
    code = np.full(len(found), -1, dtype=np.int64)
    for rank in run.joined:
        mine = found.rank == rank
        code[mine] = step_codes(run, steps, rank)[found.step[mine]]
    return found, code


def step_codes(run: Attributed, steps: Steps, rank: int) -> np.ndarray:
    """For each traced step of a rank, the index of the compared step, -1 for none.

    A trace without steps has one, at index 0.
    """
    if rank in steps.ranks_left_out:
        return np.full(1, -1, dtype=np.int64)
    if len(steps.numbers) and steps.numbers[0] == _WHOLE:
        return np.zeros(1, dtype=np.int64)
    table = run.joined[rank].step
    traced = ints(table.filter(table["traced"]) if table.num_rows else table, "number")
    if not len(steps.numbers):
        return np.full(len(traced) + 1, -1, dtype=np.int64)
    at = np.minimum(np.searchsorted(steps.numbers, traced), len(steps.numbers) - 1)
    return np.append(np.where(steps.numbers[at] == traced, at, -1), -1)
