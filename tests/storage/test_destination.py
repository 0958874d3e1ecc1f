"""A command under ``chopper record`` stops and goes on as it would in a shell without it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from chopper.fresh_python import own_python
from chopper.storage.destination import NOTES, check_output, is_own
from chopper.storage.run import Run
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="states of processes are Linux's")

PROGRAM = """
import os, sys
from pathlib import Path
from chopper.storage.parts import RunWriter
rank = RunWriter(Path(os.environ["CHOPPER_OUTPUT"]), 0)
rank.manifest.status = "complete"
rank.manifest.steps_source = "mark"
rank.save()
Path("pid.tmp").write_text(str(os.getpid()))
os.rename("pid.tmp", "pid")
with open("continue") as file:
    sys.exit(int(file.read()))
"""
"""Records as a rank would, and ends with the exit code that it reads from a pipe."""


def state(pid: int) -> str:
    return psutil.Process(pid).status()


class Job:
    """A recording whose program waits to be told its exit code."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "program.py").write_text(PROGRAM)
        os.mkfifo(directory / "continue")
        self.command = own_python(
            "chopper", "record", "-o", "run", "--", sys.executable, "program.py"
        )

    def program(self) -> int:
        until((self.directory / "pid").exists, "the program")
        return int((self.directory / "pid").read_text())

    def end(self, code: int) -> None:
        (self.directory / "continue").write_text(str(code))

    def is_recorded(self) -> bool:
        return (self.directory / "run" / "manifest.json").exists()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTSTP])
def test_a_program_that_is_stopped_and_continued_alone(tmp_path: Path, number: int) -> None:
    job = Job(tmp_path)
    with subprocess.Popen(
        job.command, cwd=tmp_path, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as chopper:
        program = job.program()
        os.kill(program, number)
        until(lambda: state(program) == psutil.STATUS_STOPPED, "the stop")
        os.kill(program, signal.SIGCONT)
        job.end(7)
        _, messages = chopper.communicate(timeout=PATIENCE_S)
    assert chopper.returncode == 7, messages
    assert job.is_recorded()


def test_chopper_stopped_and_continued_alone(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with subprocess.Popen(
        job.command, cwd=tmp_path, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as chopper:
        program = job.program()
        os.kill(chopper.pid, signal.SIGSTOP)
        until(lambda: state(chopper.pid) == psutil.STATUS_STOPPED, "the stop")
        assert state(program) != psutil.STATUS_STOPPED
        job.end(7)
        until(lambda: state(program) == psutil.STATUS_ZOMBIE, "the end of the program")
        os.kill(chopper.pid, signal.SIGCONT)
        chopper.wait(PATIENCE_S)
    assert chopper.returncode == 7
    assert job.is_recorded()


def test_a_program_whose_recorder_is_killed_goes_on_and_leaves_a_run(tmp_path: Path) -> None:
    job = Job(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with subprocess.Popen(
        job.command,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(scratch)},
    ) as chopper:
        program = psutil.Process(job.program())
        chopper.kill()
    assert program.is_running()
    job.end(0)
    until(lambda: not program.is_running() or program.status() == "zombie", "its end")
    assert list(scratch.iterdir()) == []
    assert Run.open(tmp_path / "run").ranks == [0]
    # What the recorder left is of the run, and goes with it.
    assert is_own(tmp_path / "run" / NOTES)
    assert check_output(tmp_path / "run", force=True)


SHELL = """
import os, signal, sys, termios
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
command = os.fork()
if not command:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(sys.argv[3], sys.argv[3:])
answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
orders = os.fdopen(int(sys.argv[2]))
print(command, file=answers)
while True:
    _, status = os.waitpid(command, os.WUNTRACED)
    os.tcsetpgrp(0, os.getpgrp())
    if not os.WIFSTOPPED(status):
        print("ended", os.waitstatus_to_exitcode(status), file=answers)
        break
    print("stopped", file=answers)
    if orders.readline() == "fg\\n":
        os.tcsetpgrp(0, command)
    os.killpg(command, signal.SIGCONT)
"""
"""What a shell does for one job: waits, takes the terminal back, continues it."""


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    try:
        yield ours, theirs
    finally:
        os.close(ours)
        os.close(theirs)


def test_ctrl_z_fg_and_bg_act_on_chopper_and_its_program_as_on_one_job(tmp_path: Path) -> None:
    job = Job(tmp_path)
    answers_read, answers_write = os.pipe()
    orders_read, orders_write = os.pipe()

    def lead_session() -> None:
        os.setsid()
        import fcntl

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    with terminal() as (ours, theirs), os.fdopen(answers_read) as answers:
        shell = subprocess.Popen(
            [sys.executable, "-c", SHELL, str(answers_write), str(orders_read), *job.command],
            cwd=tmp_path,
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.DEVNULL,
            pass_fds=[answers_write, orders_read],
            preexec_fn=lead_session,
        )
        os.close(answers_write)
        os.close(orders_read)
        chopper = int(answers.readline())
        program = job.program()
        until(lambda: os.tcgetpgrp(ours) == program, "the program in the foreground")

        os.write(ours, b"\x1a")
        assert answers.readline() == "stopped\n"
        assert state(program) == state(chopper) == psutil.STATUS_STOPPED

        os.write(orders_write, b"fg\n")
        until(lambda: os.tcgetpgrp(ours) == program, "the program in the foreground again")
        until(lambda: state(program) != psutil.STATUS_STOPPED, "that it goes on")

        os.write(ours, b"\x1a")
        assert answers.readline() == "stopped\n"
        os.write(orders_write, b"bg\n")
        until(lambda: state(program) != psutil.STATUS_STOPPED, "that it goes on")
        # The terminal stays the shell's.
        assert os.tcgetpgrp(ours) == shell.pid
        job.end(7)
        assert answers.readline() == "ended 7\n"
        shell.wait(PATIENCE_S)
    os.close(orders_write)
    assert job.is_recorded()
