"""Train a Llama model with FSDP2: each weight sharded on its own, as a DTensor.

    chopper bench fsdp2 --ranks 2
    torchrun --standalone --nproc-per-node 2 -m chopper.workloads.fsdp2 --output runs/mine
    torchrun --standalone --nproc-per-node 8 -m chopper.workloads.fsdp2 \
        --size 8b --sequence 8192 --batch 1 --dtype bfloat16 --checkpoint full

On GPUs (NVIDIA or AMD) when there is one for each rank, else on the CPU; --help lists all options.
fsdp1.py is the same training with FullyShardedDataParallel: the same losses, another machinery.
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
    name="fsdp2",
    summary="Llama training sharded by fully_shard: per-weight DTensors, copies in and out of each "
    "gather, deterministic memory",
    options=training.OPTIONS,
    seconds=20,
    position=2,
)


def main() -> None:
    """Join the other ranks, train, leave."""
    training.run(WORKLOAD, sharded_model)


def sharded_model(
    args: argparse.Namespace, device: torch.device, *, offload: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Shard the model of ``args.size`` over all ranks; with ``offload``, in host memory."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )
    from torch.distributed.tensor import DTensor, distribute_tensor

    from chopper.workloads.llama import adamw, initial_value, unbuilt

    ranks = dist.get_world_size()
    model = unbuilt(args)
    names = {module: name for name, module in model.named_modules()}

    # Innermost first. Each block is one communication unit: its weights are gathered just before
    # it runs and dropped after it; embedding, last norm and head remain with the outermost unit.
    # Gradients are reduced in float32, or the sum over many ranks loses what bfloat16 cannot hold.
    mesh = init_device_mesh(device.type, (ranks,))
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, args.dtype), reduce_dtype=torch.float32
    )
    offload_policy = (
        CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    )
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=offload_policy)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload_policy)

    # Now each rank gives its own shards storage (on the host, where FSDP2 is to offload them), and
    # keeps its part of each initial value.
    model.to_empty(device="cpu" if offload else device)
    with torch.no_grad():
        for module, module_name in names.items():
            for name, weight in module.named_parameters(recurse=False):
                assert isinstance(weight, DTensor)
                full_name = f"{module_name}.{name}"
                value = initial_value(
                    full_name, weight.shape, model.config, seed=args.seed, device=device
                )
                # All ranks made the same value, so none has to send it (src_data_rank=None).
                weight.copy_(distribute_tensor(value, mesh, weight.placements, src_data_rank=None))

    return model, adamw(model)


if __name__ == "__main__":
    as_program(main)
