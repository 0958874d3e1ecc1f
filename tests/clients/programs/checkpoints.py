"""A checkpoint of model and optimizer every third step: half of the loop's time."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from stopwatch import Stopwatch
from torch import nn


def save(path, step):
    """Write a checkpoint beside the last one, flush it, and put it in its place."""
    beside = path.with_suffix(".tmp")
    with beside.open("wb") as file:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(50_000, 128), nn.Flatten(), nn.Linear(32 * 128, 512), nn.ReLU(), nn.Linear(512, 10)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
watch = Stopwatch()
for step in range(60):
    tokens, labels = torch.randint(0, 50_000, (32, 32)), torch.randint(0, 10, (32,))
    loss = nn.functional.cross_entropy(model(tokens), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 2:
        with watch:
            save(Path("checkpoint.pt"), step)
    watch.lap()
    print(f"step {step} loss {loss.item():.6f}")
watch.report()
