"""Experts on two ranks: three quarters of the tokens go to the second rank's expert."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
torch.set_num_threads(1)
TOKENS = 1024
FEW, MANY = TOKENS // 4, TOKENS - TOKENS // 4
dense = DistributedDataParallel(nn.Linear(256, 256))
expert = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256))
optimizer = torch.optim.SGD([*dense.parameters(), *expert.parameters()], lr=0.01)

for step in range(30):
    hidden = dense(torch.randn(TOKENS, 256))
    sent, mine = [FEW, MANY], [(FEW, MANY)[rank]] * 2
    routed = all_to_all_single(torch.empty(sum(mine), 256), hidden, mine, sent)
    back = all_to_all_single(torch.empty(TOKENS, 256), expert(routed), sent, mine)
    loss = back.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"rank {rank} step {step} loss {loss.item():.6f}")
dist.destroy_process_group()
