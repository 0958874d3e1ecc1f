"""An experiment as one self-contained page, in the shell of the report."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING, Any

from chopper import wording as fmt
from chopper.errors import printable
from chopper.reports import shell as page
from chopper.reports.comparison_html import waterfall
from chopper.reports.experiment import against, facts, grids, heading, interval, intervals, ours
from chopper.reports.figures import plain

if TYPE_CHECKING:
    from chopper.experiments.results import Experiment, Row

_COLORS = ("#3b7dd8", "#e07b1a", "#12a17d", "#c05a9c", "#c9a227", "#6a5acd", "#2b6f8f", "#d1491b")


def render(experiment: Experiment) -> str:
    """The HTML page of an experiment."""
    sweeps = _sweeps(experiment) or _sides(experiment)
    figures = {f"sweep-{i}": figure for i, (_, figure) in enumerate(sweeps)}
    comparisons = []
    for i, (name, comparison) in enumerate(experiment.comparisons.items()):
        figures[f"causes-{i}"] = waterfall(comparison)
        comparisons.append(
            {
                "name": printable(name),
                "verdict": printable(comparison.verdict),
                "figure": f"causes-{i}",
            }
        )
    plan = experiment.plan
    context = {
        "title": printable(plan.workload),
        "summary": printable(plan.summary),
        "facts": printable(facts(experiment)),
        "notes": [printable(n) for n in experiment.notes],
        "intervals": intervals(experiment),
        "baseline": plan.baseline,
        "grids": grids(experiment, full=True),
        "figures": [{"id": f"sweep-{i}", "title": title} for i, (title, _) in enumerate(sweeps)],
        "comparisons": comparisons,
        "variants": plan.variants,
        "steps": plan.steps,
        "command": printable(shlex.join(plan.command)),
        "headlines": [
            {
                "system": h.system,
                "claim": h.claim,
                "stated": [
                    (who, said)
                    for who, said in (("survey", h.survey), ("primary", h.primary))
                    if said is not None
                ],
                "ours": ours(h),
                "interval": interval(h),
                "against": against(h),
                "configuration": h.configuration,
            }
            for h in experiment.headlines
        ],
    }
    return page.render("experiment.html.j2", context, figures)


def _sweeps(experiment: Experiment) -> list[tuple[str, dict[str, Any]]]:
    """One figure per measure that has a number among its labels: a line per all else."""
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
                "line": {"color": _COLORS[i % len(_COLORS)], "width": 2},
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


def _sides(experiment: Experiment) -> list[tuple[str, dict[str, Any]]]:
    """Where nothing is over a number: the first measure that has labels, a bar per variant."""
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
            "marker": {"color": _COLORS[i % len(_COLORS)]},
        }
        for i, (variant, of) in enumerate(bars.items())
    ]
    ys = [row.estimate.value for of in bars.values() for _, row in of]
    layout = _layout(measure, ys, log_y=False) | {"barmode": "group", "xaxis": {"type": "category"}}
    keys = " and ".join(fmt.heading(key) for key, _ in labelled[0].labels)
    return [(f"{heading(measure)} by {keys}".capitalize(), {"data": data, "layout": layout})]


def _whiskers(rows: list[Row]) -> dict[str, Any]:
    """From the least to the most of the repetitions."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [max(row.values) - row.estimate.value for row in rows],
        "arrayminus": [row.estimate.value - min(row.values) for row in rows],
        "thickness": 1,
        "width": 3,
    }


def _layout(measure: str, ys: list[float], *, log_y: bool) -> dict[str, Any]:
    """What figures of a measure share."""
    ticks = _ticks(min(ys), max(ys), log=log_y)
    return {
        "height": 380,
        "margin": {"l": 24, "r": 24, "t": 8, "b": 48},
        "yaxis": {
            "type": "log" if log_y else "linear",
            "title": {"text": heading(measure), "standoff": 12},
            "automargin": True,
            "tickvals": ticks,
            "ticktext": [fmt.cell(measure, y) for y in ticks],
            **({} if log_y else {"rangemode": "tozero"}),
        },
        "legend": {"orientation": "h", "y": 1.08, "x": 0},
    }


def _ticks(low: float, high: float, *, log: bool) -> list[float]:
    """Where an axis is labelled: powers of ten, or about five steps of 1, 2 or 5 times one, with 0."""
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
