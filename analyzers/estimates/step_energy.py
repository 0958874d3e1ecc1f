"""Time, energy and cost of a recorded run's step at another device clock or power cap.

Time is a replay with each kernel's sensitivity to the clock. Energy is what the run's counters
measured, times the change of the step's time and of the power. How power depends on the clock is
measured: in the run itself, where its clock was set to several levels, or by a table of the same
device. A clock that a power or thermal limit held shows nothing: power is the same at each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from chopper import wording as fmt
from chopper.analyzers.attributed import Attributed
from chopper.analyzers.causes.clock import CLOCK_LABELS
from chopper.analyzers.events.clocked import Clocked, clocked_of
from chopper.analyzers.events.device import events_of
from chopper.analyzers.replay.answers import StepEnergy, WhatIf
from chopper.analyzers.replay.replay import Replay
from chopper.analyzers.replay.whatif_options import Changes
from chopper.errors import InputError, UsageError
from chopper.hardware import devices, prices
from chopper.hardware.clock_tables import ClockTable
from chopper.statistics import estimate, line
from chopper.views import view

_DEVIATIONS = 1.96
_BIN_NS = 1_000_000_000
"""The longest window over which drivers average power."""
_LEVEL_RATIO = 0.01
"""Clocks of one level differ by no more."""
_MIN_LEVELS = 3
_MIN_RANGE_RATIO = 1.05
_MIN_BUSY_RATIO = 0.5
_BUSY_RATIO = 0.1
"""Seconds in which the device was busy for a share this far from the median are left out."""
_FRONTIER_POINTS = 7
_CANDIDATES = 400
"""Clocks that are tried under a power cap."""
_NOT_SAMPLED = "the run's clock and power were not sampled together"
_HELD = [CLOCK_LABELS.index(name) for name in ("power_cap", "thermal")]
_Measured = tuple[float, float, range, float]
"""Energy of a step in J, mean power in W, steps, and the energy's error as a share."""
_REMEDY = "pass --power-table FILE, measured on this kind of device"


@dataclass(frozen=True)
class Power:
    """Dependence of a device's power on its clock.

    Attributes:
        source: what shows it.
        low_hz, high_hz: clocks between which it was measured.
        exponent: b in P ∝ clock^b between two clocks, and its 95 % interval.
    """

    source: str
    low_hz: float
    high_hz: float
    exponent: Callable[[float, float], tuple[float, tuple[float, float]]]

    def covers(self, clock_hz: float) -> bool:
        """Tell whether a clock lies where power was measured, but for rounding."""
        return self.low_hz * 0.99 <= clock_hz <= self.high_hz * 1.01


def power_of_tables(tables: Sequence[ClockTable], name: str) -> Power:
    """Return what tables of one device show: the mean over their distinct instructions.

    Raises:
        InputError: fewer than two clocks, or none in common.
    """
    low = max(int(table.clock_hz.min()) for table in tables)
    high = min(int(table.clock_hz.max()) for table in tables)
    distinct = {table.energy_j.tobytes() + table.time_ns.tobytes(): table for table in tables}
    if low >= high or len(distinct) < 2:
        raise InputError(
            f"{name}: power at several clocks is needed; expected at least two clocks that all "
            "instructions share, and rows that differ from instruction to instruction"
        )

    def exponent(from_hz: float, to_hz: float) -> tuple[float, tuple[float, float]]:
        ends = np.clip([from_hz, to_hz], low, high)
        if abs(ends[1] / ends[0] - 1) < _LEVEL_RATIO:
            ends = np.array([low, high])
        ln = [
            np.interp(np.log(ends), np.log(t.clock_hz[::-1]), np.log(t.power_w[::-1]))
            for t in distinct.values()
        ]
        found = estimate([float((b - a) / np.log(ends[1] / ends[0])) for a, b in ln])
        assert found.ci95 is not None
        return found.value, found.ci95

    return Power(name, low, high, exponent)


def power_of_run(clocked: Clocked | None) -> Power | str:
    """Return what the run's own readings show, or why they show nothing.

    Of each second in which a device was as busy as usual and held one clock that neither power nor
    heat limited, its mean power and clock; then a line through the levels.
    """
    if clocked is None:
        return "no clock of a computing device was sampled"
    if not np.isfinite(clocked.power_w).any():
        return "no power was sampled beside the clock"
    begins = clocked.events.start_ns[clocked.rows]
    keys = np.stack([clocked.events.rank[clocked.rows], begins // _BIN_NS], axis=1)
    _, group = np.unique(keys, axis=0, return_inverse=True)
    free = clocked.labels[:, _HELD].sum(axis=1) + (1 - clocked.told) <= 0
    good = free & np.isfinite(clocked.power_w) & np.isfinite(clocked.clock_hz)
    busy = np.bincount(group, clocked.time_ns) / _BIN_NS
    bad = np.bincount(group, ~good) > 0
    usual = np.abs(busy / max(float(np.median(busy)), 1e-9) - 1) <= _BUSY_RATIO
    low, high = np.full(len(busy), np.inf), np.zeros(len(busy))
    np.minimum.at(low, group, clocked.clock_hz)
    np.maximum.at(high, group, clocked.clock_hz)
    steady = high / low - 1 <= 2 * _LEVEL_RATIO
    used = ~bad & usual & steady & (busy >= _MIN_BUSY_RATIO)
    if not used.any():
        return (
            "no second of the run was busy at one clock that neither power nor heat limited, so "
            "its power shows nothing of another clock"
        )
    weight = np.maximum(np.bincount(group, clocked.time_ns), 1)
    clock = np.bincount(group, clocked.time_ns * np.nan_to_num(clocked.clock_hz)) / weight
    power = np.bincount(group, clocked.time_ns * np.nan_to_num(clocked.power_w)) / weight
    return _line_of_levels(np.log(clock[used]), np.log(power[used]))


def _line_of_levels(clock_ln: np.ndarray, power_ln: np.ndarray) -> Power | str:
    """Fit a line through the mean of each level of the clock."""
    order = np.argsort(clock_ln, kind="stable")
    clock_ln, power_ln = clock_ln[order], power_ln[order]
    level = np.cumsum(np.diff(clock_ln, prepend=clock_ln[0]) > _LEVEL_RATIO)
    size = np.bincount(level)
    x, y = (np.bincount(level, values) / size for values in (clock_ln, power_ln))
    if len(x) < _MIN_LEVELS or math.exp(x[-1] - x[0]) < _MIN_RANGE_RATIO:
        found = fmt.hertz(math.exp(x[0]))
        if len(x) > 1:
            found += f" to {fmt.hertz(math.exp(x[-1]))}"
        return (
            f"the run's clock, where no limit held it, was at {fmt.plural(len(x), 'level')} "
            f"({found}); expected three that differ by 5 % in all"
        )
    _, slope, ci95, _ = line(x.tolist(), y.tolist())
    assert ci95 is not None
    source = f"this run, {len(x)} levels of its clock"
    return Power(source, math.exp(x[0]), math.exp(x[-1]), lambda _from, _to: (slope, ci95))


@dataclass(frozen=True)
class Clocks:
    """The clock and power of a run, as it shows them.

    Attributes:
        clocked: its computing events with their clocks; None without samples.
        step: number of the step of each of these events, -1 for none.
        power: dependence of power on the clock, or why that is not known.
    """

    clocked: Clocked | None
    step: np.ndarray
    power: Power | str

    @classmethod
    def of(cls, run: Attributed, power: Power | None) -> Clocks:
        """Gather them; ``power`` is that of a table, where one was given."""
        events = events_of(run)
        clocked = clocked_of(run, events)
        number_by_index = dict(
            zip(*(run.windows[n].to_pylist() for n in ("step_index", "number")), strict=True)
        )
        rows = () if clocked is None else events.step[clocked.rows].tolist()
        numbers = (number_by_index.get(index) for index in rows)
        step = np.array([-1 if n is None else n for n in numbers], dtype=np.int64)
        return cls(clocked, step, power or power_of_run(clocked))

    @cached_property
    def _known(self) -> np.ndarray | None:
        """(5, kernels) time in ns, clock in Hz, power in W, sensitivity and step, all known."""
        if self.clocked is None:
            return None
        c = self.clocked
        values = np.stack([c.time_ns, c.clock_hz, c.power_w, c.sensitivity, self.step])
        values = values[:, np.isfinite(values).all(axis=0) & (c.time_ns > 0)]
        return values if values.shape[1] else None

    @property
    def mean_hz(self) -> float | None:
        """Mean clock over the kernels' time; None where it or power is not known."""
        return (
            None
            if self._known is None
            else float(np.average(self._known[1], weights=self._known[0]))
        )

    @property
    def highest_hz(self) -> float | None:
        """Highest clock of a kernel."""
        return None if self._known is None else float(self._known[1].max())

    def power_w(self, clock_hz: float, exponent: float) -> float:
        """Mean power of a device over its kernels' time if all ran at one clock."""
        assert self._known is not None
        time_ns, clock, power, *_ = self._known
        return float(np.average(power * (clock_hz / clock) ** exponent, weights=time_ns))

    def changed(self, wish: Wish, exponent: float) -> tuple[float, float]:
        """Return the kernels' mean clock at another clock, and their power over that observed."""
        assert self._known is not None
        time_ns, clock, power, sensitivity, step = self._known
        limit = clock if wish.at_most else math.inf
        wanted = np.minimum(limit, np.full(len(clock), wish.clock_hz))
        after_ns = time_ns * (clock / wanted) ** sensitivity
        after_w = np.average(power * (wanted / clock) ** exponent, weights=after_ns)
        measured = np.isin(step, [*wish.measured])
        if not measured.any():
            measured[:] = True
        before_w = np.average(power[measured], weights=time_ns[measured])
        return float(np.average(wanted, weights=after_ns)), float(after_w / before_w)


@dataclass(frozen=True)
class Wish:
    """Another clock, and what it is compared with.

    Attributes:
        clock_hz: the clock.
        at_most: kernels below it keep theirs.
        measured: numbers of the steps over which energy was measured.
    """

    clock_hz: float
    at_most: bool = False
    measured: range = range(0)


def under_cap(clocks: Clocks, cap_w: float) -> tuple[float, tuple[float, float]]:
    """Return the highest clock that a power cap of each device allows, and its interval.

    Raises:
        UsageError: it is not known, or lies below what was measured.
    """
    power, run_hz, highest_hz = clocks.power, clocks.mean_hz, clocks.highest_hz
    if isinstance(power, str) or run_hz is None or highest_hz is None:
        why = power if isinstance(power, str) else _NOT_SAMPLED
        raise UsageError(f"--power-cap: the clock under a cap is unknown: {why}; {_REMEDY}")
    if not power.covers(run_hz):
        raise UsageError(
            f"--power-cap: the run's clock, {fmt.hertz(run_hz)}, is not one of {_range(power)}"
        )
    candidates = np.linspace(min(power.low_hz, highest_hz), highest_hz, _CANDIDATES)
    exponents = [power.exponent(run_hz, hz) for hz in candidates.tolist()]
    found: list[float] = []
    for values in (
        [b for b, _ in exponents],
        [low for _, (low, _) in exponents],
        [high for _, (_, high) in exponents],
    ):
        drawn = np.array(
            [clocks.power_w(hz, b) for hz, b in zip(candidates.tolist(), values, strict=True)]
        )
        if not found and drawn.min() > cap_w:
            raise UsageError(
                f"--power-cap {cap_w:g}W: at {fmt.hertz(candidates[0])}, the lowest clock at which "
                f"power was measured, a device takes about {drawn.min():.0f} W; expected a cap "
                "above that"
            )
        within = np.flatnonzero(drawn <= cap_w)
        found.append(float(candidates[within[-1] if len(within) else 0]))
    return found[0], (min(found), max(found))


def _range(power: Power) -> str:
    return f"{fmt.hertz(power.low_hz)} to {fmt.hertz(power.high_hz)} ({power.source})"


def resolved(changes: Changes, clocks: Clocks) -> tuple[Changes, tuple[float, float] | None]:
    """Return the changes with the clock of a power cap, and that clock's interval.

    Raises:
        UsageError: see :func:`under_cap`.
    """
    if changes.power_cap_w is None:
        return changes, None
    clock_hz, ci95 = under_cap(clocks, changes.power_cap_w)
    return replace(changes, clock_hz=clock_hz), ci95


def with_errors(
    found: WhatIf, replay: Replay, changes: Changes, clock_ci95: tuple[float, float] | None
) -> WhatIf:
    """Widen the intervals of a prediction by the errors of the sensitivities and of the clock.

    All sensitivities are taken too high, then too low, together: the widest that they can be.
    """
    if found.predicted_ci95_ns is None or found.saved_ci95_ns is None:
        return found
    clocks = (changes.clock_hz,) if clock_ci95 is None else clock_ci95
    ends = [
        _step_ns(replay, replace(changes, clock_hz=hz), sign * _DEVIATIONS)
        for hz in clocks
        for sign in (-1, 1)
    ]
    middle = found.predicted_step_ns
    low, high = _joined(middle, found.predicted_ci95_ns, (min(ends), max(ends)))
    saved = found.observed_step_ns - middle
    of_saved = (found.observed_step_ns - max(ends), found.observed_step_ns - min(ends))
    return replace(
        found,
        predicted_ci95_ns=(max(low, 0.0), high),
        saved_ci95_ns=_joined(saved, found.saved_ci95_ns, of_saved),
    )


def _joined(
    middle: float, first: tuple[float, float], second: tuple[float, float]
) -> tuple[float, float]:
    """Join two intervals of one value, whose errors are independent."""
    low, high = (
        math.hypot(first[i] - middle, (min, max)[i](second[i], middle) - middle) for i in (0, 1)
    )
    return middle - low, middle + high


def _step_ns(replay: Replay, changes: Changes, deviations: float = 0.0) -> float:
    steps = replay.predict(changes, deviations).steps.values()
    return sum(after for _, after, _ in steps) / max(sum(windows for *_, windows in steps), 1)


def energy_of(found: WhatIf, replay: Replay, changes: Changes, clocks: Clocks) -> StepEnergy:
    """Return energy and cost of the step that was predicted.

    Args:
        found: the prediction of the time.
        replay: of the run.
        changes: what was changed; a power cap with its clock.
        clocks: of the run.
    """
    measured = _measured(found.observed)
    priced = _priced(found)
    if isinstance(measured, str):
        return replace(priced, reason=measured)
    energy_j, power_w, numbers, error_ratio = measured
    priced = replace(priced, observed_j=energy_j, observed_power_w=power_w)
    power, run_hz = clocks.power, clocks.mean_hz
    if changes != Changes(
        clock_hz=changes.clock_hz,
        reference_clock=changes.reference_clock,
        power_cap_w=changes.power_cap_w,
    ):
        return replace(priced, reason="the energy of changes beside the clock is not predicted")
    if changes.clock_hz is None:
        return replace(priced, reason="kernels have reference clocks of their own; name a clock")
    if isinstance(power, str) or run_hz is None:
        why = power if isinstance(power, str) else _NOT_SAMPLED
        return replace(
            priced, reason=f"how power depends on the clock is unknown: {why}; {_REMEDY}"
        )
    at_most = changes.power_cap_w is not None
    outside = next(
        (
            hz
            for hz in (run_hz, min(changes.clock_hz, run_hz) if at_most else changes.clock_hz)
            if not power.covers(hz)
        ),
        None,
    )
    priced = replace(
        priced,
        observed_clock_hz=run_hz,
        power_source=power.source,
        power_clock_hz=(power.low_hz, power.high_hz),
    )
    if outside is not None:
        return replace(priced, reason=f"{fmt.hertz(outside)} is not one of {_range(power)}")
    wish = Wish(changes.clock_hz, at_most, numbers)
    exponent, exponent_ci95 = power.exponent(run_hz, wish.clock_hz)
    mean_hz, _ = clocks.changed(wish, exponent)
    ratio, ratio_ci95 = _power_ratio(found, clocks, power, wish)
    observed_ns = _observed_ns(found, numbers)
    ci95 = None
    if found.predicted_ci95_ns is not None:
        measured_ci95 = energy_j * (1 - error_ratio), energy_j * (1 + error_ratio)
        low_ns, high_ns = found.predicted_ci95_ns
        ci95 = _product(
            (energy_j, measured_ci95),
            (ratio, ratio_ci95),
            (found.predicted_step_ns / observed_ns, (low_ns / observed_ns, high_ns / observed_ns)),
        )
    return replace(
        priced,
        predicted_clock_hz=mean_hz,
        predicted_j=energy_j * ratio * found.predicted_step_ns / observed_ns,
        predicted_ci95_j=ci95,
        predicted_power_w=power_w * ratio,
        power_exponent_ratio=exponent,
        power_exponent_ci95=exponent_ci95,
        frontier=tuple(_frontier(found, replay, clocks, power, measured)),
    )


def _observed_ns(found: WhatIf, numbers: range) -> float:
    """Mean observed step of those over which energy was measured; of all where none was traced."""
    times = [observed for n, (observed, _) in found.steps.items() if n in numbers]
    return sum(times) / len(times) if times else found.observed_step_ns


def _power_ratio(
    found: WhatIf, clocks: Clocks, power: Power, wish: Wish
) -> tuple[float, tuple[float, float]]:
    """Mean power at another clock over that observed, and the interval.

    What is drawn while nothing computes may depend on the clock as the rest does, or not at all.
    """
    computing_ns = sum(c.time_ns for c in found.observed.causes() if c.id == "compute")
    busy = computing_ns / max(found.observed.observed_ns, 1)
    assert clocks.mean_hz is not None
    b, ci95 = power.exponent(clocks.mean_hz, wish.clock_hz)
    ratio, *ends = (clocks.changed(wish, value)[1] for value in (b, *ci95))
    bounds = [end * share + 1 - share for end in ends for share in (1.0, busy)]
    return ratio * (1 + busy) / 2 + (1 - busy) / 2, (min(bounds), max(bounds))


def _product(*factors: tuple[float, tuple[float, float]]) -> tuple[float, float]:
    """Interval of the product of values with independent errors, in logarithms."""
    middle = sum(math.log(value) for value, _ in factors)
    low, high = (
        math.hypot(*(math.log(max(ends[i], 1e-12) / value) for value, ends in factors))
        for i in (0, 1)
    )
    return math.exp(middle - low), math.exp(middle + high)


def _frontier(
    found: WhatIf, replay: Replay, clocks: Clocks, power: Power, measured: _Measured
) -> Iterator[tuple[float, float, float]]:
    """Predict time and energy at clocks over the range in which power was measured."""
    energy_j, _, numbers, _ = measured
    observed_ns = _observed_ns(found, numbers)
    for hz in np.linspace(power.low_hz, power.high_hz, _FRONTIER_POINTS).tolist():
        step_ns = _step_ns(replay, Changes(clock_hz=hz))
        ratio, _ = _power_ratio(found, clocks, power, Wish(hz, measured=numbers))
        yield hz, step_ns, energy_j * ratio * step_ns / observed_ns


def _measured(run: Attributed) -> _Measured | str:
    """Return what the energy counters of all devices measured, or why that is not known."""
    rows = [row for row in view(run, "energy").to_pylist() if row["scope"] == "run"]
    whole = [row for row in rows if row["source"] == "all devices"]
    row = next(iter(whole or [r for r in rows if str(r["source"]).startswith("device")]), None)
    if row is None:
        return "neither energy nor power of a device was sampled"
    if row["energy_per_step_j"] is None or row["power_mean_w"] is None:
        return f"the energy of a step was not measured: {row['reason'] or 'no step was seen'}"
    numbers = range(row["first_step"] or 0, (row["last_step"] or -1) + 1)
    error_ratio = (row["energy_error_j"] or 0.0) / row["energy_j"]
    return row["energy_per_step_j"], row["power_mean_w"], numbers, error_ratio


def _priced(found: WhatIf) -> StepEnergy:
    """Return the cost of the devices' time, where the list has a price of them."""
    ranks = found.observed.ranks
    names = {rank.device for rank in ranks}
    name = names.pop() if len(names) == 1 else None
    device = devices.lookup(name) if name else None
    listed = prices.load()
    price = listed.devices.get(device.id) if device else None
    if price is None:
        return StepEnergy()
    per_ns = price.value * len(ranks) / 3600 / 1e9
    return StepEnergy(
        observed_cost=found.observed_step_ns * per_ns,
        predicted_cost=found.predicted_step_ns * per_ns,
        currency=listed.currency,
        price_source=f"{price.value:g} {listed.currency} per device and hour: {price.source}",
    )
