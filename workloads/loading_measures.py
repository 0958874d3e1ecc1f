"""Measures of loading: rates, waits and memory while ranks train, and its parts alone."""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist

import chopper
from chopper.workloads import disaggregated as actors
from chopper.workloads.batch import Batch, batch_of
from chopper.workloads.decoder import Decoder, cost_of, loss_of
from chopper.workloads.loading import LONGER, row_width, setup_of
from chopper.workloads.planning import METHODS, Draw, Planner, balance, imbalance, loads
from chopper.workloads.sources import VOCABULARY, OpenSources

_WARMUP_BATCHES = 3

ACTORS = ("SourceLoader", "PlannerActor", "DataConstructor")


@dataclass
class Window:
    """One rank's view of a stretch of the measured steps."""

    elapsed_s: float
    own_cpu_s: float
    """Time of a core that this rank took, with what it started."""
    busy_cpu_s: float
    """That all programs of this machine took."""
    loaded: int
    """Samples that were loaded, of this rank's or, in the first one's window, of all."""
    wait_s: float = 0.0
    compute_s: list[float] = field(default_factory=list)
    tokens: int = 0
    cells: int = 0

    @classmethod
    def now(cls, loaded: int) -> Window:
        """Read the clocks, now that so many samples were loaded; two readings make a stretch."""
        here = psutil.Process()
        own_s = 0.0
        for process in (here, *here.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                own_s += sum(process.cpu_times()[:2])
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        # What guests take is counted as the user's, too.
        guest_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        return cls(time.perf_counter(), own_s, sum(times) - idle_s - guest_s, loaded)

    def end(self, now: Window) -> None:
        """Turn what the clocks said at the beginning into what passed."""
        self.elapsed_s = now.elapsed_s - self.elapsed_s
        self.own_cpu_s = now.own_cpu_s - self.own_cpu_s
        self.busy_cpu_s = now.busy_cpu_s - self.busy_cpu_s
        self.loaded = now.loaded - self.loaded

    def add(self, batch: Batch, waited_s: float, compute_s: float) -> None:
        """A step was trained on."""
        self.wait_s += waited_s
        self.compute_s.append(compute_s)
        self.tokens += sum(map(sum, batch.documents))
        self.cells += batch.tokens.size


def rates(
    windows: Sequence[Window], batch: int, own_cpu_s: float, *, ahead: bool
) -> dict[str, float]:
    """Calculate the rates of a stretch from the windows of all data-parallel ranks.

    ``own_cpu_s``: time of cores that the run took.

    Loaded counts, not trained on: a DataLoader hands batches out in order, and how many of those
    that its workers read a short stretch ends behind is luck. With ``ahead`` it counts up to what
    trainers that never wait would have taken, else up to what they took.
    """
    elapsed_s = max(w.elapsed_s for w in windows)
    compute_s = np.array([w.compute_s for w in windows])
    ranks, steps = compute_s.shape
    trained = steps * ranks * batch
    most = trained
    if ahead:
        busy = 1 - max(w.wait_s / w.elapsed_s for w in windows)
        most = trained / busy if busy > 0 else math.inf
    samples = max(0.0, min(most, sum(w.loaded for w in windows)))
    others_s = windows[0].busy_cpu_s - own_cpu_s
    tokens, cells = sum(w.tokens for w in windows), sum(w.cells for w in windows)
    return {
        "samples_per_s": samples / elapsed_s,
        "tokens_per_s": samples / trained * tokens / elapsed_s,
        "data_wait_ratio": statistics.fmean(w.wait_s / w.elapsed_s for w in windows),
        "compute_imbalance_ratio": float(np.mean(compute_s.max(0) / compute_s.mean(0))),
        "slowest_rank_ns": float(compute_s.max(0).mean()) * 1e9,
        "padding_ratio": 1 - tokens / cells,
        # Clock ticks of many processes: a little less than nothing is nothing.
        "other_programs_ratio": max(0.0, others_s / elapsed_s / (psutil.cpu_count() or 1)),
    }


def role_of(process: psutil.Process) -> str:
    """Name the kind of a process that loads, in a word or two."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return "gone"
    if words and words[0].startswith("ray::"):
        name = words[0].removeprefix("ray::").split(".")[0].split(":")[0]
        return name if name in ACTORS else "Ray itself"
    return "Ray itself" if any("/ray/" in word for word in words) else "workers"


def memory_bytes(pids: Sequence[int]) -> int:
    """Proportional set size of processes, summed; 0 of one that is gone (Linux only)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += next(int(x.split()[1]) for x in text.splitlines() if x.startswith("Pss:"))
    return total * 1024


def latency_of_a_batch(
    args: argparse.Namespace, draw: Draw, latency_ms: int, prof: chopper.Profile
) -> None:
    """Measure what disaggregation costs: the same batches by actors and in this process."""
    if dist.get_rank() == 0:
        setup = setup_of(args, draw, f"probe {latency_ms}", [(actors.this_node(), [0])])
        setup = replace(setup, prefetch=1, tensor=1, checkpoint=None)
        # While the first are read, actors are still opening sources and starting threads.
        probes = _WARMUP_BATCHES + min(20, max(4, 600 // max(1, latency_ms)))
        in_process_s = list(in_this_process(args, draw, range(args.first, args.first + probes)))
        started = actors.start_actors(setup)
        through_actors_s = []
        asked_s = time.perf_counter()
        built_by = actors.constructor(setup, 0)
        for _ in actors.batches(built_by, rank=0, first=args.first, steps=probes, prefetch=0):
            through_actors_s.append(time.perf_counter() - asked_s)
            asked_s = time.perf_counter()
        actors.stop_actors(started)
        for reader, batches_s in (("this process", in_process_s), ("actors", through_actors_s)):
            for repetition, batch_s in enumerate(batches_s[_WARMUP_BATCHES:]):
                labels = {"latency_ms": latency_ms, "repetition": repetition}
                prof.measure("batch_latency_ns", batch_s * 1e9, reader=reader, **labels)
    dist.barrier()


def in_this_process(args: argparse.Namespace, draw: Draw, steps: range) -> Iterator[float]:
    """Yield the seconds that reading all samples of a step at once and packing them takes."""
    planner, sources = Planner(draw), OpenSources(draw.sources)
    with ThreadPoolExecutor(draw.batch * draw.ranks) as pool:
        for step in steps:
            began = time.perf_counter()
            plan = planner.plan(step)
            samples = plan.of(0)
            read = sources.read_all(samples, pool)
            batch_of(samples, [tokens for tokens, _, _ in read], width=row_width(args))
            yield time.perf_counter() - began


def balancing_alone(
    args: argparse.Namespace,
    draw: Draw,
    device: torch.device,
    prof: chopper.Profile,
    steps: int = 6,
) -> None:
    """Measure the slowest of many ranks per step, by how samples were given to ranks.

    Each document's forward and backward pass really runs, by itself, and a virtual rank takes as
    long as its documents together. The real ranks take turns in the steps.
    """
    rank, real_ranks = dist.get_rank(), dist.get_world_size()
    clock = time.thread_time if device.type == "cpu" else synchronized
    width, longest = 2 * args.width, LONGER * args.longest
    model = Decoder(width, longest, VOCABULARY).to(device)
    cost = cost_of(width, VOCABULARY)
    ranks_of = (2, 4, 8)
    drawn = Planner(replace(draw, ranks=max(ranks_of), method="random"))

    def seconds(length: int) -> float:
        batch = batch_of([(0, 0)], [np.ones(length, dtype=np.uint16)], width=length)
        began = clock()
        loss_of(model, batch, 1, device).backward()
        return clock() - began

    for length in (8, longest // 4, longest):
        seconds(length)
    mine = range(rank, steps, real_ranks)
    took = {
        step: [seconds(n) for n in (LONGER * drawn.plan(step).length).tolist()] for step in mine
    }
    gathered: list[dict[int, list[float]]] = [{} for _ in range(real_ranks)]
    dist.all_gather_object(gathered, took)
    if rank:
        return
    for step in range(steps):
        lengths = LONGER * drawn.plan(step).length
        took_s = np.array(gathered[step % real_ranks][step])
        for ranks in ranks_of:
            first = slice(args.batch * ranks)
            costs = cost(lengths[first])
            for method in METHODS:
                ranks_of_samples = balance(costs, ranks, method)
                labels: dict[str, str | int] = {"method": method, "virtual_ranks": ranks}
                slowest_s = loads(took_s[first], ranks_of_samples, ranks).max()
                as_drawn_s = loads(took_s[first], balance(costs, ranks, "random"), ranks).max()
                for name, value in (
                    ("slowest_virtual_rank_ns", slowest_s * 1e9),
                    ("as_drawn_over_this_ratio", as_drawn_s / slowest_s),
                    ("virtual_imbalance_ratio", imbalance(costs, ranks_of_samples, ranks)),
                    (
                        "virtual_time_imbalance_ratio",
                        imbalance(took_s[first], ranks_of_samples, ranks),
                    ),
                ):
                    prof.measure(name, float(value), **labels, repetition=step)


def synchronized() -> float:
    """Wait for the GPU, and return the time in s."""
    torch.cuda.synchronize()
    return time.perf_counter()
