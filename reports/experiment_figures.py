"""Figures of an experiment: lines over sizes, bars by variant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chopper import wording as fmt
from chopper.reports import figures

if TYPE_CHECKING:
    from chopper.experiments.results import Experiment, Row

_UNITS = {"_flop_per_s": "FLOP/s", "_bytes_per_s": "B/s", "_bytes": "B", "_ns": "s", "_hz": "Hz"}


def sweeps(experiment: Experiment) -> list[tuple[str, dict[str, Any]]]:
    """Return (title, figure) of measures with a number among their labels, a line per all else."""
    lines: dict[tuple[str, str], dict[str, list[tuple[float, Row]]]] = {}
    for row in experiment.rows:
        numbers = [(k, v) for k, v in row.labels if not isinstance(v, str)]
        if len(numbers) != 1:
            continue
        key, at = numbers[0]
        words = [row.variant] if len(experiment.variants) > 1 else []
        words += [str(v) for k, v in row.labels if k != key]
        line = lines.setdefault((row.measure, key), {})
        line.setdefault(" ".join(words) or row.measure, []).append((float(at), row))
    return [
        (f"{heading(measure)} over {fmt.heading(key)}".capitalize(), _figure(measure, key, curves))
        for (measure, key), curves in lines.items()
        if max(len(points) for points in curves.values()) > 2
    ]


def _figure(measure: str, key: str, curves: dict[str, list[tuple[float, Row]]]) -> dict[str, Any]:
    unit, scale = _unit(measure)
    for points in curves.values():
        points.sort(key=lambda point: point[0])
    xs = sorted({x for points in curves.values() for x, _ in points})
    ys = [row.estimate.value for points in curves.values() for _, row in points]
    figure = figures.lines(
        {
            name: ([x for x, _ in points], [row.estimate.value * scale for _, row in points])
            for name, points in curves.items()
        },
        x=fmt.heading(key),
        y=heading(measure),
        unit=unit,
        log_x=xs[0] > 0 and xs[-1] >= 16 * xs[0],
        log_y=min(ys) > 0 and max(ys) > 20 * min(ys),
        x_ticks={x: fmt.cell(key, int(x) if x == int(x) else x) for x in xs},
    )
    for trace, points in zip(figure["data"], curves.values(), strict=True):
        rows = [row for _, row in points]
        at = [fmt.cell(key, x) for x, _ in points]
        trace |= _measured(measure, rows, at)
    return figure


def sides(experiment: Experiment) -> list[tuple[str, dict[str, Any]]]:
    """Return (title, figure) of the first measure with labels, a bar per variant, at most one.

    For experiments in which nothing is measured over a number.
    """
    shown_whole = {measure for e in experiment.exhibits for measure in e.shows}
    labelled = [row for row in experiment.rows if row.labels and row.measure not in shown_whole]
    if len(experiment.variants) < 2 or not labelled:
        return []
    measure = labelled[0].measure
    bars: dict[str, list[Row]] = {}
    for row in labelled:
        if row.measure == measure:
            bars.setdefault(row.variant, []).append(row)
    data = []
    unit, scale = _unit(measure)
    for i, (variant, rows) in enumerate(bars.items()):
        at = ["<br>".join(figures.plain(str(v)) for _, v in row.labels) for row in rows]
        bar = {
            "type": "bar",
            "name": figures.plain(variant),
            "x": at,
            "y": [row.estimate.value * scale for row in rows],
            "marker": {"color": figures.LINES[i % len(figures.LINES)]},
        }
        data.append(bar | _measured(measure, rows, at))
    y = {"title": {"text": heading(measure)}, "tickformat": "~s", "ticksuffix": unit}
    shown = figures.layout(
        408,
        8,
        24,
        legend=True,
        barmode="group",
        xaxis={"type": "category"},
        yaxis=y | {"automargin": True},
    )
    keys = " and ".join(fmt.heading(key) for key, _ in labelled[0].labels)
    title = f"{heading(measure)} by {keys}".capitalize()
    return [(title, {"data": data, "layout": shown})]


def _measured(measure: str, rows: list[Row], at: list[str]) -> dict[str, Any]:
    """Return whiskers from the least to the most of the repetitions, and values in words."""
    _, scale = _unit(measure)
    return {
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [(max(row.values) - row.estimate.value) * scale for row in rows],
            "arrayminus": [(row.estimate.value - min(row.values)) * scale for row in rows],
            "thickness": 1,
            "width": 3,
        },
        "customdata": [
            [x, fmt.cell(measure, row.estimate.value)] for x, row in zip(at, rows, strict=True)
        ],
        "hovertemplate": "<b>%{fullData.name}</b><br>%{customdata[0]}: %{customdata[1]}"
        "<extra></extra>",
    }


def _unit(measure: str) -> tuple[str, float]:
    """Return what an axis is labelled with, after SI prefixes, and the factor to it."""
    unit = next((u for suffix, u in _UNITS.items() if measure.endswith(suffix)), "")
    return unit, 1e-9 if measure.endswith("_ns") else 1.0


def heading(measure: str) -> str:
    """Return a measure's name for people; "best" alone would not say of what."""
    words = fmt.heading(measure)
    return f"{words} rate" if measure.endswith("_flop_per_s") else words
