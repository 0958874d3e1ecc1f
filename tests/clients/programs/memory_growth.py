"""A loop that keeps each step's activations to look at them later: memory grows."""

from __future__ import annotations

import torch
from torch import nn

torch.manual_seed(0)
body = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
head = nn.Linear(512, 1)
optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-3)
history = []
for step in range(120):
    inputs = torch.randn(2048, 128)
    hidden = body(inputs)
    loss = nn.functional.mse_loss(head(hidden), inputs.mean(-1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append((loss, hidden))
    print(f"step {step} loss {loss.item():.6f}")
print(f"mean activation {sum(hidden.mean().item() for _, hidden in history) / len(history):.6f}")
