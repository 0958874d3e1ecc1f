"""Steps and windows of one rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.trace.columns import ints


def windows_of(run: Attributed, rank: int) -> pa.Table:
    """Return the step windows of a rank, in order. -> WINDOW."""
    return run.windows.filter(pc.equal(run.windows["rank"], rank))


def step_table(run: Attributed, rank: int) -> pa.Table:
    """Return the steps of a rank as they were joined, as recorded where it has no trace."""
    joined = run.joined.get(rank)
    return run.recording.table(rank, "step") if joined is None else joined.step


def steps_of(run: Attributed, rank: int) -> pa.Table:
    """Return all recorded steps of a rank, traced or not; its windows where it has none.

    -> number, start_ns, end_ns, and more.
    """
    table = step_table(run, rank)
    return table if table.num_rows else windows_of(run, rank)


@dataclass(frozen=True)
class TracedSteps:
    """Traced steps of one rank on the host, in order."""

    number: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray

    def __len__(self) -> int:
        return len(self.number)

    def index_at(self, time_ns: np.ndarray) -> np.ndarray:
        """Return the index of the step at each time, -1 for none; 0 where there are no steps."""
        if not len(self):
            return np.zeros(len(time_ns), dtype=np.int64)
        step = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        inside = (step >= 0) & (time_ns < self.end_ns[np.maximum(step, 0)])
        return np.where(inside, step, -1)


def traced_steps(run: Attributed, rank: int) -> TracedSteps:
    """Return the traced steps of a rank. STEP -> numbers and times."""
    step = step_table(run, rank)
    traced = step.filter(step["traced"]) if step.num_rows else step
    return TracedSteps(*(ints(traced, name) for name in ("number", "start_ns", "end_ns")))
