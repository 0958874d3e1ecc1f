"""Command-line options of the reference workloads.

Free of torch, so that ``chopper workloads`` can list them and ``chopper run`` can refuse a wrong
one before any process is started.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_MOST = 10**15
"""More than there are bytes in any memory; a product of some such numbers is still a number."""
_MOST_SEED = 2**32 - 1


def _whole(text: str, *, least: int, most: int = _MOST) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    if value > most:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {most}, the most that it can be")
    return value


def positive(text: str) -> int:
    """Read a whole number of at least one."""
    return _whole(text, least=1)


def not_negative(text: str) -> int:
    """Read a whole number of at least zero."""
    return _whole(text, least=0)


def seed(text: str) -> int:
    """Read a seed that every random generator takes."""
    return _whole(text, least=0, most=_MOST_SEED)


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a workload."""

    name: str
    """Without the dashes."""
    help: str
    """Its effect, in a few words."""
    default: str | int | None
    type: Callable[[str], str | int | Path] = str
    """Reads the text of the command line."""
    choices: tuple[str, ...] | None = None
    """All values that it takes, or None."""
    hidden: bool = False
    """Set by ``chopper run``, not by its user."""


STEPS = Option("steps", "optimizer steps", 12, positive)
DTYPE = Option(
    "dtype",
    "type of computation; weights and optimizer stay float32",
    "float32",
    choices=("float32", "bfloat16"),
)
SEED = Option("seed", "of weights, data and order", 0, seed)
DEVICE = Option(
    "device",
    "auto takes the GPUs when there is one for each rank, else the CPU",
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


def parse(
    options: Sequence[Option],
    argv: Sequence[str] | None = None,
    *,
    parser: type[argparse.ArgumentParser] = argparse.ArgumentParser,
    **about: Any,
) -> argparse.Namespace:
    """Read a command line; attributes are named as the options are.

    Args:
        options: all that may stand on it.
        argv: words to read; those of the process by default.
        parser: class whose ``error`` decides what happens to wrong words.
        about: its ``prog`` and ``description``.
    """
    reader = parser(
        **about,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        # Else "--s 3" means --size, --steps, --sequence or --seed by luck.
        allow_abbrev=False,
    )
    for option in options:
        reader.add_argument(
            f"--{option.name}",
            help=option.help,
            default=option.default,
            type=option.type,
            choices=option.choices,
        )
    return reader.parse_args(argv)
