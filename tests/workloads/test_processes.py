"""Ranks that a workload starts itself: what is said and left when one of them ends early."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

pytest.importorskip("torch")

from chopper.workloads import processes
from chopper.workloads.processes import run_ranks
from tests.waiting import until

RANK = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    {ending}
time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "ended first, by SIGKILL"),
        ("sys.exit(3)", 3, "ended first, with exit code 3"),
        ("sys.exit(130)", 130, None),
    ],
)
def test_a_rank_that_ends_early_is_named_and_the_others_are_ended(
    tmp_path, monkeypatch, capsys, ending, code, said
):
    (tmp_path / "ranks_of_a_test.py").write_text(RANK.format(ending=ending))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        run_ranks("ranks_of_a_test", 2, linked=False)
    assert ended.value.code == code
    error = capsys.readouterr().err
    assert error == "" if said is None else said in error and error.startswith("chopper: rank 1 (")
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # one of another test, that ends just now
            assert "ranks_of_a_test" not in process.cmdline()


def test_ranks_that_all_end_well_are_waited_for(tmp_path, monkeypatch):
    (tmp_path / "ranks_of_a_test.py").write_text(
        "import os, pathlib\n"
        "def main():\n"
        "    here = pathlib.Path(__file__).parent\n"
        "    (here / os.environ['RANK']).write_text(os.environ['WORLD_SIZE'])\n"
        "    assert not [name for name in os.environ if name.startswith('TORCHELASTIC_')]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # As inside of a rank of torchrun: init_process_group would wait for its agent's store.
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    run_ranks("ranks_of_a_test", 3, linked=False)
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["3", "3", "3"]


def test_what_a_rank_fails_of_is_shown(tmp_path, monkeypatch, capfd):
    (tmp_path / "ranks_of_a_test.py").write_text(
        "def main():\n    raise ValueError('no such rank')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        run_ranks("ranks_of_a_test", 1, linked=False)
    assert ended.value.code == 1
    error = capfd.readouterr().err
    assert "Traceback" in error
    assert "ValueError: no such rank\n" in error


KILLED = """
import os, pathlib, signal, time
here = pathlib.Path(__file__).parent
if os.environ["RANK"] == "1":
    (here / "part").write_text(str(os.getpid()))
    (here / "part").rename(here / "pid")
    os.kill(os.getpid(), signal.SIGKILL)
while not (here / "pid").exists():
    time.sleep(0.01)
stat = pathlib.Path("/proc", (here / "pid").read_text(), "stat")
while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
    time.sleep(0.01)
raise SystemExit("connection closed by peer")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_of_ranks_that_end_at_once_the_killed_one_is_the_first(tmp_path, monkeypatch, capfd):
    (tmp_path / "ranks_of_a_test.py").write_text(KILLED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(processes, "_POLL_S", 1.0)
    with pytest.raises(SystemExit) as ended:
        run_ranks("ranks_of_a_test", 2, linked=False)
    assert ended.value.code == 137
    said = [line for line in capfd.readouterr().err.splitlines() if "ended first" in line]
    assert len(said) == 1
    assert said[0].startswith("chopper: rank 1 (")


DEAF = """
import os, pathlib, signal, time
here = pathlib.Path(__file__).parent
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "1":
    while not (here / "pid").exists():
        time.sleep(0.01)
    raise SystemExit(3)
(here / "part").write_text(str(os.getpid()))
(here / "part").rename(here / "pid")
time.sleep(3600)
"""


def test_a_rank_that_does_not_end_is_killed_however_often_its_starter_is_told_to_end(tmp_path):
    (tmp_path / "ranks_of_a_test.py").write_text(DEAF)
    code = (
        "from chopper.workloads import processes\nprocesses._GRACE_S = 1.0\n"
        "processes.run_ranks('ranks_of_a_test', 2, linked=False)"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert starter.stderr is not None
        assert "ended first, with exit code 3" in starter.stderr.readline()
        deaf = psutil.Process(int((tmp_path / "pid").read_text()))

        def ended():
            starter.send_signal(signal.SIGTERM)
            return starter.poll() is not None

        until(ended, "the end of what starts the ranks")
        left = deaf.is_running()
        if left:
            deaf.kill()
        assert not left
    finally:
        starter.kill()
        starter.communicate()


ASLEEP = """
import os, pathlib, time
from types import SimpleNamespace
WORKLOAD = SimpleNamespace(linked=False, clean_up=lambda: None)
if "RANK" in os.environ:
    here = pathlib.Path(__file__).parent / os.environ["RANK"]
    here.with_suffix(".part").write_text(str(os.getpid()))
    here.with_suffix(".part").rename(here)
    time.sleep(3600)
"""


COMMAND = """
import os, subprocess, sys
launcher = [sys.executable, "-m", "chopper.workloads.processes", str(os.getpid())]
subprocess.run([*launcher, "2", "ranks_of_a_test"])
"""
LAUNCHER = """
from chopper.workloads.processes import run_ranks
run_ranks("ranks_of_a_test", 2, linked=False)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="signals of parents' deaths are Linux's")
@pytest.mark.parametrize("program", [COMMAND, LAUNCHER], ids=["command", "launcher"])
def test_ranks_end_when_what_started_them_is_killed(tmp_path, program):
    (tmp_path / "ranks_of_a_test.py").write_text(ASLEEP)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    files = [tmp_path / str(rank) for rank in range(2)]
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as starter:
        try:
            until(lambda: all(file.exists() for file in files), "two ranks")
        finally:
            starter.kill()
    ranks = [int(file.read_text()) for file in files]
    until(lambda: not any(psutil.pid_exists(rank) for rank in ranks), "the end of all ranks")
