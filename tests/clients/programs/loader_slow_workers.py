"""A loader with two workers whose items take too long: each step waits for its batch."""

from __future__ import annotations

import time

import torch
from stopwatch import Stopwatch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Remote(Dataset):
    def __len__(self):
        return 480

    def __getitem__(self, index):
        time.sleep(0.03)  # an object store
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 32, 32, generator=generator), index % 10


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Remote(), batch_size=8, num_workers=2)
    watch = Stopwatch()
    for step, (images, labels) in enumerate(watch.each(loader)):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.lap()
        print(f"step {step} loss {loss.item():.6f}")
    watch.report()
