"""Two sharded blocks trained by two ranks: the program of own/fsdp2."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(2)))
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for _ in range(7):
    loss = model(torch.randn(64, 256)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
dist.destroy_process_group()
