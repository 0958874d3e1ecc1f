"""Kills trainers and samplers at random times and reads what is left.

    python tests/collectors/kills.py [--count 200] [--seed 0]

Each trial records a program with the host's sampler and kills, with SIGKILL, the program or the
sampler in turn, up to 2.5 s after it began. Then the run must open, every table must read, no
sampler may be left, and what is missing at the end must be shorter than a flush interval. Prints
what was lost; exits with 1 when a run cannot be read, or more is missing.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from chopper import pipeline

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from chopper.collectors.sampler import COMM
from chopper.storage.streams import read_stream
from tests.waiting import PATIENCE_S, until

FLUSH_S = 1.0
PERIOD_S = 0.1
SLACK_S = 0.25
"""For a machine that does other things too: a flush may begin late."""

PROGRAM = """
    import sys, time
    import chopper
    with chopper.profile(sys.argv[1], trace=False, collect=("host",)) as prof:
        print("ready", flush=True)
        while True:
            time.sleep(0.02)
            prof.step()
"""


@dataclass(frozen=True)
class Trial:
    """What became of one kill; times in s."""

    victim: str
    after_s: float
    lost_s: float | None
    """From the last row that can be read to the kill; None when it came before the first flush."""
    rows: int
    rows_before: int
    """That were on disk when it was killed."""
    finding: bool
    """Whether the manifest or the reader says that something ended early."""


def trial(victim: str, after_s: float, *, flushed: bool = False) -> Trial:
    """Record, kill, read.

    Args:
        victim: ``trainer`` or ``sampler``.
        after_s: when it is killed, from the first step on; later where the sampler comes later.
        flushed: kill it only when rows are on disk.

    Raises:
        AssertionError: a sampler is left, or the run says nothing of what happened.
        ChopperError: the run cannot be read.
    """
    folder = Path(tempfile.mkdtemp(prefix="chopper-kill-"))
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert program.stdout is not None
    try:
        assert program.stdout.readline() == b"ready\n"
        begun_s = time.monotonic()
        samplers: list[psutil.Process] = []

        def found() -> bool:
            children = psutil.Process(program.pid).children()
            samplers[:] = [child for child in children if child.name() == COMM]
            return samplers != []

        until(found, "the sampler")
        assert len(samplers) == 1
        select.select([], [], [], max(begun_s + after_s - time.monotonic(), 0))
        rows_before, _, _ = _rows(folder / "run")
        while flushed and not rows_before:
            select.select([], [], [], 0.05)
            rows_before, _, _ = _rows(folder / "run")
        killed = program.pid if victim == "trainer" else samplers[0].pid
        os.kill(killed, signal.SIGKILL)
        killed_ns = time.time_ns()
        if victim == "sampler":
            program.send_signal(signal.SIGINT)
        program.wait(PATIENCE_S)
        _, alive = psutil.wait_procs(samplers, PATIENCE_S)
        assert not alive, "a sampler outlives its parent"
        run = pipeline.read(folder / "run")
        rows, last_ns, finding = _rows(folder / "run")
        finding |= run.part(0).status != "complete"
        finding |= any(report.status == "failed" for report in run.part(0).collectors)
        lost_s = (killed_ns - last_ns) / 1e9 if last_ns else None
        return Trial(victim, after_s, lost_s, rows, rows_before, finding)
    finally:
        program.kill()
        program.wait()
        program.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def _rows(run: Path) -> tuple[int, int, bool]:
    """Number of rows to be read, time of the host's last one, whether a table is cut short."""
    rows, last_ns, cut = 0, 0, False
    for file in sorted((run / "rank-00000").glob("*.arrow")):
        table, problem = read_stream(file, file.stem)
        cut |= problem is not None
        rows += table.num_rows
        if file.stem == "host" and table.num_rows:
            last_ns = max(last_ns, table["time_ns"][-1].as_py())
    return rows, last_ns, cut


def trials(count: int, seed: int) -> list[Trial]:
    """As many trials, the victims in turn."""
    moment = random.Random(seed)
    return [trial(("trainer", "sampler")[i % 2], moment.uniform(0, 2.5)) for i in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    done = trials(options.count, options.seed)
    bad = 0
    for victim in ("trainer", "sampler"):
        of = [t for t in done if t.victim == victim]
        lost = [t.lost_s if t.lost_s is not None else t.after_s for t in of]
        over = [t for t in lost if t > FLUSH_S + PERIOD_S + SLACK_S]
        silent = [t for t in of if not t.finding]
        bad += len(over) + len(silent)
        print(
            f"{victim:<8} killed {len(of)} times: all runs readable, lost at the end "
            f"median {statistics.median(lost):.2f} s, worst {max(lost):.2f} s; "
            f"{len(over)} lost more than a flush interval, {len(silent)} say nothing of it"
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
