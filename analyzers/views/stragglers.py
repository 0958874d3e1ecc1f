"""Who came last at the collectives, and why: what that rank did before that the others did not.

For a collective, each rank's window reaches from its end of the group's collective before (or from
the start of its step, where there is none) to its arrival. All ranks leave the collective before
together, so the straggler's window is longer by just what it is late. Its time in each leaf cause,
less the mean of the other ranks, is the cause's excess; the positive excesses share the waiting
that the straggler made the others do. Where its window already began later than the others', that
much of the waiting has no cause here.

An event that lies across the border of a window counts by the share of it that lies inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.columns import dictionary, ints, strings
from chopper.analyzers.trace.intervals import spread
from chopper.analyzers.views.communication import members, time_of_events
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.analyzers.views.communication import Members
    from chopper.attribution import Attribution


@dataclass(frozen=True)
class Reasons:
    """Per matched collective, in the order of `Members`.

    Attributes:
        straggler: rank that came last.
        wait_ns: what the others waited, summed.
        exposed_wait_ns: the part of it that nothing hid.
        causes: leaf causes.
        excess_ns: how much longer the straggler spent in each cause than the others' mean; last,
            how much later its window began; 0 where it was not longer, shape
            (collectives, causes + 1).
    """

    straggler: np.ndarray
    wait_ns: np.ndarray
    exposed_wait_ns: np.ndarray
    causes: list[str]
    excess_ns: np.ndarray


def reasons(attribution: Attribution) -> Reasons:
    """Why the straggler of each matched collective was late; computed once per attribution."""
    cache = attribution._cache
    if "analyzers.stragglers" not in cache:
        cache["analyzers.stragglers"] = _reasons(attribution)
    found: Reasons = cache["analyzers.stragglers"]
    return found


def _reasons(attribution: Attribution) -> Reasons:
    found = members(attribution)
    wait = found.total(found.wait_ns)
    time = time_of_events(attribution, found.rank, ints(found.table, "event_row"))
    exposed = found.total(time["communication.wait"].to_numpy())
    spent, causes = _spent(attribution, found)
    if not len(found):
        return Reasons(found.straggler, wait, exposed, causes, np.zeros((0, len(causes) + 1)))
    count = np.diff(np.append(found.first, len(found.of)))
    mine = spent[found.straggler]
    others = (np.add.reduceat(spent, found.first, axis=0) - mine) / (count - 1)[:, None]
    excess = np.maximum(mine - others, 0)
    return Reasons(found.rank[found.straggler], wait, exposed, causes, excess)


def _spent(attribution: Attribution, found: Members) -> tuple[np.ndarray, list[str]]:
    """Per row its window's time per leaf cause, and when it began: (rows, causes + 1)."""
    pieces = attribution.pieces
    codes, causes = strings(pieces, "cause")
    out = np.zeros((len(found.of), len(causes) + 1))
    origin = int(found.arrival_ns.min()) if len(found.of) else 0
    ranks = ints(pieces, "rank")
    for rank in np.unique(found.rank):
        rows = np.flatnonzero(found.rank == rank)
        low, high = _before(attribution, found, rows, int(rank))
        out[rows, -1] = low - high + found.arrival_ns[rows] - origin
        mine = np.flatnonzero(ranks == rank)
        start, end, amount = _placed(attribution, int(rank), mine, codes, causes)
        for code in range(len(causes)):
            of_cause = codes[mine] == code
            if of_cause.any():
                amounts = spread(start[of_cause], end[of_cause], amount[of_cause])
                out[rows, code] = amounts.until(high) - amounts.until(low)
    return out, causes


def _before(
    attribution: Attribution, found: Members, rows: np.ndarray, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Window before each collective of one rank, in its own clock."""
    events = attribution.run.table(rank, "device_event")
    event = ints(found.table, "event_row")[rows]
    start = ints(events, "start_ns")[event]
    end = start + ints(events, "dur_ns")[event]
    group = np.zeros(len(rows), dtype=np.int64)
    for name in ("ranks", "group"):
        codes, values = strings(found.table, name)
        group = group * (len(values) + 1) + codes[rows] + 1
    order = np.lexsort((start, group))
    previous = np.full(len(rows), -1, dtype=np.int64)
    same = group[order][1:] == group[order][:-1]
    previous[order[1:][same]] = order[:-1][same]
    windows = attribution.windows
    bounds = ints(windows, "start_ns")[ints(windows, "rank") == rank]
    step = np.searchsorted(bounds, start, side="right") - 1
    first = bounds[np.maximum(step, 0)] if len(bounds) else start
    low = np.where(previous >= 0, end[previous], np.minimum(first, start))
    return np.minimum(low, start), start


def _placed(
    attribution: Attribution, rank: int, mine: np.ndarray, codes: np.ndarray, causes: list[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(start, end, time) of pieces of one rank: their event's, cut to the window; gaps as they are."""
    pieces = attribution.pieces.take(pa.array(mine))
    event = ints(pieces, "event_row")
    amount = ints(pieces, "time_ns")
    events = attribution.run.table(rank, "device_event")
    begin = ints(events, "start_ns")
    finish = begin + ints(events, "dur_ns")
    windows = attribution.windows.filter(pa.array(ints(attribution.windows, "rank") == rank))
    index = ints(windows, "step_index")
    order = np.argsort(index)
    window = order[np.searchsorted(index[order], ints(pieces, "step_index"))]
    low, high = (ints(windows, bound)[window] for bound in ("start_ns", "end_ns"))
    row = np.maximum(event, 0)
    start = np.clip(begin[row], low, high) if len(begin) else low
    end = np.clip(finish[row], low, high) if len(begin) else high
    # Idle pieces stand in the order of the gaps, which know their times.
    idle = np.array([cause.startswith("idle") for cause in causes] + [False])[codes[mine]]
    gaps = attribution.gaps.filter(pa.array(ints(attribution.gaps, "rank") == rank))
    if int(idle.sum()) == gaps.num_rows:
        start, end = start.copy(), end.copy()
        start[idle], end[idle] = ints(gaps, "start_ns"), ints(gaps, "end_ns")
    return start, end, amount


def stragglers(attribution: Attribution) -> pa.Table:
    """Waiting by straggler and by what it was late with, most first. COMMUNICATION -> STRAGGLERS."""
    found = reasons(attribution)
    late = np.flatnonzero(found.wait_ns > 0)
    if not len(late):
        return TABLES["stragglers"].empty()
    excess = found.excess_ns[late]
    total = excess.sum(axis=1)
    known = total > 0
    parts = np.zeros(excess.shape)
    parts[known] = excess[known] / total[known, None]
    parts[~known, -1] = 1.0
    largest = parts.argmax(axis=1)
    ranks, number = np.unique(found.straggler[late], return_inverse=True)

    def by_rank(values: np.ndarray) -> np.ndarray:
        out = np.zeros((len(ranks), values.shape[1]))
        np.add.at(out, number, values)
        return out

    waiting = by_rank(parts * found.wait_ns[late, None])
    exposed = by_rank(parts * found.exposed_wait_ns[late, None])
    longer = by_rank(excess)
    first = by_rank(np.eye(excess.shape[1])[largest])
    came_last = np.bincount(number, minlength=len(ranks))
    rank_of, cause_of = np.nonzero(np.rint(waiting) > 0)
    order = np.argsort(-waiting[rank_of, cause_of], kind="stable")
    rank_of, cause_of = rank_of[order], cause_of[order]

    def whole(values: np.ndarray) -> pa.Array:
        return pa.array(np.rint(values[rank_of, cause_of]).astype(np.int64))

    columns = {
        "straggler_rank": pa.array(ranks[rank_of].astype(np.int32)),
        "cause": dictionary(np.where(cause_of < len(found.causes), cause_of, -1), found.causes),
        "waiting_ns": whole(waiting),
        "share_ratio": pa.array(waiting[rank_of, cause_of] / found.wait_ns[late].sum()),
        "exposed_waiting_ns": whole(exposed),
        "excess_ns": whole(longer),
        "collective_count": whole(first),
        "late_collective_count": pa.array(came_last[rank_of]),
        "late_ratio": pa.array(came_last[rank_of] / len(late)),
    }
    declared = TABLES["stragglers"].arrow
    return pa.table({f.name: columns[f.name] for f in declared}, schema=declared)


@dataclass(frozen=True, slots=True)
class Worst:
    """The rank that the others waited for most.

    Attributes:
        rank: which.
        late_ratio: collectives at which it came last, of all at which anybody waited.
        share_ratio: waiting that it caused, of all.
        cause: leaf cause of its largest excess, None where none explains it.
        excess_ns: that excess, over all collectives.
    """

    rank: int
    late_ratio: float
    share_ratio: float
    cause: str | None
    excess_ns: int


def worst(attribution: Attribution) -> Worst | None:
    """Who made the others wait most, None when nobody waited at a matched collective."""
    rows = stragglers(attribution).to_pylist()
    if not rows:
        return None
    share: dict[int, float] = {}
    for row in rows:
        rank = row["straggler_rank"]
        share[rank] = share.get(rank, 0.0) + row["share_ratio"]
    rank = max(share, key=lambda r: share[r])
    mine = [row for row in rows if row["straggler_rank"] == rank]
    told = next((row for row in mine if row["cause"] is not None), None)
    return Worst(
        rank,
        mine[0]["late_ratio"],
        share[rank],
        None if told is None else told["cause"],
        0 if told is None else told["excess_ns"],
    )
