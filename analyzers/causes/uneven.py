"""Uneven work: how much of a rank's waiting for experts or for its ring has work as the reason.

In an exchange of tokens, and in a ring of parts of a sequence, ranks wait for the one that has more
to do. What each did before is compared at equal speed: a slow rank has no more work for being slow.
As much of the waiting as the difference of work takes is imbalance; the rest made a single rank
late: a straggler, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chopper.analyzers.causes.core_wait import taken
from chopper.analyzers.causes.event_work import event_work
from chopper.analyzers.causes.states import Shares, States, stacked
from chopper.analyzers.trace.collectives import ALL_TO_ALL, POINT_TO_POINT, Kind
from chopper.analyzers.trace.columns import distinct_rows, ints, run_starts
from chopper.analyzers.trace.join import COMPUTE
from chopper.analyzers.trace.match import Matched, UnevenWaits
from chopper.analyzers.trace.rank_join import JoinedRank
from chopper.causes import CODES, LEAVES

UNEVEN_RATIO = 1.1
"""From this factor on, work or messages are uneven."""
_DIMENSIONS = ("expert", "context")
_TRANSFERS = ("transfer.at_peak", "transfer.below_peak", "transfer.no_peak", "unseparated")
_WAIT = CODES["communication.wait"]


class Work(NamedTuple):
    """Work of device events, a row for those of one name in one stretch of time.

    Attributes:
        name: code of what they are called.
        calls_count, moved_bytes, flop: NaN where one of them is unknown.
        dur_ns: how long they ran.
    """

    name: np.ndarray
    calls_count: np.ndarray
    moved_bytes: np.ndarray
    flop: np.ndarray
    dur_ns: np.ndarray


def at_equal_speed(work: Work, rank: np.ndarray) -> np.ndarray:
    """Return how long each row takes if all ranks work as fast as the one in the middle, in ns.

    The amount of work is FLOP, where a name lacks them on some row bytes, where it lacks these
    calls. Speeds are compared name by name.

    Args:
        work: of all ranks.
        rank: of each row.
    """
    count = int(work.name.max(initial=-1)) + 1
    amount = work.calls_count.astype(np.float64)
    for known in (work.moved_bytes, work.flop):
        lacking = np.bincount(work.name[~(known > 0)], minlength=count) > 0
        amount = np.where(lacking[work.name], amount, known)
    first, of = distinct_rows([work.name, rank])
    took_ns = np.bincount(of, work.dur_ns, len(first)) / np.maximum(np.bincount(of, amount), 1)
    return np.asarray(amount * _middle(took_ns, work.name[first], count)[work.name])


def _middle(values: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    """Return the lower median of each of ``count`` groups; 0 of one without values."""
    order = np.lexsort((values, group))
    sizes = np.bincount(group, minlength=count)
    at = np.cumsum(sizes) - sizes + (np.maximum(sizes, 1) - 1) // 2
    return np.where(sizes > 0, np.append(values[order], 0.0)[np.minimum(at, len(order))], 0.0)


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Exchanges of one rank along experts or context, and its work before each.

    Attributes:
        numbers: of the rank's windows.
        kinds: of its communication.
        event_row, kind, window: of each exchange that is a collective.
        ring_ranks: those it sends to or receives from in a ring; empty without one.
        sends_own: in most steps it sends before it has worked on what it received.
        stretch: of each row of ``work``: the exchange before which it is, or, counted on from
            these, the window that it is in.
        names: what codes of ``work`` stand for.
    """

    numbers: np.ndarray
    kinds: list[Kind]
    event_row: np.ndarray
    kind: np.ndarray
    window: np.ndarray
    ring_ranks: frozenset[int]
    sends_own: bool
    stretch: np.ndarray
    names: list[str]
    work: Work


def exchanges_of(joined: JoinedRank) -> Exchanges | None:
    """Return the exchanges of a rank along experts or context; None without any."""
    communication, staged = joined.communication, joined.inputs.staged
    kinds = communication.kinds
    along = [_may_be_uneven(kind, staged=staged) for kind in kinds]
    if not any(along):
        return None
    window = ints(joined.event_link, "step_index")[communication.event_row]
    mine = np.array([*along, False])[communication.kind] & (window >= 0)
    sent = np.array([*(k.what == POINT_TO_POINT for k in kinds), False])[communication.kind]
    rows = np.flatnonzero(mine & ~sent)
    in_ring = [k for k, one in zip(kinds, along, strict=True) if one and k.what == POINT_TO_POINT]
    ring_ranks = frozenset(rank for kind in in_ring for rank in kind.members)
    kind, entered_ns = communication.kind[rows], communication.entered_ns[rows]
    low = _begins(joined, rows, window)
    work = _work_before(joined, kind, low, entered_ns, len(in_ring) > 0)
    return Exchanges(
        joined.windows.numbers,
        kinds,
        communication.event_row[rows],
        kind,
        window[rows],
        ring_ranks,
        bool(in_ring) and _sends_its_own(joined, mine & sent, window),
        *work,
    )


def _may_be_uneven(kind: Kind, *, staged: bool) -> bool:
    if kind.dimension is not None:
        return kind.dimension in _DIMENSIONS
    # Experts and rings of programs that name no groups.
    return kind.what == ALL_TO_ALL or (kind.what == POINT_TO_POINT and not staged)


def _begins(joined: JoinedRank, rows: np.ndarray, window: np.ndarray) -> np.ndarray:
    """Return when the rank left the group's collective before each one, else began the window."""
    communication = joined.communication
    groups: dict[tuple[str | None, tuple[int, ...]], int] = {}
    numbers = [groups.setdefault((k.group, k.members), len(groups)) for k in communication.kinds]
    group = np.array([*numbers, -1])[communication.kind]
    order = np.lexsort((communication.entered_ns, group))
    low = np.where(window >= 0, joined.windows.bounds_ns[window], 0)
    after = order[1:][~run_starts(group[order], window[order])[1:]]
    before = order[:-1][~run_starts(group[order], window[order])[1:]]
    low[after] = np.maximum(low[after], communication.left_ns[before])
    return np.asarray(low[rows])


def _work_before(
    joined: JoinedRank, group: np.ndarray, low: np.ndarray, high: np.ndarray, ring: bool
) -> tuple[np.ndarray, list[str], Work]:
    """Return the work in each stretch of time, and in each window after these.

    Args:
        joined: the rank.
        group: stretches of one group do not overlap.
        low, high: bounds of the stretches.
        ring: whether that of windows is asked for.
    """
    links = joined.links()
    events = np.flatnonzero(links.work_class == COMPUTE)
    start_ns, dur_ns = links.events.start_ns[events], links.events.dur_ns[events]
    known = event_work(links, joined.ceiling)
    (op, ops), (kernel, kernels) = links.op_names, links.events.names
    name = np.where(op >= 0, op, len(ops) + kernel)[events]
    found = []
    for number in np.unique(group).tolist():
        mine = np.flatnonzero(group == number)
        mine = mine[np.argsort(low[mine], kind="stable")]
        at = mine[np.maximum(np.searchsorted(low[mine], start_ns, side="right") - 1, 0)]
        inside = np.flatnonzero((start_ns >= low[at]) & (start_ns < high[at]))
        found.append((inside, at[inside]))
    if ring:
        window = ints(joined.event_link, "step_index")[events]
        inside = np.flatnonzero(window >= 0)
        found.append((inside, len(low) + window[inside]))
    event, stretch = (np.concatenate(of) for of in zip(*found, strict=True))
    first, of = distinct_rows([stretch, name[event]])
    amounts = [
        np.bincount(of, values[event], len(first))
        for values in (known.work_bytes[events], known.work_flop[events], dur_ns)
    ]
    calls_count = np.bincount(of, minlength=len(first))
    return stretch[first], [*ops, *kernels], Work(name[event][first], calls_count, *amounts)


def _sends_its_own(joined: JoinedRank, sent: np.ndarray, window: np.ndarray) -> bool:
    """Tell whether a rank sends, in most steps, before it has worked on what it received.

    In a ring it does; the last stage of a pipeline sends only what it made of what it received.

    Args:
        joined: the rank.
        sent: mask of its sends and receives.
        window: of each communication event.
    """
    communication, rank = joined.communication, joined.inputs.rank
    out = [bool(k.key and k.key.what.startswith(f"send {rank}→")) for k in communication.kinds]
    sends = np.array([*out, False])[communication.kind]
    links = joined.links()
    begun_ns = links.events.start_ns[links.work_class == COMPUTE]
    own = []
    for number in np.unique(window[sent]).tolist():
        mine = sent & (window == number)
        first = communication.entered_ns[mine & sends].min(initial=2**62)
        received = communication.left_ns[mine & ~sends].min(initial=2**62)
        works = (begun_ns >= received) & (begun_ns < first)
        both = (mine & sends).any() and (mine & ~sends).any()
        own.append(bool(both and not works.any()))
    return 2 * sum(own) > len(own)


def uneven_waits(
    exchanges: Mapping[int, Exchanges], matched: Mapping[int, Matched]
) -> dict[int, UnevenWaits]:
    """Return by rank what it waits in exchanges for ranks with more work; empty without any.

    Args:
        exchanges: by rank.
        matched: collectives of all ranks.
    """
    exchanges = {r: exchanges[r] for r in sorted(exchanges) if r in matched}
    if not exchanges:
        return {}
    work = _by_rank(exchanges)
    rings = _rings(exchanges, work)
    members = _members(exchanges, matched, work)
    experts = _unequal(members)
    rank, steps, dimension, less_ns = members.less_work(experts)
    found = {}
    for one, of in exchanges.items():
        numbers = np.unique(of.numbers)
        by_dimension = []
        for number in range(len(_DIMENSIONS)):
            mine = np.flatnonzero((rank == one) & (dimension == number))
            at = np.searchsorted(numbers, steps[mine])
            by_dimension.append(np.bincount(at, less_ns[mine], len(numbers)))
        if one in rings:
            by_dimension[1] = by_dimension[1] + rings[one]
        expert_ns, context_ns = np.rint(by_dimension).astype(np.int64)
        found[one] = UnevenWaits(numbers, expert_ns, context_ns, experts, one in rings)
    return found


class _Spent(NamedTuple):
    """Work of a rank at equal speed, and what it took, by stretch of its exchanges, in ns."""

    work_ns: np.ndarray
    busy_ns: np.ndarray


def _by_rank(exchanges: Mapping[int, Exchanges]) -> dict[int, _Spent]:
    """Compare the work of all ranks at equal speed."""
    numbers: dict[str, int] = {}
    parts = []
    for of in exchanges.values():
        code = np.array([numbers.setdefault(name, len(numbers)) for name in of.names] or [0])
        parts.append(of.work._replace(name=code[of.work.name]))
    rank = np.repeat([*exchanges], [len(part.name) for part in parts])
    equal = at_equal_speed(Work(*map(np.concatenate, zip(*parts, strict=True))), rank)
    bounds = np.cumsum([len(part.name) for part in parts])[:-1]
    spent = {}
    for (one, of), own_ns in zip(exchanges.items(), np.split(equal, bounds), strict=True):
        count = len(of.event_row) + len(of.numbers)
        sums = (np.bincount(of.stretch, values, count) for values in (own_ns, of.work.dur_ns))
        spent[one] = _Spent(*sums)
    return spent


def _rings(
    exchanges: Mapping[int, Exchanges], spent: Mapping[int, _Spent]
) -> dict[int, np.ndarray]:
    """Return by rank of a ring what its work is less than the most of the ring, by step number."""
    found: dict[int, np.ndarray] = {}
    for ring in _joined_rings({rank: of.ring_ranks for rank, of in exchanges.items()}):
        named = [k.dimension for r in ring for k in exchanges[r].kinds if k.what == POINT_TO_POINT]
        if not all(named) and not all(exchanges[rank].sends_own for rank in ring):
            continue
        steps = np.unique(np.concatenate([exchanges[rank].numbers for rank in ring]))
        work_ns = np.zeros((len(ring), len(steps)))
        for row, rank in enumerate(ring):
            of = exchanges[rank]
            at = np.searchsorted(steps, of.numbers)
            np.add.at(work_ns[row], at, spent[rank].work_ns[len(of.event_row) :])
        most = work_ns.max(axis=0)
        for row, rank in enumerate(ring):
            own = np.searchsorted(steps, np.unique(exchanges[rank].numbers))
            found[rank] = (most - work_ns[row])[own]
    return found


def _joined_rings(partners: Mapping[int, Iterable[int]]) -> Iterator[list[int]]:
    """Yield the ranks that exchange with each other, directly or through others."""
    left = {rank: {*others} & partners.keys() for rank, others in partners.items() if others}
    while left:
        ring, found = [next(iter(left))], set[int]()
        while ring:
            rank = ring.pop()
            if rank in left:
                found.add(rank)
                ring += left.pop(rank)
        yield sorted(found)


class _Members(NamedTuple):
    """Exchanges of all ranks that are collectives, one row per rank; rows of one lie together.

    Attributes:
        first: first row of each exchange.
        of: exchange of each row.
        rank, step: its rank, and the number of the step.
        dimension: code into ``_DIMENSIONS``; -1 where no name tells it.
        to_all: whether it is an all-to-all.
        sent_bytes: NaN where unknown.
        work_ns, busy_ns: before it, since the last one of the group.
    """

    first: np.ndarray
    of: np.ndarray
    rank: np.ndarray
    step: np.ndarray
    dimension: np.ndarray
    to_all: np.ndarray
    sent_bytes: np.ndarray
    work_ns: np.ndarray
    busy_ns: np.ndarray

    def uneven(self, ratio: float) -> np.ndarray:
        """Return a mask of the exchanges in which some rank puts in so much more than another."""
        if not len(self.first):
            return np.zeros(0, dtype=bool)
        least, most = (f.reduceat(self.sent_bytes, self.first) for f in (np.minimum, np.maximum))
        return np.asarray(self.to_all[self.first] & (most >= ratio * least) & (most > 0))

    def less_work(self, experts: bool) -> tuple[np.ndarray, ...]:
        """Return rank, step, dimension and how much less it worked than the most, in ns.

        Where ranks put in unequal numbers of bytes, these are the tokens that they worked on.
        """
        if not len(self.of):
            return self.rank, self.step, self.dimension, self.work_ns
        by_tokens = self.uneven(UNEVEN_RATIO)[self.of]
        per_byte_ns = self.busy_ns / np.maximum(self.sent_bytes, 1)
        equal_ns = self.sent_bytes * _middle(per_byte_ns, self.of, len(self.first))[self.of]
        work_ns = np.where(by_tokens, equal_ns, self.work_ns)
        most = np.maximum.reduceat(work_ns, self.first)[self.of]
        dimension = np.where((self.dimension < 0) & self.to_all & experts, 0, self.dimension)
        return self.rank, self.step, dimension, most - work_ns


def _members(
    exchanges: Mapping[int, Exchanges],
    matched: Mapping[int, Matched],
    spent: Mapping[int, _Spent],
) -> _Members:
    """Put the matched exchanges of all ranks together."""
    parts = []
    for rank, of in exchanges.items():
        instance = matched[rank].instance[of.event_row]
        rows = np.flatnonzero(instance >= 0)
        of_kind = [
            (
                _DIMENSIONS.index(k.dimension) if k.dimension in _DIMENSIONS else -1,
                k.what == ALL_TO_ALL,
                np.nan if k.sent_bytes is None else float(k.sent_bytes),
            )
            for k in of.kinds
        ]
        columns = [np.array(column)[of.kind[rows]] for column in zip(*of_kind, strict=True)]
        numbers, busy = of.numbers[of.window[rows]], spent[rank]
        here = np.full(len(rows), rank)
        before = (busy.work_ns[: len(of.event_row)][rows], busy.busy_ns[: len(of.event_row)][rows])
        parts.append([instance[rows], here, numbers, *columns, *before])
    instance, *columns = (np.concatenate(of) for of in zip(*parts, strict=True))
    order = np.argsort(instance, kind="stable")
    new = run_starts(instance[order])
    return _Members(np.flatnonzero(new), np.cumsum(new) - 1, *(column[order] for column in columns))


def _unequal(members: _Members) -> bool:
    """Tell whether ranks send unequal amounts in a fourth of the all-to-alls of unnamed groups."""
    unnamed = (members.to_all & (members.dimension < 0))[members.first]
    uneven = members.uneven(UNEVEN_RATIO)[unnamed]
    return bool(unnamed.any() and 4 * uneven.sum() >= len(uneven))


def by_dimension(joined: JoinedRank, matched: Matched, states: States, exposed: Shares) -> Shares:
    """Give exposed communication to the dimension of parallelism that it is along, where known.

    Transfers change their leaf; waiting goes to imbalance as far as uneven work explains it.

    Args:
        joined: the rank.
        matched: its collectives.
        states: its exclusive states, whose fragments are shared out.
        exposed: of communication and copies.
    """
    communication = joined.communication
    dimensions = matched.dimensions(communication.kinds)
    if not any(dimensions):
        return exposed
    along = np.full(joined.device_event.num_rows, -1)
    numbers = [-1 if d is None else _PLACED.index(d) for d in dimensions]
    along[communication.event_row] = np.array([*numbers, -1])[communication.kind]
    of = along[states.event_row[exposed.fragment]]
    placed = exposed._replace(cause=np.where(of < 0, exposed.cause, _ALONG[of, exposed.cause]))
    if matched.uneven is None:
        return placed
    window, uneven = states.window[exposed.fragment], matched.uneven
    at = np.minimum(np.searchsorted(uneven.steps, joined.windows.numbers), len(uneven.steps) - 1)
    known = uneven.steps[at] == joined.windows.numbers
    parts = []
    held_ns = np.where(exposed.cause == _WAIT, exposed.time_ns, 0)
    for name, wait_ns in (("expert", uneven.expert_ns), ("context", uneven.context_ns)):
        left_ns = np.where(known, wait_ns[at], 0)
        # Who has less work may wait for the others later: there they go on together.
        for mine in (of == _PLACED.index(name), np.ones(len(of), dtype=bool)):
            uneven_ns = taken(window, np.where(mine, held_ns, 0), left_ns)
            left_ns = left_ns - np.bincount(window, uneven_ns, len(left_ns)).astype(np.int64)
            held_ns = held_ns - uneven_ns
            parts.append((exposed.fragment, CODES[f"communication.{name}.imbalance"], uneven_ns))
    rest_ns = exposed.time_ns - sum(uneven_ns for *_, uneven_ns in parts)
    return stacked([(placed.fragment, placed.cause, rest_ns), *parts])


_PLACED = ("tensor", *_DIMENSIONS)
"""Dimensions whose transfers are causes of their own."""


def _along() -> np.ndarray:
    """Return the leaf of a transfer along each dimension by its leaf along no known one."""
    leaves = np.tile(np.arange(len(LEAVES)), (len(_PLACED), 1))
    for number, name in enumerate(_PLACED):
        for leaf in _TRANSFERS:
            own = f"communication.{name}.{leaf.removeprefix('transfer.')}"
            leaves[number, CODES[f"communication.{leaf}"]] = CODES[own]
    return leaves


_ALONG = _along()
