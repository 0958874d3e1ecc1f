"""asyncio: the forward pass in a thread of a pool, the rest of the step in the main one."""

from __future__ import annotations

import asyncio

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(640, 64)
dataloader = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), batch_size=16)


async def main() -> None:
    for _ in range(2):
        for x, y in dataloader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(await asyncio.to_thread(model, x), y)
            loss.backward()
            optimizer.step()
            print(f"loss {loss.item():.6f}")


asyncio.run(main())
