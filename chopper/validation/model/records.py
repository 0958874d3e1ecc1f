"""Everything that happened in a simulated run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chopper.validation.model.engine import Task
    from chopper.validation.model.machine import Machine
    from chopper.validation.model.plan import Plan


@dataclass(slots=True)
class Span:
    """One row of a host thread."""

    name: str
    category: str
    tid: int
    start_ns: int
    end_ns: int
    args: dict[str, Any]


@dataclass(slots=True)
class RankRecord:
    """Everything that happened on a rank.

    Attributes:
        segments: (start, end, what) of the program, in order: what is a label, or the task that
            a call launched.
        steps: (number, start, end) of the host's steps.
    """

    rank: int
    spans: list[Span] = field(default_factory=list)
    segments: list[tuple[int, int, str | Task]] = field(default_factory=list)
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    recording_ns: int = 0


@dataclass(slots=True)
class Recording:
    """A whole simulated run."""

    plan: Plan
    machine: Machine
    ranks: list[RankRecord]
    groups: list[tuple[str, tuple[int, ...]]]
    clocks: list[list[tuple[int, float, int]]]
    """Per rank: (from when, clock, reason bits)."""
    end_ns: int
