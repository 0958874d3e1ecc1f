"""A loop with a list of callbacks, one of which compares all weights with their last values."""

from __future__ import annotations

import torch
from stopwatch import Stopwatch
from torch import nn

watch = Stopwatch()


class Progress:
    def on_step_end(self, model, step, loss):
        print(f"step {step} loss {loss.item():.6f}")


class WeightHistory:
    """Keeps quantiles of how far each weight moved."""

    def __init__(self):
        self.last, self.rows = {}, []

    def on_step_end(self, model, step, loss):
        for name, weight in model.named_parameters():
            values = weight.detach().flatten().tolist()
            moved = sorted(
                abs(a - b) for a, b in zip(values, self.last.get(name, values), strict=True)
            )
            self.rows.append((step, name, moved[len(moved) // 2], moved[-1]))
            self.last[name] = values


torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
callbacks = [Progress(), WeightHistory()]
for step in range(60):
    inputs, labels = torch.randn(2048, 128), torch.randint(0, 10, (2048,))
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with watch:
        for callback in callbacks:
            callback.on_step_end(model, step, loss)
    watch.lap()
watch.report()
