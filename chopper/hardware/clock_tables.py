"""Time and energy of a device's work at several clocks that were set, as tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

INSTRUCTIONS = ("forward", "backward")
"""Of a pipeline stage."""


@dataclass(frozen=True)
class ClockTable:
    """Time and energy of the instructions of one pipeline stage at several clocks.

    Attributes:
        stage: number of the stage, from 0.
        instruction: ``forward`` or ``backward``.
        clock_hz: (clocks,) locked clocks, descending, each once.
        time_ns: (clocks,) of one instruction, int64.
        energy_j: (clocks,) of one instruction.
    """

    stage: int
    instruction: str
    clock_hz: np.ndarray
    time_ns: np.ndarray
    energy_j: np.ndarray

    @property
    def power_w(self) -> np.ndarray:
        """(clocks,) mean power."""
        return self.energy_j / (self.time_ns / 1e9)
