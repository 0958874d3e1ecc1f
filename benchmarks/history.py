"""The gate with history on real runs of this machine: a GPU where there is one, else the CPU.

    python -m benchmarks.history [--earlier 10] [--folder DIR]

Records one program again and again, each run in a process of its own: as often as the history is
to be long, then in turn unchanged and with a wait that is 6 % and 4 % longer, which is no other
work: about half of a step is that wait. Prints what `chopper gate RUN --history` says of each.

With ``--simulate 100``, so many jobs of 60 runs each are judged instead, one run after another and
added as the command does, for each kind of noise: which share of the runs is a regression, without
a change and where an accepted change makes the job 5 % slower half-way; and how much slower jobs
are when it is said whose every run is 0.2 % slower than the one before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from chopper.analyzers.compare.history import PastRun, adds, judge
from tests.analyzers.compare.test_history import NOISE, SHARED, of

STEPS, TRACED = 200, (40, 45)
JUDGED = (1.0, 1.06, 1.0, 1.04, 1.0)
_WAIT_S = 0.004
RUNS = 60


def record(run: str, factor: float) -> None:
    """Train a little, with a wait so many times as long as it is with 1."""
    import torch

    import chopper

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    side = 2048 if device.type == "cuda" else 384
    weight = torch.randn(side, side, device=device, requires_grad=True)
    large = torch.randn(256 << 20 if device.type == "cuda" else 1 << 20, device=device)
    optimizer = torch.optim.SGD([weight], 1e-6)
    wait: Callable[[int], None] = torch.cuda._sleep
    with chopper.profile(run, steps=TRACED) as prof:
        for _step in range(STEPS):
            torch.autograd.backward((weight @ weight).sum())
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(10):
                large.mul_(1.0001)
            if device.type == "cuda":
                # The device decides how long a step takes.
                wait(int(1e7 * factor))
            else:
                until = time.perf_counter() + _WAIT_S * factor
                while time.perf_counter() < until:
                    pass
            prof.step()


def verdict(run: Path, history: Path, *options: str) -> dict[str, object]:
    """What the gate says of a run."""
    command = [sys.executable, "-m", "chopper", "gate", str(run), "--history", str(history)]
    done = subprocess.run([*command, *options, "--json"], stdout=subprocess.PIPE, check=False)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def simulated(noise: str, cv: float, seed: int, growth: float, step: float) -> tuple[int, float]:
    """Judge a job of 60 runs: how many are regressions, and its slow-down at the first."""
    values = cv * (NOISE | SHARED)[noise](np.random.default_rng(seed), (1, RUNS))[0]
    earlier: list[PastRun] = []
    regressions, first = 0, math.inf
    for at, value in enumerate(values.tolist()):
        change = (1 + growth) ** at * (1 + step * (at >= RUNS // 2))
        accepted = bool(step) and at == RUNS // 2
        now = judge(of(change * math.exp(value), at, accepted=accepted), earlier, find_ratio=0.02)
        if now.verdict == "regression" and not accepted:
            regressions, first = regressions + 1, min(first, change - 1)
        if accepted or adds(now):
            earlier.append(now.run)
    return regressions, first


def simulate(jobs: int) -> None:
    """Print what simulated jobs give, by noise."""
    print("| noise | spread | false | false, a level accepted | 0.2 % per run: median found at |")
    print("|---|--:|--:|--:|--:|")
    for noise, cv in itertools.product((*NOISE, *SHARED), (0.0025, 0.01)):
        flat, stepped = (
            sum(simulated(noise, cv, seed, 0.0, step)[0] for seed in range(jobs)) / jobs / RUNS
            for step in (0.0, 0.05)
        )
        drift = statistics.median(simulated(noise, cv, seed, 0.002, 0.0)[1] for seed in range(jobs))
        print(f"| {noise} | {cv:.2%} | {flat:.2%} | {stepped:.2%} | +{drift:.1%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--earlier", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="where runs and history are kept")
    parser.add_argument("--record", nargs=2, metavar=("RUN", "FACTOR"), help=argparse.SUPPRESS)
    parser.add_argument("--simulate", type=int, metavar="JOBS", help="judge simulated jobs")
    args = parser.parse_args()
    if args.simulate:
        simulate(args.simulate)
        return
    if args.record:
        record(args.record[0], float(args.record[1]))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = args.folder or Path(made)
        print("| run | step | change | noise limit | found in 90 % | verdict |")
        print("|---|--:|--:|--:|--:|---|")
        for at, factor in enumerate((*(1.0,) * args.earlier, *JUDGED)):
            run = folder / f"run-{at}"
            mine = [sys.executable, "-m", "benchmarks.history"]
            subprocess.run([*mine, "--record", str(run), str(factor)], check=True)
            adds = ("--add",) if at < args.earlier else ()
            found = verdict(run, folder / "history", *adds)
            if not adds:
                ratios = (found[f"{name}_ratio"] for name in ("change", "limit", "detectable"))
                cells = [f"{r:+.2%}" if isinstance(r, float) else "–" for r in ratios]
                step_ms = f"{float(str(found['step_ns'])) / 1e6:.2f} ms"
                row = (f"×{factor}", step_ms, *cells, found["verdict"])
                print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
