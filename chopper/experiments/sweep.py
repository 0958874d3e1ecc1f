"""A command at several clocks or power caps: the points to measure, and what came out.

Each point is a variant of an experiment, so that repetitions run in turn and every run is read by
all other commands. The clock is what was set; what the device held is measured beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from chopper import wording as fmt
from chopper.collectors.knobs import Knob
from chopper.errors import UsageError
from chopper.experiments.results import STEP, Experiment, Row
from chopper.statistics import Estimate, estimate, power_law

WORKLOAD = "sweep"
SCHEMA = "chopper.sweep/1"


class Point(msgspec.Struct, kw_only=True, frozen=True):
    """The measurements at one setting."""

    name: str
    set_value: float
    """In Hz, or W."""
    step_ns: Estimate | None = None
    power_w: Estimate | None = None
    """Mean over the recording of one device."""
    energy_j: Estimate | None = None
    """Of one device in one step: power times step, repetition by repetition."""
    clock_hz: Estimate | None = None
    """Mean over the recording, as sampled."""


class Sweep(msgspec.Struct, kw_only=True, frozen=True):
    """A finished sweep.

    Attributes:
        sensitivity_ratio: a in t ∝ setting^(−a); None where it is withheld, or unknown.
        why: why it is None.
    """

    unit: str
    points: tuple[Point, ...]
    sensitivity_ratio: float | None
    sensitivity_ci95: tuple[float, float] | None
    r2_ratio: float | None
    why: str
    notes: tuple[str, ...]
    schema: str = SCHEMA


def values_of(knobs: Sequence[Knob], wanted: Sequence[float] | None, points: int) -> list[float]:
    """Return the settings to measure, in the knobs' unit, the highest first.

    Args:
        wanted: by the user; None: ``points`` of them, equally far from each other.

    Raises:
        UsageError: one is out of the range of a device.
    """
    low = max(knob.allowed[0] * knob.scale for knob in knobs)
    high = min(knob.allowed[-1] * knob.scale for knob in knobs)
    if low > high:
        raise UsageError("the devices have no setting in common; name one kind with --device")
    if wanted is None:
        wanted = [high - (high - low) * i / (points - 1) for i in range(points)]
    for value in wanted:
        for knob in knobs:
            if knob.nearest(value) is None:
                least, most = (shown(knob.allowed[i] * knob.scale, knob.unit) for i in (0, -1))
                raise UsageError(
                    f"--values {shown(value, knob.unit)}: beyond what {knob.label} supports, "
                    f"{least} to {most}"
                )
    snapped = {_snapped(knobs, value) for value in wanted}
    if len(snapped) < 2:
        raise UsageError("--values: the same setting throughout; name at least two that differ")
    return sorted(snapped, reverse=True)


def _snapped(knobs: Sequence[Knob], value: float) -> float:
    number = knobs[0].nearest(value)
    assert number is not None
    return number * knobs[0].scale


def shown(value: float, unit: str) -> str:
    """Return a setting for people."""
    return fmt.cell("x_hz" if unit == "Hz" else "x_w", value)


def name_of(value: float, unit: str) -> str:
    """Return the name of a point, which is that of its runs, too."""
    return f"{value / 1e6:.0f}MHz" if unit == "Hz" else f"{value:.0f}W"


def swept(experiment: Experiment, settings: Mapping[str, float], unit: str) -> Sweep:
    """Return what a sweep's runs say.

    Args:
        settings: name of each point → its setting.
    """
    points = [_point(experiment, name, value) for name, value in settings.items()]
    notes = [*experiment.notes, *(finding.message for finding in experiment.findings)]
    if all(point.power_w is None for point in points):
        notes.append("no power was sampled, so energy is unknown; `chopper doctor` says why")
    rows = [(point, experiment.find(STEP, point.name)) for point in points]
    pairs = [(p.set_value, t) for p, row in rows if row is not None for t in row.values if t > 0]
    facts: dict[str, Any] = {"sensitivity_ratio": None, "sensitivity_ci95": None, "r2_ratio": None}
    why = ""
    if experiment.disturbances:
        why = "withheld: " + "; ".join(finding.message for finding in experiment.disturbances)
    elif len({value for value, _ in pairs}) < 2:
        why = "steps were measured at fewer than two settings"
    else:
        slope, ci95, r2 = power_law(*map(list, zip(*pairs, strict=True)))
        facts = {
            "sensitivity_ratio": -slope,
            "sensitivity_ci95": ci95 and (-ci95[1], -ci95[0]),
            "r2_ratio": r2,
        }
    return Sweep(unit=unit, points=tuple(points), why=why, notes=tuple(notes), **facts)


def _point(experiment: Experiment, name: str, value: float) -> Point:
    step, power, clock = (
        experiment.find(measure, name) for measure in (STEP, "power_w", "sm_clock_hz")
    )
    energy = None
    if step is not None and power is not None and len(step.values) == len(power.values):
        pairs = zip(step.values, power.values, strict=True)
        energy = estimate([step_ns / 1e9 * power_w for step_ns, power_w in pairs])

    def of(row: Row | None) -> Estimate | None:
        return None if row is None else row.estimate

    return Point(
        name=name,
        set_value=value,
        step_ns=of(step),
        power_w=of(power),
        energy_j=energy,
        clock_hz=of(clock),
    )
