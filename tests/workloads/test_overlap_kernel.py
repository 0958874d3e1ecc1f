"""The Triton kernel in Triton's interpreter, in a process of its own: it is chosen at import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading, torch
from chopper.workloads.overlap_kernel import BLOCK_M, matmul_on_flags

torch.manual_seed(SEED)
m, k, n, rows = SHAPE
chunks = -(-m // rows)
whole = torch.randn(m, k)
a = torch.full((m, k), float("nan"))
b = torch.randn(k, n)
flags = torch.zeros(chunks, dtype=torch.int32)
here = chunks // 2                       # the first chunk that has arrived already
order = [*range(here, chunks), *range(here)]
for chunk in order[: chunks - here]:
    a[chunk * rows : (chunk + 1) * rows] = whole[chunk * rows : (chunk + 1) * rows]
    flags[chunk] = 1
seen = []

def inside(frame):
    while frame is not None:
        if frame.f_code.co_name == "_kernel":
            return True
        frame = frame.f_back
    return False

def bring():
    # Nothing comes before the kernel runs: its tiles have to wait.
    while not any(inside(f) for f in sys._current_frames().values()):
        pass
    for chunk in order[chunks - here :]:
        a[chunk * rows : (chunk + 1) * rows] = whole[chunk * rows : (chunk + 1) * rows]
        flags[chunk] = 1
        seen.append(chunk)

bringer = threading.Thread(target=bring)
bringer.start()
out = matmul_on_flags(a, b, flags, rows_per_chunk=rows, first_row=here * rows)
bringer.join()
expected = whole.double() @ b.double()
error = float((out.double() - expected).norm() / expected.norm())
assert error < 1e-6, error
assert seen == order[chunks - here :]
print("ok", error)
"""


@pytest.mark.parametrize(
    "shape",
    [(128, 32, 64, 64), (192, 40, 70, 32), (100, 33, 65, 48)],
    ids=lambda s: "x".join(map(str, s)),
)
def test_tiles_wait_for_their_rows(shape):
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    program = PROGRAM.replace("SEED", "3").replace("SHAPE", repr(shape))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("ok")
