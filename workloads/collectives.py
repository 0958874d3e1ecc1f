"""Time collectives over message sizes, in the table that nccl-tests prints, for any backend.

    chopper run collectives --ranks 2
    torchrun --nproc-per-node 8 -m chopper.workloads.collectives --largest 1073741824

Algorithm bandwidth is size over time; bus bandwidth is that times a factor that makes it comparable
with the link, whatever the collective and the number of ranks (nccl-tests, doc/PERFORMANCE.md). The
size is that of the whole array: what all-gather ends with, what reduce-scatter starts from.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import chopper
from chopper.workloads import options, sweep
from chopper.workloads.machine import BACKEND, Needs, gather_into, scatter_sum, wait
from chopper.workloads.progress import Progress
from chopper.workloads.ranks import joined

WARMUP = 3


def needs(args: argparse.Namespace, ranks: int, device: str) -> Needs:
    """Three arrays of the largest size: sent, received and staged."""
    if ranks == 1:
        raise ValueError("--ranks 1: one rank has nobody to exchange with")
    return sweep.needs(args, ranks, device)


def main() -> None:
    """Join the other ranks, measure, leave."""
    args = options.parse(
        options.COLLECTIVES, prog="collectives", description="Time collectives over sizes."
    )
    torch.manual_seed(args.seed)
    with joined(args.device, prog="collectives") as device:
        measure(args, device)


def measure(args: argparse.Namespace, device: torch.device) -> None:
    """Time each collective at each size; rank 0 keeps the medians and the fit through them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    factors = bus_factors(ranks)
    for name in list(factors):
        why = lacking(name, ranks, device)
        if why is not None:
            del factors[name]
            if rank == 0:
                print(
                    f"{name}: left out, {BACKEND[device.type]} does not have it: {why}", flush=True
                )
    # Tracing costs as much as a small message: one pass is traced, what is measured is not.
    with chopper.profile(args.output, steps=(0, 1)) as prof:
        largest = max(sweep.sizes(args, 4 * ranks))
        for name in factors:
            call = collective(name, largest, ranks, device)
            for _ in range(WARMUP):
                call()
        wait(device)
        prof.step()
        progress = Progress(
            len(factors) * len([*sweep.sizes(args, 4 * ranks)]), "collective and size"
        )
        for name, factor in factors.items():
            times: list[tuple[int, float]] = []
            for size_bytes in sweep.sizes(args, 4 * ranks):
                call = collective(name, size_bytes, ranks, device)
                call_s = times_s(call, args.repeats, device)
                time_s = statistics.median(call_s)
                times.append((size_bytes, time_s))
                prof.step()
                progress.advance()
                if rank:
                    continue
                labels: dict[str, str | int | float] = {
                    "collective": name,
                    "size_bytes": size_bytes,
                }
                prof.measure("time_ns", time_s * 1e9, **labels)
                prof.measure("algorithm_bandwidth_bytes_per_s", size_bytes / time_s, **labels)
                prof.measure("bus_bandwidth_bytes_per_s", size_bytes / time_s * factor, **labels)
                prof.measure(
                    "best_bus_bandwidth_bytes_per_s", size_bytes / min(call_s) * factor, **labels
                )
            if rank == 0 and len(times) > 1:
                latency_s, bytes_per_s = fit(times)
                prof.measure("latency_ns", latency_s * 1e9, collective=name)
                prof.measure(
                    "fitted_bus_bandwidth_bytes_per_s", bytes_per_s * factor, collective=name
                )


def bus_factors(ranks: int) -> dict[str, float]:
    """Bus bandwidth over algorithm bandwidth, per collective (nccl-tests)."""
    share = (ranks - 1) / ranks
    return {
        "all_reduce": 2 * share,
        "all_gather": share,
        "reduce_scatter": share,
        "all_to_all": share,
        "broadcast": 1.0,
    }


def collective(
    name: str, size_bytes: int, ranks: int, device: torch.device
) -> Callable[[], object]:
    """A call that runs the collective once."""
    whole = torch.randn(size_bytes // 4, device=device)
    part = torch.randn(size_bytes // 4 // ranks, device=device)
    other = torch.empty_like(whole)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather_into(whole, part),
        "reduce_scatter": lambda: scatter_sum(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
    }
    return calls[name]


def lacking(name: str, ranks: int, device: torch.device) -> str | None:
    """What the backend says when it does not have a collective; None when it has."""
    try:
        collective(name, 4 * ranks, ranks, device)()
    except (RuntimeError, NotImplementedError) as exc:
        return str(exc).partition("\n")[0]
    return None


def times_s(call: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Seconds that the slowest rank took for each repetition."""
    times = []
    for repeat in range(WARMUP + repeats):
        # Without it, one rank's lateness would count as the collective's slowness.
        dist.barrier()
        wait(device)
        begin = time.perf_counter()
        call()
        wait(device)
        if repeat >= WARMUP:
            times.append(time.perf_counter() - begin)
    slowest = torch.tensor(times, device=device, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [float(s) for s in slowest.tolist()]


def fit(times: list[tuple[int, float]]) -> tuple[float, float]:
    """Latency α in seconds and bandwidth 1/β in bytes per second of t = α + β·size.

    Least squares of relative errors: else the largest size alone would decide, and the latency
    would be what its noise leaves. Neither is let below zero.
    """
    size = torch.tensor([float(s) for s, _ in times], dtype=torch.float64)
    seconds = torch.tensor([t for _, t in times], dtype=torch.float64)
    rows = torch.stack((1 / seconds, size / seconds), dim=1)
    solved = torch.linalg.lstsq(rows, torch.ones(len(times), 1, dtype=torch.float64)).solution
    latency_s, per_byte_s = (float(v) for v in solved.flatten())
    if latency_s < 0:
        latency_s, per_byte_s = 0.0, float((seconds / size).mean())
    if per_byte_s <= 0:
        latency_s, per_byte_s = float(seconds.mean()), 0.0
    return latency_s, 1 / per_byte_s if per_byte_s else float("inf")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
