"""Processes that a recorded program starts, and that train in its place."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import chopper
from chopper.recording.hook import arming
from chopper.storage.run import Run
from tests.recording.make import DESCENT, TRACE_ONLY
from tests.waiting import PATIENCE_S

CHILDREN = """
import os, sys, chopper
import torch.distributed as dist, torch.multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor

def train(count):
    model = torch.nn.Linear(4, 4)
    optimizer = Descent(model.parameters(), lr=0.1)
    for _ in range(count):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

def rank(number):
    dist.init_process_group(
        "gloo", init_method=f"file://{os.getcwd()}/rendezvous", rank=number, world_size=2
    )
    train(4)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    how = sys.argv[1]
    with chopper.profile("run", collect=["torch_trace"], steps="0:2"):
        if how == "ranks":
            mp.spawn(rank, nprocs=2)
        else:
            train(int(how == "fork"))
            with ProcessPoolExecutor(2, mp_context=mp.get_context(how)) as pool:
                list(pool.map(train, [3, 5]))
"""


def recorded(directory, how):
    (directory / "script.py").write_text(DESCENT + CHILDREN)
    done = subprocess.run(
        [sys.executable, "script.py", how],
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.slow
def test_ranks_that_a_profile_starts_are_its_ranks(tmp_path):
    said = recorded(tmp_path, "ranks")
    run = Run.open(tmp_path / "run")
    assert run.ranks == [0, 1]
    assert [run.part(rank).world_size for rank in run.ranks] == [2, 2]
    for rank in run.ranks:
        assert [row["traced"] for row in run.table(rank, "step").to_pylist()] == [
            True, True, False, False,
        ]  # fmt: skip
    parent = Run.open(tmp_path / "run" / "process-2").part(0)
    assert parent.steps_count == 0
    assert [line for line in said if line.startswith("chopper: ")] == [
        "chopper: recorded 2 ranks, 4 steps; next: chopper analyze run",
        "chopper: info: 2 processes recorded separately; this is one of them. Analyze the other by "
        f"path: run/process-2 (0 steps, {sys.executable} script.py ranks)",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("spawn", marks=pytest.mark.long), "fork"])
def test_workers_that_train_have_runs_of_their_own(tmp_path, how):
    recorded(tmp_path, how)
    run = Run.open(tmp_path / "run")
    inner = sorted(p for p in (tmp_path / "run").iterdir() if p.name.startswith("process-"))
    runs = [run, *(Run.open(path) for path in inner)]
    steps = [one.table(0, "step").num_rows for one in runs]
    if how == "fork":  # the parent took a step, and traced: no trace can be taken in its children
        assert steps[0] == 1
        del runs[0], steps[0]
        for one in runs:
            (report,) = one.part(0).collectors
            assert report.status == "refused"
            assert "forked" in str(report.reason)
    # Either worker may have trained both times.
    assert sum(steps) == 8
    assert all(one.ranks == [0] for one in runs)


def test_the_environment_is_as_it_was(task, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.delenv(arming.HOOK_VARIABLE, raising=False)
    before = dict(os.environ)
    for changed in (False, True):
        with chopper.profile(f"run-{changed}", collect=TRACE_ONLY, trace=False):
            first, mine = os.environ["PYTHONPATH"].split(os.pathsep)
            assert (first, mine) == (arming._FOLDER, "mine")
            task.step()
            if changed:
                os.environ["PYTHONPATH"] = f"{first}{os.pathsep}theirs"
        if changed:
            before["PYTHONPATH"] = "theirs"
        assert dict(os.environ) == before


def test_a_profile_ends_with_where_its_run_is(task, capfd, monkeypatch):
    @chopper.profile("my run", collect=TRACE_ONLY, trace=False)
    def train(steps):
        for _ in range(steps):
            task.step()

    train(3)
    assert capfd.readouterr().err == (
        "chopper: recorded 1 rank, 3 steps; next: chopper analyze 'my run'\n"
    )
    train(3)
    assert capfd.readouterr().err == ""
    with chopper.profile("stepless", collect=TRACE_ONLY, trace=False):
        pass
    said = capfd.readouterr().err.splitlines()
    assert said[0] == "chopper: recorded 1 rank, 0 steps; next: chopper analyze stepless"
    assert said[1].startswith("chopper: warning: no step was detected")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with chopper.profile("ranks", collect=TRACE_ONLY, trace=False):
        task.step()
    assert capfd.readouterr().err == ""
