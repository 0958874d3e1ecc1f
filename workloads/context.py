"""Train layers of ring attention over a sequence that is spread over the ranks.

    chopper bench context
    chopper bench context -- --sequence 4096 --tiles 16
    chopper bench context --ranks 8 -- --size 8b --sequence 131072 --dtype bfloat16

Under a causal mask a query sees only what lies before it. Where each rank has one stretch of the
sequence, rank i of n computes (2i + 1)/n² of all attention and the others wait for the last. With
the first and the last stretch on one rank, the second and the last but one on the next, and so on
(zigzag), each computes 1/n.

    contiguous   each rank has one stretch
    zigzag       each rank has a stretch from the begin and its mirror image from the end

Before anything is timed, outputs and gradients are checked against whole attention in float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import TYPE_CHECKING

from chopper import statistics as stats
from chopper.errors import UsageError
from chopper.experiments.declarations import Needs, Option, Variant, Workload, as_program, positive
from chopper.experiments.results import Experiment, Headline
from chopper.workloads.dimensions import COMMON, measured_by_rank, require_peers, waiting_headlines

if TYPE_CHECKING:
    import torch

    from chopper.workloads.ring import Ring

WORKLOAD = Workload(
    name="context",
    chosen="so that attention, not its projections, takes most of the step",
    summary="ring attention over a causal sequence, in one stretch per rank and as a zigzag: "
    "each rank's part and its waits, beside theory and beside the attribution",
    options=(
        *COMMON,
        Option("layers", "layers of attention", 2, positive),
        Option("sequence", "tokens of the sequence, over all ranks", 2048, positive),
        Option("tiles", "tiles of each rank's part, computed whole or not at all", 8, positive),
    ),
    variants=(
        Variant("contiguous", "each rank has one stretch of the sequence"),
        Variant("zigzag", "each rank has a stretch and its mirror image"),
    ),
    baseline="contiguous",
    measures=True,
    repeats=3,
    seconds=60,
    position=6,
)

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
"""Largest relative error that is rounding."""


def needs(args: argparse.Namespace, ranks: int, _device: str) -> Needs:
    """Memory of one rank: its part of the sequence in each layer, and the scores of one tile."""
    from chopper.workloads.llama import SIZES

    require_peers(ranks)
    if args.tiles % 2:
        raise UsageError(f"--tiles {args.tiles}: is odd, a zigzag has two halves")
    if args.sequence % (ranks * args.tiles):
        raise UsageError(
            f"--sequence {args.sequence}: does not divide into {ranks} ranks of {args.tiles} tiles"
        )
    config = SIZES[args.size]
    rows = args.sequence // ranks
    # Of each row in each layer its input, norm, q, k, v, result and projection; once, blocks and
    # gradients on their way. Weights, gradients and two moments. Scores of a tile and their like.
    kept_count = rows * config.width * (7 * args.layers + 12)
    weights_count = 4 * 4 * config.width**2 * args.layers
    scores_count = 4 * config.heads_count * (rows // args.tiles) * rows
    return Needs(
        memory_bytes=4 * (kept_count + weights_count + scores_count),
        what=f"--size {args.size} --layers {args.layers} --sequence {args.sequence}",
        remedy="choose a smaller size, fewer layers, a shorter sequence, more tiles or more GPUs",
    )


def main() -> None:
    """Join the other ranks, check, train, leave."""
    import torch
    import torch.distributed as dist

    from chopper.workloads.ranks import joined
    from chopper.workloads.ring import Ring, error_of
    from chopper.workloads.timeline import Timeline, mesh_of_all, recorded

    args = WORKLOAD.parse()
    with joined(args.device, prog="context") as device:
        timeline = Timeline(device)
        zigzag = args.variant == "zigzag"
        small = Ring(4 * args.tiles, args.tiles, zigzag=zigzag, timeline=timeline)
        error = error_of(small, device, getattr(torch, args.dtype))
        if not error <= TOLERANCE[args.dtype]:  # NaN neither
            raise SystemExit(f"context: {args.variant} is wrong: relative error {error:.1e}")
        rows = args.sequence // dist.get_world_size()
        mesh = mesh_of_all(device, "cp")
        ring = Ring(rows, args.tiles, zigzag=zigzag, timeline=timeline, mesh=mesh)
        step = trainer(args, device, ring)
        with recorded(args.output, args.steps) as prof:
            timeline.run(step, args.steps, prof)
            rank = dist.get_rank()
            prof.measure("relative_error", error)
            prof.measure("attention_ns", timeline.per_step_ns("attention"), rank=rank)
            prof.measure("waiting_ratio", timeline.share("ring", "reduce"), rank=rank)
            prof.measure("traced_step_ns", timeline.per_step_ns("step"))


def trainer(args: argparse.Namespace, device: torch.device, ring: Ring) -> Callable[[], None]:
    """Build the layers, the same on each rank; return what runs a step of training."""
    import torch
    import torch.distributed as dist

    from chopper.workloads.llama import SIZES, optimizer_of
    from chopper.workloads.ring import Layer
    from chopper.workloads.timeline import filled

    config, dtype, rank = SIZES[args.size], getattr(torch, args.dtype), dist.get_rank()
    with torch.device("meta"):
        layers = torch.nn.Sequential(
            *(Layer(config.width, config.heads_count, ring) for _ in range(args.layers))
        )
    filled(layers, config, seed=args.seed, device=device, dtype=dtype)
    optimizer = optimizer_of("adamw", layers.parameters())
    torch.manual_seed(args.seed + rank)
    shape = (args.sequence // ring.ranks, config.width)
    x = torch.randn(shape, device=device, dtype=dtype)

    def step() -> None:
        layers(x).float().square().mean().backward()
        with ring.timeline.span("reduce"):
            for weight in layers.parameters():
                dist.all_reduce(weight.grad, group=ring.group)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def headlines(experiment: Experiment) -> Iterator[Headline]:
    """Hold ranks' parts, waits and the zigzag's gain against theory, and the attribution."""
    plan = experiment.plan
    ranks, where = plan.ranks, f"{plan.ranks} ranks on {plan.device}"
    faster = experiment.ratio("traced_step_ns", "contiguous", "zigzag")
    excess_ns = {}
    for variant, law, last in (
        ("contiguous", "(2n − 1)/n² of it, n ranks", (2 * ranks - 1) / ranks**2),
        ("zigzag", "1/n of it, n ranks", 1 / ranks),
    ):
        by_rank = measured_by_rank(experiment, variant, "attention_ns")
        step_ns = experiment.value("traced_step_ns", variant)
        if not by_rank or step_ns is None:
            continue
        repetitions = [*zip(*by_rank.values(), strict=True)]
        excess_ns[variant] = fmean(max(of) - fmean(of) for of in repetitions)
        yield Headline.of(
            stats.estimate([of[-1] / sum(of) for of in repetitions]),
            scale=100,
            unit="%",
            system="Ring attention",
            claim=f"{variant}: the last rank's part of all attention",
            primary=law,
            stated=100 * last,
            configuration=where,
        )
        yield from waiting_headlines(
            experiment,
            variant,
            system="Ring attention",
            claim=f"waits of {variant}",
            measure="waiting_ratio",
            theory=excess_ns[variant] / step_ns if variant == "contiguous" else None,
            law="the busiest rank's attention beyond the mean over ranks",
            configuration=where,
        )
    step_ns = experiment.value("traced_step_ns", "contiguous")
    if faster is not None and step_ns is not None and len(excess_ns) == 2:
        saved_ns = excess_ns["contiguous"] - excess_ns["zigzag"]
        yield Headline.of(
            faster,
            system="Ring attention",
            claim="step of contiguous over that of zigzag",
            primary="the busiest rank's attention beyond the mean, removed",
            stated=step_ns / (step_ns - saved_ns),
            configuration=where,
        )


if __name__ == "__main__":
    as_program(main)
