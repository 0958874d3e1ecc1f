"""Energy since some moment, from readings of a counter or of power."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_JUMP_RATIO = 2.0
"""Most that a board draws for a short time, over its power limit."""
_MOST_W = 10_000.0
"""No device or socket draws more; what holds where no limit was recorded."""
_COUNTER_STEP_NS = 100_000_000
"""A counter's own step: the energy of so much time may come at once."""
MAX_POWER_GAP_NS = 1_500_000_000
"""Between power readings further apart the power is not known."""


@dataclass(frozen=True)
class Meter:
    """Energy since some moment, at the readings of one device or domain.

    Attributes:
        time_ns: of the readings, ascending.
        total_j: energy until then.
        broken: (readings − 1,) gaps over which nothing is known: the counter went backwards or
            jumped, or power was not read for too long.
        lag_ns: how long the counter stands still between its own updates.
        basis: ``counter`` or ``power``.
    """

    time_ns: np.ndarray
    total_j: np.ndarray
    broken: np.ndarray
    lag_ns: float
    basis: str

    def at(self, time_ns: np.ndarray) -> np.ndarray:
        """Energy until each moment, linear between readings."""
        zero = self.time_ns[0]
        found: np.ndarray = np.interp(time_ns - zero, self.time_ns - zero, self.total_j)
        return found

    def usable(self, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """Mask of the spans that lie within the readings and touch no broken gap."""
        last = len(self.time_ns) - 2
        first = np.clip(np.searchsorted(self.time_ns, start_ns, side="right") - 1, 0, last)
        final = np.clip(np.searchsorted(self.time_ns, end_ns, side="left") - 1, first, last)
        bad = np.concatenate([[0], np.cumsum(self.broken)])
        inside = (start_ns >= self.time_ns[0]) & (end_ns <= self.time_ns[-1])
        mask: np.ndarray = inside & (bad[final + 1] == bad[first])
        return mask

    def edge_ns(self, time_ns: int) -> float:
        """Gap between the readings around a moment, at least the counter's own step."""
        last = len(self.time_ns) - 2
        at = int(np.clip(np.searchsorted(self.time_ns, time_ns, side="right") - 1, 0, last))
        gap = self.time_ns[at + 1] - self.time_ns[at]
        if self.time_ns[at] == time_ns and at > 0:
            # A reading itself, the last one before a break it may be: the shorter gap beside it.
            gap = min(gap, self.time_ns[at] - self.time_ns[at - 1])
        return max(float(gap), self.lag_ns)


def meter_of(
    time_ns: np.ndarray, total_j: np.ndarray, limit_w: float | None = None
) -> Meter | None:
    """A counter's readings, NaN for absent; None with fewer than two or when it never moved.

    A step up that would take more than twice the power limit is a jump, not energy: the counter was
    reset or spoilt there, as where it steps down.

    Args:
        time_ns: of the readings.
        total_j: what the counter said.
        limit_w: power limit of what it counts; None where it is not known.
    """
    good = np.isfinite(total_j)
    time, total = _in_order(time_ns[good], total_j[good])
    if len(time) < 2 or not (np.diff(total) > 0).any():
        return None
    change = np.diff(total)
    moved = time[1:][change != 0]
    lag = float(np.median(np.diff(moved))) if len(moved) > 1 else 0.0
    most_w = _JUMP_RATIO * limit_w if limit_w else _MOST_W
    jumped = change > most_w * (np.diff(time) + lag + _COUNTER_STEP_NS) / 1e9
    return Meter(time, total, (change < 0) | jumped, lag, "counter")


def meter_of_power(time_ns: np.ndarray, power_w: np.ndarray) -> Meter | None:
    """Readings of power, integrated by the trapezoid rule; None with fewer than two."""
    good = np.isfinite(power_w)
    time, power = _in_order(time_ns[good], power_w[good])
    if len(time) < 2:
        return None
    span = np.diff(time)
    area = (power[:-1] + power[1:]) / 2 * span / 1e9
    return Meter(
        time, np.concatenate([[0.0], np.cumsum(area)]), span > MAX_POWER_GAP_NS, 0.0, "power"
    )


def _in_order(time_ns: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    time, first = np.unique(time_ns, return_index=True)
    return time, values[first]
