"""Time and energy of a pipeline by its clocks, from tables measured at several clocks.

Sensitivities are slopes of logarithms: t ∝ clock^(−s) and P ∝ clock^b, for each stage and
instruction. Schedules are made from the measured points themselves (`clock_schedule`), not from
these fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec
import numpy as np

from chopper.analyzers.estimates import Estimate, assumed
from chopper.analyzers.estimates.clock_schedule import (
    MOST_INSTRUCTIONS,
    Planner,
    Schedule,
    one_forward_one_backward,
)
from chopper.errors import InputError, UsageError
from chopper.hardware.clock_tables import ClockTable
from chopper.quantities import between
from chopper.statistics import kept_back, power_law
from chopper.wording import ranges

MIN_CLOCKS = 8
"""Fewest clocks of a fit: two of each quarter that is kept back."""
_FRONTIER_POINTS = 7


class Point(msgspec.Struct, kw_only=True, frozen=True):
    """A step of the pipeline."""

    time_ns: int
    energy_j: float
    """Of all stages."""
    saved_energy_ratio: float
    """Against the highest clock everywhere."""
    bound_saved_ratio: float | None = None
    """No schedule of measured clocks saves more within this time; null at one clock."""
    clock_hz: int | None = None
    """Null where clocks differ."""


class Fit(msgspec.Struct, kw_only=True, frozen=True):
    """The dependence of an instruction on the clock, and its error where it was not fitted."""

    stages: str
    """Stages whose rows are the same, such as ``0-6``."""
    instruction: str
    clocks_count: int
    sensitivity_ratio: float
    """s in t ∝ clock^(−s)."""
    sensitivity_ci95: tuple[float, float]
    power_exponent_ratio: float
    """b in P ∝ clock^b."""
    power_exponent_ci95: tuple[float, float]
    power_curved: bool
    """Whether ln P by ln clock is a parabola rather than that line: it was less far off."""
    time_error_ratio: float
    """Median error of the time at clocks that were kept back, a quarter of the range at a time."""
    worst_time_error_ratio: float
    energy_error_ratio: float
    worst_energy_error_ratio: float


class KeptBack(msgspec.Struct, kw_only=True, frozen=True):
    """Another table, predicted by the fits of this one from its own highest clock."""

    table: str
    points_count: int
    time_error_ratio: float
    """Median."""
    worst_time_error_ratio: float
    energy_error_ratio: float
    worst_energy_error_ratio: float


class StageClocks(msgspec.Struct, kw_only=True, frozen=True):
    """Clocks of a stage in a step, in order of time."""

    stage: int
    order: tuple[str, ...]
    """``F0``: forward of microbatch 0; ``B0``: backward."""
    clock_hz: tuple[int, ...]


class Energy(Estimate, kw_only=True, frozen=True):
    """Energy of a pipeline's step by its clocks."""

    SCHEMA: ClassVar[str] = "chopper.estimate.energy/1"

    table: str
    stages_count: int
    microbatches_count: int
    waiting_power_w: float | None
    """Null: not known, so energy is that of instructions alone."""
    highest: Point
    """All instructions at the highest clock."""
    lossless: Point
    """A clock for each instruction and microbatch, the step no longer than at the highest."""
    lossless_fixed: Point
    """The same with one clock for all microbatches of a stage's instruction."""
    frontier: tuple[Point, ...]
    """Least energy found within longer and longer steps, from `lossless` on."""
    one_clock: tuple[Point, ...]
    """All instructions at one clock."""
    fits: tuple[Fit, ...]
    kept_back: tuple[KeptBack, ...]
    schedule: tuple[StageClocks, ...]
    """Of `lossless`."""


def energy(
    tables: Sequence[ClockTable],
    name: str,
    *,
    microbatches_count: int = 32,
    waiting_power_w: float | None = None,
    others: Mapping[str, Sequence[ClockTable]] | None = None,
) -> Energy:
    """Return time and energy of a pipeline's step by its clocks.

    Args:
        tables: two for each stage, as :func:`read_clock_tables` returns them.
        name: of the table, for messages.
        microbatches_count: of a step.
        waiting_power_w: power of a device that waits for another stage; None where not known.
        others: tables of other models or devices, to be predicted from this one, by name.

    Raises:
        InputError: a table with fewer than eight clocks, or without a clock that all share.
        UsageError: more instructions than can be planned, or a power that makes no sense.
    """
    stages_count = len(tables) // 2
    between(microbatches_count, 1, 1e6, "microbatches")
    if waiting_power_w is not None:
        between(waiting_power_w, 1e-3, 1e6, "power of a device that waits")
    instructions = 2 * stages_count * microbatches_count
    if instructions > MOST_INSTRUCTIONS:
        raise UsageError(
            f"microbatches: {microbatches_count} on {stages_count} stages are {instructions} "
            f"instructions, more than the {MOST_INSTRUCTIONS} that are planned; specify at most "
            f"{MOST_INSTRUCTIONS // 2 // stages_count}"
        )
    fits = fits_of(tables, name)
    pipeline = one_forward_one_backward(stages_count, microbatches_count)
    planner = Planner(pipeline, tables, waiting_power_w or 0.0)
    shared = _shared_clocks(tables, name)
    highest = planner.at_clock(shared[0])
    lossless = planner.within(highest.time_ns)
    limits = np.linspace(
        highest.time_ns, max(planner.slowest_ns(), highest.time_ns), _FRONTIER_POINTS
    )
    longer = [planner.within(int(limit)) for limit in np.unique(limits.astype(np.int64))[1:]]
    return Energy(
        assumptions=assumed("energy", "waiting_energy" if waiting_power_w else "no_waiting_energy"),
        table=name,
        stages_count=stages_count,
        microbatches_count=microbatches_count,
        waiting_power_w=waiting_power_w,
        highest=_point(highest, highest, shared[0]),
        lossless=_point(lossless, highest),
        lossless_fixed=_point(planner.within(highest.time_ns, fixed=True), highest),
        frontier=tuple(_point(one, highest) for one in (lossless, *longer)),
        one_clock=tuple(_point(planner.at_clock(c), highest, c) for c in shared),
        fits=tuple(fits),
        kept_back=tuple(predicted(tables, other, where) for where, other in (others or {}).items()),
        schedule=tuple(_stages(planner, lossless)),
    )


def _shared_clocks(tables: Sequence[ClockTable], name: str) -> list[int]:
    """Return the clocks that every table has, the highest first."""
    shared = set(tables[0].clock_hz.tolist()).intersection(*(t.clock_hz.tolist() for t in tables))
    highest = max(int(table.clock_hz[0]) for table in tables)
    if highest not in shared:
        raise InputError(
            f"{name}: {highest / 1e6:g} MHz, the highest clock, was not measured for every stage "
            "and instruction; expected the same clocks for all"
        )
    return sorted(shared, reverse=True)


def _point(schedule: Schedule, highest: Schedule, clock_hz: int | None = None) -> Point:
    return Point(
        time_ns=schedule.time_ns,
        energy_j=schedule.energy_j,
        saved_energy_ratio=1 - schedule.energy_j / highest.energy_j,
        bound_saved_ratio=None if clock_hz else 1 - schedule.bound_j / highest.energy_j,
        clock_hz=clock_hz,
    )


def _stages(planner: Planner, schedule: Schedule) -> list[StageClocks]:
    pipeline = planner.pipeline
    found = []
    for stage in range(pipeline.stages_count):
        rows = np.flatnonzero(pipeline.stage == stage)
        named = zip(pipeline.instruction[rows], pipeline.microbatch[rows], strict=True)
        found.append(
            StageClocks(
                stage=stage,
                order=tuple(f"{'FB'[i]}{m}" for i, m in named),
                clock_hz=tuple(schedule.clock_hz[rows].tolist()),
            )
        )
    return found


def fits_of(tables: Sequence[ClockTable], name: str) -> list[Fit]:
    """Fit each stage's instructions; stages with the same rows together.

    Raises:
        InputError: fewer than eight clocks.
    """
    alike: dict[tuple[bytes, ...], list[ClockTable]] = {}
    for table in tables:
        if len(table.clock_hz) < MIN_CLOCKS:
            raise InputError(
                f"{name}: stage {table.stage}, {table.instruction} was measured at "
                f"{len(table.clock_hz)} clocks; expected at least {MIN_CLOCKS}"
            )
        columns = (table.clock_hz, table.time_ns, table.energy_j)
        key = (table.instruction.encode(), *(c.tobytes() for c in columns))
        alike.setdefault(key, []).append(table)
    return [_fit(same) for same in alike.values()]


def _fit(same: Sequence[ClockTable]) -> Fit:
    table = same[0]
    x = np.log(table.clock_hz[::-1])
    time, power = np.log(table.time_ns[::-1]), np.log(table.power_w[::-1])
    slope, slope_ci95, _ = power_law(table.clock_hz.tolist(), table.time_ns.tolist())
    exponent, exponent_ci95, _ = power_law(table.clock_hz.tolist(), table.power_w.tolist())
    assert slope_ci95 is not None
    assert exponent_ci95 is not None
    off = kept_back(x, time, 1)
    degree = _power_degree(x, power)
    time_errors = np.abs(np.expm1(off))
    energy_errors = np.abs(np.expm1(off + kept_back(x, power, degree)))
    return Fit(
        stages=ranges([one.stage for one in same]),
        instruction=table.instruction,
        clocks_count=len(x),
        sensitivity_ratio=-slope,
        sensitivity_ci95=(-slope_ci95[1], -slope_ci95[0]),
        power_exponent_ratio=exponent,
        power_exponent_ci95=exponent_ci95,
        power_curved=degree > 1,
        time_error_ratio=float(np.median(time_errors)),
        worst_time_error_ratio=float(time_errors.max()),
        energy_error_ratio=float(np.median(energy_errors)),
        worst_energy_error_ratio=float(energy_errors.max()),
    )


def _power_degree(x: np.ndarray, power: np.ndarray) -> int:
    """Return 2 where a parabola is nearer to points that were kept back than a line, else 1."""
    median = [float(np.median(np.abs(kept_back(x, power, degree)))) for degree in (1, 2)]
    return 2 if median[1] < median[0] else 1


def _power_curve(table: ClockTable, clock_hz: np.ndarray) -> np.ndarray:
    """Return ln P at clocks, up to a constant, as fitted to a table."""
    x, power = np.log(table.clock_hz[::-1]), np.log(table.power_w[::-1])
    curve = np.polynomial.Polynomial.fit(x, power, _power_degree(x, power))
    return np.asarray(curve(np.log(clock_hz)))


def predicted(tables: Sequence[ClockTable], others: Sequence[ClockTable], where: str) -> KeptBack:
    """Predict another table's rows below its highest clock, by the mean curves of this one.

    Raises:
        InputError: the other has a single clock.
    """
    times: list[np.ndarray] = []
    energies: list[np.ndarray] = []
    for other in others:
        alike = [table for table in tables if table.instruction == other.instruction]
        if len(other.clock_hz) < 2:
            raise InputError(f"{where}: one clock; expected several, to be predicted")
        ln = np.log(other.clock_hz / other.clock_hz[0])
        time, power = np.zeros((2, len(ln)))
        for table in alike:
            time += power_law(table.clock_hz.tolist(), table.time_ns.tolist())[0] * ln
            curve = _power_curve(table, other.clock_hz)
            power += curve - curve[0]
        time, power = time / len(alike), power / len(alike)
        times.append(np.expm1(time - np.log(other.time_ns / other.time_ns[0]))[1:])
        measured = np.log(other.energy_j / other.energy_j[0])
        energies.append(np.expm1(time + power - measured)[1:])
    off, joules = np.abs(np.concatenate(times)), np.abs(np.concatenate(energies))
    return KeptBack(
        table=where,
        points_count=len(off),
        time_error_ratio=float(np.median(off)),
        worst_time_error_ratio=float(off.max()),
        energy_error_ratio=float(np.median(joules)),
        worst_energy_error_ratio=float(joules.max()),
    )
