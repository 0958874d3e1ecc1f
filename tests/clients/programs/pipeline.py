"""Pipeline parallelism: two stages, GPipe, on two ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
# The second stage has four times the work, so the first one waits for it.
layers = [nn.Linear(512, 512), nn.ReLU()] * (1 if rank == 0 else 4)
module = nn.Sequential(*layers)
optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
stage = PipelineStage(module, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)

torch.manual_seed(2)
for step in range(30):
    inputs, targets = torch.randn(256, 512), torch.randn(256, 512)
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(inputs)
    else:
        losses = []
        schedule.step(target=targets, losses=losses)
        print(f"step {step} loss {torch.stack(losses).mean().item():.6f}")
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
