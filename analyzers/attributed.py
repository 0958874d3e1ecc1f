"""An attributed run: the value that views, replay, comparison and reports are fed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from chopper.analyzers.causes.event_work import EventWork
from chopper.analyzers.causes.factors import Factors
from chopper.analyzers.trace.columns import ints
from chopper.analyzers.trace.match import Matched
from chopper.analyzers.trace.rank_join import JoinedRank
from chopper.attribution import Attribution
from chopper.storage.run import Run
from chopper.wording import plural, ranges

_Answer = TypeVar("_Answer")


class Answers(Protocol):
    """Answers about an attribution that later commands find again."""

    def get(self, name: str, make: Callable[[], _Answer]) -> _Answer:
        """Return the answer of a name; make it where there is none."""


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
    joined: Mapping[int, JoinedRank]
    matched: dict[int, Matched]
    work: Mapping[int, EventWork]
    factors: Mapping[int, Factors]
    detail: Attributed | None = None

    def answer(self, name: str, make: Callable[[], _Answer]) -> _Answer:
        """Return what ``make`` returns, which depends on this attribution alone.

        Args:
            name: of the answer, among those of this attribution.
            make: how it is made where no earlier command left it.
        """
        answers: Answers | None = self.__dict__.get("_answers")
        return make() if answers is None else answers.get(name, make)

    def keep_answers(self, answers: Answers) -> None:
        """Keep answers about this attribution, not about parts or changes of it."""
        object.__setattr__(self, "_answers", answers)

    def covered(self) -> tuple[str, str]:
        """Say which ranks and steps ``detailed`` covers; and the option that chooses others.

        The option is empty where there are no others.
        """
        near = self.detailed.whole
        some = [rank.rank for rank in near.ranks]
        of_ranks = f"{len(some)} of {plural(len(self.ranks), 'rank')} ({ranges(some)})"
        rank, number = ints(self.whole.windows, "rank"), ints(self.whole.windows, "number")
        every, shown = {*number[np.isin(rank, some)]}, {*ints(near.windows, "number")}
        if every <= shown:
            return of_ranks, "--ranks" if len(some) < len(self.ranks) else ""
        of_steps = f"{len(shown)} of {plural(len(every), 'step')} ({ranges(map(int, shown))})"
        if len(self.ranks) == 1:
            return of_steps, "--steps"
        return f"{of_ranks}, {of_steps}", "--ranks or --steps"

    @property
    def detailed(self) -> Attributed:
        """The attribution of the ranks whose tables are there; itself where they are all."""
        return self.detail or self
