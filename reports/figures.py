"""Plotly figures as plain JSON dicts, made by pure functions; no plotly is imported.

Only what belongs to the data stands here. Fonts, grid and background follow the reader's colour
scheme and are added in the browser. Every text that comes from a trace is escaped, because Plotly
draws a subset of HTML in its labels.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.trace.columns import ints, strings
from chopper.causes import CAUSES, LEAVES
from chopper.reports.labels import color, full_label
from chopper.reports.series import LARGEST_DRAWN, Series, thin
from chopper.reports.story import Story

Figure = dict[str, Any]

_SMALL_RATIO = 0.004
"""Causes below this share of the observed time stand together in the waterfall."""
MAX_BARS = 300
"""Steps drawn one by one; more are averaged in bins."""
_MAX_RANKS = 32
"""Ranks with a step chart of their own."""
_POINTS = 1500
_MAX_SHADES = 200
GREY = "#9aa0a8"
"""Of causes that stand together."""
# Lines of one panel: Okabe and Ito's hues, then their darker kin.
LINES = ("#3b7dd8", "#e07b1a", "#12a17d", "#c05a9c", "#c9a227", "#6a5acd", "#59b2d9", "#8a8f98")


def plain(text: str) -> str:
    """Return a text that Plotly shows as it is."""
    return html.escape(text, quote=False)


def significant(values: Iterable[float]) -> list[float]:
    """Return values with six significant digits: what a figure can show, and short in JSON."""
    return [float(f"{v:.6g}") for v in values]


def layout(height: int, left: int, right: int, *, legend: bool = False, **more: Any) -> Figure:
    """Return a layout, with a legend below the figure where one is wanted."""
    figure_layout: Figure = {
        "height": height,
        "margin": {"l": left, "r": right, "t": 24, "b": 84 if legend else 46},
        "showlegend": legend,
        "hovermode": "closest",
    }
    if legend:
        legend_anchor = {"yref": "container", "y": 0, "yanchor": "bottom"}
        figure_layout["legend"] = {"orientation": "h", "traceorder": "normal"} | legend_anchor
    return figure_layout | more


def note(text: str, **place: Any) -> Figure:
    """Return an annotation without an arrow."""
    return {"text": text, "showarrow": False} | place


def _axis(title: str, *, log: bool, ticks: Mapping[float, str] | None, unit: str) -> Figure:
    """Return an axis; without ticks, it has SI prefixes of a unit, and whole decades if log."""
    axis: Figure = {"title": {"text": title}, "type": "log" if log else "linear"}
    if ticks:
        return axis | {"tickvals": [*ticks], "ticktext": [*ticks.values()]}
    axis |= {"dtick": 1} if log else {}
    return axis | ({"tickformat": "~s", "ticksuffix": unit} if unit else {})


def lines(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x: str,
    y: str,
    unit: str = "",
    log_x: bool = False,
    log_y: bool = False,
    marks: Mapping[str, float] | None = None,
    x_ticks: Mapping[float, str] | None = None,
) -> Figure:
    """Return lines with points over one axis.

    Args:
        curves: name → x and y.
        x, y: titles of the axes.
        unit: of y; its ticks have SI prefixes then.
        log_x, log_y: logarithmic axes.
        marks: name → x of a vertical line.
        x_ticks: labels by value.
    """
    figure_layout = layout(
        380,
        8,
        24,
        legend=len(curves) > 1,
        xaxis=_axis(x, log=log_x, ticks=x_ticks, unit=""),
        yaxis=_axis(y, log=log_y, ticks=None, unit=unit)
        | {"automargin": True}
        | ({} if log_y else {"rangemode": "tozero"}),
    )
    for name, at in (marks or {}).items():
        mark(figure_layout, "x", at, name, log=log_x)
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": plain(name),
                "x": list(xs),
                "y": significant(ys),
                "line": {"width": 2, "color": LINES[i % len(LINES)]},
                "marker": {"size": 6},
            }
            for i, (name, (xs, ys)) in enumerate(curves.items())
        ],
        "layout": figure_layout,
    }


def mark(
    shown: Figure, axis: Literal["x", "y"], at: float, words: str, *, log: bool = False
) -> None:
    """Add a dotted line across an axis, with words at its end, to a layout."""
    along = "y" if axis == "x" else "x"
    refs = {f"{axis}ref": axis, f"{along}ref": "paper"}
    ends = {f"{axis}0": at, f"{axis}1": at, f"{along}0": 0, f"{along}1": 1}
    line = {"dash": "dot", "width": 1.5, "color": "#8a8f98"}
    shown.setdefault("shapes", []).append(
        {"type": "line", "name": "mark", "line": line} | refs | ends
    )
    position = {axis: math.log10(at) if log else at, along: int(axis == "x")}
    side = {"xanchor": "right" if axis == "x" else "left", "yanchor": "bottom"}
    shown.setdefault("annotations", []).append(note(words, **position, **side, **refs))


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a waterfall."""

    label: str
    start_ns: float
    length_ns: float
    color: str
    """Empty: the neutral one of the reader's colour scheme."""
    words: str
    """Stand beside the bar."""
    hover: str
    ci95_ns: tuple[int, int] | None = None
    """Interval of the length."""


def bars(
    drawn: Sequence[Bar], *, axis: str, span_ns: tuple[float, float], aligned: bool = False
) -> Figure:
    """Return horizontal bars in ms, the first on top.

    ``aligned``: the bars' words stand below each other at the right, and whiskers are drawn.
    """
    trace: Figure = {
        "type": "bar",
        "orientation": "h",
        "y": [plain(b.label) for b in drawn],
        "base": _ms(b.start_ns for b in drawn),
        "x": _ms(b.length_ns for b in drawn),
        "marker": {"color": [b.color for b in drawn]},
        "customdata": [b.hover for b in drawn],
        "hovertemplate": "<b>%{y}</b><br>%{customdata}<extra></extra>",
        "width": 0.62,
    }
    figure_layout = layout(
        64 + 30 * len(drawn),
        8,
        96 if aligned else 110,
        xaxis={"title": {"text": axis}, "range": _ms(span_ns), "zeroline": aligned},
        yaxis={"autorange": "reversed", "automargin": True, "type": "category"},
    )
    figure_layout["margin"] |= {"t": 8}
    if not aligned:
        words = {"text": [b.words for b in drawn], "textposition": "outside", "cliponaxis": False}
        return {"data": [trace | words], "layout": figure_layout}
    figure_layout["annotations"] = [
        note(b.words, x=1, xref="paper", xanchor="left", xshift=8, y=plain(b.label)) for b in drawn
    ]
    trace["error_x"] = {
        "type": "data",
        "symmetric": False,
        "array": _ms(b.ci95_ns[1] - b.length_ns if b.ci95_ns else 0 for b in drawn),
        "arrayminus": _ms(b.length_ns - b.ci95_ns[0] if b.ci95_ns else 0 for b in drawn),
        "color": "#85888e",
        "thickness": 1,
        "width": 3,
    }
    return {"data": [trace], "layout": figure_layout}


def _ms(times_ns: Iterable[float]) -> list[float]:
    return significant(t / 1e6 for t in times_ns)


def waterfall(story: Story) -> Figure:
    """Return a figure from ideal to observed: a bar per leaf cause, in the order of the tree.

    When the ideal is unknown the waterfall starts at 0.
    """
    windows, observed = story.windows, story.observed_per_window_ns
    per_window = {row.id: row.time_ns / windows for row in story.run.leaves() if row.time_ns > 0}
    start = per_window.pop("compute.ideal", 0.0)
    drawn: list[Bar] = []
    causes: list[str | None] = []

    def add(label: str, start_ns: float, length_ns: float, hue: str, about: str) -> None:
        causes.append(about if about in CAUSES else None)
        time, share = fmt.duration(length_ns), fmt.ratio(length_ns / observed if observed else 0.0)
        hover = f"{time} per {story.unit}, {share}<br>{plain(about)}"
        drawn.append(Bar(label, start_ns, length_ns, hue, f"{time} · {share}", hover))

    if story.ideal_per_window_ns is not None:
        add("Ideal: model math at peak", 0.0, start, color("compute.ideal"), "compute.ideal")
    small = [c for c, time_ns in per_window.items() if time_ns < _SMALL_RATIO * observed]
    for cause in sorted(per_window.keys() - small, key=LEAVES.index):
        add(full_label(cause), start, per_window[cause], color(cause), cause)
        start += per_window[cause]
    if small:
        names = [full_label(c) for c in sorted(small, key=LEAVES.index)]
        label = names[0] if len(names) == 1 else f"{len(names)} smaller causes"
        add(label, start, sum(per_window[c] for c in small), GREY, ", ".join(names))
    add("Observed", 0.0, observed, "", "observed")
    axis = f"ms per {story.unit}, mean over {fmt.plural(windows, 'window')}"
    figure = bars(drawn, axis=axis, span_ns=(0, observed * 1.02 or 1e6))
    return figure | {"causes": causes}


def steps(story: Story) -> Figure:
    """Return the causes of each step, stacked, in seconds.

    Returns:
        A figure with one bar trace per leaf cause (mean over ranks), and ``views``: rank label →
        heights per trace, to be swapped in.
    """
    pieces, windows = story.run.totals.causes, story.run.windows
    leaves = sorted((row.id for row in story.run.leaves()), key=LEAVES.index)
    index = ints(windows, "step_index")
    number = dict(zip(index.tolist(), windows["number"].to_pylist(), strict=True))
    step = np.unique(index)
    if not leaves or not len(step):
        return {"data": [], "layout": {}, "views": {}}
    codes, names = strings(pieces, "cause")
    leaf = np.array([leaves.index(n) if n in leaves else -1 for n in names])[codes]
    ranks, rank = np.unique(ints(pieces, "rank"), return_inverse=True)
    at = np.searchsorted(step, ints(pieces, "step_index"))
    cube = np.zeros((len(ranks), len(leaves), len(step)))
    known = leaf >= 0
    np.add.at(cube, (rank[known], leaf[known], at[known]), ints(pieces, "time_ns")[known])
    pairs = np.unique(np.stack([ints(windows, "rank"), index]), axis=1)
    with_pieces = np.isin(pairs[0], ranks)
    present = np.bincount(np.searchsorted(step, pairs[1, with_pieces]), minlength=len(step))
    edges = bins(len(step))
    words = ["whole trace" if number[s] is None else str(number[s]) for s in step.tolist()]
    labels = bin_labels(words, edges)
    data = [
        {
            "type": "bar",
            "name": full_label(cause),
            "x": labels,
            "y": _binned(heights, edges),
            "marker": {"color": color(cause), "line": {"width": 0}},
            "meta": cause,
            "hovertemplate": f"{full_label(cause)}: %{{y:.3~s}}s<extra></extra>",
        }
        for cause, heights in zip(leaves, cube.sum(axis=0) / np.maximum(present, 1), strict=True)
    ]
    views = {
        str(int(number)): [_binned(heights, edges) for heights in of_rank]
        for number, of_rank in zip(ranks, cube, strict=True)
        if 1 < len(ranks) <= _MAX_RANKS
    }
    return {
        "data": data,
        "views": views,
        "binned": len(step) if len(labels) < len(step) else None,
        "layout": stacked_steps(story.unit, len(labels), right=8),
    }


def stacked_steps(unit: str, count: int, *, right: int) -> Figure:
    """Return the layout of stacked bars, one per step, in seconds."""
    return layout(
        360,
        56,
        right,
        hovermode="x unified",
        barmode="stack",
        bargap=0.25 if count <= 40 else 0.08,
        xaxis={"title": {"text": unit}, "type": "category", "showspikes": False, "nticks": 24},
        # Seconds with SI prefixes: 5ms, 800µs.
        yaxis={"rangemode": "tozero", "tickformat": "~s", "ticksuffix": "s"},
    )


def bins(count: int) -> np.ndarray:
    """Return the edges of the bins in which a number of steps are drawn."""
    return np.linspace(0, count, min(count, MAX_BARS) + 1).round().astype(np.int64)


def bin_labels(names: Sequence[str], edges: np.ndarray) -> list[str]:
    """Return the name of each bin: of its step, or of the first and the last."""
    return [
        names[a] if b - a == 1 else f"{names[a]}–{names[b - 1]}"
        for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]


def _binned(values: np.ndarray, edges: np.ndarray) -> list[float]:
    return significant(np.add.reduceat(values, edges[:-1]) / np.diff(edges) / 1e9)


_UNITS = {
    "ratio": ("%", 100.0),
    "bytes": ("GiB", 2.0**-30),
    "bytes_per_s": ("MB/s", 1e-6),
    "hz": ("GHz", 1e-9),
    "w": ("W", 1.0),
    "c": ("°C", 1.0),
}


def telemetry(series: Sequence[Series], attribution: Attribution) -> Figure:
    """Return all telemetry over the run, one panel per quantity, traced steps shaded."""
    panels: dict[str, list[Series]] = {}
    for one in series:
        panels.setdefault(one.panel, []).append(one)
    if not panels:
        return {"data": [], "layout": {}}
    zero_ns = min(int(s.time_ns[0]) for s in series)
    height, gap = 128, 44
    total = len(panels) * height + (len(panels) - 1) * gap
    data: list[Figure] = []
    axes: Figure = {}
    notes = []
    for i, (panel, mine) in enumerate(panels.items()):
        unit, scale = _UNITS.get(mine[0].unit, (mine[0].unit, 1.0))
        suffix = "" if i == 0 else str(i + 1)
        top = 1 - i * (height + gap) / total
        axes[f"yaxis{suffix}"] = {
            "domain": [max(top - height / total, 0), top],
            "rangemode": "normal" if mine[0].unit in ("hz", "c") else "tozero",
            "title": {"text": plain(unit)},
            "anchor": "x",
            "nticks": 5,
        }
        words = _legend(panel, [s.label for s in mine])
        anchor = {"x": 0, "xref": "paper", "xanchor": "left", "yref": "paper", "yanchor": "bottom"}
        notes.append(note(words, y=top, name="panel", **anchor))
        for j, one in enumerate(mine):
            cut = thin(one, _POINTS)
            value = np.where(np.abs(cut.value) < LARGEST_DRAWN, cut.value, np.nan) * scale
            hover = f"{plain(one.label)}: %{{y:.4~g}} {plain(unit)}<extra></extra>"
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": _seconds(cut.time_ns - zero_ns),
                    "y": [None if v != v else round(v, 4) for v in value.tolist()],
                    "yaxis": f"y{suffix}",
                    "name": plain(one.label),
                    "line": {"width": 1.5, "color": LINES[j % len(LINES)]},
                    "hovertemplate": hover,
                }
            )
    below = f"y{len(panels)}" if len(panels) > 1 else "y"
    figure_layout = layout(
        total + 76,
        60,
        8,
        hovermode="x",
        annotations=notes,
        shapes=_step_shades(attribution, zero_ns),
        xaxis={"title": {"text": "s since the first sample"}, "anchor": below},
        **axes,
    )
    return {"data": data, "layout": figure_layout}


def _seconds(times_ns: np.ndarray) -> list[float]:
    return [round(t / 1e9, 4) for t in times_ns.tolist()]


def _legend(panel: str, labels: list[str]) -> str:
    words = [f"<b>{plain(panel)}</b>"]
    for j, label in enumerate(labels[:8]):
        words.append(f'<span style="color:{LINES[j % len(LINES)]}">■</span> {plain(label)}')
    if len(labels) > 8:
        words.append(f"and {len(labels) - 8} more")
    return "   ".join(words)


def _step_shades(attribution: Attribution, zero_ns: int) -> list[Figure]:
    """Return a band for each traced step of the rank that has most; alternate ones differ."""
    ranks = attribution.windows["rank"].to_numpy()
    if not len(ranks):
        return []
    values, counts = np.unique(ranks, return_counts=True)
    windows = attribution.windows.filter(pa.array(ranks == values[counts.argmax()]))
    start, end = (_seconds(windows[c].to_numpy() - zero_ns) for c in ("start_ns", "end_ns"))
    if len(start) > _MAX_SHADES:
        # Bands thinner than a pixel are one band.
        start, end = start[:1], end[-1:]
    return [
        {
            "type": "rect",
            "xref": "x",
            "yref": "paper",
            "x0": a,
            "x1": b,
            "y0": 0,
            "y1": 1,
            "line": {"width": 0},
            "layer": "below",
            "name": "step" if i % 2 else "step-odd",
        }
        for i, (a, b) in enumerate(zip(start, end, strict=True))
    ]
