"""Predictions of a job of many ranks, which rest on all of them.

Ranks that behave alike are represented by one: its graph is solved, and where others arrive later
at a collective than it does, they do so by as much whatever is changed. All representatives are
solved together (:mod:`~chopper.analyzers.replay.contraction`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.attribution import Recoverable
from chopper.analyzers.replay.answers import summary
from chopper.analyzers.replay.contraction import Case, Contracted, couple
from chopper.analyzers.replay.whatif_options import (
    UNCOUPLING,
    Changes,
    leaves_of,
    not_fixable,
)
from chopper.analyzers.trace.columns import ints, strings
from chopper.causes import CAUSES
from chopper.wording import plural, ratio

if TYPE_CHECKING:
    import pyarrow as pa

    from chopper.analyzers.attribution import Attribution
    from chopper.analyzers.trace.match import Matched
    from chopper.analyzers.trace.totals import Totals

ERROR_RATIO = 0.01
"""An unmodified replay that is further from the observed time says nothing about changes."""
ALIKE_RATIO = 0.005
"""Ranks whose arrivals and causes differ by less than this part of each step behave alike."""
_MOST_BYTES = 200_000_000
"""Contractions of so many cases are solved at a time."""
Steps = dict[int, tuple[int, float, int]]
"""Step, -1 for windows without a number → its time before and after changes, summed over its rank
windows, whose count stands beside them."""


@dataclass(frozen=True)
class RankTimes:
    """What tells whether a rank behaves like another one.

    Attributes:
        rank: its number.
        events_count: its device events.
        numbers, start_ns, end_ns: its windows.
        instance, entered_ns: collectives that it took part in, ascending, and when it arrived.
        causes_ns: time by window and cause.
    """

    rank: int
    events_count: int
    numbers: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    instance: np.ndarray
    entered_ns: np.ndarray
    causes_ns: np.ndarray

    @property
    def kind(self) -> tuple[int, bytes, bytes]:
        """What ranks that behave alike have in common exactly."""
        return self.events_count, self.numbers.tobytes(), self.instance.tobytes()


@dataclass(frozen=True)
class Group:
    """Ranks that behave alike.

    Attributes:
        leader: the one that is replayed.
        ranks: all of them.
        instance: collectives at which some arrive later than the leader, ascending.
        late_ns: by how much the last of them does.
        error_ratio: the most that two of them differ in a step, as a part of it.
    """

    leader: int
    ranks: tuple[int, ...]
    instance: np.ndarray
    late_ns: np.ndarray
    error_ratio: float = 0.0


def times_of(
    windows: pa.Table,
    totals: Totals,
    matched: Mapping[int, Matched],
    entered: Mapping[int, tuple[np.ndarray, np.ndarray]],
) -> Iterator[RankTimes]:
    """Yield the times of each rank. WINDOW, totals -> times.

    Args:
        windows: of all ranks.
        totals: of all ranks.
        matched: rank → its matched collectives.
        entered: rank → its communication events, ascending, and when it entered them.
    """
    rank_of, index = ints(windows, "rank"), ints(windows, "step_index")
    numbers, start, end = (ints(windows, n) for n in ("number", "start_ns", "end_ns"))
    codes, causes = strings(totals.causes, "cause")
    columns = (ints(totals.causes, n) for n in ("rank", "step_index", "time_ns"))
    of_rank, of_window, time_ns = columns
    for rank in np.unique(rank_of).tolist():
        mine, rows = np.flatnonzero(rank_of == rank), np.flatnonzero(of_rank == rank)
        causes_ns = np.zeros((len(mine), len(causes)), dtype=np.int64)
        np.add.at(causes_ns, (of_window[rows] - index[mine].min(), codes[rows]), time_ns[rows])
        own, (event, at_ns) = matched.get(rank), entered.get(rank, (rows[:0], rows[:0]))
        instance, entered_ns = rows[:0], rows[:0]
        if own is not None and len(own.event_row):
            instance = own.event_instance.astype(np.int64)
            entered_ns = at_ns[np.searchsorted(event, own.event_row)] - own.offset_ns
            order = np.lexsort((entered_ns, instance))
            last = np.append(np.diff(instance[order]) > 0, True)
            instance, entered_ns = instance[order][last], entered_ns[order][last]
        count = -1 if own is None else own.device_event_count
        bounds = numbers[mine], start[mine], end[mine]
        yield RankTimes(rank, count, *bounds, instance, entered_ns, causes_ns)


class _Gathered:
    """A group while ranks are added to it."""

    def __init__(self, leader: RankTimes) -> None:
        self.leader, self.ranks = leader, [leader.rank]
        self.early = self.late = np.zeros(len(leader.instance), dtype=np.int64)
        self.causes_ns = np.zeros(len(leader.numbers))
        self.error_ratio = 0.0
        count = len(leader.numbers)
        self._step = np.minimum(
            np.searchsorted(leader.end_ns, leader.entered_ns), max(count - 1, 0)
        )
        self._length_ns = np.maximum(leader.end_ns - leader.start_ns, 1)

    def add(self, one: RankTimes) -> bool:
        """Add a rank that behaves like all others; return whether it does."""
        ahead = one.entered_ns - self.leader.entered_ns
        early, late = np.minimum(self.early, ahead), np.maximum(self.late, ahead)
        apart = np.abs(one.causes_ns - self.leader.causes_ns).sum(axis=1)
        causes_ns = np.maximum(self.causes_ns, apart)
        spread = np.bincount(self._step, late - early, len(self._length_ns))
        ratio = float(((spread + causes_ns) / self._length_ns).max(initial=0.0))
        if ratio > ALIKE_RATIO:
            return False
        self.early, self.late, self.causes_ns, self.error_ratio = early, late, causes_ns, ratio
        self.ranks.append(one.rank)
        return True

    def done(self) -> Group:
        """Return the group."""
        behind = np.flatnonzero(self.late > 0)
        instance = self.leader.instance[behind]
        ranks = tuple(self.ranks)
        return Group(self.leader.rank, ranks, instance, self.late[behind], self.error_ratio)


def alike(ranks: Iterable[RankTimes]) -> list[Group]:
    """Group ranks that behave alike: each joins the nearest leader, or is one.

    They launch as many device events, take part in the same collectives, and in each step their
    times by cause, and their arrivals at its collectives, differ by less than a small part of it.
    """
    groups: dict[tuple[int, bytes, bytes], list[_Gathered]] = {}
    causes: dict[tuple[int, bytes, bytes], list[np.ndarray]] = {}
    for one in ranks:
        same, leaders = groups.setdefault(one.kind, []), causes.setdefault(one.kind, [])
        own = one.causes_ns.reshape(-1)
        if leaders:
            apart = np.abs(np.stack(leaders) - own).sum(axis=1)
            if same[int(apart.argmin())].add(one):
                continue
        same.append(_Gathered(one))
        leaders.append(own)
    found = [gathered.done() for each in groups.values() for gathered in each]
    return sorted(found, key=lambda group: group.leader)


def cases_of(totals: Totals, pace: float = 1.0) -> list[Case]:
    """Return the cases of a job's recoverable times: unchanged, at the pace, without each cause."""
    codes, values = strings(totals.causes, "cause")
    spent = {values[code] for code in np.unique(codes[ints(totals.causes, "time_ns") > 0])}
    removable = [
        cause
        for cause in CAUSES
        if not not_fixable(cause) and any(s == cause or s.startswith(f"{cause}.") for s in spent)
    ]
    fixes = [Changes(fix=(cause,)) for cause in removable]
    return [Case(), Case(pace=pace), *(Case(changes, pace) for changes in fixes)]


@dataclass(frozen=True)
class JobReplay:
    """A job that was replayed under several cases.

    Attributes:
        windows: the `window` table of all ranks.
        cases: the first without changes, the second without changes at the host's pace.
        lengths_ns: by case and row of ``windows``.
        groups: the ranks that are replayed, and those that they represent.
        error_ratio: distance of the replay without changes from the observed time, over windows.
        coupled_ratio: share of the communication events that are matched; None without any.
    """

    windows: pa.Table
    cases: list[Case]
    lengths_ns: np.ndarray
    groups: list[Group]
    error_ratio: float
    coupled_ratio: float | None

    @property
    def is_right(self) -> bool:
        """Whether the replay without changes gives the observed times back."""
        return self.error_ratio <= ERROR_RATIO

    def predicted(self, counted: pa.Table) -> Predicted:
        """Return the predictions for some of the windows.

        Args:
            counted: of the `window` table of all ranks, those that are counted.
        """
        rank, number = ints(self.windows, "rank"), ints(self.windows, "number")
        wanted = np.unique(ints(counted, "rank") << 32 | (1 + ints(counted, "number")))
        rows = np.flatnonzero(np.isin(rank << 32 | (1 + number), wanted))
        rank, number, lengths_ns = rank[rows], number[rows], self.lengths_ns[:, rows]
        numbers, of = np.unique(number, return_inverse=True)
        windows_count = np.bincount(of)
        before = np.bincount(of, lengths_ns[1]).astype(np.int64)
        after, references = [], []
        for case, lengths in zip(self.cases[2:], lengths_ns[2:], strict=True):
            reference = None
            chosen = np.ones(len(rank), dtype=bool)
            if any(UNCOUPLING & {*leaves_of(cause)} for cause in case.changes.fix):
                # Each takes as long as the middle one does on its own: of two, the quicker.
                ranks, of_rank = np.unique(rank, return_inverse=True)
                total = np.bincount(of_rank, lengths)
                reference = int(ranks[np.argsort(total, kind="stable")[(len(ranks) - 1) // 2]])
                chosen = rank == reference
            as_many = np.bincount(of[chosen], minlength=len(numbers))
            total = np.bincount(of[chosen], lengths[chosen], len(numbers))
            with np.errstate(invalid="ignore"):
                after.append(total * (windows_count / as_many))
            references.append(reference)
        return Predicted(
            [case.changes for case in self.cases[2:]],
            references,
            numbers,
            windows_count,
            before,
            np.array(after).reshape(len(after), len(numbers)),
            self.cases[1].pace,
            self.error_ratio,
            self.coupled_ratio,
            self.groups,
        )


@dataclass(frozen=True)
class Predicted:
    """Predictions of a job that rest on all its ranks.

    Attributes:
        changes: what was changed, case by case.
        references: rank that all are taken to be like, by case; None unless ranks do not wait for
            each other.
        numbers: of the steps that are counted, -1 for windows without a number.
        windows_count: rank windows of each step.
        before_ns: their time without changes, summed.
        after_ns: by case, the same with the changes; NaN where the reference has no such step.
        pace, error_ratio, coupled_ratio: as in :class:`JobReplay`.
        groups: the ranks that are replayed, and those that they represent.
    """

    changes: list[Changes]
    references: list[int | None]
    numbers: np.ndarray
    windows_count: np.ndarray
    before_ns: np.ndarray
    after_ns: np.ndarray
    pace: float
    error_ratio: float
    coupled_ratio: float | None
    groups: list[Group]

    @property
    def ranks_count(self) -> int:
        """Number of all ranks."""
        return sum(len(group.ranks) for group in self.groups)

    @property
    def grouping_error_ratio(self) -> float:
        """The most that a rank differs in a step from the one that represents it, as a ratio."""
        return max((group.error_ratio for group in self.groups), default=0.0)

    @property
    def rests_on(self) -> str:
        """The ranks that the predictions rest on, in words."""
        said = f"the predicted step time is of all {plural(self.ranks_count, 'rank')}"
        if len(self.groups) == self.ranks_count:
            return f"{said}, each replayed"
        said += f": {len(self.groups)} are replayed"
        if not self.grouping_error_ratio:
            return f"{said}, and the rest do the same as one of them"
        differ = ratio(self.grouping_error_ratio)
        return (
            f"{said}, and the rest are taken to change as one of them, from which each differs by "
            f"at most {differ} of a step"
        )

    def steps(self, case: int) -> Steps:
        """Return the steps of a case; those that its reference lacks are left out."""
        columns = self.numbers, self.before_ns, self.after_ns[case], self.windows_count
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return {number: (b, a, w) for number, b, a, w in rows if not math.isnan(a)}

    def steps_of(self, changes: Changes) -> Steps | None:
        """Return the steps under changes; None where they were not replayed."""
        return self.steps(self.changes.index(changes)) if changes in self.changes else None

    def saving(self, cause: str) -> Recoverable | None:
        """Return what a step without a cause takes less; None where it was not replayed."""
        steps = self.steps_of(Changes(fix=(cause,)))
        if steps is None:
            return None
        observed, predicted, _, saved = summary(steps.values())
        low_high = None if saved is None else (round(saved[0]), round(saved[1]))
        return Recoverable(round(observed - predicted), low_high)


def predicted_of(run: Attribution) -> Predicted | None:
    """Return the predictions of a run that rest on all its ranks; None where it has none."""
    return run.predicted if isinstance(run.predicted, Predicted) else None


def replayed(
    cases: list[Case],
    windows: pa.Table,
    groups: list[Group],
    coupled_ratio: float | None,
    parts: Callable[[], Iterable[Contracted]],
    case_bytes: np.ndarray,
) -> JobReplay:
    """Solve the cases of a job, some at a time.

    Args:
        cases: to solve; the first two as in :class:`JobReplay`.
        windows: the `window` table of all ranks.
        groups: its ranks.
        coupled_ratio: share of the communication events that are matched; None without any.
        parts: yields the contractions of the leaders; called several times.
        case_bytes: what the contractions of each case take together.
    """
    rank = ints(windows, "rank")
    rows = {one: np.flatnonzero(rank == one) for one in np.unique(rank).tolist()}
    observed = ints(windows, "end_ns") - ints(windows, "start_ns")
    lengths_ns = np.empty((len(cases), len(observed)), dtype=np.int64)
    late_ns = {g.leader: (g.instance, g.late_ns) for g in groups if len(g.instance)}
    members = {group.leader: group.ranks for group in groups}
    batches = (np.cumsum(case_bytes) // _MOST_BYTES).tolist()
    unchanged: dict[int, np.ndarray] = {}
    for batch in dict.fromkeys(batches):
        some = [case for case, of in enumerate(batches) if of == batch]
        held = [part.of(some) for part in parts()]
        for at, case in enumerate(some):
            for leader, bounds in couple(held, at, late_ns):
                length = np.diff(bounds)
                base = unchanged.setdefault(leader, length)
                for one in members[leader]:
                    own = observed[rows[one]] + length - base if one != leader else length
                    lengths_ns[case, rows[one]] = np.maximum(own, 0)
    off = np.abs(lengths_ns[0] - observed).sum() / max(int(observed.sum()), 1)
    return JobReplay(windows, cases, lengths_ns, groups, float(off), coupled_ratio)
