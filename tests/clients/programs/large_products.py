"""Large matrix products and little else: a training that computes."""

from __future__ import annotations

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    inputs = torch.randn(512, 1024)
    loss = nn.functional.mse_loss(model(inputs), inputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}")
