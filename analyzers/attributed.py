"""An attributed run: the value that views, replay, comparison and reports are fed from."""

from __future__ import annotations

from dataclasses import dataclass

from chopper.analyzers.causes.event_work import EventWork
from chopper.analyzers.causes.factors import Factors
from chopper.analyzers.trace.joined import JoinedRank
from chopper.analyzers.trace.match import Matched
from chopper.attribution import Attribution
from chopper.storage.run import Run


@dataclass(frozen=True, repr=False, kw_only=True)
class Attributed(Attribution):
    """An attribution together with what it was made of.

    Attributes:
        recording: the recorded tables.
        joined: rank → its device events, joined to the host.
        matched: rank → its collectives, matched with the other ranks'.
        work: rank → the work of its device events, row by row with `device_event`.
        factors: rank → the measured factors of its device events, row by row with `device_event`.
        detail: the attribution of some ranks alone, where the run is too large to hold the tables
            of all: ``pieces``, ``gaps``, ``communication``, ``links``, ``joined``, ``work`` and
            ``factors`` are of these ranks. None where they are of all.
    """

    recording: Run
    joined: dict[int, JoinedRank]
    matched: dict[int, Matched]
    work: dict[int, EventWork]
    factors: dict[int, Factors]
    detail: Attributed | None = None

    @property
    def detailed(self) -> Attributed:
        """The attribution of the ranks whose tables are there; itself where they are all."""
        return self.detail or self
