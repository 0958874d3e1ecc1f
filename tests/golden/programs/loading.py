"""A plain loop that waits for its data and collects garbage: the program of own/loading."""

from __future__ import annotations

import gc
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.full((128,), float(index))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step, batch in enumerate(DataLoader(Slow(), batch_size=4)):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 2:
        gc.collect()
