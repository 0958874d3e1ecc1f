"""A short training of a model that is compiled first: compilation takes longer than all steps."""

from __future__ import annotations

import json
import time

import torch
from torch import nn

torch.manual_seed(0)
layers = [m for _ in range(48) for m in (nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU())]
model = torch.compile(nn.Sequential(*layers), backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
ends_s = [time.perf_counter()]
for step in range(20):
    inputs = torch.randn(64, 128)
    loss = nn.functional.mse_loss(model(inputs), inputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ends_s.append(time.perf_counter())
    print(f"step {step} loss {loss.item():.6f}")
ratio = (ends_s[1] - ends_s[0]) / (ends_s[-1] - ends_s[0])
print(json.dumps({"planted_ratio": round(ratio, 4), "loop_s": round(ends_s[-1] - ends_s[0], 3)}))
