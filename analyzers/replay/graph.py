"""The dependency graph of a run: moments on hosts and devices, and what each waits for.

A moment comes when all that it waits for has come, each edge with the time that it takes at least,
and its own lag after that: what it was observed to take longer, for reasons that no trace shows.
Weights never exceed what was observed, and the lag is the rest, so that the graph as it is gives
the observed times back. Where the observed order contradicts an edge, the edge is left out and
counted. Moments are numbered in order of time, so that every edge leads to a later number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.causes.idle import blocking_copies
from chopper.analyzers.replay.program import (
    ISSUE,
    OP_END,
    OP_START,
    STEP,
    Program,
    program,
)
from chopper.analyzers.replay.program import LAUNCH as LAUNCHES
from chopper.analyzers.replay.recorded import recorded_waits
from chopper.analyzers.replay.recurring import in_order, recurring_waits
from chopper.analyzers.replay.streams import (
    CALLS,
    Waits,
    place_of,
    previous_on_stream,
    waits,
)
from chopper.analyzers.trace.columns import compact, row_set

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.analyzers.trace.join import Links
    from chopper.analyzers.trace.joined import JoinedRank
    from chopper.analyzers.trace.match import Matched
    from chopper.analyzers.trace.tables import DeviceEvents

(
    PROGRAM,
    LAUNCH,
    RUN,
    STREAM,
    EVENT,
    ARRIVE,
    TRANSFER,
    SYNCHRONIZE,
    COLLECTIVE_WAIT,
    FOLLOW,
) = range(10)
"""Kinds of edges: from one moment of a program to the next; from a launch to its event's start;
from there to its end; to the next event of the stream; to an event of another stream; from the
start of a collective to the last arrival at it, and from there to its ends; from an event's end to
the host that synchronized, or waited for a collective; and beside the program, to what runs on
threads of its own."""
EDGE_LABELS = [
    "program",
    "launch",
    "run",
    "stream order",
    "dependency between streams",
    "arrival",
    "transfer",
    "synchronization",
    "wait for a collective",
    "beside the program",
]
_OWN_LAG_NS = 50_000
"""A longer lag is no variation of a latency: something else was waited for."""
_GAP_NS = 5_000
"""A gap that is longer than a stream takes by so much has another reason."""


@dataclass(frozen=True)
class RankNodes:
    """Numbers of a rank's moments in the graph.

    Attributes:
        joined, matched: what the rank is made of.
        links: its joined events as arrays.
        program: its host.
        waits: its streams; None without a device.
        start, end: moment of each device event's start and end.
        moment: moment of each moment of the program.
        step: moment of each step's start on the host.
        call_ns: what the launching call takes of each event's launch.
        coupled: mask of the events that wait for other ranks.
        transfer_ns: of coupled events, from the last arrival to their end.
        event_base, interval_base: number of its first event and interval among those of all ranks.
    """

    joined: JoinedRank
    links: Links
    matched: Matched | None
    program: Program
    waits: Waits | None
    start: np.ndarray
    end: np.ndarray
    moment: np.ndarray
    step: np.ndarray
    call_ns: np.ndarray
    coupled: np.ndarray
    transfer_ns: np.ndarray
    event_base: int
    interval_base: int

    @property
    def rank(self) -> int:
        """Its number."""
        return self.joined.given.rank

    @property
    def offset_ns(self) -> int:
        """Nanoseconds that its clock is ahead of the graph's time."""
        return 0 if self.matched is None else self.matched.offset_ns


@dataclass(frozen=True)
class Graph:
    """Moments and edges of all ranks, in order.

    Attributes:
        time_ns: when each moment was observed, in one clock.
        first: edges that enter moment v are first[v] … first[v + 1].
        source, weight_ns, kind: of each edge.
        of: what an edge belongs to: the interval of a PROGRAM edge, the event that it leads to.
        lag_ns: what each moment took beyond its latest predecessor.
        rank: number of each moment's rank, in the order of ``ranks``; -1 for the last arrivals.
        ranks: the ranks.
        contradicted: edges that were left out because they were observed in another order.
        free: device events that wait for nothing that was recorded: they stay where they are.
    """

    time_ns: np.ndarray
    first: np.ndarray
    source: np.ndarray
    weight_ns: np.ndarray
    kind: np.ndarray
    of: np.ndarray
    lag_ns: np.ndarray
    rank: np.ndarray
    ranks: list[RankNodes]
    contradicted: int
    free: int

    @property
    def target(self) -> np.ndarray:
        """Moment that each edge leads to."""
        return np.repeat(np.arange(len(self.time_ns)), np.diff(self.first))

    def edges_into(self, moments: np.ndarray) -> np.ndarray:
        """Edges that enter some moments."""
        count = self.first[moments + 1] - self.first[moments]
        before = np.repeat(self.first[moments] - np.cumsum(count) + count, count)
        return before + np.arange(len(before))


class _Edges:
    """Edges while they are gathered."""

    def __init__(self) -> None:
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, int, np.ndarray]] = []

    def add(
        self,
        kind: int,
        source: np.ndarray,
        target: np.ndarray,
        weight: np.ndarray,
        of: np.ndarray,
    ) -> None:
        """Edges of one kind."""
        self.parts.append((source, target, weight, kind, of))

    def gathered(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(source, target, weight, kind, of) of all; moments and events numbered in 32 bits."""
        narrow = np.dtype(np.int32)
        columns = (
            np.concatenate([part[i] for part in self.parts], dtype=dtype, casting="unsafe")
            for i, dtype in ((0, narrow), (1, narrow), (2, np.dtype(np.int64)), (4, narrow))
        )
        kinds = np.array([part[3] for part in self.parts], dtype=np.int8)
        source, target, weight, of = columns
        return source, target, weight, np.repeat(kinds, [len(p[0]) for p in self.parts]), of


def build(ranks: Sequence[tuple[JoinedRank, Matched | None]]) -> Graph:
    """The graph of joined ranks, their collectives matched."""
    edges, nodes = _Edges(), []
    times: list[np.ndarray] = []
    owners: list[np.ndarray] = []
    moments = events = intervals = 0
    for number, (joined, matched) in enumerate(ranks):
        links = joined.links()
        node = _rank(joined, links, matched, edges, moments, events, intervals)
        own = np.concatenate(
            [
                node.program.time_ns,
                links.events.start_ns,
                links.events.end_ns,
            ]
        )
        if joined.host_only:
            own = own[: len(node.program)]
            beside = np.flatnonzero(node.start >= moments + len(own))
            all_events = links.events
            own = np.concatenate([own, all_events.start_ns[beside], all_events.end_ns[beside]])
        times.append(own - node.offset_ns)
        owners.append(np.full(len(own), number, dtype=np.int32))
        moments += len(own)
        events += len(links.events)
        intervals += len(node.program)
        nodes.append(node)
    _recurring(nodes, edges)
    ready = _couple(nodes, edges, moments)
    times.append(ready)
    owners.append(np.full(len(ready), -1, dtype=np.int32))
    return _ordered(np.concatenate(times), np.concatenate(owners), edges, nodes)


def _rank(
    joined: JoinedRank,
    links: Links,
    matched: Matched | None,
    edges: _Edges,
    base: int,
    event_base: int,
    interval_base: int,
) -> RankNodes:
    """The moments of one rank and the edges between them.

    Moments are numbered from ``base``: those of the program, then starts and ends of the device
    events (without a device only of those that the program does not run itself).
    """
    events = links.events
    count = len(events)
    recorded = recorded_waits(links, joined.given.synchronization)
    told = program(links, recorded)
    moment = base + np.arange(len(told))
    coupled, transfer = _coupled(links.events, matched)
    if joined.host_only:
        start, end = _host_moments(told, count, base)
    else:
        start = base + len(told) + np.arange(count)
        end = start + count
    row = np.arange(count)
    # The program.
    between = np.arange(1, len(told))
    span = np.diff(told.time_ns)
    run = told.inside[1:]
    edges.add(
        PROGRAM,
        moment[:-1][~run],
        moment[1:][~run],
        np.minimum(told.work_ns[1:], span)[~run],
        (interval_base + between)[~run],
    )
    # Running.
    duration = np.where(coupled, transfer, events.dur_ns)
    edges.add(RUN, start, end, duration, event_base + row)
    # Synchronization, and waiting for collectives.
    _waiting_host(told, joined, links, edges, moment, end, event_base)
    call = np.zeros(count, dtype=np.int64)
    found: Waits | None = None
    if joined.host_only:
        _beside(told, links, edges, moment, start, end, event_base)
    else:
        found = waits(links, joined.communication, recorded)
        call = _launches(told, links, found, edges, moment, start, event_base)
        later = np.flatnonzero(found.previous >= 0)
        _after(
            edges,
            STREAM,
            events,
            found.previous[later],
            later,
            found.stream_ns,
            start,
            end,
            event_base,
        )
        _after(
            edges, EVENT, events, found.source, found.target, found.event_ns, start, end, event_base
        )
    return RankNodes(
        joined,
        links,
        matched,
        told,
        found,
        start,
        end,
        moment,
        moment[told.kind == STEP],
        call,
        coupled,
        transfer,
        event_base,
        interval_base,
    )


def _coupled(events: DeviceEvents, matched: Matched | None) -> tuple[np.ndarray, np.ndarray]:
    """Mask of the events that wait for other ranks, and the ns that they run after that."""
    if matched is None:
        return np.zeros(len(events), dtype=bool), np.zeros(len(events), dtype=np.int64)
    ready = matched.ready_ns
    coupled = (ready >= 0) & (ready <= events.end_ns)
    transfer = np.where(coupled, events.end_ns - np.maximum(ready, events.start_ns), 0)
    return coupled, transfer


def _host_moments(told: Program, count: int, base: int) -> tuple[np.ndarray, np.ndarray]:
    """Moments of device events that are operators: those of the program, or of their own."""
    start = np.full(count, -1, dtype=np.int64)
    end = start.copy()
    at = np.arange(len(told))
    for kind, moment in ((OP_START, start), (OP_END, end)):
        of = told.kind == kind
        moment[told.row[of]] = base + at[of]
    beside = np.flatnonzero(start < 0)
    start[beside] = base + len(told) + np.arange(len(beside))
    end[beside] = base + len(told) + len(beside) + np.arange(len(beside))
    return start, end


def _waiting_host(
    told: Program,
    joined: JoinedRank,
    links: Links,
    edges: _Edges,
    moment: np.ndarray,
    end: np.ndarray,
    event_base: int,
) -> None:
    """Edges to where the host goes on, from the ends that it waited for."""
    events = links.events
    at = np.flatnonzero(told.waits_for >= 0)
    source = told.waits_for[at]
    kind = COLLECTIVE_WAIT if joined.host_only else SYNCHRONIZE
    edges.add(
        kind,
        end[source],
        moment[at],
        # What the host does once it is awake.
        np.minimum(told.time_ns[at] - events.end_ns[source], told.work_ns[at]),
        event_base + source,
    )
    whole = np.flatnonzero(told.waits_for_all)
    if not len(whole):
        return
    # The last event that each stream had been given before the call.
    asked, returned = told.time_ns[np.maximum(whole - 1, 0)], told.time_ns[whole]
    launch = links.launch_ns
    stream = compact(place_of(links))[1]
    by_stream = np.lexsort((launch, stream))
    for rows in np.split(by_stream, np.cumsum(np.bincount(stream))[:-1]):
        at = np.searchsorted(launch[rows], asked, side="right") - 1
        last = rows[np.maximum(at, 0)]
        fits = (at >= 0) & (events.end_ns[last] <= returned) & (last != told.waits_for[whole])
        edges.add(
            kind,
            end[last[fits]],
            moment[whole[fits]],
            np.minimum(returned - events.end_ns[last], told.work_ns[whole])[fits],
            event_base + last[fits],
        )


def _launches(
    told: Program,
    links: Links,
    found: Waits,
    edges: _Edges,
    moment: np.ndarray,
    start: np.ndarray,
    event_base: int,
) -> np.ndarray:
    """Edges from launches to events; what the call takes of each."""
    of_row = np.full(len(links.host) + 1, -1, dtype=np.int64)
    launches = told.kind == LAUNCHES
    of_row[told.row[launches]] = moment[launches]
    has = np.flatnonzero(links.has_launch)
    delay = links.events.start_ns[has] - links.launch_ns[has]
    length = links.returned_ns[has] - links.launch_ns[has]
    # A call that returned when its copy was done took no such time to launch it.
    length[row_set(blocking_copies(links), len(links.events))[has]] = 0
    weight = np.clip(length + found.launch_ns, 0, np.maximum(delay, 0))
    edges.add(LAUNCH, of_row[links.launch_row[has]], start[has], weight, event_base + has)
    call = np.zeros(len(links.events), dtype=np.int64)
    # Where the submission itself varies with the call, so does what goes with it.
    own = np.where(delay <= CALLS * length, np.maximum(delay - max(found.launch_ns, 0), 0), length)
    call[has] = np.maximum(own, np.minimum(length, weight))
    _unlaunched(told, links, found, edges, moment, start, event_base)
    return call


def _unlaunched(
    told: Program,
    links: Links,
    found: Waits,
    edges: _Edges,
    moment: np.ndarray,
    start: np.ndarray,
    event_base: int,
) -> None:
    """Edges to events whose launch was not recorded, and which began after a gap.

    They follow the last moment of the program before them, where that lies after the launch of
    what ran before on the stream: there they must have been launched.
    """
    events = links.events
    previous = found.previous
    rows = np.flatnonzero(~links.has_launch & (previous >= 0))
    if not len(rows) or not len(told):
        return
    before = previous[rows]
    gap = events.start_ns[rows] - events.end_ns[before]
    last = np.searchsorted(told.time_ns, events.start_ns[rows], side="right") - 1
    launched = np.where(links.has_launch[before], links.launch_ns[before], events.start_ns[before])
    late = (gap > found.stream_ns + _GAP_NS) & (last >= 0) & (told.time_ns[last] >= launched)
    rows, last = rows[late], last[late]
    edges.add(
        FOLLOW,
        moment[last],
        start[rows],
        events.start_ns[rows] - told.time_ns[last],
        event_base + rows,
    )


def _after(
    edges: _Edges,
    kind: int,
    events: object,
    source: np.ndarray,
    target: np.ndarray,
    least_ns: int,
    start: np.ndarray,
    end: np.ndarray,
    event_base: int,
) -> None:
    """Edges from the ends of events to the starts of others.

    Where the two were seen to overlap, by rounding or because the next one began early, from start
    to start.
    """
    gap = events.start_ns[target] - events.end_ns[source]  # type: ignore[attr-defined]
    overlap = gap < 0
    apart = events.start_ns[target] - events.start_ns[source]  # type: ignore[attr-defined]
    edges.add(
        kind,
        np.where(overlap, start[source], end[source]),
        start[target],
        np.where(overlap, apart, np.minimum(gap, least_ns)),
        event_base + target,
    )


def _beside(
    told: Program,
    links: Links,
    edges: _Edges,
    moment: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    event_base: int,
) -> None:
    """Edges to what runs on threads of its own, without a device: collectives, other operators."""
    events = links.events
    if not len(told):
        return
    beside = np.flatnonzero(~np.isin(np.arange(len(events)), told.row[told.kind == OP_START]))
    collective = events.of("host_collective")[beside]
    issued = np.flatnonzero(told.kind == ISSUE)
    sent = beside[collective]
    fifo = in_order(told, links, sent)
    after = np.searchsorted(told.time_ns, events.start_ns[beside], side="right") - 1
    if len(issued):
        last = np.searchsorted(told.time_ns[issued], events.start_ns[sent], side="right") - 1
        after[collective] = (
            fifo
            if fifo is not None
            else np.where(last >= 0, issued[np.maximum(last, 0)], after[collective])
        )
    ok = after >= 0
    beside, after = beside[ok], after[ok]
    previous = previous_on_stream(links)
    before = previous[beside]
    has = before >= 0
    free = np.where(has, events.end_ns[before], np.iinfo(np.int64).min)
    delay = events.start_ns[beside] - told.time_ns[after]
    # How long it takes to begin shows where the thread was free.
    idle = free <= told.time_ns[after]
    typical = int(np.median(delay[idle])) if idle.any() else 0
    edges.add(
        FOLLOW,
        moment[after],
        start[beside],
        np.where(idle, delay, np.minimum(delay, typical)),
        event_base + beside,
    )
    gap = (events.start_ns[beside] - free)[has]
    edges.add(
        STREAM,
        end[before[has]],
        start[beside[has]],
        np.minimum(gap, int(np.median(gap[~idle[has]])) if (~idle[has]).any() else 0),
        event_base + beside[has],
    )


def _recurring(nodes: list[RankNodes], edges: _Edges) -> None:
    """Edges to where the host, without a device, waited in other steps for the same collective."""
    alone = [node for node in nodes if node.joined.host_only]
    found = recurring_waits([(node.program, node.links) for node in alone]) if alone else []
    for node, (event, at) in zip(alone, found, strict=True):
        none = np.zeros(len(event), dtype=np.int64)
        edges.add(COLLECTIVE_WAIT, node.end[event], node.moment[at], none, node.event_base + event)


def _couple(nodes: list[RankNodes], edges: _Edges, base: int) -> np.ndarray:
    """Edges through the last arrival at each collective; when these were observed."""
    instances = 1 + max(
        (int(n.matched.instance.max(initial=-1)) for n in nodes if n.matched is not None),
        default=-1,
    )
    ready = np.full(max(instances, 0), np.iinfo(np.int64).min, dtype=np.int64)
    for node in nodes:
        if node.matched is None:
            continue
        instance = node.matched.instance
        rows = np.flatnonzero(instance >= 0)
        arrived = node.links.events.start_ns[rows] - node.offset_ns
        np.maximum.at(ready, instance[rows], arrived)
    number = np.cumsum(ready > np.iinfo(np.int64).min) - 1
    for node in nodes:
        if node.matched is None:
            continue
        instance = node.matched.instance
        rows = np.flatnonzero(instance >= 0)
        at = base + number[instance[rows]]
        edges.add(
            ARRIVE, node.start[rows], at, np.zeros(len(rows), np.int64), node.event_base + rows
        )
        waits_for = node.coupled[rows]
        stay = rows[waits_for]
        edges.add(
            TRANSFER, at[waits_for], node.end[stay], node.transfer_ns[stay], node.event_base + stay
        )
    return ready[ready > np.iinfo(np.int64).min]


def _ordered(time: np.ndarray, owner: np.ndarray, edges: _Edges, nodes: list[RankNodes]) -> Graph:
    """Number the moments in order of time and sort the edges by where they lead."""
    source, target, weight, kind, of = edges.gathered()
    span = time[target] - time[source]
    possible = span >= 0
    contradicted = int((~possible).sum())
    level, cyclic = _levels_of_ties(len(time), source, target, np.flatnonzero(span == 0))
    if len(cyclic):
        contradicted += len(cyclic)
        possible[cyclic] = False
    if contradicted:
        source, target, weight, kind, of, span = (
            column[possible] for column in (source, target, weight, kind, of, span)
        )
    # No edge may take longer than was observed.
    np.minimum(weight, span, out=weight)
    order = np.lexsort((level, time)) if level.any() else np.argsort(time, kind="stable")
    number = np.empty(len(order), dtype=np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    time, owner = time[order], owner[order]
    source, target = number[source], number[target]
    by_target = np.argsort(target, kind="stable")
    count = np.bincount(target, minlength=len(time))
    first = np.zeros(len(time) + 1, dtype=np.int64)
    np.cumsum(count, out=first[1:])
    source, weight, kind, of = (column[by_target] for column in (source, weight, kind, of))
    arrival = time[source] + weight
    entered = np.flatnonzero(count)
    lag = np.zeros(len(time), dtype=np.int64)
    if len(entered):
        lag[entered] = time[entered] - np.maximum.reduceat(arrival, first[entered])
    _own_lags(lag, time, arrival, first, weight, kind)
    placed = [
        replace(
            n,
            start=number[n.start],
            end=number[n.end],
            moment=number[n.moment],
            step=number[n.step],
        )
        for n in nodes
    ]
    free = sum(int((count[n.start] == 0).sum()) for n in placed)
    return Graph(time, first, source, weight, kind, of, lag, owner, placed, contradicted, free)


def _own_lags(
    lag: np.ndarray,
    time: np.ndarray,
    arrival: np.ndarray,
    first: np.ndarray,
    weight: np.ndarray,
    kind: np.ndarray,
) -> None:
    """Short lags become part of the edges that decided: a launch, a stream, took so much longer.

    Where the event began within so many lengths of its launching call, its launch took longer,
    whatever else came just before.

    Args:
        lag, weight: of moments and of edges, changed in place.
        time: of each moment.
        arrival: when each edge lets its moment come.
        first: edges that enter moment v are first[v] … first[v + 1].
        kind: of each edge.
    """
    late = np.flatnonzero(lag > 0)
    count = (first[1:] - first[:-1])[late]
    of = np.repeat(late, count)
    edge = np.arange(len(of)) + np.repeat(first[late] - np.cumsum(count) + count, count)
    missing = time[of] - arrival[edge]
    launched = (kind[edge] == LAUNCH) & (missing <= (CALLS - 1) * weight[edge])
    weight[edge[launched]] += missing[launched]
    lag[of[launched]] = 0
    decided = (missing == lag[of]) & (missing > 0) & (missing <= _OWN_LAG_NS)
    of, edge = of[decided], edge[decided]
    weight[edge] += lag[of]
    lag[of] = 0


_ROUNDS_MAX = 4096


def _levels_of_ties(
    count: int, source: np.ndarray, target: np.ndarray, tied: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Order among moments of one time, by the edges between them; the edges that close circles.

    Args:
        count: of moments.
        source, target: of all edges.
        tied: edges between moments of one time.
    """
    level = np.zeros(count, dtype=np.int32)
    a, b = source[tied], target[tied]
    for _ in range(_ROUNDS_MAX):
        wrong = level[b] <= level[a]
        if not wrong.any():
            return level, tied[:0]
        np.maximum.at(level, b[wrong], level[a[wrong]] + 1)
    return level, tied[level[b] <= level[a]]


__all__ = ["EDGE_LABELS", "Graph", "RankNodes", "build"]
