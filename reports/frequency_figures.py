"""Figures of the report's page about clocks: distribution, power and temperature, steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from chopper import wording as fmt
from chopper.analyzers.trace.samples import per_device
from chopper.reports.figures import MAX_BARS, plain
from chopper.reports.palette import PHASES, color

if TYPE_CHECKING:
    from chopper.analyzers.attributed import Attributed
    from chopper.analyzers.events.clocked import Clocked
    from chopper.reports.story import Story

Figure = dict[str, Any]

_BINS = 56
_OPERATORS = 8
"""Operators with a row of their own in the distribution."""
_POINTS = 1600
_LEAST_TIME = 0.005
"""Operators below this share of the computing time are left to the tables."""
_GIGA = 1e-9
_HEAT = [[0.0, "#3b7dd8"], [0.5, "#e3b71b"], [1.0, "#d1491b"]]


@dataclass(frozen=True)
class Readings:
    """Readings of one rank's device with a clock; NaN where something was not read."""

    rank: int
    name: str
    time_ns: np.ndarray
    clock_hz: np.ndarray
    power_w: np.ndarray
    temperature_c: np.ndarray
    power_limit_w: float | None
    power_basis: str | None


def readings_of(run: Attributed) -> list[Readings]:
    """Return the readings of each rank's device, or of each in a log; two with a clock at least."""
    readings = []
    recording = run.recording
    labels = {r.rank: r.label for r in run.ranks}
    for rank in recording.ranks:
        counters = dict(per_device(recording, rank, "device_counter"))
        limits = dict(per_device(recording, rank, "device_limit"))
        for number, clock in per_device(recording, rank, "device_clock"):
            hz = _real(clock, "sm_clock_hz")
            good = hz > 0
            if good.sum() < 2:
                continue
            time = clock["time_ns"].to_numpy()[good]
            heat = np.full(len(time), np.nan)
            if number in counters:
                at = counters[number]["time_ns"].to_numpy()
                heat = _nearest(at, _real(counters[number], "temperature_c"), time)
            limit, basis = (
                limits[number][name][0].as_py() if number in limits else None
                for name in ("power_limit_w", "power_basis")
            )
            name = labels.get(rank, f"rank {rank}") if number is None else f"device {number}"
            readings.append(
                Readings(
                    rank, name, time, hz[good], _real(clock, "power_w")[good], heat, limit, basis
                )
            )
    return readings


def watts(value: float) -> str:
    """Power of a board: ``390 W``."""
    return f"{value:.0f} W"


def _real(table: Any, name: str) -> np.ndarray:
    values: np.ndarray = table[name].to_numpy(zero_copy_only=False).astype(np.float64)
    return values


def _nearest(time_ns: np.ndarray, value: np.ndarray, wanted_ns: np.ndarray) -> np.ndarray:
    """The last known value at each time; NaN before the first and long after the last."""
    good = np.isfinite(value)
    time, value = time_ns[good], value[good]
    if len(time) < 2:
        return np.full(len(wanted_ns), np.nan)
    at = np.searchsorted(time, wanted_ns, side="right") - 1
    old = wanted_ns - time[np.maximum(at, 0)] > 4 * np.median(np.diff(time))
    return np.where((at < 0) | old, np.nan, value[np.maximum(at, 0)])


@dataclass(frozen=True)
class _Row:
    """One ridge of the distribution."""

    name: str
    color: str
    clock_hz: np.ndarray
    weight: np.ndarray
    words: str


def _rows(found: Clocked | None, readings: list[Readings]) -> list[_Row]:
    rows: list[_Row] = []
    if found is None:
        for one in readings[:16]:
            weight = np.diff(one.time_ns, append=one.time_ns[-1]).astype(np.float64)
            rows.append(_Row(f"{one.name}, all readings", "#3b7dd8", one.clock_hz, weight, ""))
        return rows
    known = np.flatnonzero(~np.isnan(found.clock_hz))
    events, time = found.events, found.time_ns[known]
    whole = max(int(time.sum()), 1)
    for kind, (codes, names), limit in (
        ("phase", events.phase, 6),
        ("operator", events.op, _OPERATORS),
    ):
        of = codes[found.rows[known]]
        spent = np.bincount(of[of >= 0], weights=time[of >= 0], minlength=len(names))
        for code in np.argsort(-spent)[:limit].tolist():
            if spent[code] < _LEAST_TIME * whole:
                break
            mine = of == code
            words = f"{fmt.ratio(spent[code] / whole)} of the computing time"
            tone = PHASES.get(names[code], "#98917f") if kind == "phase" else "#7d8aa5"
            rows.append(_Row(names[code], tone, found.clock_hz[known][mine], time[mine], words))
    return rows


def distribution(
    found: Clocked | None, readings: list[Readings], reference: float | None
) -> Figure | None:
    """Share of time at each clock, a ridge per phase and per operator."""
    rows = _rows(found, readings)
    if not rows:
        return None
    low = min(float(row.clock_hz.min()) for row in rows)
    high = max([float(row.clock_hz.max()) for row in rows] + ([reference] if reference else []))
    room = max((high - low) * 0.03, 15e6)
    edges = np.linspace(low - room, high + room, _BINS + 1)
    data: list[Figure] = []
    notes: list[Figure] = []
    count = len(rows)
    for i, row in enumerate(rows):
        base = count - 1 - i
        traces, note = _ridge(row, base, edges)
        data += traces
        notes.append(note)
    layout: Figure = {
        "height": 74 + 40 * count,
        "margin": {"l": 8, "r": 78, "t": 26, "b": 44},
        "showlegend": False,
        "hovermode": "closest",
        "annotations": notes,
        "xaxis": {
            "range": [float(edges[0] * _GIGA), float(edges[-1] * _GIGA)],
            "title": {"text": "SM clock, GHz; ◆ mean by time"},
        },
        "yaxis": {
            "range": [-0.25, count],
            "tickvals": list(range(count - 1, -1, -1)),
            "ticktext": [plain(fmt.ellipsize(row.name, 40)) for row in rows],
            "automargin": True,
            "zeroline": False,
            "ticks": "",
        },
        "shapes": [],
    }
    if reference is not None:
        _mark(layout, "x", reference * _GIGA, f"reference {fmt.hertz(reference)}")
    return {"data": data, "layout": layout}


def _ridge(row: _Row, base: int, edges: np.ndarray) -> tuple[list[Figure], Figure]:
    """Return the outline and the mean of a row of the distribution, and the mean in words."""
    share, _ = np.histogram(row.clock_hz, edges, weights=row.weight)
    share = share / max(share.sum(), 1e-12)
    x = np.repeat(edges, 2) * _GIGA
    y = base + 0.82 * np.concatenate([[0.0], np.repeat(share / share.max(), 2), [0.0]])
    mean = float(np.average(row.clock_hz, weights=row.weight))
    p5, p50, p95 = _quantiles(row.clock_hz, row.weight)
    words = (
        f"<b>{plain(row.name)}</b><br>{row.words + '<br>' if row.words else ''}mean "
        f"{fmt.hertz(mean)}, median {fmt.hertz(p50)}<br>90 % of the time {fmt.hertz(p5)} to "
        f"{fmt.hertz(p95)}"
    )
    traces: list[Figure] = []
    traces.append(
        {
            "type": "scatter",
            "mode": "lines",
            "x": [round(v, 4) for v in x.tolist()],
            "y": [round(v, 4) for v in y.tolist()],
            "fill": "toself",
            "fillcolor": row.color + "55",
            "line": {"width": 1.2, "color": row.color},
            "hoveron": "fills",
            "hoverinfo": "skip",
        }
    )
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": [round(mean * _GIGA, 4)],
            "y": [base],
            "marker": {"size": 8, "symbol": "diamond", "color": row.color},
            "hovertemplate": words + "<extra></extra>",
        }
    )
    note: Figure = {
        "text": fmt.hertz(mean),
        "x": 1,
        "y": base + 0.28,
        "xref": "paper",
        "yref": "y",
        "xanchor": "left",
        "xshift": 10,
        "showarrow": False,
    }
    return traces, note


def _quantiles(values: np.ndarray, weight: np.ndarray) -> tuple[float, float, float]:
    order = np.argsort(values, kind="stable")
    running = np.cumsum(weight[order].astype(np.float64))
    at = np.searchsorted(running, np.array([0.05, 0.5, 0.95]) * running[-1])
    low, middle, high = values[order][np.minimum(at, len(values) - 1)].tolist()
    return low, middle, high


def _mark(layout: Figure, axis: str, at: float, words: str) -> None:
    """A dashed line with words at its end."""
    along = "y" if axis == "x" else "x"
    layout["shapes"].append(
        {
            "type": "line",
            "name": "mark",
            f"{axis}ref": axis,
            f"{along}ref": "paper",
            f"{axis}0": at,
            f"{axis}1": at,
            f"{along}0": 0,
            f"{along}1": 1,
            "line": {"width": 1.2, "dash": "dash", "color": "#8a8f98"},
        }
    )
    layout.setdefault("annotations", []).append(
        {
            "text": words,
            f"{axis}ref": axis,
            f"{along}ref": "paper",
            axis: at,
            along: 1 if axis == "x" else 0,
            "showarrow": False,
            "xanchor": "right" if axis == "x" else "left",
            "yanchor": "bottom",
        }
    )


def power_and_heat(readings: list[Readings], reference: float | None) -> Figure | None:
    """Clock against power, coloured by temperature: a dot per reading, thinned evenly."""
    known = [r for r in readings if np.isfinite(r.power_w).any()]
    if not known:
        return None
    each = max(_POINTS // len(known), 40)
    parts = []
    for one in known:
        good = np.flatnonzero(np.isfinite(one.power_w))
        good = good[np.linspace(0, len(good) - 1, min(each, len(good))).round().astype(np.int64)]
        name = np.full(len(good), one.name, dtype=object)
        parts.append((one.power_w[good], one.clock_hz[good], one.temperature_c[good], name))
    power, clock, heat, name = (np.concatenate(column) for column in zip(*parts, strict=True))
    warm = np.isfinite(heat)
    data: list[Figure] = []
    for mask, coloured in ((~warm, False), (warm, True)):
        if not mask.any():
            continue
        marker: Figure = {"size": 6, "opacity": 0.6, "line": {"width": 0}}
        if coloured:
            marker |= {
                "color": [round(v, 1) for v in heat[mask].tolist()],
                "colorscale": _HEAT,
                "showscale": True,
                "colorbar": {
                    "title": {"text": "°C", "side": "top"},
                    "thickness": 10,
                    "outlinewidth": 0,
                    "len": 0.9,
                },
            }
            if float(np.ptp(heat[mask])) < 1:
                middle = float(heat[mask].mean())
                marker |= {"cmin": middle - 1, "cmax": middle + 1}
        else:
            marker["color"] = "#3b7dd8"
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [round(v, 1) for v in power[mask].tolist()],
                "y": [round(v * _GIGA, 4) for v in clock[mask].tolist()],
                "text": [
                    plain(n) + (f", {h:.0f} °C" if np.isfinite(h) else "")
                    for n, h in zip(name[mask].tolist(), heat[mask].tolist(), strict=True)
                ],
                "marker": marker,
                "hovertemplate": "%{y:.3f} GHz at %{x:.0f} W<br>%{text}<extra></extra>",
            }
        )
    layout: Figure = {
        "height": 360,
        "margin": {"l": 60, "r": 8, "t": 22, "b": 48},
        "showlegend": False,
        "hovermode": "closest",
        "xaxis": {"title": {"text": "board power, W"}},
        "yaxis": {"title": {"text": "SM clock, GHz"}},
        "shapes": [],
    }
    if reference is not None:
        _mark(layout, "y", reference * _GIGA, f"reference {fmt.hertz(reference)}")
    limits = {r.power_limit_w for r in known if r.power_limit_w}
    if len(limits) == 1:
        limit = limits.pop()
        if limit < 1.5 * float(power.max()):
            _mark(layout, "x", limit, f"limit {watts(limit)}")
    return {"data": data, "layout": layout}


def _means_by_step(
    steps: list[dict[str, Any]],
) -> list[tuple[str, float, float, float | None]]:
    """Return (name, observed ns, ns at the reference clock, clock) of each step, over its ranks."""
    by_number: dict[Any, list[dict[str, Any]]] = {}
    for step in steps:
        by_number.setdefault(step["number"], []).append(step)
    rows = []
    for number, same in by_number.items():
        clock = [s["clock_mean_hz"] for s in same if s["clock_mean_hz"] is not None]
        rows.append(
            (
                "whole trace" if number is None else str(number),
                sum(s["observed_ns"] for s in same) / len(same),
                sum(s["at_reference_ns"] for s in same) / len(same),
                sum(clock) / len(clock) if clock else None,
            )
        )
    return rows


def steps_at_reference(steps: list[dict[str, Any]], story: Story) -> Figure | None:
    """Each step as it would be at the reference clock, what the clock adds, and the clock."""
    steps = [s for s in steps if s["at_reference_ns"] is not None]
    if not steps:
        return None
    rows = _means_by_step(steps)
    size = -(-len(rows) // MAX_BARS)
    cut = [rows[i : i + size] for i in range(0, len(rows), size)]
    names = [p[0][0] if len(p) == 1 else f"{p[0][0]}–{p[-1][0]}" for p in cut]
    observed = [sum(r[1] for r in p) / len(p) for p in cut]
    reference = [sum(r[2] for r in p) / len(p) for p in cut]
    clocks = [[r[3] for r in p if r[3] is not None] for p in cut]
    hover = [
        f"observed {fmt.duration(o)}<br>at the reference clock {fmt.duration(r)}"
        for o, r in zip(observed, reference, strict=True)
    ]
    bars = (
        ("at the reference clock", [min(o, r) for o, r in zip(observed, reference, strict=True)]),
        ("lost to the clock", [max(o - r, 0) for o, r in zip(observed, reference, strict=True)]),
    )
    data: list[Figure] = [
        {
            "type": "bar",
            "name": name,
            "x": names,
            "y": [float(f"{v / 1e9:.6g}") for v in values],
            "marker": {"color": tone, "line": {"width": 0}},
            "customdata": hover,
            "hovertemplate": "%{customdata}<extra></extra>" if i == 0 else None,
            "hoverinfo": None if i == 0 else "skip",
        }
        for i, ((name, values), tone) in enumerate(
            zip(bars, (color("compute.ideal"), color("compute.clock")), strict=True)
        )
    ]
    data.append(
        {
            "type": "scatter",
            "mode": "lines+markers" if len(cut) <= 60 else "lines",
            "name": "mean clock",
            "x": names,
            "y": [round(sum(c) / len(c) * _GIGA, 4) if c else None for c in clocks],
            "yaxis": "y2",
            "line": {"width": 1.8, "color": "#e07b1a"},
            "marker": {"size": 5},
            "hovertemplate": "mean clock %{y:.3f} GHz<extra></extra>",
        }
    )
    return {
        "data": data,
        "layout": {
            "barmode": "stack",
            "bargap": 0.25 if len(cut) <= 40 else 0.08,
            "height": 360,
            "margin": {"l": 56, "r": 64, "t": 12, "b": 44},
            "hovermode": "x unified",
            "showlegend": False,
            "xaxis": {
                "title": {"text": story.unit},
                "type": "category",
                "showspikes": False,
                "nticks": 16,
            },
            "yaxis": {"rangemode": "tozero", "tickformat": "~s", "ticksuffix": "s"},
            "yaxis2": {
                "overlaying": "y",
                "side": "right",
                "showgrid": False,
                "title": {"text": "GHz"},
                "rangemode": "tozero",
                "tickmode": "auto",
                "nticks": 6,
                "tickformat": ".2~f",
            },
        },
    }
