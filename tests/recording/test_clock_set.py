"""A wall clock that is set while a program is recorded, by a library that answers for the kernel.

No process can be given a wall clock of its own, and the machine's is not the tests' to set.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chopper import pipeline
from chopper.storage.run import Run
from tests import command
from tests.recording.make import DESCENT
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

DAY_S = 86_400
_SHIM = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Seconds by which the wall clock was set, once the file is there. */
static long set_s(void)
{
    struct stat status;
    return stat(getenv("CLOCK_FILE"), &status) ? 0 : atol(getenv("CLOCK_SET_S"));
}

int clock_gettime(clockid_t id, struct timespec *now)
{
    int result = syscall(SYS_clock_gettime, id, now);
    if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        now->tv_sec += set_s();
    return result;
}

int gettimeofday(struct timeval *now, void *zone)
{
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now)
{
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now)
        *now = precise.tv_sec;
    return precise.tv_sec;
}
"""
_PROGRAM = f"""
import os, sys, time
from pathlib import Path
{DESCENT}
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = Descent(model.parameters(), lr=0.1)
for number in range(int(sys.argv[2])):
    if number == int(sys.argv[1]):
        before_s = time.time()
        Path(os.environ["CLOCK_FILE"]).touch()
        assert abs(time.time() - before_s) > 1000
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(_SHIM)
    words = [compiler, "-shared", "-fPIC", "-o", "shim.so", "shim.c"]
    subprocess.run(words, cwd=folder, check=True)
    return folder / "shim.so"


Record = Callable[..., Run]


@pytest.fixture
def record(shim: Path, tmp_path: Path) -> Record:
    def recorded(set_s: int, at_step: int, steps: int, *options: str) -> Run:
        (tmp_path / "program.py").write_text(_PROGRAM)
        words = [sys.executable, "-m", "chopper", "record", "-o", "run", *options, "--"]
        done = subprocess.run(
            [*words, sys.executable, "program.py", str(at_step), str(steps)],
            cwd=tmp_path,
            env=os.environ
            | {"LD_PRELOAD": str(shim), "CLOCK_FILE": str(tmp_path / "set")}
            | {"CLOCK_SET_S": str(set_s)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        run = Run.open(tmp_path / "run")
        (found,) = (f.message for f in run.part(0).findings if f.code == "run.clock_set")
        assert f"was set by {set_s:+}.000 s" in found
        assert found in done.stderr
        return run

    return recorded


def spans_ns(run: Run) -> list[tuple[int, int, bool]]:
    steps = run.table(0, "step").sort_by("number")
    columns = (steps[name].to_pylist() for name in ("start_ns", "end_ns", "traced"))
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("set_s", [DAY_S, pytest.param(-DAY_S, marks=pytest.mark.long)])
def test_steps_are_as_long_as_they_were_and_line_up_with_their_trace(
    record: Record, set_s: int
) -> None:
    run = record(set_s, 6, 16, "--steps", "10:13")
    spans = spans_ns(run)
    assert len(spans) == 16
    assert max(end_ns - start_ns for start_ns, end_ns, _ in spans) < DAY_S * 10**9 // 100
    assert abs(spans[-1][1] - spans[0][0]) < DAY_S * 10**9 // 100
    traced = [(start_ns, end_ns) for start_ns, end_ns, is_traced in spans if is_traced]
    assert len(traced) == 3
    assert run.path is not None
    recording = pipeline.read(run.path)
    events = recording.table(0, "host_span").to_pylist()
    starts_ns = [e["start_ns"] for e in events if e["name"].startswith("aten::addmm")]
    for start_ns, end_ns in traced:  # two layers
        assert sum(start_ns <= at_ns < end_ns for at_ns in starts_ns) == 2
    (error_ns,) = (
        c.clock_alignment_error_ns for c in run.part(0).collectors if c.name == "torch_trace"
    )
    assert error_ns is not None
    assert error_ns < DAY_S * 10**9 // 100
    sampled = recording.table(0, "process")["time_ns"].to_pylist()
    assert all(abs(time_ns - spans[0][0]) < DAY_S * 10**9 // 100 for time_ns in sampled)
    assert command.run("analyze", run.path).code == 0


def test_a_trace_in_which_the_clock_was_set_is_taken_again(record: Record) -> None:
    run = record(DAY_S, 4, 20, "--steps", "3:6")
    assert [n for n, (*_, traced) in enumerate(spans_ns(run)) if traced] == [8, 9, 10]
    (found,) = (f.message for f in run.part(0).findings if f.code == "run.trace_abandoned")
    assert "the trace of steps 3 to 5 is lost: the wall clock" in found
    assert "others are traced in their place" in found
