"""Growth of totals between readings, energy from a counter or power, and who shares a counter."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from chopper.analyzers.trace.samples import socket_of
from chopper.storage.run import Run

_JUMP_RATIO = 2.0
"""Most that a board draws for a short time, over its power limit."""
_MOST_W = 10_000.0
"""No device or socket draws more; what holds where no limit was recorded."""
_COUNTER_STEP_NS = 100_000_000
"""A counter's own step: the energy of so much time may come at once."""
MAX_POWER_GAP_NS = 1_500_000_000
"""Between power readings further apart the power is not known."""


@dataclass(frozen=True)
class Counter:
    """A total at its readings.

    Attributes:
        time_ns: of the readings, ascending, two at least.
        total: until then.
        broken: (readings − 1,) gaps over which nothing is known of it.
    """

    time_ns: np.ndarray
    total: np.ndarray
    broken: np.ndarray

    def growth(self, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """Return the growth over spans, linear between readings and none outside of them."""
        # Doubles hold a growth more exactly than a total since boot.
        zero, total = self.time_ns[0], self.total - self.total[0]
        low, high = (
            np.interp(edge - zero, self.time_ns - zero, total) for edge in (start_ns, end_ns)
        )
        return high - low

    def unbroken(self, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """Return the mask of the spans that touch no broken gap."""
        last = len(self.time_ns) - 2
        first = np.clip(np.searchsorted(self.time_ns, start_ns, side="right") - 1, 0, last)
        final = np.clip(np.searchsorted(self.time_ns, end_ns, side="left") - 1, first, last)
        bad = np.concatenate([[0], np.cumsum(self.broken)])
        return bad[final + 1] == bad[first]


def counter_of(time_ns: np.ndarray, total: np.ndarray) -> Counter | None:
    """Return a counter from its readings, NaN for absent; None with fewer than two.

    A total that went backwards was reset: nothing is known of that gap.
    """
    good = np.isfinite(total)
    time, first = np.unique(time_ns[good], return_index=True)
    values = total[good][first]
    return Counter(time, values, np.diff(values) < 0) if len(time) > 1 else None


@dataclass(frozen=True)
class Meter(Counter):
    """Energy in J at the readings of one device or domain.

    ``broken`` are gaps in which the counter went backwards or jumped, or power was not read.

    Attributes:
        lag_ns: how long the counter stands still between its own updates.
        basis: ``counter`` or ``power``.
    """

    lag_ns: float
    basis: str

    def usable(self, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """Return the mask of the spans that lie within the readings and touch no broken gap."""
        inside = (start_ns >= self.time_ns[0]) & (end_ns <= self.time_ns[-1])
        return inside & self.unbroken(start_ns, end_ns)

    def edge_ns(self, time_ns: np.ndarray) -> np.ndarray:
        """Return the gap between the readings around each moment, at least the counter's step."""
        gap = np.diff(self.time_ns)
        at = np.clip(np.searchsorted(self.time_ns, time_ns, side="right") - 1, 0, len(gap) - 1)
        # A reading itself, the last one before a break it may be: the shorter of its two gaps.
        on_reading = (self.time_ns[at] == time_ns) & (at > 0)
        around = np.where(on_reading, np.minimum(gap[at], gap[at - 1]), gap[at])
        return np.maximum(around, self.lag_ns)


def meter_of(
    time_ns: np.ndarray, total_j: np.ndarray, limit_w: float | None = None
) -> Meter | None:
    """Return a meter from a counter's readings; None with fewer than two or when it never moved.

    A step up that would take more than twice the power limit (of what it counts, where known) is a
    jump, not energy: the counter was reset or spoilt there, as where it steps down.
    """
    read = counter_of(time_ns, total_j)
    if read is None:
        return None
    change, time = np.diff(read.total), read.time_ns
    if not (change > 0).any():
        return None
    moved = time[1:][change != 0]
    lag = float(np.median(np.diff(moved))) if len(moved) > 1 else 0.0
    most_w = _JUMP_RATIO * limit_w if limit_w else _MOST_W
    jumped = change > most_w * (np.diff(time) + lag + _COUNTER_STEP_NS) / 1e9
    return Meter(time, read.total, read.broken | jumped, lag, "counter")


def meter_of_power(time_ns: np.ndarray, power_w: np.ndarray) -> Meter | None:
    """Return a meter that integrates power by the trapezoid rule; None with fewer than two."""
    read = counter_of(time_ns, power_w)
    if read is None:
        return None
    span, power = np.diff(read.time_ns), read.total
    total = np.concatenate([[0.0], np.cumsum((power[:-1] + power[1:]) / 2 * span / 1e9)])
    return Meter(read.time_ns, total, span > MAX_POWER_GAP_NS, 0.0, "power")


def ranks_by_socket(recording: Run) -> list[tuple[int, ...]]:
    """Group the ranks that compute on parts of one device."""
    return _grouped((rank, socket_of(recording, rank)) for rank in recording.ranks)


def ranks_by_host(recording: Run) -> list[tuple[int, ...]]:
    """Group the ranks of a host; a rank whose host is not known stands alone."""
    return _grouped((rank, recording.part(rank).host or rank) for rank in recording.ranks)


def _grouped(keys: Iterable[tuple[int, Hashable]]) -> list[tuple[int, ...]]:
    ranks_by_key: dict[Hashable, list[int]] = {}
    for rank, key in keys:
        ranks_by_key.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in ranks_by_key.values()]
