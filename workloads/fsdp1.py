"""Train a Llama model with FSDP1: each block's weights sharded as one flat parameter.

    chopper run fsdp1 --ranks 2
    torchrun --standalone --nproc-per-node 2 -m chopper.workloads.fsdp1 --output runs/mine
    torchrun --standalone --nproc-per-node 8 -m chopper.workloads.fsdp1 \
        --size 8b --sequence 8192 --batch 1 --dtype bfloat16 --checkpoint full

On GPUs (NVIDIA or AMD) when there is one for each rank, else on the CPU; --help lists all options.
fsdp2.py is the same training with fully_shard: the same losses, another machinery.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import chopper
from chopper.workloads import options
from chopper.workloads.llama import SIZES, Block, Llama, initial_value
from chopper.workloads.machine import BACKEND, choose_device
from chopper.workloads.tokens import token_loader


def main() -> None:
    """Join the other ranks, train, leave."""
    args = options.parse(
        options.TRAINING, prog="fsdp1", description="Train a Llama model with FSDP1."
    )
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("fsdp1: start it with `chopper run fsdp1` or through torchrun")

    # torchrun starts one process per rank and says in the environment which one this is.
    local_rank = int(os.environ["LOCAL_RANK"])
    kind, _ = choose_device(args.device, local_ranks=int(os.environ["LOCAL_WORLD_SIZE"]))
    device = torch.device(f"cuda:{local_rank}" if kind == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(BACKEND[kind], device_id=device if kind == "cuda" else None)
    try:
        train(args, device)
        # Gloo's threads need Python's lock to let go of the last tensors. Waiting here leaves it
        # to them; at the interpreter's end, wanting it would abort the process (torch 2.13).
        dist.barrier()
    finally:
        dist.destroy_process_group()


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train ``args.steps`` steps under ``chopper.profile`` and print what came of it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = SIZES[args.size]

    # On the meta device weights have a shape but no storage: nowhere does the whole model exist.
    with torch.device("meta"):
        model = Llama(config)
    names = {module: name for name, module in model.named_modules()}

    # Checkpointing goes inside sharding: recomputing a block must not gather its weights again.
    if args.checkpoint == "full":
        for index, block in enumerate(model.layers):
            model.layers[index] = checkpoint_wrapper(block)
    unit = CheckpointWrapper if args.checkpoint == "full" else Block

    # FSDP calls this for each module of a unit before it flattens the unit's weights and keeps
    # its shard of them, so that one unit at a time is whole.
    @torch.no_grad()
    def materialize(module: nn.Module) -> None:
        module.to_empty(device=device, recurse=False)
        for name, weight in module.named_parameters(recurse=False):
            full_name = f"{names[module]}.{name}"
            value = initial_value(full_name, weight.shape, config, seed=args.seed, device=device)
            weight.copy_(value)

    # Each block is one communication unit: its weights are gathered just before it runs and
    # dropped after it; embedding, last norm and head remain with the outermost unit.
    # Gradients are reduced in float32, or the sum over many ranks loses what bfloat16 cannot hold.
    dtype = getattr(torch, args.dtype)
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({unit}),
        # One rank has nobody to share with, and FSDP warns when it has to find that out itself.
        sharding_strategy=ShardingStrategy.FULL_SHARD if ranks > 1 else ShardingStrategy.NO_SHARD,
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        param_init_fn=materialize,
        device_id=device,
        # The optimizer sees the model's own weights (views of the flat one), under their names.
        use_orig_params=True,
    )

    # One fused kernel updates all weights; the default on the CPU walks them one by one.
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    loader = token_loader(
        steps=args.steps,
        batch=args.batch,
        sequence=args.sequence,
        vocabulary=config.vocabulary,
        seed=args.seed,
        rank=rank,
        ranks=ranks,
        workers=args.workers,
        pin_memory=device.type == "cuda",
    )

    losses: list[Tensor] = []
    marks_ns = [time.perf_counter_ns()]
    with chopper.profile(args.output, memory=args.allocations == "yes") as prof:
        for tokens, labels in prof.watch(loader):
            tokens = tokens.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            logits = sharded(tokens)
            # In float32: bfloat16 has 8 significant bits, too few for a sum over a vocabulary.
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            # Kept on the device: .item() here would make the host wait for each step.
            losses.append(loss.detach())
            prof.step()
            marks_ns.append(time.perf_counter_ns())

    # Of rank 0's sequences: a mean over ranks would need one more collective.
    if rank == 0:
        for step, loss in enumerate(torch.stack(losses).tolist()):
            print(f"step {step:4d}   loss {loss:.4f}")
        # The first step pays for warming up; the median leaves out the steps that were traced.
        periods_ns = [end - begin for begin, end in pairwise(marks_ns)]
        step_s = statistics.median(periods_ns[1:] or periods_ns) / 1e9
        tokens_hz = ranks * args.batch * args.sequence / step_s
        print(
            f"fsdp1 {args.size} {args.dtype}, {ranks} ranks on {device.type}: "
            f"{step_s:.3f} s per step, {tokens_hz:,.0f} tokens/s",
            flush=True,
        )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        # Wanted, and recorded up to here; the traceback of each rank would only bury that.
        sys.exit(130)
