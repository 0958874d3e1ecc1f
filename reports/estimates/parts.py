"""Parts of the pages of estimates: listings, figures and assumptions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

from chopper.reports.page import Column, Figure, Items, Page, Section, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from chopper.analyzers.estimates import Estimate

T = TypeVar("T")

_COLORS = ["#3b6ea8", "#c9772b", "#4e9a6b", "#9a5aa6", "#b9524d", "#7d8a3c", "#4aa3b5", "#8a8f98"]
_LEGEND = {
    "orientation": "h",
    "yref": "container",
    "y": 0,
    "yanchor": "bottom",
    "traceorder": "normal",
}
_ONE_LINE = 6
"""Parts whose names fit one line of a legend."""


def estimate_page(
    result: Estimate,
    *,
    title: str,
    headline: str,
    facts: Iterable[str],
    figures: Sequence[Figure],
    sections: Sequence[Section],
) -> Page:
    """Return a page that ends with the estimate's assumptions."""
    return Page(
        title=title,
        headline=headline,
        summary=(Items(items=tuple(facts)),),
        sections=(
            *(Section(title=figure.title, blocks=(figure,)) for figure in figures),
            *sections,
            Section(title="Assumptions", blocks=(Items(items=result.assumptions),)),
        ),
    )


def listing(
    title: str, items: Iterable[T], columns: Mapping[str | Column, Callable[[T], str]], **table: Any
) -> Section:
    """Return a table with a row for each item.

    Args:
        title: of the section.
        items: shown in order.
        columns: heading or column → text of an item's cell.
        table: further fields of :class:`chopper.reports.page.Table`.
    """
    rows = [[text(item) for text in columns.values()] for item in items]
    return Section(title=title, blocks=(Table(columns=tuple(columns), rows=rows, **table),))


def values(title: str, rows: Sequence[tuple[str, str]], note: str = "") -> Section:
    """Return a table of quantities with their names."""
    return Section(title=title, blocks=(Table(columns=("", "value"), rows=rows, note=note),))


def _limit(name: str, at: float, *, shown_at: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a vertical line, and its name above it."""
    line = {"dash": "dot", "width": 1.5, "color": "#8a8f98"}
    shape = {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "line": line}
    place = {"x": shown_at, "y": 1, "yref": "paper", "yanchor": "bottom"}
    return shape, {**place, "text": name, "showarrow": False}


def lines_figure(
    series: dict[str, tuple[list[float], list[float]]],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    marks: dict[str, float] | None = None,
    x_ticks: dict[float, str] | None = None,
    y_ticks: dict[float, str] | None = None,
) -> dict[str, Any]:
    """Return lines over one axis; `marks` are vertical lines with a name, ticks are by value."""
    limits = [
        _limit(name, at, shown_at=math.log10(at) if log_x else at)
        for name, at in (marks or {}).items()
    ]
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": xs,
                "y": ys,
                "line": {"width": 2, "color": color},
                "marker": {"size": 6},
            }
            for (name, (xs, ys)), color in zip(series.items(), _COLORS * 9, strict=False)
        ],
        "layout": {
            "height": 380,
            "margin": {"l": 8, "r": 24, "t": 36, "b": 84 if len(series) > 1 else 56},
            "xaxis": {"title": {"text": x}, **_scale(log_x, x_ticks)},
            "yaxis": {
                "title": {"text": y},
                "automargin": True,
                **_scale(log_y, y_ticks),
                **({} if log_y else {"rangemode": "tozero"}),
            },
            "shapes": [shape for shape, _ in limits],
            "annotations": [name for _, name in limits],
            "legend": _LEGEND,
        },
    }


def _scale(log: bool, ticks: dict[float, str] | None) -> dict[str, Any]:
    """Return an axis' type and ticks; without ticks, a logarithmic one has whole decades."""
    chosen: dict[str, Any] = {"dtick": 1} if log else {}
    if ticks:
        chosen = {"tickmode": "array", "tickvals": [*ticks], "ticktext": [*ticks.values()]}
    return {"type": "log" if log else "linear", **chosen}


def stacked_figure(
    rows: dict[str, dict[str, float]], *, x: str, limit: tuple[str, float] | None = None
) -> dict[str, Any]:
    """Return horizontal stacked bars: bar → part → value; `limit` is a vertical line's name."""
    parts = list(dict.fromkeys(part for bar in rows.values() for part in bar))
    legend_height = 104 if len(parts) > _ONE_LINE else 84
    layout: dict[str, Any] = {
        "height": 66 + legend_height + 44 * len(rows),
        "barmode": "stack",
        "margin": {"l": 8, "r": 24, "t": 36, "b": legend_height},
        "xaxis": {"title": {"text": x}, "rangemode": "tozero"},
        "yaxis": {"type": "category", "automargin": True, "autorange": "reversed"},
        "legend": _LEGEND,
    }
    if limit is not None:
        shape, name = _limit(*limit, shown_at=limit[1])
        layout |= {"shapes": [shape], "annotations": [name]}
    return {
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "name": part,
                "y": list(rows),
                "x": [float(f"{bar.get(part, 0.0):.6g}") for bar in rows.values()],
                "marker": {"color": color},
            }
            for part, color in zip(parts, _COLORS * 9, strict=False)
        ],
        "layout": layout,
    }
