"""Beside what the program does itself: its own profiler, its threads."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import chopper
from chopper.collectors.torch_trace import TorchTrace
from chopper.storage.run import Run
from tests.recording.make import (
    DESCENT,
    TRACE_ONLY,
    findings_of,
    names_of,
    steps_of,
    traced_of,
)


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
        lazy = vars(torch)["__getattr__"]
        return functions, lazy, list(warnings.filters), dict(os.environ)

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


def test_forwards_in_threads_that_end_before_the_steps_do(task):
    """As with ``asyncio.to_thread(model, x)`` under ``chopper record``."""

    def in_thread(function, *args):
        result = []
        thread = threading.Thread(target=lambda: result.append(function(*args)))
        thread.start()
        thread.join()
        return result[0]

    recording = chopper.profile("run", collect=TRACE_ONLY)
    in_thread(recording.__enter__)
    for _ in range(8):
        loss = in_thread(task.model, torch.ones(2, 8)).sum()
        loss.backward()
        task.optimizer.step()
    recording.__exit__(None, None, None)
    assert traced_of("run") == list(range(2, 7))
    assert findings_of() == []
    assert {"aten::addmm", "AddmmBackward0"} <= set(names_of("run"))


@pytest.mark.slow
def test_a_forward_elsewhere_that_runs_when_the_trace_begins(task, monkeypatch):
    """As with a thread that acts or evaluates beside the one that trains."""
    entered, done = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self):
            entered.set()
            done.wait()

    other = threading.Thread(target=Waiting())
    begin = TorchTrace.begin

    def begin_beside_a_forward(trace):
        other.start()
        entered.wait()
        begin(trace)

    monkeypatch.setattr(TorchTrace, "begin", begin_beside_a_forward)

    def train():
        with chopper.profile("run", collect=TRACE_ONLY, steps="1:3"):
            for number in range(4):
                task.step()
                if number == 1:
                    done.set()
                    other.join()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert traced_of("run") == [1, 2]
    assert findings_of() == []


def test_a_recording_that_another_thread_closes_gives_its_trace_up(tmp_path):
    (tmp_path / "script.py").write_text(
        DESCENT
        + textwrap.dedent(
            """
            import threading, chopper
            from chopper.recording import session as _session
            model = torch.nn.Linear(4, 4)
            optimizer = Descent(model.parameters(), lr=0.1)
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
import threading, chopper
from torch.profiler import profile
model = torch.nn.Linear(4, 4)
optimizer = Descent(model.parameters(), lr=0.1)
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
        pytest.param(f"in_its_place({TRACED}); train(3)\nends()", range(0), marks=pytest.mark.long),
        # Theirs outlasts the process.
        pytest.param(f"in_its_place({TRACED}); train(3)", range(0), marks=pytest.mark.long),
        # The trace of the first window is kept.
        pytest.param(
            f"in_its_place({LATER}); ends(); train(3)", range(2, 7), marks=pytest.mark.long
        ),
    ],
    ids=["within", "across", "to the end", "later window"],
)
def test_a_profiler_in_another_thread_takes_the_trace_over(tmp_path, body, traced):
    indented = "\n".join(line if i else f"    {line}" for i, line in enumerate(body.splitlines()))
    (tmp_path / "script.py").write_text(DESCENT + THREADED.format(body=indented))
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        check=False,
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "recording stopped" not in done.stderr
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
