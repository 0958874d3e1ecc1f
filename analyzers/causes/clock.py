"""Clock samples joined to kernels in time: each kernel's mean clock, how well it is known, and why.

A driver's clock is a reading at one moment. Between two readings the clock is taken to change
linearly: where it stepped from one level to the other at a moment that nobody saw, that is its
expectation, and the error of the mean is at most half of the difference. The mean over a kernel is
the integral over it divided by its duration, exact for any placing of kernels among samples.

A driver may refresh what it tells less often than it is asked (NVML on an H100: every 100 ms). Only
the first sample of each such reading has a time, so the others are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.columns import ints
from chopper.analyzers.trace.tables import DeviceEvents

KNOWN, NO_SAMPLES, NO_OVERLAP, SPARSE = range(4)
"""What became of one event: its clock is known; its device has no usable sample; none on either
side of it; or they are too far apart."""

CLOCK_LABELS = [
    *("power_cap", "thermal", "application", "idle_ramp", "host_limited", "internal_limit"),
    "unlabelled",
]
_POWER, _THERMAL, _APPLICATION, _IDLE, _HOST, _INTERNAL, _UNLABELLED = range(len(CLOCK_LABELS))
_SW_POWER_CAP, _HEAT = 0x4, 0x20 | 0x40
POWER_CAPS, POWER_BRAKE = _SW_POWER_CAP | 0x200, 0x80
"""NVML's event reasons of a power limit, in software or of the board, and of a power brake."""
FALSE_CAP, FALSE_HEAT = 1 << 62, 1 << 61
"""In place of a power cap or heat that the recording contradicts; no driver's bits."""
# NVML's clocks event reasons. HW slowdown (8) alone says neither heat nor power.
_BITS = {
    _POWER: POWER_CAPS | POWER_BRAKE,
    _THERMAL: _HEAT,
    _APPLICATION: 0x2 | 0x10 | 0x100,
    _INTERNAL: FALSE_CAP | FALSE_HEAT,
}
_IDLE_BIT, _SET_BIT = 0x1, 0x2
REASONED = _BITS[_POWER] | _BITS[_THERMAL] | _BITS[_APPLICATION] | _IDLE_BIT
"""Bits that say why a clock is low."""

MAX_GAP_NS = 500_000_000
"""Samples further apart tell nothing of the time between, even when they agree."""
MOST_CHANGE_LN = 0.125
"""Neighbours may differ by so much in ln clock, in the mean: an eighth of the clock."""
CHANGE_RATIO = 1.10
"""Neighbours that differ by more are a change."""
_HELD_GAPS = 2.5
"""Values that change less often than every so many samples are held by the driver between."""
_HELD_CHANGES = 8
"""Changes of the power at least, before anything is said of how often a driver refreshes it."""
_LIVE_CHANGES = 2
"""A clock that changes more than so many times as often as power is not held with it."""
_REGULAR_RATIO = 0.75
"""Share of the times between changes, at least, that one refresh period explains."""
_SET_RATIO = 0.01
"""A clock this close to the one that was set, with nothing else that holds it, is held by that."""
_CAPPED_RATIO = 0.9
"""A power cap holds power near the limit: below this share of it, something else does."""
_CAPPED_WITHIN_NS = 1_000_000_000
_CAPPED_READINGS = 8
"""Readings of power within that time on either side, at least, to contradict a power cap."""
_IDLE_NS = 5_000_000
_RAMP_NS = 500_000_000
_RISE_RATIO = 1.05
"""After an idle stretch a clock that will rise by more within half a second is still ramping up."""
_HOLE_FACTOR = 4
"""A gap so many times the median, with a change in it, is a hole."""


class Held(NamedTuple):
    """What is recorded of a device besides its clock, which a reading's reasons are checked by.

    Attributes:
        set_hz: clock that it was set to.
        power_limit_w: limit of the power that is read; None where this is an average, whose
            bursts may reach the limit unseen.
        is_cool: chip and memory were always cooler than what slows the clock down.
    """

    set_hz: float | None = None
    power_limit_w: float | None = None
    is_cool: bool = False


_NOTHING = Held()


@dataclass(frozen=True, slots=True)
class EventClocks:
    """The clock of each device event.

    Attributes:
        clock_hz: mean over the event, NaN where not known.
        error_hz: bound of its error from sampling, NaN where not known.
        state: KNOWN, or why the clock is not.
        reading: number of the last reading before the event, -1 where none is.
        readers: device → its samples, for labels.
        held: what their reasons were checked by.
    """

    clock_hz: np.ndarray
    error_hz: np.ndarray
    state: np.ndarray
    reading: np.ndarray
    readers: dict[int, ClockSeries]
    held: Held

    @property
    def known(self) -> np.ndarray:
        """Mask of the events whose clock is known."""
        return self.state == KNOWN


def join_clocks(events: DeviceEvents, samples: pa.Table, held: Held = _NOTHING) -> EventClocks:
    """Mean clock of each device event. DEVICE_EVENT, DEVICE_CLOCK -> EventClocks.

    Samples of one device belong to the events of the only device of a trace, whatever numbers the
    driver and the trace give it; with several, numbers must agree. The host's own events have none.
    """
    count = len(events)
    clock_hz, error_hz = np.full((2, count), np.nan)
    state = np.full(count, NO_SAMPLES, dtype=np.int8)
    reading = np.full(count, -1, dtype=np.int64)
    readers: dict[int, ClockSeries] = {}
    sample_device = ints(samples, "device_id")
    devices = np.unique(events.device_id[events.device_id >= 0])
    one = len(devices) == 1 and len(np.unique(sample_device)) == 1
    for device in devices:
        device_samples = samples if one else samples.filter(sample_device == device)
        series = ClockSeries.of(device_samples, held)
        if series is None:
            continue
        rows = np.flatnonzero(events.device_id == device)
        start, end = events.start_ns[rows], events.end_ns[rows]
        series = series.ramped(*_idle_stretches(start, end)).around(
            int(start.min()), int(end.max())
        )
        if series is None:
            state[rows] = NO_OVERLAP
            continue
        at = series.locate(start, end)
        readers[int(device)] = series
        bad = np.concatenate([[0], np.cumsum(~series.trusted)])
        trusted = bad[at.last + 1] == bad[at.first]
        state[rows] = np.where(~at.inside, NO_OVERLAP, np.where(trusted, KNOWN, SPARSE))
        known = at.inside & trusted
        reading[rows] = np.where(known, at.first, -1)
        clock_hz[rows] = np.where(known, series.mean(series.clock_hz, at), np.nan)
        error_hz[rows] = np.where(known, series.mean_error(at), np.nan)
    return EventClocks(clock_hz, error_hz, state, reading, readers, held)


def _refreshed(
    time_ns: np.ndarray, clock_hz: np.ndarray, power_w: np.ndarray, reasons: np.ndarray
) -> np.ndarray:
    """Mask of the samples at which the driver told something new; all where it always does.

    Power differs from one reading to the next nearly always. Where it changes at regular intervals
    of several samples, these are the driver's refresh period. A reading that equals the one before
    counts as new one period after it.
    """
    every = np.ones(len(time_ns), dtype=bool)
    power_changed = np.diff(np.nan_to_num(power_w, nan=-1.0)) != 0
    clock_changed = np.diff(clock_hz) != 0
    between = np.diff(time_ns[1:][power_changed])
    # A driver that averages power over a while may tell the clock as it is.
    is_live = clock_changed.sum() > _LIVE_CHANGES * power_changed.sum()
    if len(between) < _HELD_CHANGES or is_live:
        return every
    period, gap = np.median(between), np.median(np.diff(time_ns))
    regular = np.mean(np.abs(between - period) <= gap)
    if period < _HELD_GAPS * gap or regular < _REGULAR_RATIO:
        return every
    # A sample in which clock and power were not yet refreshed both is followed by one with both.
    changes = 1 + np.flatnonzero(power_changed | clock_changed)
    changes = changes[np.append(np.diff(time_ns[changes]) >= period / 2, True)]
    fresh = np.isin(np.arange(len(every)), changes)
    fresh[0] = True
    since = time_ns - time_ns[np.maximum.accumulate(np.where(fresh, np.arange(len(every)), 0))]
    # Half a gap late: a new reading may be seen that much later than it was due.
    periods = np.maximum(since - gap / 2, 0) // period
    return fresh | (np.diff(periods, prepend=0) > 0) | (np.diff(reasons, prepend=reasons[0]) != 0)


def _below_limit(time_ns: np.ndarray, power_w: np.ndarray, limit_w: float) -> np.ndarray:
    """Mask of the readings around which power stays well below a limit for a second each way."""
    low = np.searchsorted(time_ns, time_ns - _CAPPED_WITHIN_NS, side="left")
    high = np.searchsorted(time_ns, time_ns + _CAPPED_WITHIN_NS, side="right")
    known = np.concatenate([[0], np.cumsum(~np.isnan(power_w))])
    padded = np.append(np.nan_to_num(power_w), 0.0)
    top_w = np.maximum.reduceat(padded, np.stack([low, high], axis=1).ravel())[::2]
    enough = known[high] - known[low] >= _CAPPED_READINGS
    return np.asarray(enough & (top_w < _CAPPED_RATIO * limit_w))


def _replaced(reasons: np.ndarray, bits: int, other: int) -> np.ndarray:
    named = (reasons >= 0) & ((reasons & bits) != 0)
    return np.where(named, (reasons & ~bits) | other, reasons)


def _idle_stretches(start_ns: np.ndarray, end_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Idle times between events, sorted by start, long enough for a device to slow down."""
    if len(start_ns) < 2:
        return start_ns[:0], start_ns[:0]
    latest = np.maximum.accumulate(end_ns)[:-1]
    idle = np.flatnonzero(start_ns[1:] - latest >= _IDLE_NS)
    return latest[idle], start_ns[1:][idle]


class Place(NamedTuple):
    """Position of intervals among samples: gap of the start and of the end, and how deep in it."""

    inside: np.ndarray
    first: np.ndarray
    head_ns: np.ndarray
    last: np.ndarray
    tail_ns: np.ndarray


@dataclass(frozen=True)
class ClockSeries:
    """Readings of one device in time order, at distinct times, all with a clock.

    Attributes:
        time_ns, span_ns, clock_hz: one per reading.
        power_w: NaN where absent.
        reasons: bits, -1 where absent.
    """

    time_ns: np.ndarray
    span_ns: np.ndarray
    clock_hz: np.ndarray
    power_w: np.ndarray
    reasons: np.ndarray

    @classmethod
    def of(cls, samples: pa.Table, held: Held = _NOTHING) -> ClockSeries | None:
        """Rows with a clock above zero; None when there is none.

        A reading at the clock that the device was set to, for which the driver names no reason, is
        held by that setting: AMD's drivers have no reason of this name. A power cap or heat that
        power or temperature contradicts is replaced.
        """
        clock = ints(samples, "sm_clock_hz")
        # The last of several readings of one time counts.
        time, reverse = np.unique(ints(samples, "time_ns")[::-1], return_index=True)
        keep = len(clock) - 1 - reverse
        good = clock[keep] > 0
        time, keep = time[good], keep[good]
        if not len(time):
            return None
        power = samples["power_w"].to_numpy(zero_copy_only=False).astype(np.float64)
        reasons = ints(samples, "event_reasons")[keep]
        if held.set_hz is not None:
            at_it = np.abs(clock[keep] / held.set_hz - 1) <= _SET_RATIO
            reasons = np.where((reasons == 0) & at_it, _SET_BIT, reasons)
        fresh = _refreshed(time, clock[keep], power[keep], reasons)
        time, keep, reasons = time[fresh], keep[fresh], reasons[fresh]
        if held.power_limit_w is not None:
            below = _below_limit(time, power[keep], held.power_limit_w)
            reasons = np.where(below, _replaced(reasons, _SW_POWER_CAP, FALSE_CAP), reasons)
        if held.is_cool:
            reasons = _replaced(reasons, _HEAT, FALSE_HEAT)
        return cls(
            time,
            np.maximum(ints(samples, "span_ns"), 0)[keep],
            clock[keep].astype(np.float64),
            power[keep],
            reasons,
        )

    def ramped(self, idle_from_ns: np.ndarray, idle_until_ns: np.ndarray) -> ClockSeries:
        """The readings, with those marked that still rise after the device was idle.

        A driver names idling while it lasts, if at all; on the way up it names nothing. A reading
        without a reason is of a ramp when it lies in an idle stretch, or within half a second after
        one and before the highest clock of that time, and well below it.
        """
        open_ = self.reasons == 0
        if not len(idle_from_ns) or not open_.any():
            return self
        time, clock = self.time_ns, self.clock_hz
        last = np.searchsorted(idle_from_ns, time, side="right") - 1
        after = last >= 0
        last = np.maximum(last, 0)
        until = np.append(idle_from_ns[1:], np.iinfo(np.int64).max)
        until = np.minimum(until, idle_until_ns + _RAMP_NS)
        ramping = np.zeros(len(time), dtype=bool)
        low = np.searchsorted(time, idle_from_ns, side="left")
        high = np.searchsorted(time, until, side="right")
        some = np.flatnonzero(high > low)
        if len(some):
            bounds = np.stack([low[some], high[some]], axis=1).ravel()
            padded = np.append(clock, 0.0)
            top = np.zeros(len(low))
            top[some] = np.maximum.reduceat(padded, bounds)[::2]
            below = after & (clock * _RISE_RATIO < top[last]) & (time <= until[last])
            # Only what comes before the top: later on a clock that falls has another cause.
            at_top = after & (clock * _RISE_RATIO >= top[last]) & (time >= idle_until_ns[last])
            first_top = np.full(len(low), np.iinfo(np.int64).max)
            np.minimum.at(first_top, last[at_top], time[at_top])
            ramping = below & (time < first_top[last])
        return replace(self, reasons=np.where(open_ & ramping, _IDLE_BIT, self.reasons))

    def around(self, start_ns: int, end_ns: int) -> ClockSeries | None:
        """The readings of a time and one beyond it on either side; None when there are not two.

        The first and the last reading are held for one median gap, where that is short enough to
        tell of the time between readings at all.
        """
        if len(self.time_ns) < 2:
            return None
        hold = int(np.median(np.diff(self.time_ns)))
        hold = hold if hold <= MAX_GAP_NS else 0
        if start_ns > self.time_ns[-1] + hold or end_ns < self.time_ns[0] - hold:
            return None
        low = max(int(np.searchsorted(self.time_ns, start_ns, side="right")) - 1, 0)
        high = min(int(np.searchsorted(self.time_ns, end_ns, side="left")) + 1, len(self.time_ns))
        high = max(high, 2)
        low = min(low, high - 2)
        index = np.arange(low, high)
        if hold:
            index = np.concatenate([[low], index, [high - 1]])
        readings = ClockSeries(*(getattr(self, f.name)[index] for f in fields(self)))
        if hold:
            readings.time_ns[0] -= hold
            readings.time_ns[-1] += hold
        return readings

    @cached_property
    def gap_ns(self) -> np.ndarray:
        """Time from each reading to the next."""
        return np.diff(self.time_ns)

    @cached_property
    def changes(self) -> np.ndarray:
        """Mask of the gaps over which the clock changed."""
        return np.abs(np.diff(np.log(self.clock_hz))) > np.log(CHANGE_RATIO)

    @cached_property
    def bound_ns(self) -> float:
        """Longest trusted time between two readings, in ns: less where the clock changes faster."""
        change_ln = float(np.abs(np.diff(np.log(self.clock_hz)))[self.changes].sum())
        if not change_ln:
            return float(MAX_GAP_NS)
        span_ns = float(self.time_ns[-1] - self.time_ns[0])
        return min(float(MAX_GAP_NS), MOST_CHANGE_LN / change_ln * span_ns)

    @cached_property
    def trusted(self) -> np.ndarray:
        """Mask of the gaps that are short enough for how fast the clock changes."""
        gap = self.gap_ns
        span = (self.span_ns[:-1] + self.span_ns[1:]) / 2
        hole = self.changes & (gap > _HOLE_FACTOR * np.median(gap))
        return (gap + span <= self.bound_ns) & ~hole

    def locate(self, start_ns: np.ndarray, end_ns: np.ndarray) -> Place:
        """Place intervals among the readings."""
        last_gap = len(self.time_ns) - 2
        first = np.clip(np.searchsorted(self.time_ns, start_ns, side="right") - 1, 0, last_gap)
        last = np.clip(np.searchsorted(self.time_ns, end_ns, side="left") - 1, first, last_gap)
        return Place(
            (start_ns >= self.time_ns[0]) & (end_ns <= self.time_ns[-1]),
            first,
            (start_ns - self.time_ns[first]).astype(np.float64),
            last,
            (end_ns - self.time_ns[last]).astype(np.float64),
        )

    def mean(self, values: np.ndarray, at: Place) -> np.ndarray:
        """Mean over each interval of a series that is linear between its values."""
        return self._mean(values[:-1], values[1:], at)

    def _mean(self, begin: np.ndarray, end: np.ndarray, at: Place) -> np.ndarray:
        """Mean over each interval of what grows linearly within each gap, from begin to end."""
        gap = self.gap_ns.astype(np.float64)
        slope = (end - begin) / gap
        # In one gap, the mean of a line is its middle: nothing large is subtracted.
        mean = begin[at.first] + slope[at.first] * (at.head_ns + at.tail_ns) / 2
        rows = np.flatnonzero(at.first < at.last)
        if len(rows):
            first, last, tail_ns = at.first[rows], at.last[rows], at.tail_ns[rows]
            integral = np.concatenate([[0.0], np.cumsum((begin + end) / 2 * gap)])
            head_length = gap[first] - at.head_ns[rows]
            head = head_length * (end[first] - slope[first] * head_length / 2)
            tail = tail_ns * (begin[last] + slope[last] * tail_ns / 2)
            between = (self.time_ns[last] - self.time_ns[first + 1]).astype(np.float64)
            length = head_length + between + tail_ns
            mean[rows] = (head + integral[last] - integral[first + 1] + tail) / length
        return mean

    def mean_power(self, at: Place) -> np.ndarray:
        """Mean board power over each interval; NaN where a reading that it needs has none."""
        absent = np.isnan(self.power_w)
        touched = np.concatenate([[0], np.cumsum(absent[:-1] | absent[1:])])
        power = self.mean(np.where(absent, 0.0, self.power_w), at)
        return np.where(touched[at.last + 1] == touched[at.first], power, np.nan)

    def mean_error(self, at: Place) -> np.ndarray:
        """Bound of the error of the mean clock: half of the change over each gap, time-weighted.

        Neighbours may agree by chance while the clock moved between them. So it is at least half of
        what lies between a reading and the closer of its neighbours, in the median: nothing where
        the clock keeps its levels for longer than a reading.
        """
        change = np.abs(np.diff(self.clock_hz))
        apart = np.minimum(change[:-1], change[1:])
        least = np.median(apart) / 2 if len(apart) else 0.0
        half = np.maximum(change / 2, least)
        return self._mean(half, half, at)

    @cached_property
    def labels(self) -> np.ndarray:
        """(readings, labels): what held the clock at each reading, shares that sum to 1."""
        reasons = self.reasons
        held = np.zeros((len(reasons), len(CLOCK_LABELS)))
        known = reasons >= 0
        for label, bits in _BITS.items():
            held[:, label] = known & ((reasons & bits) != 0)
        idle = known & ~held.any(axis=1) & ((reasons & _IDLE_BIT) != 0)
        held[:, _IDLE], held[:, _HOST] = idle, known & (reasons == 0)
        held[~held.any(axis=1), _UNLABELLED] = 1
        return held / held.sum(axis=1, keepdims=True)

    def blame(self, at: Place, reference_hz: np.ndarray) -> np.ndarray:
        """(intervals, labels): how far below the reference each label held the clock.

        Each reading's deficit counts for its labels, so that a kernel whose second half was
        throttled has its whole clock loss under that throttle. Where no reading near it lies
        below the reference, the loss is unlabelled.
        """
        blame = np.zeros((len(reference_hz), len(CLOCK_LABELS)))
        for reference in np.unique(reference_hz):
            rows = np.flatnonzero(reference_hz == reference)
            part = Place(*(column[rows] for column in at))
            deficit = np.maximum(reference - self.clock_hz, 0.0)
            for label in range(len(CLOCK_LABELS)):
                weight = self.labels[:, label] * deficit
                if weight.any():
                    blame[rows, label] = np.maximum(self.mean(weight, part), 0.0)
        blame[blame.sum(axis=1) <= 0, _UNLABELLED] = 1
        return blame

    def label_time(self, at: Place) -> tuple[np.ndarray, np.ndarray]:
        """Share of each interval in which each label held, and in which reasons were read at all.

        (intervals, labels) and (intervals,): time without a reason counts for no label at all.
        """
        is_labelled = (self.reasons >= 0).astype(np.float64)
        shares = (self.mean(np.ascontiguousarray(c * is_labelled), at) for c in self.labels.T)
        return np.stack(list(shares), axis=1), self.mean(is_labelled, at)
