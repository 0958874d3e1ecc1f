"""Declarations of the reference workloads: what a module of ``workloads/`` says of itself.

Such a module assigns ``WORKLOAD`` and has the functions of `results.Program`. It loads without
torch: whatever needs torch imports it in the function that does.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from chopper.experiments.options import OUTPUT, Option

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


def as_program(main: Callable[[], None]) -> None:
    """Run the ``main`` of a program; an interrupt is wanted, and ends it without a traceback."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
