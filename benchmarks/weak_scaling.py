"""A run carried to more ranks, against training on so many: hosts in miniature, joined by a switch.

    python -m benchmarks.weak_scaling                       # 2 ranks recorded, 4 and 8 predicted
    python -m benchmarks.weak_scaling --rates 50,200 --ranks 2,4,6
    python -m benchmarks.weak_scaling --rates 400 --slow 0.2              # rank 0 is always late
    python -m benchmarks.weak_scaling --rates 400 --slow 0.2 --chance 0.1 # and all are, by chance

Each rank is a process in a network namespace of its own; a bridge joins them, and a token bucket
lets each send at the rate. Training is data parallel over gloo, with much to send and little to
compute, since all ranks share this machine's cores. With ``--slow`` the first rank sleeps for so
long in each step, with ``--chance`` each rank for the size of a normal draw of so much. The run of
the fewest ranks is recorded and carried to the others by `chopper estimate project --ranks`; the
others are timed. Needs root, `ip` and `tc`; the namespaces are removed at the end. Prints the error
of each step time.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIMIT = 0.10
WIDTH, LAYERS, STEPS = 512, 6, 8
_SLEEPS = "CHOPPER_BENCHMARK_SLEEPS"
"""For how long the first rank sleeps in each step, and every rank by chance, in seconds."""


def ip(*arguments: str, inside: str | None = None, tool: str = "ip") -> None:
    """Run ip or tc, in a namespace if given."""
    where = ["ip", "netns", "exec", inside] if inside else []
    subprocess.run([*where, tool, *arguments], check=True)


@contextlib.contextmanager
def switch(ranks: int, rate_bits_per_s: int) -> Iterator[list[str]]:
    """Namespaces joined by a bridge, each sending at the rate; gone afterwards."""
    prefix = f"chopper-{os.getpid()}"
    names = [f"{prefix}-{rank}" for rank in range(ranks)]
    hub = f"{prefix}-hub"
    made: list[str] = []
    try:
        for name in (hub, *names):
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "br0", "type", "bridge", inside=hub)
        ip("link", "set", "br0", "up", inside=hub)
        for rank, name in enumerate(names):
            port = f"port{rank}"
            ip(
                *("link", "add", port, "netns", hub, "type", "veth"),
                *("peer", "name", "link0", "netns", name),
            )
            ip("link", "set", port, "master", "br0", "up", inside=hub)
            ip("address", "add", f"192.0.2.{rank + 1}/24", "dev", "link0", inside=name)
            for device in ("link0", "lo"):
                ip("link", "set", device, "up", inside=name)
            bucket = f"rate {rate_bits_per_s}bit burst 65536 latency 1000ms"
            ip(
                *("qdisc", "replace", "dev", "link0", "root", "tbf"),
                *bucket.split(),
                inside=name,
                tool="tc",
            )
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def train(
    ranks: int, rate_bits_per_s: int, sleeps_s: tuple[float, float], steps: int, record: Path | None
) -> tuple[float, float]:
    """Mean step of rank 0 and the standard error of that, seconds; recorded where asked for."""
    with switch(ranks, rate_bits_per_s) as names:
        programs = [
            subprocess.Popen(
                [
                    *("ip", "netns", "exec", name),
                    *(sys.executable, "-m", "benchmarks.weak_scaling", "--rank"),
                    *(str(record) if record else "",),
                ],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": "192.0.2.1",
                    "MASTER_PORT": "29500",
                    "GLOO_SOCKET_IFNAME": "link0",
                    "TORCH_CPP_LOG_LEVEL": "ERROR",
                    "OMP_NUM_THREADS": "1",
                    _SLEEPS: " ".join(map(str, (sleeps_s[0] * (rank == 0), sleeps_s[1], steps))),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(names)
        ]
        said = [program.communicate() for program in programs]
    for program, (_, errors) in zip(programs, said, strict=True):
        if program.returncode:
            raise SystemExit(errors[-2000:])
    times = [float(t) for t in said[0][0].splitlines()[-1].split()]
    return statistics.fmean(times), statistics.stdev(times) / len(times) ** 0.5


def rank(record: str) -> None:
    """One rank: a few steps of data-parallel training, their times printed."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import chopper

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = DistributedDataParallel(module, bucket_cap_mb=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(4, WIDTH)
    always, chance, steps = (float(v) for v in os.environ[_SLEEPS].split())
    draws = random.Random(dist.get_rank())

    def step() -> None:
        time.sleep(always + chance * abs(draws.gauss()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        step()
    dist.barrier()
    times: list[float] = []
    with contextlib.ExitStack() as stack:
        profile: Any = stack.enter_context(chopper.profile(record)) if record else None
        for _ in range(int(steps)):
            began = time.perf_counter()
            step()
            if profile:
                profile.step()
            times.append(time.perf_counter() - began)
    dist.barrier()
    print(*times)
    sys.stdout.flush()
    os._exit(0)


def predicted(
    run: Path, ranks: list[int], rate_bits_per_s: int, folder: Path
) -> dict[int, dict[str, Any]]:
    """The estimate of a step on so many ranks."""
    file = folder / "link.json"
    described = {
        "ranks_per_node_count": 1,
        "network_link_bytes_per_s": rate_bits_per_s / 8,
        "network_latency_s": 1e-4,
        "base_latency_s": 1e-4,
        "source": "token bucket",
    }
    file.write_text(json.dumps(described))
    wanted = [part for n in ranks for part in ("--ranks", str(n))]
    command = [sys.executable, "-m", "chopper", "estimate", "project", str(run)]
    done = subprocess.run(
        [*command, *wanted, "--topology", str(file), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout)
    print(f"  knee: {found['knee_ranks_count']} ranks, {found['knee_cause']}")
    waited, always = found["recorded_waiting_ns"], found["recorded_waiting_always_ns"]
    print(f"  recorded waiting {waited / 1e6:.1f} ms, of it always {(always or 0) / 1e6:.1f} ms")
    return {s["ranks_count"]: s for s in found["scales"]}


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rates", default="50,200", help="Mbit/s of each rank's port")
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds of the first rank")
    parser.add_argument("--chance", type=float, default=0.0, help="seconds of every rank")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    counts = sorted(int(n) for n in args.ranks.split(","))
    sleeps = args.slow, args.chance
    errors = []
    for mbit in (int(r) for r in args.rates.split(",")):
        with tempfile.TemporaryDirectory() as scratch:
            run = Path(scratch) / "run"
            train(counts[0], mbit * 10**6, sleeps, args.steps, run)
            print(f"{mbit} Mbit/s per rank, {WIDTH * WIDTH * LAYERS * 4 / 1e6:.1f} MB of gradients")
            expected = predicted(run, counts, mbit * 10**6, Path(scratch))
            for n in counts:
                measured, error_s = train(n, mbit * 10**6, sleeps, args.steps, None)
                step_s = expected[n]["step_ns"] / 1e9
                others_s = expected[n]["others_differ_step_ns"] / 1e9
                error = step_s / measured - 1
                errors.append(abs(error))
                what = "recorded here" if n == counts[0] else "predicted"
                print(
                    f"  {n} ranks: {measured:7.3f} ± {error_s:.3f} s, estimate {step_s:7.3f} s, "
                    f"{error:+6.1%}  ({what}); others differ {others_s:.3f} s, "
                    f"{others_s / measured - 1:+.1%}",
                    flush=True,
                )
    print(f"largest error {max(errors):.1%}")
    raise SystemExit(1 if max(errors) > LIMIT else 0)


if __name__ == "__main__":
    main()
