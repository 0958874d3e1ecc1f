"""The report's page about clocks: where time was spent at which clock, what held it, what it cost.

Everything is a picture of the views of clocks and of the readings themselves; nothing is computed
here that they do not hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from chopper import wording as fmt
from chopper.analyzers.causes.clock import CLOCK_LABELS
from chopper.analyzers.events.clocked import clocked_of
from chopper.analyzers.events.device import events_of
from chopper.causes import CAUSES
from chopper.reports.frequency_figures import (
    Figure,
    Readings,
    distribution,
    power_and_heat,
    readings_of,
    steps_at_reference,
    watts,
)
from chopper.reports.palette import color
from chopper.views import view

if TYPE_CHECKING:
    from chopper.analyzers.attributed import Attributed
    from chopper.analyzers.events.clocked import Clocked
    from chopper.reports.story import Story

_KERNELS = 12
_EPISODES = 6
_ENERGY_ROWS = 12
_ENERGY_SCOPES = ("run", "phase", "window")


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


def build(attribution: Attributed, story: Story) -> Frequency | None:
    """The page of a run; None where no clock of a device was sampled."""
    readings = readings_of(attribution)
    found = clocked_of(attribution, events_of(attribution))
    if found is not None and np.isnan(found.clock_hz).all():
        found = None
    if found is None and not readings:
        return None
    steps = view(attribution, "clock_by_step").to_pylist() if found is not None else []
    reference = _reference(attribution, found)
    episodes = view(attribution, "throttle_episodes")
    energy = [r for r in view(attribution, "energy").to_pylist() if r["scope"] in _ENERGY_SCOPES]
    made = {
        "frequency_clocks": distribution(found, readings, reference),
        "frequency_power": power_and_heat(readings, reference),
        "frequency_steps": steps_at_reference(steps, story),
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
    readings: list[Readings], steps: list[dict[str, Any]], reference: float | None
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


def _reference(attribution: Attributed, found: Clocked | None) -> float | None:
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
    attribution: Attributed,
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
    attribution: Attributed,
    story: Story,
    found: Clocked | None,
    steps: list[dict[str, Any]],
    readings: list[Readings],
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
        words = f"highest {watts(float(np.nanmax(power)))}"
        if limits:
            words += f", limit {' / '.join(watts(v) for v in limits)}"
        bases = sorted({r.power_basis for r in readings if r.power_basis})
        words += f"; readings: {' / '.join(bases) or 'instant or averaged, not recorded which'}"
        facts.append(("Board power, mean", watts(float(np.nanmean(power))), words))
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


def _held(attribution: Attributed) -> list[tuple[str, str]]:
    """Labels of the clock loss, largest first, with their shares of it."""
    rows = [r for r in attribution.leaves() if r.id.startswith("compute.clock.") and r.time_ns > 0]
    whole = sum(r.time_ns for r in rows)
    return [(r.label, fmt.ratio(r.time_ns / whole)) for r in rows]


def label_of(label: str) -> str:
    """Words for what held the clock."""
    return CAUSES[f"compute.clock.{label}"].label


def _kernel_rows(attribution: Attributed, story: Story) -> list[dict[str, Any]]:
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
            "power": fmt.UNKNOWN if r["power_mean_w"] is None else watts(r["power_mean_w"]),
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
        "power": fmt.UNKNOWN if row["power_mean_w"] is None else watts(row["power_mean_w"]),
        "count": fmt.count(row["kernel_count"]),
        "loss": fmt.duration(row["loss_ns"]),
        "kernels": (row["kernels"] or fmt.UNKNOWN).split("; "),
    }
