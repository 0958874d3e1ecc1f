"""Record a training loop of one's own, in one process.

    python examples/train_with_profile.py runs/mine
    chopper analyze runs/mine
    chopper report runs/mine -o report.html

The three marked lines are all that chopper needs; only the first is required.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chopper


def main(output: str | None) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(
        nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(12 * 512, 256)
    labels = (inputs @ torch.randn(256, 10)).argmax(dim=1)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=512, shuffle=True)

    with chopper.profile(output) as prof:  # 1: records what happens inside
        for batch, target in prof.watch(loader):  # 2: tells waiting for input apart
            loss = F.cross_entropy(model(batch.to(device)), target.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()  # 3: says where a step ends, instead of finding it at the optimizer
    print(f"last loss {loss.item():.4f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
