"""A loader with two workers whose items take from 1 to 200 ms: every few steps wait long."""

from __future__ import annotations

import random
import time

import torch
from stopwatch import Stopwatch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Uneven(Dataset):
    def __len__(self):
        return 480

    def __getitem__(self, index):
        dice = random.Random(index)
        time.sleep(0.2 if dice.random() < 0.2 else 0.001 + 0.01 * dice.random())
        generator = torch.Generator().manual_seed(index)
        return torch.randn(256, generator=generator), index % 10


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Uneven(), batch_size=8, num_workers=2)
    watch = Stopwatch()
    for step, (inputs, labels) in enumerate(watch.each(loader)):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.lap()
        print(f"step {step} loss {loss.item():.6f}")
    watch.report()
