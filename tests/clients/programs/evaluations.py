"""An evaluation over the whole validation set every tenth step: most of the loop's time."""

from __future__ import annotations

import torch
from stopwatch import Stopwatch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def dataset(length):
    return TensorDataset(torch.randn(length, 256), torch.randint(0, 10, (length,)))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = sum((model(inputs).argmax(-1) == labels).sum().item() for inputs, labels in loader)
    model.train()
    return correct / len(loader.dataset)


torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
training = DataLoader(dataset(60 * 128), batch_size=128, shuffle=True)
validation = DataLoader(dataset(12_288), batch_size=128)
watch = Stopwatch()
for step, (inputs, labels) in enumerate(training):
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        with watch:
            accuracy = evaluate(model, validation)
        print(f"step {step} accuracy {accuracy:.4f}")
    watch.lap()
    print(f"step {step} loss {loss.item():.6f}")
watch.report()
