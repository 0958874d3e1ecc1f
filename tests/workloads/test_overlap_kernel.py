"""The Triton kernel in Triton's interpreter, in a process of its own: it is chosen at import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.waiting import PATIENCE_S

PROGRAM = """
import sys, threading, time, torch
from chopper.workloads.overlap_kernel import BLOCK_M, matmul_on_flags

made = []
empty = torch.empty

def poisoned(*shape, **how):
    made.append(empty(*shape, **how).fill_(float("nan")))
    return made[-1]

def inside(frame):
    while frame is not None:
        if frame.f_code.co_name == "_kernel":
            return True
        frame = frame.f_back
    return False

def check(m, k, n, rows, swizzle):
    chunks = -(-m // rows)
    whole, b = torch.randn(m, k), torch.randn(k, n)
    a = torch.full((m, k), float("nan"))
    flags = torch.zeros(chunks, dtype=torch.int32)
    here = chunks // 2                   # the first chunk that has arrived already

    def arrive(chunk):
        a[chunk * rows : (chunk + 1) * rows] = whole[chunk * rows : (chunk + 1) * rows]
        flags[chunk] = 1

    for chunk in range(here, chunks):
        arrive(chunk)
    whole_tiles = -(-here * rows // BLOCK_M) * BLOCK_M
    ahead = []
    made.clear()

    def bring():
        # Nothing comes before the kernel runs: its tiles have to wait. Swizzled, those of the rows
        # that are here do not: they are done before anything comes, or this waits in vain.
        while not any(inside(f) for f in sys._current_frames().values()) or not made:
            time.sleep(0.001)
        if swizzle:
            deadline = time.monotonic() + 600
            while made[0][whole_tiles:].isnan().any():
                assert time.monotonic() < deadline, "tiles that are here were not the first"
                time.sleep(0.001)
        ahead.append(int((~made[0].isnan()).sum()))
        for chunk in range(here):
            arrive(chunk)

    bringer = threading.Thread(target=bring)
    bringer.start()
    torch.empty = poisoned
    try:
        first = here * rows if swizzle else 0
        out = matmul_on_flags(a, b, flags, rows_per_chunk=rows, first_row=first)
    finally:
        torch.empty = empty
        bringer.join()
    assert out is made[0]
    # In the order of the rows nothing can be done before the first chunk comes.
    assert ahead == [(m - whole_tiles) * n if swizzle else 0], ahead
    expected = whole.double() @ b.double()
    error = float((out.double() - expected).norm() / expected.norm())
    assert error < 1e-6, error

torch.manual_seed(3)
# The last two: tiles that reach into the next chunk, and sides that are no multiples of a tile.
for shape in ((128, 32, 64, 64), (192, 40, 70, 32), (100, 33, 65, 48)):
    for swizzle in (True, False):
        check(*shape, swizzle)
print("ok")
"""


def test_tiles_wait_for_their_rows_and_swizzled_begin_with_those_that_are_here():
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "ok\n"
