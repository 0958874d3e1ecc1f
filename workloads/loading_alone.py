"""Parts of loading measured alone: what asking actors costs, and what balancing gains."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

import chopper
from chopper.workloads import disaggregated as actors
from chopper.workloads.batch import packed
from chopper.workloads.decoder import Decoder, cost_of, loss_of
from chopper.workloads.loading import LONGER, plans, setup_of, specs
from chopper.workloads.mixture import READ_TIMEOUT_S, VOCABULARY, Mixture, SourceSpec, planner
from chopper.workloads.planning import METHODS, balance, imbalance, loads, pack

WARMING = 3
"""Batches that are asked for one by one before those that are timed."""


def latency_of_a_batch(args: argparse.Namespace, latency_ms: int, prof: chopper.Profile) -> None:
    """Time from asking for a step to having it, nothing loaded ahead: in this process and by
    actors, the same samples. The difference is what disaggregation costs by itself.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        sources = specs(args, latency_ms)
        setup = replace(setup_of(args, sources, ranks), name=f"probe {latency_ms}", prefetch=1)
        # While the first are read, actors are still opening sources and starting threads.
        probes = WARMING + min(20, max(4, 600 // latency_ms))
        steps = range(args.first, args.first + probes)
        here = list(in_this_process(args, sources, steps))
        started = actors.start_actors(setup)
        there = []
        asked_s = time.perf_counter()
        for _ in actors.batches(
            actors.constructor(setup), rank=0, first=args.first, steps=probes, prefetch=0
        ):
            there.append(time.perf_counter() - asked_s)
            asked_s = time.perf_counter()
        actors.stop_actors(started)
        for reader, took in (("this process", here), ("actors", there)):
            for repetition, batch_s in enumerate(took[WARMING:]):
                prof.measure(
                    "batch_latency_ns",
                    batch_s * 1e9,
                    reader=reader,
                    latency_ms=latency_ms,
                    repetition=repetition,
                )
    dist.barrier()


def in_this_process(
    args: argparse.Namespace, sources: list[SourceSpec], steps: range
) -> Iterator[float]:
    """Seconds that reading and packing all samples of each step takes, reading them at once."""
    ranks = dist.get_world_size()
    plan, mixture = plans(args, sources, ranks), Mixture(sources)
    mixture.open(range(len(sources)))
    with ThreadPoolExecutor(args.batch * ranks) as pool:
        for step in steps:
            began = time.perf_counter()
            planned = plan.plan(step)
            items = list(zip(planned.source.tolist(), planned.index.tolist(), strict=True))
            read = [ids for ids, _ in mixture.read_all(items, pool, READ_TIMEOUT_S)]
            for rank in range(ranks):
                mine = [ids for ids, r in zip(read, planned.rank, strict=True) if r == rank]
                rows = pack(np.array([len(ids) for ids in mine]), args.longest)
                packed(
                    step,
                    [[mine[d] for d in r] for r in rows],
                    [],
                    width=args.longest,
                    step_tokens=1,
                )
            yield time.perf_counter() - began


def balancing_alone(
    args: argparse.Namespace, device: torch.device, prof: chopper.Profile, steps: int = 6
) -> None:
    """Measure the slowest of many ranks per step, by how samples were given to ranks.

    Each document's forward and backward pass really runs, by itself; a virtual rank takes as long
    as its documents together. So the methods differ in nothing but who gets which document. The
    real ranks take turns in the steps.
    """
    rank, real_ranks = dist.get_rank(), dist.get_world_size()
    clock = time.thread_time if device.type == "cpu" else synchronized
    width, longest = 2 * args.width, LONGER * args.longest
    model = Decoder(width, longest, VOCABULARY).to(device)
    cost = cost_of(width, VOCABULARY)
    long = argparse.Namespace(**vars(args) | {"tokens": LONGER * args.tokens, "longest": longest})
    ranks_of = (2, 4, 8)
    drawn = planner(
        specs(long),
        batch=args.batch,
        ranks=max(ranks_of),
        seed=args.seed,
        cost=cost,
        method="random",
    )

    def seconds(length: int) -> float:
        batch = packed(0, [[np.ones(length, dtype=np.uint16)]], [], width=length, step_tokens=1)
        began = clock()
        loss_of(model, batch, 1, device).backward()
        return clock() - began

    for length in (8, longest // 4, longest):
        seconds(length)
    mine = range(rank, steps, real_ranks)
    took = {step: [seconds(n) for n in drawn.plan(step).length.tolist()] for step in mine}
    gathered: list[dict[int, list[float]]] = [{} for _ in range(real_ranks)]
    dist.all_gather_object(gathered, took)
    if rank:
        return
    for step in range(steps):
        lengths = drawn.plan(step).length
        took_s = np.array(gathered[step % real_ranks][step])
        for ranks in ranks_of:
            first = slice(args.batch * ranks)
            costs = cost(lengths[first])
            for method in METHODS:
                given = balance(costs, ranks, method)
                said: dict[str, str | int] = {"method": method, "virtual_ranks": ranks}
                slowest_s = loads(took_s[first], given, ranks).max()
                as_drawn_s = loads(took_s[first], balance(costs, ranks, "random"), ranks).max()
                for name, value in (
                    ("slowest_virtual_rank_ns", slowest_s * 1e9),
                    ("as_drawn_over_this_ratio", as_drawn_s / slowest_s),
                    ("virtual_imbalance_ratio", imbalance(costs, given, ranks)),
                    ("virtual_time_imbalance_ratio", imbalance(took_s[first], given, ranks)),
                ):
                    prof.measure(name, float(value), **said, repetition=step)


def synchronized() -> float:
    """Now, with nothing under way on the GPU."""
    torch.cuda.synchronize()
    return time.perf_counter()
