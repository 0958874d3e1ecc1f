"""A large data set of Python objects, and a garbage collection "to save memory" in each step."""

from __future__ import annotations

import gc

import torch
from stopwatch import Stopwatch
from torch import nn

torch.manual_seed(0)
samples = [
    {"id": i, "tags": [f"tag {i % 7}"], "features": [float(i % 13), float(i % 5)], "meta": {"i": i}}
    for i in range(150_000)
]
model = nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
watch = Stopwatch()
for step in range(60):
    batch = samples[step * 64 : (step + 1) * 64]
    inputs = torch.tensor([sample["features"] for sample in batch])
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(-1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with watch:
        gc.collect()
    watch.lap()
    print(f"step {step} loss {loss.item():.6f}")
watch.report()
