"""Figures of an experiment: lines over sizes, bars by variant."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from chopper import wording as fmt
from chopper.reports.figures import LINES, plain

if TYPE_CHECKING:
    from chopper.experiments.results import Experiment, Row


def sweeps(experiment: Experiment) -> list[tuple[str, dict[str, Any]]]:
    """Return (title, figure) of measures with a number among their labels, a line per all else."""
    lines: dict[tuple[str, str], dict[tuple[object, ...], list[tuple[float, Row]]]] = {}
    for row in experiment.rows:
        numbers = [(k, v) for k, v in row.labels if not isinstance(v, str)]
        if len(numbers) != 1:
            continue
        (key, at), *_ = numbers
        rest = tuple(v for k, v in row.labels if k != key)
        line = (*((row.variant,) if len(experiment.variants) > 1 else ()), *rest)
        lines.setdefault((row.measure, key), {}).setdefault(line, []).append((float(at), row))
    return [
        (
            f"{heading(measure)} over {fmt.heading(key)}".capitalize(),
            _figure(measure, key, found),
        )
        for (measure, key), found in lines.items()
        if max(len(points) for points in found.values()) > 2
    ]


def _figure(
    measure: str, key: str, lines: dict[tuple[object, ...], list[tuple[float, Row]]]
) -> dict[str, Any]:
    data = []
    for i, (line, points) in enumerate(lines.items()):
        points = sorted(points, key=lambda p: p[0])
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": plain(" ".join(map(str, line)) or measure),
                "x": [x for x, _ in points],
                "y": [row.estimate.value for _, row in points],
                "error_y": _whiskers([row for _, row in points]),
                "customdata": [
                    [fmt.cell(key, x), fmt.cell(measure, row.estimate.value)] for x, row in points
                ],
                "hovertemplate": "<b>%{fullData.name}</b><br>%{customdata[0]}: %{customdata[1]}"
                "<extra></extra>",
                "line": {"color": LINES[i % len(LINES)], "width": 2},
                "marker": {"size": 6},
            }
        )
    xs = sorted({x for points in lines.values() for x, _ in points})
    ys = [row.estimate.value for points in lines.values() for _, row in points]
    log_y = min(ys) > 0 and max(ys) > 20 * min(ys)
    return {
        "data": data,
        "layout": _layout(measure, ys, log_y=log_y)
        | {
            "xaxis": {
                "type": "log" if xs[0] > 0 and xs[-1] >= 16 * xs[0] else "linear",
                "title": {"text": fmt.heading(key)},
                "tickvals": xs,
                "ticktext": [fmt.cell(key, int(x) if x == int(x) else x) for x in xs],
            },
        },
    }


def sides(experiment: Experiment) -> list[tuple[str, dict[str, Any]]]:
    """Return (title, figure) of the first measure with labels, a bar per variant, at most one.

    For experiments in which nothing is measured over a number.
    """
    shown_whole = {measure for e in experiment.exhibits for measure in e.shows}
    labelled = [row for row in experiment.rows if row.labels and row.measure not in shown_whole]
    if len(experiment.variants) < 2 or not labelled:
        return []
    measure = labelled[0].measure
    bars: dict[str, list[tuple[str, Row]]] = {}
    for row in labelled:
        if row.measure == measure:
            where = "<br>".join(plain(str(v)) for _, v in row.labels)
            bars.setdefault(row.variant, []).append((where, row))
    data = [
        {
            "type": "bar",
            "name": plain(variant),
            "x": [where for where, _ in of],
            "y": [row.estimate.value for _, row in of],
            "error_y": _whiskers([row for _, row in of]),
            "customdata": [fmt.cell(measure, row.estimate.value) for _, row in of],
            "hovertemplate": "<b>%{fullData.name}</b>, %{x}: %{customdata}<extra></extra>",
            "marker": {"color": LINES[i % len(LINES)]},
        }
        for i, (variant, of) in enumerate(bars.items())
    ]
    ys = [row.estimate.value for of in bars.values() for _, row in of]
    layout = _layout(measure, ys, log_y=False) | {"barmode": "group", "xaxis": {"type": "category"}}
    keys = " and ".join(fmt.heading(key) for key, _ in labelled[0].labels)
    return [(f"{heading(measure)} by {keys}".capitalize(), {"data": data, "layout": layout})]


def _whiskers(rows: list[Row]) -> dict[str, Any]:
    """Return error bars from the least to the most of the repetitions."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [max(row.values) - row.estimate.value for row in rows],
        "arrayminus": [row.estimate.value - min(row.values) for row in rows],
        "thickness": 1,
        "width": 3,
    }


def _layout(measure: str, ys: list[float], *, log_y: bool) -> dict[str, Any]:
    """Return the layout that figures of a measure share."""
    labelled = ticks(min(ys), max(ys), log=log_y)
    return {
        "height": 380,
        "margin": {"l": 24, "r": 24, "t": 8, "b": 48},
        "yaxis": {
            "type": "log" if log_y else "linear",
            "title": {"text": heading(measure), "standoff": 12},
            "automargin": True,
            "tickvals": labelled,
            "ticktext": [fmt.cell(measure, y) for y in labelled],
            **({} if log_y else {"rangemode": "tozero"}),
        },
        "legend": {"orientation": "h", "y": 1.08, "x": 0},
    }


def ticks(low: float, high: float, *, log: bool) -> list[float]:
    """Return where an axis is labelled: powers of ten, or 0 and about five round steps."""
    if log:
        return [
            10.0**k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ]
    reach = max(abs(low), abs(high))
    if not 0 < reach < math.inf:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(reach / 5))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= reach / 5)
    first, last = math.floor(min(low, 0) / step), math.ceil(max(high, 0) / step)
    return [k * step for k in range(first, last + 1)]


def heading(measure: str) -> str:
    """Return a measure's name for people; "best" alone would not say of what."""
    words = fmt.heading(measure)
    return f"{words} rate" if measure.endswith("_flop_per_s") else words
