"""The result of attributing a run: tables of exclusive pieces, and views of them.

Everything here is a regrouping of the same nanoseconds: whatever the level, the sums are equal.
Where steps of several kinds were traced, or some ranks have no numbered steps, all of it is of the
kind that the step time describes, and ``whole`` covers everything that was traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.totals import Totals, window_keys
from chopper.arrow import with_column
from chopper.causes import CAUSES, CODES, LEVELS, Level, parent, parents
from chopper.claims import Withheld
from chopper.errors import UsageError
from chopper.hardware.ceilings import Ceilings
from chopper.statistics import total_intervals
from chopper.storage.manifest import Finding

_SLOW_NEARBY = 1.3
SLOWED_RATIO = 0.1
TRAINING = "training"
FIRST = "first steps"


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


@dataclass(frozen=True, slots=True)
class Spread:
    """Times of several steps.

    Attributes:
        quartile_low_ns, quartile_high_ns: half of the steps lie between.
        lengths_ns: each of them, in the order of their numbers.
        statistic: which of the two is the step time. The median, which hiccups do not move; the
            mean where it is a fifth longer: steps that come in flights (a batch from each loader's
            worker, then a wait) have a median that no throughput belongs to. Steps that waited for
            a core, which other programs took, make no flights.
    """

    median_ns: int
    mean_ns: int
    quartile_low_ns: int
    quartile_high_ns: int
    steps_count: int
    lengths_ns: tuple[int, ...]
    statistic: Literal["median", "mean"]

    @property
    def value_ns(self) -> int:
        """The step time."""
        return self.mean_ns if self.statistic == "mean" else self.median_ns


@dataclass(frozen=True, slots=True)
class StepKind:
    """Steps in which the same phases ran.

    Attributes:
        name: ``training``, ``training + evaluation``, ``first steps``, ``long steps`` …
        steps, traced_steps: their numbers, and of those that the attribution has windows of.
        untraced: times of those that ran without a trace; None when there are none.
        traced_mean_ns: mean window of the traced ones; None when there are none.
        time_ns: all of them together, mean over ranks.
        share_ratio: of the time of all recorded steps.
        causes_ns: leaf cause → time in the windows of the traced ones, summed over ranks.
    """

    name: str
    steps: tuple[int, ...]
    traced_steps: tuple[int, ...]
    untraced: Spread | None
    traced_mean_ns: int | None
    time_ns: int
    share_ratio: float
    causes_ns: dict[str, int]


@dataclass(frozen=True, slots=True)
class Outside:
    """Time of a recording that belongs to no step, mean over ranks.

    Attributes:
        after_ns: after the last step, without what chopper took to end the recording.
        profiler_ns: chopper's own: before the first step, between steps (a trace begins, ends, is
            written), and to end the recording.
        recording_ns: the whole recording.
        phases_ns: program phase → its part of ``after_ns``; each nanosecond belongs to the
            innermost phase.
    """

    after_ns: int
    profiler_ns: int
    recording_ns: int
    phases_ns: dict[str, int]


@dataclass(frozen=True, slots=True)
class StepTime:
    """The step time of a run, with and without tracing.

    Attributes:
        kind: which steps it is of.
        untraced: steps of that kind that ran without a trace; None with ``untraced_reason``.
        traced_mean_ns: mean window of the ``traced_count`` traced ones; None when there are none.
        tracing_ns: what tracing itself added to a step: the median difference between traced and
            untraced steps, which one long step does not move; the difference of the means where
            steps are uneven or fewer than three were traced.
        tracing_ci95_ns: its 95 % interval; None with fewer than three traced steps.
        nearby_ns: median of the untraced steps next to the traced ones, up to five on each side;
            None with fewer than three. Where it is long as well, tracing is not the reason.
        drained_ns: length, for the host, of the shortest of the three untraced steps right after a
            trace, when the device had nothing left to do (mean over traces); None without any.
        kinds: all kinds, the most time first.
        outside: time of the recording in no step; None where its bounds are not known.
        phases_ns: program phase → its time in the recorded steps of all kinds, mean over ranks;
            each nanosecond belongs to the innermost phase.
    """

    kind: str
    untraced: Spread | None
    untraced_reason: str | None
    traced_mean_ns: int | None
    traced_count: int
    tracing_ns: int | None
    tracing_ci95_ns: tuple[int, int] | None
    nearby_ns: int | None
    drained_ns: int | None
    kinds: tuple[StepKind, ...]
    outside: Outside | None
    phases_ns: dict[str, int]

    @property
    def steps_count(self) -> int:
        """Number of recorded steps of all kinds."""
        return sum(len(kind.steps) for kind in self.kinds)

    @property
    def loop_ns(self) -> int:
        """Time of all recorded steps and of what follows the last one, mean over ranks."""
        return sum(k.time_ns for k in self.kinds) + (self.outside.after_ns if self.outside else 0)

    @property
    def loop_phases_ns(self) -> dict[str, int]:
        """Program phase → its time in the loop, mean over ranks."""
        return dict(
            Counter(self.phases_ns) + Counter(self.outside.phases_ns if self.outside else {})
        )

    @property
    def headline_ns(self) -> int | None:
        """The step time: of the untraced steps, else the mean of the traced ones."""
        return self.traced_mean_ns if self.untraced is None else self.untraced.value_ns

    @property
    def tracing_ratio(self) -> float | None:
        """Time that tracing added, as a share of the untraced step."""
        if self.tracing_ns is None or self.untraced is None or not self.untraced.value_ns:
            return None
        return self.tracing_ns / self.untraced.value_ns

    @property
    def is_slow_nearby(self) -> bool:
        """Tell whether the untraced steps next to the traced ones took much longer than others."""
        return (
            self.untraced is not None
            and self.nearby_ns is not None
            and self.nearby_ns > _SLOW_NEARBY * self.untraced.value_ns
        )

    @property
    def is_tracing_certain(self) -> bool:
        """Tell whether tracing made steps longer, beyond noise and what slowed others nearby."""
        low_ns = self.tracing_ci95_ns[0] if self.tracing_ci95_ns else self.tracing_ns
        return low_ns is not None and low_ns > 0 and not self.is_slow_nearby

    @property
    def is_slowed_by_tracing(self) -> bool:
        """Tell whether tracing added more than a tenth to a step, beyond noise."""
        if not self.is_tracing_certain or self.untraced is None:
            return False
        low_ns = self.tracing_ci95_ns[0] if self.tracing_ci95_ns else self.tracing_ns or 0
        return low_ns > SLOWED_RATIO * self.untraced.value_ns

    @property
    def scale(self) -> float:
        """Untraced over traced time: what turns a time of traced steps into one at full speed."""
        if self.untraced is None or not self.traced_mean_ns:
            return 1.0
        return self.untraced.value_ns / self.traced_mean_ns

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form."""
        document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        for kind in document["kinds"]:
            kind["steps_count"] = len(kind["steps"])
        for part in (document, *document["kinds"]):
            if part["untraced"] is not None:
                del part["untraced"]["lengths_ns"], part["untraced"]["statistic"]
        headline = {"headline_ns": self.headline_ns, "tracing_ratio": self.tracing_ratio}
        return document | headline


@dataclass(frozen=True)
class Attribution:
    """The attribution of every nanosecond of a run's steps to one cause.

    It holds data only; everything that uses it is a function of it.

    Attributes:
        source: what the user named.
        pieces: the `piece` table of all ranks.
        windows: the `window` table of all ranks.
        totals: sums of the times of all pieces.
        gaps: the `gap` table of all ranks.
        communication: the `communication` table of all ranks.
        links: rank → its `event_link` table, row by row with `device_event`.
        cause_rows: all causes with time in them, in the order of the tree.
        findings: what the data can and cannot support, most severe first.
        withheld: claims that the data does not support, with their reasons.
        coverage: shares that models and joins cover, as ratios; None for unknown.
        bases: leaf cause → what it rests on.
        ceilings: rank → theoretical and measured peaks of its device.
        all_kinds: the attribution of all traced steps, where this one covers only some.
    """

    source: str
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
    all_kinds: Self | None = field(default=None, kw_only=True, repr=False)

    @property
    def whole(self) -> Self:
        """The attribution of all traced steps of all kinds; itself where they are of one kind."""
        return self.all_kinds or self

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

        Steps and ranks come in order, everything else largest first. A key of None gathers
        what has no value at this level (for example idle time without an operator).

        Raises:
            UsageError: no such level.
        """
        if level not in LEVELS:
            raise UsageError(f"level {level!r} unknown: one of {', '.join(LEVELS)}")
        if level == "cause":
            return [Group(row.id, row.time_ns, {row.id: row.time_ns}) for row in self.leaves()]
        return groups_of(self.totals, level)

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
        """Return the part of ``whole`` in numbered steps; the whole where none has a number."""
        numbers = ints(self.whole.windows, "number")
        return self.of_steps(numbers[numbers >= 0]) if (numbers >= 0).any() else self.whole

    def of_steps(self, numbers: Collection[int]) -> Self:
        """Return the part of ``whole`` in these steps; the whole itself where it has no others.

        Args:
            numbers: of steps; -1 for windows without a number.
        """
        whole = self.whole
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
            all_kinds=whole,
        )

    def __repr__(self) -> str:
        return (
            f"<chopper.Attribution of {self.source!r}: {self.observed_ns} ns over "
            f"{len(self.ranks)} rank(s) and {self.steps} step(s)>"
        )


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
