"""Sources, plans, actors and steps that the options of the workload ``dataloader`` describe."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from chopper.engines.ray_cluster import PREFIX, LoaderError, answers, load_ray
from chopper.errors import ChopperError, InputError, UsageError
from chopper.experiments.declarations import Needs
from chopper.workloads.disaggregated import Setup
from chopper.workloads.object_store import object_store
from chopper.workloads.planning import Draw, cost_of
from chopper.workloads.sources import VOCABULARY, SourceSpec, write_sources

WITH_ACTORS = ("disaggregated", "balanced")
LONGER = 4
"""Documents that balancing is measured on are so many times as long as those that are loaded: of
short ones, what is computed hardly depends on who gets which."""
_ALLOWED = (
    ("sources", 1, 4096, "at most 4096"),
    ("longest", 8, 1 << 20, "a document has at least 8 tokens, and at most a million"),
    ("latency", 0, 2000, "the slowest reads would exceed their timeout"),
    ("threads", 1, 4096, "a loader actor has at most 4096; increase --loaders"),
    ("prefetch", 1, 1024, "at most 1024 steps are loaded ahead"),
    ("state", 1, 1000, "at most 1000 MB"),
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
    if args.loaders > args.sources:
        raise UsageError(
            f"--loaders {args.loaders}: at most one for each of {args.sources} sources"
        )
    if ranks % args.tensor:
        raise UsageError(f"--tensor {args.tensor}: expected a divisor of the {ranks} ranks")
    variants = getattr(args, "variants", None) or (args.variant,)
    with_actors = bool(set(variants) & set(WITH_ACTORS))
    state, longest = args.sources * args.state * 1_000_000, args.longest
    try:
        if with_actors:
            load_ray()
            if args.address is not None:
                answers(args.address)
    except LoaderError as exc:
        raise ValueError(f"{exc}; or without: --variants loader,tuned,concurrent") from exc
    except ChopperError as exc:
        raise ValueError(str(exc)) from exc
    workers = max(workers_of(variant, args) for variant in variants)
    shared = (state + _RAY_BYTES) // ranks if with_actors else 0
    trained = training_bytes(args.width, longest, args.batch)
    if "balanced" in variants:
        trained = max(trained, training_bytes(2 * args.width, LONGER * longest, 1))
    loading = max(workers * (state + _WORKER_BYTES), shared)
    each = f"{workers} workers in each of {ranks} ranks, with"
    what = (
        f"{each if workers else 'loader actors, with'} {args.sources} sources of "
        f"{args.state} MB "
        f"open in {'each worker' if workers else 'one of them each'},"
    )
    remedy = "choose a smaller --state or fewer workers, or select fewer --variants"
    if trained > loading:
        what = (
            f"training a model of --width {args.width} on {args.batch} documents of --longest "
            f"{longest} tokens"
        )
        remedy = "choose smaller ones"
    needed = loading + trained + _RANK_BYTES
    return Needs(memory_bytes=needed, what=what, remedy=remedy)


def training_bytes(width: int, longest: int, rows: int) -> int:
    """Bytes of weights, gradients, a bucket of them, two moments, and activations of full rows."""
    weights = 12 * width * width + 2 * VOCABULARY * width + longest * width
    return 4 * (5 * weights + rows * longest * (60 * width + 4 * VOCABULARY))


def workers_of(variant: str, args: argparse.Namespace) -> int:
    """Worker processes of each rank."""
    workers: int = args.tuned if variant == "tuned" else args.workers
    return 0 if variant in WITH_ACTORS else workers


@contextlib.contextmanager
def written_sources(args: argparse.Namespace) -> Iterator[tuple[SourceSpec, ...]]:
    """Write the sources to disk, and serve them; they are removed when the block ends.

    Raises:
        InputError: there is no space.
    """
    # Named as Ray's directories are: what is left of a run that was killed goes with these.
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    try:
        try:
            specs = write_sources(
                folder,
                count=args.sources,
                state_bytes=args.state * 1_000_000,
                latency_s=1.0,
                tokens=args.tokens,
                longest=args.longest,
                seed=args.seed,
                modality=args.modality,
            )
        except OSError as exc:
            raise InputError(f"{folder}: no sources can be written there ({exc.strerror})") from exc
        # What writing took is no memory of a loader's.
        pa.default_memory_pool().release_unused()
        with object_store(folder, args.rate) as port:
            yield tuple(replace(spec, storage=port) for spec in specs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def draw_of(
    args: argparse.Namespace,
    sources: Sequence[SourceSpec],
    ranks: int,
    latency_ms: int | None = None,
) -> Draw:
    """Return what the options say is drawn from ``sources``, and for whom.

    With ``latency_ms`` from the disk, each read after that time: no storage is asked.
    """
    latency_s = (args.latency if latency_ms is None else latency_ms) / 1e3
    return Draw(
        sources=tuple(
            replace(
                s,
                latency_s=s.latency_s * latency_s,
                storage=s.storage if latency_ms is None else None,
            )
            for s in sources
        ),
        batch=args.batch,
        ranks=ranks // args.tensor,
        seed=args.seed,
        cost=cost_of(args.width, VOCABULARY),
        method=args.balance if args.variant == "balanced" else "random",
    )


class Span(NamedTuple):
    """Steps of a loader's life: not measured, measured, and, of the last one, traced."""

    warmup: int
    measured: int
    traced: int


def span_of(args: argparse.Namespace) -> Span:
    """Count the steps of a loader: warm-up, measured in full rounds, traced.

    A DataLoader hands batches out in order and asks a worker for another one when it does, so a
    round of batches comes at once. The first batch of each worker, and the stock that actors begin
    with, do not say how fast the rest comes.
    """
    workers = workers_of(args.variant, args)
    if not workers:
        return Span(args.prefetch, 6 * args.steps, args.steps)
    # Reading a batch at once, a round takes as long as its slowest read.
    rounds = math.ceil(args.steps / workers) * (2 if args.variant == "concurrent" else 1)
    # A comparison goes by steps, and a round's long one has to come more than once.
    return Span(workers, rounds * workers, 2 * math.ceil(args.steps / workers) * workers)


@dataclass(frozen=True, slots=True)
class Turn:
    """A loader's life: it is started, measured and ended."""

    repetition: int
    first: int
    """Step that it begins with: that before which the last one ended, as after a restart."""
    steps: int


def turns(args: argparse.Namespace) -> list[Turn]:
    """All loaders of a run, one after the other; the last one's steps are traced in the end."""
    span = span_of(args)
    steps = span.warmup + span.measured
    return [
        Turn(
            repetition,
            first=args.first + repetition * steps,
            steps=steps + (span.traced if repetition == args.repetitions - 1 else 0),
        )
        for repetition in range(args.repetitions)
    ]


def setup_of(
    args: argparse.Namespace, draw: Draw, name: str, nodes: Sequence[tuple[str, Sequence[int]]]
) -> Setup:
    """Setup that the actors are given, of trainers on these nodes."""
    return Setup(
        name=name,
        draw=draw,
        width=row_width(args),
        loaders=args.loaders,
        most_loaders=args.most,
        threads=args.threads,
        prefetch=args.prefetch,
        nodes=tuple((node, tuple(ranks)) for node, ranks in nodes),
        tensor=args.tensor,
    )


def row_width(args: argparse.Namespace) -> int | None:
    """Tokens of a row; None: a row for each document, as long as the longest."""
    return args.longest if args.rows == "packed" else None
