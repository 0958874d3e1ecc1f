"""What a collector is: a source of telemetry or traces that one rank, or one host, starts and stops.

A collector never harms the program that it watches. Whatever it raises is caught by the profile
that runs it and noted in the manifest; the rest goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    from chopper.storage.manifest import CollectorReport

Scope = Literal["rank", "host"]
"""``rank``: runs in every rank. ``host``: runs once per host, in local rank 0."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a collector can run here, and if not, why and what would change that."""

    ok: bool
    reason: str | None = None
    """Why not, in words a user understands; for ``ok`` what limits it, if anything does."""
    remedy: str | None = None
    """What the user can do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorContext:
    """Where a collector runs and where it writes."""

    directory: Path
    """The rank's own folder in the run. Files are named ``<table>.arrow`` or ``trace*.json.gz``."""
    run_path: Path
    """The run directory, shared by all ranks."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    pid: int
    """Process of the rank: the one that trains, not a sampler."""
    device: str | None = None
    """``torch.device`` that the rank computes on, for example ``cuda:0``; None for the host."""
    hostname: str = ""


@runtime_checkable
class Collector(Protocol):
    """One source of data.

    ``probe`` is cheap, has no lasting effect and may be called without ``start``; ``start`` is
    called at most once, ``stop`` at most once and only after ``start`` was entered. All three are
    called by the thread that trains, outside of steps.

    A collector that also has a method ``on_step(step: int) -> None`` is told at the end of each
    step; it must return within microseconds.
    """

    name: ClassVar[str]
    scope: ClassVar[Scope]

    def probe(self, context: CollectorContext) -> Availability:
        """Say whether it can run here."""
        ...

    def start(self, context: CollectorContext) -> None:
        """Begin to collect; return soon.

        Raises:
            CollectorUnavailable: it cannot run here after all; the message says why.
        """
        ...

    def stop(self) -> CollectorReport:
        """Stop, write what is left, leave no thread or process behind, and report."""
        ...


@runtime_checkable
class StepListener(Protocol):
    """What a collector may have besides: it is called at the end of each step.

    A profile calls ``on_step`` on every started collector that has it, on the thread that trains,
    between two steps. It must cost microseconds.
    """

    def on_step(self, step: int) -> None:
        """Read what belongs to the step that has just ended."""
        ...


@runtime_checkable
class Measurable(Protocol):
    """What a collector may have besides: it can say what one reading costs, for ``doctor``."""

    def call_costs_ns(self, context: CollectorContext) -> dict[str, int]:
        """Median cost of one reading of each of its sources, measured now."""
        ...
