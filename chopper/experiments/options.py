"""Command-line options of the reference workloads.

Free of torch, so that ``chopper workloads`` can list them and ``chopper bench`` can refuse a wrong
one before any process is started.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_MOST = 10**15
"""More than there are bytes in any memory; a product of some such numbers is still a number."""


def _whole(least: int, most: int = _MOST) -> Callable[[str], int]:
    """Return what reads a whole number in a range, and refuses any other text in one line."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{text!r} exceeds {most}, the largest")
        return value

    return read


positive = _whole(1)
not_negative = _whole(0)
seed = _whole(0, 2**32 - 1)
"""A seed that every random generator takes."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a workload."""

    name: str
    """Without the dashes."""
    help: str
    default: str | int | None
    type: Callable[[str], str | int | Path] = str
    choices: tuple[str, ...] | None = None
    hidden: bool = False
    """Set by ``chopper bench``, not by its user."""


STEPS = Option("steps", "optimizer steps", 12, positive)
DTYPE = Option(
    "dtype",
    "type of computation; weights and optimizer stay float32",
    "float32",
    choices=("float32", "bfloat16"),
)
SEED = Option("seed", "seed of weights, data and order", 0, seed)
DEVICE = Option(
    "device",
    "auto uses GPUs if there is one for each rank, else the CPU",
    "auto",
    choices=("auto", "cpu", "cuda"),
)
CHANNEL = Option("channel", "set by what starts the ranks", None, int, hidden=True)
OUTPUT = Option(
    "output",
    "directory of the recorded run; CHOPPER_OUTPUT, or a new one, by default",
    None,
    Path,
    hidden=True,
)


def changed(options: Sequence[Option], **defaults: str | int) -> tuple[Option, ...]:
    """Return the same options with other defaults."""
    return tuple(replace(o, default=defaults.get(o.name, o.default)) for o in options)
