"""FSDP1 and FSDP2 over batch × sequence: throughput, and what the clock takes.

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
from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from chopper import wording as fmt
from chopper.experiments.declarations import (
    Needs,
    Option,
    ShownView,
    Variant,
    Workload,
    as_program,
    positive,
)
from chopper.experiments.results import Experiment, Headline
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
    chosen="as the publication's grid; on CPUs at sizes that two cores train within minutes",
    summary="FSDP1 and FSDP2 over batch × sequence: throughput, causes, and the clock's factor in "
    "the time of products",
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
_LEAST_SHARE = 0.005
"""Operations with a smaller share of the computing time are left out."""
FACTORS = {
    "roofline_ratio": "memory bound",
    "instructions_ratio": "instructions",
    "tensor_core_ratio": "tensor cores",
    "wave_quantization_ratio": "last wave",
    "contention_ratio": "overlap",
    "clock_ratio": "clock",
    "core_wait_ratio": "CPU cores",
    "rest_ratio": "rest",
}
"""Columns of the view `overheads`, and their names in the paper."""


def settled(args: argparse.Namespace, device: str) -> argparse.Namespace:
    """Return the options of one variant's training, with what the user left open."""
    open_ = {name: value for name, value in _DEFAULTS[device].items() if not vars(args)[name]}
    variant = argparse.Namespace(**vars(args) | open_, allocations="no")
    cell, _, variant.sharding = args.variant.partition("-")
    variant.batch, kilo = GRID[cell]
    variant.sequence = kilo * variant.kilo
    return variant


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
    sharded: tuple[nn.Module, torch.optim.Optimizer] = module.sharded_model(args, device)
    return sharded


def headlines(experiment: Experiment) -> Iterator[Headline]:
    """Compare the paper's findings with the measurements."""
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
    means = product_factors(
        rows for variant in experiment.variants for rows in experiment.view("overheads", variant)
    )
    listed = ", ".join(f"{FACTORS[name]} {mean:.2f}×" for name, mean in means.items() if mean > 1)
    return Headline(
        system="Chopper",
        claim="clock's factor between ideal and observed time of products",
        primary=_PRIMARY,
        ours=means.get("clock_ratio"),
        why="no clock was sampled" if means else "no product has an ideal time",
        configuration=f"{where}; {listed}",
    )


def product_factors(runs: Iterable[list[dict[str, Any]]]) -> dict[str, float]:
    """Geometric mean of each factor over the larger products of several runs.

    Args:
        runs: rows of the view `overheads` of each run.
    """
    by_factor: dict[str, list[float]] = {}
    for rows in runs:
        least_ns = _LEAST_SHARE * sum(row["time_ns"] for row in rows)
        for row in rows:
            operation = " " + row["op"].removeprefix("aten::")
            if not row["module"] or row["ideal_ns"] is None or row["time_ns"] < least_ns:
                continue
            if any(kind in operation for kind in _PRODUCTS):
                for name in FACTORS:
                    if row[name] is not None:
                        by_factor.setdefault(name, []).append(row[name])
    return {name: geometric_mean(by_factor[name]) for name in FACTORS if name in by_factor}


if __name__ == "__main__":
    as_program(main)
