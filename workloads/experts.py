"""Train a small mixture of experts with an all-to-all each way, with even and uneven loads.

    chopper bench experts
    chopper bench experts -- --hot 3                  # the busiest expert has three even shares
    chopper bench experts --ranks 8 -- --size 8b --experts 64 --tokens 16384 --dtype bfloat16

The experts of each layer are spread over the ranks. Tokens go to the rank of their expert and come
back; no rank goes on before the slowest rank's experts have answered. With the same tokens in all,
uneven loads cost the time of the busiest rank's experts beyond the mean over ranks.

    balanced   each expert has the same share of the tokens
    skewed     the first expert has --hot times as many, the others the same share of the rest
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from chopper import wording as fmt
from chopper.errors import UsageError
from chopper.experiments.declarations import Needs, Option, Variant, Workload, as_program, positive
from chopper.experiments.results import Experiment, Headline, difference
from chopper.workloads.dimensions import COMMON, measured_by_rank, require_peers, waiting_headlines

if TYPE_CHECKING:
    import torch

    from chopper.workloads.mixture import Mixture
    from chopper.workloads.timeline import Timeline

WORKLOAD = Workload(
    name="experts",
    chosen="so that the experts, not their all-to-all, take most of the step",
    summary="a small mixture of experts with dispatch and combine by all-to-all: what uneven "
    "loads cost, beside the busiest rank's excess and beside the attribution",
    options=(
        *COMMON,
        Option("layers", "layers of experts", 2, positive),
        Option("experts", "experts of a layer, over all ranks", 4, positive),
        Option("tokens", "tokens of each rank", 2048, positive),
        Option("hot", "even shares that the busiest expert has when skewed", 2, positive),
    ),
    variants=(
        Variant("balanced", "each expert has the same share of the tokens"),
        Variant("skewed", "the first expert has more than the others"),
    ),
    baseline="balanced",
    measures=True,
    repeats=3,
    seconds=40,
    position=6,
)


def shares_of(args: argparse.Namespace) -> list[float]:
    """Return the share of the tokens that each expert is to have."""
    first = (args.hot if args.variant == "skewed" else 1) / args.experts
    return [first, *[(1 - first) / (args.experts - 1)] * (args.experts - 1)]


def needs(args: argparse.Namespace, ranks: int, _device: str) -> Needs:
    """Memory of one rank: its experts, and the tokens of the busiest."""
    require_peers(ranks)
    if args.experts % ranks:
        raise UsageError(f"--experts {args.experts}: do not divide among {ranks} ranks")
    if args.hot > args.experts:
        raise UsageError(
            f"--hot {args.hot}: {args.experts} experts have as many even shares in all"
        )
    from chopper.workloads.llama import SIZES

    config = SIZES[args.size]
    # With gradients and AdamW's moments; of each row, what the three products and the gate keep.
    weights_count = args.experts // ranks * 3 * config.width * config.ffn_width
    rows_count = args.tokens * ranks * max(args.hot, args.experts // ranks) / args.experts
    kept_count = rows_count * (2 * config.width + 4 * config.ffn_width)
    element_bytes = 2 if args.dtype == "bfloat16" else 4
    return Needs(
        memory_bytes=round(args.layers * element_bytes * (4 * weights_count + kept_count)),
        what=f"--size {args.size} --layers {args.layers} --experts {args.experts} --tokens "
        f"{args.tokens}",
        remedy="choose a smaller size, fewer layers, experts or tokens, or more GPUs",
    )


def main() -> None:
    """Join the other ranks, train, leave."""
    import torch.distributed as dist

    from chopper.workloads.ranks import joined
    from chopper.workloads.timeline import Timeline, recorded

    args = WORKLOAD.parse()
    with joined(args.device, prog="experts") as device:
        timeline = Timeline(device)
        layers, step = trainer(args, device, timeline)
        with recorded(args.output, args.steps) as prof:
            timeline.run(step, args.steps, prof)
            rank = dist.get_rank()
            for index, layer in enumerate(layers):
                for at, count in enumerate(layer.loads.tolist()):
                    expert = rank * len(layer.experts) + at
                    prof.measure("tokens_count", count, layer=index, expert=expert)
            prof.measure("exchange_ratio", timeline.share("exchange"), rank=rank)
            prof.measure("experts_ns", timeline.per_step_ns("experts"), rank=rank)
            prof.measure("traced_step_ns", timeline.per_step_ns("step"))


def trainer(
    args: argparse.Namespace, device: torch.device, timeline: Timeline
) -> tuple[Sequence[Mixture], Callable[[], None]]:
    """Build this rank's layers; return them, and what runs a step of training."""
    import torch
    import torch.distributed as dist

    from chopper.workloads.llama import SIZES, optimizer_of
    from chopper.workloads.mixture import Mixture
    from chopper.workloads.timeline import filled, mesh_of_all

    mesh = mesh_of_all(device, "ep")
    config, dtype = SIZES[args.size], getattr(torch, args.dtype)
    layers = []
    for index in range(args.layers):
        with device:
            layer = Mixture(config, shares_of(args), timeline, mesh)
        # Gates are the same on all ranks, experts are not.
        own = args.layers * (1 + dist.get_rank())
        for module, seed in ((layer.gate, index), (layer.experts, own + index)):
            filled(module, config, seed=args.seed + seed, device=device, dtype=dtype)
        layers.append(layer)
    weights = [weight for layer in layers for weight in layer.parameters()]
    optimizer = optimizer_of("adamw", weights)
    torch.manual_seed(args.seed + dist.get_rank())
    tokens = torch.randn((args.tokens, config.width), device=device, dtype=dtype)

    def step() -> None:
        x = tokens.detach().requires_grad_()  # as an embedding's output would
        for layer in layers:
            x = layer(x)
        x.float().square().mean().backward()
        for layer in layers:
            dist.all_reduce(layer.gate.weight.grad)
        with timeline.span("optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return layers, step


def headlines(experiment: Experiment) -> Iterator[Headline]:
    """Hold what uneven loads cost against the busiest rank's excess, and the attribution."""
    plan = experiment.plan
    rows = {v: experiment.find("traced_step_ns", v) for v in ("balanced", "skewed")}
    excess_ns = {v: fmean(_excess_ns(experiment, v) or [0.0]) for v in rows}
    for variant, row in rows.items():
        if row is None:
            continue
        where = f"{plan.ranks} ranks on {plan.device}; busiest expert {_load(experiment, variant)}"
        if variant == "skewed" and rows["balanced"] is not None:
            yield Headline.of(
                difference(row.values, rows["balanced"].values),
                scale=1e-6,
                unit="ms",
                system="Experts",
                claim="step of skewed beyond that of balanced",
                primary="the busiest rank's experts beyond the mean over ranks",
                stated=1e-6 * (excess_ns["skewed"] - excess_ns["balanced"]),
                configuration=where,
            )
        step_ns = row.estimate.value
        yield from waiting_headlines(
            experiment,
            variant,
            system="Experts",
            claim=f"all-to-alls of {variant}",
            measure="exchange_ratio",
            theory=None,
            law=None,
            configuration=f"{where}, busiest rank's experts {fmt.duration(excess_ns[variant])} of "
            f"{fmt.duration(step_ns)} beyond the mean",
        )


def _excess_ns(experiment: Experiment, variant: str) -> list[float]:
    """Time of the busiest rank's experts beyond the mean over ranks, in each repetition."""
    by_rank = measured_by_rank(experiment, variant, "experts_ns")
    return [max(ranks) - fmean(ranks) for ranks in zip(*by_rank.values(), strict=True)]


def _load(experiment: Experiment, variant: str) -> str:
    """Say how the tokens of the busiest expert compare with the mean over experts."""
    tokens: dict[object, list[float]] = defaultdict(list)
    for row in experiment.rows:
        if (row.measure, row.variant) == ("tokens_count", variant):
            tokens[dict(row.labels)["layer"]].append(row.estimate.value)
    return fmt.factor(max(max(layer) / fmean(layer) for layer in tokens.values())) + " the mean"


if __name__ == "__main__":
    as_program(main)
