"""What a trace shows besides operators: waits for input, layers, recomputation."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import chopper
from chopper import pipeline
from chopper.storage.run import Run
from tests.recording.make import TRACE_ONLY, findings_of, names_of, trace_of, traced_of


def test_watch_shows_the_wait_for_input(task):
    def generate():
        for _ in range(4):
            torch.ones(3)
            yield torch.ones(2, 8)

    with chopper.profile("run", collect=TRACE_ONLY) as prof:
        for batch in prof.watch(generate()):
            task.step(batch)
            prof.step()
    events = [e for e in trace_of("run")["traceEvents"] if e.get("ph") == "X"]
    waits = [e for e in events if e["name"] == "chopper::data"]
    # iter(), four items, and the end of the generator
    assert len(waits) == 6
    ones = [e for e in events if e["name"] == "aten::ones"]
    inside = [o for o in ones if any(w["ts"] <= o["ts"] <= w["ts"] + w["dur"] for w in waits)]
    assert len(inside) == 8  # two per item, made while the loop waited


def test_watched_is_what_it_watches(task):
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(6, 8)), 2)
    prof = chopper.profile("run")
    watched = prof.watch(loader)
    assert len(watched) == 3
    assert watched.batch_size == 2
    assert sum(len(batch) for (batch,) in watched) == 6
    with pytest.raises(AttributeError, match="no_such"):
        _ = watched.no_such
    assert next(prof.watch(iter([5, 6]))) == 5
    assert prof.watch([5, 6])[1] == 6
    assert bool(prof.watch(iter(()))) is True  # as an iterator is, which has no length
    assert bool(prof.watch([])) is False


def test_layers_and_their_backward(task):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.head = nn.Linear(8, 1)

        def forward(self, x):
            for layer in self.body:
                x = layer(x).relu()
            return self.head(x)

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with chopper.profile("run", collect=TRACE_ONLY):
        for _ in range(3):
            net(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    names = names_of("run")
    for layer in ("Net", "body.0", "body.1", "head"):
        assert f"chopper::layer::{layer}" in names
    assert "chopper::forward" in names

    run = Run.open(Path("run"))
    calls = run.table(0, "layer_sequence").to_pylist()
    events = trace_of("run")["traceEvents"]
    found = []
    for event in events:
        if event.get("name") == "AddmmBackward0":
            number = event["args"]["Sequence number"]
            inner = [c for c in calls if c["sequence_low_id"] <= number < c["sequence_high_id"]]
            # innermost: the shortest range
            found.append(
                min(inner, key=lambda c: c["sequence_high_id"] - c["sequence_low_id"])["layer"]
            )
    assert found == ["head", "body.1", "body.0"] * 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_told_apart(reentrant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
            self.head = nn.Linear(8, 1)

        def forward(self, x):
            return self.head(checkpoint(self.block, x, use_reentrant=reentrant))

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with chopper.profile("run", collect=TRACE_ONLY, steps=(0, 3)):
        for _ in range(3):
            net(torch.ones(2, 8, requires_grad=True)).sum().backward()
            optimizer.step()
    names = names_of("run")
    assert names.count("chopper::layer::block.0") == 3
    assert names.count("chopper::recompute::block.0") == 3
    assert "chopper::recompute::head" not in names
    again = [
        row["layer"]
        for row in Run.open(Path("run")).table(0, "layer_sequence").to_pylist()
        if row["recompute"]
    ]
    assert again.count("block.0") == 3


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_backward_that_is_differentiated_is_no_recomputation(checkpoints):
    # A gradient penalty: the gradient is part of the loss.
    body = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
    head = nn.Linear(16, 1)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)

    def between(x):
        return checkpoint(body, x, use_reentrant=False) if checkpoints else body(x)

    with chopper.profile("run", collect=TRACE_ONLY, steps=(0, 2)):
        for _ in range(2):
            x = torch.ones(4, 8, requires_grad=True)
            y = head(between(x)).sum()
            (gradient,) = torch.autograd.grad(y, x, create_graph=True)
            (y + gradient.pow(2).sum()).backward()
            optimizer.step()
    phases = {group.key for group in pipeline.attribute("run").by("phase")}
    assert "backward" in phases
    assert ("recompute" in phases) == checkpoints
    assert [f.code for f in pipeline.attribute("run").findings].count("trace.double_backward") == 1


def test_calls_of_modules_are_torchs_own_when_no_trace_is_taken(task):
    from torch.nn.modules import module as nn_module

    own = nn.Module.__call__
    with chopper.profile("run", collect=TRACE_ONLY, steps=(2, 3)) as prof:
        watched = []
        for _ in range(5):
            watched.append(nn.Module.__call__ is not own)
            assert not nn_module._global_forward_hooks
            task.step()
            prof.step()
    assert watched == [False, True, True, False, False]
    assert nn.Module.__call__ is own


class Residual(nn.Module):
    """Two layers, and a graph break before the second if asked for."""

    def __init__(self, broken):
        super().__init__()
        self.broken = broken
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        if self.broken:
            torch._dynamo.graph_break()
        return x + self.b(y)


def _in_place(net, backend):
    net.compile(backend=backend)
    return net


def _by_layer(net, backend):
    net[1].compile(backend=backend)
    net[0] = torch.compile(net[0], backend=backend, fullgraph=True)
    return net


def _hooked(net, backend):
    net[0].a.register_forward_hook(lambda *_: None)
    net[1].b.register_forward_pre_hook(lambda *_: None)
    return torch.compile(net, backend=backend)


def _function(net, backend):
    return torch.compile(lambda x: net(x) * 2, backend=backend)


COMPILED = {
    "whole": lambda net, backend: torch.compile(net, backend=backend, fullgraph=True),
    "broken": lambda net, backend: torch.compile(net, backend=backend),
    "in place": _in_place,
    "by layer": _by_layer,
    "with hooks of its own": _hooked,
    "function": _function,
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own
@pytest.mark.parametrize("how", COMPILED)
def test_a_program_compiles_as_often_as_without_chopper(how):
    counts = []
    for steps in (None, (1, 3), (3, 4)):  # unrecorded; traced from its first call on; later
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        backend = CompileCounter()
        net = nn.Sequential(Residual(how == "broken"), Residual(False))
        model = COMPILED[how](net, backend)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        profile = chopper.profile(collect=TRACE_ONLY, steps=steps)
        with profile if steps is not None else contextlib.nullcontext():
            for _ in range(6):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        counts.append((backend.frame_count, dict(counters["stats"]), dict(counters["frames"])))
    assert counts[0] == counts[1] == counts[2]
    assert counts[0][0] > 0


def test_layers_that_cannot_be_named_do_not_stop_the_program(task, monkeypatch):
    from chopper.recording import annotate

    def fails(module):
        raise RuntimeError("odd")

    monkeypatch.setattr(annotate, "module_names", fails)
    with chopper.profile("run", collect=TRACE_ONLY):
        for _ in range(4):
            task.step()
    assert traced_of("run") == [2, 3]
    assert findings_of() == ["run.layers_lost"]
