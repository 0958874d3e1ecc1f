"""The critical path of a schedule: at each moment, the work that everything waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.replay import graph as g
from chopper.analyzers.replay.program import CALL
from chopper.analyzers.trace.join import COMMUNICATION, COMPUTE, COPY
from chopper.causes import CODES, LEAVES, WAITS

if TYPE_CHECKING:
    from chopper.analyzers.causes.idle import Parts
    from chopper.analyzers.replay.changes import CauseTimes
    from chopper.analyzers.replay.graph import Graph
    from chopper.analyzers.replay.scenario import Outcome

LATENCY, DEPENDENCY = "idle.launch_latency", "idle.dependency"
LAG = 100
"""Kind of a stretch that is a moment's lag: no trace shows what was waited for."""


@dataclass(frozen=True)
class Path:
    """Stretches of the critical path in time order; they tile the time from its begin to its end.

    Attributes:
        rank_index: index of the rank in the graph.
        start_ns, end_ns: in the graph's time.
        kind: of the edge that the stretch is; LAG where it is a lag.
        event: device event that runs, or that the stretch leads to; -1 for the program's own.
        interval: interval of the program, also of what the host does once it has waited; -1 for
            others.
    """

    rank_index: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    kind: np.ndarray
    event: np.ndarray
    interval: np.ndarray

    @property
    def length_ns(self) -> np.ndarray:
        """Length of each stretch."""
        return np.asarray(self.end_ns - self.start_ns)

    @property
    def runs(self) -> np.ndarray:
        """Mask of the stretches in which the event itself runs."""
        return np.asarray(np.isin(self.kind, [g.RUN, g.TRANSFER]) & (self.event >= 0))

    def within(self, windows: list[np.ndarray]) -> Path:
        """The parts of it in windows: for each rank's index, (windows, 2) begins and ends."""
        rows, starts, ends = [], [], []
        for rank_index, bounds in enumerate(windows):
            mine = np.flatnonzero(self.rank_index == rank_index)
            for begin, end in bounds.tolist():
                low = np.maximum(self.start_ns[mine], begin)
                high = np.minimum(self.end_ns[mine], end)
                some = high > low
                rows.append(mine[some])
                starts.append(low[some])
                ends.append(high[some])
        row, start, end = (
            np.concatenate([*p, np.zeros(0, np.int64)]) for p in (rows, starts, ends)
        )
        order = np.argsort(start, kind="stable")
        row = row[order]
        columns = self.kind[row], self.event[row], self.interval[row]
        return Path(self.rank_index[row], start[order], end[order], *columns)


def critical_path(graph: Graph, decided: np.ndarray, end: int) -> np.ndarray:
    """The moments that decide when ``end`` comes, in time order, ``end`` the last."""
    # Only what leads to the end is walked: one step per moment of the path.
    follow = np.append(graph.source, -1)[decided].tolist()
    path = [end]
    while (at := follow[path[-1]]) >= 0:
        path.append(at)
    return np.array(path[::-1], dtype=np.int64)


def path_of(outcome: Outcome, rank_indices: Collection[int]) -> Path:
    """Critical path to the end of the last window of these ranks, by index."""
    scenario = outcome.scenario
    graph = scenario.base.graph
    ends = []
    for rank_index, node in enumerate(scenario.ranks):
        bounds = outcome.windows(rank_index)
        if not len(bounds) or rank_index not in rank_indices:
            continue
        at = np.flatnonzero(outcome.time_ns[node.end] == bounds[-1])
        if len(at):
            ends.append((int(bounds[-1]), int(node.end[at[-1]]), int(bounds[0])))
    if not ends:
        return Path(*[np.zeros(0, np.int64)] * 6)
    _, last, begin = max(ends)
    moments = critical_path(graph, outcome.decided, last)
    edge = outcome.decided[moments[1:]].astype(np.int64)
    low, high = outcome.time_ns[moments[:-1]], outcome.time_ns[moments[1:]]
    reached = low + outcome.weight_ns[edge]
    kind, of = graph.kind[edge].astype(np.int64), graph.of[edge]
    rank_index = np.maximum(graph.rank[moments[1:]], graph.rank[moments[:-1]])
    base = np.array([n.event_base for n in scenario.ranks])
    first = np.array([n.interval_base for n in scenario.ranks])
    host = kind == g.PROGRAM
    event = np.where(host, -1, of - base[rank_index])
    interval = np.where(host, of - first[rank_index], -1)
    awake = np.isin(kind, _AWAKE)
    for number, node in enumerate(scenario.ranks):
        mine = np.flatnonzero(awake & (rank_index == number))
        interval[mine] = np.searchsorted(node.moment, moments[1:][mine])
    # An edge, and then the lag of the moment that it leads to.
    pairs = (low, reached), (reached, high), (kind, np.full(len(kind), LAG))
    start, end, kinds = (np.stack(pair, axis=1).reshape(-1) for pair in pairs)
    start, end = np.maximum(start, begin), np.maximum(end, begin)
    keep = np.flatnonzero(end > start)
    rows = keep // 2
    return Path(rank_index[rows], start[keep], end[keep], kinds[keep], event[rows], interval[rows])


def causes_of(
    outcome: Outcome, path: Path, facts: list[CauseTimes]
) -> dict[tuple[str, str], float]:
    """Sum the nanoseconds of the path by (leaf cause, operator, kernel or host).

    What ran is named by its operator or kernel and divided among the causes that the attribution
    gives it; what the host did, also once it had waited, by its causes; latencies by theirs.
    """
    sums = _Sums()
    for rank_index, fact in enumerate(facts):
        rows = np.flatnonzero(path.rank_index == rank_index)
        if not len(rows):
            continue
        on_host = path.interval[rows] >= 0
        _running(fact, path, rows[path.runs[rows]], sums)
        _preparing(outcome, rank_index, fact, path, rows[on_host], sums)
        _waiting(fact, path, rows[~on_host], sums)
    return dict(sums)


class _Sums(defaultdict[tuple[str, str], float]):
    """Nanoseconds by (leaf cause, name)."""

    def __init__(self) -> None:
        super().__init__(float)

    def add(self, cause: str, code: np.ndarray, names: list[str], time: np.ndarray) -> None:
        """Add times by the codes of their names."""
        spent = np.bincount(code, weights=time, minlength=len(names))
        for i in np.flatnonzero(spent > 0):
            self[cause, names[i]] += float(spent[i])


def _names(fact: CauseTimes, event: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Name of each event, as codes into names: its operator, or its kernel; "" for none."""
    links = fact.node.links
    op_codes, op_values = links.op_names
    codes, values = links.events.names
    by_kernel = np.isin(links.work_class[event], [COMMUNICATION, COPY]) | (op_codes[event] < 0)
    code = np.where(by_kernel, codes[event], len(values) + op_codes[event])
    return np.where(event < 0, len(values) + len(op_values), code), [*values, *op_values, ""]


def _running(fact: CauseTimes, path: Path, rows: np.ndarray, sums: _Sums) -> None:
    """Add what ran, divided among the causes of its event."""
    event, length = path.event[rows], path.length_ns[rows]
    code, names = _names(fact, event)
    shares = {
        leaf: fact.of_events(leaf)
        for leaf in LEAVES
        if not leaf.startswith("idle.") and leaf not in WAITS
    }
    total = np.sum(list(shares.values()), axis=0)
    hidden = total[event] <= 0
    for leaf, time in shares.items():
        part = length * time[event] / np.maximum(total[event], 1)
        sums.add(leaf, code, names, np.where(hidden, 0.0, part))
    klass, coupled = fact.node.links.work_class[event], fact.node.coupled[event]
    for leaf, mask in (
        ("communication.transfer.no_peak", (klass == COMMUNICATION) & coupled),
        ("communication.unseparated", (klass == COMMUNICATION) & ~coupled),
        ("copy.other", klass == COPY),
        ("compute.unmodelled", klass == COMPUTE),
    ):
        sums.add(leaf, code[hidden & mask], names, length[hidden & mask])


_AWAKE = (g.SYNCHRONIZE, g.COLLECTIVE_WAIT)
"""Kinds of edges to what the host does once it has waited."""
_WAITING = {
    g.LAUNCH: "idle.call",
    g.FOLLOW: "idle.call",
    g.EVENT: DEPENDENCY,
    g.STREAM: LATENCY,
    LAG: LATENCY,
    g.SYNCHRONIZE: "idle.preparation.synchronization",
    g.COLLECTIVE_WAIT: "idle.preparation.collective_wait",
}


def _waiting(fact: CauseTimes, path: Path, rows: np.ndarray, sums: _Sums) -> None:
    """Add latencies, by what they lead to."""
    for kind, cause in _WAITING.items():
        mine = rows[(path.kind[rows] == kind) & (path.event[rows] >= 0)]
        sums.add(cause, *_names(fact, path.event[mine]), path.length_ns[mine])


def _preparing(
    outcome: Outcome,
    rank_index: int,
    fact: CauseTimes,
    path: Path,
    rows: np.ndarray,
    sums: _Sums,
) -> None:
    """Add the host's work by its causes; in an interval with a wait, what came after that."""
    program, parts = fact.node.program, fact.node.program.parts
    on_path = np.zeros(len(program))
    since = np.full(len(program), np.iinfo(np.int64).min)
    interval, event = path.interval[rows], path.event[rows]
    np.add.at(on_path, interval, path.length_ns[rows])
    waited = event >= 0
    since[interval[waited]] = fact.node.links.events.end_ns[event[waited]]
    remaining = ~outcome.scenario.removed_parts(rank_index) & (on_path[parts.owner] > 0)
    remaining &= parts.start_ns >= since[parts.owner]
    owner, cause = parts.owner[remaining], parts.cause[remaining]
    time = (parts.end_ns - parts.start_ns)[remaining]
    total = np.bincount(owner, weights=time, minlength=len(program))
    part = time * on_path[owner] / np.maximum(total[owner], 1)
    for of, value in enumerate(np.bincount(cause, weights=part, minlength=len(LEAVES))):
        if value > 0:
            name = "launching calls" if of == CALL else "host"
            sums[LEAVES[of], name] += float(value)
    rest = np.where(total > 0, 0.0, on_path)
    code, names = _names(fact, event)
    for kind in (g.PROGRAM, *_AWAKE, LAG):
        mine = (path.kind[rows] == kind) & (rest[interval] > 0)
        unknown = "idle.preparation.unobserved" if kind == g.PROGRAM else _WAITING[kind]
        sums.add(unknown, code[mine], names, path.length_ns[rows[mine]])


@dataclass(frozen=True)
class Lane:
    """Stretches of the critical path that lie on one rank, in time order.

    Attributes:
        start_ns, end_ns: stretches, in the rank's own clock.
        cause: leaf cause of each, as a code into ``LEAVES``.
        name: what ran or was waited for, as a code into ``names``.
        event: device event that ran, or that the stretch leads to; -1 for host work.
        span: host span of host work, -1 for none.
        runs: mask of the stretches in which the event itself runs.
        away_start_ns, away_end_ns: stretches on other ranks, in this rank's clock.
        away_rank: those ranks.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    cause: np.ndarray
    name: np.ndarray
    names: list[str]
    event: np.ndarray
    span: np.ndarray
    runs: np.ndarray
    away_start_ns: np.ndarray
    away_end_ns: np.ndarray
    away_rank: np.ndarray


def lane_of(path: Path, rank_index: int, facts: list[CauseTimes]) -> Lane:
    """The stretches of an unchanged run's critical path that lie on a rank."""
    fact = facts[rank_index]
    node = fact.node
    mine = np.flatnonzero(path.rank_index == rank_index)
    event_names, values = _names(fact, path.event[mine])
    span_codes, span_values = node.links.host.names
    names = [*values, *span_values, "host"]
    kind = path.kind[mine]
    runs = path.runs[mine]
    waits = {of: CODES[cause] for of, cause in _WAITING.items()}
    cause = np.array([waits.get(k, CODES[LATENCY]) for k in range(LAG + 1)])[kind]
    cause[runs] = _main_cause(fact)[path.event[mine][runs]]
    on_host = path.interval[mine] >= 0
    owner, start, end, part = _along(node.program.parts, path, mine[on_host], node.offset_ns)
    span = node.program.parts.span[part]
    span_name = np.full(len(span), len(names) - 1)
    span_name[span >= 0] = len(values) + span_codes[span[span >= 0]]
    other = np.flatnonzero(~on_host)
    nothing = np.full(len(owner), -1, dtype=np.int64)
    columns = [
        np.concatenate(pair)
        for pair in (
            (path.start_ns[mine[other]] + node.offset_ns, start),
            (path.end_ns[mine[other]] + node.offset_ns, end),
            (cause[other], node.program.parts.cause[part]),
            (event_names[other], span_name),
            (path.event[mine[other]], nothing),
            (np.full(len(other), -1), span),
            (runs[other], nothing >= 0),
        )
    ]
    order = np.argsort(columns[0], kind="stable")
    start, end, cause, name, event, span, runs = (column[order] for column in columns)
    away = np.flatnonzero(path.rank_index != rank_index)
    first = np.ones(len(away), dtype=bool)
    first[1:] = (np.diff(away) > 1) | (np.diff(path.rank_index[away]) != 0)
    head = away[first]
    tail = away[np.append(np.flatnonzero(first)[1:] - 1, len(away) - 1)] if len(away) else away
    return Lane(
        start,
        end,
        cause,
        name,
        names,
        event,
        span,
        runs,
        path.start_ns[head] + node.offset_ns,
        path.end_ns[tail] + node.offset_ns,
        np.array([f.node.rank for f in facts])[path.rank_index[head]],
    )


def _main_cause(fact: CauseTimes) -> np.ndarray:
    """Code of the leaf in which each device event spends most; what runs hidden is unmodelled."""
    links = fact.node.links
    found = np.full(len(fact.node.start), CODES["compute.unmodelled"])
    found[links.work_class == COMMUNICATION] = CODES["communication.unseparated"]
    found[links.work_class == COPY] = CODES["copy.other"]
    most = np.zeros(len(found))
    for leaf, number in CODES.items():
        if not leaf.startswith("idle."):
            time = fact.of_events(leaf)
            found[time > most] = number
            most = np.maximum(most, time)
    return found


def _along(
    parts: Parts, path: Path, rows: np.ndarray, offset_ns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Host stretches cut along what the host did: (row, start_ns, end_ns, part)."""
    low = np.searchsorted(parts.owner, path.interval[rows], side="left")
    count = np.searchsorted(parts.owner, path.interval[rows], side="right") - low
    of, part = g.ranges(low, count)
    start = np.maximum(parts.start_ns[part], path.start_ns[rows][of] + offset_ns)
    end = np.minimum(parts.end_ns[part], path.end_ns[rows][of] + offset_ns)
    some = end > start
    return rows[of[some]], start[some], end[some], part[some]
