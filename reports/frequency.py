"""The section about clocks: time at each clock, what held it down, and what that cost.

Everything is a picture of the views of clocks and of the readings themselves; nothing is computed
here that they do not hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from chopper import wording as fmt
from chopper.analyzers.causes.clock import CLOCK_LABELS
from chopper.analyzers.events.clocked import clocked_of
from chopper.analyzers.events.device import events_of
from chopper.analyzers.trace.samples import per_device
from chopper.causes import CAUSES
from chopper.reports.figures import (
    bin_labels,
    bins,
    layout,
    note,
    plain,
    significant,
    stacked_steps,
)
from chopper.reports.labels import PHASES, color
from chopper.reports.page import BROWSER, Cell, Column, Fact, Facts, Figure, Section, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chopper.analyzers.attributed import Attributed
    from chopper.analyzers.events.clocked import Clocked
    from chopper.reports.page import Block
    from chopper.reports.story import Groupings, Story

_KERNELS = 12
_BINS = 56
_RIDGES = {"phase": 6, "operator": 8}
"""Phases and operators with a row of their own in the distribution."""
_MAX_LOGGED = 16
"""Devices of a log with a row of their own there."""
_DOTS = 1600
_LEAST_RATIO = 0.005
"""Operators below this share of the computing time are left to the tables."""
_BLUE, _ORANGE = "#3b7dd8", "#e07b1a"
_HEAT = [[0.0, _BLUE], [0.5, "#e3b71b"], [1.0, "#d1491b"]]


@dataclass(frozen=True, slots=True)
class Readings:
    """Readings of one rank's device with a clock; NaN where something was not read."""

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
            clock_hz = _numbers(clock, "sm_clock_hz")
            good = clock_hz > 0
            if good.sum() < 2:
                continue
            time_ns = clock["time_ns"].to_numpy()[good]
            heat_c = np.full(len(time_ns), np.nan)
            if number in counters:
                heat_c = _latest(counters[number], "temperature_c", time_ns)
            limit, basis = (
                limits[number][name][0].as_py() if number in limits else None
                for name in ("power_limit_w", "power_basis")
            )
            name = labels.get(rank, f"rank {rank}") if number is None else f"device {number}"
            power_w = _numbers(clock, "power_w")[good]
            readings.append(Readings(name, time_ns, clock_hz[good], power_w, heat_c, limit, basis))
    return readings


def _numbers(table: Any, name: str) -> np.ndarray:
    values: np.ndarray = table[name].to_numpy().astype(np.float64)
    return values


def _latest(table: Any, name: str, wanted_ns: np.ndarray) -> np.ndarray:
    """Return the last known value at each time; NaN before the first and long after the last."""
    value = _numbers(table, name)
    good = np.isfinite(value)
    time_ns, value = table["time_ns"].to_numpy()[good], value[good]
    if len(time_ns) < 2:
        return np.full(len(wanted_ns), np.nan)
    at = np.searchsorted(time_ns, wanted_ns, side="right") - 1
    old = wanted_ns - time_ns[np.maximum(at, 0)] > 4 * np.median(np.diff(time_ns))
    return np.where((at < 0) | old, np.nan, value[np.maximum(at, 0)])


def section(groupings: Groupings, story: Story) -> Section | None:
    """Return the section about the clocks of a run; None where none of a device was sampled."""
    run = groupings.run
    readings = readings_of(run)
    clocks = clocked_of(run, events_of(run))
    if clocks is not None and np.isnan(clocks.clock_hz).all():
        clocks = None
    if clocks is None and not readings:
        return None
    steps = groupings.table("clock_by_step").to_pylist() if clocks is not None else []
    judged = [s for s in steps if s["at_reference_ns"] is not None]
    reference_hz = _reference_hz(run, clocks)
    energy = [r for r in groupings.table("energy").to_pylist() if r["scope"] == "run"]
    facts = [
        *_clock_facts(run, story, clocks, judged, reference_hz),
        *_reading_facts(readings),
        *(_energy_fact(row, story) for row in energy[:1]),
    ]
    kernels = _kernels(groupings, story)
    return Section(
        title="Frequency",
        id="frequency",
        intro=_lead(run, story, clocks, judged, len(steps), reference_hz),
        blocks=(
            Facts(facts=facts, style="tiles"),
            *_figures(story, clocks, judged, readings, reference_hz),
            *([kernels] if kernels.rows else []),
        ),
        formats=BROWSER,
    )


def _reference_hz(run: Attributed, clocks: Clocked | None) -> float | None:
    """Return the clock that most of the computing time is measured against."""
    if clocks is None:
        return None
    time_by_hz: dict[float, int] = {}
    events = clocks.events
    for rank, factors in run.factors.items():
        mine = np.flatnonzero(events.rank[clocks.rows] == rank)
        hz = factors.reference_hz[events.row[clocks.rows[mine]]]
        for value in np.unique(hz[np.isfinite(hz)]).tolist():
            time_ns = int(clocks.time_ns[mine][hz == value].sum())
            time_by_hz[value] = time_by_hz.get(value, 0) + time_ns
    return max(time_by_hz, key=time_by_hz.__getitem__) if time_by_hz else None


def _lead(
    run: Attributed,
    story: Story,
    clocks: Clocked | None,
    judged: list[dict[str, Any]],
    steps_count: int,
    reference_hz: float | None,
) -> str:
    if clocks is None:
        return "Clocks were sampled, but no kernel of a step lies within the readings."
    if reference_hz is None:
        return (
            "The clock that the device's peak is quoted at is not known, so what the clock cost is "
            "not claimed; at which clock the time was spent is."
        )
    loss = sum(row.time_ns for row in run.leaves() if row.id.startswith("compute.clock."))
    if not loss or not judged:
        return f"No time was lost to a clock below the reference of {fmt.hertz(reference_hz)}."
    observed = sum(s["observed_ns"] for s in judged) / len(judged)
    at_reference = sum(s["at_reference_ns"] for s in judged) / len(judged)
    few = f", of {len(judged)} of {steps_count} whose clock is known"
    of = few if len(judged) < steps_count else ""
    return (
        f"With its kernels at the reference clock of {fmt.hertz(reference_hz)} and all else as it "
        f"was, a {story.unit} would take {fmt.duration(at_reference)} instead of "
        f"{fmt.duration(observed)}{of}. The clock's share beside the other causes is "
        f"{fmt.duration(loss / story.windows)}."
    )


def _clock_facts(
    run: Attributed,
    story: Story,
    clocks: Clocked | None,
    judged: list[dict[str, Any]],
    reference_hz: float | None,
) -> Iterator[Fact]:
    if clocks is not None:
        known = ~np.isnan(clocks.clock_hz)
        mean_hz = float(np.average(clocks.clock_hz[known], weights=clocks.time_ns[known]))
        covered = float(clocks.time_ns[known].sum() / max(clocks.time_ns.sum(), 1))
        of = "reference unknown"
        if reference_hz:
            of = f"{fmt.ratio(mean_hz / reference_hz)} of the reference"
        note = f"{of}; known for {fmt.ratio(covered)} of the time"
        yield Fact(label="Clock while computing", value=fmt.hertz(mean_hz), note=note)
    if judged and reference_hz:
        observed = sum(s["observed_ns"] for s in judged)
        at_reference = sum(s["at_reference_ns"] for s in judged)
        note = f"{fmt.ratio(1 - at_reference / observed)} less than observed"
        yield Fact(
            label=f"{story.unit.capitalize()} at the reference clock",
            value=fmt.duration(at_reference / len(judged)),
            note=note if observed >= at_reference else "more: some ran above it",
        )
    held = [r for r in run.leaves() if r.id.startswith("compute.clock.") and r.time_ns > 0]
    if [row.id for row in held] == ["compute.clock.unlabelled"]:
        yield Fact(label="Held down by", value=fmt.UNKNOWN, note="no reasons were recorded")
    elif held:
        whole = sum(row.time_ns for row in held)
        words = "; ".join(f"{row.label} {fmt.ratio(row.time_ns / whole)}" for row in held)
        yield Fact(label="Held down by", value=held[0].label, note=words)


def _reading_facts(readings: list[Readings]) -> Iterator[Fact]:
    """Yield what was read beside the clocks: power and temperature."""
    power_w = np.concatenate([np.zeros(0), *(r.power_w for r in readings)])
    if np.isfinite(power_w).any():
        note = f"highest {_watts(float(np.nanmax(power_w)))}"
        limits = sorted({r.power_limit_w for r in readings if r.power_limit_w})
        if limits:
            note += f", limit {' / '.join(map(_watts, limits))}"
        bases = sorted({r.power_basis for r in readings if r.power_basis})
        note += f"; readings: {' / '.join(bases) or 'instant or averaged, not recorded which'}"
        yield Fact(label="Board power, mean", value=_watts(float(np.nanmean(power_w))), note=note)
    heat_c = np.concatenate([np.zeros(0), *(r.temperature_c for r in readings)])
    if np.isfinite(heat_c).any():
        note = f"lowest {np.nanmin(heat_c):.0f} °C, mean {np.nanmean(heat_c):.0f} °C"
        yield Fact(label="Temperature, highest", value=f"{np.nanmax(heat_c):.0f} °C", note=note)


def _watts(power_w: float) -> str:
    return f"{power_w:.0f} W"


def _energy_fact(row: dict[str, Any], story: Story) -> Fact:
    label = f"Energy per {story.unit}, {row['source']}"
    if row["energy_per_step_j"] is None:
        return Fact(label=label, value=fmt.UNKNOWN, note=row["reason"] or "no steps")
    words = f"± {fmt.joules(row['energy_error_j'] / max(row['step_count'], 1))}"
    if row["energy_per_token_j"] is not None:
        words = f"{fmt.joules(row['energy_per_token_j'])} per token; {words}"
    return Fact(label=label, value=fmt.joules(row["energy_per_step_j"]), note=words)


def _kernels(groupings: Groupings, story: Story) -> Table:
    """Show the kernels that lost most to the clock."""
    rows = [r for r in groupings.table("clock_by_kernel").to_pylist() if r["loss_ns"]]
    rows.sort(key=lambda r: -r["loss_ns"])
    return Table(
        title="Kernels that pull the clock down",
        columns=(
            *("Kernel", f"Lost per {story.unit}", "Clock"),
            Column("Held by, share of its time", kind="prose"),
            Column("Depends", hint="How much of a change of the clock its duration follows"),
            Column("Board power", hint="Of the whole board while it ran: never one kernel's own"),
        ),
        rows=[
            (
                Cell(
                    text=fmt.kernel_name(r["kernel"]),
                    hint=r["kernel"],
                    below=(r["op"] or "no operator")
                    + (f" · {fmt.shapes(r['input_dims'])}" if r["input_dims"] else ""),
                ),
                Cell(
                    text=fmt.duration(r["loss_ns"] / story.windows),
                    share_ratio=r["loss_ns"] / rows[0]["loss_ns"],
                    color=color("compute.clock"),
                ),
                fmt.hertz(r["clock_mean_hz"]),
                "; ".join(_held_words(r)) or fmt.UNKNOWN,
                fmt.ratio(r["sensitivity_ratio"]),
                fmt.UNKNOWN if r["power_mean_w"] is None else _watts(r["power_mean_w"]),
            )
            for r in rows[:_KERNELS]
        ],
    )


def _held_words(row: dict[str, Any]) -> list[str]:
    """Return the two labels that held for most of a row's time."""
    unnamed = row["unlabelled_ratio"] or 0.0
    share = {label: (row[f"{label}_ratio"] or 0.0) * (1 - unnamed) for label in CLOCK_LABELS}
    share["unlabelled"] = unnamed
    words = {label: CAUSES[f"compute.clock.{label}"].label for label in share}
    # Where the host is what limits, the clock was free.
    words["host_limited"] = "Nothing"
    most = sorted(share, key=lambda label: (share[label], label), reverse=True)[:2]
    return [f"{words[n]} {fmt.ratio(share[n])}" for n in most if share[n] >= _LEAST_RATIO]


def _figures(
    story: Story,
    clocks: Clocked | None,
    judged: list[dict[str, Any]],
    readings: list[Readings],
    reference_hz: float | None,
) -> Iterator[Block]:
    """Yield the figures; one that cannot be drawn says why."""
    ridges = list(_ridges(clocks, readings))
    rows = "by phase, then by operator" if judged else "over all readings"
    if ridges:
        yield Figure(
            name="frequency_clocks",
            title="At which clock the time was spent",
            figure=_distribution(ridges, reference_hz),
            note=f"Share of the computing time at each clock, {rows}; each ridge to its own "
            "height.",
            label="Distribution of the SM clock by phase and by operator",
        )
    note = "Green: at the reference clock. Blue: lost to the clock. Orange: mean clock."
    if not judged and clocks is not None and reference_hz is None:
        note = "The clock at which the device's peak is quoted is not known."
    elif not judged:
        note = "No kernel of a step lies within the readings."
    yield Figure(
        name="frequency_steps",
        title=f"What each {story.unit} would take at the reference clock",
        figure=_steps_at_reference(judged, story) if judged else {},
        note=note,
        half=True,
    )
    powered = [r for r in readings if np.isfinite(r.power_w).any()]
    note = "Power was not read beside the clocks."
    if powered:
        note = (
            "A dot is one reading. A wall at the power limit is a power cap; a slope with heat is "
            "thermal. "
        )
        if not any(np.isfinite(r.temperature_c).any() for r in readings):
            note += "Temperature was not read."
    yield Figure(
        name="frequency_power",
        title="Clock, power, temperature",
        figure=_power_and_heat(powered, reference_hz) if powered else {},
        note=note,
        label="SM clock against board power, coloured by temperature",
        half=True,
    )


@dataclass(frozen=True, slots=True)
class _Ridge:
    """One row of the distribution: readings of the clock, weighted by time."""

    name: str
    color: str
    clock_hz: np.ndarray
    weight: np.ndarray
    words: str = ""


def _ridges(clocks: Clocked | None, readings: list[Readings]) -> Iterator[_Ridge]:
    if clocks is None:
        for one in readings[:_MAX_LOGGED]:
            weight = np.diff(one.time_ns, append=one.time_ns[-1]).astype(np.float64)
            yield _Ridge(f"{one.name}, all readings", _BLUE, one.clock_hz, weight)
        return
    known = np.flatnonzero(~np.isnan(clocks.clock_hz))
    events, time_ns = clocks.events, clocks.time_ns[known]
    whole = max(int(time_ns.sum()), 1)
    for kind, (codes, names) in {"phase": events.phase, "operator": events.op}.items():
        of = codes[clocks.rows[known]]
        spent = np.bincount(of[of >= 0], weights=time_ns[of >= 0], minlength=len(names))
        for code in np.argsort(-spent)[: _RIDGES[kind]].tolist():
            if spent[code] >= _LEAST_RATIO * whole:
                mine = of == code
                words = f"{fmt.ratio(spent[code] / whole)} of the computing time<br>"
                tone = PHASES.get(names[code], "#98917f") if kind == "phase" else "#7d8aa5"
                clock_hz = clocks.clock_hz[known][mine]
                yield _Ridge(names[code], tone, clock_hz, time_ns[mine], words)


def _distribution(ridges: list[_Ridge], reference_hz: float | None) -> dict[str, Any]:
    """Return the share of time at each clock, a ridge per phase and per operator."""
    low = min(float(r.clock_hz.min()) for r in ridges)
    high = max(*(float(r.clock_hz.max()) for r in ridges), reference_hz or 0.0)
    room = max((high - low) * 0.03, 15e6)
    edges = np.linspace(low - room, high + room, _BINS + 1)
    places = range(len(ridges) - 1, -1, -1)
    drawn = [_drawn(ridge, at, edges) for ridge, at in zip(ridges, places, strict=True)]
    shown = layout(
        74 + 40 * len(ridges),
        8,
        78,
        annotations=[note for _, note in drawn],
        xaxis={
            "range": [float(edges[0] / 1e9), float(edges[-1] / 1e9)],
            "title": {"text": "SM clock, GHz; ◆ mean by time"},
        },
        yaxis={
            "range": [-0.25, len(ridges)],
            "tickvals": list(places),
            "ticktext": [plain(fmt.ellipsize(r.name, 40)) for r in ridges],
            "automargin": True,
            "zeroline": False,
            "ticks": "",
        },
    )
    if reference_hz is not None:
        _mark(shown, "x", reference_hz / 1e9, f"reference {fmt.hertz(reference_hz)}")
    return {"data": [trace for traces, _ in drawn for trace in traces], "layout": shown}


def _drawn(
    ridge: _Ridge, base: int, edges: np.ndarray
) -> tuple[tuple[dict[str, Any], dict[str, Any]], dict[str, Any]]:
    """Return the outline and the mean of a ridge, and the mean in words."""
    share, _ = np.histogram(ridge.clock_hz, edges, weights=ridge.weight)
    height = np.repeat(share / max(share.max(), 1e-12), 2)
    mean_hz = float(np.average(ridge.clock_hz, weights=ridge.weight))
    order = np.argsort(ridge.clock_hz, kind="stable")
    running = np.cumsum(ridge.weight[order].astype(np.float64))
    at = np.searchsorted(running, np.array([0.05, 0.5, 0.95]) * running[-1])
    p5, p50, p95 = ridge.clock_hz[order][np.minimum(at, len(order) - 1)].tolist()
    hover = (
        f"<b>{plain(ridge.name)}</b><br>{ridge.words}mean {fmt.hertz(mean_hz)}, median "
        f"{fmt.hertz(p50)}<br>90 % of the time {fmt.hertz(p5)} to {fmt.hertz(p95)}<extra></extra>"
    )
    outline = {
        "type": "scatter",
        "mode": "lines",
        "x": significant(np.repeat(edges, 2) / 1e9),
        "y": significant(base + 0.82 * np.concatenate([[0.0], height, [0.0]])),
        "fill": "toself",
        "fillcolor": ridge.color + "55",
        "line": {"width": 1.2, "color": ridge.color},
        "hoverinfo": "skip",
    }
    diamond = {
        "type": "scatter",
        "mode": "markers",
        "x": significant([mean_hz / 1e9]),
        "y": [base],
        "marker": {"size": 8, "symbol": "diamond", "color": ridge.color},
        "hovertemplate": hover,
    }
    words = note(
        fmt.hertz(mean_hz), x=1, xref="paper", xanchor="left", xshift=10, y=base + 0.28, yref="y"
    )
    return (outline, diamond), words


def _mark(shown: dict[str, Any], axis: str, at: float, words: str) -> None:
    """Add a dashed line with words at its end to a layout."""
    along = "y" if axis == "x" else "x"
    refs = {f"{axis}ref": axis, f"{along}ref": "paper"}
    shown.setdefault("shapes", []).append(
        {
            "type": "line",
            "name": "mark",
            **refs,
            f"{axis}0": at,
            f"{axis}1": at,
            f"{along}0": 0,
            f"{along}1": 1,
            "line": {"width": 1.2, "dash": "dash", "color": "#8a8f98"},
        }
    )
    place = {axis: at, along: 1 if axis == "x" else 0}
    side = "right" if axis == "x" else "left"
    notes = shown.setdefault("annotations", [])
    notes.append(note(words, xanchor=side, yanchor="bottom", **refs, **place))


def _power_and_heat(readings: list[Readings], reference_hz: float | None) -> dict[str, Any]:
    """Return clock against power, coloured by temperature: a dot per reading, thinned evenly."""
    x: list[float] = []
    y: list[float] = []
    heat: list[float | None] = []
    text: list[str] = []
    for one in readings:
        good = np.flatnonzero(np.isfinite(one.power_w))
        count = min(max(_DOTS // len(readings), 40), len(good))
        good = good[np.linspace(0, len(good) - 1, count).round().astype(np.int64)]
        x += significant(one.power_w[good])
        y += significant(one.clock_hz[good] / 1e9)
        heat_c = one.temperature_c[good].tolist()
        heat += [None if np.isnan(h) else round(h, 1) for h in heat_c]
        text += [plain(one.name) + ("" if np.isnan(h) else f", {h:.0f} °C") for h in heat_c]
    marker: dict[str, Any] = {"size": 6, "opacity": 0.6, "line": {"width": 0}, "color": _BLUE}
    known = [h for h in heat if h is not None]
    if known:
        bar = {"title": {"text": "°C", "side": "top"}, "thickness": 10, "outlinewidth": 0}
        marker |= {"color": heat, "colorscale": _HEAT, "showscale": True, "colorbar": bar}
        marker |= {"cmin": min(known) - 0.5, "cmax": max(known) + 0.5}
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": x,
        "y": y,
        "text": text,
        "marker": marker,
        "hovertemplate": "%{y:.3f} GHz at %{x:.0f} W<br>%{text}<extra></extra>",
    }
    shown = layout(
        360,
        60,
        8,
        xaxis={"title": {"text": "board power, W"}},
        yaxis={"title": {"text": "SM clock, GHz"}},
    )
    if reference_hz is not None:
        _mark(shown, "y", reference_hz / 1e9, f"reference {fmt.hertz(reference_hz)}")
    limits = {r.power_limit_w for r in readings if r.power_limit_w}
    if len(limits) == 1 and max(limits) < 1.5 * max(x):
        _mark(shown, "x", max(limits), f"limit {_watts(max(limits))}")
    return {"data": [trace], "layout": shown}


def _steps_at_reference(steps: list[dict[str, Any]], story: Story) -> dict[str, Any]:
    """Return each step at the reference clock, what the clock adds to it, and the clock."""
    by_number: dict[int | None, list[dict[str, Any]]] = {}
    for step in steps:
        by_number.setdefault(step["number"], []).append(step)
    columns = ("observed_ns", "at_reference_ns", "clock_mean_hz")
    # A mean over the ranks of each step, then over the steps of each bin; NaN for no clock.
    means = [
        [np.mean([s[c] for s in same if s[c] is not None] or [np.nan]) for c in columns]
        for same in by_number.values()
    ]
    edges = bins(len(means))
    counts = np.diff(edges)[:, None]
    observed, reference, clock = (np.add.reduceat(np.array(means), edges[:-1]) / counts).T
    names = ["whole trace" if number is None else str(number) for number in by_number]
    x = bin_labels(names, edges)
    hover = [
        f"observed {fmt.duration(o)}<br>at the reference clock {fmt.duration(r)}<extra></extra>"
        for o, r in zip(observed.tolist(), reference.tolist(), strict=True)
    ]
    bar = {"type": "bar", "x": x, "hovertemplate": hover}
    clock_line = {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= 60 else "lines",
        "name": "mean clock",
        "x": x,
        "y": [None if np.isnan(c) else round(c / 1e9, 4) for c in clock.tolist()],
        "yaxis": "y2",
        "line": {"width": 1.8, "color": _ORANGE},
        "marker": {"size": 5},
        "hovertemplate": "mean clock %{y:.3f} GHz<extra></extra>",
    }
    data = [
        bar
        | {
            "name": "at the reference clock",
            "y": significant(np.minimum(observed, reference) / 1e9),
            "marker": {"color": color("compute.ideal"), "line": {"width": 0}},
        },
        bar
        | {
            "name": "lost to the clock",
            "y": significant(np.maximum(observed - reference, 0) / 1e9),
            "marker": {"color": color("compute.clock"), "line": {"width": 0}},
            "hovertemplate": None,
            "hoverinfo": "skip",
        },
        clock_line,
    ]
    shown = stacked_steps(story.unit, len(x), right=64)
    shown["yaxis2"] = {
        "title": {"text": "GHz"},
        "overlaying": "y",
        "side": "right",
        "showgrid": False,
        "rangemode": "tozero",
        # Else an overlaying axis has its ticks where the other one has them.
        "tickmode": "auto",
        "nticks": 6,
        "tickformat": ".2~f",
    }
    return {"data": data, "layout": shown}
