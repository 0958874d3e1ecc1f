"""Time collectives over message sizes, in the table that nccl-tests prints, for any backend.

    chopper run collectives --ranks 2
    torchrun --nproc-per-node 8 -m chopper.workloads.collectives --largest 1073741824

Algorithm bandwidth is size over time; bus bandwidth is that times a factor that makes it comparable
with the link, whatever the collective and the number of ranks (nccl-tests, doc/PERFORMANCE.md). The
size is that of the whole array: what all-gather ends with, what reduce-scatter starts from. Send and
receive, each rank to the next, is the link itself.

As in nccl-tests a time is that of many calls behind one another, so many that the clock and the
ranks' different beginnings do not count. Each round times every collective at every size once more, so
that all of them are measured over the same stretch of time, whatever else the machine does in it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import chopper
from chopper.errors import UsageError
from chopper.workloads import options, sweep
from chopper.workloads.machine import BACKEND, Needs, gather_into, scatter_sum, wait
from chopper.workloads.progress import Progress
from chopper.workloads.ranks import joined

WARMUP = 3
LEAST_S = 5e-3
"""Between two readings of the clock."""
MOST_CALLS = 1000
"""Between two readings of the clock."""


def needs(args: argparse.Namespace, ranks: int, device: str) -> Needs:
    """Three arrays of the largest size: sent, received and staged."""
    if ranks == 1:
        raise UsageError("--ranks 1: one rank has nobody to exchange with")
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
    sizes = [*sweep.sizes(args, 4 * ranks)]
    calls_of = Calls(max(sizes), ranks, device)
    factors = bus_factors(ranks)
    for name in list(factors):
        why = lacking(calls_of.call(name, sizes[0]))
        if why is not None:
            del factors[name]
            if rank == 0:
                print(
                    f"{name}: left out, {BACKEND[device.type]} does not have it: {why}", flush=True
                )
    # Tracing costs as much as a small message: one pass is traced, what is measured is not.
    with chopper.profile(args.output, steps=(0, 1)) as prof:
        for name in factors:
            calls_of.call(name, max(sizes))()
        wait(device)
        prof.step()
        cells = {(name, size): calls_of.call(name, size) for name in factors for size in sizes}
        times_s: dict[tuple[str, int], list[float]] = {cell: [] for cell in cells}
        batches = dict.fromkeys(cells, 1)  # the same on all ranks, as the times are
        progress = Progress(WARMUP + args.repeats, "round")
        for repeat in range(WARMUP + args.repeats):
            for cell, call in cells.items():
                time_s = call_time_s(call, batches[cell], device)
                if repeat >= WARMUP:
                    times_s[cell].append(time_s)
                else:
                    # Of the quickest: what was disturbed would make later batches short.
                    fits = min(MOST_CALLS, math.ceil(LEAST_S / time_s))
                    batches[cell] = max(batches[cell], fits)
            prof.step()
            progress.advance()
        for name, factor in factors.items() if rank == 0 else ():
            medians: list[tuple[int, float]] = []
            for size_bytes in sizes:
                found_s = times_s[name, size_bytes]
                time_s = statistics.median(found_s)
                medians.append((size_bytes, time_s))
                keep = {
                    "time_ns": time_s * 1e9,
                    "algorithm_bandwidth_bytes_per_s": size_bytes / time_s,
                    "bus_bandwidth_bytes_per_s": size_bytes / time_s * factor,
                    "best_bus_bandwidth_bytes_per_s": size_bytes / min(found_s) * factor,
                }
                for measure_name, value in keep.items():
                    prof.measure(measure_name, value, collective=name, size_bytes=size_bytes)
            if len(medians) > 1:
                latency_s, bytes_per_s = fit(medians)
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
        "send_receive": 1.0,
    }


class Calls:
    """The collectives, all on the same memory, of which smaller messages are the front."""

    def __init__(self, largest_bytes: int, ranks: int, device: torch.device) -> None:
        self.ranks = ranks
        self.after, self.before = ((dist.get_rank() + step) % ranks for step in (1, -1))
        # Zeros, because the sum of anything else grows with each call, beyond all bounds; and
        # written, so that no page is touched first while it is timed.
        self.sent, self.received = (
            torch.empty(largest_bytes // 4, device=device).zero_() for _ in range(2)
        )
        self.part = torch.empty(largest_bytes // 4 // ranks, device=device).zero_()

    def call(self, name: str, size_bytes: int) -> Callable[[], object]:
        """A call that runs the collective once."""
        sent, received = self.sent[: size_bytes // 4], self.received[: size_bytes // 4]
        part = self.part[: size_bytes // 4 // self.ranks]
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(received),
            "all_gather": lambda: gather_into(received, part),
            "reduce_scatter": lambda: scatter_sum(part, sent),
            "all_to_all": lambda: dist.all_to_all_single(received, sent),
            "broadcast": lambda: dist.broadcast(received, src=0),
            "send_receive": lambda: self._pass_on(received, sent),
        }
        return calls[name]

    def _pass_on(self, received: Tensor, sent: Tensor) -> None:
        pair = [
            dist.P2POp(dist.irecv, received, self.before),
            dist.P2POp(dist.isend, sent, self.after),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()


def lacking(call: Callable[[], object]) -> str | None:
    """What the backend says when it does not have a collective; None when it has."""
    try:
        call()
    except (RuntimeError, NotImplementedError) as exc:
        return str(exc).partition("\n")[0]
    return None


def call_time_s(call: Callable[[], object], batch: int, device: torch.device) -> float:
    """Seconds of one of ``batch`` calls behind one another, of the rank that took longest."""
    # Without it, one rank's lateness would count as the collective's slowness.
    dist.barrier()
    wait(device)
    begin = time.perf_counter()
    for _ in range(batch):
        call()
    wait(device)
    took = torch.tensor((time.perf_counter() - begin) / batch, device=device, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def fit(times: list[tuple[int, float]]) -> tuple[float, float]:
    """Latency α in seconds and bandwidth 1/β in bytes per second of t = α + β·size.

    Least squares of relative errors: else the largest size alone would decide, and the latency
    would be what its noise leaves. Of a line on which one of the two would be below zero, the best
    on which it is zero.
    """
    size = torch.tensor([float(s) for s, _ in times], dtype=torch.float64)
    seconds = torch.tensor([t for _, t in times], dtype=torch.float64)
    rows = torch.stack((1 / seconds, size / seconds), dim=1)
    solved = torch.linalg.lstsq(rows, torch.ones(len(times), 1, dtype=torch.float64)).solution
    latency_s, per_byte_s = (float(v) for v in solved.flatten())
    only_latency_s, only_per_byte_s = (float(v) for v in rows.sum(0) / rows.square().sum(0))
    if latency_s < 0:
        return 0.0, 1 / only_per_byte_s
    if per_byte_s <= 0:
        return only_latency_s, math.inf
    return latency_s, 1 / per_byte_s


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
