"""A recurrent network written out in Python over tiny tensors: thousands of operators a step."""

from __future__ import annotations

import torch
from torch import nn


class Cell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(4))

    def forward(self, x, h, c):
        joined = torch.cat([x, h], dim=-1)
        i, f, o, g = (gate(joined) for gate in self.gates)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


torch.manual_seed(0)
cell = Cell(16)
optimizer = torch.optim.SGD(cell.parameters(), lr=0.01)
for step in range(60):
    inputs = torch.randn(64, 4, 16)
    h = c = torch.zeros(4, 16)
    outputs = []
    for x in inputs:
        h, c = cell(x, h, c)
        outputs.append(h)
    loss = nn.functional.mse_loss(torch.stack(outputs), inputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}")
