"""Match the same collective on all ranks: who came last, and when the transfer could begin.

By process group and sequence number where they are recorded. Else by time: no rank can leave a
collective before every rank has entered it, so the instances of one collective overlap. A dropped
event therefore shifts nothing. Sends are matched with their receives pair by pair, by time.

    participation   one rank: its events that can be matched, and by what
    merge           several parts: the groups all of whose ranks are among them are matched
    resolve         the whole: clocks compared, collectives numbered; what each rank gets back

Ranks may be merged in any order and in any tree: the result is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np

from chopper.analyzers.trace.collectives import (
    ALL_TO_ALL,
    LEFT_EARLY_NS,
    POINT_TO_POINT,
    Communication,
    Group,
    Key,
    Kind,
)
from chopper.analyzers.trace.columns import distinct_rows, row_set, run_starts
from chopper.storage.manifest import Dimension

_SYMMETRIC = frozenset(("allreduce", "reducescatter", "allgather", "alltoall"))
"""Nobody leaves these before everybody has entered: their ends tell how clocks differ."""
_AGREED = frozenset(("allreduce", "reducescatter", "allgather", "broadcast", "reduce"))
"""Whoever takes part in these says the same size; the rest differ between root and others."""
_LEAST_DIFFERING = 2
"""One number under which ranks differ may be a damaged record."""
_SHIFTED_COUNT = 3
_SHIFTED_SPREAD_NS = 20_000
"""A clock that is ahead shifts all ends alike, this closely; different steps do not look so."""
_FAN_IN = 32
"""Parts that are merged at a time."""
_KIND_BITS = 20
"""Bits of the number of a kind, below those of its rank."""
_WALKED_AT_A_TIME = 1 << 16
"""Events of candidates that are compared at a time."""
_EVENTS_AT_A_TIME = 1 << 16
"""Groups, and then their collectives, are matched together up to so many events, which bounds
memory."""


@dataclass(frozen=True, slots=True)
class Misnumbered:
    """A process group whose ranks give one sequence number to different collectives.

    Attributes:
        group: its name, and how many ranks take part.
        ranks: two of them: the lowest, and the one that differs from it most often.
        differing_count: numbers under which they differ in name or size, or, if that is so of most
            and they share a clock, were never in a collective together; of ``compared_count``.
    """

    group: str
    size: int
    ranks: tuple[int, int]
    differing_count: int
    compared_count: int


@dataclass(frozen=True, slots=True)
class StageWaits:
    """Waiting in each step of a rank that follows from schedule, stages and micro-batches.

    Attributes:
        steps: numbers of the steps.
        bubble_ns: shape (3, steps): idle time of the schedule before the first backward, between,
            and after the last forward, if all stages and micro-batches were alike.
        uneven_ns: shape (2, steps): what unequal stages, then unequal micro-batches, add.
        begin_ns: when the first rank of the job began the step, in the rank's clock.
        first_backward_ns, last_forward_ns: as recorded, in the rank's clock, per step.
        stages: rank → place in the pipeline.
    """

    steps: np.ndarray
    bubble_ns: np.ndarray
    uneven_ns: np.ndarray
    begin_ns: np.ndarray
    first_backward_ns: np.ndarray
    last_forward_ns: np.ndarray
    stages: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class UnevenWaits:
    """Waiting in each step of a rank that follows from uneven work along experts or context.

    Attributes:
        steps: numbers of the steps.
        expert_ns, context_ns: at most what it waits there for ranks with more work.
        experts: all-to-alls of groups that no name tells of are exchanges of tokens.
        ring: its sends and receives are those of a ring of parts of the sequence.
    """

    steps: np.ndarray
    expert_ns: np.ndarray
    context_ns: np.ndarray
    experts: bool = False
    ring: bool = False

    def dimension(self, kind: Kind) -> Dimension | None:
        """Return the dimension of a kind of communication that no name tells of."""
        if self.experts and kind.what == ALL_TO_ALL:
            return "expert"
        return "context" if self.ring and kind.what == POINT_TO_POINT else None


@dataclass(frozen=True, slots=True)
class Matched:
    """The matched collectives of one rank.

    Attributes:
        event_row: device events whose collective is matched on all ranks of its group.
        event_ready_ns: when the last rank entered it, in this rank's clock.
        event_instance: number of the collective, the same on all its ranks.
        device_event_count: of the rank, those that do not communicate included.
        offset_ns: lead of this rank's clock over that of ``offset_rank``, the lowest that
            collectives tie it to; by when they leave collectives.
        misnumbered: groups of the run, the same for all its ranks, whose numbers were not used.
        stage_waits: of the pipeline that the rank is in; None without one.
        uneven: what it waits for ranks with more work; None without such exchanges.
    """

    event_row: np.ndarray
    event_ready_ns: np.ndarray
    event_instance: np.ndarray
    device_event_count: int
    offset_ns: int = 0
    offset_rank: int | None = None
    misnumbered: tuple[Misnumbered, ...] = ()
    stage_waits: StageWaits | None = None
    uneven: UnevenWaits | None = None

    def dimensions(self, kinds: Sequence[Kind]) -> list[Dimension | None]:
        """Return the dimension that each kind of communication is along; None where unknown."""
        uneven = self.uneven
        return [k.dimension or (None if uneven is None else uneven.dimension(k)) for k in kinds]

    @property
    def ready_ns(self) -> np.ndarray:
        """Time when the last rank entered each event's collective, -1 where not matched."""
        return self._by_event(self.event_ready_ns)

    @property
    def instance(self) -> np.ndarray:
        """Number of each device event's collective, -1 where not matched."""
        return self._by_event(self.event_instance)

    def of_rows(self, rows: np.ndarray, numbers: np.ndarray, count: int) -> Matched:
        """Return the part in a stretch of the rank's trace.

        Args:
            rows: device events of the stretch.
            numbers: what each is counted as in the whole; below zero where it is not.
            count: of all device events of the stretch.
        """
        order = np.argsort(numbers, kind="stable")
        at = np.minimum(np.searchsorted(numbers[order], self.event_row), max(len(rows) - 1, 0))
        inside = numbers[order][at] == self.event_row if len(rows) else np.zeros(0, dtype=bool)
        return replace(
            self,
            event_row=rows[order][at][inside] if len(rows) else self.event_row[:0],
            event_ready_ns=self.event_ready_ns[: len(inside)][inside],
            event_instance=self.event_instance[: len(inside)][inside],
            device_event_count=count,
        )

    def _by_event(self, values: np.ndarray) -> np.ndarray:
        spread = np.full(self.device_event_count, -1, dtype=np.int64)
        spread[self.event_row] = values
        return spread


@dataclass(frozen=True, slots=True)
class _Columns:
    """Arrays of one length."""

    def __getitem__(self, index: np.ndarray) -> Self:
        return type(self)(*(getattr(self, field.name)[index] for field in fields(self)))

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    @classmethod
    def empty(cls) -> Self:
        """Return no rows."""
        return cls(*(np.zeros(0, dtype=np.int32) for _ in fields(cls)))

    @classmethod
    def stacked(cls, parts: Iterable[Self]) -> Self:
        """Return the rows of all, one part after another."""
        parts = [part for part in parts if len(part)]
        if len(parts) == 1:
            return parts[0]
        columns = [[getattr(part, field.name) for part in parts] for field in fields(cls)]
        return cls(*map(np.concatenate, columns)) if parts else cls.empty()


@dataclass(frozen=True, slots=True)
class Events(_Columns):
    """Communication events of several ranks that can be matched.

    ``kind`` is a code into :attr:`Part.kinds`; ``sequence`` is -1 without a number to match by.
    """

    rank: np.ndarray
    event: np.ndarray
    kind: np.ndarray
    sequence: np.ndarray
    start: np.ndarray
    end: np.ndarray


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of events in some order; a column is copied when it is asked for, and not before.

    Attributes:
        clock_of: rank → the clock that its events are timed by.
    """

    events: Events
    rows: np.ndarray
    clock_of: np.ndarray

    def __getitem__(self, index: np.ndarray | slice) -> _Rows:
        return _Rows(self.events, self.rows[index], self.clock_of)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def rank(self) -> np.ndarray:
        return self._of(self.events.rank)

    @property
    def kind(self) -> np.ndarray:
        return self._of(self.events.kind)

    @property
    def sequence(self) -> np.ndarray:
        return self._of(self.events.sequence)

    @property
    def start(self) -> np.ndarray:
        return self._of(self.events.start)

    @property
    def end(self) -> np.ndarray:
        return self._of(self.events.end)

    @property
    def clock(self) -> np.ndarray:
        clock: np.ndarray = self.clock_of[self.rank]
        return clock

    def _of(self, column: np.ndarray) -> np.ndarray:
        picked: np.ndarray = column[self.rows]
        return picked


@dataclass(frozen=True, slots=True)
class Membership(_Columns):
    """Device events of several ranks, and the matched collective of each."""

    rank: np.ndarray
    event: np.ndarray
    instance: np.ndarray


@dataclass(frozen=True, slots=True)
class Instances(_Columns):
    """Matched collectives, and what their numbers follow.

    Attributes:
        walked: whether it was found by walking its ranks in time order.
        key: where its key comes first.
        sequence: number that its ranks gave it, -1 for none.
        symmetric: whether all its ranks leave it together.
    """

    walked: np.ndarray
    key: np.ndarray
    sequence: np.ndarray
    symmetric: np.ndarray


@dataclass(frozen=True, slots=True)
class Arrivals(_Columns):
    """Each matched collective by each clock that its ranks go by; sorted by both.

    Attributes:
        latest: when the last rank of this clock entered it.
        earliest_end: when the first of them left it.
    """

    instance: np.ndarray
    clock: np.ndarray
    latest: np.ndarray
    earliest_end: np.ndarray


@dataclass(frozen=True, slots=True)
class Matches:
    """Matched collectives of whole groups; ``misnumbered``: with where their groups come first."""

    membership: Membership
    instances: Instances
    arrivals: Arrivals
    misnumbered: tuple[tuple[int, Misnumbered], ...]

    @classmethod
    def stacked(cls, parts: Sequence[Matches]) -> Matches:
        """Return the collectives of all, numbered one part after another."""
        first = [0, *itertools.accumulate(len(part.instances.key) for part in parts)]
        both = [*zip(parts, first, strict=False)]
        return Matches(
            Membership.stacked(
                replace(p.membership, instance=p.membership.instance + n) for p, n in both
            ),
            Instances.stacked(p.instances for p in parts),
            Arrivals.stacked(
                replace(p.arrivals, instance=p.arrivals.instance + n) for p, n in both
            ),
            tuple(itertools.chain.from_iterable(p.misnumbered for p in parts)),
        )


Traits = tuple[Key, int]
"""Key of events, and the size that all ranks must agree in; -1 where they need not."""


@dataclass(frozen=True, slots=True)
class Part:
    """The collectives of some ranks, matched in groups all of whose ranks are among them.

    Attributes:
        clocks: rank → its clock: the lowest rank that goes by it.
        device_event_counts: rank → its device events.
        kinds: traits of the events that wait → where they come first: rank, number of the kind.
        waiting: events of groups of which other ranks are to come.
        matches: collectives of all other groups.
    """

    clocks: dict[int, int]
    device_event_counts: dict[int, int]
    kinds: dict[Traits, int]
    waiting: Events
    matches: Matches


def match(parts: Iterable[Part], *, clocks: Mapping[int, int] | None = None) -> dict[int, Matched]:
    """Match collectives over the ranks of a run.

    A collective counts as matched when every rank of its group is here and took part. All ranks
    leave a collective together, so the median difference of their ends is the difference of their
    clocks; it is taken out before anybody is called late.

    Args:
        parts: participation of each rank; taken as they come.
        clocks: rank → the lowest rank that goes by the same clock; None: each has its own.
    """
    if clocks is not None:
        parts = (
            replace(part, clocks={rank: clocks[rank] for rank in part.clocks}) for part in parts
        )
    return dict(resolve(merge(parts)))


def within(matched: Mapping[int, Matched], ranks: Collection[int]) -> dict[int, Matched]:
    """Return the collectives of some ranks, matched only where all members are among them."""
    count = 1 + max((int(m.event_instance.max(initial=-1)) for m in matched.values()), default=-1)
    partial = np.zeros(count, dtype=bool)
    for rank, one in matched.items():
        if rank not in ranks:
            partial[one.event_instance] = True
    complete = {rank: ~partial[matched[rank].event_instance] for rank in ranks if rank in matched}
    return {
        rank: replace(
            matched[rank],
            event_row=matched[rank].event_row[inside],
            event_ready_ns=matched[rank].event_ready_ns[inside],
            event_instance=matched[rank].event_instance[inside],
        )
        for rank, inside in complete.items()
    }


def participation(
    rank: int,
    communication: Communication,
    clock: int | None = None,
    common: np.ndarray | None = None,
) -> Part:
    """Pick out what other ranks need to know of a rank's communication.

    Args:
        rank: its number.
        communication: of the rank.
        clock: the lowest rank of the run that goes by the same clock; by default the rank itself.
        common: mask of the device events of steps that all ranks traced; None for all. Others are
            matched by their sequence numbers alone.
    """
    traits = [_traits(kind, rank) for kind in communication.kinds]
    kinds: dict[Traits, int] = {}
    for number, one in enumerate(traits):
        if one is not None:
            kinds.setdefault(one, (rank << _KIND_BITS) + number)
    code_of = {one: code for code, one in enumerate(kinds)}
    codes = np.array([-1 if t is None else code_of[t] for t in traits] + [-1], dtype=np.int32)
    numbered = np.array([t is not None and t[0].numbered for t in traits] + [False])
    matchable = codes[communication.kind] >= 0
    if common is not None:
        by_number = numbered[communication.kind] & (communication.sequence >= 0)
        matchable &= by_number | common[communication.event_row]
    rows = np.flatnonzero(matchable)
    kind = communication.kind[rows]
    sequence = np.where(numbered[kind], communication.sequence[rows], -1)
    if sequence.max(initial=-1) < 1 << 31:
        sequence = sequence.astype(np.int32)
    waiting = Events(
        np.full(len(rows), rank, dtype=np.int32),
        communication.event_row[rows].astype(np.int32),
        codes[kind],
        sequence,
        communication.entered_ns[rows],
        communication.left_ns[rows],
    )
    matches = Matches(Membership.empty(), Instances.empty(), Arrivals.empty(), ())
    counts = {rank: communication.device_event_count}
    return Part({rank: rank if clock is None else clock}, counts, kinds, waiting, matches)


def of_stretches(parts: Sequence[Part]) -> Part:
    """Return the participation of a rank from those of its stretches, in their order.

    Its device events are counted on from one stretch to the next.
    """
    if len(parts) == 1:
        return parts[0]
    [rank] = parts[0].clocks
    kinds: dict[Traits, int] = {}
    waiting: list[Events] = []
    count = 0
    for part in parts:
        for traits in part.kinds:
            kinds.setdefault(traits, (rank << _KIND_BITS) + len(kinds))
        code_of = {traits: code for code, traits in enumerate(kinds)}
        codes = np.array([code_of[traits] for traits in part.kinds] or [0], dtype=np.int32)
        events = part.waiting
        waiting.append(replace(events, event=events.event + count, kind=codes[events.kind]))
        count += part.device_event_counts[rank]
    return replace(
        parts[0],
        device_event_counts={rank: count},
        kinds=kinds,
        waiting=Events.stacked(waiting),
    )


def _traits(kind: Kind, rank: int) -> Traits | None:
    """Return what a rank's events of a kind are matched by; None where they cannot be."""
    if kind.key is None or (kind.key.members and rank not in kind.key.members):
        return None
    agreed = kind.message_bytes if kind.what in _AGREED else None
    return kind.key, -1 if agreed is None else agreed


def merge(parts: Iterable[Part]) -> Part:
    """Put parts of different ranks together, in any order; match the groups that are whole then.

    Args:
        parts: taken as they come, so that few of them need be in memory.
    """
    remaining = iter(parts)
    merged: list[Part] = []
    while batch := [*itertools.islice(remaining, _FAN_IN)]:
        merged.append(_merged(batch))
    return merge(_emptied(merged)) if len(merged) > 1 else merged[0] if merged else _merged([])


def _emptied(parts: list[Part]) -> Iterator[Part]:
    """Yield parts and forget them: each is in memory as long as it is needed."""
    while parts:
        yield parts.pop()


def _merged(parts: list[Part]) -> Part:
    """Put all these parts together, and empty the list of them."""
    kinds: dict[Traits, int] = {}
    for part in parts:
        for traits, first in part.kinds.items():
            kinds[traits] = min(first, kinds.get(traits, first))
    code_of = {traits: code for code, traits in enumerate(kinds)}
    waiting = []
    for part in parts:
        codes = np.array([code_of[traits] for traits in part.kinds], dtype=np.int32)
        waiting.append(replace(part.waiting, kind=codes[part.waiting.kind]))
    clocks = {rank: clock for part in parts for rank, clock in part.clocks.items()}
    counts = {rank: count for part in parts for rank, count in part.device_event_counts.items()}
    matches = Matches.stacked([part.matches for part in parts])
    groups = {key.process_group for key, _ in kinds}
    complete = {group for group in groups if group[0] and clocks.keys() >= {*group[0]}}
    stacked = [Part(clocks, counts, kinds, Events.stacked(waiting), matches)]
    parts.clear()
    waiting.clear()
    del matches
    return _settled(stacked.pop(), complete)


def resolve(part: Part) -> Iterator[tuple[int, Matched]]:
    """Yield what each rank gets back, in their order: no other rank is to come."""
    every = {key.process_group for key, _ in part.kinds}
    held = [part]
    del part  # its events are not held while their collectives are put together
    held.append(_settled(held.pop(), every))
    # What only times tell, where clocks differ: once the other collectives have told by how much.
    clocks = _Clocks(held[0])
    part = _settled(held.pop(), every, clocks)
    clocks, matches, instances = _Clocks(part), part.matches, part.matches.instances
    count = len(instances.key)
    number = np.empty(count, dtype=np.int32)
    number[np.lexsort((instances.sequence, instances.key, instances.walked))] = np.arange(count)
    latest = matches.arrivals.latest - clocks.leads_ns(matches.arrivals.clock)
    first = np.flatnonzero(run_starts(matches.arrivals.instance))
    last = np.maximum.reduceat(latest, first) if count else latest
    groups = sorted(matches.misnumbered, key=lambda m: (-m[1].differing_count, m[0]))
    misnumbered = tuple(group for _, group in groups)
    rows = np.lexsort((matches.membership.event, matches.membership.rank))
    ranks = sorted(part.clocks.items())
    of_rank = [rank for rank, _ in ranks]
    first = np.searchsorted(matches.membership.rank, of_rank, sorter=rows)
    # Each rank gets slices of these: thousands of small arrays would leave gaps in the heap.
    event, instance = matches.membership.event[rows], matches.membership.instance[rows]
    ready, number = last[instance], number[instance]
    counts = part.device_event_counts
    bounds = [*itertools.pairwise([*first, len(rows)])]
    del part, matches, rows, instance
    for (mine, clock), (low, high) in zip(ranks, bounds, strict=True):
        offset_ns, offset_rank = clocks.lead_of(clock)
        ready[low:high] += offset_ns
        yield (
            mine,
            Matched(
                event[low:high],
                ready[low:high],
                number[low:high],
                counts[mine],
                offset_ns,
                offset_rank,
                misnumbered,
            ),
        )


def _settled(part: Part, groups: Collection[Group], clocks: _Clocks | None = None) -> Part:
    """Match groups of which no rank is to come.

    Without ``clocks``, events that only times tell on clocks that may differ are left to wait.
    """
    if not groups:
        return part
    kinds, waiting = _Kinds(part.kinds), part.waiting
    settled = np.array([group in groups for group in kinds.groups], dtype=bool)
    clock_of = np.zeros(max(part.clocks, default=0) + 1, dtype=np.int32)
    clock_of[[*part.clocks]] = [*part.clocks.values()]
    group = kinds.group[waiting.kind]
    matches, unmatched = [part.matches], [waiting[~settled[group]]]
    rows = np.flatnonzero(settled[group])
    rows = rows[np.argsort(group[rows], kind="stable")]
    pieces = [*_pieces(run_starts(group[rows]))]
    del group
    for piece in pieces:
        collectives, doubtful = _match_groups(_Rows(waiting, rows[piece], clock_of), kinds, clocks)
        matches += collectives
        again = waiting[doubtful]
        unmatched.append(replace(again, sequence=np.full_like(again.sequence, -1)))
    part = replace(part, waiting=Events.empty())
    del rows
    waiting = Events.stacked(unmatched)
    unmatched.clear()
    waits = row_set(waiting.kind, len(part.kinds))
    waits |= ~settled[kinds.group]
    codes = (np.cumsum(waits) - 1).astype(np.int32)
    return replace(
        part,
        kinds=dict(itertools.compress(part.kinds.items(), waits)),
        waiting=replace(waiting, kind=codes[waiting.kind]),
        matches=Matches.stacked(matches),
    )


def _pieces(begins: np.ndarray) -> Iterator[slice]:
    """Yield slices of some rows each that begin where ``begins`` says that one may."""
    first = np.flatnonzero(begins)
    first = first[run_starts(first // _EVENTS_AT_A_TIME)]
    for low, high in itertools.pairwise([*first.tolist(), len(begins)]):
        yield slice(low, high)


class _Kinds:
    """Traits of events as columns, one row per kind.

    Attributes:
        groups: process groups, and where each comes first.
        group, rank_count: number of the kind's group, and how many ranks take part.
        what, symmetric: code of the collective's name, and whether all leave it together.
        agreed: size that all ranks must agree in, -1 where they need not.
        by_number, by_traits: where the key comes first that events with a sequence number have,
            and those without one; -1 where they have none.
        is_numbered: whether events are told by their sequence number, where they have one.
    """

    def __init__(self, kinds: Mapping[Traits, int]) -> None:
        self.groups: dict[Group, int] = {}
        numbered: dict[tuple[Group, str], int] = {}
        named: dict[tuple[Group, str, int | None], int] = {}
        whats: dict[str, int] = {}
        rows = [(key.process_group, key, agreed, at) for (key, agreed), at in kinds.items()]
        for group, key, _, at in rows:
            self.groups[group] = min(at, self.groups.get(group, at))
            whats.setdefault(key.what, len(whats))
            of, alike = (group, key.what), (group, key.what, key.elements)
            named[alike] = min(2 * at, named.get(alike, 2 * at))
            if key.numbered:
                numbered[of] = min(2 * at + 1, numbered.get(of, 2 * at + 1))
        number = {group: n for n, group in enumerate(self.groups)}
        columns = [
            (
                number[group],
                key.size,
                whats[key.what],
                key.what in _SYMMETRIC,
                agreed,
                numbered[group, key.what] if key.numbered else -1,
                -1 if key.elements is None else named[group, key.what, key.elements],
            )
            for group, key, agreed, _ in rows
        ]
        table = np.array(columns, dtype=np.int64).reshape(-1, 7).T
        self.group, self.rank_count, self.what, symmetric, self.agreed = table[:5]
        self.by_number, self.by_traits = table[5:]
        self.symmetric = symmetric == 1
        self.is_numbered = np.ones(len(rows), dtype=bool)

    def keys_of(self, events: _Rows) -> tuple[np.ndarray, np.ndarray]:
        """Return where the key of each event comes first, and its number; -1 for none."""
        kind, sequence = events.kind, events.sequence
        numbered = (sequence >= 0) & self.is_numbered[kind]
        key = np.where(numbered, self.by_number[kind], self.by_traits[kind])
        return key, np.where(numbered, sequence, sequence.dtype.type(-1))


def _match_groups(
    events: _Rows, kinds: _Kinds, clocks: _Clocks | None
) -> tuple[list[Matches], np.ndarray]:
    """Match all collectives of some groups, all events of which are here.

    Returns:
        (the collectives, rows of the events left to wait).
    """
    misnumbered = _misnumbered(events, kinds)
    kinds.is_numbered[np.isin(kinds.group, [*misnumbered])] = False
    key, sequence = kinds.keys_of(events)
    order = np.lexsort((events.start, events.rank, sequence, key))
    order = order[key[order] >= 0]
    new, events = run_starts(key[order], sequence[order]), events[order]
    del key, sequence, order
    first_of = [*kinds.groups.values()]
    of_groups = tuple((first_of[group], one) for group, one in misnumbered.items())
    results = [replace(Matches.stacked([]), misnumbered=of_groups)]
    doubtful = [events.rows[:0]]
    for piece in _pieces(new):
        some = events[piece]
        for positions, begins, is_walked in _instances(some, new[piece], kinds, clocks, doubtful):
            for part in _pieces(begins):
                results.append(_describe(some[positions[part]], begins[part], kinds, is_walked))
    return results, np.concatenate(doubtful)


def _describe(events: _Rows, begins: np.ndarray, kinds: _Kinds, is_walked: bool) -> Matches:
    """Describe collectives whose events lie one after another; ``begins``: where each does."""
    instance = np.cumsum(begins, dtype=np.int32) - 1
    events = events[np.lexsort((events.rank, events.clock, instance))]
    clock, one = events.clock, events[begins]
    clock_starts = np.flatnonzero(run_starts(instance, clock))
    return Matches(
        Membership(events.rank, events.events.event[events.rows], instance),
        Instances(np.full(len(one), is_walked), *kinds.keys_of(one), kinds.symmetric[one.kind]),
        Arrivals(
            instance[clock_starts],
            clock[clock_starts],
            np.maximum.reduceat(events.start, clock_starts),
            events[clock_starts].end,
        ),
        (),
    )


def _misnumbered(events: _Rows, kinds: _Kinds) -> dict[int, Misnumbered]:
    """Groups whose ranks mean different collectives by one number, at least twice.

    Whoever started to count later, or counted what others did not, is off by some: each number
    names another collective there. Their names and sizes tell, and on one clock that two never
    were in it together. Numbers that stand for several events on some rank tell nothing.
    """
    events = events[np.flatnonzero(events.sequence >= 0)]
    group = kinds.group[events.kind]
    order = np.lexsort((events.rank, events.sequence, group))
    events, group = events[order], group[order]
    pieces = [*_pieces(run_starts(group, events.sequence))]

    def compared() -> Iterator[tuple[list[np.ndarray], np.ndarray, np.ndarray]]:
        for piece in pieces:
            yield _compared(events[piece], group[piece], kinds)

    if not any(differs.any() or apart.any() for _, differs, apart in compared()):
        return {}
    tallies = []
    for pairs, differs, apart in compared():
        row, of = distinct_rows(pairs)
        counts = (
            np.bincount(of, marks) for marks in (differs | True, differs, apart, differs | apart)
        )
        tallies.append([*(column[row] for column in pairs), *counts])
    *pairs, count, differing, apart, either = map(np.concatenate, zip(*tallies, strict=True))
    row, of = distinct_rows(pairs)
    count, differing, apart, either = (
        np.bincount(of, n) for n in (count, differing, apart, either)
    )
    # A device's times may be off for a while; numbers that are, are off throughout.
    differing = np.where(2 * apart > count, either, differing)
    names = [*kinds.groups]
    misnumbered: dict[int, Misnumbered] = {}
    for at in np.argsort(-differing, kind="stable"):
        if differing[at] < _LEAST_DIFFERING:
            break
        of_group, low, other = (int(column[row[at]]) for column in pairs)
        _, size_count, name = names[of_group]
        misnumbered.setdefault(
            of_group,
            Misnumbered(name, size_count, (low, other), int(differing[at]), int(count[at])),
        )
    return misnumbered


def _compared(
    events: _Rows, group: np.ndarray, kinds: _Kinds
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Compare the events of each number with that of the lowest rank.

    Args:
        events: sorted by group, number and rank.

    Returns:
        (group and both ranks of each two that are compared, whether they differ in name or size,
        whether they were never in a collective together).
    """
    rank, sequence, kind = events.rank, events.sequence, events.kind
    what, size = kinds.what[kind], kinds.agreed[kind]
    first = run_starts(group, sequence)
    number = np.cumsum(first) - 1
    twice = ~run_starts(group, sequence, rank)
    several = row_set(number[twice], int(first.sum()))
    other = np.flatnonzero(~first & ~several[number])
    low = np.flatnonzero(first)[number[other]]
    sized = (size[other] >= 0) & (size[low] >= 0)
    differs = (what[other] != what[low]) | (sized & (size[other] != size[low]))
    start, end, clock, together = events.start, events.end, events.clock, kinds.symmetric[kind]
    apart_ns = np.maximum(start[other] - end[low], start[low] - end[other])
    apart = together[other] & together[low] & (apart_ns > LEFT_EARLY_NS)
    apart &= clock[other] == clock[low]
    return [group[other], rank[low], rank[other]], differs, apart


def _instances(
    events: _Rows,
    new_group: np.ndarray,
    kinds: _Kinds,
    clocks: _Clocks | None,
    doubtful_rows: list[np.ndarray],
) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
    """Group events, sorted by key, number, rank and start, into collectives.

    Where every rank has equally many, the n-th of one is the n-th of all: always when they are
    numbered (coalesced collectives share a number), else when all of these overlap in time.
    Otherwise the ranks are walked in time order. Events of no collective are left out.

    Args:
        new_group: whether key or number differ from those of the event before.
        doubtful_rows: gets the rows of events that wait for clocks to be compared.

    Yields:
        (positions, collective by collective; whether one begins there; whether walking found them).
    """
    start_of_group = np.flatnonzero(new_group)
    first = np.flatnonzero(new_group | run_starts(events.rank))
    each = np.diff(np.append(first, len(events)))
    of_group = np.flatnonzero(new_group[first])
    most, least = np.maximum.reduceat(each, of_group), np.minimum.reduceat(each, of_group)
    present = np.diff(np.append(of_group, len(first)))
    complete = present == kinds.rank_count[events[start_of_group].kind]
    even = complete & (most == least)
    together = _side_by_side(first, each, of_group, present, even)
    width, group = np.repeat(present[even], most[even]), np.repeat(np.flatnonzero(even), most[even])
    failed = np.zeros(len(present), dtype=bool)
    if len(together):
        some, at = events[together], np.cumsum(width) - width
        apart = np.maximum.reduceat(some.start, at) > np.minimum.reduceat(some.end, at)
        failed[group[apart]] = True
        failed &= kinds.keys_of(events[start_of_group])[1] < 0
        for number in np.flatnonzero(failed & (most >= _SHIFTED_COUNT)):
            low = at[np.searchsorted(group, number)]
            high = low + present[number] * most[number]
            failed[number] = not _shifted(some[low:high], int(present[number]))
        matched = ~failed[group]
        together, width = together[np.repeat(matched, width)], width[matched]
        del some
        yield together, row_set(np.cumsum(width) - width, len(together)), False
        del together
    walks = failed | (complete & ~even)
    bounds = np.append(start_of_group, len(events))
    clock = events[first].clock
    if clocks is None:
        doubtful = walks & (
            np.maximum.reduceat(clock, of_group) > np.minimum.reduceat(clock, of_group)
        )
        walks &= ~doubtful
        doubtful_rows.append(events.rows[np.repeat(doubtful, np.diff(bounds))])
    for number in np.flatnonzero(walks):
        low, high = of_group[number], of_group[number] + present[number]
        lead_ns = 0 * clock[low:high] if clocks is None else clocks.leads_ns(clock[low:high])
        walked = _walk(events, lead_ns, int(bounds[number]), int(bounds[number + 1]))
        begins = np.zeros(walked.shape, dtype=bool)
        begins[:, 0] = True
        yield walked.reshape(-1), begins.reshape(-1), True


def _side_by_side(
    first: np.ndarray,
    each: np.ndarray,
    of_group: np.ndarray,
    present: np.ndarray,
    even: np.ndarray,
) -> np.ndarray:
    """Return the positions of the events of even groups: the n-th of all ranks one by one.

    Args:
        first, each: where each rank's events of a group begin, and how many they are.
        of_group, present: where each group's ranks begin among those, and how many they are.
        even: groups of whose ranks each has equally many events.
    """
    group = np.repeat(np.arange(len(present)), present)
    rank = np.flatnonzero(even[group])
    group, count = group[rank], each[rank]
    before = np.cumsum(count) - count
    begin = before[np.searchsorted(group, group)]  # of the group's first rank
    nth = np.arange(int(count.sum())) - np.repeat(before, count)
    at = np.repeat(begin + rank - of_group[group], count) + nth * np.repeat(present[group], count)
    nth += np.repeat(first[rank], count)
    positions = np.empty(len(at), dtype=np.int64)
    positions[at] = nth
    return positions


def _shifted(events: _Rows, ranks: int) -> bool:
    """Tell whether collectives of one key overlap once each clock is shifted by its median lead.

    The n-th events of all ranks stand side by side, rank by rank.
    """
    clock = events[:ranks].clock
    if (clock == clock[0]).all():
        return False
    end = events.end.reshape(-1, ranks)
    lead = end - end[:, :1]
    offset = np.median(lead, axis=0).astype(np.int64)
    # In place: there may be many.
    lead -= offset
    if np.quantile(np.abs(lead, out=lead), 0.9, overwrite_input=True) > _SHIFTED_SPREAD_NS:
        return False
    latest_start = (events.start.reshape(-1, ranks) - offset).max(axis=1)
    return bool((latest_start <= (end - offset).min(axis=1)).all())


class _Clocks:
    """Leads of the clocks of a part, by when ranks leave the collectives matched so far.

    Of the lowest clock that collectives tie it to: by the median difference of ends over the
    collectives that two clocks share; those who share none are tied through others, and by
    collectives that a rank may leave early where there are no better ones.
    """

    def __init__(self, part: Part) -> None:
        self._names = np.unique([*part.clocks.values()])
        count = len(self._names)
        self._leads_ns, self._root = np.zeros(count, dtype=np.int64), np.arange(count)
        if count > 1:
            for *_, one, other, ahead_ns in sorted(self._ties(part.matches), reverse=True):
                self._tie(one, other, ahead_ns)

    def leads_ns(self, clocks: np.ndarray) -> np.ndarray:
        """Return the lead of each of these clocks."""
        return self._leads_ns[np.searchsorted(self._names, clocks)]

    def lead_of(self, clock: int) -> tuple[int, int]:
        """Return the lead of a clock, and over which one."""
        at = np.searchsorted(self._names, clock)
        return int(self._leads_ns[at]), int(self._names[self._root[at]])

    def _ties(self, matches: Matches) -> Iterator[tuple[bool, int, int, int, int]]:
        """Yield (symmetric, collectives, two clocks, lead of the second), pair by pair."""
        arrivals, count = matches.arrivals, len(self._names)
        clock = np.searchsorted(self._names, arrivals.clock)
        first = run_starts(arrivals.instance)
        reference = np.maximum.accumulate(np.where(first, np.arange(len(first)), 0))[~first]
        symmetric = matches.instances.symmetric[arrivals.instance[~first]]
        pair = (symmetric * count + clock[reference]) * count + clock[~first]
        lead = arrivals.earliest_end[~first] - arrivals.earliest_end[reference]
        order = np.argsort(pair, kind="stable")
        pair, lead = pair[order], lead[order]
        for low, high in itertools.pairwise(np.append(np.flatnonzero(run_starts(pair)), len(pair))):
            of, other = divmod(int(pair[low]), count)
            yield of >= count, int(high - low), of % count, other, int(np.median(lead[low:high]))

    def _tie(self, one: int, other: int, ahead_ns: int) -> None:
        """Shift the whole part that holds the higher root so that this tie is true."""
        root, leads_ns = self._root, self._leads_ns
        if root[one] == root[other]:
            return
        fixed, moved = (one, other) if root[one] < root[other] else (other, one)
        wanted = leads_ns[fixed] + (ahead_ns if moved == other else -ahead_ns)
        part = root == root[moved]
        leads_ns[part] += wanted - leads_ns[moved]
        root[part] = root[fixed]


def _walk(events: _Rows, lead_ns: np.ndarray, low: int, high: int) -> np.ndarray:
    """Positions (collectives, ranks) of those events of one key that overlap on all ranks.

    Walks all ranks in time order. The candidates are each rank's next event; when they have a
    moment in common they are one collective, else those that end before the latest of them starts
    have lost their partners. Where one is found, as many that follow as can be are tried at once.

    Args:
        lead_ns: of each rank's clock.
    """
    first = low + np.flatnonzero(run_starts(events[low:high].rank))
    stop, at = np.append(first[1:], high), first
    walked = [np.zeros((0, len(first)), dtype=np.int64)]
    ahead = 1
    while (remaining := int((stop - at).min())) > 0:
        block = at + np.arange(min(remaining, ahead))[:, None]
        latest_start = (events[block].start - lead_ns).max(axis=1)
        together = latest_start <= (events[block].end - lead_ns).min(axis=1)
        count = len(block) if together.all() else int(together.argmin())
        walked.append(block[:count])
        at = at + (count if count else events[at].end - lead_ns < latest_start[0])
        ahead = min(2 * ahead, _WALKED_AT_A_TIME // len(first) + 1) if count == len(block) else 1
    return np.concatenate(walked)
