"""An optimizer that loops over many small weights, one by one: most of the step's time."""

from __future__ import annotations

import torch
from stopwatch import Stopwatch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[m for _ in range(64) for m in (nn.Linear(64, 64), nn.LayerNorm(64))])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False, amsgrad=True)
watch = Stopwatch()
for step in range(60):
    inputs = torch.randn(32, 64)
    loss = nn.functional.mse_loss(model(inputs), inputs)
    optimizer.zero_grad()
    loss.backward()
    with watch:
        optimizer.step()
    watch.lap()
    print(f"step {step} loss {loss.item():.6f}")
watch.report()
