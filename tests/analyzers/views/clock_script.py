"""A device whose clock follows a script, the kernels that run on it, and a sampler that watches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tests.analyzers.make import table


@dataclass(frozen=True)
class Script:
    """Clock levels: each (from when, hz) holds until the next; the first from time 0.

    ``cycles`` and its inverse make durations exact: a kernel of so many cycles ends when the clock
    has ticked so often.
    """

    levels: tuple[tuple[int, float], ...]
    end_ns: int

    @property
    def times_ns(self) -> np.ndarray:
        return np.array([t for t, _ in self.levels] + [self.end_ns], dtype=np.float64)

    @property
    def cycles(self) -> np.ndarray:
        hz = np.array([c for _, c in self.levels])
        return np.concatenate([[0.0], np.cumsum(np.diff(self.times_ns) * hz / 1e9)])

    def ends_ns(self, cycles: np.ndarray, sensitivity: float = 1.0) -> np.ndarray:
        """When work that began at 0 and needs so many cycles (at 1 GHz: ns) ends."""
        hz = np.array([c for _, c in self.levels]) / 1e9
        speed = hz**sensitivity
        done = np.concatenate([[0.0], np.cumsum(np.diff(self.times_ns) * speed)])
        assert cycles[-1] <= done[-1], "the script is too short"
        ends: np.ndarray = np.interp(cycles, done, self.times_ns)
        return ends

    def clock_at(self, time_ns: np.ndarray) -> np.ndarray:
        at = np.searchsorted(self.times_ns[:-1], time_ns, side="right") - 1
        hz: np.ndarray = np.array([c for _, c in self.levels])[np.maximum(at, 0)]
        return hz

    def mean_hz(self, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """True mean clock of intervals."""
        ticks = np.interp(end_ns, self.times_ns, self.cycles) - np.interp(
            start_ns, self.times_ns, self.cycles
        )
        hz: np.ndarray = ticks / (end_ns - start_ns) * 1e9
        return hz

    def samples(
        self,
        hz: float,
        *,
        reasons: dict[float, int] | None = None,
        jitter_ns: int = 0,
        seed: int = 0,
        **more: Any,
    ) -> pa.Table:
        """What a sampler of so many readings per second records, as `device_clock`."""
        rng = np.random.default_rng(seed)
        period = 1e9 / hz
        time = np.arange(period * rng.random(), self.end_ns, period)
        time = np.sort(time + rng.uniform(-jitter_ns, jitter_ns, len(time))).astype(np.int64)
        clock = self.clock_at(time)
        return samples(time, clock, [(reasons or {}).get(c) for c in clock], **more)


def samples(time_ns: Any, clock_hz: Any, reasons: Any = None, **more: Any) -> pa.Table:
    """Readings as a `device_clock` table."""
    rows = [
        {
            "time_ns": int(t),
            "span_ns": 0,
            "device_id": 0,
            "sm_clock_hz": None if c is None else int(c),
            "event_reasons": None if reasons is None else reasons[i],
            **more,
        }
        for i, (t, c) in enumerate(zip(time_ns, clock_hz, strict=True))
    ]
    return table("device_clock", rows)
