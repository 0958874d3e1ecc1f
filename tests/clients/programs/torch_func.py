"""torch.func: gradients of a function, weights that are changed by hand, no optimizer."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call, grad_and_value

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
inputs = torch.randn(960, 64)


def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    logits = functional_call(model, weights, (x,))
    return nn.functional.cross_entropy(logits, x[:, :10].argmax(1))


for x in inputs.split(16):
    gradients, loss = grad_and_value(loss_of)(weights, x)
    weights = {name: w - 0.1 * gradients[name] for name, w in weights.items()}
    print(f"loss {loss.item():.6f}")
