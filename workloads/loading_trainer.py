"""One rank of the workload ``dataloader``: its batches, its training and its measures."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import nn

import chopper
from chopper.errors import ChopperError
from chopper.workloads import disaggregated as actors
from chopper.workloads.batch import Batch
from chopper.workloads.decoder import loss_of
from chopper.workloads.loading import (
    WITH_ACTORS,
    Span,
    Turn,
    row_width,
    setup_of,
    workers_of,
)
from chopper.workloads.loading_measures import (
    ACTORS,
    Window,
    memory_bytes,
    rates,
    role_of,
    synchronized,
)
from chopper.workloads.planning import Draw, Planner, imbalance
from chopper.workloads.progress import Progress
from chopper.workloads.sources import READ_TIMEOUT_S, without_latency
from chopper.workloads.torch_loading import ConcurrentDocuments, Documents, torch_batches

SECTION_STEPS = 32
Marked = tuple[int, int, int]
"""A sample and the mark of what came."""


@dataclass(frozen=True, slots=True)
class Feed:
    """A rank's batches."""

    batches: Iterator[Batch]
    loaded: Callable[[int], int]
    """Samples that are loaded by now, of this rank's; takes the steps that were trained on.
    Actors load for all ranks, and the first one is told them all."""


@contextlib.contextmanager
def batches_of(args: argparse.Namespace, draw: Draw, turn: Turn) -> Iterator[Feed]:
    """A rank's batches, and whoever makes them for as long as the block lasts."""
    if args.variant in WITH_ACTORS:
        with batches_of_actors(args, draw, turn) as feed:
            yield feed
        return
    kind = ConcurrentDocuments if args.variant == "concurrent" else Documents
    workers = workers_of(args.variant, args)
    planner = Planner(draw)
    upcoming = planner.upcoming(turn.first, range(len(draw.sources)))
    dataset = kind(draw.sources, workers, upcoming)
    batches = torch_batches(
        dataset,
        planner,
        rank=dist.get_rank() // args.tensor,
        first=turn.first,
        steps=turn.steps,
        workers=workers,
        prefetch=4 if args.variant == "tuned" else 2,
        width=row_width(args),
        timeout_s=args.batch * READ_TIMEOUT_S / 4,
    )
    with contextlib.closing(batches):
        yield Feed(batches, lambda _: dataset.documents_read())


@contextlib.contextmanager
def batches_of_actors(args: argparse.Namespace, draw: Draw, turn: Turn) -> Iterator[Feed]:
    """A rank's batches from the actors that the first one starts and ends."""
    import ray

    rank = dist.get_rank()
    nodes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, actors.this_node())
    ranks_of = {node: [r for r, n in enumerate(nodes) if n == node] for node in nodes}
    setup = setup_of(args, draw, str(turn.number), list(ranks_of.items()))
    started = actors.start_actors(setup) if rank == 0 else None
    dist.barrier()
    constructors = [actors.constructor(setup, ranks[0]) for ranks in ranks_of.values()]
    reader = rank - rank % args.tensor
    coming: Iterator[Batch] = iter(())
    if reader == rank:
        coming = actors.batches(
            constructors[setup.node_of(rank)],
            rank=rank,
            first=turn.first,
            steps=turn.steps,
            prefetch=args.prefetch,
        )

    def loaded(step: int) -> int:
        if rank:
            return 0
        stocks: list[int] = ray.get([one.stock.remote() for one in constructors])
        return draw.batch * draw.ranks * (step + min(stocks))

    try:
        yield Feed(broadcast(coming, reader, args.tensor, turn.steps), loaded)
    except ChopperError:
        if started is not None:
            stop(started)
        raise
    dist.barrier()
    if started is not None:
        fleets = ray.get(started[0].fleets.remote())
        grown = ", ".join(f"{n} from step {step}" for step, n in fleets)
        print(f"{args.variant}: loader actors: {grown}", flush=True)
        stop(started)
    dist.barrier()


def broadcast(coming: Iterator[Batch], reader: int, ranks: int, steps: int) -> Iterator[Batch]:
    """Give what one rank reads to all of its tensor-parallel group: they need the same."""
    if ranks == 1:
        return coming
    groups = [
        dist.new_group(list(range(first, first + ranks)))
        for first in range(0, dist.get_world_size(), ranks)
    ]
    return _broadcast(coming, reader, groups[reader // ranks], steps)


def _broadcast(coming: Iterator[Batch], reader: int, group: Any, steps: int) -> Iterator[Batch]:
    for _ in range(steps):
        held = [next(coming) if dist.get_rank() == reader else None]
        dist.broadcast_object_list(held, src=reader, group=group)
        assert held[0] is not None
        yield held[0]


def stop(started: Sequence[Any]) -> None:
    """End the actors, and wait for those of this machine: the next ones are measured alone."""
    actors.stop_actors(started)
    here = [p for p in psutil.Process().children(recursive=True) if role_of(p) in ACTORS]
    psutil.wait_procs(here, timeout=10)


class Trainer:
    """Trains on batches and measures, on each rank."""

    def __init__(
        self,
        args: argparse.Namespace,
        model: nn.Module,
        device: torch.device,
        prof: chopper.Profile,
        progress: Progress,
    ) -> None:
        self.args, self.model, self.device, self.prof = args, model, device, prof
        self.progress = progress
        self.data_ranks = dist.get_world_size() // args.tensor
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        # Whatever runs already loads nothing: the recorder's sampler.
        self.others = {child.pid for child in psutil.Process().children(recursive=True)}
        self.own_bytes = memory_bytes([os.getpid()])

    def run(
        self, feed: Feed, span: Span, began: float, labels: dict[str, int]
    ) -> list[list[Marked]]:
        """Train on all batches of a loader asked for at ``began``; returns each step's samples."""
        seen: list[list[Marked]] = []
        losses: list[float] = []
        window: Window | None = None
        coming = iter(self.prof.watch(feed.batches))
        for step in itertools.count():
            measured = step - span.warmup
            if measured == 0:
                window = self.now(feed, step)
            if measured == span.measured and window is not None:
                window.end(self.now(feed, step))
                self.report(window, self.memory(), losses[:8], labels)
                window = None
            asked = time.perf_counter()
            batch = next(coming, None)
            if batch is None:
                break
            waited_s = time.perf_counter() - asked
            if step == 0:
                self.prof.measure("first_batch_ns", (time.perf_counter() - began) * 1e9, **labels)
            compute_s, loss = self.step(batch)
            seen.append(batch.marked())
            losses.append(loss)
            if window is not None:
                window.add(batch, waited_s, compute_s)
            if self.args.fault == "killed-loader" and measured == span.measured // 2:
                kill_a_loader()
            self.prof.step()
            self.progress.advance()
        return seen

    def now(self, feed: Feed, step: int) -> Window:
        """Read the clocks at the same step on all ranks."""
        dist.barrier()
        return Window.now(feed.loaded(step))

    def step(self, batch: Batch) -> tuple[float, float]:
        """Train on one batch: seconds that forward and backward computed, and the loss."""
        clock = time.thread_time if self.device.type == "cpu" else synchronized
        began = clock()
        loss = loss_of(self.model, batch, self.data_ranks, self.device)
        loss.backward()
        compute_s = clock() - began
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return compute_s, loss.item()

    def memory(self) -> dict[str, int]:
        """Proportional set size of what loads for this rank, by what it is."""
        out: Counter[str] = Counter()
        for child in psutil.Process().children(recursive=True):
            if child.pid not in self.others and (held := memory_bytes([child.pid])) > 0:
                out[role_of(child)] += held
        # Forked workers share pages with their rank: what these count, it no longer does.
        growth = "trainers' growth" if self.args.variant in WITH_ACTORS else "workers"
        out[growth] += memory_bytes([os.getpid()]) - self.own_bytes
        return out

    def report(
        self,
        window: Window,
        memory: dict[str, int],
        losses: list[float],
        labels: dict[str, int],
    ) -> None:
        """Join what all ranks saw; rank 0 keeps it."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (window, memory, losses))
        if dist.get_rank():
            return
        windows = [seen for seen, _, _ in gathered]
        ahead = self.args.variant not in WITH_ACTORS
        own_cpu_s = sum(window.own_cpu_s for window in windows)
        # The ranks of a tensor-parallel group train on the same.
        apart = windows[:: self.args.tensor]
        for name, value in rates(apart, self.args.batch, own_cpu_s, ahead=ahead).items():
            self.prof.measure(name, value, **labels)
        roles: Counter[str] = Counter()
        for _, of_rank, _ in gathered:
            roles.update(of_rank)
        self.prof.measure("loader_memory_bytes", sum(roles.values()), **labels)
        if self.args.sweep == "none":
            for role, value in roles.items():
                self.prof.measure("memory_bytes", value, of=role, **labels)
        if labels["repetition"] == 0:
            first = float(np.mean([losses for _, _, losses in gathered]))
            told = {k: v for k, v in labels.items() if k != "repetition"}
            self.prof.measure("first_loss", first, **told)


def kill_a_loader() -> None:
    """Kill the first process of a loader actor, as a machine that fails would."""
    if dist.get_rank():
        return
    for child in psutil.Process().children(recursive=True):
        if role_of(child) == "SourceLoader":
            print(f"dataloader: killing loader actor {child.pid}", flush=True)
            child.send_signal(signal.SIGKILL)
            return


class Checked:
    """Checks that the ranks together saw each planned sample once, by the marks of what came."""

    def __init__(self, args: argparse.Namespace, prof: chopper.Profile) -> None:
        self._args, self._prof = args, prof
        self._sections: dict[int, list[str]] = {}
        self._lost = self._twice = 0

    def add(self, draw: Draw, first: int, seen: list[list[Marked]], labels: dict[str, int]) -> None:
        """Take in the samples of each step from ``first`` on, on this rank."""
        planner, contents = Planner(draw), without_latency(draw.sources)
        plans = [planner.plan(first + at) for at in range(len(seen))]
        # Each rank makes again what it should have been given.
        rank, tensor = divmod(dist.get_rank(), self._args.tensor)
        wanted = [contents.marked(plan.of(rank)) for plan in plans]
        gathered: list[Any] = [None] * dist.get_world_size()
        # The ranks of a tensor-parallel group train on the same.
        dist.all_gather_object(gathered, None if tensor else (wanted, seen))
        gathered = [held for held in gathered if held is not None]
        if dist.get_rank():
            return
        lost = twice = 0
        for at in range(len(seen)):
            should = Counter(sample for asked, _ in gathered for sample in asked[at])
            came = Counter(sample for _, got in gathered for sample in got[at])
            lost, twice = lost + (should - came).total(), twice + (came - should).total()
            step = first + at
            held = repr((step, sorted(came.elements())))
            self._sections.setdefault(step // SECTION_STEPS, []).append(held)
        uneven = statistics.fmean(
            imbalance(draw.cost(plan.length), plan.rank, draw.ranks) for plan in plans
        )
        self._prof.measure("imbalance_ratio", uneven, **labels)
        self._prof.measure("lost_sample_count", lost, **labels)
        self._prof.measure("repeated_sample_count", twice, **labels)
        self._lost, self._twice = self._lost + lost, self._twice + twice

    def tell(self) -> None:
        """Print them: of whole sections only, which are the same wherever a run begins and ends."""
        if dist.get_rank():
            return
        whole = [s for s, steps in sorted(self._sections.items()) if len(steps) == SECTION_STEPS]
        for section in whole if self._args.sweep == "none" else ():
            digest = hashlib.sha256("".join(self._sections[section]).encode()).hexdigest()[:16]
            first = section * SECTION_STEPS
            print(f"samples of steps {first:4d} to {first + SECTION_STEPS - 1:4d}: {digest}")
        print(
            f"{self._args.variant}: {self._lost} samples lost, {self._twice} duplicated", flush=True
        )
