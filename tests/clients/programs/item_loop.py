"""A loss that is made sample by sample with .item(), to weight the hard samples."""

from __future__ import annotations

import torch
from stopwatch import Stopwatch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
watch = Stopwatch()
for step in range(60):
    inputs, labels = torch.randn(1024, 128), torch.randint(0, 10, (1024,))
    losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
    with watch:
        hardest = max(losses[i].item() for i in range(len(losses)))
        weights = torch.tensor([losses[i].item() / hardest for i in range(len(losses))])
        correct = sum((losses[i] < 1.0).item() for i in range(len(losses)))
    loss = (losses * weights).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.lap()
    print(f"step {step} loss {loss.item():.6f} easy {correct}")
watch.report()
