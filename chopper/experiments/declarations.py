"""Declarations of the reference workloads: options, variants, bounds and needs.

A module of ``workloads/`` assigns ``WORKLOAD`` and has the functions of `results.Program`. It loads
without torch: whatever needs torch imports it in the function that does.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

_MOST = 10**15
"""More than there are bytes in any memory; a product of some such numbers is still a number."""


def _integer(least: int, most: int = _MOST) -> Callable[[str], int]:
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


positive = _integer(1)
not_negative = _integer(0)
seed = _integer(0, 2**32 - 1)
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


MEASURED = "measured"
"""Phase in which a workload measures. Where it names any, clock and power are of this time."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way in which a workload can run."""

    name: str
    summary: str
    words: tuple[str, ...] | None = None
    """Added to the workload's options; ``--variant NAME`` by default."""
    module: str | None = None
    """Run instead of the workload's own."""
    needs_gpu: bool = False
    """Left out, with a note, on machines without."""
    default: bool = True
    """Runs when no variants are named; ``--variants all`` runs the others, too."""


@dataclass(frozen=True, slots=True)
class ShownView:
    """Columns of a view (``chopper analyze --view``) that are shown of all variants."""

    view: str
    columns: tuple[str, ...]
    where: tuple[str, str] | None = None
    """Only rows with this value in this column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A measure's values that can be; others are withheld, as are headlines that rest on them."""

    measure: str
    why: str
    """Why nothing lies beyond; ends a sentence."""
    least: float | None = None
    most: float | None = None
    with_it: tuple[str, ...] = ()
    """Measures of the same variant and labels that are withheld, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Facts about a workload, known without running it."""

    name: str

    summary: str

    options: tuple[Option, ...]
    """Those of its own; ``--variant`` and ``--output`` are added."""

    seconds: int
    """About what all of it takes at its default size on two quiet CPU cores."""

    position: int = 100

    ranks: int = 2
    """Started on a machine without GPUs when the user names no number."""

    linked: bool = False
    """Two ranks on the CPU are joined by a link that can be shaped, where there can be one."""

    clean_up: Callable[[], object] = lambda: None
    """Called when no rank is left, however they ended."""

    measures: bool = False
    """It measures numbers itself (``prof.measure``): what it records is an experiment."""

    variants: tuple[Variant, ...] = ()

    baseline: str | None = None

    shown: tuple[ShownView, ...] = ()

    repeats: int = 1
    """Times that each variant runs unless the user says otherwise."""

    bounds: tuple[Bound, ...] = ()
    """Values of its measures that can be."""

    chosen: str = ""
    """What its default options were chosen for: said of each measured headline that has nothing of
    its own to say."""

    @property
    def module(self) -> str:
        """Module that each rank runs, as ``python -m`` would."""
        first = self.variants[0].module if self.variants else None
        return first or f"chopper.workloads.{self.name}"

    @property
    def experiment(self) -> bool:
        """True where it is recorded as variants and repetitions beside each other."""
        return self.measures or bool(self.variants)

    @property
    def all_options(self) -> tuple[Option, ...]:
        """Options of the module's command line."""
        names = tuple(v.name for v in self.variants if v.words is None)
        variant = Option("variant", "one of them", self.baseline, choices=names, hidden=True)
        return (*((variant,) if names else ()), *self.options, OUTPUT)

    def parse(
        self,
        argv: Sequence[str] | None = None,
        *,
        parser: type[argparse.ArgumentParser] = argparse.ArgumentParser,
    ) -> argparse.Namespace:
        """Read the module's command line, that of the process by default."""
        reader = parser(
            prog=self.name,
            description=self.summary,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            # Else "--s 3" means --size, --steps, --sequence or --seed by luck.
            allow_abbrev=False,
        )
        for option in self.all_options:
            reader.add_argument(
                f"--{option.name}",
                help=option.help,
                default=option.default,
                type=option.type,
                choices=option.choices,
            )
        return reader.parse_args(argv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Resources that one rank of a workload takes."""

    memory_bytes: int
    what: str
    """The options that decide it, in words; begins a sentence that goes on with "needs"."""
    remedy: str
    notes: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    """Variants that cannot run here as asked → the reason."""
    chosen: Mapping[str, int] = field(default_factory=dict)
    """Options that the user left open → the values that it takes for them."""


def as_program(main: Callable[[], None]) -> None:
    """Run the ``main`` of a program; an interrupt is wanted, and ends it without a traceback."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
