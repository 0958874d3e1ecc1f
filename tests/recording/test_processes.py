"""Processes that fork, are killed, and are told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pytest
import torch

import chopper
from chopper.recording import session as _session
from chopper.storage.layout import MANIFEST
from chopper.storage.run import Run
from tests.recording.make import DESCENT, TRACE_ONLY, findings_of, steps_of, traced_of
from tests.waiting import PATIENCE_S, until


def test_forked_children_record_apart_from_their_parent(task):
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
                own = _session.active()
                os._exit(7 if own is not None and own.path.name == "process-2" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        task.step()
    assert len(steps_of("run")) == 7
    assert {p.name for p in Path("run").iterdir()} == {"rank-00000", "process-2", MANIFEST}
    (report,) = Run.open(Path("run/process-2")).part(0).collectors
    assert (report.name, report.status) == ("torch_trace", "refused")


def test_a_child_that_is_forked_while_another_thread_is_in_the_recorder_goes_on(task):
    with chopper.profile("run", collect=TRACE_ONLY, steps=(500, 501)):
        task.step()
        session = _session.active()
        assert session is not None
        held, forked = threading.Event(), threading.Event()

        def hold():
            with session._lock:
                held.set()
                forked.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(PATIENCE_S))
            with torch.autograd.profiler.profile(use_kineto=True):
                torch.ones(2).sum()
            os._exit(7)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        forked.set()
        thread.join()
    assert ended == 7


FORKS = """
import os, sys, chopper
model = torch.nn.Linear(4, 4)
optimizer = Descent(model.parameters(), lr=0.1)
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
    (tmp_path / "script.py").write_text(DESCENT + FORKS)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        check=True,
        timeout=PATIENCE_S,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.stdout == "trained\n"
    assert len(steps_of(tmp_path / "run")) == 8
    assert traced_of(tmp_path / "run") == [2, 3]
    assert findings_of(tmp_path / "run") == ["run.forked"]


KILLED = """
import os, signal, torch, chopper
from chopper.storage import streams as _streams
_streams._FLUSH_NS = 0
with chopper.profile("run", collect=["torch_trace"]) as prof:
    for _ in range(3):
        prof.step()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_steps_outlive_a_kill_within_a_trace(tmp_path):
    (tmp_path / "script.py").write_text(KILLED)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, check=False, timeout=PATIENCE_S
    )
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


IDLE = """
import sys, chopper
from chopper.recording import session as _session
_session._IDLE_S = 0.01
with chopper.profile("run", trace=False, collect=[]) as prof:
    for _ in range(3):
        prof.step()
    sys.stdin.read()
"""


@pytest.mark.slow
def test_the_last_steps_outlive_a_kill_of_an_idle_program(tmp_path):
    (tmp_path / "script.py").write_text(IDLE)
    file = tmp_path / "run" / "rank-00000" / "step.arrow"

    def steps():
        try:
            with pyarrow.OSFile(str(file)) as opened:
                found = batches(pyarrow.ipc.open_stream(opened))
                return [n for batch in found for n in batch.column("number").to_pylist()]
        except (OSError, pyarrow.ArrowInvalid):
            return []

    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdin=subprocess.PIPE
    ) as process:
        try:
            until(lambda: steps() == [0, 1, 2] or process.poll() is not None, "all steps on disk")
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    assert steps() == [0, 1, 2]


TRAINS = f"""
import sys, time, chopper
{DESCENT}
model = torch.nn.Linear(4, 4)
optimizer = Descent(model.parameters(), lr=0.1)
with chopper.profile("run", collect=["torch_trace"]) as prof:
    for _ in range(9):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        prof.step()
"""
STEPS = """
import sys, time, chopper
with chopper.profile("run", trace=False, collect=[]) as prof:
    for _ in range(9):
        prof.step()
"""
"""What ends the recording, without a trace: it takes an eighth of the CPU time without torch."""
READY = 'print("ready", flush=True)'
BLOCKED = f"{READY}; torch.distributed.TCPStore('127.0.0.1', 0, is_master=True).get('never')"
AWAKE = f"{READY}\n    while True: time.sleep(0.01)"


def terminated(tmp_path, program, number):
    script = tmp_path / "script.py"
    script.write_text(program)
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        rest, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, rest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wait", "number"),
    [(AWAKE, signal.SIGHUP), (BLOCKED, signal.SIGTERM)],
    ids=["awake", "blocked in C"],
)
def test_signals_close_the_recording_and_end_the_process(tmp_path, wait, number):
    code, _ = terminated(tmp_path, f"{TRAINS}    {wait}", number)
    assert code == -number
    part = Run.open(tmp_path / "run").part(0)
    assert (part.status, part.error) == ("interrupted", f"ended by {number.name}")
    assert len(steps_of(tmp_path / "run")) == 9
    assert traced_of(tmp_path / "run") == [2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_hang_up_that_the_program_ignores_changes_nothing(tmp_path):
    handler = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)"
    program = f"{handler}{STEPS}    {READY}; sys.stdin.read()"
    code, _ = terminated(tmp_path, program, signal.SIGHUP)
    assert code == 0
    assert Run.open(tmp_path / "run").part(0).status == "complete"


@pytest.mark.slow
def test_the_programs_own_sigterm_handler_stays(tmp_path):
    handler = (
        "import signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('mine', flush=True), sys.exit(5)))"
    )
    code, rest = terminated(tmp_path, f"{handler}{STEPS}    {AWAKE}", signal.SIGTERM)
    assert (code, rest) == (5, "mine\n")
    part = Run.open(tmp_path / "run").part(0)
    assert (part.status, part.error) == ("interrupted", "SystemExit: 5")


@pytest.mark.slow
@pytest.mark.parametrize(
    "raised", ["RuntimeError('a peer left')", "SystemExit(1)", "SystemExit(0)"]
)
def test_whatever_ends_a_program_after_ctrl_c_it_was_interrupted(tmp_path, raised):
    caught = f"    except KeyboardInterrupt:\n        raise {raised}"
    wait = f"try:\n        {READY}\n        while True: time.sleep(0.01)\n{caught}"
    code, _ = terminated(tmp_path, f"{STEPS}    {wait}", signal.SIGINT)
    assert code == (0 if raised == "SystemExit(0)" else 1)
    assert Run.open(tmp_path / "run").part(0).status == "interrupted"
