"""Record a loop of Accelerate: the two marked lines are all that chopper needs.

    accelerate launch --num_processes 2 examples/train_accelerate.py runs/mine

A classifier, with two micro-steps of accumulated gradients in each step and a checkpoint at the
end. Each process writes its part of the run.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from chopper.integrations.accelerate import ChopperTracker  # chopper


def main(output: str | None) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=2,
        log_with=ChopperTracker(output),  # chopper
    )
    accelerator.init_trackers("example")
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(1280, 128), torch.randint(0, 10, (1280,)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.log({"loss": loss.item()})
    accelerator.print(f"last loss {loss.item():.4f}")
    accelerator.save_state(tempfile.mkdtemp())
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
