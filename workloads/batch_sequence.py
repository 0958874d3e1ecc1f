"""FSDP1 and FSDP2 over batch × sequence, with the overheads of each operation.

    chopper bench batch_sequence
    chopper bench batch_sequence --ranks 8 -o runs/grid-mi300x

The grid is that of the Chopper paper (arXiv 2512.08242): b1s4, b2s4, b4s4, b1s8 and b2s8, sequences
per rank by K tokens in each, of Llama 3 8B in bfloat16 on eight MI300X. On GPUs it runs as there;
on CPUs the model is small, computes in float32, and a K is 32 tokens. Experiments on two machines
are compared by `chopper compare runs/grid-cpu runs/grid-mi300x`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from dataclasses import replace
from statistics import geometric_mean
from typing import TYPE_CHECKING

from chopper import wording as fmt
from chopper.experiments.declarations import Needs, ShownView, Variant, Workload, as_program
from chopper.experiments.options import Option, positive
from chopper.experiments.results import Chart, Exhibit, Experiment, Headline, Labels, RowsOfView
from chopper.workloads import training

if TYPE_CHECKING:
    import torch
    from torch import nn

SHARDINGS = ("fsdp1", "fsdp2")
GRID = {"b1s4": (1, 4), "b2s4": (2, 4), "b4s4": (4, 4), "b1s8": (1, 8), "b2s8": (2, 8)}
"""Name → sequences per rank, and K of tokens in each."""
_DEFAULTS: dict[str, dict[str, str | int]] = {
    "cuda": {"size": "8b", "dtype": "bfloat16", "kilo": 1024},
    "cpu": {"size": "debug", "dtype": "float32", "kilo": 32},
}
"""Device → options that the user left open."""
_OPEN = {
    name: "; ".join(f"{d} {of[name]}" for d, of in _DEFAULTS.items()) for name in ("size", "dtype")
}
_FIXED = ("batch", "sequence", "allocations")

WORKLOAD = Workload(
    name="batch_sequence",
    summary="FSDP1 and FSDP2 over batch × sequence: throughput, and how the ideal time of each "
    "operation became the time that it took",
    options=(
        *(
            replace(o, default=None, help=f"{o.help}; by default {_OPEN[o.name]}")
            if o.name in _OPEN
            else replace(o, default=8 if o.name == "steps" else o.default)
            for o in training.OPTIONS
            if o.name not in _FIXED
        ),
        Option(
            "kilo",
            "tokens that a K of the sequence is; by default cuda 1024; cpu 32",
            None,
            positive,
        ),
    ),
    variants=tuple(
        Variant(f"{name}-{sharding}", f"{batch} × {kilo}K tokens per rank, {sharding.upper()}")
        for name, (batch, kilo) in GRID.items()
        for sharding in SHARDINGS
    ),
    shown=(
        ShownView(
            "clocks", ("clock_mean_hz", "observed_ns", "at_reference_ns"), where=("level", "step")
        ),
    ),
    repeats=3,
    seconds=310,
    position=4,
)

_PRIMARY = "frequency overhead is the largest, above idle MFMA units, overlap and launch (MI300X)"
_PRODUCTS = (" mm", " addmm", "attention")
"""Parts of the names of operations that are products."""
_OPERATIONS = 10
"""Operations that a table shows, those with the most time."""
_LEAST_SHARE = 0.005
"""Operations with a smaller share of the computing time are left out."""
_FACTORS = {
    "roofline_ratio": "memory bound",
    "instructions_ratio": "instructions",
    "tensor_core_ratio": "tensor cores",
    "wave_quantization_ratio": "last wave",
    "contention_ratio": "overlap",
    "clock_ratio": "clock",
    "core_wait_ratio": "CPU cores",
    "rest_ratio": "rest",
}
"""Columns of the view `overheads`, and their headings."""
_MEASURES = ("ideal_ns", *_FACTORS, "observed_ns", "idle_before_ns")
_CHART_LEVEL = 2
"""Causes are drawn down to this level of their tree."""


def settled(args: argparse.Namespace, device: str) -> argparse.Namespace:
    """Return the options of one variant's training, with what the user left open."""
    open_ = {name: value for name, value in _DEFAULTS[device].items() if not vars(args)[name]}
    found = argparse.Namespace(**vars(args) | open_, allocations="no")
    cell, _, found.sharding = args.variant.partition("-")
    found.batch, kilo = GRID[cell]
    found.sequence = kilo * found.kilo
    return found


def needs(args: argparse.Namespace, ranks: int, device: str) -> Needs:
    """Memory of one rank of the largest variant."""
    variants = [argparse.Namespace(**vars(args) | {"variant": v}) for v in args.variants]
    of_each = [training.needs(settled(v, device), ranks, device) for v in variants]
    most = max(of_each, key=lambda of: of.memory_bytes)
    remedy = "name smaller ones with --variants, choose a smaller --size, or --checkpoint full"
    return replace(most, remedy=remedy)


def main() -> None:
    """Join the other ranks, train one variant, leave."""
    training.run(WORKLOAD, _sharded_model, settled)


def _sharded_model(
    args: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = importlib.import_module(f"chopper.workloads.{args.sharding}")
    found: tuple[nn.Module, torch.optim.Optimizer] = module.sharded_model(args, device)
    return found


def headlines(experiment: Experiment) -> Iterator[Headline]:
    """Hold the characterization's findings against what was measured here."""
    where = f"{fmt.plural(experiment.plan.ranks, 'rank')} on {experiment.plan.device}"
    yield _clock(experiment, where)
    for cell in GRID:
        first, second = (f"{cell}-{sharding}" for sharding in SHARDINGS)
        faster = experiment.ratio("tokens_per_s", second, first)
        if faster is not None:
            yield Headline.of(
                faster,
                system="Chopper",
                claim=f"tokens per second, fsdp2 over fsdp1, {cell}",
                configuration=where,
            )


def _clock(experiment: Experiment, where: str) -> Headline:
    """Compare the clock's factor with the others, of products in all variants together."""
    by_factor: dict[str, list[float]] = {}
    for variant in experiment.variants:
        for labels, of in operations(experiment, variant).items():
            if any(kind in str(dict(labels)["operation"]) for kind in _PRODUCTS):
                for name in of.keys() & _FACTORS.keys():
                    by_factor.setdefault(name, []).append(of[name])
    means = {name: geometric_mean(by_factor[name]) for name in _FACTORS if name in by_factor}
    said = ", ".join(f"{_FACTORS[name]} {mean:.2f}×" for name, mean in means.items() if mean > 1)
    return Headline(
        system="Chopper",
        claim="clock's factor between ideal and observed time of products",
        primary=_PRIMARY,
        ours=means.get("clock_ratio"),
        why="no clock was sampled" if means else "no product has an ideal time",
        configuration=f"{where}; {said}",
    )


def derived(view: RowsOfView) -> Iterator[tuple[str, Labels, float]]:
    """Yield ideal time, factors and observed time of the larger operations in modules."""
    rows = view("overheads")
    least_ns = _LEAST_SHARE * sum(row["time_ns"] for row in rows)
    for row in rows:
        if row["module"] is None or row["ideal_ns"] is None or row["time_ns"] < least_ns:
            continue
        operation = f"{row['module']} {row['op'].removeprefix('aten::')}"
        labels = (("operation", operation), ("phase", row["phase"]))
        row["idle_before_ns"] = row["launch_ns"] + row["preparation_ns"]
        for name in _MEASURES:
            if row[name] is not None:
                yield name, labels, float(row[name])


def operations(experiment: Experiment, variant: str) -> dict[Labels, dict[str, float]]:
    """Return the measures of each operation of a variant, as `derived` names them.

    They are geometric means over the repetitions, so that factors still multiply to the observed
    time; of idle time the mean, for it may be 0.
    """
    found: dict[Labels, dict[str, float]] = {}
    for row in experiment.rows:
        if row.variant == variant and row.measure in _MEASURES and row.labels:
            positive = min(row.values) > 0
            mean = geometric_mean(row.values) if positive else row.estimate.value
            found.setdefault(row.labels, {})[row.measure] = mean
    return found


def exhibits(experiment: Experiment) -> tuple[Exhibit, ...]:
    """Show, for each way of sharding, what each operation's time is the product of."""
    return tuple(
        exhibit
        for sharding in SHARDINGS
        if (exhibit := _overheads(experiment, sharding)) is not None
    )


def _overheads(experiment: Experiment, sharding: str) -> Exhibit | None:
    by_cell = {cell: operations(experiment, f"{cell}-{sharding}") for cell in GRID}
    time_ns: dict[Labels, float] = {}
    for of_cell in by_cell.values():
        for labels, of in of_cell.items():
            time_ns[labels] = time_ns.get(labels, 0.0) + of["observed_ns"]
    largest = sorted(time_ns, key=lambda labels: -time_ns[labels])[:_OPERATIONS]
    shown = [
        (dict(labels), cell, of_cell[labels])
        for labels in largest
        for cell, of_cell in by_cell.items()
        if labels in of_cell
    ]
    if not shown:
        return None
    factors = [name for name in _FACTORS if any(name in of for *_, of in shown)]
    unknown = [words for name, words in _FACTORS.items() if name not in factors]
    return Exhibit(
        title=f"Overheads of each operation, {sharding}",
        headings=(
            *("operation", "phase", "b × s", "ideal"),
            *(_FACTORS[name] for name in factors),
            *("observed", "idle before"),
        ),
        rows=tuple(
            (
                *(str(labels["operation"]), str(labels["phase"]), cell),
                fmt.cell("ideal_ns", of["ideal_ns"]),
                *(f"{of[name]:.2f}×" if name in of else fmt.UNKNOWN for name in factors),
                fmt.cell("observed_ns", of["observed_ns"]),
                fmt.cell("idle_before_ns", of["idle_before_ns"]),
            )
            for labels, cell, of in shown
        ),
        words=3,
        note="Times of one call, of the operations that take longest. The ideal time multiplied by "
        "all factors is the observed time; all are geometric means over the repetitions."
        + (f" Not measured, and part of the rest: {', '.join(unknown)}." if unknown else ""),
        shows=_MEASURES,
    )


def charts(experiment: Experiment) -> Iterator[Chart]:
    """Draw throughput and the parts of a step over the grid."""
    cells = [c for c in GRID if any(f"{c}-{s}" in experiment.variants for s in SHARDINGS)]
    yield Chart(
        title="Throughput over batch × sequence",
        measure="tokens_per_s",
        places=tuple(cells),
        series={
            sharding: [experiment.value("tokens_per_s", f"{cell}-{sharding}") for cell in cells]
            for sharding in SHARDINGS
        },
    )
    parts: dict[str, dict[str, float]] = {}
    for row in experiment.causes:
        name = ".".join(row.measure.split(".")[:_CHART_LEVEL])
        of_part = parts.setdefault(name, {})
        of_part[row.variant] = of_part.get(row.variant, 0.0) + row.estimate.value
    yield Chart(
        title="A step's time over batch × sequence",
        measure="step_ns",
        places=experiment.variants,
        series={
            name: [of_part.get(variant) for variant in experiment.variants]
            for name, of_part in parts.items()
        },
        of_causes=True,
    )


if __name__ == "__main__":
    as_program(main)
