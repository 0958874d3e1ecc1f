"""torch.compile, with batches of several lengths that compile again."""

from __future__ import annotations

import torch
from torch import nn

torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, inputs, depth):
        for _ in range(depth):
            inputs = self.layers(inputs)
        return inputs.square().mean()


model = torch.compile(Model(), backend="aot_eager", dynamic=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(24):
    # A new depth every fourth step: each compiles anew.
    loss = model(torch.randn(128, 64), depth=1 + step // 4)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}")
