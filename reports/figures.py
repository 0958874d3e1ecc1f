"""Plotly figures as plain JSON dicts, made by pure functions; no plotly is imported.

Only what belongs to the data stands here. Fonts, grid and background follow the reader's colour
scheme and are added in the browser. Every text that comes from a trace is escaped, because Plotly
draws a subset of HTML in its labels.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from chopper import wording as fmt
from chopper.causes import LEAVES
from chopper.reports.labels import full_label
from chopper.reports.palette import color
from chopper.reports.series import LARGEST_DRAWN, Series, thin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.analyzers.attributed import Attributed
    from chopper.reports.story import Story

Figure = dict[str, Any]

_SMALL_RATIO = 0.004
"""Causes below this share of the observed time stand together in the waterfall."""
MAX_BARS = 300
"""Steps drawn one by one; more are averaged in bins."""
_MAX_RANKS = 32
"""Ranks with a step chart of their own."""
_POINTS = 1500


def plain(text: str) -> str:
    """A text that Plotly shows as it is."""
    return html.escape(text, quote=False)


def _ms(time_ns: float) -> float:
    """Milliseconds with six significant digits: what a figure can show, and short in JSON."""
    return float(f"{time_ns / 1e6:.6g}")


GREY = "#9aa0a8"
"""Of causes that stand together."""


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

    Args:
        drawn: what to draw.
        axis: title of the axis of time.
        span_ns: what the axis spans.
        aligned: the bars' words stand below each other at the right, and whiskers are drawn.
    """
    trace: Figure = {
        "type": "bar",
        "orientation": "h",
        "y": [plain(b.label) for b in drawn],
        "base": [_ms(b.start_ns) for b in drawn],
        "x": [_ms(b.length_ns) for b in drawn],
        "marker": {"color": [b.color for b in drawn]},
        "customdata": [b.hover for b in drawn],
        "hovertemplate": "<b>%{y}</b><br>%{customdata}<extra></extra>",
        "showlegend": False,
        "width": 0.62,
    }
    layout: Figure = {
        "height": 64 + 30 * len(drawn),
        "margin": {"l": 8, "r": 96 if aligned else 110, "t": 8, "b": 44},
        "xaxis": {"title": {"text": axis}, "range": [_ms(v) for v in span_ns], "zeroline": aligned},
        "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
    }
    if not aligned:
        trace |= {
            "text": [b.words for b in drawn],
            "textposition": "outside",
            "cliponaxis": False,
        }
        return {"data": [trace], "layout": layout}
    trace["error_x"] = {
        "type": "data",
        "symmetric": False,
        "array": [_ms(b.ci95_ns[1] - b.length_ns) if b.ci95_ns else 0 for b in drawn],
        "arrayminus": [_ms(b.length_ns - b.ci95_ns[0]) if b.ci95_ns else 0 for b in drawn],
        "color": "#85888e",
        "thickness": 1,
        "width": 3,
    }
    layout["annotations"] = [
        {
            "x": 1,
            "xref": "paper",
            "y": plain(b.label),
            "text": b.words,
            "xanchor": "left",
            "xshift": 8,
            "showarrow": False,
        }
        for b in drawn
    ]
    return {"data": [trace], "layout": layout}


def waterfall(attribution: Attributed, story: Story) -> Figure:
    """Return a figure from ideal to observed: a bar per leaf cause, in the order of the tree.

    When the ideal is unknown the waterfall starts at 0.
    """
    windows = story.windows
    per_window = {row.id: row.time_ns / windows for row in attribution.leaves()}
    ideal = per_window.pop("compute.ideal", 0.0)
    observed = story.observed_per_window_ns
    drawn: list[Bar] = []
    start = ideal

    def add(label: str, start_ns: float, length_ns: float, hue: str, about: str) -> None:
        time, share = fmt.duration(length_ns), fmt.ratio(length_ns / observed if observed else 0.0)
        hover = f"{time} per {story.unit}, {share}<br>{plain(about)}"
        drawn.append(Bar(label, start_ns, length_ns, hue, f"{time} · {share}", hover))

    if story.ideal_per_window_ns is not None:
        add("Ideal: model math at peak", 0.0, ideal, color("compute.ideal"), "ideal")
    small: list[str] = []
    for cause in LEAVES:
        time_ns = per_window.get(cause, 0.0)
        if time_ns <= 0:
            continue
        if observed and time_ns / observed < _SMALL_RATIO:
            small.append(cause)
            continue
        add(full_label(cause), start, time_ns, color(cause), cause)
        start += time_ns
    if small:
        rest = sum(per_window[c] for c in small)
        label = full_label(small[0]) if len(small) == 1 else f"{len(small)} smaller causes"
        add(label, start, rest, GREY, ", ".join(full_label(c) for c in small))
    add("Observed", 0.0, observed, "", "observed")
    axis = f"ms per {story.unit}, mean over {fmt.plural(windows, 'window')}"
    return bars(drawn, axis=axis, span_ns=(0, observed * 1.02 or 1e6))


def steps(attribution: Attributed, story: Story) -> Figure:
    """Causes of each step, stacked, in seconds; heights for the mean of ranks and for each.

    Returns:
        A figure with one bar trace per leaf cause (mean over ranks), and ``views``: rank label →
        heights per trace, to be swapped in.
    """
    pieces = attribution.pieces
    leaves = [row.id for row in sorted(attribution.leaves(), key=lambda r: LEAVES.index(r.id))]
    step, number = _step_axis(attribution)
    if not leaves or not len(step):
        return {"data": [], "layout": {}, "views": {}}
    codes, names = _cause_codes(pieces)
    leaf_of = np.array([leaves.index(n) if n in leaves else -1 for n in names], dtype=np.int64)
    rank_values, rank_codes = np.unique(pieces["rank"].to_numpy(), return_inverse=True)
    at = np.searchsorted(step, pieces["step_index"].to_numpy())
    time_ns = pieces["time_ns"].to_numpy()
    shape = len(rank_values), len(leaves), len(step)
    flat = (rank_codes * shape[1] + leaf_of[codes]) * shape[2] + at
    cube = np.bincount(
        flat[leaf_of[codes] >= 0],
        time_ns[leaf_of[codes] >= 0],
        minlength=shape[0] * shape[1] * shape[2],
    ).reshape(shape)
    present = _windows_per_step(attribution, rank_values, step)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nan_to_num(cube.sum(axis=0) / present.sum(axis=0))
    edges = _bins(len(step))
    labels = _bin_labels(number, edges)
    data = [
        {
            "type": "bar",
            "name": full_label(leaf),
            "x": labels,
            "y": _binned(mean[i], edges),
            "marker": {"color": color(leaf), "line": {"width": 0}},
            "meta": leaf,
            "hovertemplate": f"{full_label(leaf)}: %{{y:.3~s}}s<extra></extra>",
        }
        for i, leaf in enumerate(leaves)
    ]
    views: dict[str, list[list[float]]] = {}
    if 1 < len(rank_values) <= _MAX_RANKS:
        for r, rank in enumerate(rank_values):
            views[str(int(rank))] = [_binned(cube[r, i], edges) for i in range(len(leaves))]
    return {
        "data": data,
        "views": views,
        "binned": len(step) if len(edges) - 1 < len(step) else None,
        "layout": {
            "barmode": "stack",
            "bargap": 0.25 if len(labels) <= 40 else 0.08,
            "height": 380,
            "margin": {"l": 56, "r": 8, "t": 12, "b": 44},
            "hovermode": "x unified",
            "showlegend": False,
            "xaxis": {"title": {"text": story.unit}, "type": "category", "showspikes": False},
            # Seconds with SI prefixes: 5ms, 800µs.
            "yaxis": {"rangemode": "tozero", "tickformat": "~s", "ticksuffix": "s"},
        },
    }


def _cause_codes(pieces: Any) -> tuple[np.ndarray, list[str]]:
    array = pieces["cause"].unify_dictionaries().combine_chunks()
    names: list[str] = array.dictionary.to_pylist()
    codes: np.ndarray = array.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes, names


def _step_axis(attribution: Attributed) -> tuple[np.ndarray, list[str]]:
    index = attribution.windows["step_index"].to_pylist()
    number = dict(zip(index, attribution.windows["number"].to_pylist(), strict=True))
    step = sorted(number)
    return np.array(step, dtype=np.int64), [
        "whole trace" if number[s] is None else str(number[s]) for s in step
    ]


def _windows_per_step(attribution: Attributed, ranks: np.ndarray, step: np.ndarray) -> np.ndarray:
    present = np.zeros((len(ranks), len(step)))
    r = np.searchsorted(ranks, attribution.windows["rank"].to_numpy())
    s = np.searchsorted(step, attribution.windows["step_index"].to_numpy())
    valid = r < len(ranks)
    present[r[valid], s[valid]] = 1
    return present


def _bins(count: int) -> np.ndarray:
    bars = min(count, MAX_BARS)
    return np.linspace(0, count, bars + 1).round().astype(np.int64)


def _bin_labels(number: list[str], edges: np.ndarray) -> list[str]:
    return [
        number[a] if b - a == 1 else f"{number[a]}–{number[b - 1]}"
        for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]


def _binned(values: np.ndarray, edges: np.ndarray) -> list[float]:
    sums = np.add.reduceat(values, edges[:-1]) if len(values) else values
    return [float(f"{v / 1e9:.6g}") for v in (sums / np.diff(edges)).tolist()]


_UNITS = {
    "ratio": ("%", 100.0),
    "bytes": ("GiB", 2.0**-30),
    "bytes_per_s": ("MB/s", 1e-6),
    "hz": ("GHz", 1e-9),
    "w": ("W", 1.0),
    "c": ("°C", 1.0),
}
# Lines of one panel: Okabe and Ito's hues, then their darker kin.
LINES = ("#3b7dd8", "#e07b1a", "#12a17d", "#c05a9c", "#c9a227", "#6a5acd", "#59b2d9", "#8a8f98")


def _drawable(value: np.ndarray) -> np.ndarray:
    """The values, NaN beyond what an axis can span."""
    return np.where(np.abs(value) < LARGEST_DRAWN, value, np.nan)


def telemetry(series: Sequence[Series], attribution: Attributed) -> Figure:
    """All telemetry over the run, one panel per quantity, traced steps shaded."""
    panels = list(dict.fromkeys(s.panel for s in series))
    if not panels:
        return {"data": [], "layout": {}}
    zero = min(int(s.time_ns[0]) for s in series)
    height, gap = 128, 44
    total = len(panels) * height + (len(panels) - 1) * gap
    data: list[Figure] = []
    layout: Figure = {
        "height": total + 76,
        "margin": {"l": 60, "r": 8, "t": 28, "b": 48},
        "hovermode": "x",
        "annotations": [],
        "shapes": [],
        "showlegend": False,
    }
    for i, panel in enumerate(panels):
        mine = [s for s in series if s.panel == panel]
        unit, scale = _UNITS.get(mine[0].unit, (mine[0].unit, 1.0))
        suffix = "" if i == 0 else str(i + 1)
        top = 1 - i * (height + gap) / total
        bottom = max(top - height / total, 0)
        layout[f"yaxis{suffix}"] = {
            "domain": [bottom, top],
            "rangemode": "normal" if mine[0].unit in ("hz", "c") else "tozero",
            "title": {"text": plain(unit)},
            "anchor": "x",
            "nticks": 5,
        }
        layout["annotations"].append(
            {
                "text": _legend(panel, [s.label for s in mine]),
                "x": 0,
                "y": top,
                "xref": "paper",
                "yref": "paper",
                "xanchor": "left",
                "yanchor": "bottom",
                "showarrow": False,
                "name": "panel",
            }
        )
        for j, one in enumerate(mine):
            cut = thin(one, _POINTS)
            value = _drawable(cut.value) * scale
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": [round(t / 1e9, 4) for t in (cut.time_ns - zero).tolist()],
                    "y": [None if v != v else round(v, 4) for v in value.tolist()],
                    "yaxis": f"y{suffix}",
                    "name": plain(one.label),
                    "line": {"width": 1.5, "color": LINES[j % len(LINES)]},
                    "hovertemplate": (
                        f"{plain(one.label)}: %{{y:.4~g}} {plain(unit)}<extra></extra>"
                    ),
                }
            )
    layout["xaxis"] = {
        "title": {"text": "s since the first sample"},
        "anchor": f"y{len(panels)}" if len(panels) > 1 else "y",
    }
    layout["shapes"] = _step_shades(attribution, zero)
    return {"data": data, "layout": layout}


def _legend(panel: str, labels: list[str]) -> str:
    words = [f"<b>{plain(panel)}</b>"]
    for j, label in enumerate(labels[:8]):
        words.append(f'<span style="color:{LINES[j % len(LINES)]}">■</span> {plain(label)}')
    if len(labels) > 8:
        words.append(f"and {len(labels) - 8} more")
    return "   ".join(words)


def _step_shades(attribution: Attributed, zero: int) -> list[Figure]:
    """A band for every traced step of the rank that has most; alternate steps are shaded."""
    windows = attribution.windows
    ranks = windows["rank"].to_numpy()
    if not len(ranks):
        return []
    values, counts = np.unique(ranks, return_counts=True)
    mine = ranks == values[counts.argmax()]
    start = windows["start_ns"].to_numpy()[mine]
    end = windows["end_ns"].to_numpy()[mine]
    shades = [
        {
            "type": "rect",
            "xref": "x",
            "yref": "paper",
            "x0": round((int(a) - zero) / 1e9, 4),
            "x1": round((int(b) - zero) / 1e9, 4),
            "y0": 0,
            "y1": 1,
            "line": {"width": 0},
            "layer": "below",
            "name": "step" if i % 2 else "step-odd",
        }
        for i, (a, b) in enumerate(zip(start.tolist(), end.tolist(), strict=True))
    ]
    if len(shades) > 200:
        # Bands thinner than a pixel are one band.
        shades = [{**shades[0], "x1": shades[-1]["x1"], "name": "step"}]
    return shades
