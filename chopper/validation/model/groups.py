"""Process groups, and the collectives that are under way in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from chopper.validation.model.engine import Collective
    from chopper.validation.model.plan import Plan


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
