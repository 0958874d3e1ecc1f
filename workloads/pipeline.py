"""Train a stack of blocks in pipeline stages, by each schedule of torch.distributed.pipelining.

    chopper bench pipeline
    chopper bench pipeline --variants all -- --micro-batches 8
    chopper bench pipeline --variants 1f1b -- --extra 2           # an imbalanced last stage
    chopper bench pipeline --ranks 8 -- --size 8b --blocks 4 --sequence 8192 --dtype bfloat16

Each rank has a stage of the stack, or several. A step's micro-batches go forward from stage to
stage, their gradients backward, and a rank without either waits: the bubble.

    gpipe        all forwards, then all backwards (arXiv 1811.06965)
    1f1b         one forward, one backward in turn: the same bubble, fewer activations
    interleaved  1f1b with several stages on each rank (arXiv 2104.04473)
    zero-bubble  the same, backward split: weights' gradients fill the bubble (arXiv 2401.10241)
    looped-bfs   all forwards of a stage, then those of the rank's next one (arXiv 2211.05953)
    zbv          zero-bubble with two stages on each rank, the second on the way back
    dualpipev    the same, and a forward beside each backward (arXiv 2412.19437)

The stack begins and ends in hidden states: with an embedding and a head, the first and the last
stage would have more to do than the others. All schedules compute the same losses.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chopper import wording as fmt
from chopper.errors import UsageError
from chopper.experiments.declarations import (
    Needs,
    Option,
    Variant,
    Workload,
    as_program,
    not_negative,
    positive,
)
from chopper.experiments.results import Experiment, Headline
from chopper.workloads import training
from chopper.workloads.dimensions import COMMON, require_peers, stack_bytes, waiting_headlines

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from chopper.workloads.timeline import Timeline

WORKLOAD = Workload(
    name="pipeline",
    chosen="so that the bubble of gpipe is a fifth of the step on two ranks",
    summary="a stack of Llama blocks in pipeline stages, by each schedule of "
    "torch.distributed.pipelining: the bubble beside its theory and beside the attribution",
    options=(
        *COMMON,
        Option("blocks", "blocks on each rank", 2, positive),
        Option("virtual", "stages on each rank, where a schedule leaves it open", 2, positive),
        Option("micro-batches", "micro-batches of a step", 4, positive),
        Option("batch", "sequences of a micro-batch", 4, positive),
        Option("sequence", "tokens of a sequence", 128, positive),
        Option("extra", "blocks that the last stage has more than the others", 0, not_negative),
    ),
    variants=(
        Variant("gpipe", "all forwards, then all backwards"),
        Variant("1f1b", "one forward, one backward"),
        Variant("interleaved", "1F1B with several stages on each rank"),
        Variant("zero-bubble", "interleaved, backward split in inputs' and weights' gradients"),
        Variant("looped-bfs", "all forwards of a rank's stage, then of its next", default=False),
        Variant("zbv", "zero-bubble, two stages on each rank as a V", default=False),
        Variant("dualpipev", "DualPipe with a V: both directions at once", default=False),
    ),
    baseline="gpipe",
    measures=True,
    repeats=3,
    seconds=100,
    position=6,
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule of torch and its bubble, by the publications named above."""

    torch_name: str
    law: str
    bubble: tuple[int, int, int] = (1, 1, 0)
    """Times that F, B and W of one micro-batch in one stage are in a rank's bubble per step, over
    p − 1 (p: ranks). B is the whole backward, W the part of it for the weights."""
    stages: int | None = None
    """On each rank; None: as ``--virtual`` says."""
    vee: bool = False
    """The second stage of each rank lies on the way back."""


_SHARE = "(p − 1)/(v·m + p − 1) of the step, p ranks, v stages each, m micro-batches"
SCHEDULES = {
    "gpipe": Schedule("GPipe", _SHARE, stages=1),
    "1f1b": Schedule("1F1B", _SHARE, stages=1),
    "interleaved": Schedule("Interleaved1F1B", _SHARE),
    "zero-bubble": Schedule("InterleavedZeroBubble", "(p − 1)(F + B − 2W)", (1, 1, -2)),
    "looped-bfs": Schedule("LoopedBFS", _SHARE),
    "zbv": Schedule("ZBVZeroBubble", "0 where F, B − W and W are equal", (0, 0, 0), 2, vee=True),
    "dualpipev": Schedule("DualPipeV", "(p − 1)(F + 2B − 3W)", (1, 2, -3), 2, vee=True),
}


def stages_of(variant: str, virtual: int) -> int:
    """Return the number of stages on each rank."""
    return SCHEDULES[variant].stages or virtual


def needs(args: argparse.Namespace, ranks: int, device: str) -> Needs:
    """Memory of one rank: its blocks, and the activations of all micro-batches."""
    require_peers(ranks)
    absent = {}
    for variant in args.variants:
        stages = stages_of(variant, args.virtual)
        if args.blocks % stages:
            raise UsageError(
                f"--blocks {args.blocks}: do not divide into {stages} stages of {variant} on a rank"
            )
        if variant == "dualpipev" and args.micro_batches < ranks * stages:
            absent[variant] = f"needs a micro-batch for each of its {ranks * stages} stages"
    if args.micro_batches % ranks:
        raise UsageError(
            f"--micro-batches {args.micro_batches}: is not a multiple of {ranks} ranks"
        )
    return Needs(
        memory_bytes=stack_bytes(
            args,
            device,
            layers=args.blocks + args.extra,
            batch_count=args.micro_batches * args.batch,
        ),
        what=f"--size {args.size} --blocks {args.blocks} --micro-batches {args.micro_batches}",
        remedy="choose a smaller size, fewer blocks or micro-batches, or more GPUs",
        absent=absent,
    )


def main() -> None:
    """Join the other ranks, train, leave."""
    import torch.distributed as dist

    from chopper.workloads.ranks import joined
    from chopper.workloads.timeline import Timeline, recorded

    args = WORKLOAD.parse()
    with joined(args.device, prog="pipeline") as device:
        timeline = Timeline(device)
        step = trainer(args, device, timeline)
        with recorded(args.output, args.steps) as prof:
            losses = timeline.run(step, args.steps, prof)
            for number, loss in enumerate(losses):
                if loss is not None:
                    prof.measure("loss", loss.item(), step=number)
            busy = ("forward", "backward", "weight", "optimizer")
            prof.measure("bubble_ratio", 1 - timeline.share(*busy), rank=dist.get_rank())
            prof.measure("busy_ns", timeline.per_step_ns(*busy), rank=dist.get_rank())
            # Of one micro-batch in one stage, means over the rank's stages.
            runs = args.micro_batches * stages_of(args.variant, args.virtual)
            prof.measure("forward_ns", timeline.per_step_ns("forward") / runs)
            prof.measure("backward_ns", timeline.per_step_ns("backward", "weight") / runs)
            weight_ns = timeline.each_ns("weight")
            if weight_ns is not None:
                prof.measure("weight_ns", weight_ns)


def trainer(
    args: argparse.Namespace, device: torch.device, timeline: Timeline
) -> Callable[[], Tensor | None]:
    """Build this rank's stages and their schedule; return what runs a step of it.

    It returns the loss on the rank with the last stage, None on others.
    """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    from chopper.workloads.llama import SIZES, optimizer_of
    from chopper.workloads.timeline import mesh_of_all, stack

    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule, dtype = SCHEDULES[args.variant], getattr(torch, args.dtype)
    per_rank = stages_of(args.variant, args.virtual)
    count = ranks * per_rank
    own = [rank, count - 1 - rank] if schedule.vee else [*range(rank, count, ranks)]
    blocks = args.blocks // per_rank

    group = mesh_of_all(device, "pp").get_group()
    stages = []
    for index in own:
        end = (index + 1) * blocks + (args.extra if index == count - 1 else 0)
        module = stack(
            SIZES[args.size],
            range(index * blocks, end),
            seed=args.seed,
            device=device,
            dtype=dtype,
        )
        stage = PipelineStage(module, index, count, device, group=group)
        # Wherever the schedule calls these: between them, it waits for other ranks.
        for method, name in (
            ("forward_one_chunk", "forward"),
            ("backward_one_chunk", "backward"),
            # The first stage has no gradient to send: torch leaves it all of backward as this part.
            ("backward_weight_one_chunk", "backward" if stage.is_first else "weight"),
        ):
            setattr(stage, method, timeline.timed(name, getattr(stage, method)))
        stages.append(stage)

    kind = get_schedule_class(schedule.torch_name)
    runner = kind(
        stages[0] if issubclass(kind, PipelineScheduleSingle) else stages,
        args.micro_batches,
        loss_fn=lambda out, target: F.mse_loss(out.float(), target.float()),
    )
    optimizer = optimizer_of("adamw", (w for s in stages for w in s.submod.parameters()))
    shape = (args.micro_batches * args.batch, args.sequence, SIZES[args.size].width)
    torch.manual_seed(args.seed)  # the same on each rank: the first needs x, the last the target
    x, target = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    inputs = (x,) if any(stage.is_first for stage in stages) else ()
    last = any(stage.is_last for stage in stages)

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        expected = {"target": target, "losses": losses} if last else {}
        runner.step(*inputs, **expected, return_outputs=False)
        with timeline.span("optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean().detach() if last else None

    return step


def headlines(experiment: Experiment) -> Iterator[Headline]:
    """Hold each schedule's bubble against its theory, and the attribution's number against it."""
    options, plan = experiment.plan.options, experiment.plan
    where = f"{plan.ranks} ranks on {plan.device}, {options['micro_batches']} micro-batches"
    for variant in experiment.variants:
        forward_ns, backward_ns, weight_ns = times_ns = [
            experiment.value(f"{t}_ns", variant) or 0.0 for t in ("forward", "backward", "weight")
        ]
        schedule = SCHEDULES[variant]
        stages = stages_of(variant, int(options["virtual"] or 1))
        runs_ns = int(options["micro_batches"] or 1) * stages * (forward_ns + backward_ns)
        each_ns = sum(n * ns for n, ns in zip(schedule.bubble, times_ns, strict=True))
        bubble_ns = (plan.ranks - 1) * max(each_ns, 0.0)
        split = f", of which W {fmt.duration(weight_ns)}" if weight_ns else ""
        yield from waiting_headlines(
            experiment,
            variant,
            system="Pipeline",
            claim=f"bubble of {variant}",
            measure="bubble_ratio",
            # Of equal stages: what unequal ones wait beyond it is imbalance.
            theory=None if options["extra"] or not runs_ns else bubble_ns / (bubble_ns + runs_ns),
            law=schedule.law,
            configuration=f"{where}, {fmt.plural(stages, 'stage')} on each rank, F "
            f"{fmt.duration(forward_ns)}, B {fmt.duration(backward_ns)}{split}",
        )
    losses = training.loss_headline(experiment, "Pipeline", experiment.variants, where)
    if losses is not None:
        yield losses


if __name__ == "__main__":
    as_program(main)
