"""Feed data-parallel training from a mixture of many sources: torch's DataLoader against actors.

    chopper run dataloader
    chopper run dataloader --variants tuned,balanced -- --sweep latency
    torchrun --standalone --nproc-per-node 2 -m chopper.workloads.dataloader --variant balanced

All variants train on the same samples in the same steps: what a step takes is a function of the seed
(planning.py). They differ in who reads them:

- ``loader``: torch's DataLoader, in which every worker of every rank opens every source and reads
  one document after the other; ``tuned`` has more workers, which fetch further ahead;
- ``concurrent``: the same, but a worker reads the documents of its batch at once;
- ``disaggregated``: each source is opened once, by loader actors that all ranks share
  (disaggregated.py);
- ``balanced``: that, and each rank gets as much to compute as the others.

All of them tokenize, and pack documents into the same rows.
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
from collections.abc import Callable, Iterator, Sequence
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
from chopper.workloads.disaggregated import Batch, memory_bytes, packed
from chopper.workloads.loading import (
    STRETCHES,
    WITH_ACTORS,
    Span,
    plans,
    points,
    setup_of,
    specs,
    workers_of,
)
from chopper.workloads.loading_alone import balancing_alone, latency_of_a_batch, synchronized
from chopper.workloads.machine import BACKEND, choose_device
from chopper.workloads.mixture import READ_TIMEOUT_S, VOCABULARY, Contents, SourceSpec
from chopper.workloads.planning import Plan, imbalance
from chopper.workloads.torch_loading import ConcurrentDocuments, Documents, torch_batches

PROBED_MS = 10
"""Storage that is fast enough to see what asking actors costs."""
SECTION_STEPS = 32
"""Steps whose samples make one digest in what is printed."""


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

    span = Span.of(args)
    latencies_ms, swept = points(args), args.sweep != "none"
    before = (len(latencies_ms) - 1) * span.total(traced=False) + span.warmup + span.measured
    window = (before, before + span.traced)
    with chopper.profile(args.output, steps=window) as prof:
        # What a step allocates once is the trainer's, not the loader's.
        loss_of(model, made_up(args), ranks, device).backward()
        model.zero_grad()
        trainer = Trainer(args, model, device, prof)
        with ray_for(args):
            for latency_ms in latencies_ms:
                labels = {"latency_ms": latency_ms} if swept else {}
                if labels and rank == 0:
                    print(f"{args.variant}: storage of {latency_ms} ms", flush=True)
                sources = specs(args, latency_ms)
                total = span.total(traced=latency_ms == latencies_ms[-1])
                began = time.perf_counter()
                with batches_of(args, sources, total) as feed:
                    seen = trainer.run(feed, span, began, labels)
                check(args, sources, seen, total, prof, labels)
            if args.variant == "balanced":
                for latency_ms in sorted({PROBED_MS, *latencies_ms} if swept else {PROBED_MS}):
                    latency_of_a_batch(args, latency_ms, prof)
        if args.variant == "balanced" and rank == 0:
            balancing_alone(args, device, prof)
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


@dataclass(frozen=True, slots=True)
class Feed:
    """A rank's batches."""

    batches: Iterator[Batch]
    stock: Callable[[], int] = lambda: 0
    """Steps that wait to be taken; 0 where trainers wait for each."""


@contextlib.contextmanager
def batches_of(args: argparse.Namespace, sources: list[SourceSpec], steps: int) -> Iterator[Feed]:
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
                width=args.longest if args.rows == "packed" else None,
                timeout_s=args.batch * READ_TIMEOUT_S / 4,
            )
        ) as batches:
            yield Feed(batches)
        return
    setup = setup_of(args, sources, ranks)
    started = actors.start_actors(setup) if rank == 0 else None
    dist.barrier()
    constructor = actors.constructor(setup)
    yield Feed(
        actors.batches(
            constructor, rank=rank, first=args.first, steps=steps, prefetch=args.prefetch
        ),
        lambda: actors.stock(constructor),
    )
    dist.barrier()
    if started is not None:
        grown = ", ".join(f"{n} from step {step}" for step, n in actors.fleets(started))
        print(f"{args.variant}: loader actors: {grown}", flush=True)
        actors.stop_actors(started)


def fmean_latency(sources: list[SourceSpec]) -> float:
    """Seconds per read, by how often each source is drawn."""
    return sum(source.weight * source.latency_s for source in sources)


@dataclass
class Window:
    """What one rank saw of a stretch of the measured steps."""

    elapsed_s: float
    own_cpu_s: float
    """Of a core, that this rank took and what it started."""
    busy_cpu_s: float
    """That all programs of this machine took."""
    stock: int
    """Steps that had been loaded ahead."""
    wait_s: float = 0.0
    compute_s: list[float] = field(default_factory=list)
    """Per step."""
    tokens: int = 0
    cells: int = 0
    """With padding."""

    @classmethod
    def now(cls, feed: Feed) -> Window:
        """What the clocks say; the difference of two is a stretch."""
        here = psutil.Process()
        own_s = 0.0
        for process in (here, *here.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                own_s += sum(process.cpu_times()[:2])
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        # What guests take is counted as the user's, too.
        guest_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        stock = feed.stock() if dist.get_rank() == 0 else 0
        return cls(time.perf_counter(), own_s, sum(times) - idle_s - guest_s, stock)

    def end(self, now: Window) -> None:
        """Turn what the clocks said at the beginning into what passed."""
        self.elapsed_s = now.elapsed_s - self.elapsed_s
        self.own_cpu_s = now.own_cpu_s - self.own_cpu_s
        self.busy_cpu_s = now.busy_cpu_s - self.busy_cpu_s
        self.stock = now.stock - self.stock


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
        self, feed: Feed, span: Span, began: float, labels: dict[str, int]
    ) -> list[list[tuple[int, int, int]]]:
        """Train on all batches; returns the samples of each step, with the marks of what came.

        Args:
            feed: the batches of this rank.
            span: which of the steps are measured.
            began: when the loader was asked for, as time.perf_counter() tells it.
            labels: of what is measured.
        """
        seen: list[list[tuple[int, int, int]]] = []
        losses: list[float] = []
        stretches: list[Window] = []
        stretch = span.measured // STRETCHES
        coming = iter(self.prof.watch(feed.batches))
        for step in range(sys.maxsize):
            measured = step - span.warmup
            if measured % stretch == 0 and 0 <= measured <= span.measured:
                dist.barrier()
                now = Window.now(feed)
                if stretches:
                    stretches[-1].end(now)
                if measured < span.measured:
                    stretches.append(replace(now))
                else:
                    self.report(stretches, self.memory(), losses[:8], labels)
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
            if 0 <= measured < span.measured:
                here = stretches[-1]
                here.wait_s += waited_s
                here.compute_s.append(compute_s)
                here.tokens += sum(map(sum, batch.documents))
                here.cells += batch.tokens.size
            if self.args.fault == "killed-loader" and measured == span.measured // 2:
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

    def report(
        self,
        stretches: list[Window],
        memory: dict[str, int],
        losses: list[float],
        labels: dict[str, int],
    ) -> None:
        """Join what all ranks saw; rank 0 keeps it."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (stretches, memory, losses))
        if dist.get_rank():
            return
        for repetition, windows in enumerate(zip(*(seen for seen, _, _ in gathered), strict=True)):
            for name, value in rates(windows, self.args.batch).items():
                self.prof.measure(name, value, **labels, repetition=repetition)
        roles: Counter[str] = Counter()
        for _, of_rank, _ in gathered:
            roles.update(of_rank)
        self.prof.measure("loader_memory_bytes", sum(roles.values()), **labels)
        first = float(np.mean([losses for _, _, losses in gathered]))
        self.prof.measure("first_loss", first, **labels)
        for role, value in {} if labels else roles.items():
            self.prof.measure("memory_bytes", value, of=role)


def rates(windows: Sequence[Window], batch: int) -> dict[str, float]:
    """What a stretch says, by all ranks' windows of it."""
    elapsed_s = max(w.elapsed_s for w in windows)
    compute_s = np.array([w.compute_s for w in windows])
    ranks, steps = compute_s.shape
    # What had been loaded before the stretch and was used up in it does not count.
    loaded = max(0, steps + min(0, windows[0].stock))
    others_s = windows[0].busy_cpu_s - sum(w.own_cpu_s for w in windows)
    tokens, cells = sum(w.tokens for w in windows), sum(w.cells for w in windows)
    return {
        "samples_per_s": loaded * ranks * batch / elapsed_s,
        "tokens_per_s": loaded / steps * tokens / elapsed_s,
        "data_wait_ratio": statistics.fmean(w.wait_s / w.elapsed_s for w in windows),
        "compute_imbalance_ratio": float(np.mean(compute_s.max(0) / compute_s.mean(0))),
        "slowest_rank_ns": float(compute_s.max(0).mean()) * 1e9,
        "padding_ratio": 1 - tokens / cells,
        # Clock ticks of many processes: a little less than nothing is nothing.
        "other_programs_ratio": max(0.0, others_s / elapsed_s / (psutil.cpu_count() or 1)),
    }


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
    seen: list[list[tuple[int, int, int]]],
    steps: int,
    prof: chopper.Profile,
    labels: dict[str, int],
) -> None:
    """Whether the ranks together saw each planned sample once, by what it holds, and a digest to
    compare with. A sample of which something else came is lost.
    """
    ranks = dist.get_world_size()
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, seen)
    if dist.get_rank():
        return
    plan, contents = plans(args, sources, ranks), Contents(sources)
    uneven, lost, twice = [], 0, 0
    sections: dict[int, Any] = {}
    for at in range(steps):
        step = args.first + at
        planned = plan.plan(step)
        items = zip(planned.source.tolist(), planned.index.tolist(), strict=True)
        wanted = Counter(contents.marked(items))
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
