"""Work after a wait of the host: caches have cooled meanwhile, so at first it takes longer.

While a thread sleeps for milliseconds, others fill its core's caches. A walk over 1 MB took 11
times as long after 30 ms of sleep, 4 times after 10 ms and 1.3 times after 3 ms, and was as before
0.4 ms of work later; a loop in registers took no longer, so it is not the clock. Where the wait is
gone, so is that.

How much it was, the run itself tells: the same work, later after the same waits. Other steps,
without such a wait, are not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.replay.program import OP_END, OP_START
from chopper.analyzers.trace.columns import distinct_rows
from chopper.causes import CODES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.analyzers.replay.graph import RankNodes
    from chopper.analyzers.replay.program import Program

_COOL_NS = 5_000_000
"""Shorter waits cool little."""
_BINS_NS = np.array([0, 1_000_000, 2_000_000, 4_000_000, 8_000_000])
"""Work since the wait, over which one ratio holds; from the last one on all is warm."""
_SEEN = 5
"""Durations of which a middle one says what is usual."""
_WAITS = 8
"""Fewer waits tell nothing."""
_COVERED_RATIO = 0.5
_WAITED = [CODES[f"idle.preparation.{c}"] for c in ("data", "collective_wait")]


@dataclass(frozen=True)
class Warming:
    """Change of work after waits if it came without them.

    Attributes:
        of_part: for each host part, how many times as long it takes.
        of_event: for each device event that is an operator of the program, the same.
        waits_count: waits that are gone.
        saved_ns: what that takes off the work after all of them.
    """

    of_part: np.ndarray
    of_event: np.ndarray
    waits_count: int
    saved_ns: int


@dataclass(frozen=True)
class _After:
    """Work of one program by the waits that are gone before it.

    Attributes:
        own_ns: work of each moment's interval.
        after_ns: work between the last wait and that.
        wait: number of the wait that is gone, 0 where the last one stays.
        gone: mask of the moments whose interval holds such a wait.
        until_ns: end of that wait.
    """

    own_ns: np.ndarray
    after_ns: np.ndarray
    wait: np.ndarray
    gone: np.ndarray
    until_ns: np.ndarray


def warming(ranks: Sequence[tuple[RankNodes, np.ndarray]]) -> list[Warming | None]:
    """Return the change of work after removed waits (masks of the program's parts), per rank.

    Returns:
        None for ranks that lose no wait, for all where nothing shows that work after them was
        slower.
    """
    if not any(_asleep(node, removed).any() for node, removed in ranks):
        return [None] * len(ranks)
    found = [_after(node, removed) for node, removed in ranks]
    if sum(int(one.gone.sum()) for one in found) < _WAITS:
        return [None] * len(found)
    ratios = _ratios([node for node, _ in ranks], found)
    if (ratios >= 1).all():
        return [None] * len(found)
    return [
        _applied(node, removed, after, ratios) if after.gone.any() else None
        for (node, removed), after in zip(ranks, found, strict=True)
    ]


def _asleep(node: RankNodes, removed: np.ndarray) -> np.ndarray:
    return np.asarray(removed & np.isin(node.program.parts.cause, _WAITED))


def _after(node: RankNodes, removed: np.ndarray) -> _After:
    program = node.program
    parts = program.parts
    asleep = _asleep(node, removed)
    length = parts.end_ns - parts.start_ns
    gone = _per_moment(program, np.where(asleep, length, 0)) >= _COOL_NS
    span = np.diff(program.time_ns, prepend=program.time_ns[:1])
    own = np.where(program.inside, span, _per_moment(program, np.where(removed, 0, length)))
    stays = ~program.inside & ~gone & (span - program.work_ns >= _COOL_NS)
    head = np.flatnonzero(gone | stays)
    last = np.cumsum(gone | stays)
    since = np.cumsum(own) - own
    after = since - np.append(since[:1], since[head])[last]
    wait = np.where(np.append(np.array([False]), gone[head])[last], last, 0)
    until = np.zeros(len(program), dtype=np.int64)
    np.maximum.at(until, parts.owner[asleep], parts.end_ns[asleep])
    return _After(own, after, wait, gone, until)


def _applied(node: RankNodes, removed: np.ndarray, after: _After, ratios: np.ndarray) -> Warming:
    program = node.program
    parts, events = program.parts, node.links.events
    factor = np.append(ratios, 1.0)[_bin(after.after_ns)]
    factor[after.wait == 0] = 1.0
    # Of the interval that holds the wait, what lies before that is not cold.
    before = after.gone[parts.owner] & (parts.start_ns < after.until_ns[parts.owner])
    of_part = np.where(before | removed, 1.0, factor[parts.owner])
    of_event = np.ones(len(node.start))
    ran = np.flatnonzero(program.inside)
    of_event[program.row[ran]] = factor[ran]
    saved = ((parts.end_ns - parts.start_ns) * (1 - of_part)).sum()
    saved += (events.dur_ns * (1 - of_event)).sum()
    return Warming(of_part, of_event, int(after.gone.sum()), round(float(saved)))


def _per_moment(program: Program, part_ns: np.ndarray) -> np.ndarray:
    spent = np.bincount(program.parts.owner, weights=part_ns, minlength=len(program))
    return np.asarray(spent.astype(np.int64))


def _ratios(nodes: Sequence[RankNodes], found: Sequence[_After]) -> np.ndarray:
    """Usual work over what it took after waits, by work since the wait; 1 where it does not differ.

    Usual is the middle one of the same work further from such a wait. A sum of middle ones is less
    than the middle sum, so the ratio is held against that of the warm work itself. All count where
    the 95 % interval of the whole median over waits excludes that. Where less than half of the work
    is known, the ratio is that of the work that follows it.
    """
    count = len(_BINS_NS)
    sums = [_by_wait(node, after) for node, after in zip(nodes, found, strict=True)]
    own, usual = (np.concatenate([one[i] for one in sums]) for i in (0, 1))
    every = np.sum([one[2] for one in sums], axis=0)
    none = np.ones(count - 1)
    warm = _ratio(own[:, -1], usual[:, -1])
    cold = np.sort(_ratio(own[:, :-1].sum(axis=1), usual[:, :-1].sum(axis=1)))
    if min(len(warm), len(cold)) < _WAITS:
        return none
    level = float(np.median(warm))
    # Free of distributions: an order statistic of a binomial with p = 1/2.
    high = min(len(cold) - 1, int(np.ceil(len(cold) / 2 + 0.98 * np.sqrt(len(cold)))))
    if cold[high] >= level:
        return none
    known = own.sum(axis=0) >= _COVERED_RATIO * np.maximum(every, 1)
    for at in range(count - 2, -1, -1):
        ratio = _ratio(own[:, at], usual[:, at])
        if known[at] and len(ratio) >= _WAITS:
            none[at] = min(float(np.median(ratio)) / level, 1.0)
        elif at + 1 < count - 1:
            none[at] = none[at + 1]
    return none


def _bin(after_ns: np.ndarray) -> np.ndarray:
    return np.asarray(np.searchsorted(_BINS_NS, after_ns, side="right") - 1)


def _by_wait(node: RankNodes, of: _After) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Work whose usual length is known and that length, (waits, bins) each; all work by bin."""
    count, place = len(_BINS_NS), _bin(of.after_ns)
    follows = (of.wait > 0) & ~of.gone
    usual = _usual(_signatures(node), of.own_ns, follows & (place == count - 1))
    usual[~_told(node)] = np.nan
    rows = np.flatnonzero(follows & ~np.isnan(usual))
    number = np.unique(of.wait[rows], return_inverse=True)[1]
    at = number * count + place[rows]
    shape = (int(number.max(initial=-1)) + 1, count)
    own, known = (
        np.bincount(at, weights=v[rows], minlength=shape[0] * count).reshape(shape)
        for v in (of.own_ns, usual)
    )
    every = np.bincount(place[follows], weights=of.own_ns[follows], minlength=count)
    return own, known, every


def _ratio(own_ns: np.ndarray, usual_ns: np.ndarray) -> np.ndarray:
    some = own_ns > 0
    return np.asarray(usual_ns[some] / own_ns[some])


def _usual(signature: np.ndarray, own_ns: np.ndarray, warm: np.ndarray) -> np.ndarray:
    """Median of the warm work of each signature, NaN where too little was seen."""
    rows = np.flatnonzero(warm)
    rows = rows[np.lexsort((own_ns[rows], signature[rows]))]
    count = np.bincount(signature[rows], minlength=int(signature.max(initial=0)) + 1)
    first = np.cumsum(count) - count
    found = np.full(len(count), np.nan)
    seen = np.flatnonzero(count >= _SEEN)
    found[seen] = own_ns[rows[first[seen] + count[seen] // 2]]
    return np.asarray(found[signature])


def _told(node: RankNodes) -> np.ndarray:
    """Mask of the intervals of which it is known what was done: of operators, those with shapes."""
    program, links = node.program, node.links
    found = ~program.inside
    if len(links.host):
        row = links.launch_row[program.row[program.inside]]
        found[program.inside] = links.host.input_dims[0][row] >= 0
    return found


def _signatures(node: RankNodes) -> np.ndarray:
    """Number of what each interval of the program is: its end, and the two moments before.

    Operators are the same where their inputs are, too: layers of one name need not be of one size.
    """
    program, links = node.program, node.links
    of_op = np.isin(program.kind, (OP_START, OP_END))
    event = np.where(of_op, program.row, 0)
    parts = [links.events.names[0][event]]
    if len(links.host):
        host = links.host
        for codes, _ in (host.input_dims, host.input_types, host.concrete_inputs):
            parts.append(codes[links.launch_row[event]])
    of = distinct_rows(parts)[1]
    name = np.where(of_op, of, -1) * 8 + program.kind
    before = np.append(name[:1], name[:-1])
    first = np.append(before[:1], before[:-1])
    return distinct_rows([name, before, first])[1]
