"""Causal ring attention: blocks of keys go round, and the last rank attends to twice as many."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
torch.set_num_threads(1)
project = nn.Linear(256, 768)
optimizer = torch.optim.SGD(project.parameters(), lr=0.01)

for step in range(30):
    query, key, value = project(torch.randn(2, 512, 256)).chunk(3, dim=-1)
    block = torch.stack([key, value]).detach()
    output = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    for turn in range(1, world_size):
        received = torch.empty_like(block)
        sends = dist.isend(block, (rank + 1) % world_size)
        receives = dist.irecv(received, (rank - 1) % world_size)
        sends.wait()
        receives.wait()
        block = received
        # Of the blocks that come round, a rank attends to those before its own.
        if turn <= rank:
            for _ in range(4):
                output = output + nn.functional.scaled_dot_product_attention(query, *block)
    loss = output.square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in project.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    print(f"rank {rank} step {step} loss {loss.item():.6f}")
dist.destroy_process_group()
