"""An interrupt of all ranks, at any moment of theirs: nothing is said, and nobody is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.waiting import PATIENCE_S, until

SLOW = """
import os, pathlib, time
here = pathlib.Path(__file__).parent

def begun():
    (here / f"begun-{os.environ['RANK']}").touch()
"""
STARTER = """
from chopper.experiments.declarations import as_program
from chopper.workloads.processes import run_ranks
as_program(lambda: run_ranks("interrupted_ranks", 2, linked=False))
"""
APART = """
import sys, time
from chopper.workloads import processes
processes._CLOSING_S = 600.0  # which is not waited for: Ctrl-C does not reach the ranks
apart = {"words": [], "start_new_session": True}
try:
    with processes.running_ranks("interrupted_ranks", 2, linked=False, **apart):
        time.sleep(600)
except KeyboardInterrupt:
    sys.exit(130)
"""
IMPORTING = SLOW + "begun()\ntime.sleep(600)\n"
FAILING = """
def main():
    begun()
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        raise RuntimeError("connection closed by peer")
"""


@pytest.mark.parametrize(
    ("starter", "body"),
    [(STARTER, IMPORTING), (STARTER, SLOW + FAILING), (APART, IMPORTING)],
    ids=["importing", "failing of it", "in sessions of their own"],
)
def test_interrupted_ranks_end_without_a_word(tmp_path, starter, body):
    (tmp_path / "interrupted_ranks.py").write_text(body)
    process = subprocess.Popen(
        [sys.executable, "-c", starter],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        files = [tmp_path / f"begun-{rank}" for rank in range(2)]
        until(lambda: process.poll() is not None or all(f.exists() for f in files), "both ranks")
        assert process.poll() is None, process.communicate()[0]
        ranks = psutil.Process(process.pid).children()
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, said) == (130, "")
    assert len(ranks) == 2
    assert [rank for rank in ranks if rank.is_running()] == []


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can become another user"
)
def test_another_user_is_told_that_a_link_needs_root():
    # Everything is loaded before: the tree may be readable by root alone.
    code = (
        "import os\nfrom chopper.workloads import link\n"
        "os.setgroups([])\nos.setgid(65534)\nos.setuid(65534)\nprint(link.unavailable())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "shaping a link needs root" or "not installed" in done.stdout
