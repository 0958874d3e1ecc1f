"""An attributed run: every nanosecond of its steps by cause, and all that it was made of.

Everything here is a regrouping of the same nanoseconds: whatever the level, the sums are equal.
Views, replay, comparison and reports are functions of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.causes.event_work import EventWork
from chopper.analyzers.causes.factors import Factors
from chopper.analyzers.causes.step_time import StepTime
from chopper.analyzers.coordinates import why_unknown
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.match import Matched
from chopper.analyzers.trace.rank_join import JoinedRank
from chopper.analyzers.trace.totals import Totals, window_keys
from chopper.arrow import with_column
from chopper.causes import CAUSES, CODES, LEAVES, LEVELS, Level, inherited, parent, parents
from chopper.claims import Withheld
from chopper.errors import UsageError
from chopper.hardware.ceilings import Ceilings, Link
from chopper.statistics import total_intervals
from chopper.storage.manifest import DIMENSIONS, Dimension, Finding
from chopper.storage.run import Run
from chopper.wording import plural, ranges

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class CauseRow:
    """One cause with its time, leaf or parent.

    Attributes:
        time_ns: sum over all ranks and steps.
        share_ratio: of the observed time; None when nothing was observed.
        ci95_ns: bootstrap over steps of the same total; None with fewer than three steps.
        basis: what the number rests on.
        measured: it comes from recorded times alone, without a model.
        withheld: why the data cannot support this cause; its time stays in the sum.
    """

    id: str
    parent: str | None
    label: str
    time_ns: int
    share_ratio: float | None
    ci95_ns: tuple[int, int] | None
    basis: str
    measured: bool
    withheld: str | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """One value of a level, with its time by leaf cause.

    Attributes:
        time_ns: attributed time, including the waiting before it.
        own_ns: sum of the durations of its device events, whatever ran at the same time; None for
            steps, ranks and causes.
        events_count: device events; None as ``own_ns``.
    """

    key: str | int | None
    time_ns: int
    causes: dict[str, int]
    own_ns: int | None = None
    events_count: int | None = None


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank's share of the attribution.

    ``device`` and ``peak_source`` (of its peaks) are None where unknown, or for the host itself;
    ``device_reason`` says why the device is another than the trace says, None where it is not.
    """

    rank: int
    label: str
    device: str | None
    peak_source: str | None
    observed_ns: int = 0
    ideal_ns: int = 0
    steps: int = 0
    device_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Basis:
    """The basis of a cause's number."""

    text: str
    measured: bool


@dataclass(frozen=True)
class Recoverable:
    """Predicted saving per step if one cause is removed, as ``whatif --fix`` gives it.

    Attributes:
        step_ns: saving per step, mean over ranks and steps; None with the reason.
        ci95_ns: its 95 % interval over steps; None with fewer than three.
    """

    step_ns: int | None
    ci95_ns: tuple[int, int] | None = None
    reason: str | None = None


class Answers(Protocol):
    """Answers about an attribution that later commands find again."""

    def get(self, name: str, make: Callable[[], _Answer]) -> _Answer:
        """Return the answer of a name; make it where there is none."""


class Predictions(Protocol):
    """Predictions that rest on all ranks of a job (:mod:`chopper.analyzers.replay.job`)."""

    @property
    def rests_on(self) -> str:
        """The ranks that the predictions rest on, in words."""

    def saving(self, cause: str) -> Recoverable | None:
        """Return what a step without a cause takes less; None where it was not replayed."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Attribution:
    """The attribution of every nanosecond of a run's steps to one cause, and what it was made of.

    Where steps of several kinds were traced, or some ranks have no numbered steps, it covers those
    that the step time describes; ``all_steps`` covers everything that was traced. Of a run that is
    too large to hold the tables of all ranks, ``pieces``, ``gaps``, ``communication``, ``links``,
    ``joined``, ``work`` and ``factors`` are of some ranks; ``detail`` is the attribution of these
    alone. The table `selection` says of each rank's steps which of both they are in.

    Attributes:
        source: what the user named.
        recording: the recorded tables.
        pieces: the `piece` table.
        windows: the `window` table of all ranks.
        totals: sums of the times of all pieces of all ranks.
        gaps: the `gap` table.
        communication: the `communication` table.
        links: rank → its `event_link` table, row by row with `device_event`.
        cause_rows: all causes with time in them, in the order of the tree.
        findings: what the data can and cannot support, most severe first.
        withheld: claims that the data does not support, with their reasons.
        coverage: shares that models and joins cover, as ratios; None for unknown.
        bases: leaf cause → what it rests on.
        ceilings: rank → theoretical and measured peaks of its device.
        joined: rank → its device events, joined to the host.
        matched: rank → its collectives, matched with the other ranks'.
        work: rank → the work of its device events, row by row with `device_event`.
        factors: rank → the measured factors of its device events, row by row with `device_event`.
        superset: the attribution of all traced steps; None where it is this one.
        part: the attribution of the ranks whose tables are there; None where they are all.
        predicted: predictions that rest on all ranks, where ``part`` are some; None without them.
    """

    source: str
    recording: Run
    pieces: pa.Table
    windows: pa.Table
    totals: Totals
    gaps: pa.Table
    communication: pa.Table
    links: dict[int, pa.Table]
    ranks: list[RankSummary]
    cause_rows: list[CauseRow]
    step: StepTime
    findings: list[Finding]
    withheld: list[Withheld]
    coverage: dict[str, float | None]
    bases: dict[str, Basis]
    ceilings: dict[int, Ceilings]
    joined: Mapping[int, JoinedRank]
    matched: dict[int, Matched]
    work: Mapping[int, EventWork]
    factors: Mapping[int, Factors]
    superset: Self | None = None
    part: Self | None = None
    predicted: Predictions | None = None

    @property
    def all_steps(self) -> Self:
        """The attribution of all traced steps of all kinds; itself where they are of one kind."""
        return self.superset or self

    @property
    def detail(self) -> Self:
        """The attribution of the ranks whose tables are there; itself where they are all."""
        return self.part or self

    @property
    def observed_ns(self) -> int:
        """Time of all windows of all ranks (rank-time)."""
        return sum(rank.observed_ns for rank in self.ranks)

    @property
    def ideal_ns(self) -> int:
        """Part of it that model math needs at the devices' peaks."""
        return sum(rank.ideal_ns for rank in self.ranks)

    @property
    def steps(self) -> int:
        """Step windows of the rank that has most of them."""
        return max((rank.steps for rank in self.ranks), default=0)

    def withholds(self, claim: str, rank: int | None = None) -> str | None:
        """Return why a claim is withheld, of one rank or of any; None when it is not.

        Args:
            claim: an id of ``chopper.claims.CLAIMS``.
            rank: a rank; None for all of them.
        """
        for held in self.withheld:
            if held.id == claim and (rank is None or held.ranks is None or rank in held.ranks):
                return held.reason
        return None

    def causes(self) -> list[CauseRow]:
        """Return all causes with time in them, parents before their leaves, in the tree's order."""
        return [*self.cause_rows]

    def leaves(self) -> list[CauseRow]:
        """Return leaf causes with time in them, largest first; they sum to ``observed_ns``."""
        rows = [row for row in self.cause_rows if row.id in CODES]
        return sorted(rows, key=lambda row: -row.time_ns)

    def by(self, level: Level) -> list[Group]:
        """Group the same nanoseconds by a level.

        Steps, ranks and places along a dimension of parallelism, whose ranks are summed, come in
        order, everything else largest first. A key of None gathers what has no value at this level
        (for example idle time without an operator, or ranks whose place is not known).

        Raises:
            UsageError: no such level.
        """
        if level not in LEVELS:
            raise UsageError(f"level {level!r} unknown: one of {', '.join(LEVELS)}")
        if level == "cause":
            return [Group(row.id, row.time_ns, {row.id: row.time_ns}) for row in self.leaves()]
        if level in DIMENSIONS:
            return groups_of_ranks(self.totals, self.places(level))
        return groups_of(self.totals, level)

    def places(self, level: str) -> dict[int, int]:
        """Return rank → its place along a dimension of parallelism, as far as it is known."""
        return {
            part.rank: one.index
            for part in self.recording.manifest.ranks
            for one in part.coordinates
            if one.dimension == level
        }

    @property
    def dimensions(self) -> list[Dimension]:
        """Dimensions of parallelism along which the ranks have different places, in order."""
        return [name for name in DIMENSIONS if len({*self.places(name).values()}) > 1]

    def order_of(self, rank: int) -> tuple[int, ...]:
        """Return the key by which a rank is shown: its coordinates, then its number."""
        at = {one.dimension: one.index for one in self.recording.part(rank).coordinates}
        return (*(at.get(dimension, -1) for dimension in DIMENSIONS), rank)

    def check_level(self, level: str) -> None:
        """Raise a UsageError that says why for a dimension in which no rank's place is known."""
        if level in DIMENSIONS and not self.places(level):
            raise UsageError(
                f"{self.source}: no rank's place in {level} parallelism is known: "
                f"{why_unknown(self.recording.manifest, level)}; name the layout, for example "
                "--layout tp=4,pp=4,dp=4"
            )

    def step_time(self) -> StepTime:
        """Return how long a step takes with and without tracing, and which kinds there are."""
        return self.step

    def step_time_ns(self) -> list[int]:
        """Return the observed time of each step: the mean window over ranks, in step order."""
        steps, of = np.unique(ints(self.windows, "number"), return_inverse=True)
        total = np.zeros(len(steps), dtype=np.int64)
        np.add.at(total, of, ints(self.windows, "end_ns") - ints(self.windows, "start_ns"))
        return [*map(round, total / np.bincount(of))]

    def of_kind(self) -> Self:
        """Return the part that the step time covers; itself where no other kind was traced."""
        traced = [kind.traced_steps for kind in self.step.kinds if kind.name == self.step.kind]
        return self.of_steps(traced[0]) if traced and traced[0] else self

    def of_numbered(self) -> Self:
        """Return the part of ``all_steps`` in numbered steps; the whole where none has a number."""
        numbers = ints(self.all_steps.windows, "number")
        return self.of_steps(numbers[numbers >= 0]) if (numbers >= 0).any() else self.all_steps

    def of_steps(self, numbers: Collection[int]) -> Self:
        """Return the part of ``all_steps`` in these steps; the whole itself where it has no others.

        Args:
            numbers: of steps; -1 for windows without a number.
        """
        whole = self.all_steps
        inside = np.isin(ints(whole.windows, "number"), [*numbers])
        if inside.all():
            return whole
        windows = whole.windows.filter(inside)
        keys = window_keys(windows)
        pieces, gaps = (
            table.filter(np.isin(window_keys(table), keys)) for table in (whole.pieces, whole.gaps)
        )
        totals = whole.totals.of_steps(numbers)
        links = {rank: _links_within(table, rank, windows) for rank, table in whole.links.items()}
        return replace(
            whole,
            pieces=pieces,
            windows=windows,
            gaps=gaps,
            links=links,
            communication=_communication_within(whole, links),
            totals=totals,
            cause_rows=cause_rows_of(totals, whole.bases, whole.withheld),
            ranks=with_times(whole.ranks, totals, windows),
            superset=whole,
        )

    def __repr__(self) -> str:
        return (
            f"<chopper.Attribution of {self.source!r}: {self.observed_ns} ns over "
            f"{len(self.ranks)} rank(s) and {self.steps} step(s)>"
        )

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
        """Say which ranks and steps ``detail`` covers; and the option that chooses others.

        The option is empty where there are no others.
        """
        near = self.detail.all_steps
        some = [rank.rank for rank in near.ranks]
        of_ranks = f"{len(some)} of {plural(len(self.ranks), 'rank')} ({ranges(some)})"
        rank, number = ints(self.all_steps.windows, "rank"), ints(self.all_steps.windows, "number")
        every, shown = {*number[np.isin(rank, some)]}, {*ints(near.windows, "number")}
        if every <= shown:
            return of_ranks, "--ranks" if len(some) < len(self.ranks) else ""
        of_steps = f"{len(shown)} of {plural(len(every), 'step')} ({ranges(map(int, shown))})"
        if len(self.ranks) == 1:
            return of_steps, "--steps"
        return f"{of_ranks}, {of_steps}", "--ranks or --steps"


def is_staged(run: Attribution) -> bool:
    """Return whether the waits of its ranks are told apart by the stages of a pipeline."""
    return any(one.stage_waits is not None for one in run.matched.values())


def bases_of(
    ranks: Sequence[RankSummary],
    *,
    is_clocked: bool,
    unmeasured: Sequence[dict[str, str]],
    links: Iterable[Link],
) -> dict[str, Basis]:
    """Return what each leaf cause rests on; those that are missing rest on recorded times.

    Args:
        ranks: with the sources of their peaks.
        is_clocked: clocks of some device were measured.
        unmeasured: of each rank, factor → why it was not measured.
        links: between the ranks.
    """
    words = {
        "link": "; ".join(sorted({one.description for one in links})),
        "peak": "; ".join(sorted({r.peak_source for r in ranks if r.peak_source}))
        or "no peak known",
        "clocks": ", normalized to one clock"
        if is_clocked
        else "; clocks were not measured and may differ",
        "unmeasured": _unmeasured(unmeasured),
        "unmeasured_vector": _unmeasured(
            [{n: why[n] for n in _OF_VECTOR if n in why} for why in unmeasured]
        ),
    }
    return {
        leaf: Basis(basis.format(**words), CAUSES[leaf].measured)
        for leaf in LEAVES
        if (basis := inherited(leaf, "basis"))
    }


_OF_VECTOR = ("clock", "contention")
"""Factors of work that is no product."""


def _unmeasured(reasons: Sequence[dict[str, str]]) -> str:
    """Name the factors that are in the rest because they were not measured, and why."""
    by_factor: dict[str, dict[str, None]] = {}
    for of_rank in reasons:
        for name, why in of_rank.items():
            by_factor.setdefault(name, {})[why] = None
    listed = "; ".join(f"{name} not measured ({', '.join(why)})" for name, why in by_factor.items())
    return f"; {listed}" if listed else ""


def with_times(
    ranks: Sequence[RankSummary], totals: Totals, windows: pa.Table
) -> list[RankSummary]:
    """Return ranks with the times of their pieces and how many windows they have."""
    groups = {group.key: group for group in groups_of(totals, "rank")}
    numbers, counts = np.unique(ints(windows, "rank"), return_counts=True)
    windows_count = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    nothing = Group(None, 0, {})
    return [
        replace(
            rank,
            observed_ns=groups.get(rank.rank, nothing).time_ns,
            ideal_ns=groups.get(rank.rank, nothing).causes.get("compute.ideal", 0),
            steps=windows_count.get(rank.rank, 0),
        )
        for rank in ranks
    ]


def groups_of(totals: Totals, level: str) -> list[Group]:
    """Sum times by a level and by leaf cause; with own times where the level has them."""
    codes: np.ndarray
    keys: list[Any]
    if level in ("step", "rank"):
        codes, keys = _steps_of(totals.causes) if level == "step" else _ranks_of(totals.causes)
        return _groups(totals.causes, codes, keys)
    table = totals.levels[level]
    codes, keys = strings(table, "key")
    keys = [*keys, None]  # -1, the last one
    own_times = _own_times(totals.events[level])
    groups = [
        replace(group, own_ns=own_ns, events_count=count)
        for group in _groups(table, codes % len(keys), keys)
        for own_ns, count in [own_times.get(group.key, (0, 0))]
    ]
    return sorted(groups, key=lambda g: (-g.time_ns, str(g.key)))


def groups_of_ranks(totals: Totals, key_of: Mapping[int, int]) -> list[Group]:
    """Sum times by a key of ranks, in its order, and by leaf cause; None, last, is of the rest."""
    keys: list[int | None] = [*sorted({*key_of.values()}), None]
    codes, ranks = _ranks_of(totals.causes)
    code_of_rank = np.array([keys.index(key_of.get(rank)) for rank in ranks], dtype=np.int64)
    return _groups(totals.causes, code_of_rank[codes], keys)


def _groups(table: pa.Table, codes: np.ndarray, keys: list[Any]) -> list[Group]:
    """Return the groups of totals, whose rows are of ``keys[codes]``."""
    time_ns, causes = _by_cause(table, codes, len(keys))
    present = np.bincount(codes, minlength=len(keys)) > 0
    return [
        Group(key, int(row.sum()), {causes[i]: int(row[i]) for i in np.flatnonzero(row)})
        for key, row, there in zip(keys, time_ns, present, strict=True)
        if there
    ]


def _own_times(events: pa.Table) -> dict[str | int | None, tuple[int, int]]:
    """Return, for each value of a level, how long its device events ran and their number."""
    codes, keys = strings(events, "key")
    own_ns, count = (np.zeros(len(keys) + 1, np.int64) for _ in range(2))
    np.add.at(own_ns, codes, ints(events, "own_ns"))
    np.add.at(count, codes, ints(events, "events_count"))
    return dict(zip([*keys, None], zip(own_ns.tolist(), count.tolist(), strict=True), strict=True))


def _by_cause(table: pa.Table, group: np.ndarray, size: int) -> tuple[np.ndarray, list[str]]:
    """Return the exact time of each group by leaf cause, (groups, causes), and the causes."""
    codes, causes = strings(table, "cause")
    time_ns = np.zeros(size * len(causes), dtype=np.int64)
    np.add.at(time_ns, group * len(causes) + codes, ints(table, "time_ns"))
    return time_ns.reshape(size, len(causes)), causes


def _ranks_of(causes: pa.Table) -> tuple[np.ndarray, list[int]]:
    """Return the rank of each row: codes in order, and the ranks."""
    ranks, codes = np.unique(ints(causes, "rank"), return_inverse=True)
    return codes, ranks.tolist()


def _steps_of(causes: pa.Table) -> tuple[np.ndarray, list[int | None]]:
    """Return the step of each row: codes in step order, and the steps' numbers.

    Ranks may have recorded different steps: the same number is the same step, whatever its index.
    Windows without a number (a whole trace) are one step, the last.
    """
    last = np.iinfo(np.int64).max
    numbers, codes = np.unique(ints(causes, "number", null=last), return_inverse=True)
    return codes, [None if n == last else n for n in numbers.tolist()]


def cause_rows_of(
    totals: Totals, bases: dict[str, Basis], withheld: list[Withheld]
) -> list[CauseRow]:
    """Sum times by cause, with intervals over steps."""
    codes, numbers = _steps_of(totals.causes)
    leaves_ns, leaves = _by_cause(totals.causes, codes, len(numbers))
    per_step: dict[str, np.ndarray] = {}
    for leaf, time_ns in zip(leaves, leaves_ns.T, strict=True):
        if time_ns.any():
            for node in (leaf, *parents(leaf)):
                per_step[node] = per_step.get(node, 0) + time_ns
    ids = [c for c in CAUSES if c in per_step]
    intervals = total_intervals(np.stack([per_step[c] for c in ids])) if ids else None
    observed = int(leaves_ns.sum())
    rows = []
    for i, cause_id in enumerate(ids):
        total = int(per_step[cause_id].sum())
        basis = _basis(cause_id, ids, bases)
        above = (cause_id, *parents(cause_id))
        reason = next((h.reason for h in withheld if not {*above}.isdisjoint(h.claim.causes)), None)
        rows.append(
            CauseRow(
                id=cause_id,
                parent=parent(cause_id),
                label=CAUSES[cause_id].label,
                time_ns=total,
                share_ratio=total / observed if observed else None,
                ci95_ns=None if intervals is None or reason else intervals[i],
                basis=basis.text if reason is None else f"not supported: {reason}",
                measured=basis.measured,
                withheld=reason,
            )
        )
    return rows


def _basis(cause_id: str, ids: list[str], bases: dict[str, Basis]) -> Basis:
    """Return what a cause rests on: of a parent, what the leaves below it with time in them do."""
    if cause_id in bases:
        return bases[cause_id]
    under = [bases[c] for c in ids if c.startswith(cause_id + ".") and c in bases]
    if not under:
        return Basis("recorded times", True)
    return Basis("sum of the causes below it", all(b.measured for b in under))


def _links_within(links: pa.Table, rank: int, windows: pa.Table) -> pa.Table:
    """Links of a rank's events, without a window where theirs is none of ``windows``."""
    mine = windows["step_index"].filter(pc.equal(windows["rank"], rank))
    step = links["step_index"]
    inside = pc.if_else(pc.is_in(step, value_set=mine), step, pa.scalar(None, step.type))
    return with_column(links, "step_index", inside)


def _communication_within(whole: Attribution, links: dict[int, pa.Table]) -> pa.Table:
    """The communication table without the events of the windows that ``links`` have lost."""
    rank, row = ints(whole.communication, "rank"), ints(whole.communication, "event_row")
    inside = np.ones(len(rank), dtype=bool)
    for number, left in links.items():
        had, has = (t["step_index"].is_valid().to_numpy() for t in (whole.links[number], left))
        mine = np.flatnonzero(rank == number)
        inside[mine] = (has | ~had)[row[mine]]
    return whole.communication.filter(inside)
