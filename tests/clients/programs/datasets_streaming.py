"""datasets: a stream that is tokenized while it is read, without torch's DataLoader."""

from __future__ import annotations

import datasets
import torch
from stopwatch import Stopwatch
from torch import nn


def documents():
    for i in range(60 * 32):
        yield {"text": " ".join(f"word{(i * 31 + j * j) % 997}" for j in range(400))}


def tokenize(example):
    hashes = [sum(ord(c) * 31**k for k, c in enumerate(w)) for w in example["text"].split()]
    return {"tokens": [value % 1000 for value in hashes][:64]}


stream = datasets.IterableDataset.from_generator(documents).map(tokenize, remove_columns="text")
stream = stream.with_format("torch")
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(1000, 64), nn.Flatten(), nn.Linear(64 * 64, 64))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
watch = Stopwatch()
for step, batch in enumerate(watch.each(stream.iter(batch_size=32))):
    loss = model(batch["tokens"]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.lap()
    print(f"step {step} loss {loss.item():.6f}")
watch.report()
