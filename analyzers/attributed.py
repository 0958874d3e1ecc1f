"""An attributed run: the value that views, replay, comparison and reports are fed from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from chopper.attribution import Attribution

if TYPE_CHECKING:
    import pyarrow as pa

    from chopper.analyzers.causes.factors import Factors
    from chopper.analyzers.trace.join import Links
    from chopper.analyzers.trace.joined import JoinedRank
    from chopper.analyzers.trace.match import Matched
    from chopper.analyzers.trace.recording import Recording
    from chopper.analyzers.work.of_events import EventWork


@dataclass(frozen=True, repr=False, kw_only=True)
class Attributed(Attribution):
    """An attribution together with what it was made of.

    Attributes:
        recording: the recorded tables.
        joined: rank → its device events, joined to the host.
        matched: rank → its collectives, matched with the other ranks'.
        work: rank → the work of its device events, row by row with `device_event`.
        factors: rank → the measured factors of its device events, row by row with `device_event`.
    """

    recording: Recording
    joined: dict[int, JoinedRank]
    matched: dict[int, Matched]
    work: dict[int, EventWork]
    factors: dict[int, Factors]

    @cached_property
    def _cache(self) -> dict[str, Any]:
        """Values that views share, until they are given to them."""
        return {}

    @property
    def run(self) -> Any:
        """The recording, with the joined tables in the place of the recorded ones."""
        return _Overlay(self)


class _Overlay:
    """A recording whose trace tables are those that were joined."""

    def __init__(self, attributed: Attributed) -> None:
        self._attributed = attributed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attributed.recording, name)

    def table(self, rank: int, name: str) -> pa.Table:
        """Return a table of one rank."""
        joined = self._attributed.joined.get(rank)
        if joined is not None and name in ("device_event", "step"):
            return getattr(joined, name)
        return self._attributed.recording.table(rank, name)


def links_of(run: Attribution, rank: int) -> Links:
    """Return the joined events of one rank as arrays."""
    links: Links = run.joined[rank].links()
    return links


__all__ = ["Attributed", "links_of"]
