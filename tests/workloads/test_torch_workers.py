from __future__ import annotations

import os
import signal
import sys
import time

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from chopper.workloads.torch_loading import _end_with_the_rank
from tests.waiting import PATIENCE_S


def worker(said: int) -> None:
    """In a process of its own: as a worker of a DataLoader that waits."""
    try:
        _end_with_the_rank()
        os.write(said, b"ready")
        # Python looks for signals between short waits: one that comes just before a wait begins
        # would be seen at its end only.
        for _ in range(round(PATIENCE_S * 10)):
            time.sleep(0.1)
    finally:
        os._exit(1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_that_is_told_to_end_does_so_silently(number):
    hears, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        worker(says)
    assert os.read(hears, 5) == b"ready"
    os.kill(pid, number)
    # Torch would raise in the rank for any other code.
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(hears)
    os.close(says)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal for it is Linux's")
def test_a_worker_ends_with_a_rank_that_is_killed():
    hears, says = os.pipe()
    rank = os.fork()
    if rank == 0:
        if os.fork() == 0:
            worker(says)
        time.sleep(PATIENCE_S)
        os._exit(1)
    assert os.read(hears, 5) == b"ready"
    os.close(says)
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    assert os.read(hears, 1) == b""  # nobody has the other end any more
    os.close(hears)
