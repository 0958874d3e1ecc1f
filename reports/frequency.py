"""The report's page about clocks: where time was spent at which clock, what held it, what it cost.

Everything is a picture of the views of clocks and of the readings themselves; nothing is computed
here that they do not hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from chopper import _format as fmt
from chopper.analyzers.clock_views import clocked
from chopper.analyzers.clocks import CLOCK_LABELS
from chopper.causes import CAUSES
from chopper.reports.figures import MAX_BARS, plain
from chopper.reports.palette import PHASES, color
from chopper.telemetry import per_device
from chopper.views import view

if TYPE_CHECKING:
    from chopper.analyzers.clock_views import Clocked
    from chopper.attribution import Attribution
    from chopper.reports.story import Story

Figure = dict[str, Any]

_BINS = 56
_OPERATORS = 8
"""Operators with a row of their own in the distribution."""
_KERNELS = 12
_EPISODES = 6
_ENERGY_ROWS = 12
_ENERGY_SCOPES = ("run", "phase", "window")
_POINTS = 1600
_LEAST_TIME = 0.005
"""Operators below this share of the computing time are left to the tables."""
_GIGA = 1e-9
_HEAT = [[0.0, "#3b7dd8"], [0.5, "#e3b71b"], [1.0, "#d1491b"]]


@dataclass(frozen=True)
class Frequency:
    """What the page shows.

    Attributes:
        lead: what it comes to, in one or two sentences.
        facts: label, figure, what qualifies it.
        kernels: rows of the table of kernels.
        episodes: rows of the longest throttle episodes; ``more_episodes`` are not shown.
        energy: rows of the whole run and of phases; ``more_energy`` are not shown.
        figures: name → figure.
        missing: what is not in a figure, or why there is none, by the figure's name.
    """

    lead: str
    facts: list[tuple[str, str, str]]
    kernels: list[dict[str, Any]]
    episodes: list[dict[str, Any]]
    more_episodes: int
    energy: list[dict[str, Any]]
    more_energy: int
    figures: dict[str, Figure] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def build(attribution: Attribution, story: Story) -> Frequency | None:
    """The page of a run; None where no clock of a device was sampled."""
    readings = _readings(attribution)
    found = clocked(attribution)
    if found is not None and np.isnan(found.clock_hz).all():
        found = None
    if found is None and not readings:
        return None
    steps = view(attribution, "clock_by_step").to_pylist() if found is not None else []
    reference = _reference(attribution, found)
    episodes = view(attribution, "throttle_episodes")
    energy = [r for r in view(attribution, "energy").to_pylist() if r["scope"] in _ENERGY_SCOPES]
    made = {
        "frequency_clocks": _distribution(found, readings, reference),
        "frequency_power": _power(readings, reference),
        "frequency_steps": _steps(steps, story),
    }
    return Frequency(
        _lead(attribution, story, found, steps, reference),
        _facts(attribution, story, found, steps, readings, reference, energy),
        _kernel_rows(attribution, story),
        [_episode(e) for e in episodes.slice(0, _EPISODES).to_pylist()],
        max(episodes.num_rows - _EPISODES, 0),
        [_energy(row) for row in energy[:_ENERGY_ROWS]],
        max(len(energy) - _ENERGY_ROWS, 0),
        {name: figure for name, figure in made.items() if figure is not None},
        _missing(readings, steps, reference),
    )


def _missing(
    readings: list[_Readings], steps: list[dict[str, Any]], reference: float | None
) -> dict[str, str]:
    found = {}
    if not any(np.isfinite(r.power_w).any() for r in readings):
        found["frequency_power"] = "Power was not read beside the clocks."
    elif not any(np.isfinite(r.temperature_c).any() for r in readings):
        found["frequency_power"] = "Temperature was not read."
    if all(s["at_reference_ns"] is None for s in steps):
        found["frequency_steps"] = (
            "The clock at which the device's peak is quoted is not known."
            if steps and reference is None
            else "No kernel of a step lies within the readings."
        )
    return found


@dataclass(frozen=True)
class _Readings:
    """Readings of one rank's device with a clock; NaN where something was not read."""

    rank: int
    name: str
    time_ns: np.ndarray
    clock_hz: np.ndarray
    power_w: np.ndarray
    temperature_c: np.ndarray
    power_limit_w: float | None
    power_basis: str | None


def _readings(attribution: Attribution) -> list[_Readings]:
    found = []
    run = attribution.run
    labels = {r.rank: r.label for r in attribution.ranks}
    for rank in run.ranks:
        counters = dict(per_device(run, rank, "device_counter"))
        limits = dict(per_device(run, rank, "device_limit"))
        for number, clock in per_device(run, rank, "device_clock"):
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
            found.append(
                _Readings(
                    rank, name, time, hz[good], _real(clock, "power_w")[good], heat, limit, basis
                )
            )
    return found


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


def _reference(attribution: Attribution, found: Clocked | None) -> float | None:
    """Clock that most of the computing time is measured against."""
    if found is None:
        return None
    best: dict[float, int] = {}
    events = found.events
    for rank, factors in attribution.factors.items():
        mine = np.flatnonzero(events.rank[found.rows] == rank)
        hz = factors.reference_hz[events.row[found.rows[mine]]]
        for value in np.unique(hz[np.isfinite(hz)]).tolist():
            time_ns = int(found.time_ns[mine][hz == value].sum())
            best[value] = best.get(value, 0) + time_ns
    return max(best, key=lambda v: best[v]) if best else None


def _lead(
    attribution: Attribution,
    story: Story,
    found: Clocked | None,
    steps: list[dict[str, Any]],
    reference: float | None,
) -> str:
    if found is None:
        return "Clocks were sampled, but no kernel of a step lies within the readings."
    if reference is None:
        return (
            "The clock that the device's peak is quoted at is not known, so what the clock cost is "
            "not claimed; at which clock the time was spent is."
        )
    loss = sum(row.time_ns for row in attribution.leaves() if row.id.startswith("compute.clock."))
    judged = [s for s in steps if s["at_reference_ns"] is not None]
    if not loss or not judged:
        return f"No time was lost to a clock below the reference of {fmt.hertz(reference)}."
    observed = sum(s["observed_ns"] for s in judged) / len(judged)
    at_reference = sum(s["at_reference_ns"] for s in judged) / len(judged)
    left_out = len(steps) - len(judged)
    of = f", of {len(judged)} of {len(steps)} whose clock is known" if left_out else ""
    return (
        f"With its kernels at the reference clock of {fmt.hertz(reference)} and all else as it was, "
        f"a {story.unit} would take {fmt.duration(at_reference)} instead of "
        f"{fmt.duration(observed)}{of}. The clock's share beside the other causes is "
        f"{fmt.duration(loss / story.windows)}."
    )


def _facts(
    attribution: Attribution,
    story: Story,
    found: Clocked | None,
    steps: list[dict[str, Any]],
    readings: list[_Readings],
    reference: float | None,
    energy: list[dict[str, Any]],
) -> list[tuple[str, str, str]]:
    facts: list[tuple[str, str, str]] = []
    if found is not None:
        known = ~np.isnan(found.clock_hz)
        mean = float(np.average(found.clock_hz[known], weights=found.time_ns[known]))
        covered = float(found.time_ns[known].sum() / max(found.time_ns.sum(), 1))
        of = (
            f"{fmt.ratio(mean / reference)} of the reference" if reference else "no reference known"
        )
        facts.append(
            ("Clock while computing", fmt.hertz(mean), f"{of}; known of {fmt.ratio(covered)}")
        )
    judged = [s for s in steps if s["at_reference_ns"] is not None]
    if judged and reference:
        observed = sum(s["observed_ns"] for s in judged)
        saved = observed - sum(s["at_reference_ns"] for s in judged)
        facts.append(
            (
                f"{story.unit.capitalize()} at the reference clock",
                fmt.duration((observed - saved) / len(judged)),
                f"{fmt.ratio(saved / observed)} less than observed"
                if saved >= 0
                else "more: some ran above it",
            )
        )
    held = _held(attribution)
    if held:
        words = "; ".join(f"{n} {s}" for n, s in held)
        if [n for n, _ in held] == [label_of("unlabelled")]:
            facts.append(("Held down by", fmt.UNKNOWN, "no reasons were recorded"))
        else:
            facts.append(("Held down by", held[0][0], words))
    power = np.concatenate([r.power_w for r in readings]) if readings else np.zeros(0)
    if np.isfinite(power).any():
        limits = sorted({r.power_limit_w for r in readings if r.power_limit_w})
        words = f"highest {_watts(float(np.nanmax(power)))}"
        if limits:
            words += f", limit {' / '.join(_watts(v) for v in limits)}"
        bases = sorted({r.power_basis for r in readings if r.power_basis})
        words += f"; readings: {' / '.join(bases) or 'instant or averaged, not recorded which'}"
        facts.append(("Board power, mean", _watts(float(np.nanmean(power))), words))
    heat = np.concatenate([r.temperature_c for r in readings]) if readings else np.zeros(0)
    if np.isfinite(heat).any():
        facts.append(
            (
                "Temperature, highest",
                f"{np.nanmax(heat):.0f} °C",
                f"lowest {np.nanmin(heat):.0f} °C, mean {np.nanmean(heat):.0f} °C",
            )
        )
    facts += [_energy_fact(row, story) for row in energy[:1]]
    return facts


def _energy_fact(row: dict[str, Any], story: Story) -> tuple[str, str, str]:
    label = f"Energy per {story.unit}, {row['source']}"
    if row["energy_per_step_j"] is None:
        return label, fmt.UNKNOWN, row["reason"] or "no steps"
    words = f"± {fmt.joules(row['energy_error_j'] / max(row['step_count'], 1))}"
    if row["energy_per_token_j"] is not None:
        words = f"{fmt.joules(row['energy_per_token_j'])} per token; {words}"
    return label, fmt.joules(row["energy_per_step_j"]), words


def _watts(value: float) -> str:
    return f"{value:.0f} W"


def _held(attribution: Attribution) -> list[tuple[str, str]]:
    """Labels of the clock loss, largest first, with their shares of it."""
    rows = [r for r in attribution.leaves() if r.id.startswith("compute.clock.") and r.time_ns > 0]
    whole = sum(r.time_ns for r in rows)
    return [(r.label, fmt.ratio(r.time_ns / whole)) for r in rows]


def label_of(label: str) -> str:
    """Words for what held the clock."""
    return CAUSES[f"compute.clock.{label}"].label


@dataclass(frozen=True)
class _Row:
    """One ridge of the distribution."""

    name: str
    color: str
    clock_hz: np.ndarray
    weight: np.ndarray
    words: str


def _rows(found: Clocked | None, readings: list[_Readings]) -> list[_Row]:
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


def _distribution(
    found: Clocked | None, readings: list[_Readings], reference: float | None
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
        data.append(
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
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [round(mean * _GIGA, 4)],
                "y": [base],
                "marker": {"size": 8, "symbol": "diamond", "color": row.color},
                "hovertemplate": words + "<extra></extra>",
            }
        )
        notes.append(
            {
                "text": fmt.hertz(mean),
                "x": 1,
                "y": base + 0.28,
                "xref": "paper",
                "yref": "y",
                "xanchor": "left",
                "xshift": 10,
                "showarrow": False,
            }
        )
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


def _power(readings: list[_Readings], reference: float | None) -> Figure | None:
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
            _mark(layout, "x", limit, f"limit {_watts(limit)}")
    return {"data": data, "layout": layout}


def _steps(steps: list[dict[str, Any]], story: Story) -> Figure | None:
    """Each step as it would be at the reference clock, what the clock adds, and the clock."""
    steps = [s for s in steps if s["at_reference_ns"] is not None]
    if not steps:
        return None
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


def _kernel_rows(attribution: Attribution, story: Story) -> list[dict[str, Any]]:
    """Kernels that lost most; where nothing is lost, those furthest below the mean clock."""
    table = view(attribution, "clock_by_kernel")
    rows = [r for r in table.to_pylist() if r["clock_mean_hz"] is not None]
    whole = sum(r["time_ns"] for r in rows)
    if not rows or not whole:
        return []
    mean = sum(r["clock_mean_hz"] * r["time_ns"] for r in rows) / whole
    if any(r["loss_ns"] for r in rows):
        rows = [r for r in rows if r["loss_ns"]]
        rows.sort(key=lambda r: -r["loss_ns"])
    else:
        rows.sort(key=lambda r: (r["clock_mean_hz"] - mean) * r["time_ns"])
    most = max(rows[0]["loss_ns"] or 0, 1)
    return [
        {
            "kernel": fmt.kernel_name(r["kernel"]),
            "full": r["kernel"],
            "op": r["op"] or "no operator",
            "shapes": fmt.shapes(r["input_dims"]) if r["input_dims"] else "",
            "share": fmt.ratio(r["time_ns"] / whole),
            "clock": fmt.hertz(r["clock_mean_hz"]),
            "against": _percent(r["clock_mean_hz"] / mean - 1),
            "power": fmt.UNKNOWN if r["power_mean_w"] is None else _watts(r["power_mean_w"]),
            "depends": fmt.ratio(r["sensitivity_ratio"]),
            "held": _held_words(r),
            "lost": fmt.duration(None if r["loss_ns"] is None else r["loss_ns"] / story.windows),
            "width": round(100 * (r["loss_ns"] or 0) / most, 1),
        }
        for r in rows[:_KERNELS]
    ]


def _percent(change: float) -> str:
    """A change with its sign; one that rounds to none has none."""
    text = f"{100 * change:+.1f} %"
    return "0.0 %" if text[1:] == "0.0 %" else text.replace("-", "−")


def _held_words(row: dict[str, Any]) -> list[str]:
    """The two labels that held for most of a row's time; nothing where the clock was free."""
    unnamed = row["unlabelled_ratio"] or 0.0
    shares = [
        (
            unnamed if label == "unlabelled" else (row[f"{label}_ratio"] or 0.0) * (1 - unnamed),
            label,
        )
        for label in CLOCK_LABELS
    ]
    shares.sort(reverse=True)
    words = {"host_limited": "Nothing"}
    return [
        f"{words.get(n) or label_of(n)} {fmt.ratio(s)}" for s, n in shares[:2] if s >= 0.005
    ] or [fmt.UNKNOWN]


def _energy(row: dict[str, Any]) -> dict[str, Any]:
    joules = None
    if row["energy_j"] is not None:
        joules = fmt.joules(row["energy_j"])
        if row["energy_error_j"] is not None:
            joules += f" ± {fmt.joules(row['energy_error_j'])}"
    return {
        "of": row["phase"] or row["window"] or "whole run",
        "source": row["source"],
        "per_step": fmt.cell("energy_j", row["energy_per_step_j"]),
        "per_token": fmt.cell("energy_j", row["energy_per_token_j"]),
        "power": fmt.cell("power_w", row["power_mean_w"]),
        "energy": joules,
        "span": fmt.duration(row["span_ns"]),
        "reason": row["reason"],
    }


def _episode(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "rank": row["rank"],
        "reason": label_of(row["reason"]),
        "color": color(f"compute.clock.{row['reason']}"),
        "step": row["step"],
        "dur": fmt.duration(row["dur_ns"]),
        "clock": fmt.hertz(row["clock_mean_hz"]),
        "power": fmt.UNKNOWN if row["power_mean_w"] is None else _watts(row["power_mean_w"]),
        "count": fmt.count(row["kernel_count"]),
        "loss": fmt.duration(row["loss_ns"]),
        "kernels": (row["kernels"] or fmt.UNKNOWN).split("; "),
    }
