"""Stretches of the steps of a large trace: which steps make one, and which rows it needs.

A stretch needs the step before and the step after its own: what the host did while the device ran,
and where the device was when the stretch began. Of the rows that several stretches hold, each is
one stretch's own, by its start; so the own rows of all stretches, one after another, are the tables
of the trace in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from chopper.storage.run import BEGINNING_NS, END_NS, Span

STRETCH_ROWS = 1_000_000
"""Rows of a stretch, about; its neighbours' steps come on top."""


@dataclass
class Plan:
    """The steps of each stretch, and the stretches that need a row.

    Times count from any moment, the same for all.

    Attributes:
        number, start_ns, end_ns: of each step, in the order of time.
        first: the first step of each stretch.
        correlation, launch_ns: of the calls that launch, sorted by correlation.
    """

    number: list[int]
    start_ns: np.ndarray
    end_ns: np.ndarray
    first: np.ndarray
    correlation: np.ndarray
    launch_ns: np.ndarray
    _latest_ns: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self._latest_ns = np.full(len(self.number), BEGINNING_NS)

    @classmethod
    def of(
        cls,
        steps: tuple[list[int], np.ndarray, np.ndarray],
        launches: tuple[np.ndarray, np.ndarray],
        rows_count: int,
    ) -> Plan | None:
        """Plan the stretches of a trace; None where it has too few steps or rows for several.

        Args:
            steps: number, start and end of each, in the order of time.
            launches: correlation and start of the calls that launch.
            rows_count: of all tables.
        """
        count = len(steps[0])
        per_stretch = max(1, round(STRETCH_ROWS * count / max(rows_count, 1)))
        if count <= per_stretch:
            return None
        correlation, launch_ns = launches
        order = np.argsort(correlation, kind="stable")
        first = np.arange(0, count, per_stretch)
        return cls(*steps, first, correlation[order], launch_ns[order])

    def take_events(self, start: np.ndarray, end: np.ndarray, correlation: np.ndarray) -> None:
        """Note until when the device worked on each step; of all its events, before any other."""
        step = self._step_of(correlation, start)
        inside = step >= 0
        np.maximum.at(self._latest_ns, step[inside], end[inside])

    def of_device(
        self, start: np.ndarray, dur: np.ndarray, correlation: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the first stretch that needs each device event, and the one after the last."""
        step = self._step_of(correlation, start)
        begin, done = self._device_ns
        # Of its own steps and their neighbours, and what ran meanwhile for later ones.
        low = np.minimum(
            np.searchsorted(self._last, step - 1, side="right"),
            np.searchsorted(done, start, side="right"),
        )
        high = np.maximum(
            np.searchsorted(self.first, step + 1, side="right"),
            np.searchsorted(begin, start + np.maximum(dur, 1), side="left"),
        )
        return self._clipped(low, high)

    def of_host(self, start: np.ndarray, dur: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the first stretch that needs each span, and the one after the last."""
        begin, end = self._host_ns
        low = np.searchsorted(end, start, side="right")
        high = np.searchsorted(begin, start + dur, side="right")
        return self._clipped(low, high)

    def spans(self, base_ns: int = 0) -> list[Span]:
        """Return the steps of each stretch, in Unix time."""
        begin, end = self._read_ns
        bounds = [BEGINNING_NS, *self.start_ns[self.first[1:]].tolist(), END_NS]
        device = [*self._device_ns[0].tolist(), END_NS]
        before = np.concatenate([[BEGINNING_NS, BEGINNING_NS], self._device_end_ns])[self.first]
        return [
            Span(
                own_ns=(_shifted(bounds[n], base_ns), _shifted(bounds[n + 1], base_ns)),
                read_ns=(_shifted(begin[n], base_ns), _shifted(end[n], base_ns)),
                device_begin_ns=None if before[n] == BEGINNING_NS else int(before[n]) + base_ns,
                device_ns=(_shifted(device[n], base_ns), _shifted(device[n + 1], base_ns)),
            )
            for n in range(len(self.first))
        ]

    @cached_property
    def _last(self) -> np.ndarray:
        """The step after the last of each stretch."""
        return np.append(self.first[1:], len(self.number))

    @cached_property
    def _device_end_ns(self) -> np.ndarray:
        """Return, for each step, when the device was done with all steps up to it."""
        return np.maximum.accumulate(self._latest_ns)

    @cached_property
    def _device_ns(self) -> tuple[np.ndarray, np.ndarray]:
        """From when to when the device was busy with each stretch."""
        done = self._device_end_ns[self._last - 1]
        return np.append(BEGINNING_NS, done[:-1]), done

    @cached_property
    def _host_ns(self) -> tuple[np.ndarray, np.ndarray]:
        """From when to when each stretch needs the host: until the device was done with it."""
        begin, end = self._read_ns
        return begin, np.maximum.accumulate(np.maximum(end, self._device_ns[1]))

    @cached_property
    def _read_ns(self) -> tuple[np.ndarray, np.ndarray]:
        start = np.concatenate([[BEGINNING_NS], self.start_ns, [END_NS, END_NS]])
        return start[self.first], start[self._last + 2]

    def _step_of(self, correlation: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Return the step that launched each event; by its own time where nobody did."""
        launch_ns = start.copy()
        if len(self.correlation):
            at = np.searchsorted(self.correlation, correlation)
            at[at == len(self.correlation)] = 0
            launched = (self.correlation[at] == correlation) & (correlation >= 0)
            launch_ns[launched] = self.launch_ns[at[launched]]
        return np.searchsorted(self.start_ns, launch_ns, side="right") - 1

    def _clipped(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        low, high = np.minimum(low, len(self.first) - 1), np.maximum(high, 1)
        return low.astype(np.int32), high.astype(np.int32)


def _shifted(time_ns: Any, base_ns: int) -> int:
    whole = int(time_ns)
    return whole if whole in (BEGINNING_NS, END_NS) else whole + base_ns
