"""The section about clocks: time at each clock, what held it down, and what that cost.

Everything is a picture of the views of clocks and of the readings themselves; nothing is computed
here that they do not hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from chopper import wording as fmt
from chopper.analyzers.causes.clock import CLOCK_LABELS
from chopper.analyzers.events.clocked import clocked_of
from chopper.analyzers.events.device import events_of
from chopper.causes import CAUSES
from chopper.reports.frequency_figures import (
    Readings,
    distribution,
    power_and_heat,
    readings_of,
    steps_at_reference,
    watts,
)
from chopper.reports.labels import sentence
from chopper.reports.page import BROWSER, Cell, Column, Fact, Facts, Figure, Section, Table
from chopper.reports.palette import color

if TYPE_CHECKING:
    from chopper.analyzers.attributed import Attributed
    from chopper.analyzers.events.clocked import Clocked
    from chopper.reports.page import Block
    from chopper.reports.story import Groupings, Story

_KERNELS = 12
_EPISODES = 6
_ENERGY_ROWS = 12
_ENERGY_SCOPES = ("run", "phase", "window")


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
    reference = _reference(run, clocks)
    energy = [r for r in groupings.table("energy").to_pylist() if r["scope"] in _ENERGY_SCOPES]
    facts = [
        *_clock_facts(run, story, clocks, steps, reference),
        *_reading_facts(readings),
        *(_energy_fact(row, story) for row in energy[:1]),
    ]
    tables = (_kernels(groupings, story), _episodes(groupings), _energy(energy, story))
    return Section(
        title="Frequency",
        id="frequency",
        intro=_lead(run, story, clocks, steps, reference),
        blocks=(
            Facts(facts=facts, style="tiles"),
            *_figures(story, clocks, steps, readings, reference),
            *(table for table in tables if table.rows),
        ),
        formats=BROWSER,
    )


def _figures(
    story: Story,
    clocks: Clocked | None,
    steps: list[dict[str, Any]],
    readings: list[Readings],
    reference: float | None,
) -> list[Block]:
    """Return the figures; one that cannot be drawn says why."""
    missing = _missing(readings, steps, reference)
    by_step = steps_at_reference(steps, story)
    power = power_and_heat(readings, reference)
    ridges = distribution(clocks, readings, reference)
    rows = "by phase, then by operator" if by_step is not None else "over all readings"
    scatter = (
        "A dot is one reading. A wall at the power limit is a power cap; a slope with heat "
        "is thermal. "
    )
    blocks: list[Block] = []
    if ridges is not None:
        blocks.append(
            Figure(
                name="frequency_clocks",
                title="At which clock the time was spent",
                figure=ridges,
                note=f"Share of the computing time at each clock, {rows}; each ridge to its own "
                "height.",
                label="Distribution of the SM clock by phase and by operator",
            )
        )
    return [
        *blocks,
        Figure(
            name="frequency_steps",
            title=f"What each {story.unit} would take at the reference clock",
            figure=by_step or {},
            note="Green: at the reference clock. Blue: lost to the clock. Orange: mean clock."
            if by_step is not None
            else missing.get("frequency_steps", ""),
            half=True,
        ),
        Figure(
            name="frequency_power",
            title="Clock, power, temperature",
            figure=power or {},
            note=(scatter if power is not None else "") + missing.get("frequency_power", ""),
            label="SM clock against board power, coloured by temperature",
            half=True,
        ),
    ]


def _missing(
    readings: list[Readings], steps: list[dict[str, Any]], reference: float | None
) -> dict[str, str]:
    missing = {}
    if not any(np.isfinite(r.power_w).any() for r in readings):
        missing["frequency_power"] = "Power was not read beside the clocks."
    elif not any(np.isfinite(r.temperature_c).any() for r in readings):
        missing["frequency_power"] = "Temperature was not read."
    if all(s["at_reference_ns"] is None for s in steps):
        missing["frequency_steps"] = (
            "The clock at which the device's peak is quoted is not known."
            if steps and reference is None
            else "No kernel of a step lies within the readings."
        )
    return missing


def _reference(run: Attributed, clocks: Clocked | None) -> float | None:
    """Clock that most of the computing time is measured against."""
    if clocks is None:
        return None
    best: dict[float, int] = {}
    events = clocks.events
    for rank, factors in run.factors.items():
        mine = np.flatnonzero(events.rank[clocks.rows] == rank)
        hz = factors.reference_hz[events.row[clocks.rows[mine]]]
        for value in np.unique(hz[np.isfinite(hz)]).tolist():
            time_ns = int(clocks.time_ns[mine][hz == value].sum())
            best[value] = best.get(value, 0) + time_ns
    return max(best, key=lambda v: best[v]) if best else None


def _lead(
    run: Attributed,
    story: Story,
    clocks: Clocked | None,
    steps: list[dict[str, Any]],
    reference: float | None,
) -> str:
    if clocks is None:
        return "Clocks were sampled, but no kernel of a step lies within the readings."
    if reference is None:
        return (
            "The clock that the device's peak is quoted at is not known, so what the clock cost is "
            "not claimed; at which clock the time was spent is."
        )
    loss = sum(row.time_ns for row in run.leaves() if row.id.startswith("compute.clock."))
    judged = [s for s in steps if s["at_reference_ns"] is not None]
    if not loss or not judged:
        return f"No time was lost to a clock below the reference of {fmt.hertz(reference)}."
    observed = sum(s["observed_ns"] for s in judged) / len(judged)
    at_reference = sum(s["at_reference_ns"] for s in judged) / len(judged)
    left_out = len(steps) - len(judged)
    of = f", of {len(judged)} of {len(steps)} whose clock is known" if left_out else ""
    return (
        f"With its kernels at the reference clock of {fmt.hertz(reference)} and all else as it "
        f"was, a {story.unit} would take {fmt.duration(at_reference)} instead of "
        f"{fmt.duration(observed)}{of}. The clock's share beside the other causes is "
        f"{fmt.duration(loss / story.windows)}."
    )


def _clock_facts(
    run: Attributed,
    story: Story,
    clocks: Clocked | None,
    steps: list[dict[str, Any]],
    reference: float | None,
) -> list[Fact]:
    facts = []
    if clocks is not None:
        known = ~np.isnan(clocks.clock_hz)
        mean = float(np.average(clocks.clock_hz[known], weights=clocks.time_ns[known]))
        covered = float(clocks.time_ns[known].sum() / max(clocks.time_ns.sum(), 1))
        of = f"{fmt.ratio(mean / reference)} of the reference" if reference else "reference unknown"
        note = f"{of}; known for {fmt.ratio(covered)} of the time"
        facts.append(Fact(label="Clock while computing", value=fmt.hertz(mean), note=note))
    judged = [s for s in steps if s["at_reference_ns"] is not None]
    if judged and reference:
        observed = sum(s["observed_ns"] for s in judged)
        saved = observed - sum(s["at_reference_ns"] for s in judged)
        facts.append(
            Fact(
                label=f"{story.unit.capitalize()} at the reference clock",
                value=fmt.duration((observed - saved) / len(judged)),
                note=f"{fmt.ratio(saved / observed)} less than observed"
                if saved >= 0
                else "more: some ran above it",
            )
        )
    held = _held(run)
    if [label for label, _ in held] == [label_of("unlabelled")]:
        why = "no reasons were recorded"
        facts.append(Fact(label="Held down by", value=fmt.UNKNOWN, note=why))
    elif held:
        words = "; ".join(f"{label} {share}" for label, share in held)
        facts.append(Fact(label="Held down by", value=held[0][0], note=words))
    return facts


def _reading_facts(readings: list[Readings]) -> list[Fact]:
    """Return what was read beside the clocks: power and temperature."""
    facts = []
    power = np.concatenate([r.power_w for r in readings]) if readings else np.zeros(0)
    if np.isfinite(power).any():
        limits = sorted({r.power_limit_w for r in readings if r.power_limit_w})
        words = f"highest {watts(float(np.nanmax(power)))}"
        if limits:
            words += f", limit {' / '.join(watts(v) for v in limits)}"
        bases = sorted({r.power_basis for r in readings if r.power_basis})
        words += f"; readings: {' / '.join(bases) or 'instant or averaged, not recorded which'}"
        mean = watts(float(np.nanmean(power)))
        facts.append(Fact(label="Board power, mean", value=mean, note=words))
    heat = np.concatenate([r.temperature_c for r in readings]) if readings else np.zeros(0)
    if np.isfinite(heat).any():
        note = f"lowest {np.nanmin(heat):.0f} °C, mean {np.nanmean(heat):.0f} °C"
        highest = f"{np.nanmax(heat):.0f} °C"
        facts.append(Fact(label="Temperature, highest", value=highest, note=note))
    return facts


def _energy_fact(row: dict[str, Any], story: Story) -> Fact:
    label = f"Energy per {story.unit}, {row['source']}"
    if row["energy_per_step_j"] is None:
        return Fact(label=label, value=fmt.UNKNOWN, note=row["reason"] or "no steps")
    words = f"± {fmt.joules(row['energy_error_j'] / max(row['step_count'], 1))}"
    if row["energy_per_token_j"] is not None:
        words = f"{fmt.joules(row['energy_per_token_j'])} per token; {words}"
    return Fact(label=label, value=fmt.joules(row["energy_per_step_j"]), note=words)


def _held(run: Attributed) -> list[tuple[str, str]]:
    """Labels of the clock loss, largest first, with their shares of it."""
    rows = [r for r in run.leaves() if r.id.startswith("compute.clock.") and r.time_ns > 0]
    whole = sum(r.time_ns for r in rows)
    return [(r.label, fmt.ratio(r.time_ns / whole)) for r in rows]


def label_of(label: str) -> str:
    """Words for what held the clock."""
    return CAUSES[f"compute.clock.{label}"].label


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


def _kernels(groupings: Groupings, story: Story) -> Table:
    """Show kernels that lost most; where none did, those furthest below the mean clock."""
    rows = [
        r for r in groupings.table("clock_by_kernel").to_pylist() if r["clock_mean_hz"] is not None
    ]
    whole = sum(r["time_ns"] for r in rows)
    mean = sum(r["clock_mean_hz"] * r["time_ns"] for r in rows) / whole if whole else 0.0
    if any(r["loss_ns"] for r in rows):
        rows = sorted((r for r in rows if r["loss_ns"]), key=lambda r: -r["loss_ns"])
    else:
        rows.sort(key=lambda r: (r["clock_mean_hz"] - mean) * r["time_ns"])
    most = max((rows[0]["loss_ns"] or 0) if rows else 0, 1)
    return Table(
        title="Kernels that pull the clock down",
        columns=(
            *("Kernel", f"Lost per {story.unit}", "Clock"),
            Column("To the mean", hint="Against the mean clock of all computing time"),
            Column("Held by, share of its time", kind="prose"),
            Column("Depends", hint="How much of a change of the clock its duration follows"),
            Column("Board power", hint="Of the whole board while it ran: never one kernel's own"),
            "Of computing",
        ),
        rows=[
            (
                _kernel_cell(r),
                Cell(
                    text=fmt.duration(
                        None if r["loss_ns"] is None else r["loss_ns"] / story.windows
                    ),
                    share_ratio=(r["loss_ns"] or 0) / most,
                    color=color("compute.clock"),
                ),
                fmt.hertz(r["clock_mean_hz"]),
                _percent(r["clock_mean_hz"] / mean - 1),
                "; ".join(_held_words(r)),
                fmt.ratio(r["sensitivity_ratio"]),
                fmt.UNKNOWN if r["power_mean_w"] is None else watts(r["power_mean_w"]),
                fmt.ratio(r["time_ns"] / whole),
            )
            for r in rows[: _KERNELS if whole else 0]
        ],
    )


def _kernel_cell(row: dict[str, Any]) -> Cell:
    shapes = f" · {fmt.shapes(row['input_dims'])}" if row["input_dims"] else ""
    return Cell(
        text=fmt.kernel_name(row["kernel"]),
        hint=row["kernel"],
        below=f"{row['op'] or 'no operator'}{shapes}",
    )


def _episodes(groupings: Groupings) -> Table:
    episodes = groupings.table("throttle_episodes")
    several = len(groupings.run.ranks) > 1
    rows = [
        (
            Cell(
                text=label_of(e["reason"]),
                color=color(f"compute.clock.{e['reason']}"),
            ),
            *([str(e["rank"])] if several else []),
            fmt.duration(e["dur_ns"]),
            fmt.hertz(e["clock_mean_hz"]),
            fmt.UNKNOWN if e["power_mean_w"] is None else watts(e["power_mean_w"]),
            fmt.count(e["kernel_count"]),
            fmt.duration(e["loss_ns"]),
            e["kernels"] or fmt.UNKNOWN,
        )
        for e in episodes.slice(0, _EPISODES).to_pylist()
    ]
    more = episodes.num_rows - len(rows)
    return Table(
        title="Throttle episodes",
        columns=(
            *("Held by", *(["Rank"] if several else []), "Lasted", "Clock", "Power", "Kernels"),
            *("Lost", Column("Kernels that lost most", kind="prose")),
        ),
        rows=rows,
        rest=f"and {more} more, in the table “Throttle episodes”" if more else "",
    )


def _energy(energy: list[dict[str, Any]], story: Story) -> Table:
    rows = []
    for row in energy[:_ENERGY_ROWS]:
        joules = sentence(row["reason"] or "Unknown")
        if row["energy_j"] is not None:
            joules = fmt.joules(row["energy_j"])
            if row["energy_error_j"] is not None:
                joules += f" ± {fmt.joules(row['energy_error_j'])}"
        rows.append(
            (
                row["phase"] or row["window"] or "whole run",
                row["source"],
                fmt.cell("energy_j", row["energy_per_step_j"]),
                fmt.cell("energy_j", row["energy_per_token_j"]),
                fmt.cell("power_w", row["power_mean_w"]),
                fmt.duration(row["span_ns"]),
                Cell(text=joules, dim=row["energy_j"] is None),
            )
        )
    more = len(energy) - len(rows)
    return Table(
        title="Energy",
        columns=(
            *("Scope", "Source", f"Per {story.unit}", "Per token", "Mean power", "Over"),
            Column("Energy", kind="prose"),
        ),
        words=2,
        rows=rows,
        rest=f"and {more} more, in the table “Energy”" if more else "",
    )
