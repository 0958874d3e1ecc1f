"""Match the same collective on all ranks: who came last, and when the transfer could begin.

By process group and sequence number where they are recorded. Else by time: no rank can leave a
collective before every rank has entered it, so the instances of one collective overlap. A dropped
event therefore shifts nothing. Sends are matched with their receives pair by pair, by time.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from chopper.analyzers.trace.collectives import LEFT_EARLY_NS, Communication, Group, Key
from chopper.analyzers.trace.columns import row_set, run_starts

_SYMMETRIC = frozenset(("allreduce", "reducescatter", "allgather", "alltoall"))
"""Nobody leaves these before everybody has entered: their ends tell how clocks differ."""
_AGREED = frozenset(("allreduce", "reducescatter", "allgather", "broadcast", "reduce"))
"""Whoever takes part in these says the same size; the rest differ between root and others."""
_LEAST_DIFFERING = 2
"""One number under which ranks differ may be a damaged record."""
_SHIFTED_COUNT = 3
_SHIFTED_SPREAD_NS = 20_000
"""A clock that is ahead shifts all ends alike, this closely; different steps do not look so."""


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
class Matched:
    """The matched collectives of one rank, per device event.

    Attributes:
        ready_ns: when the last rank entered the event's collective, in this rank's clock; -1 where
            it is not matched on all ranks of its group.
        instance: number of the collective, the same on all its ranks; -1 where not matched.
        offset_ns: lead of this rank's clock over that of ``offset_rank``, the lowest that
            collectives tie it to; by when they leave collectives.
        misnumbered: groups of the run, the same for all its ranks, whose numbers were not used.
    """

    ready_ns: np.ndarray
    instance: np.ndarray
    offset_ns: int = 0
    offset_rank: int | None = None
    misnumbered: tuple[Misnumbered, ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """Communication events of all ranks that have a key; sorted by key, number, rank, start.

    ``size`` is the message in bytes, as far as all ranks of a collective must agree in it; else -1.
    """

    rank: np.ndarray
    event: np.ndarray
    start: np.ndarray
    end: np.ndarray
    key: np.ndarray
    sequence: np.ndarray
    size: np.ndarray

    def __getitem__(self, index: np.ndarray) -> Rows:
        return Rows(*(getattr(self, name)[index] for name in self.__slots__))


def match(ranks: Mapping[int, Communication], *, one_clock: bool = False) -> dict[int, Matched]:
    """Match collectives over the ranks of a run.

    A collective counts as matched when every rank of its group is here and took part. All ranks
    leave a collective together, so the median difference of their ends is the difference of their
    clocks; it is taken out before anybody is called late.

    Args:
        ranks: rank → its communication.
        one_clock: the ranks are known to share a clock (one host): ends are not compared.
    """
    keys: dict[Key, int] = {}
    rows = _keyed(ranks.values(), keys)
    names = list(ranks)
    misnumbered = _misnumbered(rows, list(keys), names, one_clock=one_clock)
    if misnumbered:
        keys = {}
        rows = _keyed(ranks.values(), keys, by_time=frozenset(misnumbered))
    sizes = np.array([key.size for key in keys], dtype=np.int64)
    position, instance = _instances(rows, sizes, one_clock=one_clock)
    rows = rows[position]
    offsets, root = np.zeros(len(names), dtype=np.int64), np.arange(len(names))
    if not one_clock and len(instance):
        symmetric = np.array([key.what in _SYMMETRIC for key in keys], dtype=bool)
        _tie_clocks(rows, instance, symmetric[rows.key], offsets, root)
    last = np.full(int(instance.max(initial=-1)) + 1, np.iinfo(np.int64).min)
    np.maximum.at(last, instance, rows.start - offsets[rows.rank])
    result = {}
    for number, (rank, communication) in enumerate(ranks.items()):
        mine = rows.rank == number
        ready, instances = np.full((2, communication.device_event_count), -1, dtype=np.int64)
        ready[rows.event[mine]] = last[instance[mine]] + offsets[number]
        instances[rows.event[mine]] = instance[mine]
        result[rank] = Matched(
            ready, instances, int(offsets[number]), names[root[number]], tuple(misnumbered.values())
        )
    return result


def _keyed(
    ranks: Iterable[Communication],
    keys: dict[Key, int],
    by_time: frozenset[Group] = frozenset(),
) -> Rows:
    """Events that can be matched, groups ``by_time`` without numbers; fills ``keys`` with codes."""
    parts = [Rows(*[np.zeros(0, np.int64)] * 7)]
    for number, communication in enumerate(ranks):
        kinds = communication.kinds
        agreed, unnumbered, numbered = np.full((3, len(kinds) + 1), -1, dtype=np.int64)
        for i, kind in enumerate(kinds):
            if kind.what in _AGREED and kind.message_bytes is not None:
                agreed[i] = kind.message_bytes
            if kind.key is not None:
                unnumbered[i] = keys.setdefault(kind.key, len(keys))
            if kind.numbered_key is not None and kind.numbered_key.process_group not in by_time:
                numbered[i] = keys.setdefault(kind.numbered_key, len(keys))
        of = communication.kind
        has_number = (communication.sequence >= 0) & (numbered[of] >= 0)
        key = np.where(has_number, numbered[of], unnumbered[of])
        parts.append(
            Rows(
                np.full(len(of), number, dtype=np.int64),
                communication.event_row,
                communication.entered_ns,
                communication.left_ns,
                key,
                np.where(has_number, communication.sequence, -1),
                agreed[of],
            )[key >= 0]
        )
    rows = Rows(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in Rows.__slots__)
    )
    return rows[np.lexsort((rows.start, rows.rank, rows.sequence, rows.key))]


def _misnumbered(
    rows: Rows, keys: list[Key], names: list[int], *, one_clock: bool
) -> dict[Group, Misnumbered]:
    """Groups whose ranks mean different collectives by one number, at least twice.

    Whoever started to count later, or counted what others did not, is off by some: each number
    names another collective there. Their names and sizes tell, and on one clock that two never
    were in it together. Numbers that stand for several events on some rank tell nothing.
    """
    rows = rows[rows.sequence >= 0]
    if not len(rows.key):
        return {}
    groups: dict[Group, int] = {}
    what: dict[str, int] = {}
    group = np.array([groups.setdefault(k.process_group, len(groups)) for k in keys])[rows.key]
    order = np.lexsort((rows.rank, rows.sequence, group))
    rows, group = rows[order], group[order]
    called = np.array([what.setdefault(k.what, len(what)) for k in keys])[rows.key]
    together = np.array([k.what in _SYMMETRIC for k in keys])[rows.key]
    first = run_starts(group, rows.sequence)
    number = np.cumsum(first) - 1
    twice = ~run_starts(group, rows.sequence, rows.rank)
    several = row_set(number[twice], len(first))
    other = np.flatnonzero(~first & ~several[number])
    low = np.flatnonzero(first)[number][other]
    sized = (rows.size[other] >= 0) & (rows.size[low] >= 0)
    differs = (called[other] != called[low]) | (sized & (rows.size[other] != rows.size[low]))
    count = len(names)
    pair = (group[other] * count + rows.rank[low]) * count + rows.rank[other]
    pairs, of = np.unique(pair, return_inverse=True)
    compared = np.bincount(of)
    if one_clock:
        apart_ns = np.maximum(rows.start[other] - rows.end[low], rows.start[low] - rows.end[other])
        apart = together[other] & together[low] & (apart_ns > LEFT_EARLY_NS)
        # A device's times may be off for a while; numbers that are, are off throughout.
        differs |= apart & (2 * np.bincount(of, apart) > compared)[of]
    differing = np.bincount(of, differs)
    misnumbered: dict[Group, Misnumbered] = {}
    listed = list(groups)
    for at in np.argsort(-differing, kind="stable"):
        if differing[at] < _LEAST_DIFFERING:
            break
        of_group, both = divmod(int(pairs[at]), count * count)
        _, size, name = listed[of_group]
        ranks = names[both // count], names[both % count]
        misnumbered.setdefault(
            listed[of_group],
            Misnumbered(name, size, ranks, int(differing[at]), int(compared[at])),
        )
    return misnumbered


def _instances(rows: Rows, sizes: np.ndarray, *, one_clock: bool) -> tuple[np.ndarray, np.ndarray]:
    """Group rows of equal key and number into collectives -> positions, collective of each.

    Where every rank has equally many, the n-th of one is the n-th of all: always when they are
    numbered (coalesced collectives share a number), else when all of these overlap in time.
    Otherwise the ranks are walked in time order. Rows of no collective are left out.
    """
    count = len(rows.key)
    if not count:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    new_group = run_starts(rows.key, rows.sequence)
    group = np.cumsum(new_group) - 1
    first = np.flatnonzero(run_starts(rows.key, rows.sequence, rows.rank))
    each = np.diff(np.append(first, count))
    occurrence = np.arange(count) - np.repeat(first, each)
    start_of_group = np.flatnonzero(new_group)
    of_group = np.flatnonzero(new_group[first])
    most, least = np.maximum.reduceat(each, of_group), np.minimum.reduceat(each, of_group)
    present = np.bincount(group[first])
    complete = present == sizes[rows.key[start_of_group]]
    even = complete & (most == least)
    together = np.flatnonzero(even[group])
    together = together[np.lexsort((rows.rank[together], occurrence[together], group[together]))]
    block = run_starts(group[together], occurrence[together])
    instance = np.cumsum(block) - 1
    failed = np.zeros(len(present), dtype=bool)
    if len(together):
        at = np.flatnonzero(block)
        latest_start = np.maximum.reduceat(rows.start[together], at)
        apart = latest_start > np.minimum.reduceat(rows.end[together], at)
        failed[group[together][at[apart]]] = True
        failed &= rows.sequence[start_of_group] < 0
        if not one_clock:
            for number in np.flatnonzero(failed & (most >= _SHIFTED_COUNT)):
                mine = together[group[together] == number]
                failed[number] = not _shifted(rows[mine], int(present[number]))
        kept = ~failed[group[together]]
        together, instance = together[kept], instance[kept]
    positions, numbers = [together], [instance]
    bounds = np.append(start_of_group, count)
    following = int(instance.max(initial=-1)) + 1
    for number in np.flatnonzero(failed | (complete & ~even)):
        walked = _walk(rows, int(bounds[number]), int(bounds[number + 1]))
        positions.append(walked.reshape(-1))
        numbers.append(following + np.repeat(np.arange(len(walked)), walked.shape[1]))
        following += len(walked)
    return np.concatenate(positions), np.concatenate(numbers)


def _shifted(rows: Rows, ranks: int) -> bool:
    """Tell whether collectives of one key overlap once each clock is shifted by its median lead.

    In ``rows`` the n-th events of all ranks stand side by side, rank by rank.
    """
    start, end = rows.start.reshape(-1, ranks), rows.end.reshape(-1, ranks)
    lead = end - end[:, :1]
    offset = np.median(lead, axis=0).astype(np.int64)
    spread = np.abs(lead - offset)
    if np.quantile(spread, 0.9) > _SHIFTED_SPREAD_NS:
        return False
    return bool(((start - offset).max(axis=1) <= (end - offset).min(axis=1)).all())


def _tie_clocks(
    rows: Rows, instance: np.ndarray, symmetric: np.ndarray, offsets: np.ndarray, root: np.ndarray
) -> None:
    """Fill in the lead of each rank's clock over that of the lowest rank tied to it; and which.

    The median difference of ends over the collectives that two ranks share; those who share none
    are tied through others.
    """
    at = np.flatnonzero(symmetric if symmetric.any() else ~symmetric)
    at = at[np.lexsort((rows.rank[at], instance[at]))]
    first = run_starts(instance[at])
    reference = at[np.maximum.accumulate(np.where(first, np.arange(len(at)), 0))]
    others = np.flatnonzero(~first)
    pair = rows.rank[reference[others]] * len(root) + rows.rank[at[others]]
    lead = rows.end[at[others]] - rows.end[reference[others]]
    order = np.argsort(pair, kind="stable")
    pair, lead = pair[order], lead[order]
    ties: list[tuple[int, int, int, int]] = []
    for low, high in itertools.pairwise(np.append(np.flatnonzero(run_starts(pair)), len(pair))):
        one, other = divmod(int(pair[low]), len(root))
        ties.append((int(high - low), one, other, int(np.median(lead[low:high]))))
    for _, one, other, ahead in sorted(ties, reverse=True):
        if root[one] == root[other]:
            continue
        # Shift the whole part that holds the higher root so that this tie is true.
        fixed, moved = (one, other) if root[one] < root[other] else (other, one)
        wanted = offsets[fixed] + (ahead if moved == other else -ahead)
        part = root == root[moved]
        offsets[part] += wanted - offsets[moved]
        root[part] = root[fixed]


def _walk(rows: Rows, low: int, high: int) -> np.ndarray:
    """Positions (collectives, ranks) of those rows of one key that overlap on all ranks.

    Walks all ranks in time order. The candidates are each rank's next event; when they have a
    moment in common they are one collective, else the one that ends first has lost its partners.
    """
    rank = rows.rank[low:high]
    first = np.flatnonzero(run_starts(rank))
    stop = np.append(first[1:], len(rank)).tolist()
    start, end = rows.start[low:high].tolist(), rows.end[low:high].tolist()
    at = first.tolist()
    walked: list[list[int]] = []
    heads: list[tuple[int, int]] = []
    while True:
        if not heads:
            if any(i >= s for i, s in zip(at, stop, strict=True)):
                break
            heads = [(end[i], member) for member, i in enumerate(at)]
            heapq.heapify(heads)
            latest = max(start[i] for i in at)
        first_end, loser = heads[0]
        if latest <= first_end:
            walked.append(at)
            at = [i + 1 for i in at]
            heads = []
            continue
        # Starts grow along a rank, so the latest of the heads can only be raised by this step.
        at[loser] += 1
        if at[loser] >= stop[loser]:
            break
        heapq.heapreplace(heads, (end[at[loser]], loser))
        latest = max(latest, start[at[loser]])
    return np.array(walked, dtype=np.int64).reshape(-1, len(first)) + low
