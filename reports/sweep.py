"""The page of a sweep: what a command takes at each clock or power cap."""

from __future__ import annotations

from chopper import wording as fmt
from chopper.experiments.sweep import Point, Sweep, shown
from chopper.reports import figures
from chopper.reports.page import BROWSER, Block, Figure, Item, Items, Page, Section, Table
from chopper.statistics import Estimate

_SETTING = {"Hz": "clock", "W": "power cap"}


def page(sweep: Sweep) -> Page:
    """Return the page of a sweep."""
    return Page(
        title="sweep",
        headline=headline(sweep),
        summary=_notes(sweep),
        sections=(
            Section(title="Measured", id="measured", blocks=(_table(sweep), *_figures(sweep))),
        ),
    )


def headline(sweep: Sweep) -> str:
    """Return the fit in one line, or why there is none."""
    setting = _SETTING[sweep.unit]
    if sweep.sensitivity_ratio is None:
        return f"No fit of the step by {setting}: {sweep.why}."
    interval = ""
    if sweep.sensitivity_ci95 is not None:
        interval = " (95 %: {:.2f} to {:.2f})".format(*sweep.sensitivity_ci95)
    return f"Step time ∝ {setting}^(−a) with a = {sweep.sensitivity_ratio:.2f}{interval}."


def _notes(sweep: Sweep) -> tuple[Block, ...]:
    items = [Item(note, "warning") for note in sweep.notes]
    return (Items(items=items, title="Notes"),) if items else ()


def _table(sweep: Sweep) -> Table:
    return Table(
        columns=(
            f"{_SETTING[sweep.unit]}, set",
            *("step", "95 %", "power", "95 %", "energy per step", "95 %", "SM clock, held"),
        ),
        rows=[
            (
                shown(point.set_value, sweep.unit),
                *_cells("x_ns", point.step_ns),
                *_cells("x_w", point.power_w),
                *_cells("x_j", point.energy_j),
                fmt.UNKNOWN if point.clock_hz is None else fmt.cell("x_hz", point.clock_hz.value),
            )
            for point in sweep.points
        ],
        note="Power and energy are those of one device, mean power over the recording times the "
        "step.",
    )


def _cells(unit_of: str, found: Estimate | None) -> tuple[str, str]:
    if found is None:
        return fmt.UNKNOWN, fmt.UNKNOWN
    interval = fmt.UNKNOWN
    if found.ci95 is not None:
        interval = " – ".join(fmt.cell(unit_of, value) for value in found.ci95)
    return fmt.cell(unit_of, found.value), interval


def _figures(sweep: Sweep) -> list[Figure]:
    def curve(name: str) -> list[tuple[float, float]]:
        return sorted(
            (point.set_value, found.value)
            for point in sweep.points
            if (found := _estimate(point, name)) is not None
        )

    drawn = []
    for name, title, unit, scale in (
        ("step_ns", "Step", "s", 1e-9),
        ("energy_j", "Energy per step and device", "J", 1.0),
    ):
        points = curve(name)
        if len(points) < 2:
            continue
        setting = _SETTING[sweep.unit]
        figure = figures.lines(
            {title: ([x for x, _ in points], [y * scale for _, y in points])},
            x=setting,
            y=title,
            unit=unit,
            x_ticks={x: shown(x, sweep.unit) for x, _ in points},
        )
        drawn.append(
            Figure(
                name=f"sweep-{name}", title=f"{title} by {setting}", figure=figure, formats=BROWSER
            )
        )
    return drawn


def _estimate(point: Point, name: str) -> Estimate | None:
    estimate: Estimate | None = getattr(point, name)
    return estimate
