"""Batches gathered from a memory-mapped file and decoded with numpy, without torch's DataLoader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from stopwatch import Stopwatch
from torch import nn

ROWS, WIDTH = 4096, 4096


def write(path):
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for _ in range(ROWS):
            file.write(rng.integers(0, 1000, WIDTH, dtype=np.uint16).tobytes())


def batch(data, rng):
    """Read rows in random order, scale each by its own quantiles."""
    rows = data[rng.integers(0, ROWS, 256)].astype(np.float32)
    low, high = np.quantile(rows, [0.01, 0.99], axis=1, keepdims=True)
    return torch.from_numpy(np.clip((rows - low) / (high - low), 0, 1).astype(np.float32))


path = Path("tokens.bin")
write(path)
data, rng = (
    np.memmap(path, dtype=np.uint16, mode="r", shape=(ROWS, WIDTH)),
    np.random.default_rng(1),
)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
watch = Stopwatch()
for step in range(60):
    with watch:
        inputs = batch(data, rng)
    loss = nn.functional.mse_loss(model(inputs), inputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.lap()
    print(f"step {step} loss {loss.item():.6f}")
watch.report()
