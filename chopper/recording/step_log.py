"""The steps of a recording: their numbers, their times, and the file ``step.arrow``."""

from __future__ import annotations

import statistics
from collections import deque
from pathlib import Path
from typing import Literal

from chopper.storage import clock
from chopper.storage.manifest import Overhead
from chopper.storage.streams import RowLog

Source = Literal["mark", "optimizer", "backward"]
_MEDIAN_OF = 4096


class StepLog:
    """Steps as they end, flushed about once a second."""

    def __init__(self, directory: Path) -> None:
        self.number = 0
        """The step that runs."""
        self.source: Source | None = None
        """The sign that ends steps; None before the first."""
        self.optimizer = 1
        """Number of the kind of optimizer that the step began with, in order of appearance."""
        self._target = directory / "step.arrow"
        self._steps = RowLog(self._target)
        self._steps.open()
        self._start_ns = self._first_ns = 0
        self._micro_steps_ns: list[int] | None = None
        """Times of micro-steps in steps that have not ended; None until a trainer tells of one."""
        self._counted = 0
        """Micro-steps of the steps that ended."""
        self.written = 0
        """Steps that are on disk, from the first on."""
        self._work = RowLog(directory / "step_work.arrow")
        self.own_costs_ns: deque[int] = deque(maxlen=_MEDIAN_OF)
        """Time that chopper's own code took within the last steps."""
        self._durations: dict[bool, deque[int]] = {
            True: deque(maxlen=_MEDIAN_OF),
            False: deque(maxlen=_MEDIAN_OF),
        }

    def begin(self) -> None:
        """The first step begins now."""
        self._start_ns = self._first_ns = clock.now_ns()

    def end(self, end_ns: int, *, traced: bool, profiled: bool, tokens: int | None = None) -> int:
        """End the step that runs; the next one begins there. Return its length, in ns.

        Traced: a trace covers it, which may be lost or replaced yet: the manifest's
        ``traced_steps`` says which steps the trace that is kept covers. Profiled: a trace was being
        taken during some part of it.
        """
        assert self.source is not None
        length_ns = end_ns - self._start_ns
        if tokens is not None:
            self._work.rows.append(
                (self._start_ns + length_ns // 2, length_ns, self.number, tokens)
            )
        source: str = self.source
        if source == "optimizer" and self.optimizer > 1:
            source = f"{source} {self.optimizer}"
        row = (self.number, self._start_ns, end_ns, source, traced, profiled)
        self._steps.rows.append((*row, self._micro_steps(end_ns)))
        if traced or (not profiled and self.number > 1):
            self._durations[traced].append(length_ns)
        self.number += 1
        self._start_ns = end_ns
        return length_ns

    def micro_step(self) -> None:
        """Note that a trainer begins a backward pass: a step has one for each micro-step."""
        if self._micro_steps_ns is None:
            self._micro_steps_ns = []
        self._micro_steps_ns.append(clock.now_ns())

    def _micro_steps(self, end_ns: int) -> int | None:
        """Count those of the step that ends; an end that became certain late leaves others."""
        times_ns = self._micro_steps_ns
        if times_ns is None:
            return None
        self._micro_steps_ns = [time_ns for time_ns in times_ns if time_ns > end_ns]
        count = len(times_ns) - len(self._micro_steps_ns)
        self._counted += count
        return count

    def skip(self) -> None:
        """Begin the step now; the time since the last one ended belongs to none."""
        self._start_ns = clock.now_ns()

    def due(self, now_ns: int) -> bool:
        """Return whether it is time to flush, and steps that ended are not on disk."""
        return bool(self._steps.rows) and self._steps.due(now_ns)

    def flush(self) -> None:
        """Write the steps that ended since the last call."""
        now_ns = clock.now_ns()
        count = self._steps.flush(now_ns)
        if count and self._steps.path != self._target:
            self._steps.path = self._steps.path.replace(self._target)
        self.written += count
        self._work.flush(now_ns)

    def restart(self) -> None:
        """Forget all steps: they were parts of the first one, which runs still."""
        self.number = self.written = 0
        self._start_ns = self._first_ns
        if self._micro_steps_ns is not None:
            self._micro_steps_ns += [self._first_ns] * self._counted
            self._counted = 0
        self._steps.rows.clear()
        self._steps.close()
        # Replaces the file that is there once steps are in it.
        self._steps = RowLog(self._target.with_name(".step.arrow.tmp"), "step")

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self.flush()
        finally:
            self._steps.close()
            self._work.close()

    def summarize(self, overhead: Overhead) -> None:
        """Say what recording cost the steps."""
        overhead.per_step_ns = _median(self.own_costs_ns)
        overhead.traced_step_ns = _median(self._durations[True])
        overhead.untraced_step_ns = _median(self._durations[False])


def _median(values: deque[int]) -> int | None:
    return round(statistics.median(values)) if values else None
