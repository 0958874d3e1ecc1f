"""The tables of ``offload``: measured memory and step time, costs, and what fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from chopper.experiments.results import Exhibit, Experiment, Headline
from chopper.workloads import placement as formulas
from chopper.workloads.placement import CATEGORIES, PLACEMENTS, STATES

UNKNOWN = "–"
_TRAVELS = {"allreduce": 2.0}
"""Times (N−1)/N of its size that a rank sends: an all-reduce is two collectives in one."""
LOSS_TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2}
"""Relative: what the order of sums may do to a loss within a dozen steps, and in bfloat16 the
types in which variants keep weights and moments."""
Rows = Iterator[tuple[str, ...]]


class _Texts(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    headings: tuple[str, ...]
    note: str
    note_on_cpu: str = ""
    words: int = 1
    shows: tuple[str, ...] = ()


_TEXTS = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, _Texts]
)


def exhibits(experiment: Experiment) -> tuple[Exhibit, ...]:
    """Draw memory by category and place, its cost, and the largest model that fits."""
    plan = experiment.plan
    variants = [v for v in experiment.variants if v in PLACEMENTS]
    fits = str(plan.options.get("fits") or "")
    words = {
        "base": plan.baseline or "the baseline",
        "fits": formulas.capacity_bytes(fits)[0] if fits else "",
        "host": _host(experiment),
        "sequence": formulas.LARGEST_SEQUENCE,
    }
    draw = {
        "memory": _memory,
        "against": _against,
        "beyond": _beyond,
        "times": _times,
        "moved": _moved,
        "fits": _fits,
    }
    drawn = []
    for name, texts in _TEXTS.items():
        rows = tuple(draw[name](experiment, variants))
        note = texts.note + (texts.note_on_cpu if plan.device == "cpu" else "")
        if rows:
            drawn.append(
                Exhibit(
                    title=texts.title.format(**words),
                    headings=tuple(heading.format(**words) for heading in texts.headings),
                    rows=rows,
                    words=texts.words,
                    note=note.format(**words),
                    shows=texts.shows,
                )
            )
    return tuple(drawn)


def totals(
    experiment: Experiment, measure: str, variant: str, categories: Iterable[str], place: str = ""
) -> tuple[float, ...]:
    """Sum a measure over places and categories, per repetition; empty where it was not measured."""
    found = [
        row.values
        for row in experiment.rows
        if row.measure == measure
        and row.variant == variant
        and str((labels := dict(row.labels))["category"]) in categories
        and place in ("", labels["place"])
    ]
    return tuple(sum(values) for values in zip(*found, strict=True))


def total(
    experiment: Experiment, measure: str, variant: str, categories: Iterable[str], place: str = ""
) -> float | None:
    """Their mean over the repetitions; None where nothing was measured."""
    found = totals(experiment, measure, variant, categories, place)
    return fmean(found) if found else None


def worst_loss_ratio(experiment: Experiment, variants: Sequence[str]) -> tuple[str, float] | None:
    """The variant whose loss is furthest from the baseline's at any step; inf where it has none."""
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
    """Bytes that a rank sent per step, by the sizes of its collectives in steps; None: no trace."""
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


def _memory(experiment: Experiment, variants: Sequence[str]) -> Rows:
    for variant in variants:
        parts = [total(experiment, "measured_bytes", variant, (c,)) for c in CATEGORIES]
        wholes = [
            total(experiment, "measured_bytes", variant, CATEGORIES, place) or 0.0
            for place in ("device", "host", "disk")
        ]
        if any(wholes):
            yield (variant, *map(_millions, (*parts, *wholes)))


def _beyond(experiment: Experiment, variants: Sequence[str]) -> Rows:
    for row in experiment.rows:
        labels = dict(row.labels)
        if row.measure == "beyond_formula_bytes" and row.variant in variants:
            named = [str(labels[key]) for key in ("what", "category", "place")]
            yield (row.variant, *named, _millions(row.estimate.value))


def _against(experiment: Experiment, variants: Sequence[str]) -> Rows:
    for variant in variants:
        cells = []
        for categories in (*((c,) for c in STATES), STATES, ("buffers",), ("activations",)):
            measured, predicted = (
                total(experiment, f"{what}_bytes", variant, categories)
                for what in ("measured", "predicted")
            )
            if measured is None or not predicted:
                cells.append(UNKNOWN)
            else:
                cells.append(f"{measured / predicted:.3f}×")
        if any(cell != UNKNOWN for cell in cells):
            yield (variant, *cells)


def _times(experiment: Experiment, variants: Sequence[str]) -> Rows:
    for variant in variants:
        step = experiment.find("median_step_ns", variant)
        if step is None:
            continue
        spread = step.estimate.cv_ratio
        if spread is None:
            spread = experiment.value("step_cv_ratio", variant)
        causes = (
            ("communication.transfer", "copy"),
            ("communication.wait", "idle.preparation.synchronization"),
            ("compute.recompute",),
        )
        yield (
            variant,
            _millions(step.estimate.value) + ("" if spread is None else f" ±{100 * spread:.0f} %"),
            _judged(experiment, slowdown(experiment, variant)),
            *(_millions(step_time_ns(experiment, variant, *c)) for c in causes),
            _millions(experiment.value("update_ns", variant)),
            _millions(experiment.value("update_bound_ns", variant)),
            _judged(experiment, over_bound(experiment, variant)),
        )


def _moved(experiment: Experiment, variants: Sequence[str]) -> Rows:
    for variant in variants:
        said = experiment.value("predicted_collective_bytes", variant)
        if said is None:
            continue
        host = total(experiment, "measured_bytes", variant, ("activations",), "host") or 0.0
        link = [
            experiment.value("predicted_link_bytes", variant, direction=d)
            for d in ("to host", "to device")
        ]
        yield (
            variant,
            *map(_millions, (sent_bytes(experiment, variant), said)),
            *(_millions(None if size is None else size + host) for size in link),
        )


def _fits(experiment: Experiment, variants: Sequence[str]) -> Rows:
    options = experiment.plan.options
    for variant in variants if options.get("fits") else ():
        if PLACEMENTS[variant].managed or PLACEMENTS[variant].on_disk:
            continue  # decided by host or disk, and by how slow a step may be
        cells = []
        for ranks, checkpoint in ((1, False), (1, True), (8, True)):
            found = formulas.largest_of(variant, options, ranks=ranks, checkpoint=checkpoint)
            cells.append(f"{found.parameters_count / 1e9:.1f} B" if found else "none")
            if checkpoint:
                cells.append(f"{found.host_bytes / 1e9:,.0f} GB" if found else UNKNOWN)
        yield (variant, *cells)


def _host(experiment: Experiment) -> str:
    return str(experiment.plan.options.get("host") or "1500GB")


def _millions(value: float | None) -> str:
    """MB of bytes, ms of nanoseconds."""
    return UNKNOWN if value is None else f"{value / 1e6:.1f}"


def slowdown(experiment: Experiment, variant: str) -> Headline | None:
    """A variant's step over that of the baseline; None where one of them is missing."""
    base = experiment.plan.baseline
    slower = experiment.ratio("median_step_ns", variant, base) if base else None
    if slower is None or variant == base:
        return None
    update_ns, step_ns = (experiment.value(m, base) for m in ("update_ns", "median_step_ns"))
    return Headline.of(
        slower,
        system="ZeRO, offload",
        claim=f"{variant}: step over that of {base}",
        least=1 - update_ns / step_ns if update_ns and step_ns else None,
        bound=f"no placement saves more than all of {base}'s update",
    )


def over_bound(experiment: Experiment, variant: str) -> Headline | None:
    """The optimizer's step over its DRAM bound; None where it was not measured."""
    bound = experiment.find("update_over_bound_ratio", variant)
    why = experiment.why("update_over_bound_ratio", variant)
    if bound is None and not why:
        return None
    return Headline.of(
        None if bound is None else bound.estimate,
        why=why,
        system="ZeRO, offload",
        claim=f"{variant}: the optimizer's step on the host over its DRAM bound",
        configuration="bytes of each update over triad's bandwidth",
    )


def _judged(experiment: Experiment, headline: Headline | None) -> str:
    """Show a ratio with its interval, unless its headline is withheld."""
    shown = headline and headline.judged(experiment.disturbances)
    if shown is None:
        return UNKNOWN
    if shown.ours is None:
        return "withheld" if shown.why else UNKNOWN
    said = f"{shown.ours:.2f}×"
    if shown.ci95 is not None:
        said += f" ({shown.ci95[0]:.2f} … {shown.ci95[1]:.2f})"
    return said
