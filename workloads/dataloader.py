"""Feed data-parallel training from a mixture of many sources: torch's DataLoader against actors.

    chopper run dataloader
    chopper run dataloader --variants tuned,balanced -- --sweep latency
    torchrun --standalone --nproc-per-node 2 -m chopper.workloads.dataloader --variant balanced

All variants train on the same samples in the same steps: what a step takes is a function of the seed
(planning.py). They differ in who reads them:

- ``loader``: torch's DataLoader, in which every worker of every rank opens every source and reads
  one document after the other; ``tuned`` has more workers, which fetch further ahead;
- ``concurrent``: the same, but a worker reads the documents of its batch at once;
- ``disaggregated``: each source is opened once, by loader actors that all ranks share, and
  documents are packed into rows (disaggregated.py);
- ``balanced``: that, and each rank gets as much to compute as the others.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import chopper
from chopper.errors import ChopperError
from chopper.workloads import disaggregated as actors
from chopper.workloads import options
from chopper.workloads.decoder import Decoder, cost_of, loss_of
from chopper.workloads.disaggregated import Batch, Setup, memory_bytes, packed
from chopper.workloads.machine import BACKEND, Needs, choose_device
from chopper.workloads.mixture import (
    READ_TIMEOUT_S,
    VOCABULARY,
    Mixture,
    SourceSpec,
    make_sources,
    planner,
)
from chopper.workloads.planning import METHODS, Limits, Plan, Planner, imbalance, pack
from chopper.workloads.torch_loading import ConcurrentDocuments, Documents, torch_batches

WITH_ACTORS = ("disaggregated", "balanced")
SWEEP_MS = (1, 5, 20, 50, 100, 200)
PROBED_MS = 10
"""Storage beside that of --latency, fast enough to see what asking actors costs."""
SECTION_STEPS = 32
"""Steps whose samples make one digest in what is printed."""
_WORKER_BYTES = 20_000_000
_RANK_BYTES = 600_000_000
_RAY_BYTES = 800_000_000


def needs(args: argparse.Namespace, ranks: int, _device: str) -> Needs:
    """What the hungriest variant takes: the state of all sources in each worker of each rank."""
    if args.longest < 8:
        raise ValueError(f"--longest {args.longest}: a document has at least 8 tokens")
    variants = getattr(args, "variants", None) or (args.variant,)
    with_actors = bool(set(variants) & set(WITH_ACTORS))
    sources = specs(args)
    try:
        plans(args, sources, ranks)
        if with_actors:
            actors.load_ray()
    except actors.LoaderError as exc:
        raise ValueError(f"{exc}; or without: --variants loader,tuned,concurrent") from exc
    except ChopperError as exc:
        raise ValueError(str(exc)) from exc
    state = sum(source.state_bytes for source in sources)
    workers = max(workers_of(variant, args) for variant in variants)
    shared = (state + _RAY_BYTES) // ranks if with_actors else 0
    return Needs(
        memory_bytes=max(workers * (state + _WORKER_BYTES), shared) + _RANK_BYTES,
        what=f"{workers} workers in each of {ranks} ranks, with {args.sources} sources of "
        f"{args.state} MB open in each worker,",
        remedy="take a smaller --state or fewer workers, or leave variants out with --variants",
    )


def specs(args: argparse.Namespace, latency_ms: float | None = None) -> list[SourceSpec]:
    """The sources that the options describe."""
    return make_sources(
        count=args.sources,
        state_bytes=args.state * 1_000_000,
        latency_s=(args.latency if latency_ms is None else latency_ms) / 1e3,
        documents=args.documents,
        tokens=args.tokens,
        longest=args.longest,
        seed=args.seed,
        fault=args.fault,
    )


def workers_of(variant: str, args: argparse.Namespace) -> int:
    """Worker processes of each rank."""
    workers: int = args.tuned if variant == "tuned" else args.workers
    return 0 if variant in WITH_ACTORS else workers


def method_of(args: argparse.Namespace) -> str:
    """How the variant gives samples to ranks."""
    return str(args.balance) if args.variant == "balanced" else "random"


def plans(args: argparse.Namespace, sources: list[SourceSpec], ranks: int) -> Planner:
    """What each step loads."""
    return planner(
        sources,
        batch=args.batch,
        ranks=ranks,
        seed=args.seed,
        cost=cost_of(args.width, VOCABULARY),
        method=method_of(args),
        ramp=args.ramp,
    )


def main() -> None:
    """Join the other ranks, train, leave."""
    args = options.parse(
        options.DATALOADER, prog="dataloader", description="Load a mixture of sources."
    )
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("dataloader: start it with `chopper run dataloader` or through torchrun")
    local_rank = int(os.environ["LOCAL_RANK"])
    kind, _ = choose_device(args.device, local_ranks=int(os.environ["LOCAL_WORLD_SIZE"]))
    device = torch.device(f"cuda:{local_rank}" if kind == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(BACKEND[kind], device_id=device if kind == "cuda" else None)
    train(args, device)
    dist.barrier()
    dist.destroy_process_group()


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train under ``chopper.profile``: measured first, traced then."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    decoder = Decoder(args.width, args.longest, VOCABULARY).to(device)
    model = DistributedDataParallel(decoder)

    # Neither the first batch of each worker nor the stock that actors begin with says how fast the
    # rest comes, and only over whole rounds of all workers are there as many as time passes.
    workers = workers_of(args.variant, args)
    warmup = workers or args.prefetch
    # The steps of actors are short: four times as many are still the shorter time.
    measured = -(-args.steps // workers) * workers if workers else 4 * args.steps
    traced = max(workers, args.steps // 3) if workers else args.steps
    sweep = args.sweep != "none"
    window = (0, 1) if sweep else (warmup + measured, warmup + measured + traced)
    with chopper.profile(args.output, steps=window) as prof:
        # What a step allocates once is the trainer's, not the loader's.
        loss_of(model, made_up(args), ranks, device).backward()
        model.zero_grad()
        trainer = Trainer(args, model, device, prof)
        with ray_for(args):
            for latency_ms in SWEEP_MS if sweep else (args.latency,):
                sources = specs(args, latency_ms)
                labels = {"latency_ms": latency_ms} if sweep else {}
                total = warmup + measured + (0 if sweep else traced)
                began = time.perf_counter()
                with batches_of(args, sources, total) as batches:
                    seen = trainer.run(prof.watch(batches), warmup, measured, began, labels)
                check(args, sources, seen, total, prof, labels)
            if args.variant == "disaggregated":
                for latency_ms in SWEEP_MS if sweep else (PROBED_MS, args.latency):
                    latency_of_a_batch(args, latency_ms, prof)
        if args.variant == "balanced" and not sweep and rank == 0:
            balancing_alone(args, decoder, device, prof)
        dist.barrier()


def made_up(args: argparse.Namespace) -> Batch:
    """A batch of a typical size, of nothing."""
    documents = [np.ones(args.longest, dtype=np.uint16)] * 3
    return packed(0, [[d] for d in documents], [], width=args.longest, step_tokens=1)


@contextlib.contextmanager
def ray_for(args: argparse.Namespace) -> Iterator[None]:
    """Ray, when the variant has actors: started by the first rank, joined by the others."""
    if args.variant not in WITH_ACTORS:
        yield
        return
    where: list[Any] = [args.address, f"chopper-{os.getpid()}", None]
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            cluster = stack.enter_context(actors.Cluster(*where))
            where[0], where[2] = cluster.address, cluster.token
        dist.broadcast_object_list(where)
        if dist.get_rank():
            stack.enter_context(actors.Cluster(*where))
        yield
        dist.barrier()


@contextlib.contextmanager
def batches_of(
    args: argparse.Namespace, sources: list[SourceSpec], steps: int
) -> Iterator[Iterator[Batch]]:
    """A rank's batches, and whoever makes them for as long as the block lasts."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if args.variant not in WITH_ACTORS:
        at_once = args.variant == "concurrent"
        # About as long as a batch takes: the sum of its reads, or the slowest of them.
        batch_s = fmean_latency(sources) * (min(args.batch, 5) if at_once else args.batch)
        kind = ConcurrentDocuments if at_once else Documents
        with contextlib.closing(
            torch_batches(
                kind(sources, batch_s / workers_of(args.variant, args)),
                (plans(args, sources, ranks), plans(args, sources, ranks)),
                rank=rank,
                first=args.first,
                steps=steps,
                workers=workers_of(args.variant, args),
                prefetch=4 if args.variant == "tuned" else 2,
                timeout_s=args.batch * READ_TIMEOUT_S / 4,
            )
        ) as batches:
            yield batches
        return
    setup = setup_of(args, sources, ranks)
    started = actors.start_actors(setup) if rank == 0 else None
    dist.barrier()
    yield actors.batches(
        actors.constructor(setup),
        rank=rank,
        first=args.first,
        steps=steps,
        prefetch=args.prefetch,
    )
    dist.barrier()
    if started is not None:
        actors.stop_actors(started)


def fmean_latency(sources: list[SourceSpec]) -> float:
    """Seconds per read, by how often each source is drawn."""
    return sum(source.weight * source.latency_s for source in sources)


def setup_of(args: argparse.Namespace, sources: list[SourceSpec], ranks: int) -> Setup:
    """What the actors are told."""
    return Setup(
        name=f"{sources[0].latency_s}",
        sources=tuple(sources),
        batch=args.batch,
        ranks=ranks,
        seed=args.seed,
        method=method_of(args),
        cost=cost_of(args.width, VOCABULARY),
        width=args.longest,
        loaders=min(args.loaders, args.sources),
        limits=Limits(
            threads=args.threads, memory_bytes=8 << 30, most=max(args.most, args.loaders)
        ),
        prefetch=args.prefetch,
        ramp=args.ramp,
    )


@dataclass
class Window:
    """What one rank saw of the measured steps."""

    elapsed_s: float = 0.0
    wait_s: float = 0.0
    compute_s: list[float] = field(default_factory=list)
    """Per step."""
    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    """With padding."""
    losses: list[float] = field(default_factory=list)
    memory_bytes: dict[str, int] = field(default_factory=dict)


class Trainer:
    """Trains on batches and measures, on each rank."""

    def __init__(
        self,
        args: argparse.Namespace,
        model: nn.Module,
        device: torch.device,
        prof: chopper.Profile,
    ) -> None:
        self.args, self.model, self.device, self.prof = args, model, device, prof
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        # Whatever runs already loads nothing: the recorder's sampler.
        self.others = {child.pid for child in psutil.Process().children(recursive=True)}
        self.own_bytes = memory_bytes([os.getpid()])

    def run(
        self,
        batches: Any,
        warmup: int,
        measured: int,
        began: float,
        labels: dict[str, int],
    ) -> list[list[tuple[int, int]]]:
        """Train on all batches; returns the samples of each step.

        Args:
            batches: of this rank.
            warmup: steps before what is measured.
            measured: steps that are.
            began: when the loader was asked for, as time.perf_counter() tells it.
            labels: of what is measured.
        """
        seen: list[list[tuple[int, int]]] = []
        here = Window()
        coming = iter(batches)
        for step in range(sys.maxsize):
            if step == warmup:
                dist.barrier()
                here.elapsed_s = -time.perf_counter()
            asked = time.perf_counter()
            batch = next(coming, None)
            if batch is None:
                break
            waited_s = time.perf_counter() - asked
            if step == 0:
                self.prof.measure("first_batch_ns", (time.perf_counter() - began) * 1e9, **labels)
            compute_s, loss = self.step(batch)
            seen.append(batch.samples)
            here.losses.append(loss)
            if warmup <= step < warmup + measured:
                here.wait_s += waited_s
                here.compute_s.append(compute_s)
                here.tokens.append(sum(map(sum, batch.documents)))
                here.cells.append(batch.tokens.size)
            if step == warmup + measured - 1:
                dist.barrier()
                here.elapsed_s += time.perf_counter()
                here.memory_bytes = self.memory()
                self.report(here, labels)
            if self.args.fault == "killed-loader" and step == warmup + measured // 2:
                kill_a_loader()
            self.prof.step()
        return seen

    def step(self, batch: Batch) -> tuple[float, float]:
        """Train on one batch: seconds that forward and backward computed, and the loss."""
        clock = time.thread_time if self.device.type == "cpu" else synchronized
        began = clock()
        loss = loss_of(self.model, batch, dist.get_world_size(), self.device)
        loss.backward()
        compute_s = clock() - began
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return compute_s, loss.item()

    def memory(self) -> dict[str, int]:
        """Proportional set size of what loads for this rank, by what it is."""
        out: Counter[str] = Counter()
        for child in psutil.Process().children(recursive=True):
            if child.pid not in self.others:
                with contextlib.suppress(psutil.NoSuchProcess):
                    out[role_of(child)] += memory_bytes([child.pid])
        # Forked workers share pages with their rank: what these count, it no longer does.
        out["trainers' growth"] = memory_bytes([os.getpid()]) - self.own_bytes
        return out

    def report(self, here: Window, labels: dict[str, int]) -> None:
        """Join what all ranks saw; rank 0 keeps it."""
        ranks = dist.get_world_size()
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, here)
        if dist.get_rank():
            return
        windows: list[Window] = gathered
        elapsed_s = max(w.elapsed_s for w in windows)
        steps = len(here.compute_s)
        memory: Counter[str] = Counter()
        for window in windows:
            memory.update(window.memory_bytes)
        compute_s = np.array([w.compute_s for w in windows])
        tokens, cells = (sum(sum(getattr(w, a)) for w in windows) for a in ("tokens", "cells"))

        def keep(name: str, value: float, **more: str) -> None:
            self.prof.measure(name, value, **labels, **more)

        keep("samples_per_s", steps * ranks * self.args.batch / elapsed_s)
        keep("tokens_per_s", tokens / elapsed_s)
        keep("data_wait_ratio", statistics.fmean(w.wait_s / w.elapsed_s for w in windows))
        keep("loader_memory_bytes", sum(memory.values()))
        keep("compute_imbalance_ratio", float(np.mean(compute_s.max(0) / compute_s.mean(0))))
        keep("slowest_rank_ns", float(compute_s.max(0).mean()) * 1e9)
        keep("padding_ratio", 1 - tokens / cells)
        keep("first_loss", float(np.mean([w.losses[:8] for w in windows])))
        for role, value in memory.items():
            if not labels:
                keep("memory_bytes", value, of=role)


def synchronized() -> float:
    """Now, with nothing under way on the GPU."""
    torch.cuda.synchronize()
    return time.perf_counter()


def role_of(process: psutil.Process) -> str:
    """What a process that loads is, in a word or two."""
    words = process.cmdline()
    if words and words[0].startswith("ray::"):
        name = words[0].removeprefix("ray::").split(".")[0].split(":")[0]
        return name if name in ("SourceLoader", "PlannerActor", "DataConstructor") else "Ray itself"
    return "Ray itself" if any("/ray/" in word for word in words) else "workers"


def kill_a_loader() -> None:
    """Kill the first process of a loader actor, as a machine that fails would."""
    if dist.get_rank():
        return
    for child in psutil.Process().children(recursive=True):
        if role_of(child) == "SourceLoader":
            print(f"dataloader: killing loader actor {child.pid}", flush=True)
            child.send_signal(signal.SIGKILL)
            return


def check(
    args: argparse.Namespace,
    sources: list[SourceSpec],
    seen: list[list[tuple[int, int]]],
    steps: int,
    prof: chopper.Profile,
    labels: dict[str, int],
) -> None:
    """Whether the ranks together saw each planned sample once, and a digest to compare with."""
    ranks = dist.get_world_size()
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, seen)
    if dist.get_rank():
        return
    plan = plans(args, sources, ranks)
    uneven, lost, twice = [], 0, 0
    sections: dict[int, Any] = {}
    for at in range(steps):
        step = args.first + at
        planned = plan.plan(step)
        wanted = Counter(zip(planned.source.tolist(), planned.index.tolist(), strict=True))
        found = Counter(sample for rank in gathered for sample in rank[at])
        lost, twice = lost + (wanted - found).total(), twice + (found - wanted).total()
        digest = sections.setdefault(step // SECTION_STEPS, hashlib.sha256())
        digest.update(repr((step, sorted(found.elements()))).encode())
        uneven.append(uneven_of(args, planned, ranks))
    prof.measure("imbalance_ratio", statistics.fmean(uneven), **labels)
    prof.measure("lost_sample_count", lost, **labels)
    prof.measure("repeated_sample_count", twice, **labels)
    if not labels:
        for section, digest in sections.items():
            first = max(args.first, section * SECTION_STEPS)
            last = min(args.first + steps, (section + 1) * SECTION_STEPS) - 1
            print(f"samples of steps {first:4d} to {last:4d}: {digest.hexdigest()[:16]}")
    print(f"{args.variant}: {lost} samples lost, {twice} came twice", flush=True)


def uneven_of(args: argparse.Namespace, plan: Plan, ranks: int) -> float:
    """Largest load over the mean load of a step."""
    return imbalance(cost_of(args.width, VOCABULARY)(plan.length), plan.rank, ranks)


def latency_of_a_batch(
    args: argparse.Namespace, latency_ms: int, prof: chopper.Profile, probes: int = 4
) -> None:
    """Time from asking for a step to having it, nothing loaded ahead: in this process and by
    actors, the same samples. The difference is what disaggregation costs by itself.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        sources = specs(args, latency_ms)
        setup = replace(setup_of(args, sources, ranks), name=f"probe {latency_ms}", prefetch=1)
        steps = range(args.first, args.first + probes + 1)
        here = list(in_this_process(args, sources, steps))
        started = actors.start_actors(setup)
        there = []
        asked_s = time.perf_counter()
        for _ in actors.batches(
            actors.constructor(setup), rank=0, first=args.first, steps=len(steps), prefetch=0
        ):
            there.append(time.perf_counter() - asked_s)
            asked_s = time.perf_counter()
        actors.stop_actors(started)
        for by, took in (("this process", here), ("actors", there)):
            # The first opens the sources.
            for batch_s in took[1:]:
                prof.measure("batch_latency_ns", batch_s * 1e9, by=by, latency_ms=latency_ms)
    dist.barrier()


def in_this_process(
    args: argparse.Namespace, sources: list[SourceSpec], steps: range
) -> Iterator[float]:
    """Seconds that reading and packing all samples of each step takes, reading them at once."""
    ranks = dist.get_world_size()
    plan, mixture = plans(args, sources, ranks), Mixture(sources)
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
    args: argparse.Namespace,
    model: nn.Module,
    device: torch.device,
    prof: chopper.Profile,
    steps: int = 4,
) -> None:
    """What the slowest of many ranks computes per step, by how samples were given to ranks.

    Each virtual rank's forward and backward really runs, one after the other, on documents of the
    planned lengths: more ranks than this machine has cores for would only wait for each other.
    """
    clock = time.thread_time if device.type == "cpu" else synchronized
    for _ in range(3):
        loss_of(model, made_up(args), 1, device).backward()
    cost, sources = cost_of(args.width, VOCABULARY), specs(args)
    for ranks in (2, 4, 8):
        for method in METHODS:
            plan = planner(
                sources, batch=args.batch, ranks=ranks, seed=args.seed, cost=cost, method=method
            )
            slowest, even = [], []
            for planned in map(plan.plan, range(steps)):
                took = []
                for rank in range(ranks):
                    lengths = planned.length[planned.rank == rank]
                    rows = [
                        [np.ones(lengths[d], dtype=np.uint16) for d in row]
                        for row in pack(lengths, args.longest)
                    ]
                    batch = packed(0, rows, [], width=args.longest, step_tokens=1)
                    began = clock()
                    loss_of(model, batch, 1, device).backward()
                    took.append(clock() - began)
                slowest.append(max(took))
                even.append(imbalance(cost(planned.length), planned.rank, ranks))
            labels: dict[str, str | int] = {"method": method, "virtual_ranks": ranks}
            prof.measure("slowest_virtual_rank_ns", statistics.fmean(slowest) * 1e9, **labels)
            prof.measure("virtual_imbalance_ratio", statistics.fmean(even), **labels)
    model.zero_grad()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except ChopperError as error:
        print(f"dataloader: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except RuntimeError as error:
        if "closed by peer" not in str(error) and "reset by peer" not in str(error):
            raise
        # The rank that ended says why.
        print("dataloader: another rank ended, and this one with it", file=sys.stderr, flush=True)
        sys.exit(1)
