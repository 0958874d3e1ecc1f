"""Sizes of a sweep, its memory, and the facts that its headlines name."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from chopper.errors import UsageError
from chopper.experiments.declarations import Needs

if TYPE_CHECKING:
    from chopper.experiments.results import Experiment


def needs(args: argparse.Namespace, _ranks: int, _device: str) -> Needs:
    """Three arrays of the largest size: of STREAM's kernels, or sent, received and staged."""
    if args.smallest > args.largest:
        raise UsageError(f"--smallest {args.smallest} is larger than --largest {args.largest}")
    if args.factor < 2:
        raise UsageError(f"--factor {args.factor}: sizes must grow: choose 2 or more")
    return Needs(
        memory_bytes=3 * args.largest,
        what=f"--largest {args.largest}",
        remedy="choose a smaller --largest",
    )


def sizes(args: argparse.Namespace, quantum: int) -> Iterator[int]:
    """Bytes from the smallest to the largest, each rounded up to whole quanta."""
    size = args.smallest
    while size <= args.largest:
        yield -(-size // quantum) * quantum
        size *= args.factor


def largest(experiment: Experiment, measure: str, label: str) -> int | None:
    """The largest size that a measure has."""
    found = [int(dict(row.labels)[label]) for row in experiment.rows if row.measure == measure]
    return max(found, default=None)


def mib(size_bytes: int) -> str:
    """A size in MiB, in words."""
    return f"{size_bytes / (1 << 20):g} MiB"


def clock_and_power(experiment: Experiment) -> str:
    """Clock and power on zeros over those on random numbers, in words."""
    ratios = [(what, experiment.ratio(name, "zeros", "random")) for what, name in _SENSED]
    return ", ".join(
        f"{what} {ratio.value:.2f}×" if ratio else f"no {what} was sampled"
        for what, ratio in ratios
    )


_SENSED = (("clock", "sm_clock_hz"), ("power", "power_w"))
