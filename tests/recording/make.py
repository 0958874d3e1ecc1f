"""A program to record, and what a recording of it holds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch
from torch import nn

from chopper.storage.run import Run

TRACE_ONLY = ("torch_trace",)


class Task:
    """A model, its optimizer, and one training step."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, batch=None):
        self.model(torch.ones(2, 8) if batch is None else batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def steps_of(path):
    return Run.open(Path(path)).table(0, "step").to_pylist()


def traced_of(path):
    return [row["number"] for row in steps_of(path) if row["traced"]]


def trace_of(path, name="trace.json.gz"):
    return json.loads(gzip.decompress((Path(path) / "rank-00000" / name).read_bytes()))


def names_of(path):
    return [e["name"] for e in trace_of(path)["traceEvents"] if e.get("ph") == "X"]


def findings_of(path="run"):
    return [finding.code for finding in Run.open(Path(path)).part(0).findings]
