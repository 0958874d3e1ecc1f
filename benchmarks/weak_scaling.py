"""A run carried to more ranks, against training on so many: hosts in miniature, joined by a switch.

    python -m benchmarks.weak_scaling                       # 2 ranks recorded, 4 and 8 predicted
    python -m benchmarks.weak_scaling --rates 50,200 --ranks 2,4,6

Each rank is a process in a network namespace of its own; a bridge joins them, and a token bucket
lets each send at the rate. Training is data parallel over gloo, with much to send and little to
compute, since all ranks share this machine's cores. The run of the fewest ranks is recorded and
carried to the others by `chopper estimate project --ranks`; the others are timed. Needs root, `ip`
and `tc`; the namespaces are removed at the end. Prints the error of each step time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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


def train(ranks: int, rate_bits_per_s: int, record: Path | None) -> float:
    """Median step of rank 0, seconds; recorded where asked for."""
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
    return float(said[0][0].splitlines()[-1])


def rank(record: str) -> None:
    """One rank: a few steps of data-parallel training, their median printed by rank 0."""
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

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        step()
    dist.barrier()
    times: list[float] = []
    with contextlib.ExitStack() as stack:
        profile: Any = stack.enter_context(chopper.profile(record)) if record else None
        for _ in range(STEPS):
            began = time.perf_counter()
            step()
            if profile:
                profile.step()
            times.append(time.perf_counter() - began)
    dist.barrier()
    print(statistics.median(times))
    sys.stdout.flush()
    os._exit(0)


def predicted(run: Path, ranks: list[int], rate_bits_per_s: int, folder: Path) -> dict[int, float]:
    """Seconds of a step on so many ranks, by the estimate."""
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
    return {s["ranks_count"]: s["step_ns"] / 1e9 for s in found["scales"]}


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rates", default="50,200", help="Mbit/s of each rank's port")
    parser.add_argument("--ranks", default="2,4,8")
    args = parser.parse_args()
    counts = sorted(int(n) for n in args.ranks.split(","))
    errors = []
    for mbit in (int(r) for r in args.rates.split(",")):
        with tempfile.TemporaryDirectory() as scratch:
            run = Path(scratch) / "run"
            train(counts[0], mbit * 10**6, run)
            print(f"{mbit} Mbit/s per rank, {WIDTH * WIDTH * LAYERS * 4 / 1e6:.1f} MB of gradients")
            expected = predicted(run, counts, mbit * 10**6, Path(scratch))
            for n in counts:
                measured = train(n, mbit * 10**6, None)
                error = expected[n] / measured - 1
                errors.append(abs(error))
                what = "recorded here" if n == counts[0] else "predicted"
                print(
                    f"  {n} ranks: {measured:7.3f} s, estimate {expected[n]:7.3f} s, {error:+6.1%}  ({what})"
                )
    print(f"largest error {max(errors):.1%}")
    raise SystemExit(1 if max(errors) > LIMIT else 0)


if __name__ == "__main__":
    main()
