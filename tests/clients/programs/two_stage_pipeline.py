"""Two equal pipeline stages, one micro-batch: each stage waits while the other one works."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
torch.set_num_threads(1)
stage = nn.Sequential(*[nn.Linear(512, 512), nn.ReLU()] * 4)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)

for step in range(30):
    optimizer.zero_grad()
    if rank == 0:
        hidden = stage(torch.randn(512, 512))
        dist.send(hidden.detach(), 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
    else:
        received = torch.empty(512, 512)
        dist.recv(received, 0)
        received.requires_grad_()
        loss = stage(received).square().mean()
        loss.backward()
        dist.send(received.grad, 0)
        print(f"step {step} loss {loss.item():.6f}")
    optimizer.step()
dist.destroy_process_group()
