"""The section about clocks: time at each clock, what held it down, and what that cost.

It draws the view ``clocks`` and the samples themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow.compute as pc

from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.clock import CLOCK_LABELS
from chopper.analyzers.events.device import Clocked, clocked_of, events_of
from chopper.analyzers.trace.samples import per_device
from chopper.causes import CAUSES
from chopper.reports.figures import (
    layout,
    mark,
    plain,
    significant,
)
from chopper.reports.labels import color
from chopper.reports.page import BROWSER, Block, Cell, Column, Fact, Facts, Figure, Section, Table
from chopper.reports.series import Series
from chopper.reports.story import Story

_KERNELS = 12
_BINS = 56
_MOST = {"phase": 6, "op": 8}
"""Phases and operators with a row of their own in the distribution."""
_MAX_LOGGED = 16
"""Devices of a log with a row of their own there."""
_DOTS = 1600
_LEAST_RATIO = 0.005
"""Operators below this share of the computing time are left to the tables."""
_BLUE, _ORANGE = "#3b7dd8", "#e07b1a"
_HEAT = [[0.0, _BLUE], [0.5, "#e3b71b"], [1.0, "#d1491b"]]


class Readings(NamedTuple):
    """Readings of one device with a clock; NaN where something was not read."""

    name: str
    time_ns: np.ndarray
    clock_hz: np.ndarray
    power_w: np.ndarray
    temperature_c: np.ndarray


class _Clocks(msgspec.Struct, frozen=True):
    """Clocks of a run, as far as they are known.

    Attributes:
        story: of the run.
        clocked: its computing events with a clock; None where no clock of any is known.
        readings: of each rank's device, or of each in a log; with a clock at two times at least.
        limits: rows of the table of the devices' limits.
        steps, judged: rows of the view of steps, and those whose clock is known.
        reference_hz: the clock that most of the computing time is measured against.
    """

    story: Story
    clocked: Clocked | None
    readings: list[Readings]
    limits: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    judged: list[dict[str, Any]]
    reference_hz: float | None

    def step_ns(self, name: str) -> float:
        """Return the mean of a time of the steps that are judged."""
        return float(np.mean([step[name] for step in self.judged]))

    def lost(self) -> dict[str, int]:
        """Return what each reason took by the clock, the most first."""
        rows = self.story.run.leaves()
        return {
            r.id: r.time_ns for r in rows if r.id.startswith("compute.clock.") and r.time_ns > 0
        }


def readings(telemetry: Sequence[Series]) -> Iterator[Readings]:
    """Yield the samples of each device that has clocks."""
    panels = {(one.panel, one.label): one for one in telemetry}
    for clock in telemetry:
        good = clock.value > 0
        if clock.panel != "SM clock" or good.sum() < 2:
            continue
        time_ns, unknown = clock.time_ns[good], np.full(good.sum(), np.nan)
        power = panels.get(("Board power", clock.label))
        heat = panels.get(("Temperature", clock.label))
        heat_c = unknown
        if heat is not None:
            read = np.isfinite(heat.value)
            outside = {"left": np.nan, "right": np.nan}
            heat_c = np.interp(time_ns, heat.time_ns[read], heat.value[read], **outside)
        # Clock and power are columns of one table.
        power_w = unknown if power is None else power.value[good]
        yield Readings(clock.label, time_ns, clock.value[good], power_w, heat_c)


def section(story: Story, readings: list[Readings]) -> Section | None:
    """Return the section about the clocks of a run; None where none of a device was sampled."""
    run = story.run
    clocked = clocked_of(run, events_of(run))
    if clocked is not None and np.isnan(clocked.clock_hz).all():
        clocked = None
    if clocked is None and not readings:
        return None
    steps = _rows_of(story, "step") if clocked is not None else []
    clocks = _Clocks(
        story=story,
        clocked=clocked,
        readings=readings,
        limits=[
            row
            for rank in run.recording.ranks
            for _, table in per_device(run.recording, rank, "device_limit")
            for row in table.slice(0, 1).to_pylist()
        ],
        steps=steps,
        judged=[s for s in steps if s["at_reference_ns"] is not None],
        reference_hz=None if clocked is None else _reference_hz(run, clocked),
    )
    energy = [r for r in story.table("energy").to_pylist() if r["scope"] == "run"]
    facts = [
        *_clock_facts(clocks),
        *_reading_facts(clocks),
        *(_energy_fact(row, story) for row in energy[:1]),
    ]
    return Section(
        title="Clocks",
        id="clocks",
        intro=_lead(clocks),
        blocks=(Facts(facts=facts, style="tiles"), *_figures(clocks), *_kernels(story)),
        formats=BROWSER,
    )


def _rows_of(story: Story, level: str) -> list[dict[str, Any]]:
    """Return the rows of the view ``clocks`` of one level."""
    rows: list[dict[str, Any]] = (
        story.table("clocks").filter(pc.field("level") == level).to_pylist()
    )
    return rows


def _reference_hz(run: Attribution, clocked: Clocked) -> float | None:
    events = clocked.events
    reference_hz = np.full(len(clocked.rows), np.nan)
    for rank, factors in run.factors.items():
        mine = np.flatnonzero(events.rank[clocked.rows] == rank)
        reference_hz[mine] = factors.reference_hz[events.row[clocked.rows[mine]]]
    known = np.isfinite(reference_hz)
    values, of = np.unique(reference_hz[known], return_inverse=True)
    time_ns = np.bincount(of, clocked.time_ns[known])
    return float(values[time_ns.argmax()]) if len(values) else None


def _lead(clocks: _Clocks) -> str:
    if clocks.clocked is None:
        return "Clocks were sampled, but no kernel of a step lies within the samples."
    if clocks.reference_hz is None:
        return (
            "The reference clock of the device's peak is unknown, so time lost to the clock is "
            "withheld; the distribution of clocks is shown."
        )
    reference = fmt.hertz(clocks.reference_hz)
    lost_ns = sum(clocks.lost().values())
    if not lost_ns or not clocks.judged:
        return f"No time was lost to a clock below the reference of {reference}."
    few = ""
    if len(clocks.judged) < len(clocks.steps):
        few = f", for {len(clocks.judged)} of {len(clocks.steps)} with a known clock"
    return (
        f"With all kernels at the reference clock of {reference} and everything else unchanged, "
        f"a {clocks.story.unit} would take {fmt.duration(clocks.step_ns('at_reference_ns'))} "
        f"instead of {fmt.duration(clocks.step_ns('observed_ns'))}{few}. "
        "The clock's share alongside the other causes is "
        f"{fmt.duration(lost_ns / clocks.story.windows)}."
    )


def _clock_facts(clocks: _Clocks) -> Iterator[Fact]:
    clocked = clocks.clocked
    if clocked is not None:
        known = ~np.isnan(clocked.clock_hz)
        mean_hz = float(np.average(clocked.clock_hz[known], weights=clocked.time_ns[known]))
        covered = float(clocked.time_ns[known].sum() / max(clocked.time_ns.sum(), 1))
        of = "reference unknown"
        if clocks.reference_hz:
            of = f"{fmt.ratio(mean_hz / clocks.reference_hz)} of the reference"
        words = f"{of}; known for {fmt.ratio(covered)} of the time"
        yield Fact(label="Clock while computing", value=fmt.hertz(mean_hz), note=words)
    lost = clocks.lost()
    if [*lost] == ["compute.clock.unlabelled"]:
        yield Fact(label="Clock limited by", value=fmt.UNKNOWN, note="no reasons were recorded")
    elif lost:
        label = {cause: CAUSES[cause].label for cause in lost}
        whole_ns = sum(lost.values())
        words = "; ".join(f"{label[c]} {fmt.ratio(ns / whole_ns)}" for c, ns in lost.items())
        yield Fact(label="Clock limited by", value=next(iter(label.values())), note=words)


def _reading_facts(clocks: _Clocks) -> Iterator[Fact]:
    """Yield tiles of power and temperature."""
    power_w = np.concatenate([np.zeros(0), *(r.power_w for r in clocks.readings)])
    if np.isfinite(power_w).any():
        limits = sorted({r["power_limit_w"] for r in clocks.limits if r["power_limit_w"]})
        limit = f", limit {' / '.join(map(_watts, limits))}" if limits else ""
        bases = sorted({r["power_basis"] for r in clocks.limits if r["power_basis"]})
        basis = " / ".join(bases) or "instant or averaged, not recorded which"
        words = f"max {_watts(np.nanmax(power_w))}{limit}; samples: {basis}"
        yield Fact(label="Board power, mean", value=_watts(np.nanmean(power_w)), note=words)
    heat_c = np.concatenate([np.zeros(0), *(r.temperature_c for r in clocks.readings)])
    if np.isfinite(heat_c).any():
        words = f"min {np.nanmin(heat_c):.0f} °C, mean {np.nanmean(heat_c):.0f} °C"
        yield Fact(label="Temperature, max", value=f"{np.nanmax(heat_c):.0f} °C", note=words)


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


def _kernels(story: Story) -> list[Block]:
    """Show the kernels that lost most to the clock."""
    rows = [r for r in _rows_of(story, "kernel") if r["loss_ns"]]
    rows.sort(key=lambda r: -r["loss_ns"])
    table = Table(
        title="Kernels that lower the clock",
        columns=(
            *("Kernel", f"Lost per {story.unit}", "Clock"),
            Column("Limited by, share of its time", kind="prose"),
            Column(
                "Sensitivity",
                hint="How strongly its duration depends on the clock (1: inversely proportional)",
            ),
            Column(
                "Board power", hint="Power of the whole board while it ran, not of the kernel alone"
            ),
        ),
        rows=[
            (
                Cell(
                    text=fmt.kernel_name(r["name"]),
                    hint=r["name"],
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
    return [table] if rows else []


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


def _figures(clocks: _Clocks) -> Iterator[Block]:
    """Yield the figures; one that cannot be drawn says why."""
    rows = [*_rows(clocks)]
    by = "by phase, then by operator" if clocks.judged else "over all readings"
    if rows:
        yield Figure(
            name="clocks_distribution",
            title="Time by SM clock",
            figure=_distribution(rows, clocks.reference_hz),
            note=f"Share of the compute time at each clock, {by}; the darkest cell is each row's "
            "largest.",
            label="Distribution of the SM clock by phase and by operator",
        )
    powered = [r for r in clocks.readings if np.isfinite(r.power_w).any()]
    words = "Power was not sampled together with the clocks."
    if powered:
        words = (
            "Each dot is one sample. A wall at the power limit indicates a power cap; a slope "
            "with temperature indicates thermal throttling. "
        )
        if not any(np.isfinite(r.temperature_c).any() for r in clocks.readings):
            words += "Temperature was not sampled."
    yield Figure(
        name="clocks_power",
        title="Clock, power, temperature",
        figure=_power_and_heat(clocks, powered) if powered else {},
        note=words,
        label="SM clock against board power, coloured by temperature",
    )


class _Row(NamedTuple):
    """One row of the distribution: readings of the clock, weighted by time."""

    name: str
    clock_hz: np.ndarray
    weight: np.ndarray
    words: str = ""


def _rows(clocks: _Clocks) -> Iterator[_Row]:
    clocked = clocks.clocked
    if clocked is None:
        for one in clocks.readings[:_MAX_LOGGED]:
            weight = np.diff(one.time_ns, append=one.time_ns[-1]).astype(np.float64)
            yield _Row(f"{one.name}, all samples", one.clock_hz, weight)
        return
    known = np.flatnonzero(~np.isnan(clocked.clock_hz))
    time_ns, clock_hz = clocked.time_ns[known].astype(np.float64), clocked.clock_hz[known]
    total_ns = max(time_ns.sum(), 1)
    for column, most in _MOST.items():
        codes, names = clocked.texts(column)
        of = codes[known]
        spent = np.bincount(of[of >= 0], weights=time_ns[of >= 0], minlength=len(names))
        for code in np.argsort(-spent)[:most].tolist():
            if spent[code] >= _LEAST_RATIO * total_ns:
                words = f"{fmt.ratio(spent[code] / total_ns)} of the computing time<br>"
                yield _Row(names[code], clock_hz[of == code], time_ns[of == code], words)


def _distribution(rows: list[_Row], reference_hz: float | None) -> dict[str, Any]:
    """Return the share of time at each clock, a row per phase and per operator, and its mean."""
    low = min(float(r.clock_hz.min()) for r in rows)
    high = max(*(float(r.clock_hz.max()) for r in rows), reference_hz or 0.0)
    room = max((high - low) * 0.03, 15e6)
    edges = np.linspace(low - room, high + room, _BINS + 1)
    shares, means, hover = [], [], []
    for row in rows:
        share, _ = np.histogram(row.clock_hz, edges, weights=row.weight)
        shares.append(significant(share / max(share.max(), 1e-12)))
        means.append(float(np.average(row.clock_hz, weights=row.weight)))
        order = np.argsort(row.clock_hz, kind="stable")
        running = np.cumsum(row.weight[order])
        at = np.searchsorted(running, np.array([0.05, 0.5, 0.95]) * running[-1])
        p5, p50, p95 = map(fmt.hertz, row.clock_hz[order][np.minimum(at, len(order) - 1)].tolist())
        hover.append(
            f"<b>{plain(row.name)}</b><br>{row.words}mean {fmt.hertz(means[-1])}, median {p50}<br>"
            f"90 % of the time {p5} to {p95}"
        )
    base = list(range(len(rows)))
    heat = {
        "type": "heatmap",
        "x": significant(edges / 1e9),
        "y": base,
        "z": shares,
        "text": [[words] * _BINS for words in hover],
        "colorscale": [[0, _BLUE + "00"], [1, _BLUE]],
        "showscale": False,
        "ygap": 4,
        "hovertemplate": "%{text}<extra></extra>",
    }
    diamonds = {
        "type": "scatter",
        "mode": "markers",
        "x": significant(mean / 1e9 for mean in means),
        "y": base,
        "marker": {"size": 8, "symbol": "diamond", "color": _ORANGE},
        "hoverinfo": "skip",
    }
    figure_layout = layout(
        74 + 30 * len(rows),
        8,
        8,
        xaxis={"title": {"text": "SM clock, GHz; ◆ mean by time"}},
        yaxis={
            "autorange": "reversed",
            "tickvals": base,
            "ticktext": [plain(fmt.ellipsize(r.name, 40)) for r in rows],
            "automargin": True,
            "showgrid": False,
            "zeroline": False,
            "ticks": "",
        },
    )
    if reference_hz is not None:
        mark(figure_layout, "x", reference_hz / 1e9, f"reference {fmt.hertz(reference_hz)}")
    return {"data": [heat, diamonds], "layout": figure_layout}


def _power_and_heat(clocks: _Clocks, readings: list[Readings]) -> dict[str, Any]:
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
    figure_layout = layout(
        360,
        60,
        8,
        xaxis={"title": {"text": "board power, W"}},
        yaxis={"title": {"text": "SM clock, GHz"}},
    )
    if clocks.reference_hz is not None:
        mark(
            figure_layout,
            "y",
            clocks.reference_hz / 1e9,
            f"reference {fmt.hertz(clocks.reference_hz)}",
        )
    limits = {r["power_limit_w"] for r in clocks.limits if r["power_limit_w"]}
    if len(limits) == 1 and max(limits) < 1.5 * max(x):
        mark(figure_layout, "x", max(limits), f"limit {_watts(max(limits))}")
    return {"data": [trace], "layout": figure_layout}
