"""Parts of loading measured alone: what asking actors costs, and what balancing gains."""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import chopper
from chopper.workloads import disaggregated as actors
from chopper.workloads.batch import Batch, Mesh, batch_of
from chopper.workloads.decoder import Decoder, cost_of, loss_of
from chopper.workloads.loading import LONGER, row_width, setup_of
from chopper.workloads.mixture import VOCABULARY
from chopper.workloads.planning import METHODS, Draw, Planner, balance, imbalance, loads
from chopper.workloads.shards import OpenSources, near

WARMING = 3


def latency_of_a_batch(
    args: argparse.Namespace, draw: Draw, latency_ms: int, prof: chopper.Profile
) -> None:
    """Measure what disaggregation costs: the same batches by actors and in this process."""
    if dist.get_rank() == 0:
        setup = probing(args, draw, f"probe {latency_ms}")
        # While the first are read, actors are still opening sources and starting threads.
        probes = WARMING + min(20, max(4, 600 // max(1, latency_ms)))
        here = list(in_this_process(args, draw, range(args.first, args.first + probes)))
        started = actors.start_actors(setup)
        there = []
        asked_s = time.perf_counter()
        for _ in asked_alone(setup, args.first, probes):
            there.append(time.perf_counter() - asked_s)
            asked_s = time.perf_counter()
        actors.stop_actors(started)
        for reader, took in (("this process", here), ("actors", there)):
            for repetition, batch_s in enumerate(took[WARMING:]):
                labels = {"latency_ms": latency_ms, "repetition": repetition}
                prof.measure("batch_latency_ns", batch_s * 1e9, reader=reader, **labels)
    dist.barrier()


def probing(args: argparse.Namespace, draw: Draw, name: str) -> actors.Setup:
    """Setup of actors that the first rank alone asks, one step after the other."""
    setup = setup_of(args, draw, name, [(actors.this_node(), [0])])
    return replace(setup, prefetch=1, mesh=Mesh(), checkpoint=None)


def asked_alone(setup: actors.Setup, first: int, steps: int) -> Iterator[Batch]:
    """Batches of the first rank, none of them loaded ahead."""
    made = actors.constructor(setup, 0)
    return actors.batches(made, rank=0, first=first, steps=steps, prefetch=0)


def in_this_process(args: argparse.Namespace, draw: Draw, steps: range) -> Iterator[float]:
    """Seconds that reading and packing all samples of each step takes, reading them at once."""
    planner, sources = Planner(draw), OpenSources(draw.sources)
    with ThreadPoolExecutor(draw.batch * draw.ranks) as pool:
        for step in steps:
            began = time.perf_counter()
            plan = planner.plan(step)
            samples = plan.of(0)
            read = sources.read_all(samples, pool)
            batch_of(samples, [tokens for tokens, _, _ in read], width=row_width(args))
            yield time.perf_counter() - began


RECOVERIES = 3
"""Kills of each kind, as many as Ray restarts an actor."""
STEADY = 4
"""Steps from one kill to the next."""


def recovery(args: argparse.Namespace, draw: Draw, prof: chopper.Profile) -> None:
    """Measure the time from a ``kill -9`` to the next batch that needed the one killed.

    Nothing is loaded ahead, so that no stock hides it: the time holds a batch's own latency. What
    came is compared with the plan.
    """
    if dist.get_rank() == 0:
        planner, contents = Planner(draw), near(draw.sources)
        for killed, standby in (("loader", 0), ("loader", 1), ("planner", 0), ("constructor", 0)):
            replaced_by = "a loader that stood by" if standby else "a restart"
            setup = replace(
                probing(args, draw, f"killed {killed} {standby}"), standby=standby, loaders=1
            )
            with tempfile.TemporaryDirectory() as folder:
                setup = replace(setup, checkpoint=Path(folder))
                started = actors.start_actors(setup)
                coming = asked_alone(setup, args.first, STEADY * (RECOVERIES + 1))
                wrong = 0
                for step in range(args.first, args.first + STEADY * (RECOVERIES + 1)):
                    repetition, steady = divmod(step - args.first, STEADY)
                    kills = repetition > 0 and not steady
                    if kills:
                        os.kill(process_of(started, killed), signal.SIGKILL)
                    began = time.perf_counter()
                    batch = next(coming)
                    took_s = time.perf_counter() - began
                    said = {"killed": killed, "replaced_by": replaced_by}
                    if kills:
                        prof.measure("recovery_ns", took_s * 1e9, repetition=repetition - 1, **said)
                    planned = Counter(contents.marked(planner.plan(step).of(0)))
                    wrong += planned != Counter(batch.marked())
                prof.measure("wrong_batch_count", wrong, **said)
                actors.stop_actors(started)
    dist.barrier()


def process_of(started: Sequence[Any], role: str) -> int:
    """Process of an actor, of the first loader say, once whoever stands by is ready."""
    import ray

    planner, constructor = started
    loaders, standby = ray.get(planner.loaders.remote())
    ray.get([loader.open.remote([]) for loader in standby])
    actor = {"planner": planner, "constructor": constructor, "loader": loaders[0]}[role]
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))


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
