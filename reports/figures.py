"""Plotly figures as plain JSON dicts, made by pure functions; no plotly is imported.

Only what belongs to the data stands here. Fonts, grid and background follow the reader's colour
scheme and are added in the browser. Every text that comes from a trace is escaped, because Plotly
draws a subset of HTML in its labels.
"""

from __future__ import annotations

import html
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.views.ranks import cube
from chopper.causes import CAUSES, LEAVES, WAITS
from chopper.errors import UsageError
from chopper.models.layouts import dimension_of
from chopper.reports.labels import color, full_label
from chopper.reports.series import LARGEST_DRAWN, Series, thin
from chopper.reports.story import Story
from chopper.storage.manifest import RankManifest
from chopper.wording import ranges

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


class Bar(msgspec.Struct, frozen=True):
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


_MOST_MEASURES = 8
_LEAST_SHARE_RATIO = 0.002
_LISTED = 4
"""Members of a group that are all named."""
_UNNAMED = ("", "undefined", "default_pg")
"""What torch calls process groups whose maker did not describe them."""


def rank_map(story: Story) -> Figure:
    """Return a heat map of ranks by steps: of steps without waiting, waiting, causes, the clock.

    Returns:
        A figure with one heat map; ``views``: measure → its values, to be swapped in; ``rows``:
        what ranks can be averaged by → the label of each rank.
    """
    run = story.run
    time_ns, numbers, causes = cube(run)
    parts = {part.rank: part for part in run.recording.manifest.ranks}
    hosts = {rank: part.hostname or "" for rank, part in parts.items()}
    order = sorted(
        range(len(numbers)),
        key=lambda i: (
            "" if run.dimensions else hosts.get(int(numbers[i]), ""),
            run.order_of(int(numbers[i])),
        ),
    )
    time_ns, shown_ranks = time_ns[order], numbers[order].tolist()
    observed = time_ns.sum(axis=2)
    wait = time_ns[:, :, [cause in WAITS for cause in causes]].sum(axis=2)
    measures = {
        "Step without waiting for other ranks": observed - wait,
        "Step": observed,
        "Waiting for other ranks": wait,
    }
    shares = time_ns.sum(axis=(0, 1)) / max(observed.sum(), 1)
    for i in np.argsort(-shares, kind="stable")[:_MOST_MEASURES].tolist():
        if shares[i] >= _LEAST_SHARE_RATIO:
            measures[full_label(causes[i])] = time_ns[:, :, i]
    edges = bins(time_ns.shape[1])
    words = sorted({*run.windows["number"].to_pylist()}, key=lambda n: (n is not None, n))
    steps = bin_labels(["whole trace" if n is None else str(n) for n in words], edges)
    rows = {
        "rank": [f"rank {parts[rank].name}" for rank in shown_ranks],
        **_places(run, shown_ranks),
        **_dimensions(parts, shown_ranks, without_known=bool(run.dimensions)),
    }
    names = [plain(hosts.get(rank, "")) for rank in shown_ranks]
    if len({*names}) > 1:
        labels = [parts[rank].name for rank in shown_ranks]
        rows["rank"] = [f"{name} · {label}" for name, label in zip(names, labels, strict=True)]
    if 1 < len({*names}) < len(names):
        rows["host"] = names
    views = {
        name: _measure(story, values / 1e6, observed > 0, edges, "ms")
        for name, values in measures.items()
    }
    clock_hz = _clock_of_steps(story, shown_ranks, observed.shape[1])
    if clock_hz is not None:
        views["Clock"] = _measure(story, clock_hz / 1e9, ~np.isnan(clock_hz), edges, "GHz")
    heat = {
        "type": "heatmap",
        "x": steps,
        "y": rows["rank"],
        "colorscale": "Viridis",
        "hoverongaps": False,
        **next(iter(views.values())),
    }
    return {
        "data": [heat],
        "views": views,
        "rows": rows,
        "layout": layout(
            int(min(160 + 14 * len(shown_ranks), 560)),
            110,
            8,
            xaxis={"title": {"text": story.unit}, "type": "category", "nticks": 24},
            yaxis={
                "type": "category",
                "autorange": "reversed",
                "nticks": 24,
                "automargin": True,
            },
        ),
    }


def _places(run: Attribution, ranks: list[int]) -> dict[str, list[str]]:
    """Return the dimensions in which the place of all ranks is known, a label per rank."""
    return {
        dimension: [f"{dimension} {places[rank]}" for rank in ranks]
        for dimension in run.dimensions
        if (places := run.places(dimension)).keys() >= {*ranks}
    }


def _measure(
    story: Story, values: np.ndarray, known: np.ndarray, edges: np.ndarray, unit: str
) -> Figure:
    """Return the cells of a heat map, (ranks, bins of steps), and the range of its colours.

    Colours span all but the hundredth at each end, so that one hiccup does not hide the rest.
    """
    count = np.add.reduceat(known, edges[:-1], axis=1, dtype=np.int64)
    sums = np.add.reduceat(np.where(known, values, 0), edges[:-1], axis=1)
    cells = np.where(count > 0, sums / np.maximum(count, 1), np.nan)
    low, high = np.nanquantile(cells, (0.01, 0.99)).tolist()
    return {
        "z": [[None if np.isnan(v) else float(f"{v:.4g}") for v in row] for row in cells.tolist()],
        "zmin": low,
        "zmax": high if high > low else low + 1e-6,
        "colorbar": {"title": {"text": unit}, "thickness": 12},
        "hovertemplate": f"%{{y}}, {story.unit} %{{x}}: %{{z:.4~g}} {unit}<extra></extra>",
    }


def _clock_of_steps(story: Story, ranks: list[int], steps_count: int) -> np.ndarray | None:
    """Return the mean clock while computing of (ranks, steps), NaN where unknown; None without."""
    table = story.table("clocks").filter(pc.field("level") == "step")
    numbers = np.unique(ints(story.run.totals.causes, "number"))
    clock_hz = np.full((len(ranks), steps_count), np.nan)
    row_of = {rank: row for row, rank in enumerate(ranks)}
    steps = np.searchsorted(numbers, ints(table, "number")).tolist()
    means = table["clock_mean_hz"].to_pylist()
    for rank, step, mean in zip(table["rank"].to_pylist(), steps, means, strict=True):
        if mean is not None:
            clock_hz[row_of[rank], step] = mean
    return None if np.isnan(clock_hz).all() else clock_hz


def _dimensions(
    parts: Mapping[int, RankManifest], ranks: list[int], *, without_known: bool
) -> dict[str, list[str]]:
    """Return the kinds of process groups that divide all ranks, a label per rank.

    A kind is named by what its groups were described as (DeviceMesh: ``mesh_tp``), or else by
    their size and the distance of their ranks.

    Args:
        parts: rank → its part of the manifest.
        ranks: those that are shown.
        without_known: leave out groups whose names tell a dimension of parallelism.
    """
    labels_by_dimension: dict[str, dict[int, str]] = {}
    doubled: Counter[str] = Counter()
    groups = {
        (str(group.get("pg_desc", "")), tuple(sorted(group["ranks"])))
        for part in parts.values()
        for group in part.process_groups
        if isinstance(group.get("ranks"), list) and all(type(r) is int for r in group["ranks"])
    }
    for description, members in sorted(groups):
        strides = {b - a for a, b in itertools.pairwise(members)}
        if len(members) < 2 or len(strides) != 1 or (without_known and dimension_of(description)):
            continue
        name = plain(description)
        if description in _UNNAMED:
            name = f"groups of {len(members)} ranks, {strides.pop()} apart"
        of = labels_by_dimension.setdefault(name, {})
        doubled[name] += len(of.keys() & set(members))
        several = len(members) > _LISTED and members[1] > members[0] + 1
        listed = "{}, {} … {}".format(*members[:2], members[-1]) if several else fmt.ranges(members)
        of |= dict.fromkeys(members, f"ranks {listed}")
    return {
        name: [of[rank] for rank in ranks]
        for name, of in labels_by_dimension.items()
        if not doubled[name] and of.keys() >= set(ranks) and len({*of.values()}) > 1
    }


MAX_EVENTS = 4000
"""Device events that are drawn: the longest of a step with more."""
_IDLE = "idle"
_OVERLAPPED = "hidden: another stream has the time"


class _Bars(msgspec.Struct, frozen=True):
    """Intervals of one step: lane and cause of each, with the text shown on hovering."""

    lane: list[str]
    cause: list[str | None]
    start_ns: np.ndarray
    dur_ns: np.ndarray
    text: list[str]


def step_timeline(run: Attribution, rank: int | None = None, step: int | None = None) -> Figure:
    """Return a step of a rank: a lane for each stream, coloured by cause, and one of idle time.

    Args:
        run: the attributed run; the figure is of the ranks and steps that it has tables of.
        rank: by default the first of them.
        step: number of the step; by default the one of median length.

    Raises:
        UsageError: there is no such rank or step, or nothing was attributed.
    """
    near = run.detail
    window, label = _step_window(near, rank, step)
    events, count = _event_bars(near, window)
    gaps = _gap_bars(near, window)
    lanes = [*dict.fromkeys(sorted({*events.lane})), _IDLE]
    data = []
    for cause in sorted({*events.cause, *gaps.cause}, key=_cause_order):
        base, length, place, text = [], [], [], []
        for bars in (events, gaps):
            for i in [i for i, of in enumerate(bars.cause) if of == cause]:
                base.append((int(bars.start_ns[i]) - window["start_ns"]) / 1e6)
                length.append(int(bars.dur_ns[i]) / 1e6)
                place.append(bars.lane[i])
                text.append(bars.text[i])
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": _OVERLAPPED if cause is None else full_label(cause),
                "base": significant(base),
                "x": significant(length),
                "y": place,
                "customdata": text,
                "marker": {"color": GREY if cause is None else color(cause), "line": {"width": 0}},
                "hovertemplate": "%{customdata}<br>from %{base:.4f} ms<extra></extra>",
            }
        )
    shown = layout(
        140 + 46 * len(lanes),
        110,
        16,
        legend=True,
        title={"text": plain(label), "font": {"size": 14}},
        barmode="overlay",
        bargap=0.2,
        xaxis={"title": {"text": "ms since the step began"}, "rangemode": "tozero"},
        yaxis={"type": "category", "categoryarray": lanes[::-1], "automargin": True},
    )
    shown["margin"] |= {"t": 44, "b": 110}
    if count > MAX_EVENTS:
        shown["title"]["text"] += f" (the {MAX_EVENTS} longest of {count} events)"
    return {"data": data, "layout": shown}


def _cause_order(cause: str | None) -> int:
    return len(LEAVES) if cause is None else LEAVES.index(cause)


def _step_window(
    run: Attribution, rank: int | None, step: int | None
) -> tuple[dict[str, int], str]:
    """Return the window to draw, and its title."""
    windows = run.windows
    known = sorted({*ints(windows, "rank").tolist()})
    if not known:
        raise UsageError(f"{run.source}: no timeline: no step was attributed")
    rank = known[0] if rank is None else rank
    if rank not in known:
        raise UsageError(
            f"{run.source}: no timeline of rank {rank!r}: there are tables of {ranges(known)}; "
            "chopper.attribute(run, ranks=[…]) chooses others"
        )
    rows = windows.filter(
        pc.equal(windows["rank"], pa.scalar(rank, windows["rank"].type))
    ).to_pylist()
    if step is None:
        rows.sort(key=lambda row: row["end_ns"] - row["start_ns"])
        chosen = rows[(len(rows) - 1) // 2]
    else:
        found = [row for row in rows if row["number"] == step]
        if not found:
            numbers = sorted(row["number"] for row in rows if row["number"] is not None)
            has = f"it has {ranges(numbers)}" if numbers else "its steps have no numbers"
            raise UsageError(f"{run.source}: no timeline of step {step!r} of rank {rank}: {has}")
        chosen = found[0]
    number = chosen["number"]
    name = "whole trace" if number is None else f"step {number}"
    length = fmt.duration(chosen["end_ns"] - chosen["start_ns"])
    return chosen, f"Rank {rank}, {name}: {length}"


def _event_bars(run: Attribution, window: dict[str, int]) -> tuple[_Bars, int]:
    """Return the device events of a window, at most :data:`MAX_EVENTS`, and how many there are."""
    rank = window["rank"]
    table, links = run.joined[rank].device_event, run.links[rank]
    mine = np.flatnonzero(ints(links, "step_index", null=-1) == window["step_index"])
    dur_ns = ints(table, "dur_ns")
    count = len(mine)
    if count > MAX_EVENTS:
        mine = np.sort(mine[np.argsort(-dur_ns[mine], kind="stable")[:MAX_EVENTS]])
    cause = _largest_cause(run.pieces, window)
    stream = ints(table, "stream_id", null=-1)[mine].tolist()
    codes, names = strings(table, "name")
    text = []
    for row in mine.tolist():
        name = plain(fmt.kernel_name(names[codes[row]])) if codes[row] >= 0 else "event"
        text.append(f"{name}: {fmt.duration(int(dur_ns[row]))}")
    bars = _Bars(
        ["device" if s < 0 else f"stream {s}" for s in stream],
        [cause.get(row) for row in mine.tolist()],
        ints(table, "start_ns")[mine],
        dur_ns[mine],
        text,
    )
    return bars, count


def _largest_cause(pieces: pa.Table, window: dict[str, int]) -> dict[int, str]:
    """Return, for each device event of a window, the cause that most of its time went to."""
    inside = (ints(pieces, "rank") == window["rank"]) & (
        ints(pieces, "step_index") == window["step_index"]
    )
    row = ints(pieces, "event_row", null=-1)
    codes, names = strings(pieces, "cause")
    busy = np.array([not name.startswith("idle") for name in names], dtype=bool)[codes]
    at = np.flatnonzero(inside & (row >= 0) & busy)
    at = at[np.argsort(ints(pieces, "time_ns")[at], kind="stable")]
    return {int(row[i]): names[codes[i]] for i in at.tolist()}


def _gap_bars(run: Attribution, window: dict[str, int]) -> _Bars:
    """Return the idle time of a window, by cause."""
    gaps = run.gaps
    inside = (ints(gaps, "rank") == window["rank"]) & (
        ints(gaps, "step_index") == window["step_index"]
    )
    at = np.flatnonzero(inside)
    codes, names = strings(gaps, "cause")
    start_ns = ints(gaps, "start_ns")[at]
    dur_ns = ints(gaps, "end_ns")[at] - start_ns
    causes = [names[codes[i]] for i in at.tolist()]
    text = [
        f"{plain(full_label(cause))}: {fmt.duration(int(length))}"
        for cause, length in zip(causes, dur_ns.tolist(), strict=True)
    ]
    return _Bars([_IDLE] * len(at), [*causes], start_ns, dur_ns, text)
