"""Train with FSDP2 over a link of a chosen rate: two hosts in miniature, with real sockets.

    chopper bench interconnect
    chopper bench interconnect --variants unshaped,100mbit -- --steps 12

Each of the two ranks lives in a network namespace of its own; a veth pair joins them, and a token
bucket (``tc tbf``) lets each end send at the variant's rate. Needs root. The kernel removes
namespaces, link and queue with the last process in them, however it ends.

The step should take T = T_c + V / B: the time without a link's limit, and the bytes that a rank
sends over the link's rate. What each rank sent is counted by the kernel; what a ring would have to
send follows from the sizes alone. Gloo sends more: it reduces and scatters by an all-reduce, of
which each rank keeps its part.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import chopper
from chopper.errors import UsageError
from chopper.experiments.declarations import CHANNEL, Needs, Variant, Workload, as_program, changed
from chopper.experiments.results import Experiment, Fit, Headline
from chopper.workloads import link, training

if TYPE_CHECKING:
    from torch import nn

WORKLOAD = Workload(
    name="interconnect",
    chosen="so that a link of 100 Mbit/s, not the cores, takes most of a step",
    summary="fsdp2 over a link of several rates between two network namespaces: the step "
    "time as T = T_c + V/B, and the exposed communication behind it",
    options=(
        *(
            option
            for option in changed(training.OPTIONS, steps=5, batch=2)
            if option.name != "allocations"
        ),
        CHANNEL,
    ),
    linked=True,
    variants=(
        Variant("unshaped", "not limited: as fast as the kernel copies"),
        Variant("1gbit", "each end sends at most 125 MB/s"),
        Variant("300mbit", "each end sends at most 37.5 MB/s", default=False),
        Variant("100mbit", "each end sends at most 12.5 MB/s"),
    ),
    baseline="unshaped",
    repeats=3,
    seconds=105,
    position=4,
)

RANKS = 2
TRACED = (1, 6)


def needs(args: argparse.Namespace, ranks: int, device: str) -> Needs:
    """Memory of one rank; beside it a namespace for each, and a link between them."""
    if ranks != RANKS:
        raise UsageError(f"--ranks {ranks}: a link has two ends: use {RANKS} ranks")
    if device != "cpu":
        raise UsageError("--device cuda: NCCL would not use the link; it takes --device cpu")
    reason = link.unavailable()
    if reason is not None:
        raise ValueError(f"{reason}; the model alone: chopper estimate network")
    return training.needs(args, ranks, device)


def main() -> None:
    """Join the other rank over the link, train, leave."""
    import torch.distributed as dist

    from chopper.workloads.fsdp2 import sharded_model
    from chopper.workloads.ranks import joined

    args = WORKLOAD.parse()
    if args.channel is None:
        raise SystemExit(
            "interconnect: no link was created; start it with `chopper bench interconnect`"
        )
    link.enter(args.channel, link.RATES[args.variant])
    with joined(args.device, prog="interconnect") as device:
        model, optimizer = sharded_model(args, device)
        dist.barrier()
        # A step over the slowest link takes seconds, so there are few: all but the first.
        with chopper.profile(args.output, steps=TRACED if args.steps > 1 else (0, 1)) as prof:
            before = sent_bytes()
            training.train(prof, model, optimizer, args, device)
            rate = link.RATES[args.variant]
            if rate is not None:
                prof.measure("link_bytes_per_s", rate / 8)
            prof.measure("sent_bytes", (sent_bytes() - before) / args.steps)
            prof.measure("ring_bytes", ring_bytes(model, RANKS))
            prof.measure("gloo_bytes", ring_bytes(model, RANKS, reductions=2))


def sent_bytes() -> int:
    """Bytes that this namespace's end of the link has sent, headers included."""
    # Not from /sys/class/net: that shows the namespace in which it was mounted.
    for entry in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = entry.partition(":")
        if name.strip() == link.INTERFACE:
            return int(counters.split()[8])
    raise OSError(f"{link.INTERFACE}: no such interface in this namespace")


def ring_bytes(model: nn.Module, ranks: int, *, reductions: int = 1) -> float:
    """Bytes that each rank of a ring sends per step of this sharding.

    Weights are gathered for forward, those of the blocks again for backward, gradients reduced and
    scattered: (n − 1) / n of the whole each, twice that by an all-reduce.
    """
    weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    blocks_bytes = sum(
        p.numel() * p.element_size() for name, p in model.named_parameters() if "layers." in name
    )
    return (ranks - 1) / ranks * ((1 + reductions) * weights_bytes + blocks_bytes)


class _Law(NamedTuple):
    """T = T_c + V/B through the repetitions of all variants."""

    points: dict[str, list[tuple[float, float]]]
    """Variant → 1/B in s per MB, and T in s, of each repetition; 0 for a link without a limit."""
    fixed_s: float
    volume_mb: float
    ci95: tuple[float, float] | None
    r2: float


def _law(experiment: Experiment) -> _Law | None:
    """Fit the law; None with fewer than three rates."""
    from chopper.statistics import line

    points: dict[str, list[tuple[float, float]]] = {}
    for variant in experiment.variants:
        step = experiment.find("median_step_ns", variant)
        rate = experiment.value("link_bytes_per_s", variant)
        if step is not None:
            s_per_mb = 1e6 / rate if rate else 0.0
            points[variant] = [(s_per_mb, time_ns / 1e9) for time_ns in step.values]
    x, y = zip(*chain(*points.values()), strict=True) if points else ((), ())
    return _Law(points, *line(x, y)) if len({*x}) >= 3 else None


def fits(experiment: Experiment) -> Iterator[Fit]:
    """Draw the step time over 1/B, and the line through it."""
    law = _law(experiment)
    if law is not None:
        yield Fit(
            title="Step time over 1/B: T = T_c + V/B",
            x="1/B: s per MB that an end of the link may send, 0 without a limit",
            y="median step",
            unit="s",
            points=law.points,
            law=f"T = {law.fixed_s:.2f} s + {law.volume_mb:.1f} MB / B, R² {law.r2:.4f}",
            intercept=law.fixed_s,
            slope=law.volume_mb,
        )


def headlines(experiment: Experiment) -> Iterator[Headline]:
    """Give the volume of the law T = T_c + V/B, and the same law at the published rates."""
    law = _law(experiment)
    if law is not None:
        counted = [
            f"{what} {size / 1e6:.1f} MB"
            for what, name in (
                ("sent, as the kernel counts it,", "sent_bytes"),
                ("a ring's", "ring_bytes"),
                ("a ring's that reduces and scatters by all-reduce, as gloo does,", "gloo_bytes"),
            )
            if (size := experiment.value(name, experiment.variants[-1])) is not None
        ]
        yield Headline(
            system="Interconnect",
            claim="bytes per step and rank from the fit T = T_c + V/B",
            unit="MB",
            ours=law.volume_mb,
            least=0.0,
            bound="a slower link sends no bytes back",
            ci95=law.ci95,
            configuration=f"T_c {law.fixed_s:.2f} s, R² {law.r2:.4f}; " + "; ".join(counted),
        )
    slowest, fastest = experiment.variants[-1], experiment.variants[0]
    slower = experiment.ratio("median_step_ns", slowest, fastest)
    if slower is not None and slowest != fastest:
        yield Headline.of(
            slower,
            system="Interconnect",
            claim=f"step over {slowest} against {fastest}",
            least=1.0,
            bound="the same step takes no less over a slower link",
            configuration="of this model's computation and bytes: no other model's factor",
        )
    yield from model()


def model() -> Iterator[Headline]:
    """Calculate the published rows by T = T_c + V/B, which needs no measurement."""
    # n = 16 ranks, 12e9 weights of 2 bytes, all-reduced by a ring; T_c from the faster row.
    volume_bytes = 2 * 15 / 16 * 2 * 12e9
    assumed = "two nodes of 8, bf16 gradients all-reduced by a ring, no overlap"
    for bytes_per_s, published, stated_s, chosen in (
        (1.25e9, "39.8 s/step over 10 GbE", 39.8, "in T_c to fit the row of 4.4 s"),
        (400e9, "4.4 s/step over 8 × 400 Gb/s", 4.4, "in T_c to fit this row"),
    ):
        yield Headline(
            system="Interconnect",
            claim=f"12B fine-tune at {bytes_per_s / 1e9:g} GB/s by T = 4.29 s + 45 GB / B",
            published=published,
            unit="s",
            basis="model",
            timed=False,
            ours=4.29 + volume_bytes / bytes_per_s,
            stated=stated_s,
            by_choice=chosen.endswith("this row"),
            configuration=f"assuming {assumed}",
            chosen=chosen,
        )


if __name__ == "__main__":
    as_program(main)
