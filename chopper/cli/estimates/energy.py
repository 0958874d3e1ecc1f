"""Clocks of a pipeline's stages that save energy, and what that costs in time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from chopper import wording as fmt
from chopper.analyzers.estimates import Option
from chopper.analyzers.estimates.energy import Energy, Fit, Point, StageClocks, energy
from chopper.cli import _options
from chopper.collectors.formats.clock_tables import read_clock_tables
from chopper.errors import UsageError
from chopper.reports.estimate import estimate_page, listing
from chopper.reports.figures import LINES, lines
from chopper.reports.page import Column, Figure, Page, Section, Table


class Options(_options.Options, kw_only=True, frozen=True):
    """Show which clocks of a pipeline's stages save most energy, with and without loss of time.

    TABLE is a CSV of time and energy measured at several locked clocks, as Zeus' pipeline profiler
    writes it: stage,instruction,frequency,time,energy. Instructions that other stages wait for keep
    their speed; the others run slower and take less energy.

    \b
    Examples:
      chopper estimate energy gpt3-175b-a100.csv.gz
      chopper estimate energy gpt3-175b-a100.csv.gz --microbatches 12 -o e.html
      chopper estimate energy gpt3-175b-a100.csv.gz --kept-back bloom-a100.csv.gz
    """

    table: Annotated[str | None, Option("", argument=True)] = None
    microbatches_count: Annotated[int, Option("Microbatches of a step.")] = 32
    waiting_power_w: Annotated[
        float | None,
        Option("Power of a device that waits for another stage. [default: not counted]"),
    ] = None
    kept_back: Annotated[
        tuple[str, ...],
        Option("Another table, to be predicted from TABLE; may be repeated.", metavar="TABLE"),
    ] = ()


def estimate(options: Options) -> Energy:
    """Return the frontier of time and energy, and the fits."""
    if options.table is None:
        raise UsageError("no table given; name a CSV with stage,instruction,frequency,time,energy")
    return energy(
        read_clock_tables(Path(options.table)),
        options.table,
        microbatches_count=options.microbatches_count,
        waiting_power_w=options.waiting_power_w,
        others={name: read_clock_tables(Path(name)) for name in options.kept_back},
    )


def page(result: Energy) -> Page:
    """Return what is saved without loss of time, the frontier, the schedule and the fits."""
    lossless, longest = result.lossless, result.frontier[-1]
    saved, bound = lossless.saved_energy_ratio, lossless.bound_saved_ratio or 0.0
    return estimate_page(
        result,
        title="Energy of a pipeline by its clocks",
        headline=f"{_share(saved)} less energy at no loss of time: {fmt.joules(lossless.energy_j)} "
        f"instead of {fmt.joules(result.highest.energy_j)} per step.",
        limit=f"stages that the step waits for; no schedule saves more than {_share(bound)}",
        assumes=f"1F1B, {fmt.plural(result.stages_count, 'stage')}, "
        f"{result.microbatches_count} microbatches; "
        + (
            "waiting devices not counted"
            if result.waiting_power_w is None
            else f"{result.waiting_power_w:g} W while waiting"
        ),
        remedy=f"{_share(_longer(result, longest))} longer steps, for "
        f"{_share(longest.saved_energy_ratio)} less energy",
        facts=_facts(result),
        figures=(_frontier(result), _clocks(result)),
        sections=(_points(result), _fits(result), *_kept_back(result)),
    )


def _share(ratio: float) -> str:
    return fmt.percent(max(ratio, 0.0), ".1f")


def _longer(result: Energy, point: Point) -> float:
    return point.time_ns / result.highest.time_ns - 1


def _facts(result: Energy) -> list[str]:
    highest, fixed = result.highest, result.lossless_fixed
    assert highest.clock_hz is not None
    at = f"at {fmt.hertz(highest.clock_hz)} everywhere"
    step = f"{fmt.duration(highest.time_ns)} and {fmt.joules(highest.energy_j)}"
    known = [
        f"a step takes {step} {at}",
        f"one clock for each stage and instruction, instead of one for each microbatch too, "
        f"saves {_share(fixed.saved_energy_ratio)} at no loss of time",
    ]
    least = min(result.one_clock, key=lambda point: point.energy_j)
    if least.clock_hz != highest.clock_hz:
        known.append(
            f"one clock for everything saves most, {_share(least.saved_energy_ratio)}, at "
            f"{fmt.hertz(least.clock_hz)}, in steps {_share(_longer(result, least))} longer"
        )
    return known


def _frontier(result: Energy) -> Figure:
    def curve(points: tuple[Point, ...]) -> tuple[list[float], list[float]]:
        return [p.time_ns / 1e9 for p in points], [p.energy_j / 1e3 for p in points]

    slowest_ns = result.frontier[-1].time_ns * 1.1
    shown = tuple(p for p in result.one_clock if p.time_ns <= slowest_ns)
    bound = [
        (p.time_ns / 1e9, result.highest.energy_j * (1 - (p.bound_saved_ratio or 0)) / 1e3)
        for p in result.frontier
    ]
    figure = lines(
        {
            "one clock for all": curve(shown),
            "a clock for each instruction": curve(result.frontier),
            "bound": ([t for t, _ in bound], [e for _, e in bound]),
        },
        x="seconds per step",
        y="kJ per step",
        marks={"no loss of time": result.highest.time_ns / 1e9},
    )
    figure["layout"]["yaxis"]["rangemode"] = "normal"
    return Figure(name="energy", title="Time and energy of a step", figure=figure)


def _clocks(result: Energy) -> Figure:
    """Return the clock of each instruction of the first, middle and last stage, in order."""
    count = len(result.schedule)
    picked = dict.fromkeys((0, count // 2, count - 1))
    curves = {}
    for stage in (result.schedule[i] for i in picked):
        numbers = [float(i + 1) for i in range(len(stage.clock_hz))]
        curves[f"stage {stage.stage}"] = numbers, [c / 1e6 for c in stage.clock_hz]
    figure = lines(curves, x="instruction of the stage, in order", y="MHz")
    figure["layout"]["yaxis"]["rangemode"] = "normal"
    for i, trace in enumerate(figure["data"]):
        trace["mode"] = "lines"
        trace["line"] = {"width": 1.5, "shape": "hv", "color": LINES[i]}
    return Figure(name="clocks", title="Clocks at no loss of time", figure=figure)


def _mean_clock(stage: StageClocks, instruction: str) -> str:
    clocks = [
        hz for name, hz in zip(stage.order, stage.clock_hz, strict=True) if name[0] == instruction
    ]
    low, high = (fmt.hertz(edge) for edge in (min(clocks), max(clocks)))
    return f"{fmt.hertz(sum(clocks) / len(clocks))} ({low} – {high})"


def _points(result: Energy) -> Section:
    rows = [
        (
            fmt.duration(point.time_ns),
            fmt.percent(_longer(result, point), "+.1f"),
            fmt.joules(point.energy_j),
            fmt.percent(-point.saved_energy_ratio, "+.1f"),
            fmt.percent(-(point.bound_saved_ratio or 0.0), "+.1f"),
        )
        for point in result.frontier
    ]
    columns = ("step", "time", "energy", "energy, change", "bound")
    frontier = Table(columns=columns, rows=rows, title="Least energy within a time")
    clocks = Table(
        columns=("stage", Column("forward", wide=True), Column("backward", wide=True)),
        rows=[(str(s.stage), _mean_clock(s, "F"), _mean_clock(s, "B")) for s in result.schedule],
        title="Clocks at no loss of time: mean over microbatches (lowest – highest)",
        note="--json has the clock of each instruction",
    )
    return Section(title="Schedules", blocks=(frontier, clocks))


def _fits(result: Energy) -> Section:
    def with_interval(value: str, ci95: str) -> Callable[[Fit], str]:
        def cell(fit: Fit) -> str:
            low, high = getattr(fit, ci95)
            return f"{getattr(fit, value):.3f} ({low:.3f} – {high:.3f})"

        return cell

    return listing(
        "Fits: t ∝ clock^(−s), P ∝ clock^b",
        result.fits,
        {
            "stages": "stages",
            "instruction": "instruction",
            "clocks": lambda f: str(f.clocks_count),
            "s (95 %)": with_interval("sensitivity_ratio", "sensitivity_ci95"),
            "b (95 %)": with_interval("power_exponent_ratio", "power_exponent_ci95"),
            "time off": lambda f: _off(f.time_error_ratio, f.worst_time_error_ratio),
            "energy off": lambda f: _off(f.energy_error_ratio, f.worst_energy_error_ratio),
        },
        words=2,
        note="off: median and worst error at clocks that were kept back, a quarter of the range "
        "at a time; energy by a parabola of ln P where that is less far off than b",
    )


def _off(median: float, worst: float) -> str:
    return f"{_share(median)}, {_share(worst)}"


def _kept_back(result: Energy) -> tuple[Section, ...]:
    if not result.kept_back:
        return ()
    return (
        listing(
            "Other tables, predicted by these fits from their highest clock",
            result.kept_back,
            {
                "table": "table",
                "points": lambda k: str(k.points_count),
                "time off": lambda k: _off(k.time_error_ratio, k.worst_time_error_ratio),
                "energy off": lambda k: _off(k.energy_error_ratio, k.worst_energy_error_ratio),
            },
            note="median and worst error",
        ),
    )
