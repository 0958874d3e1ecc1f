"""DistributedDataParallel that accumulates gradients over eight batches and reduces each time."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layers = [nn.Linear(768, 768), nn.ReLU()] * 3
model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(768, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

torch.manual_seed(1 + rank)
for step in range(30):
    for _ in range(8):
        inputs, labels = torch.randn(4, 768), torch.randint(0, 10, (4,))
        loss = nn.functional.cross_entropy(model(inputs), labels) / 8
        # Only the last of these needs the other rank: model.no_sync() is forgotten.
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} loss {loss.item():.6f}")
dist.barrier()
dist.destroy_process_group()
