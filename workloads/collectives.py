"""Time collectives over message sizes, in the table that nccl-tests prints, for any backend.

    chopper bench collectives --ranks 2
    torchrun --nproc-per-node 8 -m chopper.workloads.collectives --largest 1073741824

Algorithm bandwidth is size over time; bus bandwidth is that times a factor that makes it comparable
with the link, whatever the collective and the number of ranks (nccl-tests, doc/PERFORMANCE.md). The
size is that of the whole array: what all-gather ends with, what reduce-scatter starts from. Send
and receive, each rank to the next, is the link itself.

As in nccl-tests a time is that of many calls behind one another, so many that the clock and the
ranks' different beginnings do not count. Each round times every collective at every size once more,
so that all are measured over the same stretch of time, whatever else the machine does in it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

import chopper
from chopper.errors import UsageError
from chopper.experiments.declarations import (
    DEVICE,
    SEED,
    Needs,
    Option,
    Workload,
    as_program,
    positive,
)
from chopper.experiments.results import Experiment, Headline, quotient, ratio
from chopper.workloads import membw
from chopper.workloads.membw import largest, mib, sizes

if TYPE_CHECKING:
    import torch

    from chopper.hardware.measure import Call

WORKLOAD = Workload(
    name="collectives",
    chosen="so that the bandwidth, not the latency, decides the largest messages",
    summary="all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, send and receive over "
    "sizes: time, algorithm and bus bandwidth as nccl-tests defines them, and the α-β fit",
    options=(
        Option("smallest", "bytes of the smallest message", 1024, positive),
        Option("largest", "bytes of the largest message", 16 << 20, positive),
        Option("factor", "factor from one size to the next", 4, positive),
        Option("repeats", "timed rounds through all sizes", 30, positive),
        SEED,
        DEVICE,
    ),
    measures=True,
    repeats=3,
    seconds=60,
    position=7,
)


def needs(args: argparse.Namespace, ranks: int, device: str) -> Needs:
    """Three arrays of the largest size: sent, received and staged."""
    if ranks == 1:
        raise UsageError("--ranks 1: one rank has no peer to exchange with")
    return membw.needs(args, ranks, device)


def main() -> None:
    """Join the other ranks, measure, leave."""
    import torch

    from chopper.workloads.ranks import joined

    args = WORKLOAD.parse()
    torch.manual_seed(args.seed)
    with joined(args.device, prog="collectives") as device:
        measure(args, device)


def measure(args: argparse.Namespace, device: torch.device) -> None:
    """Time each collective at each size; rank 0 keeps the medians and the fit through them."""
    import torch.distributed as dist

    from chopper.hardware.measure import BACKEND, Bench, Collectives, bus_factors, wait
    from chopper.workloads.ranks import Progress

    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes_bytes = [*sizes(args, 4 * ranks)]
    collectives = Collectives(max(sizes_bytes), ranks, device)
    factors = bus_factors(ranks)
    for name in list(factors):
        reason = _lacking(collectives.call(name, sizes_bytes[0]))
        if reason is not None:
            del factors[name]
            if rank == 0:
                backend = BACKEND[device.type]
                print(f"{name}: left out, {backend} does not have it: {reason}", flush=True)
    # Tracing costs as much as a small message: one pass is traced, what is measured is not.
    with chopper.profile(args.output, steps=(0, 1)) as prof:
        for name in factors:
            collectives.call(name, max(sizes_bytes))()
        wait(device)
        prof.step()
        bench: Bench[tuple[str, int]] = Bench(device, together=True)
        for name in factors:
            for size_bytes in sizes_bytes:
                bench.add((name, size_bytes), collectives.call(name, size_bytes))
        progress = Progress(args.repeats, "round")
        times_s = bench.run(args.repeats, after_round=(prof.step, progress.advance))
        for name, factor in factors.items() if rank == 0 else ():
            _keep(prof, name, factor, {size: times_s[name, size] for size in sizes_bytes})


def _keep(prof: chopper.Profile, name: str, factor: float, times_s: dict[int, list[float]]) -> None:
    medians_s = [
        (size_bytes, statistics.median(rounds_s)) for size_bytes, rounds_s in times_s.items()
    ]
    for size_bytes, time_s in medians_s:
        best_s = min(times_s[size_bytes])
        for measure_name, value in (
            ("time_ns", time_s * 1e9),
            ("algorithm_bandwidth_bytes_per_s", size_bytes / time_s),
            ("bus_bandwidth_bytes_per_s", size_bytes / time_s * factor),
            ("best_bus_bandwidth_bytes_per_s", size_bytes / best_s * factor),
        ):
            prof.measure(measure_name, value, collective=name, size_bytes=size_bytes)
    if len(medians_s) > 1:
        latency_s, bytes_per_s = fit(medians_s)
        prof.measure("latency_ns", latency_s * 1e9, collective=name)
        prof.measure("fitted_bus_bandwidth_bytes_per_s", bytes_per_s * factor, collective=name)


def _lacking(call: Call) -> str | None:
    """Return what the backend says when it does not have a collective; None when it has."""
    try:
        call()
    except (RuntimeError, NotImplementedError) as exc:
        return str(exc).partition("\n")[0]
    return None


def fit(times: list[tuple[int, float]]) -> tuple[float, float]:
    """Latency α in seconds and bandwidth 1/β in bytes per second of t = α + β·size.

    Least squares of relative errors, or the largest size alone would decide; where α or β would be
    below zero, the best line on which it is zero.
    """
    import torch

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


def headlines(experiment: Experiment) -> Iterator[Headline]:
    """Hold the latency of an all-reduce and the largest messages against the laws of rings."""
    where = f"{experiment.plan.ranks} ranks on {experiment.plan.device}"
    yield from _latency(experiment, where)
    size = largest(experiment, "bus_bandwidth_bytes_per_s", "size_bytes")
    all_reduce = experiment.find(
        "bus_bandwidth_bytes_per_s", collective="all_reduce", size_bytes=size or 0
    )
    if size is None or all_reduce is None:
        return
    rates = {
        str(dict(row.labels)["collective"]): row
        for row in experiment.rows
        if row.measure == "bus_bandwidth_bytes_per_s" and dict(row.labels)["size_bytes"] == size
    }
    link = rates.pop("send_receive", None)
    ratios = {name: quotient(row, link) for name, row in rates.items() if name != "all_reduce"}
    named = ", ".join(f"{name} {over.value:.2f}×" for name, over in ratios.items() if over)
    yield Headline.of(
        quotient(all_reduce, link),
        system="Collectives",
        claim=f"bus bandwidth of all-reduce over that of send and receive, {mib(size)}",
        primary="1: bus bandwidth is that of the link for every collective (nccl-tests)",
        stated=1.0,
        why="send and receive were not measured",
        configuration="; ".join(part for part in (where, named) if part),
    )
    times = [
        experiment.find("time_ns", collective=name, size_bytes=size)
        for name in ("all_reduce", "reduce_scatter", "all_gather")
    ]
    if None not in times:
        one, *two = (row.values for row in times if row is not None)
        yield Headline.of(
            ratio(one, [sum(values) for values in zip(*two, strict=True)]),
            system="Collectives",
            claim=f"all-reduce's time over reduce-scatter's and all-gather's, {mib(size)}",
            primary="1: a ring all-reduce is a reduce-scatter, then an all-gather",
            stated=1.0,
            configuration=f"{where}; below 1 where reduce-scatter is made of an all-reduce, as "
            "gloo's is",
        )
    asymptote = experiment.find("fitted_bus_bandwidth_bytes_per_s", collective="all_reduce")
    reached = quotient(all_reduce, asymptote)
    if reached is not None:
        yield Headline.of(
            reached,
            system="Collectives",
            claim=f"bus bandwidth of all-reduce, {mib(size)}, over its fit's",
            configuration=f"{where}; well below 1 where messages outgrow a cache or a buffer, "
            "which α + β·size does not model",
        )


_NCCL_BASE_US, _NCCL_STEPS_US = 8.4, (3.4, 9.6)
"""NCCL's Simple ring: base, and a step over NVLink and over a network."""


def _latency(experiment: Experiment, where: str) -> Iterator[Headline]:
    ranks = experiment.plan.ranks
    latency = experiment.find("latency_ns", collective="all_reduce")
    if latency is None:
        return
    inside_us, between_nodes_us = (
        _NCCL_BASE_US + 2 * (ranks - 1) * step_us for step_us in _NCCL_STEPS_US
    )
    rate = experiment.find("fitted_bus_bandwidth_bytes_per_s", collective="all_reduce")
    # Of NCCL, which does not send between CPUs.
    nccl = f"NCCL's ring takes {inside_us:.1f} µs over NVLink"
    nccl += f", {between_nodes_us:.1f} µs over a network"
    fitted = f"; 1/β is {rate.estimate.value / 1e9:.3g} GB/s of bus bandwidth" if rate else ""
    yield Headline.of(
        latency.estimate,
        scale=1e-3,
        system="Collectives",
        claim=f"α of all-reduce between {ranks} ranks",
        least=0.0,
        bound="no message takes less than no time",
        primary=None if experiment.plan.device == "cpu" else nccl,
        unit="µs",
        configuration=f"t = α + β·size through all sizes; {where}{fitted}",
    )


if __name__ == "__main__":
    as_program(main)
