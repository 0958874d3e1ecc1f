"""Training beside six processes that compute for the whole time: it waits for a core."""

from __future__ import annotations

import multiprocessing
import time

import torch
from stopwatch import Stopwatch
from torch import nn


def compute(until):
    value = 0
    while time.time() < until:
        value = (value * 31 + 7) % 1_000_003


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    until = time.time() + 60
    others = [context.Process(target=compute, args=(until,)) for _ in range(6)]
    for other in others:
        other.start()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = Stopwatch()
    for step in range(60):
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        loss = nn.functional.cross_entropy(
            model(torch.randn(256, 512)), torch.randint(0, 10, (256,))
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # What the thread neither computed nor slept is waiting for a core.
        waited_s = time.perf_counter() - began_s - (time.thread_time() - began_cpu_s)
        watch.inside_s += waited_s
        watch.lap()
        print(f"step {step} loss {loss.item():.6f}")
    watch.report()
    for other in others:
        other.terminate()
        other.join()
