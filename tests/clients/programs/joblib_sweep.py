"""joblib: four trainings, two at a time, in processes that loky keeps."""

from __future__ import annotations

import torch
from joblib import Parallel, delayed
from torch import nn


def train(lr):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    inputs, targets = torch.randn(256, 128), torch.randn(256, 1)
    for _ in range(40):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    rates = (0.001, 0.01, 0.02, 0.05)
    for lr, loss in zip(rates, Parallel(n_jobs=2)(delayed(train)(lr) for lr in rates), strict=True):
        print(f"lr {lr} loss {loss:.6f}")
