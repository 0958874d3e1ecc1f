"""Train a Llama model with FSDP1: each block's weights sharded as one flat parameter.

    chopper bench fsdp1 --ranks 2
    torchrun --standalone --nproc-per-node 2 -m chopper.workloads.fsdp1 --output runs/mine
    torchrun --standalone --nproc-per-node 8 -m chopper.workloads.fsdp1 \
        --size 8b --sequence 8192 --batch 1 --dtype bfloat16 --checkpoint full

On GPUs (NVIDIA or AMD) when there is one for each rank, else on the CPU; --help lists all options.
fsdp2.py is the same training with fully_shard: the same losses, another machinery.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from chopper.experiments.declarations import Workload, as_program
from chopper.workloads import training
from chopper.workloads.training import needs as needs

if TYPE_CHECKING:
    import torch
    from torch import nn

WORKLOAD = Workload(
    name="fsdp1",
    summary="Llama training sharded by FullyShardedDataParallel: flat parameters, one gather per "
    "block, limited prefetch",
    options=training.OPTIONS,
    seconds=20,
    position=1,
)


def main() -> None:
    """Join the other ranks, train, leave."""
    training.run(WORKLOAD, sharded_model)


def sharded_model(
    args: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard the model of ``args.size`` over all ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        FullyShardedDataParallel,
        MixedPrecision,
        ShardingStrategy,
    )
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from chopper.workloads.llama import Block, adamw, initial_value, unbuilt

    ranks = dist.get_world_size()
    model = unbuilt(args)
    names = {module: name for name, module in model.named_modules()}
    unit = CheckpointWrapper if args.checkpoint == "full" else Block

    # FSDP calls this for each module of a unit before it flattens the unit's weights and keeps
    # its shard of them, so that one unit at a time is whole.
    @torch.no_grad()
    def materialize(module: nn.Module) -> None:
        module.to_empty(device=device, recurse=False)
        for name, weight in module.named_parameters(recurse=False):
            full_name = f"{names[module]}.{name}"
            value = initial_value(
                full_name, weight.shape, model.config, seed=args.seed, device=device
            )
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

    return sharded, adamw(sharded)


if __name__ == "__main__":
    as_program(main)
