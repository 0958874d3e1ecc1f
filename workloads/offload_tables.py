"""The tables of ``offload``: the survey's Table II as measured numbers, costs, and what fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from chopper.experiment import Exhibit, Experiment, Row
from chopper.workloads import places
from chopper.workloads.places import CATEGORIES, PLACES, STATES

UNKNOWN = "–"
FAULTS = (
    "it lists stages and offload as one row of alternatives: stages partition over the ranks, "
    "offload moves to the host, and each stage runs here with and without; only weights need stage 3",
    "it has one number for memory: what is offloaded is not saved but lies on the host, and the sum "
    "of both is no smaller",
    "activations are in none of its rows, though stages do nothing for them: checkpointing and "
    "activation offload do, and go together with every stage",
    "it gives no price: communication, copies and the host's update are measured beside it",
)
"""What is wrong with the survey's Table II."""
_TRAVELS = {"allreduce": 2.0}
"""Times (N−1)/N of its size that a rank sends: an all-reduce is a reduce-scatter and an all-gather."""
LOSS_TOLERANCE = 1e-3
"""Relative: what the order of float32 sums may do to a loss within a dozen steps."""


def exhibits(experiment: Experiment) -> tuple[Exhibit, ...]:
    """Memory by category and place, what it costs, the largest model."""
    variants = [v for v in experiment.variants if v in PLACES]
    drawn = (_memory, _against, _costs, _fits)
    return tuple(found for draw in drawn if (found := draw(experiment, variants)).rows)


def total(
    experiment: Experiment, measure: str, variant: str, categories: Iterable[str], place: str = ""
) -> float | None:
    """Sum over places and categories of what was measured; None where nothing was."""
    found = [
        row.estimate.value
        for row in experiment.rows
        if row.measure == measure
        and row.variant == variant
        and str((labels := dict(row.labels))["category"]) in categories
        and place in ("", labels["place"])
    ]
    return sum(found) if found else None


def worst_loss_ratio(experiment: Experiment, variants: Sequence[str]) -> tuple[str, float] | None:
    """The variant whose loss is furthest from the baseline's at any step, and how far, relative.

    Infinitely far where it has none: a loss that is no number is not kept.
    """
    baseline = experiment.plan.baseline
    bases = [r for r in experiment.rows if r.measure == "loss" and r.variant == baseline]
    ran = {row.variant for row in experiment.rows}
    far = []
    for variant in variants:
        for base in bases if variant in ran and variant != baseline else ():
            found = experiment.find("loss", variant, **dict(base.labels))
            ratio = math.inf
            if found is not None:
                ratio = abs(found.estimate.value / base.estimate.value - 1)
            far.append((variant, ratio))
    return max(far, key=lambda pair: pair[1], default=None)


def sent_bytes(experiment: Experiment, variant: str) -> float | None:
    """Bytes that a rank sent to others per step, by the sizes of its collectives; None: no trace.

    Collectives outside of the steps (where the profiler warms up) are left out.
    """
    ranks = experiment.plan.ranks
    of_repeats = []
    for rows in experiment.view("collectives", variant):
        known = [r for r in rows if r["step"] is not None and r["message_bytes"] is not None]
        moved = sum(_TRAVELS.get(r["collective"], 1.0) * r["message_bytes"] for r in known)
        if known:
            of_repeats.append(moved * (ranks - 1) / ranks / len({r["step"] for r in known}))
    return sum(of_repeats) / len(of_repeats) if of_repeats else None


def step_time_ns(experiment: Experiment, variant: str, *causes: str) -> float | None:
    """Time per step of causes and all that is below them, mean over ranks and repetitions."""
    rows = [row for row in experiment.causes if row.variant == variant]
    if not rows:
        return None
    return sum(row.estimate.value for row in rows if row.measure.startswith(causes))


def _memory(experiment: Experiment, variants: Sequence[str]) -> Exhibit:
    rows = []
    for variant in variants:
        found = [total(experiment, "measured_bytes", variant, (c,)) for c in CATEGORIES]
        whole = {
            p: total(experiment, "measured_bytes", variant, CATEGORIES, p)
            for p in ("device", "host")
        }
        if whole["device"] is None and whole["host"] is None:
            continue
        rows.append(
            (variant, *map(_megabytes, found), *(_megabytes(v or 0.0) for v in whole.values()))
        )
    simulated = (
        " On a CPU both are the same memory: the place is where the variant means it to be."
        if experiment.plan.device == "cpu"
        else ""
    )
    return Exhibit(
        title="The survey's Table II, measured: MB per rank",
        headings=("", *CATEGORIES, "on the device", "on the host"),
        rows=tuple(rows),
        note="Storages that live between backward and update, each once; activations: what forward "
        f"saved.{simulated} Its errors: " + "; ".join(FAULTS) + ".",
    )


def _against(experiment: Experiment, variants: Sequence[str]) -> Exhibit:
    rows = []
    for variant in variants:
        cells = []
        for categories in (*((c,) for c in STATES), STATES, ("activations",)):
            said = total(experiment, "predicted_bytes", variant, categories)
            cells.append(_ratio(total(experiment, "measured_bytes", variant, categories), said))
        cells += [
            _megabytes(_value(experiment.find("deepspeed_estimate_bytes", variant, place=place)))
            for place in ("device", "host")
        ]
        if any(cell != UNKNOWN for cell in cells):
            rows.append((variant, *cells))
    return Exhibit(
        title="Measured over predicted",
        headings=(
            "",
            *STATES,
            "all states",
            "activations",
            "DeepSpeed says: device, MB",
            "host, MB",
        ),
        rows=tuple(rows),
        note="States by ZeRO's formulas, activations by `chopper estimate memory`. DeepSpeed's own "
        "estimators (stages 2 and 3) assume 16-bit weights and gradients and, on the host, 1.5 times "
        "what lies there, of all ranks of the node; here all is in float32.",
    )


def _costs(experiment: Experiment, variants: Sequence[str]) -> Exhibit:
    rows = []
    for variant in variants:
        step = experiment.find("median_step_ns", variant)
        if step is None:
            continue
        slower = experiment.ratio("median_step_ns", variant, experiment.plan.baseline or variant)
        bound = _value(experiment.find("update_over_bound_ratio", variant))
        spread = _value(experiment.find("step_cv_ratio", variant))
        link = [
            _value(experiment.find("predicted_link_bytes", variant, direction=d))
            for d in ("to host", "to device")
        ]
        host = total(experiment, "measured_bytes", variant, ("activations",), "host") or 0.0
        moved = None if link[0] is None or link[1] is None else link[0] + link[1] + 2 * host
        rows.append(
            (
                variant,
                _milliseconds(step.estimate.value)
                + ("" if spread is None else f" ±{100 * spread:.0f} %"),
                UNKNOWN if slower is None else f"{slower.value:.2f}×",
                _megabytes(sent_bytes(experiment, variant)),
                _megabytes(_value(experiment.find("predicted_collective_bytes", variant))),
                _megabytes(moved),
                _milliseconds(step_time_ns(experiment, variant, "communication.transfer", "copy")),
                _milliseconds(
                    step_time_ns(
                        experiment,
                        variant,
                        "communication.wait",
                        "idle.preparation.synchronization",
                    )
                ),
                _milliseconds(step_time_ns(experiment, variant, "compute.recompute")),
                _milliseconds(_value(experiment.find("update_ns", variant))),
                UNKNOWN if bound is None else f"{bound:.2f}×",
            )
        )
    return Exhibit(
        title="What it costs, per step and rank",
        headings=(
            "",
            "step, ms",
            "of ddp",
            "sent, MB",
            "by ZeRO, MB",
            "to and from the host, MB",
            "exposed transfer, ms",
            "waiting, ms",
            "recomputed, ms",
            "update, ms",
            "of its DRAM bound",
        ),
        rows=tuple(rows),
        note="Steps (± their coefficient of variation) and updates were timed without tracing, the "
        "parts of a step come from traced ones. Sent: sizes of the collectives × (N−1)/N, all-reduce twice (over gloo, DeepSpeed and FSDP2 "
        "all-reduce gradients where they would reduce-scatter, and both keep some weights gathered). To and from the host: "
        "states by formula, activations as counted. Waiting: for other ranks and on synchronization. "
        "The bound of an update is 28 bytes per weight over the bandwidth that triad has in this run; less "
        "than 1× means states that a cache holds.",
    )


def _fits(experiment: Experiment, variants: Sequence[str]) -> Exhibit:
    named = str(experiment.plan.options.get("fits") or "")
    rows: list[tuple[str, ...]] = []
    label = named
    for variant in variants if named else ():
        place = PLACES[variant]
        if place.managed:
            continue  # decided by the host, and by how slow a step may be
        label, capacity = places.capacity_bytes(named)
        cells = []
        for ranks, checkpoint in ((1, False), (1, True), (8, True)):
            found = places.largest(place, capacity, ranks, checkpoint=checkpoint)
            cells.append(f"{found.parameters_count / 1e9:.1f} B" if found else "none")
            if checkpoint:
                cells.append(f"{found.host_bytes / 1e9:,.0f} GB" if found else UNKNOWN)
        rows.append((variant, *cells))
    return Exhibit(
        title=f"Largest model on {label}",
        headings=(
            "",
            "1 rank",
            "checkpointing too",
            "on the host",
            "8 ranks, checkpointing",
            "on their hosts",
        ),
        rows=tuple(rows),
        note="Estimated, not measured: layers of llama3-8b, mixed precision with AdamW, batch 1, "
        f"{places.LARGEST_SEQUENCE} tokens, by `chopper estimate memory`; no host's size is assumed.",
    )


def _value(row: Row | None) -> float | None:
    return None if row is None else row.estimate.value


def _megabytes(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value / 1e6:.1f}"


def _milliseconds(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value / 1e6:.1f}"


def _ratio(over: float | None, under: float | None) -> str:
    return UNKNOWN if over is None or not under else f"{over / under:.3f}×"
