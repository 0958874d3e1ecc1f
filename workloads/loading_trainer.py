"""One rank of the workload ``dataloader``: its model, batches, training and measures."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import chopper
from chopper.errors import ChopperError
from chopper.workloads import disaggregated as actors
from chopper.workloads.loading import (
    LONGER,
    WITH_ACTORS,
    Span,
    Turn,
    row_width,
    setup_of,
    workers_of,
)
from chopper.workloads.planning import (
    METHODS,
    Batch,
    Draw,
    Planner,
    balance,
    batch_of,
    cost_of,
    imbalance,
    loads,
)
from chopper.workloads.ranks import Progress
from chopper.workloads.sources import (
    READ_TIMEOUT_S,
    VOCABULARY,
    OpenSources,
    without_latency,
)
from chopper.workloads.torch_loading import ConcurrentDocuments, Documents, torch_batches

ACTORS = ("SourceLoader", "PlannerActor", "DataConstructor")
GROWTH = "trainers' growth"
_WARMUP_BATCHES = 3
_PROBED_BATCHES = 20
SECTION_STEPS = 32
Marked = tuple[int, int, int]
"""A sample and the mark of what came."""


class Decoder(nn.Module):
    """One block of a transformer; no document of a row sees another one."""

    def __init__(self, width: int, longest: int, vocabulary: int) -> None:
        super().__init__()
        self.heads = max(1, width // 32)
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(longest, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, places: Tensor, documents: list[list[int]]) -> Tensor:
        """Logits [rows, length, vocabulary] of tokens and their places, both [rows, length]."""
        x = self.tokens(tokens) + self.places(places)
        qkv = self.qkv(F.layer_norm(x, x.shape[-1:]))
        qkv = qkv.view(*tokens.shape, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(qkv, documents).transpose(1, 2).reshape(x.shape))
        x = x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:]))))
        logits: Tensor = self.head(F.layer_norm(x, x.shape[-1:]))
        return logits

    def attend(self, qkv: Tensor, documents: list[list[int]]) -> Tensor:
        """[rows, heads, length, head] from [3, rows, heads, length, head]."""
        if all(len(row) == 1 for row in documents):
            # Padding lies behind the only document, where causal attention does not look.
            return F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        rows = []
        for row, lengths in enumerate(documents):
            rest = qkv.shape[3] - sum(lengths)
            *parts, padding = qkv[:, row : row + 1].split([*lengths, rest], dim=3)
            done = [F.scaled_dot_product_attention(p[0], p[1], p[2], is_causal=True) for p in parts]
            rows.append(torch.cat([*done, padding[2]], dim=2))
        return torch.cat(rows)


def loss_of(model: nn.Module, batch: Batch, ranks: int, device: torch.device) -> Tensor:
    """Loss per token of the step: a rank's sum, so scaled that the mean over ranks is right."""
    arrays = (batch.tokens.astype(np.int64), batch.places(), batch.targets())
    tokens, where, wanted = (torch.from_numpy(a).to(device, non_blocking=True) for a in arrays)
    logits = model(tokens, where, batch.documents)
    summed = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
    # DistributedDataParallel takes the mean over ranks.
    return summed * ranks / batch.step_tokens


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
    setup = setup_of(args, draw, str(turn.repetition), list(ranks_of.items()))
    started = actors.start_actors(setup) if rank == 0 else None
    dist.barrier()
    constructors = [actors.constructor(setup, ranks[0]) for ranks in ranks_of.values()]
    reader = rank - rank % args.tensor
    batches: Iterator[Batch] = iter(())
    if reader == rank:
        batches = actors.batches(
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
        yield Feed(broadcast(batches, reader, args.tensor, turn.steps), loaded)
    except ChopperError:
        if started is not None:
            stop(started)
        raise
    dist.barrier()
    if started is not None:
        stop(started)
    dist.barrier()


def broadcast(batches: Iterator[Batch], reader: int, ranks: int, steps: int) -> Iterator[Batch]:
    """Give what one rank reads to all of its tensor-parallel group: they need the same."""
    if ranks == 1:
        return batches
    groups = [
        dist.new_group(list(range(first, first + ranks)))
        for first in range(0, dist.get_world_size(), ranks)
    ]
    return _broadcast(batches, reader, groups[reader // ranks], steps)


def _broadcast(batches: Iterator[Batch], reader: int, group: Any, steps: int) -> Iterator[Batch]:
    for _ in range(steps):
        held = [next(batches) if dist.get_rank() == reader else None]
        dist.broadcast_object_list(held, src=reader, group=group)
        assert held[0] is not None
        yield held[0]


def stop(started: Sequence[Any]) -> None:
    """End the actors, and wait for those of this machine: the next ones are measured alone."""
    actors.stop_actors(started)
    here = [p for p in psutil.Process().children(recursive=True) if role_of(p) in ACTORS]
    psutil.wait_procs(here, timeout=10)


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
        """Read the clocks and the count of loaded samples; two readings delimit a window."""
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
    machine_s = elapsed_s * (psutil.cpu_count() or 1)
    tokens, cells = sum(w.tokens for w in windows), sum(w.cells for w in windows)
    return {
        "samples_per_s": samples / elapsed_s,
        "tokens_per_s": samples / trained * tokens / elapsed_s,
        "data_wait_ratio": statistics.fmean(w.wait_s / w.elapsed_s for w in windows),
        "compute_imbalance_ratio": float(np.mean(compute_s.max(0) / compute_s.mean(0))),
        "slowest_rank_ns": float(compute_s.max(0).mean()) * 1e9,
        "padding_ratio": 1 - tokens / cells,
        # Clock ticks of many processes: a little less than nothing is nothing.
        "other_programs_ratio": max(0.0, (windows[0].busy_cpu_s - own_cpu_s) / machine_s),
        "own_programs_ratio": own_cpu_s / machine_s,
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
        samples: list[list[Marked]] = []
        losses: list[float] = []
        window: Window | None = None
        batches = iter(self.prof.watch(feed.batches))
        for step in itertools.count():
            measured = step - span.warmup
            if measured == 0:
                window = self.now(feed, step)
            if measured == span.measured and window is not None:
                window.end(self.now(feed, step))
                self.report(window, self.memory(), losses[:8], labels)
                window = None
            asked_s = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            waited_s = time.perf_counter() - asked_s
            if step == 0:
                self.prof.measure("first_batch_ns", (time.perf_counter() - began) * 1e9, **labels)
            compute_s, loss = self.step(batch)
            samples.append(batch.marked())
            losses.append(loss)
            if window is not None:
                window.add(batch, waited_s, compute_s)
            self.prof.step()
            self.progress.advance()
        return samples

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
        """Return the proportional set size of this rank's loading processes, by role."""
        out: Counter[str] = Counter()
        for child in psutil.Process().children(recursive=True):
            if child.pid not in self.others and (held := memory_bytes([child.pid])) > 0:
                out[role_of(child)] += held
        # Forked workers share pages with their rank: what these count, it no longer does.
        growth = GROWTH if self.args.variant in WITH_ACTORS else "workers"
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
        windows = [of_window for of_window, _, _ in gathered]
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
        for role, value in roles.items():
            # Trainers may shrink: a difference.
            name = "memory_growth_bytes" if role == GROWTH else "memory_bytes"
            self.prof.measure(name, value, of=role, **labels)
        if labels["repetition"] == 0:
            first = float(np.mean([losses for _, _, losses in gathered]))
            self.prof.measure("first_loss", first)


class Checked:
    """Checks that the ranks together saw each planned sample once, by the marks of what came."""

    def __init__(self, args: argparse.Namespace, prof: chopper.Profile) -> None:
        self._args, self._prof = args, prof
        self._sections: dict[int, list[str]] = {}
        self._lost = self._twice = 0

    def add(
        self, draw: Draw, first: int, received: list[list[Marked]], labels: dict[str, int]
    ) -> None:
        """Take in the samples of each step from ``first`` on, on this rank."""
        planner, contents = Planner(draw), without_latency(draw.sources)
        plans = [planner.plan(first + at) for at in range(len(received))]
        # Each rank makes again what it should have been given.
        rank, tensor = divmod(dist.get_rank(), self._args.tensor)
        wanted = [contents.marked(plan.of(rank)) for plan in plans]
        gathered: list[Any] = [None] * dist.get_world_size()
        # The ranks of a tensor-parallel group train on the same.
        dist.all_gather_object(gathered, None if tensor else (wanted, received))
        gathered = [held for held in gathered if held is not None]
        if dist.get_rank():
            return
        lost = twice = 0
        for at in range(len(received)):
            should = Counter(sample for expected, _ in gathered for sample in expected[at])
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
        sections = [s for s, steps in sorted(self._sections.items()) if len(steps) == SECTION_STEPS]
        for section in sections:
            digest = hashlib.sha256("".join(self._sections[section]).encode()).hexdigest()[:16]
            first = section * SECTION_STEPS
            print(f"samples of steps {first:4d} to {first + SECTION_STEPS - 1:4d}: {digest}")
        print(
            f"{self._args.variant}: {self._lost} samples lost, {self._twice} duplicated", flush=True
        )


def latency_of_a_batch(args: argparse.Namespace, draw: Draw, prof: chopper.Profile) -> None:
    """Measure what disaggregation costs: the same batches by actors and in this process."""
    if dist.get_rank() == 0:
        setup = setup_of(args, draw, "probe", [(actors.this_node(), [0])])
        setup = replace(setup, prefetch=1, tensor=1)
        # While the first are read, actors are still opening sources and starting threads.
        probes = _WARMUP_BATCHES + _PROBED_BATCHES
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
                prof.measure(
                    "batch_latency_ns", batch_s * 1e9, reader=reader, repetition=repetition
                )
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
            batch_of(samples, read, width=row_width(args))
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
