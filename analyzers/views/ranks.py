"""Views of steps and ranks: how they differ, and which one the others wait for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.uneven import UNEVEN_RATIO, Work, at_equal_speed
from chopper.analyzers.events.collectives import Members
from chopper.analyzers.events.device import Events, of_class
from chopper.analyzers.events.groups import rows_of, sum_by, time_in
from chopper.analyzers.events.steps import windows_of
from chopper.analyzers.trace.columns import (
    compact,
    dictionary,
    distinct_rows,
    ints,
    matching,
    nullable,
    spread,
    strings,
)
from chopper.analyzers.views import Rows, view
from chopper.causes import WAITS
from chopper.statistics import discoveries, t_test
from chopper.storage.run import ranks_of

_STATES = ("compute", "communication", "copy", "idle")
_SCORE = 3.5
_LEAST_RATIO = 0.02
"""A step within 2 % of the median is no outlier, however steady the others are."""
_LEAST_STEPS = 5


@view
def steps(run: Attribution) -> Rows:
    """Observed and ideal time, exclusive states and outliers of each step.

    The four states sum to the observed time. An outlier is further from its rank's median than 3.5
    times 1.4826 × the median absolute deviation (Iglewicz and Hoaglin's modified z-score), and
    further than 2 %; with fewer than five steps there are none.

    title: Steps
    section: Steps and host
    columns:
      step, int64, null: Step number; null for a whole trace.
      rank, int32: Global rank that the row is about.
      observed_ns: Observed time: length of the step's window.
      ideal_ns, null: Time that the model's math needs at the device's peak.
      compute_ns: Time in which a compute kernel was running.
      communication_ns: Exposed communication: no compute kernel ran at the same time.
      copy_ns: Exposed copies: neither compute nor communication ran at the same time.
      idle_ns: Time in which nothing ran on the device.
      outlier, bool, null: True for an outlier; null with fewer than five steps.
      micro_steps, int64, null: Micro-steps of gradient accumulation; null where no trainer tells.
      deviation_ratio, null: Difference from the rank's median step, relative to that median.
    """
    run = run.all_steps
    windows, pieces = run.windows, run.pieces
    size = windows.num_rows
    key = ("rank", "step_index")
    at = rows_of([ints(windows, k) for k in key], [ints(pieces, k) for k in key])
    cause, causes = strings(pieces, "cause")
    state = np.array([_STATES.index(c.partition(".")[0]) for c in causes], dtype=np.int64)[cause]
    time = ints(pieces, "time_ns")
    ideal = cause == (causes.index("compute.ideal") if "compute.ideal" in causes else -2)
    rank, number = ints(windows, "rank"), ints(windows, "number")
    observed = ints(windows, "end_ns") - ints(windows, "start_ns")
    with_peak = [r.rank for r in run.ranks if r.peak_source is not None]
    deviation, outlier = _outliers(observed, rank)
    columns = {
        "step": nullable(number),
        "rank": rank,
        "observed_ns": observed,
        "ideal_ns": pa.array(sum_by(at[ideal], time[ideal], size), mask=~np.isin(rank, with_peak)),
        **{
            f"{name}_ns": sum_by(at[state == i], time[state == i], size)
            for i, name in enumerate(_STATES)
        },
        "outlier": pa.array(outlier, mask=np.isnan(deviation)),
        "deviation_ratio": pa.array(deviation, from_pandas=True),
        "micro_steps": _micro_steps(run, rank, number),
    }
    return steps.view.of(columns).take(np.lexsort((rank, number)))


def _micro_steps(run: Attribution, rank: np.ndarray, number: np.ndarray) -> pa.Array:
    counts = np.full(len(rank), -1)
    for one in np.unique(rank).tolist():
        step, mine = run.recording.table(one, "step"), rank == one
        at = rows_of([ints(step, "number")], [number[mine]])
        counts[mine] = np.append(ints(step, "micro_steps"), -1)[at]
    return nullable(counts)


def _outliers(observed: np.ndarray, rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(difference to the rank's median step as a ratio, whether it stands out) per window."""
    deviation = np.full(len(observed), np.nan)
    outlier = np.zeros(len(observed), dtype=bool)
    for one in np.unique(rank):
        mine = np.flatnonzero(rank == one)
        if len(mine) < _LEAST_STEPS:
            continue
        time = observed[mine].astype(np.float64)
        median = np.median(time)
        away = time - median
        spread = 1.4826 * np.median(np.abs(away))
        deviation[mine] = away / median
        outlier[mine] = (np.abs(away) > _SCORE * spread) & (np.abs(away) > _LEAST_RATIO * median)
    return deviation, outlier


_LEAST_DEVIATION = 0.001
_ALIKE_RATIO = 0.05


@view
def outlier_ranks(run: Attribution) -> Rows:
    """Ranks whose own step time differs from the median rank's by more than chance, and why.

    All ranks end a step with the slowest one, so their step times are equal; what differs is a
    rank's own time, a step without waiting for other ranks. It is compared with the median rank in
    each step. A rank stands out if its deviations differ from zero over steps (t test, with
    Benjamini and Hochberg's correction over ranks, at 5 %) by more than a thousandth of a step.
    Ranks are alike if the times of their causes differ by at most a twentieth of a step in total.

    title: Outlier ranks
    section: Steps and host
    needs: no step was attributed
    of: all ranks
    columns:
      rank, int32: Global rank.
      host, null: Host that it ran on.
      step_ns: Mean observed time of its steps.
      own_ns: Mean of its steps without waiting for other ranks.
      deviation_ns: Own time minus the median rank's, mean over steps.
      p_value, float64, null: p-value of the t test; null with fewer than three steps.
      stands_out, null: late or early; null where it may be chance.
      cause, null: Leaf cause with the largest excess (late) or deficit (early).
      cause_ns, null: Mean time per step in that cause beyond the median rank's.
      waiting_ns: Mean time per step that it waits for other ranks.
      alike, int32: Index of its group of similar ranks.
      alike_count: Ranks of that group.
    """
    time_ns, numbers, causes = cube(run)
    if not time_ns.size:
        return []
    observed = time_ns.sum(axis=2)
    recorded = observed > 0
    waits = np.array([cause in WAITS for cause in causes])
    waiting = time_ns[:, :, waits].sum(axis=2)
    own = np.where(recorded, observed - waiting, np.nan)
    deviation = own - np.nanmedian(own, axis=0)
    count = np.maximum(recorded.sum(axis=1), 1)
    mean = np.nansum(deviation, axis=1) / count
    p = t_test(deviation)
    known = ~np.isnan(p)
    out = np.zeros(len(p), dtype=bool)
    out[known] = discoveries(p[known])
    out &= np.abs(mean) > _LEAST_DEVIATION * np.nanmean(own)
    per_step = time_ns.sum(axis=1) / count[:, None]
    excess = per_step - np.median(per_step, axis=0)
    excess[:, waits] = 0
    mainly = np.argmax(excess * np.sign(mean)[:, None], axis=1)
    rows = np.arange(len(mean))
    group = _alike(per_step, float(observed[recorded].mean()))
    order = np.lexsort((numbers, -np.abs(mean)))
    hosts = {row["rank"]: row["hostname"] for row in ranks_of(run.recording.manifest).to_pylist()}
    columns = {
        "rank": numbers,
        "host": pa.array([hosts.get(rank) for rank in numbers.tolist()]).dictionary_encode(),
        "step_ns": _whole(observed.sum(axis=1) / count),
        "own_ns": _whole((observed - waiting).sum(axis=1) / count),
        "deviation_ns": _whole(mean),
        "p_value": pa.array(p, from_pandas=True),
        "stands_out": dictionary(np.where(out, (mean < 0).astype(np.int64), -1), ("late", "early")),
        "cause": dictionary(np.where(out, mainly, -1), causes),
        "cause_ns": pa.array(_whole(excess[rows, mainly]), mask=~out),
        "waiting_ns": _whole(waiting.sum(axis=1) / count),
        "alike": group,
        "alike_count": np.bincount(group)[group],
    }
    return outlier_ranks.view.of(columns).take(pa.array(order))


def cube(run: Attribution) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return the time of each rank and step by leaf cause, (ranks, steps, causes), in ns.

    Returns:
        The times; the ranks; the causes.
    """
    table = run.totals.causes
    ranks, rank = compact(ints(table, "rank"))
    steps, step = compact(ints(table, "number"))
    cause, causes = strings(table, "cause")
    time_ns = np.zeros((len(ranks), len(steps), len(causes)))
    np.add.at(time_ns, (rank, step, cause), ints(table, "time_ns"))
    return time_ns, ranks, causes


def _alike(per_step: np.ndarray, step_ns: float) -> np.ndarray:
    """Number groups of ranks whose causes differ by little, the largest group first."""
    label = _complete_linkage(per_step, _ALIKE_RATIO * step_ns)
    sizes = np.bincount(label)
    first = np.full(len(sizes), len(label))
    np.minimum.at(first, label, np.arange(len(label)))
    place = np.empty(len(sizes), dtype=np.int64)
    place[np.lexsort((first, -sizes))] = np.arange(len(sizes))
    numbered: np.ndarray = place[label]
    return numbered


def _complete_linkage(points: np.ndarray, limit: float) -> np.ndarray:
    """Number the clusters of points none of which are further than the limit apart.

    Agglomerates the two nearest clusters first, by chains of nearest neighbours (Murtagh 1983);
    the distance of two clusters is that of their furthest points, by the sum of differences.
    """
    distance = np.zeros((len(points), len(points)))
    for feature in points.T:
        distance += np.abs(feature[:, None] - feature)
    np.fill_diagonal(distance, np.inf)
    label = np.arange(len(points))
    chain: list[int] = []
    merged = np.zeros(len(points), dtype=bool)
    for _ in range(len(points) - 1):
        chain = chain or [int(np.argmin(merged))]
        while True:
            near = int(np.argmin(distance[chain[-1]]))
            if len(chain) > 1 and distance[chain[-1], chain[-2]] <= distance[chain[-1], near]:
                break
            chain.append(near)
        gone, kept = sorted((chain.pop(), chain.pop()))
        if distance[gone, kept] <= limit:
            label[label == label[gone]] = label[kept]
        furthest = np.maximum(distance[gone], distance[kept])
        furthest[[gone, kept]] = np.inf
        distance[kept] = distance[:, kept] = furthest
        distance[gone] = distance[:, gone] = np.inf
        merged[gone] = True
    return np.unique(label, return_inverse=True)[1]


def _whole(values: np.ndarray) -> np.ndarray:
    return np.round(values).astype(np.int64)


@view
def stragglers(run: Attribution, members: Members) -> Rows:
    """Ranks that made others wait at collectives, and the causes of their delay.

    For a collective, each rank's window extends from its end of the group's previous collective (or
    the start of its step if there is none) to its arrival. All ranks leave the previous collective
    together, so the straggler's window is longer by exactly its delay. Its time in each leaf cause,
    minus the mean of the other ranks, is the cause's excess; the positive excesses share the
    waiting that the straggler caused. If its window already started later than the others', that
    part of the waiting has no cause here.

    An event across the border of a window counts with the share of its time inside. Collectives
    outside of the steps are left out.

    title: Stragglers
    section: Communication
    needs: no collective was seen on all ranks of its group, or no rank waited
    columns:
      straggler_rank, int32: Global rank that arrived last.
      cause, null: Leaf cause that made the rank late; null where nothing took longer.
      waiting_ns: Straggler wait of the other ranks, in proportion to the causes' excess.
      share_ratio: Share of the straggler wait at all collectives.
      exposed_waiting_ns: Exposed part of the straggler wait.
      excess_ns: Time in the cause beyond the other ranks' mean, summed.
      collective_count: Number of collectives with this cause as the largest excess.
      late_collective_count: Number of collectives at which the rank arrived last.
      late_ratio: Share of the collectives with waiting at which it arrived last.
    """
    wait_ns = members.total(members.wait_ns)
    late = np.flatnonzero((wait_ns > 0) & _in_steps(run, members)[members.straggler])
    if not len(late):
        return []
    wait_ns = wait_ns[late]
    exposed_ns = members.total(_waited(run, members))[late]
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

    return {
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


def _waited(run: Attribution, found: Members) -> np.ndarray:
    """Return how long each row waited for others while nothing else ran."""
    present = [row.id for row in run.leaves() if row.id in WAITS]
    times = (time_in(run.pieces, found.rank, found.row, cause) for cause in present)
    return np.asarray(sum(times, np.zeros(len(found.row), dtype=np.int64)))


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


class Worst(msgspec.Struct, frozen=True):
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
_IMBALANCES = ("communication.expert.imbalance", "communication.context.imbalance")


class Uneven(msgspec.Struct, frozen=True, kw_only=True):
    """Why ranks wait for each other in their steps.

    Attributes:
        kind: a rank is slower at the same work (``late_rank``) or began later (``late_entry``), has
            more work (``uneven_work``), by all-to-all of unequal sizes (``experts``) or in a
            ``ring``; stages wait for each other (``pipeline``); or no one rank is late.
        worst: the rank that the others waited for most.
        wait_ratio: exposed waiting, as a share of the time of all ranks.
        work_ratio: its work ÷ the others' mean, at equal speed; None where nothing computed.
        own_ns: rank → mean step without waiting for other ranks.
        peers_ratio: in a pipeline, its passes ÷ those of the other ranks of its stage.
    """

    kind: Kind
    worst: Worst
    wait_ratio: float
    work_ratio: float | None
    own_ns: dict[int, int]
    peers_ratio: float | None = None

    @property
    def others_ns(self) -> int:
        """Mean step of the other ranks without waiting."""
        return round(self.own_ns[self.worst.rank] - _beyond(self.own_ns, self.worst.rank))


def uneven(run: Attribution, members: Members, events: Events) -> Uneven | None:
    """Tell why ranks wait for each other, None where none waits. COMMUNICATION, PIECE -> kind."""
    table = stragglers(run, members)
    found = worst(table)
    if found is None:
        return None
    own_ns, work_ns = own_times(run), _work(run, events)
    if (slow := slow_at_its_stage(run)) is not None:
        own_rows = table.filter(pc.equal(table["straggler_rank"], slow.rank))
        direct = worst(own_rows) or Worst(slow.rank, 0.0, 0.0, None, 0)
        return Uneven(
            kind="late_rank",
            worst=msgspec.structs.replace(direct, cause=slow.cause, excess_ns=slow.excess_ns),
            wait_ratio=sum(r.time_ns for r in run.leaves() if r.id in WAITS) / run.observed_ns,
            work_ratio=None,
            own_ns=own_ns,
            peers_ratio=slow.peers_ratio,
        )
    more_ns, longer_ns = (_beyond(times, found.rank) for times in (work_ns, own_ns))
    others_ns = work_ns[found.rank] - more_ns
    waits_ns = {row.id: row.time_ns for row in run.leaves() if row.id in WAITS}
    waited_ns = sum(waits_ns.values())
    steps_count = next(rank.steps for rank in run.ranks if rank.rank == found.rank)
    caused_ns = waited_ns * found.share_ratio / (len(own_ns) - 1) / steps_count
    is_uneven = 2 * more_ns >= max(longer_ns, caused_ns) and others_ns > 0
    is_uneven &= work_ns[found.rank] >= UNEVEN_RATIO * others_ns
    inside = _in_steps(run, members)
    sent = inside & matching(*strings(members.table, "collective"), lambda name: name == "sendrecv")
    circulates = any(m.uneven is not None and m.uneven.ring for m in run.matched.values())
    experts_ns, ring_ns = (waits_ns.get(cause, 0) for cause in _IMBALANCES)
    kind: Kind = "late_rank"
    if 2 * (experts_ns + ring_ns) >= max(waited_ns, 1):
        kind = "experts" if experts_ns >= ring_ns else "ring"
    elif 2 * members.wait_ns[sent].sum() > members.wait_ns[inside].sum() and not circulates:
        kind = "pipeline"
    elif is_uneven:
        kind = "uneven_work"
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
    own = time_ns[:, :, [cause not in WAITS for cause in causes]].sum(axis=(1, 2))
    steps = np.maximum((time_ns.sum(axis=2) > 0).sum(axis=1), 1)
    return dict(zip(ranks.tolist(), np.rint(own / steps).astype(int).tolist(), strict=True))


class SlowAtStage(msgspec.Struct, frozen=True):
    """The rank of a pipeline that computes longest beyond the others of its stage.

    Attributes:
        rank: its number.
        peers_ratio: its time of computing in a step over that of the rank in the middle of them.
        cause: leaf that it spends most of that on, by ``excess_ns`` per step.
    """

    rank: int
    peers_ratio: float
    cause: str
    excess_ns: int


def slow_at_its_stage(run: Attribution) -> SlowAtStage | None:
    """Return the slow rank of a pipeline; None where no rank computes much longer than its peers.

    The waiting that it causes travels from stage to stage, so that who came last tells nothing.
    """
    stages = next((m.stage_waits.stages for m in run.matched.values() if m.stage_waits), {})
    time_ns, ranks, causes = cube(run)
    steps = np.maximum((time_ns.sum(axis=2) > 0).sum(axis=1), 1)
    of_causes = time_ns.sum(axis=1) / steps[:, None]
    computes = np.array([cause.startswith("compute.") for cause in causes])
    busy = of_causes[:, computes].sum(axis=1)
    stage = np.array([stages.get(rank, -1) for rank in ranks.tolist()])
    last, usual, more_ns = -1, 0.0, 0.0
    for number in np.unique(stage[stage >= 0]):
        peers = np.flatnonzero(stage == number)
        middle = float(np.sort(busy[peers])[(len(peers) - 1) // 2])
        longest = int(peers[np.argmax(busy[peers])])
        if busy[longest] - middle > more_ns:
            last, usual, more_ns = longest, middle, float(busy[longest] - middle)
    if last < 0 or busy[last] < UNEVEN_RATIO * usual:
        return None
    peers = stage == stage[last]
    excess = np.where(computes, of_causes[last] - np.median(of_causes[peers], axis=0), 0)
    most = int(np.argmax(excess))
    return SlowAtStage(
        int(ranks[last]), float(busy[last] / usual), causes[most], round(float(excess[most]))
    )


def _beyond(times: Mapping[int, float], rank: int) -> float:
    """Time of a rank beyond the mean of the others."""
    return (times[rank] - sum(times.values()) / len(times)) * len(times) / max(len(times) - 1, 1)


def _work(run: Attribution, events: Events) -> dict[int, float]:
    """Return the work of each rank in a step, in ns at equal speed: see :func:`at_equal_speed`."""
    rows = np.flatnonzero(of_class(events, "compute"))
    (op, ops), (kernel, _) = events.op, events.kernel
    name, calls = np.where(op >= 0, op, len(ops) + kernel)[rows], np.ones(len(rows))
    amounts = (events.work_bytes[rows], events.work_flop[rows], events.dur_ns[rows])
    rank = events.rank[rows]
    work = at_equal_speed(Work(name, calls, *amounts), rank)
    return {r.rank: float(work[rank == r.rank].sum()) / max(r.steps, 1) for r in run.ranks}
