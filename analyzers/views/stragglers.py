"""Ranks that made others wait at collectives, and the causes of their delay.

For a collective, each rank's window extends from its end of the group's previous collective (or the
start of its step if there is none) to its arrival. All ranks leave the previous collective
together, so the straggler's window is longer by exactly its delay. Its time in each leaf cause,
minus the mean of the other ranks, is the cause's excess; the positive excesses share the waiting
that the straggler caused. If its window already started later than the others', that part of the
waiting has no cause here.

An event across the border of a window counts with the share of its time inside. Collectives outside
of the steps are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.collectives import WAIT, Members
from chopper.analyzers.events.device import Events, of_class
from chopper.analyzers.events.groups import time_in
from chopper.analyzers.events.steps import windows_of
from chopper.analyzers.trace.columns import dictionary, distinct_rows, ints, matching, strings
from chopper.analyzers.trace.intervals import spread
from chopper.analyzers.views import View, column, optional
from chopper.analyzers.views.outlier_ranks import cube

VIEW = View(
    "stragglers",
    __doc__,
    (
        column("straggler_rank", "Global rank that arrived last.", "int32"),
        optional("cause", "Leaf cause that made the rank late; null where nothing took longer."),
        column(
            "waiting_ns", "Straggler wait of the other ranks, in proportion to the causes' excess."
        ),
        column("share_ratio", "Share of the straggler wait at all collectives."),
        column("exposed_waiting_ns", "Exposed part of the straggler wait."),
        column("excess_ns", "Time in the cause beyond the other ranks' mean, summed."),
        column("collective_count", "Number of collectives with this cause as the largest excess."),
        column("late_collective_count", "Number of collectives at which the rank arrived last."),
        column("late_ratio", "Share of the collectives with waiting at which it arrived last."),
    ),
    title="Stragglers",
    section="Communication",
    needs="no collective was seen on all ranks of its group, or no rank waited",
)


def stragglers(run: Attribution, members: Members) -> pa.Table:
    """COMMUNICATION, PIECE, GAP, WINDOW -> STRAGGLERS by rank and cause, most waiting first."""
    wait_ns = members.total(members.wait_ns)
    late = np.flatnonzero((wait_ns > 0) & _in_steps(run, members)[members.straggler])
    if not len(late):
        return VIEW.empty()
    wait_ns = wait_ns[late]
    exposed_ns = members.total(time_in(run.pieces, members.rank, members.row, WAIT))[late]
    spent, causes = _spent(run, members)
    own = spent[members.straggler][late]
    others = np.add.reduceat(spent, members.first, axis=0)[late] - own
    excess = np.maximum(own - others / (members.rank_count[late] - 1)[:, None], 0)
    total = excess.sum(axis=1)
    parts = np.zeros(excess.shape)
    parts[total > 0] = excess[total > 0] / total[total > 0, None]
    parts[total == 0, -1] = 1.0
    ranks, number = np.unique(members.rank[members.straggler][late], return_inverse=True)
    came_last = np.bincount(number, minlength=len(ranks))

    def by_rank(values: np.ndarray) -> np.ndarray:
        out = np.zeros((len(ranks), values.shape[1]))
        np.add.at(out, number, values)
        return out

    waiting = by_rank(parts * wait_ns[:, None])
    rank, cause = np.nonzero(np.rint(waiting) > 0)
    order = np.argsort(-waiting[rank, cause], kind="stable")
    rank, cause = rank[order], cause[order]

    def whole(values: np.ndarray) -> np.ndarray:
        return np.rint(by_rank(values)[rank, cause]).astype(np.int64)

    columns = {
        "straggler_rank": ranks[rank],
        "cause": dictionary(np.where(cause < len(causes), cause, -1), causes),
        "waiting_ns": whole(parts * wait_ns[:, None]),
        "share_ratio": waiting[rank, cause] / wait_ns.sum(),
        "exposed_waiting_ns": whole(parts * exposed_ns[:, None]),
        "excess_ns": whole(excess),
        "collective_count": whole(np.eye(excess.shape[1])[parts.argmax(axis=1)]),
        "late_collective_count": came_last[rank],
        "late_ratio": came_last[rank] / len(late),
    }
    return VIEW.of(columns)


def _in_steps(run: Attribution, found: Members) -> np.ndarray:
    """Mask of the rows whose event belongs to a step window."""
    inside = np.zeros(len(found.of), dtype=bool)
    for rank in np.unique(found.rank).tolist():
        mine = np.flatnonzero(found.rank == rank)
        inside[mine] = ints(run.links[rank], "step_index")[found.row[mine]] >= 0
    return inside


def _spent(run: Attribution, found: Members) -> tuple[np.ndarray, list[str]]:
    """Per row its window's time per leaf cause, and when it began: (rows, causes + 1)."""
    pieces = run.pieces
    codes, causes = strings(pieces, "cause")
    out = np.zeros((len(found.of), len(causes) + 1))
    origin = int(found.arrival_ns.min()) if len(found.of) else 0
    ranks = ints(pieces, "rank")
    for rank in np.unique(found.rank):
        rows = np.flatnonzero(found.rank == rank)
        low, high = _before(run, found, rows, int(rank))
        out[rows, -1] = low - high + found.arrival_ns[rows] - origin
        mine = np.flatnonzero(ranks == rank)
        start, end, amount = _placed(run, int(rank), mine, codes, causes)
        for code in range(len(causes)):
            of_cause = codes[mine] == code
            if of_cause.any():
                amount_until = spread(start[of_cause], end[of_cause], amount[of_cause])
                out[rows, code] = amount_until(high) - amount_until(low)
    return out, causes


def _before(
    run: Attribution, found: Members, rows: np.ndarray, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Window before each collective of one rank, in its own clock."""
    events = run.joined[rank].device_event
    event = found.row[rows]
    start = ints(events, "start_ns")[event]
    end = start + ints(events, "dur_ns")[event]
    _, group = distinct_rows([strings(found.table, n)[0][rows] for n in ("ranks", "group")])
    order = np.lexsort((start, group))
    previous = np.full(len(rows), -1, dtype=np.int64)
    same = group[order][1:] == group[order][:-1]
    previous[order[1:][same]] = order[:-1][same]
    bounds = ints(windows_of(run, rank), "start_ns")
    step = np.searchsorted(bounds, start, side="right") - 1
    first = bounds[np.maximum(step, 0)] if len(bounds) else start
    low = np.where(previous >= 0, end[previous], np.minimum(first, start))
    return np.minimum(low, start), start


def _placed(
    run: Attribution, rank: int, mine: np.ndarray, codes: np.ndarray, causes: list[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(start, end, time) of pieces of one rank: of their event in the window, or of their gap."""
    pieces = run.pieces.take(pa.array(mine))
    event = ints(pieces, "event_row")
    amount = ints(pieces, "time_ns")
    events = run.joined[rank].device_event
    begin = ints(events, "start_ns")
    finish = begin + ints(events, "dur_ns")
    windows = windows_of(run, rank)
    index = ints(windows, "step_index")
    order = np.argsort(index)
    window = order[np.searchsorted(index[order], ints(pieces, "step_index"))]
    low, high = (ints(windows, bound)[window] for bound in ("start_ns", "end_ns"))
    row = np.maximum(event, 0)
    start = np.clip(begin[row], low, high) if len(begin) else low
    end = np.clip(finish[row], low, high) if len(begin) else high
    # Idle pieces stand in the order of the gaps, which know their times.
    idle = matching(codes[mine], causes, lambda cause: cause.startswith("idle"))
    gaps = run.gaps.filter(pc.equal(run.gaps["rank"], rank))
    if int(idle.sum()) == gaps.num_rows:
        start, end = start.copy(), end.copy()
        start[idle], end[idle] = ints(gaps, "start_ns"), ints(gaps, "end_ns")
    return start, end, amount


@dataclass(frozen=True, slots=True)
class Worst:
    """The rank that the others waited for most.

    It came last at ``late_ratio`` of the collectives with waiting and caused ``share_ratio`` of it,
    most by ``excess_ns`` on a leaf cause, None where none explains it. ``entered_ratio`` of the
    waiting that it caused has no cause: its window had begun later than the others'.
    """

    rank: int
    late_ratio: float
    share_ratio: float
    cause: str | None
    excess_ns: int
    entered_ratio: float = 0.0


def worst(table: pa.Table) -> Worst | None:
    """Return who made the others wait most, None when nobody waited. STRAGGLERS -> one rank."""
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        by_rank.setdefault(row["straggler_rank"], []).append(row)
    shares = {rank: sum(row["share_ratio"] for row in rows) for rank, rows in by_rank.items()}
    rank = max(shares, key=lambda r: shares[r], default=None)
    if rank is None:
        return None
    rows = by_rank[rank]
    told = next((row for row in rows if row["cause"] is not None), rows[0] | {"excess_ns": 0})
    entered = sum(row["share_ratio"] for row in rows if row["cause"] is None) / shares[rank]
    found = told["cause"], told["excess_ns"], entered
    return Worst(rank, rows[0]["late_ratio"], shares[rank], *found)


Kind = Literal[
    "late_rank", "late_entry", "uneven_work", "experts", "ring", "pipeline", "taking_turns"
]
_UNEVEN_RATIO = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Uneven:
    """Why ranks wait for each other in their steps.

    Attributes:
        kind: a rank is slower at the same work (``late_rank``) or began later (``late_entry``), has
            more work (``uneven_work``), by all-to-all of unequal sizes (``experts``) or in a
            ``ring``; stages wait for each other (``pipeline``); or no one rank is late.
        worst: the rank that the others waited for most.
        wait_ratio: exposed waiting, as a share of the time of all ranks.
        work_ratio: its work ÷ the others' mean, at equal speed; None where nothing computed.
        own_ns: rank → mean step without waiting for other ranks.
    """

    kind: Kind
    worst: Worst
    wait_ratio: float
    work_ratio: float | None
    own_ns: dict[int, int]

    @property
    def others_ns(self) -> int:
        """Mean step of the other ranks without waiting."""
        return round(self.own_ns[self.worst.rank] - _beyond(self.own_ns, self.worst.rank))


def uneven(run: Attribution, members: Members, events: Events) -> Uneven | None:
    """Tell why ranks wait for each other, None where none waits. COMMUNICATION, PIECE -> kind."""
    found = worst(stragglers(run, members))
    if found is None:
        return None
    own_ns, work_ns = own_times(run), _work(run, events)
    more_ns, longer_ns = (_beyond(times, found.rank) for times in (work_ns, own_ns))
    others_ns = work_ns[found.rank] - more_ns
    waited_ns = sum(row.time_ns for row in run.causes() if row.id == WAIT)
    steps_count = next(rank.steps for rank in run.ranks if rank.rank == found.rank)
    caused_ns = waited_ns * found.share_ratio / (len(own_ns) - 1) / steps_count
    is_uneven = 2 * more_ns >= max(longer_ns, caused_ns) and others_ns > 0
    is_uneven &= work_ns[found.rank] >= _UNEVEN_RATIO * others_ns
    inside = _in_steps(run, members)
    sent = inside & matching(*strings(members.table, "collective"), lambda name: name == "sendrecv")
    circulates = _sends_its_own(run, members, sent, events)
    kind: Kind = "late_rank"
    if 2 * members.wait_ns[sent].sum() > members.wait_ns[inside].sum() and not circulates:
        kind = "pipeline"
    elif is_uneven:
        kind = "ring" if circulates else "experts" if _unequal(members) else "uneven_work"
    elif found.share_ratio <= (1 + 1 / members.rank_count.min()) / 2:
        kind = "taking_turns"
    elif found.entered_ratio > 1 / 2 and 2 * longer_ns < caused_ns:
        kind = "late_entry"
    return Uneven(
        kind=kind,
        worst=found,
        wait_ratio=waited_ns / run.observed_ns,
        work_ratio=work_ns[found.rank] / others_ns if others_ns > 0 else None,
        own_ns=own_ns,
    )


def own_times(run: Attribution) -> dict[int, int]:
    """Return the mean step of each rank without waiting for other ranks, in ns."""
    time_ns, ranks, causes = cube(run)
    own = time_ns[:, :, [cause != WAIT for cause in causes]].sum(axis=(1, 2))
    steps = np.maximum((time_ns.sum(axis=2) > 0).sum(axis=1), 1)
    return dict(zip(ranks.tolist(), np.rint(own / steps).astype(int).tolist(), strict=True))


def _beyond(times: Mapping[int, float], rank: int) -> float:
    """Time of a rank beyond the mean of the others."""
    return (times[rank] - sum(times.values()) / len(times)) * len(times) / max(len(times) - 1, 1)


def _work(run: Attribution, events: Events) -> dict[int, float]:
    """Return the work of each rank in a step, in ns at the mean speed of all ranks.

    Of each operator (or kernel) the FLOP, else the bytes, else the calls, times what these take on
    all ranks together: a slow rank has no more work for being slow.
    """
    rows = np.flatnonzero(of_class(events, "compute"))
    (op, ops), (kernel, kernels) = events.op, events.kernel
    name = np.where(op >= 0, op, len(ops) + kernel)[rows]
    count = len(ops) + len(kernels)
    amount = np.ones(len(rows))
    for known in (events.work_bytes[rows], events.work_flop[rows]):
        lacking = np.bincount(name[~(known > 0)], minlength=count) > 0
        amount = np.where(lacking[name], amount, known)
    total = np.maximum(np.bincount(name, amount, count), 1)
    work = amount * (np.bincount(name, events.dur_ns[rows], count) / total)[name]
    rank = events.rank[rows]
    return {r.rank: float(work[rank == r.rank].sum()) / max(r.steps, 1) for r in run.ranks}


def _sends_its_own(run: Attribution, found: Members, sent: np.ndarray, events: Events) -> bool:
    """Tell whether every rank sends, in most steps, before it has worked on what it received.

    In a ring it does; the last stage of a pipeline sends only what it made of what it received.
    """
    for rank in np.unique(found.rank[sent]).tolist():
        mine = sent & (found.rank == rank)
        rows, start, end = found.row[mine], found.arrival_ns[mine], found.left_ns[mine]
        of = run.joined[rank].communication
        outward = [bool(k.key and k.key.what.startswith(f"send {rank}→")) for k in of.kinds]
        sends = np.array(outward)[of.kind[np.searchsorted(of.event_row, rows)]]
        begun = events.start_ns[(events.rank == rank) & of_class(events, "compute")]
        offset = ints(run.joined[rank].device_event, "start_ns")[rows[0]] - start[0]
        step, own = ints(run.links[rank], "step_index")[rows], []
        for number in np.unique(step):
            out, back = (step == number) & sends, (step == number) & ~sends
            first, received = start[out].min(initial=2**62), end[back].min(initial=2**62)
            works = (begun - offset >= received) & (begun - offset < first)
            own.append(out.any() and back.any() and not works.any())
        if 2 * sum(own) <= len(own):
            return False
    return bool(sent.any())


def _unequal(found: Members) -> bool:
    """Tell whether ranks send unequal amounts in a fourth or more of the all-to-all exchanges."""
    to_all = matching(*strings(found.table, "collective"), lambda name: name == "alltoall")
    size = ints(found.table, "message_bytes")
    least, most = (f.reduceat(size, found.first) for f in (np.minimum, np.maximum))
    exchanges = to_all[found.first] & (least > 0)
    return bool(4 * (most >= _UNEVEN_RATIO * least)[exchanges].sum() >= max(exchanges.sum(), 1))
