"""Forward hooks that measure each activation in ten ways: more than the model itself."""

from __future__ import annotations

import torch
from stopwatch import Stopwatch
from torch import nn

watch = Stopwatch()
seen = {}


def measure(name):
    def hook(module, inputs, output):
        with watch:
            values = output.detach()
            seen[name] = [
                *(values.mean(), values.std(), values.abs().max(), values.min(), values.max()),
                *((values == 0).float().mean(), values.norm(), values.isnan().any()),
                *(values.flatten()[:64].quantile(0.5), values.diff(dim=-1).abs().mean()),
            ]

    return hook


torch.manual_seed(0)
model = nn.Sequential(*[m for _ in range(24) for m in (nn.Linear(256, 256), nn.ReLU())])
for name, module in model.named_modules():
    if not list(module.children()):
        module.register_forward_hook(measure(name))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    inputs = torch.randn(64, 256)
    loss = nn.functional.mse_loss(model(inputs), inputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.lap()
    print(f"step {step} loss {loss.item():.6f} dead {seen['1'][5].item():.3f}")
watch.report()
