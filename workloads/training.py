"""Training of a Llama model: the options, the needs and the loop that several workloads share."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from itertools import pairwise
from typing import TYPE_CHECKING

from chopper.experiments.declarations import (
    DEVICE,
    DTYPE,
    SEED,
    STEPS,
    Needs,
    Option,
    Workload,
    not_negative,
    positive,
)
from chopper.experiments.results import Headline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    import chopper
    from chopper.experiments.results import Experiment

LOSS_TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2}
"""Relative: what the order of sums may do to a loss within a dozen steps, and in bfloat16 the
types in which variants keep weights and moments."""

OPTIONS = (
    Option("size", "shape of the Llama model", "debug", choices=("debug", "1b", "8b", "13b")),
    STEPS,
    Option("batch", "sequences per rank and step", 4, positive),
    Option("sequence", "tokens per sequence", 256, positive),
    DTYPE,
    Option(
        "checkpoint",
        "activation checkpointing: full recomputes each block in backward",
        "none",
        choices=("none", "full"),
    ),
    Option(
        "workers",
        "data loading processes per rank; 0 loads in the training process",
        0,
        not_negative,
    ),
    SEED,
    DEVICE,
    Option(
        "allocations", "record each allocation of memory in the trace", "no", choices=("no", "yes")
    ),
)


def needs(args: argparse.Namespace, ranks: int, device: str) -> Needs:
    """Estimate the memory of one rank of fully sharded training."""
    from chopper.analyzers.estimates.memory import memory
    from chopper.analyzers.estimates.training import Training
    from chopper.workloads.llama import SIZES

    estimate = memory(
        Training(
            architecture=SIZES[args.size],
            batch_count=args.batch,
            sequence_count=args.sequence,
            strategy="fsdp2" if ranks > 1 else "single",
            ranks_count=ranks,
            checkpoint=args.checkpoint,
            precision="mixed" if args.dtype == "bfloat16" else "fp32",
            kernels="gpu" if device == "cuda" else "cpu",
        )
    )
    count = estimate.parameters_count
    parameters = f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
    return Needs(
        memory_bytes=estimate.peak_bytes,
        what=f"--size {args.size} ({parameters} parameters, batch {args.batch}, sequence "
        f"{args.sequence})",
        remedy="choose a smaller size, batch or sequence, or more GPUs",
    )


def run(
    workload: Workload,
    sharded_model: Callable[
        [argparse.Namespace, torch.device], tuple[nn.Module, torch.optim.Optimizer]
    ],
    settled: Callable[[argparse.Namespace, str], argparse.Namespace] = lambda args, _device: args,
) -> None:
    """Join the other ranks, train, leave; ``settled`` sets what options leave to the device."""
    import chopper
    from chopper.workloads.ranks import joined

    args = workload.parse()
    with joined(args.device, prog=workload.name) as device:
        args = settled(args, device.type)
        model, optimizer = sharded_model(args, device)
        with chopper.profile(args.output, memory=args.allocations == "yes") as prof:
            train(prof, model, optimizer, args, device)


def batches(args: argparse.Namespace, device: torch.device) -> DataLoader[tuple[Tensor, Tensor]]:
    """This rank's part of the corpus, ``args.steps`` batches."""
    import torch.distributed as dist

    from chopper.workloads.llama import SIZES, token_loader

    return token_loader(
        steps=args.steps,
        batch=args.batch,
        sequence=args.sequence,
        vocabulary=SIZES[args.size].vocabulary_count,
        seed=args.seed,
        rank=dist.get_rank(),
        ranks=dist.get_world_size(),
        workers=args.workers,
        pin_memory=device.type == "cuda",
    )


def train(
    prof: chopper.Profile,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    args: argparse.Namespace,
    device: torch.device,
) -> None:
    """Train ``args.steps`` steps; rank 0 keeps losses, the median step and tokens per second."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from chopper.workloads.ranks import Progress

    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses: list[Tensor] = []
    marks_ns = [time.perf_counter_ns()]
    progress = Progress(args.steps, "step")
    for tokens, labels in prof.watch(batches(args, device)):
        tokens = tokens.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        logits = model(tokens)
        # In float32: bfloat16 has 8 significant bits, too few for a sum over a vocabulary.
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # Kept on the device: .item() here would make the host wait for each step.
        losses.append(loss.detach())
        prof.step(tokens=tokens.numel())
        marks_ns.append(time.perf_counter_ns())
        progress.advance()

    # Of rank 0's sequences: a mean over ranks would need one more collective.
    if rank:
        return
    for step, value in enumerate(torch.stack(losses).tolist()):
        print(f"step {step:4d}   loss {value:.4f}")
        prof.measure("loss", value, step=step)
    # The first step pays for warming up; the median leaves out the steps that were traced.
    periods_ns = [end - begin for begin, end in pairwise(marks_ns)]
    step_ns = statistics.median(periods_ns[1:] or periods_ns)
    tokens_per_s = ranks * args.batch * args.sequence / step_ns * 1e9
    prof.measure("first_step_ns", periods_ns[0])
    prof.measure("median_step_ns", step_ns)
    prof.measure("tokens_per_s", tokens_per_s)
    print(
        f"{args.size} {args.dtype}, {ranks} ranks on {device.type}: "
        f"median step {step_ns / 1e9:.3f} s, {tokens_per_s:,.0f} tokens/s",
        flush=True,
    )


def worst_loss_ratio(experiment: Experiment, variants: Sequence[str]) -> tuple[str, float] | None:
    """Return the variant whose loss is furthest from the baseline's at any step, and how far.

    The difference is relative; inf where the variant has no loss at a step. None: no loss at all.
    """
    baseline = experiment.plan.baseline
    bases = [r for r in experiment.rows if r.measure == "loss" and r.variant == baseline]
    ran = {row.variant for row in experiment.rows}
    far = []
    for variant in variants:
        for base in bases if variant in ran and variant != baseline else ():
            row = experiment.find("loss", variant, **dict(base.labels))
            ratio = math.inf
            if row is not None:
                ratio = abs(row.estimate.value / base.estimate.value - 1)
            far.append((variant, ratio))
    return max(far, key=lambda pair: pair[1], default=None)


def loss_headline(
    experiment: Experiment, system: str, variants: Sequence[str], where: str
) -> Headline | None:
    """Return the largest relative difference of a loss from the baseline's; None without losses."""
    worst = worst_loss_ratio(experiment, variants)
    if worst is None:
        return None
    variant, difference = worst
    tolerance = LOSS_TOLERANCES[str(experiment.plan.options.get("dtype") or "float32")]
    verdict = "kept" if difference <= tolerance else "exceeded"
    known = math.isfinite(difference)
    why = f"{variant} has no loss at some steps: it was not a number, or the run ended earlier"
    return Headline(
        system=system,
        claim=f"largest relative difference of a loss from {experiment.plan.baseline}'s at any "
        "step",
        unit="",
        timed=False,
        ours=difference if known else None,
        why="" if known else why,
        configuration=f"{variant}; {where}; tolerance {tolerance:g}: {verdict}",
    )
