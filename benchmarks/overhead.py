"""What recording costs a training loop: nothing, telemetry, torch.profiler, chopper's trace.

    python benchmarks/overhead.py [--rounds 12] [--steps 8] [--json]

Two ranks train the debug Llama under FSDP2. Each round runs the four kinds one after the other, in
an order that changes from round to round, in the same processes, so that what the machine does
beside it falls on all of them. The figures are medians over rounds of ratios within a round:

telemetry  steps under `chopper.profile(trace=False)` over steps without a profiler
peer       steps under torch.profiler with the same settings over steps without a profiler
chopper    steps under `chopper.profile` that are traced over steps under torch.profiler

Starting, stopping and writing traces lies between steps, and is in none of the figures. Each figure
stands in wall time, which is what was set out for, and in CPU time of the rank, which other load on
the machine disturbs less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

KINDS = ("bare", "telemetry", "peer", "chopper")
BARS = {"telemetry": 1.02, "chopper": 1.03}
"""What was set out to be reached, in wall time."""
Durations = list[tuple[float, float]]
"""Of a round's steps: wall and CPU time in s."""


def worker(rounds: int, steps: int, output: str) -> None:
    """One rank: write the steps' durations, by kind and round."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import chopper
    from chopper.collectors.torch_trace import _experimental_config
    from chopper.workloads.llama import SIZES, Llama

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    config = SIZES["debug"]
    model = Llama(config)
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(config.vocabulary_count, (2, 128))

    def one() -> None:
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    def timed(after: Callable[[], None]) -> Durations:
        # Two steps to settle, which count for none.
        durations = []
        for _ in range(steps + 2):
            begun, begun_cpu = time.perf_counter(), time.process_time()
            one()
            after()
            durations.append((time.perf_counter() - begun, time.process_time() - begun_cpu))
        return durations[2:]

    def bare() -> Durations:
        return timed(lambda: None)

    def telemetry(at: Path) -> Durations:
        with chopper.profile(at, trace=False) as prof:
            return timed(prof.step)

    def traced(at: Path) -> Durations:
        with chopper.profile(at, collect=["torch_trace"], steps=(0, steps + 9)) as prof:
            return timed(prof.step)

    def peer(_: Path) -> Durations:
        with torch.profiler.profile(
            record_shapes=True,
            experimental_config=_experimental_config(trace_only=True, all_threads=False)[0],
            schedule=torch.profiler.schedule(wait=0, warmup=0, active=steps + 9, repeat=1),
        ) as prof:
            durations = timed(prof.step)
        # As chopper does: Kineto's results must not outlive the next trace's start.
        prof.profiler = None
        return durations

    for _ in range(3):
        one()
    kinds = {"bare": lambda _: bare(), "telemetry": telemetry, "peer": peer, "chopper": traced}
    results: dict[str, list[Durations]] = {kind: [] for kind in KINDS}
    order = random.Random(0)
    for count in range(rounds):
        shuffled = order.sample(KINDS, len(KINDS))
        for kind in shuffled:
            dist.barrier()
            results[kind].append(kinds[kind](Path(output) / f"{kind}-{count}"))
    if rank == 0:
        (Path(output) / "result.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def measure(rounds: int, steps: int) -> dict[str, list[Durations]]:
    """Run the two ranks and return rank 0's durations in s, by kind and round."""
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", __file__, "--worker", output]
        command += ["--rounds", str(rounds), "--steps", str(steps)]
        environment = os.environ | {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
        environment.setdefault("OMP_NUM_THREADS", threads)
        with contextlib.suppress(KeyError):
            del environment["CHOPPER_OUTPUT"]
        subprocess.run(command, check=True, env=environment)
        found: dict[str, list[Durations]] = json.loads((Path(output) / "result.json").read_text())
        return found


def ratios(
    results: dict[str, list[Durations]], kind: str, to: str, clock: int
) -> tuple[float, float, float]:
    """Quartiles over rounds of the ratio of median steps."""
    values = [
        statistics.median(step[clock] for step in one)
        / statistics.median(step[clock] for step in other)
        for one, other in zip(results[kind], results[to], strict=True)
    ]
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.rounds, options.steps, options.worker)
        return
    results = measure(options.rounds, options.steps)
    step_ms = statistics.median(step[0] for steps in results["bare"] for step in steps) * 1e3
    rows = [
        (kind, to, clock, *ratios(results, kind, to, index))
        for kind, to in (("telemetry", "bare"), ("peer", "bare"), ("chopper", "peer"))
        for index, clock in enumerate(("wall", "cpu"))
    ]
    if options.json:
        names = ("kind", "over", "clock", "low_ratio", "ratio", "high_ratio")
        found = [dict(zip(names, row, strict=True)) for row in rows]
        print(json.dumps({"bare_step_ms": step_ms, "rows": found}, indent=2))
        return
    print(f"fsdp2 debug, 2 ranks, {options.rounds} rounds of {options.steps} steps")
    print(f"a step without a profiler: {step_ms:.1f} ms")
    for kind, to, clock, low, middle, high in rows:
        bar = f"   (to reach: {BARS[kind] - 1:+.0%})" if kind in BARS and clock == "wall" else ""
        print(
            f"{kind:>10} over {to:<5} {clock:<5} {middle - 1:+7.2%}"
            f"   quartiles {low - 1:+.2%} {high - 1:+.2%}{bar}"
        )


if __name__ == "__main__":
    main()
