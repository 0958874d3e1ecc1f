"""A page of tables, figures and assumptions, rendered in any format."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chopper.errors import UsageError, printable
from chopper.reports.figures import Figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.analyzers.estimates import Estimate

_WIDTH = 110
_ONE_LINE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """One table, its cells as they are shown."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    left: int = 1
    """Columns from the left that hold words; the others hold numbers."""
    strong: frozenset[int] = frozenset()
    """Rows that stand out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One figure with its heading."""

    name: str
    title: str
    figure: Figure
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What an estimate says, before it has a format."""

    title: str
    verdict: str
    facts: tuple[str, ...] = ()
    grids: tuple[Grid, ...] = ()
    plots: tuple[Plot, ...] = ()
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def render(page: Page, estimate: Estimate, format: str) -> str:
    """The page in a format: html, md, txt, or json, which is the estimate itself.

    Raises:
        UsageError: no such format.
    """
    if format == "json":
        return json.dumps(estimate.to_dict(), indent=2, ensure_ascii=False) + "\n"
    renderers = {"txt": text, "md": markdown, "html": html}
    if format not in renderers:
        raise UsageError(f"format {format!r} unknown: one of {', '.join([*renderers, 'json'])}")
    return renderers[format](page)


def text(page: Page, *, width: int = _WIDTH) -> str:
    """For a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out, width=width, no_color=True, highlight=False, markup=False, emoji=False
    )

    def say(line: str, indent: str = "") -> None:
        body = Text(printable(line))
        for wrapped in body.wrap(console, width - len(indent)):
            console.print(Text(indent) + wrapped)

    say(page.verdict)
    for fact in page.facts:
        say(fact, "  ")
    for grid in page.grids:
        console.print()
        say(grid.title)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=False)
        for i, name in enumerate(grid.columns):
            justify = "left" if i < grid.left else "right"
            table.add_column(Text(name), justify=justify, no_wrap=i >= grid.left)  # type: ignore[arg-type]
        for row in grid.rows:
            table.add_row(*(Text(printable(c)) for c in row))
        console.print(table)
        if grid.note:
            say(grid.note, "  ")
    for note in page.notes:
        console.print()
        say(note)
    if page.assumptions:
        console.print()
        say("Assumptions:")
        for line in page.assumptions:
            say(line, "  - ") if len(line) < width - 4 else _hanging(console, line, width)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _hanging(console: Any, line: str, width: int) -> None:
    from rich.text import Text

    for i, wrapped in enumerate(Text(printable(line)).wrap(console, width - 4)):
        console.print(Text("    " if i else "  - ") + wrapped)


def markdown(page: Page) -> str:
    """As Markdown, without figures."""
    lines = [f"# {page.title}", "", f"**{page.verdict}**", ""]
    lines += [f"- {fact}" for fact in page.facts]
    for grid in page.grids:
        lines += ["", f"## {grid.title}", "", "| " + " | ".join(grid.columns) + " |"]
        rule = ("---" if i < grid.left else "---:" for i in range(len(grid.columns)))
        lines += ["|" + "|".join(rule) + "|"]
        lines += ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in grid.rows]
        if grid.note:
            lines += ["", grid.note]
    for note in page.notes:
        lines += ["", note]
    if page.assumptions:
        lines += ["", "## Assumptions", "", *(f"- {line}" for line in page.assumptions)]
    return "\n".join(lines) + "\n"


def html(page: Page) -> str:
    """One file that opens without a network, in the house's style; text is escaped."""
    from chopper.reports.shell import render

    figures = {plot.name: plot.figure for plot in page.plots}
    return render("estimate.html.j2", {"page": page}, figures)


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
) -> Figure:
    """Lines over one axis; `marks` are vertical lines with a name, ticks are by value."""
    shapes, notes = [], []
    for name, at in (marks or {}).items():
        shapes.append(
            {
                "type": "line",
                "x0": at,
                "x1": at,
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "line": {"dash": "dot", "width": 1.5, "color": "#8a8f98"},
            }
        )
        import math

        notes.append(
            {
                "x": math.log10(at) if log_x else at,
                "y": 1,
                "yref": "paper",
                "text": name,
                "showarrow": False,
                "yanchor": "bottom",
            }
        )
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
            "shapes": shapes,
            "annotations": notes,
            "legend": _LEGEND,
        },
    }


def _scale(log: bool, ticks: dict[float, str] | None) -> dict[str, Any]:
    """An axis' type and ticks; a logarithmic one has whole decades where no ticks are given."""
    chosen: dict[str, Any] = {"dtick": 1} if log else {}
    if ticks:
        chosen = {"tickmode": "array", "tickvals": [*ticks], "ticktext": [*ticks.values()]}
    return {"type": "log" if log else "linear", **chosen}


def stacked_figure(
    rows: dict[str, dict[str, float]], *, x: str, line: tuple[str, float] | None = None
) -> Figure:
    """Horizontal stacked bars: bar → part → value; `line` is a limit with its name."""
    parts = list(dict.fromkeys(part for bar in rows.values() for part in bar))
    names = list(rows)
    # A legend of more parts takes two lines.
    legend = 104 if len(parts) > _ONE_LINE else 84
    layout: dict[str, Any] = {
        "height": 66 + legend + 44 * len(names),
        "barmode": "stack",
        "margin": {"l": 8, "r": 24, "t": 36, "b": legend},
        "xaxis": {"title": {"text": x}, "rangemode": "tozero"},
        "yaxis": {"type": "category", "automargin": True, "autorange": "reversed"},
        "legend": _LEGEND,
    }
    if line is not None:
        layout["shapes"] = [
            {
                "type": "line",
                "x0": line[1],
                "x1": line[1],
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "line": {"dash": "dot", "width": 1.5, "color": "#8a8f98"},
            }
        ]
        layout["annotations"] = [
            {
                "x": line[1],
                "y": 1,
                "yref": "paper",
                "text": line[0],
                "showarrow": False,
                "yanchor": "bottom",
            }
        ]
    return {
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "name": part,
                "y": names,
                "x": [float(f"{bar.get(part, 0.0):.6g}") for bar in rows.values()],
                "marker": {"color": color},
            }
            for part, color in zip(parts, _COLORS * 9, strict=False)
        ],
        "layout": layout,
    }


_LEGEND = {
    "orientation": "h",
    "yref": "container",
    "y": 0,
    "yanchor": "bottom",
    "traceorder": "normal",
}
_COLORS = ["#3b6ea8", "#c9772b", "#4e9a6b", "#9a5aa6", "#b9524d", "#7d8a3c", "#4aa3b5", "#8a8f98"]
