"""Train a stack of blocks with tensor parallelism: each product cut into columns or rows.

    chopper bench tensor
    chopper bench tensor -- --rate 300mbit
    chopper bench tensor --ranks 8 -- --size 8b --blocks 8 --sequence 8192 --dtype bfloat16

The first products of attention and feed-forward network are cut by columns, the last ones by rows,
as DTensors (arXiv 1909.08053): each rank has an equal part of the heads and of the inner width.
Two all-reduces per block and direction sum the parts up, and nothing else can be computed
meanwhile: they are exposed. They are measured as what a step takes beyond one of the rank's part
alone, which computes the same without communication, on all ranks at once.

On two CPU ranks they go over a link that is shaped to --rate, where there can be one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from chopper import wording as fmt
from chopper.errors import UsageError
from chopper.experiments.declarations import CHANNEL, Needs, Option, Workload, as_program, positive
from chopper.experiments.results import Experiment, Headline
from chopper.workloads import link
from chopper.workloads.dimensions import COMMON, require_peers, stack_bytes, waiting_headlines

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from chopper.workloads.timeline import Stack

WORKLOAD = Workload(
    name="tensor",
    chosen="so that all-reduces over 1 Gbit/s take about as long as the products of two cores",
    summary="a stack of Llama blocks cut by columns and rows as DTensors: exposed all-reduces "
    "beside the bytes over the link and beside the attribution",
    options=(
        *COMMON,
        Option("blocks", "blocks of the stack", 4, positive),
        Option("batch", "sequences of a step", 4, positive),
        Option("sequence", "tokens of a sequence", 128, positive),
        link.RATE,
        CHANNEL,
    ),
    linked=True,
    measures=True,
    repeats=3,
    seconds=30,
    position=6,
)


def needs(args: argparse.Namespace, ranks: int, device: str) -> Needs:
    """Memory of one rank: its part of each block, and the whole hidden states."""
    from chopper.workloads.llama import SIZES

    config = SIZES[args.size]
    require_peers(ranks)
    if config.kv_heads_count % ranks or config.ffn_width % ranks:
        raise UsageError(
            f"--ranks {ranks}: do not divide {config.kv_heads_count} heads of keys and values and "
            f"an inner width of {config.ffn_width}"
        )
    why = link.absence(args.rate, ranks, device)
    return Needs(
        memory_bytes=2  # the cut stack, and the rank's part alone
        * stack_bytes(args, device, layers=args.blocks, tensor_parallel_count=ranks),
        what=f"--size {args.size} --blocks {args.blocks} on {ranks} ranks",
        remedy="choose a smaller size, fewer blocks or sequences, or more GPUs",
        notes=() if why is None else (f"no shaped link ({why}): all-reduces over the loopback",),
    )


def main() -> None:
    """Join the other ranks, train the rank's part alone and the cut stack; leave."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import CommDebugMode

    from chopper.workloads.ranks import joined
    from chopper.workloads.timeline import Timeline, recorded

    args = WORKLOAD.parse()
    rate = None if args.channel is None else link.RATES[args.rate]
    if args.channel is not None:
        link.enter(args.channel, rate)
    with joined(args.device, prog="tensor") as device:
        torch.manual_seed(args.seed)  # the same input on each rank
        x = hidden_states(args, device)
        alone, reduced, timeline = (Timeline(device) for _ in range(3))
        part_step = trainer(part(args, device), x)
        alone.run(part_step, args.steps)
        reduced.run(lambda: dist.all_reduce(x.clone()), 2 * args.steps)
        step = trainer(cut(args, device), x)
        with CommDebugMode() as communication:
            step()
        with recorded(args.output, args.steps) as prof:
            timeline.run(step, args.steps, prof)
            alone.run(part_step, args.steps)  # again: the machine may have changed meanwhile
            alone_ns, step_ns = (of.per_step_ns("step") for of in (alone, timeline))
            prof.measure("exposed_ratio", 1 - alone_ns / step_ns, rank=dist.get_rank())
            prof.measure("alone_step_ns", alone_ns)
            prof.measure("traced_step_ns", step_ns)
            prof.measure("all_reduce_ns", reduced.per_step_ns("step"))
            prof.measure("all_reduce_bytes", x.nbytes)
            prof.measure("all_reduces_count", communication.get_total_counts())
            if rate is not None:
                prof.measure("link_bytes_per_s", rate / 8)


def hidden_states(args: argparse.Namespace, device: torch.device) -> Tensor:
    """Return random hidden states, [batch, sequence, width]."""
    import torch

    from chopper.workloads.llama import SIZES

    shape = (args.batch, args.sequence, SIZES[args.size].width)
    return torch.randn(shape, device=device, dtype=getattr(torch, args.dtype))


def part(args: argparse.Namespace, device: torch.device) -> Stack:
    """Return a rank's part of each block as a block of its own."""
    import msgspec
    import torch
    import torch.distributed as dist

    from chopper.workloads.llama import SIZES
    from chopper.workloads.timeline import stack

    config, ranks = SIZES[args.size], dist.get_world_size()
    narrow = msgspec.structs.replace(
        config,
        heads_count=config.heads_count // ranks,
        kv_heads_count=config.kv_heads_count // ranks,
        ffn_width=config.ffn_width // ranks,
    )
    return stack(
        narrow,
        range(args.blocks),
        seed=args.seed,
        device=device,
        dtype=getattr(torch, args.dtype),
    )


def cut(args: argparse.Namespace, device: torch.device) -> Stack:
    """Cut the blocks' products by columns and rows over all ranks."""
    import torch
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    from chopper.workloads.llama import SIZES
    from chopper.workloads.timeline import mesh_of_all, stack

    blocks = stack(
        SIZES[args.size],
        range(args.blocks),
        seed=args.seed,
        device=device,
        dtype=getattr(torch, args.dtype),
    )
    mesh = mesh_of_all(device, "tp")
    # One input of several products, so that their gradients are summed up before one all-reduce.
    whole = Replicate()
    plan = {
        "attention": PrepareModuleInput(
            input_layouts=(whole, None, None), desired_input_layouts=(whole, None, None)
        ),
        **{f"attention.w{name}": ColwiseParallel() for name in "qkv"},
        "attention.wo": RowwiseParallel(),
        "ffn": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
        **{f"ffn.w{name}": ColwiseParallel() for name in "13"},
        "ffn.w2": RowwiseParallel(),
    }
    for block in blocks.layers.values():
        parallelize_module(block, mesh, plan)
    return blocks


def trainer(blocks: Stack, x: Tensor) -> Callable[[], None]:
    """Return what runs a step of training."""
    from torch.distributed.tensor import DTensor

    from chopper.workloads.llama import optimizer_of

    # A fused update takes DTensors or tensors (norms' weights are whole), not both.
    kinds: dict[bool, list[Tensor]] = {}
    for weight in blocks.parameters():
        kinds.setdefault(isinstance(weight, DTensor), []).append(weight)
    optimizers = [optimizer_of("adamw", weights) for weights in kinds.values()]

    def step() -> None:
        hidden = blocks(x.detach().requires_grad_())  # as an embedding's output would
        hidden.float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def headlines(experiment: Experiment) -> Iterator[Headline]:
    """Hold the measured share, and the attribution's, against bytes over the link."""
    plan, [variant] = experiment.plan, experiment.variants
    step_ns, one_ns, size_bytes, count, rate = (
        experiment.value(name)
        for name in (
            "traced_step_ns",
            "all_reduce_ns",
            "all_reduce_bytes",
            "all_reduces_count",
            "link_bytes_per_s",
        )
    )
    if step_ns is None or one_ns is None or size_bytes is None or count is None:
        return
    sent_bytes = 2 * (plan.ranks - 1) / plan.ranks * count * size_bytes
    by_link_ns = None if rate is None else sent_bytes / rate * 1e9
    over = "no shaped link" if rate is None else f"each end of their link sends {rate / 1e6:g} MB/s"
    yield from waiting_headlines(
        experiment,
        variant,
        system="Tensor parallelism",
        claim="exposed all-reduces",
        measure="exposed_ratio",
        theory=(count * one_ns if by_link_ns is None else by_link_ns) / step_ns,
        law="2(n − 1)/n of the bytes over the link, n ranks"
        if by_link_ns is not None
        else "all-reduces of the same size, one after the other",
        configuration=f"{plan.ranks} ranks on {plan.device}, {over}; {count:.0f} all-reduces of "
        f"{size_bytes / 1e6:.2f} MB per step, {fmt.duration(one_ns)} each alone",
        measures_host=True,
    )


if __name__ == "__main__":
    as_program(main)
