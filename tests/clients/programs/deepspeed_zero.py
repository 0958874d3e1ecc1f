"""DeepSpeed: ZeRO stage 2 on two ranks, launched by torchrun."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
)
engine, optimizer, _, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    config={
        "train_micro_batch_size_per_gpu": 32,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
        "steps_per_print": 1000000,
    },
)
data = torch.utils.data.TensorDataset(torch.randn(2560, 256), torch.randint(0, 10, (2560,)))
sampler = torch.utils.data.DistributedSampler(data)
for step, (inputs, targets) in enumerate(
    torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)
):
    loss = F.cross_entropy(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0:
        print(f"micro-step {step} loss {loss.item():.6f}")
dist.barrier()
dist.destroy_process_group()
