"""Sizes from small to large, for what is measured over them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from chopper.errors import UsageError
from chopper.workloads.machine import Needs


def needs(args: argparse.Namespace, _ranks: int, _device: str) -> Needs:
    """Three arrays of the largest size: of STREAM's kernels, or sent, received and staged.

    Raises:
        UsageError: the sizes do not grow.
    """
    if args.smallest > args.largest:
        raise UsageError(f"--smallest {args.smallest} is larger than --largest {args.largest}")
    if args.factor < 2:
        raise UsageError(f"--factor {args.factor}: sizes must grow, take 2 or more")
    return Needs(
        memory_bytes=3 * args.largest,
        what=f"--largest {args.largest}",
        remedy="take a smaller --largest",
    )


def sizes(args: argparse.Namespace, quantum: int) -> Iterator[int]:
    """Bytes from the smallest to the largest, each rounded up to whole quanta."""
    size = args.smallest
    while size <= args.largest:
        yield -(-size // quantum) * quantum
        size *= args.factor
