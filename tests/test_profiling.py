from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import chopper
from chopper import _claim, _session, _step_log, registry
from chopper._steps import DEFAULT_WINDOWS, OptimizerCycle, Window, parse_windows
from chopper.errors import OutputError, UsageError
from chopper.run import MANIFEST, Run
from tests.conftest import take_signals, tmpfs

TRACE_ONLY = ("torch_trace",)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CHOPPER_OUTPUT", "CHOPPER_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    assert _session.active() is None


class Task:
    """A model, its optimizer, and one training step."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, batch=None):
        self.model(torch.ones(2, 8) if batch is None else batch).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def task():
    return Task()


def steps_of(path):
    return Run.open(Path(path)).table(0, "step").to_pylist()


def traced_of(path):
    return [row["number"] for row in steps_of(path) if row["traced"]]


def trace_of(path, name="trace.json.gz"):
    return json.loads(gzip.decompress((Path(path) / "rank-00000" / name).read_bytes()))


def names_of(path):
    return [e["name"] for e in trace_of(path)["traceEvents"] if e.get("ph") == "X"]


# -- steps --------------------------------------------------------------------------------------


def ends(cycle, *optimizers):
    """Feed optimizers at times 1, 2, 3 ... and return the ends of steps."""
    return [end for at, which in enumerate(optimizers, 1) for end in cycle.stepped(which, at)]


def test_one_optimizer_ends_each_step():
    # The first end is certain only when the optimizer comes round again.
    assert ends(OptimizerCycle(), 7) == []
    assert ends(OptimizerCycle(), 7, 7, 7) == [1, 2, 3]


def test_the_last_of_several_optimizers_ends_a_step():
    assert ends(OptimizerCycle(), 1, 2, 1, 2, 1, 2) == [2, 4, 6]


def test_an_optimizer_that_steps_more_often_than_the_last_ends_nothing():
    # A critic steps twice, then the generator: as soon as the generator is known, it ends steps.
    assert ends(OptimizerCycle(), 1, 1, 2, 1, 1, 2, 1, 1, 2) == [1, 2, 3, 6, 9]


def test_optimizers_may_change_for_good():
    cycle = OptimizerCycle()
    assert ends(cycle, 1, 2, 1, 2) == [2, 4]
    assert ends(cycle, *[1] * 250)[-1] == 250  # 2 never comes again
    assert ends(cycle, 3, 3) == [1, 2]


@pytest.mark.parametrize("spec", ["3:8", (3, 8), range(3, 8)])
def test_steps_to_trace(spec):
    assert parse_windows(spec) == (Window(3, 8, settle=1),)


def test_from_the_first_step_there_is_nothing_to_settle_in():
    assert parse_windows(":2") == (Window(0, 2, settle=0),)


@pytest.mark.parametrize("spec", ["", "3", "a:b", "5:5", "8:3", (-1, 3), (1, 2, 3), 4])
def test_steps_to_trace_wrong(spec):
    with pytest.raises(UsageError, match="steps to trace"):
        chopper.profile(steps=spec)


def test_an_empty_output_is_refused():
    with pytest.raises(UsageError, match="an empty name"):
        chopper.profile("")


def test_a_name_leads_to_no_other_directory():
    for name, ends in (("../../x", "-x"), ("a b/c", "-a-b-c"), ("..", "")):
        path = _claim.choose_output(None, name)
        assert path.parent == Path("runs")
        assert path.name.partition("-")[2].lstrip("0123456789") == ends


def test_steps_are_found_through_the_optimizer(task):
    with chopper.profile("run", collect=TRACE_ONLY):
        for _ in range(9):
            task.step()
    rows = steps_of("run")
    assert [row["number"] for row in rows] == list(range(9))
    assert {row["source"] for row in rows} == {"optimizer"}
    for before, after in itertools.pairwise(rows):
        if after["number"] in (DEFAULT_WINDOWS[0].stop, DEFAULT_WINDOWS[0].begin):
            assert after["start_ns"] >= before["end_ns"]  # writing the trace is in no step
        else:
            assert after["start_ns"] == before["end_ns"]
    assert traced_of("run") == [2, 3, 4, 5, 6]
    spans = {n for n in names_of("run") if n.startswith("ProfilerStep#")}
    assert {f"ProfilerStep#{n}" for n in range(2, 7)} <= spans
    assert chopper.load("run/rank-00000/trace.json.gz").part(0).hostname == socket.gethostname()


def test_marks_are_believed_over_optimizers(task):
    with chopper.profile("run", collect=TRACE_ONLY) as prof:
        for _ in range(4):
            for _ in range(3):  # three optimizer steps make one step of the program
                task.step()
            prof.step()
    rows = steps_of("run")
    assert [(row["number"], row["source"]) for row in rows] == [(n, "mark") for n in range(4)]
    assert rows[0]["end_ns"] == rows[1]["start_ns"]


def scaled_step(task, scaler, optimizer, *, overflows=False):
    loss = task.model(torch.ones(2, 8)).sum()
    scaler.scale(loss * float("inf") if overflows else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def test_tokens_of_steps_are_kept_where_the_program_says_them(task):
    with chopper.profile("run", collect=TRACE_ONLY) as prof:
        for i in range(4):
            task.step()
            prof.step(tokens=None if i == 1 else 100 + i)
    work = Run.open(Path("run")).table(0, "step_work").to_pylist()
    assert [(row["step"], row["tokens_count"]) for row in work] == [(0, 100), (2, 102), (3, 103)]
    of = {row["number"]: row for row in steps_of("run")}
    assert all(
        row["span_ns"] == of[row["step"]]["end_ns"] - of[row["step"]]["start_ns"] for row in work
    )


def test_a_step_that_a_gradient_scaler_skips_is_a_step(task):
    from torch.amp.grad_scaler import GradScaler

    plain = GradScaler.step
    scaler = GradScaler("cpu")
    before = task.model[0].weight.detach().clone()
    with chopper.profile("run", collect=(), trace=False):
        for number in range(6):
            scaled_step(task, scaler, task.optimizer, overflows=number in (0, 1, 4))
            if number == 1:
                assert torch.equal(task.model[0].weight, before)  # it does skip
    assert [row["number"] for row in steps_of("run")] == list(range(6))
    assert GradScaler.step is plain


def test_skipped_steps_of_one_of_two_optimizers(task):
    from torch.amp.grad_scaler import GradScaler

    other = Task()
    scalers = GradScaler("cpu"), GradScaler("cpu")
    with chopper.profile("run", collect=(), trace=False):
        for number in range(6):
            scaled_step(task, scalers[0], task.optimizer)
            scaled_step(other, scalers[1], other.optimizer, overflows=number in (2, 3))
    assert len(steps_of("run")) == 6


def test_a_scaler_that_fails_fails_as_without_a_recording(task):
    from torch.amp.grad_scaler import GradScaler

    scaler = GradScaler("cpu")
    with chopper.profile("run", collect=(), trace=False):
        scaled_step(task, scaler, task.optimizer)
        with pytest.raises(AssertionError, match="No inf checks were recorded"):
            scaler.step(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
        scaled_step(task, scaler, task.optimizer)
    assert len(steps_of("run")) == 2


LATE = """
import sys, chopper
with chopper.profile("run", collect=(), trace=False):
    assert "torch" not in sys.modules
    {body}
assert not [f for f in sys.meta_path if "chopper" in type(f).__module__]
"""
TRAINS = """
    import torch
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "count", "why"),
    [(TRAINS, 4, None), ("pass", 0, "torch was never imported")],
    ids=["trains", "does not"],
)
def test_optimizers_are_seen_when_torch_comes_later(tmp_path, body, count, why):
    (tmp_path / "script.py").write_text(LATE.format(body=body))
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=600)
    assert len(steps_of(tmp_path / "run")) == count
    found = Run.open(tmp_path / "run").part(0).findings
    assert [f.code for f in found] == (["run.no_steps"] if why else [])
    assert why is None or why in found[0].message


def test_two_optimizers_one_step():
    first, second = Task(), Task()
    with chopper.profile("run", collect=TRACE_ONLY):
        for _ in range(4):
            first.step()
            second.step()
    assert [row["number"] for row in steps_of("run")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("count", "traced"),
    [(1, [0]), (2, [0, 1]), (3, [2]), (6, [2, 3, 4, 5]), (20, [2, 3, 4, 5, 6])],
)
@pytest.mark.parametrize("marks", [False, True])
def test_a_run_of_any_length_has_a_trace(task, count, traced, marks):
    with chopper.profile("run", collect=TRACE_ONLY) as prof:
        for _ in range(count):
            task.step()
            if marks:
                prof.step()
    assert traced_of("run") == traced
    assert len(steps_of("run")) == count
    assert "aten::addmm" in names_of("run")


@pytest.mark.parametrize(("count", "traced"), [(52, [2, 3, 4, 5, 6]), (56, [50, 51, 52, 53, 54])])
def test_a_later_window_replaces_the_first_when_it_is_as_good(task, count, traced):
    with chopper.profile("run", collect=TRACE_ONLY):
        for _ in range(count):
            task.step()
    assert traced_of("run") == traced
    assert [row["number"] for row in steps_of("run")] == list(range(count))
    assert f"ProfilerStep#{traced[0]}" in names_of("run")


def test_no_second_trace_while_a_span_of_the_first_is_open(task):
    with chopper.profile("run", collect=TRACE_ONLY), torch.profiler.record_function("epoch"):
        for _ in range(56):
            task.step()
    assert traced_of("run") == [2, 3, 4, 5, 6]
    assert [f.code for f in Run.open(Path("run")).part(0).findings] == ["run.window_skipped"]


def test_chosen_steps_are_traced(task):
    with chopper.profile("run", collect=TRACE_ONLY, steps=(4, 6)):
        for _ in range(8):
            task.step()
    assert traced_of("run") == [4, 5]


def test_a_run_that_ends_before_its_window_says_why_it_has_no_trace(task):
    with chopper.profile("run", collect=TRACE_ONLY, steps=(10, 12)):
        for _ in range(5):
            task.step()
    part = Run.open(Path("run")).part(0)
    assert part.traces == ()
    assert part.collectors[0].reason == (
        "the program ended after 5 steps; steps from 9 on are traced"
    )
    assert len(steps_of("run")) == 5


def test_a_loop_without_steps_is_traced_whole(task):
    with chopper.profile("run", collect=TRACE_ONLY):
        task.model(torch.ones(2, 8))
    assert steps_of("run") == []
    assert "aten::addmm" in names_of("run")


# -- what the trace shows -----------------------------------------------------------------------


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
    phases = {group.key for group in chopper.attribute("run").by("phase")}
    assert "backward" in phases
    assert ("recompute" in phases) == checkpoints
    assert [f.code for f in chopper.attribute("run").findings].count("trace.double_backward") == 1


def test_hooks_are_gone_when_no_trace_is_taken(task):
    from torch.nn.modules import module as nn_module

    with chopper.profile("run", collect=TRACE_ONLY, steps=(2, 3)) as prof:
        counts = []
        for _ in range(5):
            counts.append(len(nn_module._global_forward_hooks))
            task.step()
            prof.step()
    assert counts == [0, 1, 1, 0, 0]
    assert not nn_module._global_forward_pre_hooks


def test_compiled_models_are_left_alone():
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.ones(2, 8)
    expected = model(x)
    with chopper.profile("run", collect=TRACE_ONLY, steps=(2, 4)):
        for _ in range(6):
            torch.testing.assert_close(compiled(x), expected)
            compiled(x).sum().backward()
            optimizer.step()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not counters["recompile_limit"]


# -- the program is not changed -----------------------------------------------------------------


def test_the_programs_exception_passes_through(task):
    error = ValueError("loss is nan\nsecond line")

    @chopper.profile("run", collect=TRACE_ONLY)
    def train():
        for _ in range(4):
            task.step()
        raise error

    with pytest.raises(ValueError, match="loss is nan") as caught:
        train()
    assert caught.value is error
    part = Run.open(Path("run")).part(0)
    assert (part.status, part.error) == ("failed", "ValueError: loss is nan")
    assert traced_of("run") == [2, 3]


def test_an_exception_inside_a_layer_leaves_no_span_open(task):
    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("boom")

    broken = nn.Sequential(nn.Linear(8, 8), Fails())
    with chopper.profile("run", collect=TRACE_ONLY):
        with pytest.raises(RuntimeError, match="boom"):
            broken(torch.ones(2, 8))
        for _ in range(3):
            task.step()
    spans = [
        e["args"] for e in trace_of("run")["traceEvents"] if "chopper::layer" in e.get("name", "")
    ]
    assert spans
    assert not any("finished" in args for args in spans)


def test_ctrl_c_is_an_interruption(task):
    @chopper.profile("run", collect=TRACE_ONLY)
    def train():
        task.step()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert Run.open(Path("run")).part(0).status == "interrupted"


def test_decorator(task):
    @chopper.profile("run", collect=TRACE_ONLY)
    def train(count, *, scale):
        """Trains."""
        for _ in range(count):
            task.step()
        return count * scale

    assert train(3, scale=2) == 6
    assert train.__doc__ == "Trains."
    assert len(steps_of("run")) == 3


def test_each_call_of_a_decorated_function_has_a_run(task):
    @chopper.profile("run", collect=TRACE_ONLY, trace=False)
    def train(depth):
        task.step()
        if depth:
            train(depth - 1)

    for depth in (0, 2, 0):
        train(depth)
    assert [len(steps_of(name)) for name in ("run", "run-2", "run-3")] == [1, 3, 1]
    assert {p.name for p in Path().iterdir()} == {"run", "run-2", "run-3"}


def test_decorator_of_a_coroutine(task):
    @chopper.profile("run", collect=TRACE_ONLY)
    async def train():
        task.step()
        await asyncio.sleep(0)
        task.step()
        return "done"

    assert asyncio.run(train()) == "done"
    assert len(steps_of("run")) == 2


def test_decorating_a_generator_is_refused():
    with pytest.raises(UsageError, match="is a generator"):

        @chopper.profile("run")
        def loop():
            yield


def test_one_recording_at_a_time(task):
    with (
        chopper.profile("run", collect=TRACE_ONLY) as prof,
        pytest.raises(UsageError, match=r"is recording to run already; leave that profile"),
        chopper.profile("other"),
    ):
        pass
    assert not prof.recording
    assert not Path("other").exists()
    with chopper.profile("other", collect=TRACE_ONLY):
        task.step()
    assert len(steps_of("other")) == 1


def test_an_earlier_run_is_kept_unless_told_otherwise(task):
    for force in (False, False, True):
        before = (
            {p: p.read_bytes() for p in Path("run").rglob("*") if p.is_file()}
            if Path("run").exists()
            else None
        )
        if before is not None and not force:
            with (
                pytest.raises(OutputError, match="holds a run already; pass force=True"),
                chopper.profile("run", collect=TRACE_ONLY),
            ):
                raise AssertionError("entered")
            assert {p: p.read_bytes() for p in Path("run").rglob("*") if p.is_file()} == before
            continue
        with chopper.profile("run", collect=TRACE_ONLY, force=force):
            for _ in range(2 if force else 1):
                task.step()
        assert len(steps_of("run")) == (2 if force else 1)


def test_files_that_are_no_run_are_never_touched():
    Path("thesis").mkdir()
    Path("thesis/chapter1.tex").write_text("years of work")
    with (
        pytest.raises(OutputError, match="holds files that are not a chopper run"),
        chopper.profile("thesis", force=True),
    ):
        raise AssertionError("entered")
    assert [p.name for p in Path("thesis").iterdir()] == ["chapter1.tex"]


def test_output_by_default(task, monkeypatch):
    with chopper.profile(collect=TRACE_ONLY, name="mine") as prof:
        task.step()
    assert prof.output is not None
    assert prof.output.parent == Path("runs")
    assert prof.output.name.endswith("-mine")
    monkeypatch.setenv("CHOPPER_OUTPUT", "elsewhere")
    with chopper.profile(collect=TRACE_ONLY) as prof:
        task.step()
    assert prof.output == Path("elsewhere")


def test_a_restarted_rank_keeps_what_it_recorded_before(task, monkeypatch):
    with chopper.profile("run", collect=TRACE_ONLY):
        task.step()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with chopper.profile("run", collect=TRACE_ONLY):
        for _ in range(3):
            task.step()
    assert len(steps_of("run")) == 3
    assert len(steps_of("run/attempt-0")) == 1
    (finding,) = Run.open(Path("run")).part(0).findings
    assert finding.code == "run.restarted"
    assert "attempt-0" in finding.message


def test_a_place_that_cannot_be_written_does_not_stop_the_program(task, capfd):
    Path("file").touch()
    with chopper.profile("file/run", collect=TRACE_ONLY) as prof:
        for _ in range(3):
            task.step()
            prof.step()
    assert not prof.recording
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("chopper: recording stopped: ")


@pytest.fixture
def small_disk():
    with tmpfs("size=256k") as at:
        yield at


def test_a_full_disk_does_not_stop_the_program(task, capfd, small_disk):
    done = 0
    with chopper.profile(small_disk / "run", collect=TRACE_ONLY) as prof:
        for _ in range(12):
            for _ in range(20):
                task.step()
            prof.step()
            done += 1
    assert done == 12
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("chopper: recording stopped: ")
    assert "cannot be written" in err or "the disk full" in err


def test_a_read_only_disk_does_not_stop_the_program(task, capfd):
    with tmpfs("ro") as at, chopper.profile(at / "run", collect=TRACE_ONLY) as prof:
        task.step()
        assert not prof.recording
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "Read-only file system" in err


# -- collectors ---------------------------------------------------------------------------------

FAKE = """
from chopper.collectors.base import Availability
from chopper.manifest import CollectorReport

class Fake:
    name = "fake"
    scope = "rank"
    raises = None

    def _maybe(self, stage):
        if stage == type(self).raises:
            raise RuntimeError(f"no {stage} today")

    def __init__(self): self._maybe("making it")
    def probe(self, context):
        self._maybe("probe")
        return Availability(ok=True)
    def start(self, context): self._maybe("start")
    def on_step(self, step): self._maybe("on_step")
    def stop(self):
        self._maybe("stop")
        return CollectorReport(name="fake", status="obtained", samples_count=3)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A collector of another package, found through its entry point."""
    site = tmp_path / "site"
    info = site / "fake_sensor-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "fake_sensor.py").write_text(FAKE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-sensor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[chopper.collectors]\nfake = fake_sensor:Fake\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "fake_sensor", raising=False)
    yield registry.get("fake")
    sys.modules.pop("fake_sensor", None)


def report_of(path, name):
    return next(r for r in Run.open(Path(path)).part(0).collectors if r.name == name)


def test_a_collector_of_another_package(task, fake):
    with chopper.profile("run", collect="torch_trace,fake"):
        for _ in range(3):
            task.step()
    report = report_of("run", "fake")
    assert (report.status, report.samples_count) == ("obtained", 3)


@pytest.mark.parametrize("stage", ["making it", "probe", "start", "on_step", "stop"])
def test_a_collector_that_raises_harms_nothing_else(task, fake, monkeypatch, stage, capfd):
    monkeypatch.setattr(fake, "raises", stage)
    with chopper.profile("run", collect=["fake", "torch_trace"]):
        for _ in range(4):
            task.step()
    report = report_of("run", "fake")
    assert report.status == "failed"
    assert report.reason == f"{stage}: RuntimeError: no {stage} today"
    assert report_of("run", "torch_trace").status == "obtained"
    assert traced_of("run") == [2, 3]
    assert Run.open(Path("run")).part(0).status == "complete"
    assert capfd.readouterr().err == ""


def test_an_unknown_collector_is_a_usage_error():
    with pytest.raises(UsageError, match="no collector is called 'hots'"):
        chopper.profile("run", collect=["hots"])


def test_without_a_trace_steps_remain(task):
    with chopper.profile("run", collect=TRACE_ONLY, trace=False):
        for _ in range(3):
            task.step()
    assert len(steps_of("run")) == 3
    assert traced_of("run") == []
    assert not list(Path("run/rank-00000").glob("trace*"))
    assert report_of("run", "torch_trace").status == "refused"


# -- the manifest -------------------------------------------------------------------------------


def test_the_manifest_says_what_there_was(task):
    with chopper.profile("run", name="digits") as prof:
        running = Run.open(Path("run"))
        assert running.part(0).status == "running"
        assert [f.code for f in running.manifest.findings] == [
            "run.rank_died",
            "run.manifest_missing",
        ]
        for _ in range(10):
            task.step()
    run = Run.open(Path("run"))
    part = run.part(0)
    assert run.manifest.workload == "digits"
    assert part.status == "complete"
    assert part.command == tuple(sys.orig_argv)
    assert part.environment["torch"] == torch.__version__
    assert part.environment["cores"] == str(os.cpu_count())
    assert part.steps_source == "optimizer"
    assert part.start_ns is not None
    assert part.end_ns is not None
    anchors = part.clock_anchors
    assert len(anchors) == 2
    elapsed_ns = anchors[1].realtime_ns - anchors[0].realtime_ns
    assert abs(elapsed_ns - (anchors[1].monotonic_ns - anchors[0].monotonic_ns)) < 10**8
    assert part.overhead is not None
    for value in (
        part.overhead.setup_ns,
        part.overhead.per_step_ns,
        part.overhead.export_ns,
        part.overhead.traced_step_ns,
        part.overhead.untraced_step_ns,
    ):
        assert value is not None
        assert value > 0
    by_name = {report.name: report for report in part.collectors}
    assert by_name["host"].status == "obtained"
    assert by_name["torch_trace"].files == ("trace.json.gz",)
    if not torch.accelerator.is_available():
        assert by_name["device_memory"].status == "refused"
        assert by_name["device_memory"].reason
    assert repr(prof) == "<chopper.Profile not recording; output run>"


def test_whatever_the_program_measures_the_run_is_kept_and_can_be_read(task):
    prof: Any
    with chopper.profile("run", trace=False, collect=()) as prof:
        task.step()
        prof.step(tokens="many")
        task.step()
        prof.step(tokens=torch.tensor(12))
        prof.measure("rate", 2.5, dtype=torch.bfloat16, size=1 << 20, fused=True, part=float("nan"))
        prof.measure("count", True)
        prof.measure("rates", torch.ones(2))
        prof.measure("wide", 1 << 70)
    part = Run.open(Path("run")).part(0)
    assert part.status == "complete"
    assert [(found.name, found.value) for found in part.measures] == [
        ("rate", 2.5),
        ("count", 1.0),
        ("wide", float(1 << 70)),
    ]
    assert part.measures[0].labels == {
        "dtype": "torch.bfloat16",
        "size": 1 << 20,
        "fused": "True",
        "part": "nan",
    }
    # Said once, by the first.
    (finding,) = [found for found in part.findings if found.code == "measures.dropped"]
    assert finding.message == "tokens of a step: 'many' is not a number"
    assert Run.open(Path("run")).table(0, "step_work")["tokens_count"].to_pylist() == [12]


def test_a_rank_writes_its_own_part_only(task, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with chopper.profile("run") as prof:
        task.step()
    assert prof.output == Path("run")
    assert [p.name for p in Path("run").iterdir()] == ["rank-00003"]
    part = Run.open(Path("run")).part(3)
    assert (part.world_size, part.local_rank) == (4, 1)
    # The host is recorded once, by its first rank.
    assert "host" not in {report.name for report in part.collectors}


# -- beside what the program does ----------------------------------------------------------------


def findings_of(path="run"):
    return [finding.code for finding in Run.open(Path(path)).part(0).findings]


def test_the_programs_own_profiler_goes_first(task):
    own = torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
    with (
        chopper.profile("run", collect=TRACE_ONLY, steps=(2, 7)),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], schedule=own
        ) as theirs,
    ):
        # Theirs is prepared when ours is, and runs in steps 2 to 4.
        for _ in range(10):
            task.step()
            theirs.step()
    names = [event.name for event in theirs.events()]
    assert names.count("ProfilerStep*") == 3
    assert names.count("aten::addmm") == 6
    assert not [name for name in names if name.startswith("chopper::")]
    assert len(steps_of("run")) == 10
    assert "run.profiler_in_use" in findings_of()


def test_a_profiler_within_a_forward_takes_the_trace_over(task):
    seen: list[object] = []

    class Profiles(nn.Module):
        def forward(self, x):
            with torch.autograd.profiler.profile() as theirs:
                y = x.exp()
            seen.extend(event.name for event in theirs.function_events)
            return y

    model = nn.Sequential(nn.Linear(8, 8), Profiles())
    with (
        chopper.profile("run", collect=TRACE_ONLY),
        torch.profiler.record_function("epoch"),
    ):
        task.step()
        task.step()
        for _ in range(3):
            with torch.profiler.record_function("inner"):
                model(torch.ones(2, 8))
        for _ in range(60):  # up to the later window
            task.step()
    assert seen.count("aten::exp") == 3
    assert len(steps_of("run")) == 62
    assert "aten::addmm" in names_of("run")
    assert "run.profiler_in_use" in findings_of()


def test_no_trace_within_the_programs_own(task):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        with chopper.profile("run", collect=TRACE_ONLY):
            for _ in range(9):
                task.step()
        task.step()
    assert [e.name for e in theirs.events()].count("aten::addmm") == 20
    assert Run.open(Path("run")).part(0).traces == ()
    assert findings_of() == ["run.profiler_in_use"]


def test_torch_and_the_process_are_left_as_they_were(task, monkeypatch):
    import warnings

    from torch.autograd import profiler

    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)

    def state():
        functions = [
            getattr(profiler, f"_{what}_profiler") for what in ("prepare", "enable", "disable")
        ]
        return functions, list(warnings.filters), dict(os.environ)

    before = state()
    with chopper.profile("run", collect=TRACE_ONLY):
        for _ in range(9):
            task.step()
    assert state() == before


def test_steps_of_another_thread_leave_the_trace_where_it_is(task):
    def train():
        for _ in range(10):
            task.step()
            prof.step()

    with chopper.profile("run", collect=TRACE_ONLY) as prof:
        for _ in range(3):
            task.step()
            prof.step()
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        for _ in range(3):
            task.step()
            prof.step()
    assert [row["number"] for row in steps_of("run")] == list(range(16))
    assert traced_of("run") == [2]
    assert findings_of() == ["run.other_thread"]


@pytest.mark.slow
def test_a_recording_that_another_thread_closes_gives_its_trace_up(tmp_path):
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            """
            import threading, torch, chopper
            from chopper import _session
            model = torch.nn.Linear(4, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with chopper.profile("run", collect=["torch_trace"]):
                for _ in range(4):
                    model(torch.ones(2, 4)).sum().backward()
                    optimizer.step()
                thread = threading.Thread(target=_session.active().close, args=("complete",))
                thread.start()
                thread.join()
                model(torch.ones(2, 4)).sum().backward()
            with torch.profiler.profile() as theirs:
                model(torch.ones(2, 4))
            assert "aten::addmm" in {event.name for event in theirs.events()}
            """
        )
    )
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=600)
    assert len(steps_of(tmp_path / "run")) == 4
    assert traced_of(tmp_path / "run") == []
    assert findings_of(tmp_path / "run") == ["run.trace_abandoned"]


THREADED = """
import threading, torch, chopper
from torch.profiler import profile
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
begun, go_on = threading.Event(), threading.Event()
seen = []
def train(count):
    for _ in range(count):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
def profiles():
    with profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        torch.ones(4).exp()
        begun.set()
        go_on.wait()
    seen.extend(event.name for event in theirs.events())
thread = threading.Thread(target=profiles, daemon=True)
def in_its_place(steps):
    train(steps)
    thread.start()
    begun.wait()
def ends():
    go_on.set()
    thread.join()
    assert "aten::exp" in seen
with chopper.profile("run", collect=["torch_trace"]):
{body}
print("done")
"""
TRACED, LATER = 4, 53
"""Steps after which the first window is traced, and the later one."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "traced"),
    [
        # Theirs ends at once: the later window is ours again.
        (f"in_its_place({TRACED}); ends(); train(56)", range(50, 55)),
        # Theirs outlasts the recording.
        (f"in_its_place({TRACED}); train(3)\nends()", range(0)),
        # Theirs outlasts the process.
        (f"in_its_place({TRACED}); train(3)", range(0)),
        # The trace of the first window is kept.
        (f"in_its_place({LATER}); ends(); train(3)", range(2, 7)),
    ],
    ids=["within", "across", "to the end", "later window"],
)
def test_a_profiler_in_another_thread_takes_the_trace_over(tmp_path, body, traced):
    indented = "\n".join(line if i else f"    {line}" for i, line in enumerate(body.splitlines()))
    (tmp_path / "script.py").write_text(THREADED.format(body=indented))
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        check=False,
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "chopper" not in done.stderr
    part = Run.open(tmp_path / "run").part(0)
    assert part.status == "complete"
    assert traced_of(tmp_path / "run") == list(traced)
    assert findings_of(tmp_path / "run") == ["run.profiler_in_use"]
    if traced:
        assert "aten::addmm" in names_of(tmp_path / "run")


def test_a_profiler_in_another_thread_while_ours_is_prepared(task):
    seen: list[str] = []

    def profiles():
        with torch.profiler.profile() as theirs:
            torch.ones(4).exp()
        seen.extend(event.name for event in theirs.events() or ())

    with chopper.profile("run", collect=TRACE_ONLY, steps=(6, 9)):
        for step in range(10):
            task.step()
            if step == 3:  # step 5, the first that is traced, comes after the next
                thread = threading.Thread(target=profiles)
                thread.start()
                thread.join()
    assert "aten::exp" in seen
    assert traced_of("run") == [6, 7, 8]
    assert findings_of() == []


def test_an_exception_that_cannot_be_printed_passes_through(task):
    class Bad(Exception):
        def __str__(self):
            raise ValueError("boom in str")

    @chopper.profile("run", collect=TRACE_ONLY)
    def train():
        task.step()
        raise Bad

    with pytest.raises(Bad):
        train()
    part = Run.open(Path("run")).part(0)
    assert (part.status, part.error) == ("failed", "Bad")


def test_layers_that_cannot_be_named_do_not_stop_the_program(task, monkeypatch):
    from chopper.collectors import annotate

    def fails(module):
        raise RuntimeError("odd")

    monkeypatch.setattr(annotate, "module_names", fails)
    with chopper.profile("run", collect=TRACE_ONLY):
        for _ in range(4):
            task.step()
    assert traced_of("run") == [2, 3]
    assert findings_of() == ["run.layers_lost"]


def test_without_a_trace_no_step_is_kept_in_memory(monkeypatch):
    monkeypatch.setattr(_step_log, "_FLUSH_NS", 0)
    with chopper.profile("run", collect=(), trace=False) as prof:
        for _ in range(100):
            prof.step()
        session = _session.active()
        assert session is not None
        log = session._log
        assert log is not None
        assert (log._history, log._rows) == ([], [])
    assert len(steps_of("run")) == 100


def test_marks_that_come_late_begin_the_windows_again(task):
    with chopper.profile("run", collect=TRACE_ONLY, steps=(2, 4)) as prof:
        for _ in range(6):
            for _ in range(20):
                task.step()
            prof.step()
    assert traced_of("run") == [2, 3]
    assert names_of("run").count("aten::addmm") >= 2 * 2 * 20
    assert findings_of() == ["run.steps_recounted"]


def test_marks_that_come_within_a_later_window_begin_the_windows_again(task):
    with chopper.profile("run", collect=TRACE_ONLY) as prof:
        for _ in range(10):
            for _ in range(52):
                task.step()
            prof.step()
    assert traced_of("run") == [2, 3, 4, 5, 6]
    assert len(steps_of("run")) == 10


def test_a_recording_without_steps_says_so():
    with chopper.profile("run", collect=(), trace=False):
        pass
    assert findings_of() == ["run.no_steps"]


def test_help_names_the_default_windows():
    from chopper._steps import DEFAULT_WINDOWS_TEXT

    assert DEFAULT_WINDOWS_TEXT == "2:7, then 50:55 in their place"
    documented = chopper.profile.__doc__ or ""
    for window in DEFAULT_WINDOWS:
        assert f"``{window.start}:{window.stop}``" in documented


# -- processes ----------------------------------------------------------------------------------


def test_forked_children_do_not_record(task):
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.ones(12, 8)), 2, num_workers=2
    )
    with chopper.profile("run", collect=TRACE_ONLY) as prof:
        for (batch,) in prof.watch(loader):
            task.step(batch)
        pid = os.fork()
        if pid == 0:
            try:
                task.step()
                prof.step()
                prof.__exit__(None, None, None)
            finally:
                os._exit(7 if _session.active() is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        task.step()
    assert len(steps_of("run")) == 7
    assert {p.name for p in Path("run").iterdir()} == {"rank-00000", MANIFEST}


FORKS = """
import os, sys, torch, chopper
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(count):
    for _ in range(count):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
with chopper.profile("run", collect=["torch_trace"]) as prof:
    train(4)
    pid = os.fork()
    if pid == 0:
        train(12)
        print("trained")
        sys.exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    train(4)
"""


@pytest.mark.slow
def test_a_forked_child_trains_on_and_ends_as_it_wants(tmp_path):
    (tmp_path / "script.py").write_text(FORKS)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        check=True,
        timeout=600,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.stdout == "trained\n"
    assert len(steps_of(tmp_path / "run")) == 8
    assert traced_of(tmp_path / "run") == [2, 3]
    assert findings_of(tmp_path / "run") == ["run.forked"]


KILLED = """
import os, signal, torch, chopper
from chopper import _step_log
_step_log._FLUSH_NS = 0
with chopper.profile("run", collect=["torch_trace"]) as prof:
    for _ in range(3):
        prof.step()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_steps_outlive_a_kill_within_a_trace(tmp_path):
    (tmp_path / "script.py").write_text(KILLED)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=False, timeout=600)
    assert done.returncode == -signal.SIGKILL
    with pyarrow.OSFile(str(tmp_path / "run" / "rank-00000" / "step.arrow")) as file:
        reader = pyarrow.ipc.open_stream(file)
        numbers = [n for batch in batches(reader) for n in batch.column("number").to_pylist()]
    assert numbers == [0, 1, 2]


def batches(reader):
    """What a stream that was cut short still holds."""
    while True:
        try:
            yield reader.read_next_batch()
        except (StopIteration, pyarrow.ArrowInvalid):
            return


TERMINATED = """
import sys, torch, chopper
{handler}
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with chopper.profile("run", collect=["torch_trace"]) as prof:
    for _ in range(9):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        prof.step()
    print("ready", flush=True)
    {wait}
"""
BLOCKED = "torch.distributed.TCPStore('127.0.0.1', 0, is_master=True).get('never')"
AWAKE = "import time\n    while True: time.sleep(0.01)"


def terminated(tmp_path, wait, handler="", number=signal.SIGTERM):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(TERMINATED).format(wait=wait, handler=handler))
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        text=True,
        preexec_fn=take_signals,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        rest = process.stdout.read()
        return process.wait(timeout=600), rest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wait", "number"),
    [(AWAKE, signal.SIGHUP), (BLOCKED, signal.SIGTERM)],
    ids=["awake", "blocked in C"],
)
def test_signals_close_the_recording_and_end_the_process(tmp_path, wait, number):
    code, _ = terminated(tmp_path, wait, number=number)
    assert code == -number
    part = Run.open(tmp_path / "run").part(0)
    assert (part.status, part.error) == ("interrupted", f"ended by {number.name}")
    assert len(steps_of(tmp_path / "run")) == 9
    assert traced_of(tmp_path / "run") == [2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_hang_up_that_the_program_ignores_changes_nothing(tmp_path):
    handler = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)"
    wait = "import time; time.sleep(0.2)"
    code, _ = terminated(tmp_path, wait, handler, number=signal.SIGHUP)
    assert code == 0
    assert Run.open(tmp_path / "run").part(0).status == "complete"


@pytest.mark.slow
def test_the_programs_own_sigterm_handler_stays(tmp_path):
    handler = (
        "import signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('mine', flush=True), sys.exit(5)))"
    )
    code, rest = terminated(tmp_path, AWAKE, handler)
    assert (code, rest) == (5, "mine\n")
    assert Run.open(tmp_path / "run").part(0).status == "failed"
