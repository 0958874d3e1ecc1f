"""The program is not changed: its exceptions, its return values, its files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import chopper
from chopper.errors import OutputError, UsageError
from chopper.recording.logs import StepLog
from chopper.storage.run import Run
from tests.conftest import tmpfs
from tests.recording.make import TRACE_ONLY, steps_of, trace_of, traced_of


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


def test_a_cell_of_a_notebook_runs_again(task, monkeypatch, capfd):
    monkeypatch.setattr(sys, "ps1", "In [1]: ", raising=False)
    outputs = []
    for error in (None, ValueError, None):
        cell = contextlib.nullcontext() if error is None else pytest.raises(error)
        with cell, chopper.profile("run", collect=TRACE_ONLY) as prof:
            task.step()
            outputs.append(str(prof.output))
            if error is not None:
                raise error
    assert outputs == ["run", "run-2", "run-3"]
    left = chopper.profile("run", collect=TRACE_ONLY)
    left.__enter__()  # and its cell failed before it left
    task.step()
    with chopper.profile("run", collect=TRACE_ONLY) as prof:
        task.step()
    assert not left.recording
    assert (len(steps_of("run-4")), len(steps_of("run-5")), prof.output) == (1, 1, Path("run-5"))
    assert "the recording to run-4, which was left open, ends here" in capfd.readouterr().err


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


def test_a_recording_without_a_step_replaces_no_run(task, capfd):
    with chopper.profile("run", collect=TRACE_ONLY):
        task.step()
    Path("run/notes.txt").write_text("mine")
    before = {p: p.read_bytes() for p in Path("run").rglob("*") if p.is_file()}
    Path("elsewhere").mkdir()
    with chopper.profile("run", collect=[], trace=False, force=True) as prof:
        os.chdir("elsewhere")
    os.chdir("..")
    assert {p: p.read_bytes() for p in Path("run").rglob("*") if p.is_file()} == before
    assert prof.output == Path("run.no-steps")
    assert len(steps_of("run")) == 1
    said = capfd.readouterr().err
    assert "run: no step was recorded, so the run that was there stays" in said
    assert "next: chopper analyze run.no-steps" in said
    with chopper.profile("run", collect=[], trace=False, force=True) as prof:
        # What waits beside it is put back by the next command, if this one is killed.
        assert len([*Path().glob(".run.old/rank-00000")]) == 1
        prof.step()
        prof.step()
    assert len(steps_of("run")) == 2
    assert sorted(p.name for p in Path().iterdir()) == ["elsewhere", "run", "run.no-steps"]


_KILLED = """
import os, sys, chopper
with chopper.profile("run", collect=[], trace=False, force=True) as prof:
    if len(sys.argv) > 1: prof.step()
    os.kill(os.getpid(), 9)
"""


def test_a_killed_recording_replaces_no_run():
    with chopper.profile("run", collect=[], trace=False) as prof:
        for _ in range(3):
            prof.step()
    for words in ((), ("step",), ()):
        subprocess.run([sys.executable, "-c", _KILLED, *words], check=False)
    with chopper.profile("run", collect=[], trace=False, force=True):
        pass
    assert (len(steps_of("run.before")), len(steps_of("run"))) == (3, 1)


_RANKED = """
import os, sys, chopper
with chopper.profile("run", collect=[], trace=False, force=True) as prof:
    print("entered", flush=True)
    sys.stdin.readline()
    for _ in range(int(sys.argv[1])): prof.step()
print("left", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("steps", [(0, 0), (2, 0), (0, 2)])
def test_the_ranks_of_a_job_replace_a_run_if_any_took_a_step(steps, monkeypatch):
    with chopper.profile("run", collect=[], trace=False) as prof:
        for _ in range(3):
            prof.step()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "1")
    ranks: list[Any] = []
    with contextlib.ExitStack() as stack:
        for rank, count in enumerate(steps):
            env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            words = [sys.executable, "-c", _RANKED, str(count)]
            how: Any = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "text": True,
                "env": env,
            }
            ranks.append(stack.enter_context(subprocess.Popen(words, **how)))
            assert ranks[-1].stdout.readline() == "entered\n"
        for process in ranks:
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "left\n"
        for process in ranks:
            process.communicate("\n")
    if any(steps):
        assert sorted(p.name for p in Path("run").glob("rank-*")) == ["rank-00000", "rank-00001"]
        assert [p.name for p in Path().iterdir()] == ["run"]
    else:
        assert len(steps_of("run")) == 3
        assert len([*Path("run.no-steps").glob("rank-*")]) == 2


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


def test_a_read_only_disk_does_not_stop_the_program(task, capfd):
    with tmpfs("ro") as at, chopper.profile(at / "run", collect=TRACE_ONLY) as prof:
        task.step()
        assert not prof.recording
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "Read-only file system" in err


def test_a_recording_that_fails_within_a_step_leaves_the_programs_hooks_alone(task, monkeypatch):
    def fail(*_args, **_kwargs):
        raise OSError("no space left")

    called = []
    with chopper.profile("run", collect=TRACE_ONLY, trace=False):
        handle = register_optimizer_step_post_hook(lambda *_: called.append(1))
        monkeypatch.setattr(StepLog, "end", fail)
        try:
            for _ in range(3):
                task.step()
        finally:
            handle.remove()
    assert len(called) == 3


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
