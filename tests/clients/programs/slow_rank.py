"""A slow rank: of two equal ranks, one sleeps in each step, and the other waits for it."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(30):
    inputs, targets = torch.randn(64, 512), torch.randint(0, 10, (64,))
    loss = nn.functional.cross_entropy(model(inputs), targets)
    if rank == 1:
        time.sleep(0.15)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"rank {rank} step {step} loss {loss.item():.6f}")
dist.destroy_process_group()
