"""Waits for collectives that a program repeats: where it waits in one step, it waits in all.

Without a device no trace says what the host waited for, and a wait for what has ended by then
leaves no trace at all. Steps of a program are alike, though, and so are its ranks: where the n-th
collective of a step is waited for right before one and the same moment whenever a wait shows, that
moment waits for it in every step. Unless it ever came first: then it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.replay.program import ISSUE, OP_END, OP_START, STEP
from chopper.analyzers.trace.columns import distinct_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.analyzers.replay.program import Program
    from chopper.analyzers.trace.join import Links

_SEEN = 2
"""A wait that was seen once may be chance."""


@dataclass(frozen=True)
class _Issued:
    """The collectives of one rank.

    Attributes:
        event: device event of each.
        moment: at which each was issued.
        nth: number in its step.
        name: number of its name, the same on all ranks.
        after: moments from there to the one that waited for it, -1 where none was seen to.
    """

    event: np.ndarray
    moment: np.ndarray
    nth: np.ndarray
    name: np.ndarray
    after: np.ndarray


def in_order(told: Program, links: Links, sent: np.ndarray) -> np.ndarray | None:
    """Moment that issued each collective; None where calls and collectives are not as many."""
    issued = np.flatnonzero(told.kind == ISSUE)
    start = links.events.start_ns[sent]
    if len(issued) != len(sent) or not (told.time_ns[issued] <= start).all():
        return None
    return issued


def recurring_waits(ranks: Sequence[tuple[Program, Links]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Waits that did not show: each rank's device events, and the program's moments after them."""
    known: dict[str, int] = {}
    found = [_issued(told, links, known) for told, links in ranks]
    marks = [_marks(told, links, known) for told, links in ranks]
    rows = np.concatenate([np.stack([f.nth, f.name, f.after]) for f in found], axis=1)
    at = [f.moment + f.after for f in found]
    mark = np.concatenate([m[a] if len(m) else a for m, a in zip(marks, at, strict=True)])
    rank = np.repeat(np.arange(len(found)), [len(f.event) for f in found])
    if not (rows[2] >= 0).any():
        return [(np.zeros(0, np.int64), np.zeros(0, np.int64))] * len(found)
    place = distinct_rows([rows[0], rows[1]])[1]
    after, expected = _usual(place, rows[2], mark)
    waits = []
    for number, (told, links) in enumerate(ranks):
        mine, own = np.flatnonzero(rank == number), found[number]
        moment = own.moment + after[place[mine]]
        there = (after[place[mine]] >= 0) & (moment < len(told))
        there[there] = marks[number][moment[there]] == expected[place[mine]][there]
        early = there.copy()
        early[there] = told.time_ns[moment[there]] < links.events.end_ns[own.event[there]]
        expected[place[mine[early]]] = -2
        waits.append((mine, there & (own.after < 0), moment))
    return [
        (own.event[some], moment[some])
        for own, (mine, hidden, moment) in zip(found, waits, strict=True)
        for some in [hidden & (expected[place[mine]] != -2)]
    ]


def _usual(place: np.ndarray, after: np.ndarray, mark: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(moments after the issuing one, its mark) at which each place waits; -1 where it differs."""
    seen = np.flatnonzero(after >= 0)
    first, way = distinct_rows([place[seen], after[seen], mark[seen]])
    count = np.bincount(way)
    best = np.lexsort((count, place[seen][first]))
    of = place[seen][first][best]
    last = np.append(of[1:] != of[:-1], True)
    chosen = best[last]
    whole = np.bincount(place[seen], minlength=int(place.max()) + 1)
    agreed = (count[chosen] >= _SEEN) & (2 * count[chosen] > whole[of[last]])
    found = np.full((2, len(whole)), -1, dtype=np.int64)
    rows = seen[first[chosen[agreed]]]
    found[0, of[last][agreed]], found[1, of[last][agreed]] = after[rows], mark[rows]
    return found[0], found[1]


def _issued(told: Program, links: Links, known: dict[str, int]) -> _Issued:
    sent = np.flatnonzero(links.events.of("host_collective"))
    moment = in_order(told, links, sent) if len(told) else None
    if moment is None:
        return _Issued(*(np.zeros(0, np.int64) for _ in range(5)))
    step = np.cumsum(told.kind == STEP)[moment]
    if (told.kind == STEP).any():
        # What comes before the steps is another program.
        sent, moment, step = (column[step > 0] for column in (sent, moment, step))
    new = np.append(np.array([True]), step[1:] != step[:-1])[: len(step)]
    count = np.arange(len(step))
    nth = count - np.maximum.accumulate(np.where(new, count, 0))
    codes, values = links.events.names
    name = np.array([known.setdefault(v, len(known)) for v in values], dtype=np.int64)[codes[sent]]
    after = np.full(len(sent), -1, dtype=np.int64)
    at = np.flatnonzero(np.isin(told.waits_for, sent))
    which = np.searchsorted(sent, told.waits_for[at])
    after[which] = np.maximum(at - moment[which], -1)
    return _Issued(sent, moment, nth, name, after)


def _marks(told: Program, links: Links, known: dict[str, int]) -> np.ndarray:
    """Kind of each moment and name of its operator, as a number that is the same on all ranks."""
    codes, values = links.events.names
    name = np.array([known.setdefault(v, len(known)) for v in values] + [-1], dtype=np.int64)
    of_op = np.isin(told.kind, (OP_START, OP_END))
    if not of_op.any():
        return told.kind.astype(np.int64)
    of_name = np.where(of_op, name[codes[np.where(of_op, told.row, 0)]] + 1, 0)
    return np.asarray(of_name * 8 + told.kind)
