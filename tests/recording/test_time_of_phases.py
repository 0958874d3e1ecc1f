"""Phases, layers and operators of recorded programs: whose time is it?"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import chopper
from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.views.utilization import utilization
from chopper.causes import CAUSES, Level
from tests.waiting import PATIENCE_S

TRACE_ONLY = ("torch_trace",)
_WAIT_S = 0.02
_STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body:
            x = layer(x).relu()
        out: torch.Tensor = self.head(x)
        return out


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CHOPPER_OUTPUT", "CHOPPER_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def attributed(run: str | Path = "run") -> Attribution:
    """All traced steps: which of them are alike depends on how long each took."""
    attribution = pipeline.attribute(run).all_steps
    levels: tuple[Level, ...] = ("phase", "layer", "op", "kernel")
    for level in levels:
        assert sum(g.time_ns for g in attribution.by(level)) == attribution.observed_ns
    return attribution


def times(attribution: Attribution, level: Level) -> dict[object, int]:
    return {group.key: group.time_ns for group in attribution.by(level)}


def computing(attribution: Attribution, phase: str) -> dict[str, int]:
    causes = {group.key: group.causes for group in attribution.by("phase")}.get(phase, {})
    return {cause: ns for cause, ns in causes.items() if cause.startswith("compute") and ns}


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(_WAIT_S)
        return torch.ones(32)


def generated():
    for _ in range(_STEPS + 1):
        time.sleep(_WAIT_S)
        yield torch.ones(1, 32)


@pytest.mark.parametrize(
    ("loader", "phases"),
    [
        (lambda prof: DataLoader(Slow(), batch_size=1), ["data"]),
        (lambda prof: prof.watch(generated()), ["data"]),
        # By samples of the stack, of which a busy machine may miss some.
        (lambda prof: generated(), ["data", "between"]),
    ],
    ids=["DataLoader", "watch", "generator"],
)
def test_waiting_for_a_batch_belongs_to_no_layer(loader, phases):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with chopper.profile("run", collect=TRACE_ONLY, steps=(0, _STEPS)) as prof:
        for _, batch in zip(range(_STEPS + 1), loader(prof), strict=False):
            net(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    attribution = attributed().all_steps  # a busy machine makes the first steps a kind of their own
    waited_ns = _STEPS * _WAIT_S * 1e9
    by_phase = times(attribution, "phase")
    assert sum(by_phase.get(phase, 0) for phase in phases) >= waited_ns
    levels: tuple[Level, ...] = ("layer", "op", "kernel")
    for level in levels:
        named = times(attribution, level)
        assert named.pop(None) >= waited_ns
        assert named  # work keeps its names
    assert {"forward", "backward", "optimizer"} <= times(attribution, "phase").keys()
    assert {"body.0", "body.1", "head"} <= times(attribution, "layer").keys()


@pytest.mark.parametrize("marked", [True, False], ids=["prof.step", "found"])
def test_time_before_gradients_are_zeroed_is_not_of_the_optimizer(marked):
    # The end of the optimizer's step and the zeroing enclose what comes between two steps.
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with chopper.profile("run", collect=TRACE_ONLY, steps=(1, 1 + _STEPS)) as prof:
        for _ in range(_STEPS + 3):
            time.sleep(_WAIT_S)
            optimizer.zero_grad()
            net(torch.ones(4, 32)).sum().backward()
            optimizer.step()
            if marked:
                prof.step()
    found = pipeline.attribute("run").all_steps.by("phase")
    waited = {g.key: g.causes.get("idle.preparation.python", 0) for g in found}
    assert waited["between"] >= _STEPS * _WAIT_S * 1e9


def evaluate_unnamed(net, prof):
    net.eval()
    with torch.no_grad():
        nn.functional.mse_loss(net(torch.ones(4, 32)), torch.ones(4, 1))
    net.train()


def evaluate_with_gradients(net, prof):
    net.eval()
    net(torch.ones(4, 32))
    net.train()


def evaluate_named(net, prof):
    with prof.phase("evaluation"):
        net(torch.ones(4, 32))


@pytest.mark.parametrize(
    "evaluate",
    [evaluate_unnamed, evaluate_with_gradients, evaluate_named],
    ids=lambda f: f.__name__,
)
def test_evaluation_is_no_part_of_the_training_step(evaluate):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with chopper.profile("run", collect=TRACE_ONLY, steps=(0, _STEPS)) as prof:
        for _ in range(_STEPS + 1):
            net(torch.ones(4, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            evaluate(net, prof)
            prof.step()
    attribution = attributed()
    assert set(computing(attribution, "evaluation")) == {"compute.outside_training"}
    assert "compute.outside_training" not in computing(attribution, "forward")
    (used, *_) = utilization(attribution).to_pylist()
    # Three products forward; backward two of each, but for the gradient of the input.
    flop = 2 * 4 * (2 * 32 * 32 + 32)
    # Of the steps that the step time is of: a slow first one is none of them.
    steps = attribution.of_kind().steps
    assert steps >= _STEPS - 1
    assert used["model_flop"] == steps * (3 * flop - 2 * 4 * 32 * 32)


def test_training_in_eval_mode_inside_a_named_phase_or_a_checkpoint_is_training():
    net = Net().eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with chopper.profile("run", collect=TRACE_ONLY, steps=(0, _STEPS)) as prof:
        for _ in range(_STEPS + 1):
            with prof.phase("epoch"):
                x = torch.ones(4, 32, requires_grad=True)
                x = torch.utils.checkpoint.checkpoint(net.body[0], x, use_reentrant=True)
                net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    attribution = attributed()
    assert {"forward", "recompute", "backward", "optimizer", "epoch"} <= {
        group.key for group in attribution.by("phase")
    }
    assert not computing(attribution, "evaluation")
    assert not computing(attribution, "inference")
    assert "compute.no_peak" in computing(attribution, "forward") or attribution.ideal_ns


def test_a_program_that_only_infers_has_its_ideal():
    net = Net().eval()
    with chopper.profile("run", collect=TRACE_ONLY, steps=(0, _STEPS)) as prof:
        for _ in range(_STEPS + 1):
            with torch.no_grad():
                net(torch.ones(4, 32))
            prof.step()
    attribution = attributed()
    assert "compute.outside_training" not in computing(attribution, "evaluation")
    assert utilization(attribution).to_pylist()[0]["model_flop"]


def test_compilation_is_a_cause_of_its_own():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compiled = torch.compile(net, backend="aot_eager", dynamic=False)
    with chopper.profile("run", collect=TRACE_ONLY, steps=(0, _STEPS)) as prof:
        for step in range(_STEPS + 1):  # the second step has another shape: compiled once more
            compiled(torch.ones(2 if step == 0 else 3, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    attribution = attributed().all_steps
    by_step = {group.key: group.causes for group in attribution.by("step")}
    took = {step: causes.get("idle.preparation.compile", 0) for step, causes in by_step.items()}
    assert took[0] > took[2] == 0
    assert took[1] > 0
    # What the compiler runs on tensors without data is no work: a step has as many products.
    events = attribution.joined[0].device_event.to_pylist()
    products = [e["start_ns"] for e in events if "mm" in e["name"]]
    windows = attribution.windows.to_pylist()
    counts = [sum(w["start_ns"] <= t < w["end_ns"] for t in products) for w in windows]
    assert counts[0] == counts[1] == counts[2] > 0


def test_the_closures_of_an_optimizer_train_and_its_own_math_is_the_optimizers():
    net = Net()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(4, 32)).square().sum()
        loss.backward()
        return loss

    with chopper.profile("run", collect=TRACE_ONLY, steps=(0, 2)):
        for _ in range(4):
            optimizer.step(closure)
    attribution = attributed()
    assert attribution.steps == 2  # a call of step() is one, however many closures it has
    assert "compute.optimizer" not in computing(attribution, "forward")
    assert set(computing(attribution, "optimizer")) == {"compute.optimizer"}
    links = attribution.links[0]
    rows = zip(links["op"].to_pylist(), links["phase"].to_pylist(), strict=True)
    phases: dict[str, set[str]] = {}
    for op, phase in rows:
        phases.setdefault(op, set()).add(phase)
    assert phases["aten::dot"] == {"optimizer"}  # the direction, between two closures
    assert phases["aten::addmm"] == {"forward"}


_TWO_RANKS = """
import os, sys, time, torch, chopper
import torch.distributed as dist
from torch import nn

def data_parallel(rank):
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    net = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    def closure():
        net(torch.ones(4, 64)).sum().backward()
    def step():
        closure()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step(closure)  # as Lightning does
        optimizer.zero_grad()
    return step

def pipeline(rank):
    stage = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(stage.parameters(), 0.1)
    def step():
        if rank == 0:
            time.sleep(WAIT_S)
            y = stage(torch.ones(4, 64))
            dist.send(y.detach(), 1)
            gradient = torch.empty(4, 64)
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, gradient, 1)]):
                work.wait()
            y.backward(gradient)
        else:
            x = torch.empty(4, 64)
            dist.recv(x, 0)
            stage(x.requires_grad_()).sum().backward()
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x.grad, 0)]):
                work.wait()
        optimizer.step()
        optimizer.zero_grad()
    return step

def train(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method="file://" + os.path.abspath("meet"), rank=rank, world_size=2
    )
    for kind in (data_parallel, pipeline):
        step = kind(rank)
        with chopper.profile(kind.__name__, collect=("torch_trace",), steps=(1, 3)):
            for _ in range(4):
                step()
        dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.start_processes(train, (), 2, start_method="fork")
""".replace("WAIT_S", str(_WAIT_S))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of both kinds, by the same two ranks: to start them takes longest."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    (folder / "train.py").write_text(_TWO_RANKS)
    subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        check=True,
        timeout=PATIENCE_S,
        stdout=subprocess.DEVNULL,
    )
    return folder


def test_gradients_are_reduced_in_backward_and_their_copies_are_not_called_those_of_fsdp(two_ranks):
    attribution = attributed(two_ranks / "data_parallel")
    events = attribution.joined[0].device_event.to_pylist()
    phases = {
        link["phase"]
        for event, link in zip(events, attribution.links[0].to_pylist(), strict=True)
        if event["name"] == "gloo:all_reduce" and link["step_index"] is not None
    }
    assert phases == {"backward"}
    copies = {g.key for g in attribution.by("phase") if g.causes.get("compute.fsdp_copy")}
    assert copies == {"backward"}
    assert "FSDP" not in CAUSES["compute.fsdp_copy"].label


def test_a_stage_that_receives_waits_for_the_one_that_sends(two_ranks):
    attribution = attributed(two_ranks / "pipeline")
    second = {group.key: group.causes for group in attribution.by("rank")}[1]
    # In the second of two steps at least, the receive begins long before the first stage is done.
    assert second["communication.wait"] > _WAIT_S * 1e9 / 2
    assert second["communication.wait"] > second.get("communication.unseparated", 0)


def test_a_step_of_an_engine_is_one_step_and_of_the_optimizer():
    # As the step of DeepSpeed's engine is wrapped: it steps torch's optimizer for each group of
    # parameters, and gathers what the ranks updated.
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with chopper.profile("run", collect=TRACE_ONLY, steps=(0, _STEPS)) as prof:
        for _ in range(_STEPS + 1):
            net(torch.ones(4, 32)).sum().backward()
            with prof.phase("optimizer"):
                optimizer.step()
                optimizer.step()
                torch.ones(3).cumsum(0)
    attribution = attributed()
    run = attribution.recording
    steps = run.table(0, "step").to_pylist()
    assert [step["source"] for step in steps] == ["optimizer"] * (_STEPS + 1)
    links = attribution.links[0]
    columns = (links[name].to_pylist() for name in ("op", "phase", "step_index"))
    rows = zip(*columns, strict=True)
    gathered = [(phase, step) for op, phase, step in rows if op == "aten::cumsum"]
    assert gathered == [("optimizer", number) for number in range(_STEPS)]
    assert not run.table(0, "program_phase").num_rows


class Derived(torch.optim.Optimizer):
    """As Opacus wraps an optimizer: a subclass that torch does not know of, as it makes none."""

    def __init__(self, optimizer):
        self.original_optimizer = optimizer

    @property
    def param_groups(self):  # type: ignore[override]
        return self.original_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        torch.ones(3).cumsum(0)
        return self.original_optimizer.step(closure)


class Schedule:
    """As many programs write one by hand."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        torch.ones(3).cumsum(0)
        self.optimizer.step()


class Learner(Schedule):
    """Trains in its step: that is no optimizer's."""

    def __init__(self, optimizer, train):
        super().__init__(optimizer)
        self._train = train

    def step(self):
        torch.ones(3).cumprod(0)
        self._train()
        self.optimizer.step()


@pytest.mark.parametrize("kind", ["derived", "by hand", "both", "trainer"])
def test_the_optimizers_phase_begins_with_the_outermost_step(kind):
    net = Net()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    original = Derived.step, Schedule.step, Learner.step
    codes = [function.__code__ for function in original]

    def train():
        net(torch.ones(4, 32)).sum().backward()

    optimizer: Any = inner if kind in ("by hand", "trainer") else Derived(inner)
    if kind == "trainer":
        optimizer = Learner(inner, train)
    elif kind != "derived":
        optimizer = Schedule(optimizer)
    with chopper.profile("run", collect=TRACE_ONLY, steps=(2, 2 + _STEPS)):
        for _ in range(_STEPS + 3):
            if kind != "trainer":
                train()
            optimizer.step()
    links = attributed().links[0]
    rows = {*zip(links["op"].to_pylist(), links["phase"].to_pylist(), strict=True)}
    in_step = {phase for op, phase in rows if op in ("aten::cumsum", "aten::cumprod")}
    assert in_step == ({"between"} if kind == "trainer" else {"optimizer"})
    steps = attributed().recording.table(0, "step").to_pylist()
    assert [step["source"] for step in steps] == ["optimizer"] * (_STEPS + 3)
    assert (Derived.step, Schedule.step, Learner.step) == original
    assert [function.__code__ for function in original] == codes


def test_what_ends_a_backward_pass_is_of_it():
    # As DDP waits for its reductions, after the last node of autograd.
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def finish():
        torch.ones(3).cumsum(0)

    def last(gradient):
        torch.autograd.Variable._execution_engine.queue_callback(finish)

    net.head.weight.register_hook(last)
    with chopper.profile("run", collect=TRACE_ONLY, steps=(0, _STEPS)) as prof:
        for _ in range(_STEPS + 1):
            with pytest.raises(RuntimeError, match="shape"):
                net(torch.ones(4, 32)).sum().backward(torch.ones(7))
            optimizer.step(lambda: net(torch.ones(4, 32)).sum().backward())
            prof.step()
    links = attributed().links[0]
    rows = zip(links["op"].to_pylist(), links["phase"].to_pylist(), strict=True)
    assert {phase for op, phase in rows if op == "aten::cumsum"} == {"backward"}


def test_a_target_network_is_not_evaluated():
    net, target = Net(), Net().eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with chopper.profile("run", collect=TRACE_ONLY, steps=(1, _STEPS)) as prof:
        for _ in range(_STEPS + 1):
            with torch.no_grad():
                wanted = target(torch.ones(4, 32))
            (net(torch.ones(4, 32)) - wanted).square().sum().backward()
            optimizer.step()
            net.eval()
            with torch.no_grad():
                net(torch.ones(4, 32))
            net.train()
            prof.step()
    phases = {group.key for group in attributed().by("phase")}
    assert {"inference", "evaluation"} <= phases
