"""Headlines of the workloads with one dimension of parallelism: pipeline, experts, context, tensor.

Each measures the share of its steps that ranks wait or communicate. It is held against theory, and
the attribution's number of the same steps is held against it. Free of torch.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import msgspec

from chopper import statistics as stats
from chopper import wording as fmt
from chopper.errors import UsageError
from chopper.experiments.declarations import DEVICE, DTYPE, SEED, STEPS, Option
from chopper.experiments.results import Experiment, Headline
from chopper.workloads import training

COMMON: tuple[Option, ...] = (
    next(option for option in training.OPTIONS if option.name == "size"),
    replace(STEPS, default=10),
    replace(DTYPE, help="data type of weights and computation"),
    SEED,
    DEVICE,
)
"""Options of all four; the size is that of one block."""


def require_peers(ranks: int) -> None:
    """Raise UsageError for a single rank, which is what a machine with one GPU has by default."""
    if ranks == 1:
        raise UsageError(
            "--ranks 1: one rank has no other to share the work with; with fewer than two GPUs: "
            "--ranks 2 -- --device cpu"
        )


def stack_bytes(args: argparse.Namespace, device: str, *, layers: int, **facts: Any) -> int:
    """Estimate the memory of one rank that trains a stack of blocks, in bytes.

    Args:
        args: size, batch, sequence and dtype.
        device: kind of device.
        layers: blocks that the rank holds.
        facts: of `Training`, beside or in place of these.
    """
    from chopper.analyzers.estimates.memory import memory
    from chopper.analyzers.estimates.training import Training
    from chopper.workloads.llama import SIZES

    blocks = msgspec.structs.replace(SIZES[args.size], layers_count=layers, vocabulary_count=1)
    of_all = {
        "batch_count": args.batch,
        "sequence_count": args.sequence,
        "precision": "bf16" if args.dtype == "bfloat16" else "fp32",
        "kernels": "gpu" if device == "cuda" else "cpu",
    }
    return memory(Training(architecture=blocks, **of_all | facts)).peak_bytes


def measured_by_rank(experiment: Experiment, variant: str, measure: str) -> dict[int, list[float]]:
    """Return a measure that is labelled by rank: rank → its value in each repetition."""
    rows = {
        rank: experiment.find(measure, variant, rank=rank) for rank in range(experiment.plan.ranks)
    }
    return {rank: [*row.values] for rank, row in rows.items() if row is not None}


def attributed_by_rank(
    experiment: Experiment, variant: str, cause: str = "communication"
) -> dict[int, list[float]]:
    """Return the share of each rank's observed time that a cause has, in each repetition."""
    shares: dict[int, list[float]] = defaultdict(list)
    for attribution in experiment.attributions.get(variant, []):
        for group in attribution.by("rank"):
            if isinstance(group.key, int) and group.time_ns:
                time_ns = sum(ns for leaf, ns in group.causes.items() if leaf.startswith(cause))
                shares[group.key].append(time_ns / group.time_ns)
    return shares


def over_ranks(shares: Mapping[int, Sequence[float]]) -> list[float]:
    """Return the mean over ranks, of each repetition."""
    return [fmean(of_ranks) for of_ranks in zip(*shares.values(), strict=True)]


def waiting_headlines(
    experiment: Experiment,
    variant: str,
    *,
    system: str,
    claim: str,
    measure: str,
    theory: float | None,
    law: str | None,
    configuration: str,
    measures_host: bool = False,
) -> Iterator[Headline]:
    """Hold a measured share of the step against theory, and the attribution's against it.

    Where the measured share has work of the host in it, the attribution's is held against theory.

    Args:
        experiment: that measured it, with its attributed runs.
        variant: of them.
        system: that the headlines are of.
        claim: name of the share.
        measure: its name, labelled by rank; a ratio.
        theory: what it should be, as a ratio; None where the theory says nothing.
        law: the theory in words.
        configuration: what was run.
        measures_host: the measured share is no communication alone.
    """
    measured = measured_by_rank(experiment, variant, measure)
    attributed, idle = (
        attributed_by_rank(experiment, variant, cause) for cause in ("communication", "idle")
    )
    if not measured:
        return
    common: dict[str, Any] = {"system": system, "unit": "%", "least": 0.0, "most": 100.0}
    common |= {"bound": "it is a share of the step"}
    yield Headline.of(
        stats.estimate(over_ranks(measured)),
        scale=100,
        claim=f"{claim}, share of the step",
        primary=law,
        stated=None if theory is None else 100 * theory,
        configuration=f"{configuration}; {_by_rank(measured)}",
        **common,
    )
    yield Headline.of(
        stats.estimate(over_ranks(attributed)) if attributed else None,
        scale=100,
        why="nothing was attributed",
        claim=f"{claim}, by the attribution of the same steps",
        primary=law if measures_host else None,
        stated=100 * theory
        if measures_host and theory is not None
        else 100 * fmean(over_ranks(measured)),
        configuration=f"exposed communication: {_by_rank(attributed)}; measured: "
        f"{_by_rank(measured)}; idle beside it: {_by_rank(idle)}",
        **common,
    )


def _by_rank(shares: Mapping[int, Sequence[float]]) -> str:
    return ", ".join(f"rank {rank} {fmt.percent(fmean(of))}" for rank, of in shares.items())
