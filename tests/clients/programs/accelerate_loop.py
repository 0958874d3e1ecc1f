"""Accelerate: the loop of its quickstart, on two processes, with an evaluation at the end."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
set_seed(0)
model = nn.Sequential(
    nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
data = TensorDataset(torch.randn(7680, 256), torch.randint(0, 10, (7680,)))
loader = DataLoader(data, batch_size=64, shuffle=True)
evaluation = DataLoader(data, batch_size=64)
model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
    model, optimizer, loader, evaluation, scheduler
)

model.train()
for step, (inputs, targets) in enumerate(loader):
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.print(f"step {step} loss {loss.item():.6f}")

model.eval()
correct = 0
for inputs, targets in evaluation:
    with torch.no_grad():
        predictions = model(inputs).argmax(-1)
    predictions, targets = accelerator.gather_for_metrics((predictions, targets))
    correct += (predictions == targets).sum().item()
accelerator.print(f"accuracy {correct / len(data):.4f}")
accelerator.end_training()
