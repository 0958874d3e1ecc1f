"""Record an engine of DeepSpeed: the two marked lines are all that chopper needs.

    torchrun --standalone --nproc-per-node 2 examples/train_deepspeed.py runs/mine

ZeRO stage 2, with two micro-steps of accumulated gradients in each step and a checkpoint at the
end. Each process writes its part of the run.
"""

from __future__ import annotations

import sys

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from chopper.integrations.deepspeed import ChopperHook  # chopper


def main(output: str | None, checkpoints: str) -> None:
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
        "steps_per_print": 1000,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ChopperHook(engine, output)  # chopper
    data = TensorDataset(torch.randn(1280, 128), torch.randint(0, 10, (1280,)))
    for inputs, targets in DataLoader(data, batch_size=32, sampler=DistributedSampler(data)):
        loss = F.cross_entropy(engine(inputs.to(engine.device)), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(checkpoints)
    if dist.get_rank() == 0:
        print(f"last loss {loss.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None, sys.argv[2] if len(sys.argv) > 2 else "saved")
