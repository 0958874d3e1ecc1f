"""A program to record, and what a recording of it holds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch
from torch import nn

from chopper.storage.run import Run

TRACE_ONLY = ("torch_trace",)

DESCENT = """
import torch

class Descent(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def add_param_group(self, group):
        torch.optim.Optimizer.add_param_group.__wrapped__(self, group)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad
                    parameter.grad = None
"""
"""An optimizer for programs: torch's own import its compiler, which doubles how long they take."""


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
