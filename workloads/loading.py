"""Sources, plans, actors and steps that the options of the workload ``dataloader`` describe."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import NamedTuple

from chopper.engines.ray_cluster import LoaderError, answers, load_ray
from chopper.errors import ChopperError, UsageError
from chopper.experiments.declarations import Needs
from chopper.workloads.decoder import cost_of
from chopper.workloads.disaggregated import Setup
from chopper.workloads.mixture import VOCABULARY, make_sources
from chopper.workloads.planning import Draw, Limits, Planner

WITH_ACTORS = ("disaggregated", "balanced")
SWEEP_MS = (1, 5, 20, 50, 100, 200)
"""And --latency, whose steps are traced."""
LONGER = 4
"""Documents that balancing is measured on are so many times as long as those that are loaded: of
short ones, what is computed hardly depends on who gets which."""
_ALLOWED = (
    ("sources", 1, 4096, "at most 4096"),
    ("longest", 8, 1 << 20, "a document has at least 8 tokens, and at most a million"),
    ("latency", 1, 2000, "the slowest reads would exceed their timeout"),
    ("threads", 1, 4096, "a loader actor has at most 4096; increase --loaders"),
    ("prefetch", 1, 1024, "at most 1024 steps are loaded ahead"),
    ("documents", 1, 10**12, "in each source; at most 1e12"),
    ("first", 0, 1_000_000, "planning all steps before it would take minutes; at most a million"),
)
_WORKER_BYTES = 20_000_000
_RANK_BYTES = 600_000_000
_RAY_BYTES = 800_000_000


def needs(args: argparse.Namespace, ranks: int, _device: str) -> Needs:
    """Memory of the largest variant, with the state of all sources in each worker of each rank."""
    for name, least, most, why in _ALLOWED:
        if not least <= getattr(args, name) <= most:
            raise UsageError(f"--{name} {getattr(args, name)}: {why}")
    if args.width > 32 and args.width % 32:
        raise UsageError(f"--width {args.width}: heads have 32 elements: choose a multiple of 32")
    variants = getattr(args, "variants", None) or (args.variant,)
    with_actors = bool(set(variants) & set(WITH_ACTORS))
    if args.fault == "killed-loader" and not with_actors:
        raise UsageError(
            "--fault killed-loader: applies to loader actors only: use --variants balanced"
        )
    draw = draw_of(args, ranks)
    try:
        Planner(draw)
        if with_actors:
            load_ray()
            if args.address is not None:
                answers(args.address)
    except LoaderError as exc:
        raise ValueError(f"{exc}; or without: --variants loader,tuned,concurrent") from exc
    except ChopperError as exc:
        raise ValueError(str(exc)) from exc
    state = sum(source.state_bytes for source in draw.sources)
    workers = max(workers_of(variant, args) for variant in variants)
    shared = (state + _RAY_BYTES) // ranks if with_actors else 0
    trained = training_bytes(args.width, args.longest, args.batch)
    if "balanced" in variants:
        trained = max(trained, training_bytes(2 * args.width, LONGER * args.longest, 1))
    loading = max(workers * (state + _WORKER_BYTES), shared)
    each = f"{workers} workers in each of {ranks} ranks, with"
    what = (
        f"{each if workers else 'loader actors, with'} {args.sources} sources of {args.state} MB "
        f"open in {'each worker' if workers else 'one of them each'},"
    )
    remedy = "choose a smaller --state or fewer workers, or select fewer --variants"
    if trained > loading:
        what = (
            f"training a model of --width {args.width} on {args.batch} documents of --longest "
            f"{args.longest} tokens"
        )
        remedy = "choose smaller ones"
    return Needs(memory_bytes=loading + trained + _RANK_BYTES, what=what, remedy=remedy)


def training_bytes(width: int, longest: int, rows: int) -> int:
    """Bytes of weights, gradients, a bucket of them, two moments, and activations of full rows."""
    weights = 12 * width * width + 2 * VOCABULARY * width + longest * width
    return 4 * (5 * weights + rows * longest * (60 * width + 4 * VOCABULARY))


def workers_of(variant: str, args: argparse.Namespace) -> int:
    """Worker processes of each rank."""
    workers: int = args.tuned if variant == "tuned" else args.workers
    return 0 if variant in WITH_ACTORS else workers


def draw_of(args: argparse.Namespace, ranks: int, latency_ms: int | None = None) -> Draw:
    """Return what the options say is drawn from, and for whom."""
    sources = make_sources(
        count=args.sources,
        state_bytes=args.state * 1_000_000,
        latency_s=(latency_ms or args.latency) / 1e3,
        documents=args.documents,
        tokens=args.tokens,
        longest=args.longest,
        seed=args.seed,
        fault=args.fault,
    )
    return Draw(
        sources=sources,
        batch=args.batch,
        ranks=ranks,
        seed=args.seed,
        cost=cost_of(args.width, VOCABULARY),
        method=args.balance if args.variant == "balanced" else "random",
        ramp=args.ramp,
    )


class Span(NamedTuple):
    """Steps of a loader's life: not measured, measured, and, of the last one, traced."""

    warmup: int
    measured: int
    traced: int


def span_of(args: argparse.Namespace) -> Span:
    """Count the steps of what loads; what is measured is whole rounds.

    A DataLoader hands batches out in order and asks a worker for another one when it does, so a
    round of batches comes at once. The first batch of each worker, and the stock that actors begin
    with, do not say how fast the rest comes.
    """
    workers = workers_of(args.variant, args)
    if not workers:
        return Span(args.prefetch, 6 * args.steps, args.steps)
    # Reading a batch at once, a round takes as long as its slowest read.
    rounds = math.ceil(args.steps / workers) * (3 if args.variant == "concurrent" else 1)
    # A comparison goes by steps, and a round's long one has to come more than once.
    return Span(workers, rounds * workers, 2 * math.ceil(args.steps / workers) * workers)


@dataclass(frozen=True, slots=True)
class Turn:
    """A loader's life: it is started, measured and ended."""

    number: int
    latency_ms: int
    repetition: int
    first: int
    """Step that it begins with: that before which the last one ended, as after a restart."""
    steps: int

    def labels(self, args: argparse.Namespace) -> dict[str, int]:
        """Labels of its measures."""
        swept = {"latency_ms": self.latency_ms} if args.sweep != "none" else {}
        return {**swept, "repetition": self.repetition}


def turns(args: argparse.Namespace) -> list[Turn]:
    """All loaders of a run, one after the other; the last one's steps are traced in the end."""
    span = span_of(args)
    steps = span.warmup + span.measured
    todo = [(ms, repetition) for ms in points(args) for repetition in range(args.repetitions)]
    return [
        Turn(
            number,
            latency_ms,
            repetition,
            first=args.first + repetition * steps,
            steps=steps + (span.traced if number == len(todo) else 0),
        )
        for number, (latency_ms, repetition) in enumerate(todo, 1)
    ]


def points(args: argparse.Namespace) -> list[int]:
    """Storage latencies to measure at, in ms: that of the option comes last, and is traced."""
    swept = SWEEP_MS if args.sweep == "latency" else ()
    return [*(ms for ms in swept if ms != args.latency), args.latency]


def setup_of(args: argparse.Namespace, draw: Draw, name: str) -> Setup:
    """Setup that the actors are given."""
    return Setup(
        name=name,
        draw=draw,
        width=args.longest,
        loaders=min(args.loaders, args.sources),
        limits=Limits(
            threads=args.threads,
            memory_bytes=8 << 30,
            most=max(args.most, args.loaders),
            least=args.loaders,
        ),
        prefetch=args.prefetch,
    )
