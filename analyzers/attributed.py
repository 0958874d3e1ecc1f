"""An attributed run: the value that views, replay, comparison and reports are fed from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from chopper.analyzers.causes.event_work import EventWork
from chopper.analyzers.causes.factors import Factors
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.joined import JoinedRank
from chopper.analyzers.trace.match import Matched
from chopper.attribution import Attribution, Group
from chopper.causes import Level
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
    """

    recording: Run
    joined: dict[int, JoinedRank]
    matched: dict[int, Matched]
    work: dict[int, EventWork]
    factors: dict[int, Factors]

    def by(self, level: Level) -> list[Group]:
        """Group the same nanoseconds by a level, as any attribution; with own times."""
        groups = super().by(level)
        if level in ("cause", "step", "rank"):
            return groups
        own = self._own_times(level)
        return [
            replace(group, own_ns=own_ns, events_count=count)
            for group in groups
            for own_ns, count in [own.get(group.key, (0, 0))]
        ]

    def _own_times(self, level: Level) -> dict[str | int | None, tuple[int, int]]:
        """Return, for each value of a level, how long its device events ran and their number."""
        own: dict[str | int | None, tuple[int, int]] = {}
        for rank, trace in self.joined.items():
            links, events = self.links[rank], trace.device_event
            inside = ints(links, "step_index") >= 0
            of = (events, "name") if level == "kernel" else (links, level)
            codes, names = strings(*of, narrow=True)
            # The first value is that of events without one.
            value, dur_ns = codes[inside] + 1, ints(events, "dur_ns")[inside]
            counts = np.bincount(value, minlength=len(names) + 1).tolist()
            sums = np.bincount(value, dur_ns, minlength=len(names) + 1).tolist()
            for name, count, sum_ns in zip((None, *names), counts, sums, strict=True):
                before = own.get(name, (0, 0))
                own[name] = before[0] + int(sum_ns), before[1] + count
        return own
