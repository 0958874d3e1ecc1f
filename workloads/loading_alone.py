"""Parts of loading measured alone: what asking actors costs, and what balancing gains."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice

import numpy as np
import torch
import torch.distributed as dist

import chopper
from chopper.workloads import disaggregated as actors
from chopper.workloads.batch import batch_of
from chopper.workloads.decoder import Decoder, cost_of, loss_of
from chopper.workloads.loading import LONGER, draw_of, setup_of
from chopper.workloads.mixture import VOCABULARY, Mixture
from chopper.workloads.planning import METHODS, Draw, Planner, balance, imbalance, loads

WARMING = 3


def latency_of_a_batch(args: argparse.Namespace, latency_ms: int, prof: chopper.Profile) -> None:
    """Measure what disaggregation costs: the same batches by actors and in this process."""
    if dist.get_rank() == 0:
        draw = draw_of(args, dist.get_world_size(), latency_ms)
        setup = replace(setup_of(args, draw, f"probe {latency_ms}"), prefetch=1)
        # While the first are read, actors are still opening sources and starting threads.
        probes = WARMING + min(20, max(4, 600 // latency_ms))
        here = list(in_this_process(args, draw, range(args.first, args.first + probes)))
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
                labels = {"latency_ms": latency_ms, "repetition": repetition}
                prof.measure("batch_latency_ns", batch_s * 1e9, reader=reader, **labels)
    dist.barrier()


def in_this_process(args: argparse.Namespace, draw: Draw, steps: range) -> Iterator[float]:
    """Seconds that reading and packing all samples of each step takes, reading them at once."""
    planner, mixture = Planner(draw), Mixture(draw.sources)
    mixture.open(range(len(draw.sources)))
    with ThreadPoolExecutor(draw.batch * draw.ranks) as pool:
        for step in steps:
            began = time.perf_counter()
            plan = planner.plan(step)
            samples = [plan.of(rank) for rank in range(draw.ranks)]
            read = iter(mixture.read_all(list(chain(*samples)), pool))
            for mine in samples:
                batch_of(
                    mine, [tokens for tokens, _, _ in islice(read, len(mine))], width=args.longest
                )
            yield time.perf_counter() - began


def balancing_alone(
    args: argparse.Namespace, device: torch.device, prof: chopper.Profile, steps: int = 6
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
    long = argparse.Namespace(**vars(args) | {"tokens": LONGER * args.tokens, "longest": longest})
    ranks_of = (2, 4, 8)
    drawn = Planner(replace(draw_of(long, max(ranks_of)), method="random", cost=cost, ramp=0))

    def seconds(length: int) -> float:
        batch = batch_of([(0, 0)], [np.ones(length, dtype=np.uint16)], width=length)
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
