"""Everything that happened in a simulated run, and the process groups that it had."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.known_causes.model.engine import Collective, Task
    from tests.known_causes.model.machine import Machine
    from tests.known_causes.model.plan import Plan


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

    ``segments`` are (start, end, label or launched task) of the program, in order; ``steps`` are
    (number, start, end) of the host's.
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


class Groups:
    """Process groups, and the collectives that are under way in them."""

    def __init__(self, plan: Plan) -> None:
        everyone = tuple(range(plan.ranks))
        pairs = plan.ranks // 2
        self.shard = (
            {r: tuple(q for q in everyone if q // 2 == r // 2) for r in everyone}
            if plan.hybrid
            else dict.fromkeys(everyone, everyone)
        )
        self.replicate = (
            {r: tuple(q for q in everyone if q % 2 == r % 2) for r in everyone}
            if plan.hybrid and pairs > 1
            else {}
        )
        self._open: dict[tuple[str, int], Collective] = {}
        self._count: dict[tuple[int, str], int] = {}

    def name(self, members: tuple[int, ...], rank: int) -> str:
        """Name of a group as the trace has it."""
        if members != self.shard[rank]:
            return str(1 + len(self.shard) // 2 + rank % 2)
        return str(1 + rank // 2) if self.replicate else "0"

    def listed(self) -> list[tuple[str, tuple[int, ...]]]:
        """All groups by name."""
        groups_by_name = {"0": tuple(self.shard)}
        for groups in (self.shard, self.replicate):
            groups_by_name |= {
                self.name(members, rank): members for rank, members in groups.items()
            }
        return sorted(groups_by_name.items())

    def enter(
        self, rank: int, members: tuple[int, ...], make: Callable[[str, int], Collective]
    ) -> Collective:
        """The rank's next collective of a group; the first to come makes it."""
        group = self.name(members, rank)
        number = self._count.get((rank, group), 0) + 1
        self._count[rank, group] = number
        if (group, number) not in self._open:
            self._open[group, number] = make(group, number)
        return self._open[group, number]
