"""A trace holds a bounded number of events: windows shrink to whole steps, or end within one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import chopper
from chopper import pipeline
from chopper.errors import UsageError
from chopper.recording.windows import EVENTS, SECONDS, TraceBudget
from chopper.storage.run import Run
from tests import command
from tests.recording.make import (
    DESCENT,
    TRACE_ONLY,
    findings_of,
    names_of,
    steps_of,
    trace_of,
    traced_of,
)


@pytest.fixture(autouse=True)
def patient(request, monkeypatch):
    """Let steps take as long as they do on a busy machine."""
    if "task" in request.fixturenames:
        monkeypatch.setattr("chopper.recording.windows.SECONDS", 10**6)


def accumulate(task, micro_batches):
    """A step of an optimizer after many passes forward and backward, as nanoGPT's."""
    for _ in range(micro_batches):
        (task.model(torch.ones(2, 8)).sum() / micro_batches).backward()
    task.optimizer.step()
    task.optimizer.zero_grad()


def events_of(path):
    return sum(event.get("cat") == "cpu_op" for event in trace_of(path)["traceEvents"])


def finding(path="run"):
    found = [f for f in Run.open(Path(path)).part(0).findings if f.code == "run.trace_limited"]
    return found[0].message if found else None


def limit_for(task, steps, micro_batches):
    """The factor with which ``steps`` steps fit, from what one of them takes."""
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    budget = TraceBudget(1.0, lambda: calls)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    budget.begin(1)
    accumulate(task, micro_batches)
    budget.end_step(2)
    hook.remove()
    return (steps + 0.5) * budget.step_events / EVENTS


def test_a_window_of_too_many_events_moves_on_and_shrinks(task):
    limit = limit_for(task, 2, 40)
    with chopper.profile("run", collect=TRACE_ONLY, trace_limit=limit):
        for _ in range(14):
            accumulate(task, 40)
    assert traced_of("run") == [9]
    assert [row["number"] for row in steps_of("run") if row["profiled"]] == [0, 1, 8, 9]
    assert "the trace covers step 9, if the program gets there, not steps 2 to 6" in finding()
    assert "--trace-limit" in finding()


def test_what_was_traced_is_kept_when_the_program_ends_before_the_next_window(task):
    limit = limit_for(task, 2, 40)
    with chopper.profile("run", collect=TRACE_ONLY, trace_limit=limit):
        for _ in range(6):
            accumulate(task, 40)
    assert traced_of("run") == [0, 1]


def test_the_later_window_shrinks_too(task):
    limit = limit_for(task, 4, 3)
    with chopper.profile("run", collect=TRACE_ONLY, trace_limit=limit):
        for _ in range(56):
            accumulate(task, 3)
    assert traced_of("run") == [50, 51, 52]


def test_chosen_steps_end_with_the_last_that_fits(task):
    limit = limit_for(task, 5, 10)
    with chopper.profile("run", collect=TRACE_ONLY, steps=(3, 30), trace_limit=limit):
        for _ in range(32):
            accumulate(task, 10)
    assert traced_of("run") == [3, 4, 5, 6]
    assert "the trace covers steps 3 to 6, not steps 3 to 29: a step makes about" in finding()


def test_a_step_that_is_too_large_alone_is_traced_in_part(task):
    limit = limit_for(task, 1, 40) / 20
    with chopper.profile("run", collect=TRACE_ONLY, trace_limit=limit):
        for _ in range(3):
            accumulate(task, 40)
    assert traced_of("run") == []
    assert len(steps_of("run")) == 3
    assert "aten::addmm" in names_of("run")
    assert events_of("run") < 4 * EVENTS * limit
    assert "the trace ended within step 0 at about" in finding()
    assert "it holds no complete step" in finding()
    assert pipeline.attribute("run").observed_ns > 0


def test_a_raised_limit_is_a_larger_trace(task):
    limit = limit_for(task, 3, 40)
    with chopper.profile("run", collect=TRACE_ONLY, trace_limit=3 * limit):
        for _ in range(8):
            accumulate(task, 40)
    assert traced_of("run") == [2, 3, 4, 5, 6]
    assert findings_of() == []


def test_seconds_count_but_not_those_of_the_first_step(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("chopper.recording.windows.time.monotonic", lambda: now[0])
    budget = TraceBudget(1.0, lambda: 0)
    budget.begin(0)
    now[0] = 10 * SECONDS  # compilation, say
    budget.end_step(1)
    assert not budget.reached()
    now[0] += SECONDS / 3
    budget.end_step(2)
    assert not budget.reached()
    assert budget.fitting_steps() == 3
    now[0] += SECONDS / 2
    budget.end_step(3)
    assert budget.reached()


@pytest.mark.parametrize("limit", [0, -1, float("inf"), float("nan")])
def test_a_limit_is_above_zero(limit):
    with pytest.raises(UsageError, match="expected a factor above 0"):
        chopper.profile(trace_limit=limit)


PROGRAM = f"""
{DESCENT}
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
optimizer = Descent(model.parameters(), lr=0.1)
for _ in range(9):
    for _ in range(30):
        model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_options_of_the_trace_reach_the_recorded_program(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    options = ["-o", "run", "--collect", "torch_trace", "--no-shapes", "--stacks"]
    options += ["--trace-limit", "0.02"]
    done = command.run("record", *options, "--", sys.executable, "train.py")
    assert done.code == 0
    assert "--trace-limit" in done.err
    events = trace_of(tmp_path / "run")["traceEvents"]
    operators = [event["args"] for event in events if event.get("cat") == "cpu_op"]
    assert operators
    assert not any("Input Dims" in args for args in operators)
    assert any(event.get("cat") == "python_function" for event in events)
