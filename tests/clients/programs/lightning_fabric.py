"""Lightning Fabric: a loop written by hand, with an evaluation every 20 steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

seed_everything(0)
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model, optimizer = fabric.setup(model, optimizer)
data = TensorDataset(torch.randn(640, 3, 32, 32), torch.randint(0, 10, (640,)))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=16, shuffle=True))
held_out = fabric.setup_dataloaders(DataLoader(data, batch_size=16))

step = 0
for _ in range(2):
    for images, labels in loader:
        model.train()
        loss = F.cross_entropy(model(images), labels)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"step {step} loss {loss.item():.6f}")
        step += 1
        if step % 20 == 0:
            model.eval()
            with torch.no_grad():
                losses = [F.cross_entropy(model(images), labels) for images, labels in held_out]
            fabric.print(f"held out {torch.stack(losses).mean().item():.6f}")
