"""Where in time each cause lies: the pieces of a rank laid out without overlap or hole."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.groups import Groups, rows_of
from chopper.analyzers.trace.columns import dictionary, ints, matching, strings

_CLASSES = ("compute", "communication", "copy")
"""The first of these that runs at a moment has it, as in level 1 of the attribution."""


class CauseSlices(NamedTuple):
    """Slices of one rank, in order of time.

    Attributes:
        start_ns: Unix time.
        dur_ns: more than 0.
        cause: ids of leaves.
        event_row: row of `device_event`, -1 for none.
    """

    start_ns: np.ndarray
    dur_ns: np.ndarray
    cause: pa.DictionaryArray
    event_row: np.ndarray


def cause_slices(run: Attribution, rank: int) -> CauseSlices:
    """Lay out a rank's time by cause. PIECE, GAP, WINDOW, EVENT_LINK, DEVICE_EVENT -> slices.

    The slices of a window follow one another and sum to each cause's time in it exactly. Idle time
    is where its gap is, other time where its event had the device. If several events share a
    moment, or an event or a gap has several causes, their times follow one another.
    """
    mine = pc.field("rank") == rank
    windows, gaps = run.windows.filter(mine), run.gaps.filter(mine)
    pieces = run.pieces.filter(mine & (pc.field("time_ns") > 0))
    codes, causes = strings(pieces, "cause")
    idle = matching(codes, causes, lambda cause: cause.startswith("idle"))
    row, time_ns = ints(pieces, "event_row"), ints(pieces, "time_ns")
    index = [ints(windows, "step_index")]
    window = rows_of(index, [ints(pieces, "step_index")])
    # Pieces of one event, or of the gaps before it, in a window.
    keys = [window, row, idle.astype(np.int64)]
    fragments = Groups(keys)
    first = fragments.first
    events = run.joined[rank].device_event
    start_ns, end_ns = (ints(windows, name)[window[first]] for name in ("start_ns", "end_ns"))
    busy = np.flatnonzero(~idle[first])
    at = row[first][busy]
    start_ns[busy] = np.maximum(start_ns[busy], ints(events, "start_ns")[at])
    end_ns[busy] = np.minimum(end_ns[busy], (ints(events, "start_ns") + ints(events, "dur_ns"))[at])
    codes_of_class, names = strings(run.links[rank], "work_class")
    number = np.array([_CLASSES.index(name) for name in names], dtype=np.int64)
    owner, turn_ns, length_ns = _turns(start_ns[busy], end_ns[busy], number[codes_of_class[at]])
    gap_start_ns = ints(gaps, "start_ns")
    wanted = [rows_of(index, [ints(gaps, "step_index")]), ints(gaps, "event_row")]
    gap_owner = rows_of([key[first] for key in keys], [*wanted, np.ones(gaps.num_rows, np.int64)])
    turns = _Turns.of(
        # Each fragment has one turn at least.
        (np.arange(len(fragments)), start_ns, np.zeros_like(start_ns)),
        (busy[owner], turn_ns, length_ns),
        (gap_owner, gap_start_ns, ints(gaps, "end_ns") - gap_start_ns),
    )
    piece, start_ns, dur_ns = _cut(fragments, time_ns, turns)
    order = np.lexsort((start_ns, window[piece]))
    piece, dur_ns = piece[order], dur_ns[order]
    window = window[piece]
    # What rounding moved of shared moments: each slice begins where the one before ends.
    begun_ns = np.cumsum(dur_ns) - dur_ns
    start_ns = ints(windows, "start_ns")[window] + begun_ns
    start_ns -= begun_ns[np.searchsorted(window, window)]
    return CauseSlices(start_ns, dur_ns, dictionary(codes[piece], causes), row[piece])


class _Turns(NamedTuple):
    """When fragments have the device: fragment, start and length, in order."""

    fragment: np.ndarray
    start_ns: np.ndarray
    length_ns: np.ndarray

    @classmethod
    def of(cls, *parts: tuple[np.ndarray, np.ndarray, np.ndarray]) -> _Turns:
        fragment, start_ns, length_ns = map(np.concatenate, zip(*parts, strict=True))
        order = np.lexsort((length_ns, start_ns, fragment))
        order = order[fragment[order] >= 0]
        return cls(fragment[order], start_ns[order], length_ns[order])


def _cut(
    fragments: Groups, time_ns: np.ndarray, turns: _Turns
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut pieces to the turns of their fragment: (piece, start, duration).

    Pieces and turns are cut at each other's ends, on an axis on which the times of the fragments
    follow one another. What rounding left of shared moments is in a fragment's last turn.
    """
    fragment, length_ns = turns.fragment, turns.length_ns
    whole_ns = fragments.sum(time_ns)
    until_ns = np.cumsum(length_ns)
    first = np.searchsorted(fragment, np.arange(len(fragments)))
    used_ns = np.minimum(until_ns - (until_ns - length_ns)[first][fragment], whole_ns[fragment])
    used_ns[np.append(first[1:], len(fragment)) - 1] = whole_ns
    turn_end = (np.cumsum(whole_ns) - whole_ns)[fragment] + used_ns
    order = np.argsort(fragments.of_row, kind="stable")
    piece_end = np.cumsum(time_ns[order])
    ends = np.unique(np.concatenate([piece_end, turn_end]))
    ends = ends[ends > 0]
    begins = np.concatenate([[0], ends])[:-1]
    turn = np.searchsorted(turn_end, ends)
    turn_begin = np.concatenate([[0], turn_end])[:-1]
    start_ns = turns.start_ns[turn] + begins - turn_begin[turn]
    return order[np.searchsorted(piece_end, ends)], start_ns, ends - begins


def _turns(
    start_ns: np.ndarray, end_ns: np.ndarray, class_number: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return when each of some intervals has the device: (interval, start, length).

    Intervals of the same class that share a moment have equal parts of it, one after another.
    """
    edges = np.unique(np.concatenate([start_ns, end_ns]))
    first, last = np.searchsorted(edges, start_ns), np.searchsorted(edges, end_ns)
    length_ns = np.diff(edges)
    free = np.ones(len(length_ns), dtype=bool)
    parts = []
    for number in range(len(_CLASSES)):
        mine = np.flatnonzero(class_number == number)
        begun, ended = (np.bincount(at[mine], minlength=len(edges)) for at in (first, last))
        count = np.cumsum(begun - ended)[:-1]
        wins = free & (count > 0)
        free &= ~wins
        won = np.concatenate([[0], np.cumsum(wins)])
        size = won[last[mine]] - won[first[mine]]
        owner = np.repeat(mine, size)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(size) - size, size)
        moment = np.flatnonzero(wins)[np.repeat(won[first[mine]], size) + within]
        order = np.lexsort((owner, moment))
        owner, moment = owner[order], moment[order]
        place = np.arange(len(owner)) - np.searchsorted(moment, moment)
        part_ns = length_ns[moment] // count[moment]
        parts.append((owner, edges[moment] + place * part_ns, part_ns))
    owner, at_ns, part_ns = map(np.concatenate, zip(*parts, strict=True))
    return owner, at_ns, part_ns
