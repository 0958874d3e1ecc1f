"""The dependency graph of a run: moments on hosts and devices, and what each waits for.

A moment comes when all that it waits for has come, each edge with the time that it takes at least,
and its own lag after that: what it was observed to take longer, for reasons that no trace shows.
Weights never exceed what was observed, and the lag is the rest, so that the graph as it is gives
the observed times back. Where the observed order contradicts an edge, the edge is left out and
counted. Moments are numbered in order of time, so that every edge leads to a later number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.causes.idle import blocking_copies
from chopper.analyzers.replay.program import (
    ISSUE,
    OP_END,
    OP_START,
    STEP,
    blocked_launches,
    program,
    without_late_stamps,
)
from chopper.analyzers.replay.program import LAUNCH as LAUNCHES
from chopper.analyzers.replay.waits import CALLS, Waits, previous_on_stream, recorded_waits, waits
from chopper.analyzers.trace.columns import compact, row_set

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from chopper.analyzers.replay.program import Program
    from chopper.analyzers.trace.join import Links
    from chopper.analyzers.trace.match import Matched
    from chopper.analyzers.trace.rank_join import JoinedRank
    from chopper.analyzers.trace.tables import DeviceEvents

    Edges = tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    """Kind, sources, targets, least nanoseconds, and what each belongs to, of edges of one kind."""

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
    TURN,
) = range(11)
"""Kinds of edges: from one moment of a program to the next; from a launch to its event's start;
from there to its end; to the next event of the stream; to an event of another stream; from the
start of a collective to the last arrival at it, and from there to its ends; from an event's end to
the host that synchronized, or waited for a collective; beside the program, to what runs on
threads of its own; and from a transfer to the next over the same link."""
NEVER = -(1 << 62)
"""Weight of an edge that decides nothing, until a scenario gives it another."""
ABSENT = int(np.iinfo(np.int64).min)
"""Weight of an edge that is not there."""
_OWN_LAG_NS = 50_000
"""A longer lag is no variation of a latency: something else was waited for."""
_GAP_NS = 5_000
"""A gap that is longer than a stream takes by so much has another reason."""


class RankNodes:
    """Numbers of a rank's moments in the graph: those of its program, then of its device events.

    Attributes:
        joined, matched: what the rank is made of.
        links: its joined events as arrays.
        program: its host.
        start, end: moment of each device event's start and end.
        moment: moment of each moment of the program.
        call_ns: what the launching call takes of each event's launch.
        coupled: mask of the events that wait for other ranks.
        transfer_ns: of coupled events, from the last arrival to their end.
        late_ns: how long after the end of each event that was stamped; windows end there.
        event_base, interval_base: number of its first event and interval among those of all ranks.
    """

    def __init__(
        self, joined: JoinedRank, matched: Matched | None, before: tuple[int, int, int]
    ) -> None:
        base, self.event_base, self.interval_base = before
        self.joined, self.matched = joined, matched
        self.links = joined.links()
        stamped = self.links.events
        if joined.host_only and matched is not None:
            self.links = without_late_stamps(self.links, matched.ready_ns)
        events = self.links.events
        self.late_ns = stamped.dur_ns - events.dur_ns
        self.recorded = recorded_waits(self.links, joined.inputs.synchronization)
        self.program = program(self.links, self.recorded)
        self.moment = base + np.arange(len(self.program))
        # Without a device, operators are moments of the program, others have their own.
        self.start, self.end = np.full((2, len(events)), -1, dtype=np.int64)
        if joined.host_only:
            for kind, moment in ((OP_START, self.start), (OP_END, self.end)):
                of = self.program.kind == kind
                moment[self.program.row[of]] = self.moment[of]
        threaded = np.flatnonzero(self.start < 0)
        first = base + len(self.program) + np.arange(len(threaded))
        self.start[threaded] = first
        self.end[threaded] = first + len(threaded)
        self.time_ns = np.concatenate(
            [self.program.time_ns, events.start_ns[threaded], events.end_ns[threaded]]
        )
        self.call_ns = np.zeros(len(events), dtype=np.int64)
        self.coupled, self.transfer_ns = _coupled(events, matched)

    @property
    def rank(self) -> int:
        """Its number."""
        return self.joined.inputs.rank

    @property
    def offset_ns(self) -> int:
        """Nanoseconds that its clock is ahead of the graph's time."""
        return 0 if self.matched is None else self.matched.offset_ns

    @property
    def step(self) -> np.ndarray:
        """Moment of each step's start on the host."""
        return np.asarray(self.moment[self.program.kind == STEP])

    def renumber(self, number: np.ndarray) -> None:
        """Give its moments their numbers in order of time."""
        self.start, self.end = number[self.start], number[self.end]
        self.moment = number[self.moment]

    def edges(self) -> Iterator[Edges]:
        """Yield the edges between its moments."""
        program = self.program
        waited = ~program.inside[1:]
        yield (
            PROGRAM,
            self.moment[:-1][waited],
            self.moment[1:][waited],
            np.minimum(program.work_ns[1:], np.diff(program.time_ns))[waited],
            (self.interval_base + np.arange(1, len(program)))[waited],
        )
        for kind, source, target, weight, of in self._of_events():
            yield kind, source, target, weight, self.event_base + of

    def _of_events(self) -> Iterator[Edges]:
        duration = np.where(self.coupled, self.transfer_ns, self.links.events.dur_ns)
        yield RUN, self.start, self.end, duration, np.arange(len(duration))
        yield from self._synchronization()
        if self.joined.host_only:
            yield from self._other_threads()
            return
        waits_found = waits(self.links, self.joined.communication, self.recorded)
        yield self._launches(waits_found)
        yield from self._unlaunched(waits_found)
        later = np.flatnonzero(waits_found.previous >= 0)
        yield self._after(STREAM, waits_found.previous[later], later, waits_found.stream_ns)
        yield self._after(EVENT, waits_found.source, waits_found.target, waits_found.event_ns)

    def _synchronization(self) -> Iterator[Edges]:
        """Edges to where the host goes on, from the ends that it waited for."""
        program, links, ends = self.program, self.links, self.links.events.end_ns
        at = np.flatnonzero(program.waits_for >= 0)
        source = program.waits_for[at]
        kind = COLLECTIVE_WAIT if self.joined.host_only else SYNCHRONIZE
        # What the host does once it is awake.
        awake = np.minimum(program.time_ns[at] - ends[source], program.work_ns[at])
        yield kind, self.end[source], self.moment[at], awake, source
        device_waits = np.flatnonzero(program.waits_for_all)
        if not len(device_waits):
            return
        # The last event that each stream had been given before the call.
        called_ns, returned = (
            program.time_ns[np.maximum(device_waits - 1, 0)],
            program.time_ns[device_waits],
        )
        launch = links.launch_ns
        stream = compact(links.events.stream_key)[1]
        by_stream = np.lexsort((launch, stream))
        for rows in np.split(by_stream, np.cumsum(np.bincount(stream))[:-1]):
            at = np.searchsorted(launch[rows], called_ns, side="right") - 1
            last = rows[np.maximum(at, 0)]
            fits = (at >= 0) & (ends[last] <= returned) & (last != program.waits_for[device_waits])
            awake = np.minimum(returned - ends[last], program.work_ns[device_waits])[fits]
            last = last[fits]
            yield kind, self.end[last], self.moment[device_waits[fits]], awake, last

    def _launches(self, waits_found: Waits) -> Edges:
        """Edges from launches to events; fills in what the call takes of each."""
        program, links, events = self.program, self.links, self.links.events
        of_row = np.full(len(links.host) + 1, -1, dtype=np.int64)
        launches = program.kind == LAUNCHES
        of_row[program.row[launches]] = self.moment[launches]
        has = np.flatnonzero(links.has_launch)
        delay = events.start_ns[has] - links.launch_ns[has]
        length = links.returned_ns[has] - links.launch_ns[has]
        # A call that returned when its copy was done, or once there was room in the queue, took no
        # such time to launch.
        length[row_set(blocking_copies(links), len(events))[has]] = 0
        length[row_set(blocked_launches(links), len(links.host))[links.launch_row[has]]] = 0
        weight = np.clip(length + waits_found.launch_ns, 0, np.maximum(delay, 0))
        # Where the submission itself varies with the call, so does what goes with it.
        beyond = np.maximum(delay - max(waits_found.launch_ns, 0), 0)
        call_ns = np.where(delay <= CALLS * length, beyond, length)
        self.call_ns[has] = np.maximum(call_ns, np.minimum(length, weight))
        return LAUNCH, of_row[links.launch_row[has]], self.start[has], weight, has

    def _unlaunched(self, waits_found: Waits) -> Iterator[Edges]:
        """Edges to events whose launch was not recorded, and which began after a gap.

        They follow the last moment of the program before them, where that lies after the launch of
        what ran before on the stream: there they must have been launched.
        """
        program, links, events = self.program, self.links, self.links.events
        rows = np.flatnonzero(~links.has_launch & (waits_found.previous >= 0))
        if not len(rows) or not len(program):
            return
        before = waits_found.previous[rows]
        gap = events.start_ns[rows] - events.end_ns[before]
        last = np.searchsorted(program.time_ns, events.start_ns[rows], side="right") - 1
        launched = np.where(
            links.has_launch[before], links.launch_ns[before], events.start_ns[before]
        )
        late = (
            (gap > waits_found.stream_ns + _GAP_NS)
            & (last >= 0)
            & (program.time_ns[last] >= launched)
        )
        rows, last = rows[late], last[late]
        delay = events.start_ns[rows] - program.time_ns[last]
        yield FOLLOW, self.moment[last], self.start[rows], delay, rows

    def _after(self, kind: int, source: np.ndarray, target: np.ndarray, least_ns: int) -> Edges:
        """Edges from the ends of events to the starts of others.

        Where the two were seen to overlap, by rounding or because the next one began early, from
        start to start.
        """
        events = self.links.events
        gap = events.start_ns[target] - events.end_ns[source]
        overlap = gap < 0
        apart = events.start_ns[target] - events.start_ns[source]
        moment = np.where(overlap, self.start[source], self.end[source])
        weight = np.where(overlap, apart, np.minimum(gap, least_ns))
        return kind, moment, self.start[target], weight, target

    def _other_threads(self) -> Iterator[Edges]:
        """Edges to what runs on threads of its own, without a device: collectives, operators."""
        program, links, events = self.program, self.links, self.links.events
        if not len(program):
            return
        by_program = row_set(program.row[program.kind == OP_START], len(events))
        threaded = np.flatnonzero(~by_program)
        collective = events.of("host_collective")[threaded]
        issued = np.flatnonzero(program.kind == ISSUE)
        sent = threaded[collective]
        after = np.searchsorted(program.time_ns, events.start_ns[threaded], side="right") - 1
        if len(issued):
            fifo = _issuing_moments(program, links, sent)
            if fifo is None:
                last = (
                    np.searchsorted(program.time_ns[issued], events.start_ns[sent], side="right")
                    - 1
                )
                fifo = np.where(last >= 0, issued[np.maximum(last, 0)], after[collective])
            after[collective] = fifo
        ok = after >= 0
        threaded, after = threaded[ok], after[ok]
        before = previous_on_stream(links)[threaded]
        has = before >= 0
        free = np.where(has, events.end_ns[before], np.iinfo(np.int64).min)
        delay = events.start_ns[threaded] - program.time_ns[after]
        # How long it takes to begin shows where the thread was free.
        idle = free <= program.time_ns[after]
        typical = int(np.median(delay[idle])) if idle.any() else 0
        weight = np.where(idle, delay, np.minimum(delay, typical))
        yield FOLLOW, self.moment[after], self.start[threaded], weight, threaded
        gap = (events.start_ns[threaded] - free)[has]
        usual = int(np.median(gap[~idle[has]])) if (~idle[has]).any() else 0
        row = threaded[has]
        yield STREAM, self.end[before[has]], self.start[row], np.minimum(gap, usual), row


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
        ready: moment of the last arrival at each collective.
        instance: number of each of these collectives.
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
    ready: np.ndarray
    instance: np.ndarray


def ranges(first: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers first, first + 1 … of each range in a row: (range of each, numbers)."""
    of = np.repeat(np.arange(len(count)), count)
    return of, np.arange(len(of)) + (first - np.cumsum(count) + count)[of]


def build(ranks: Sequence[tuple[JoinedRank, Matched | None]], *, with_others: bool = True) -> Graph:
    """The graph of joined ranks, their collectives matched.

    Args:
        ranks: each with its matched collectives.
        with_others: the last arrivals at collectives are those of these ranks; else they come when
            they came, whatever becomes of these ranks: other ranks of the job are not here.
    """
    nodes: list[RankNodes] = []
    moments = events = intervals = 0
    for joined, matched in ranks:
        node = RankNodes(joined, matched, (moments, events, intervals))
        moments += len(node.time_ns)
        events += len(node.start)
        intervals += len(node.program)
        nodes.append(node)
    edges = [edge for node in nodes for edge in node.edges()]
    edges += _turns(nodes, edges, moments)
    instance, ready_ns = _couple(nodes, edges, moments, with_others=with_others)
    times = [*(node.time_ns - node.offset_ns for node in nodes), ready_ns]
    ranks_of = np.append(np.arange(len(nodes), dtype=np.int32), np.int32(-1))
    owner = np.repeat(ranks_of, [len(t) for t in times])
    return _ordered(np.concatenate(times), owner, edges, nodes, instance)


def _turns(nodes: list[RankNodes], edges: list[Edges], count: int) -> list[Edges]:
    """Edges between transfers of a group that were seen one after the other: they share a link."""
    entered = np.zeros(count, dtype=bool)
    for _, _, target, *_ in edges:
        entered[target] = True
    turns: list[Edges] = []
    for node in nodes:
        sent, events = node.joined.communication, node.links.events
        groups = {group: i for i, group in enumerate(dict.fromkeys(k.group for k in sent.kinds))}
        group = np.array([*(groups[k.group] for k in sent.kinds), -1])[sent.kind]
        for one in groups.values():
            rows = sent.event_row[group == one]
            rows = rows[np.argsort(events.start_ns[rows], kind="stable")]
            before, after = rows[:-1], rows[1:]
            ended_ns = np.maximum.accumulate(events.end_ns[rows])[:-1]
            ok = (ended_ns < events.start_ns[after]) & entered[node.start[after]]
            # What ended last before it, not what began last.
            ok &= events.end_ns[before] == ended_ns
            never = np.full(int(ok.sum()), NEVER)
            turns.append((TURN, node.end[before[ok]], node.start[after[ok]], never, after[ok]))
    return turns


def _issuing_moments(program: Program, links: Links, sent: np.ndarray) -> np.ndarray | None:
    """Return the moment that issued each collective; None if calls and collectives differ."""
    issued = np.flatnonzero(program.kind == ISSUE)
    start = links.events.start_ns[sent]
    if len(issued) != len(sent) or not (program.time_ns[issued] <= start).all():
        return None
    return issued


def _coupled(events: DeviceEvents, matched: Matched | None) -> tuple[np.ndarray, np.ndarray]:
    """Mask of the events that wait for other ranks, and the ns that they run after that."""
    if matched is None:
        return np.zeros(len(events), dtype=bool), np.zeros(len(events), dtype=np.int64)
    ready = matched.ready_ns
    coupled = (ready >= 0) & (ready <= events.end_ns)
    transfer = np.where(coupled, events.end_ns - np.maximum(ready, events.start_ns), 0)
    return coupled, transfer


def _couple(
    nodes: list[RankNodes], edges: list[Edges], base: int, *, with_others: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Edges through the last arrival at each collective; its number, and when these came."""
    members = [
        (node, rows, node.matched.instance[rows])
        for node in nodes
        if node.matched is not None
        for rows in [np.flatnonzero(node.matched.instance >= 0)]
    ]
    never = np.iinfo(np.int64).min
    count = 1 + max((int(instance.max(initial=-1)) for _, _, instance in members), default=-1)
    ready = np.full(count, never, dtype=np.int64)
    for node, rows, instance in members:
        entered = node.links.events.start_ns[rows]
        if not with_others and node.matched is not None:
            entered = np.maximum(entered, node.matched.ready_ns[rows])
        np.maximum.at(ready, instance, entered - node.offset_ns)
    number = np.cumsum(ready > never) - 1
    for node, rows, instance in members:
        at, arrive = base + number[instance], np.full(len(rows), 0 if with_others else ABSENT)
        edges.append((ARRIVE, node.start[rows], at, arrive, node.event_base + rows))
        at, stay = at[node.coupled[rows]], rows[node.coupled[rows]]
        edges.append((TRANSFER, at, node.end[stay], node.transfer_ns[stay], node.event_base + stay))
    return np.flatnonzero(ready > never), ready[ready > never]


def _ordered(
    time: np.ndarray,
    owner: np.ndarray,
    edges: list[Edges],
    nodes: list[RankNodes],
    instance: np.ndarray,
) -> Graph:
    """Number the moments in order of time and sort the edges by where they lead."""
    source, target, weight, of = (
        np.concatenate([edge[i] for edge in edges], dtype=dtype, casting="unsafe")
        for i, dtype in ((1, np.int32), (2, np.int32), (3, np.int64), (4, np.int32))
    )
    kinds = np.array([edge[0] for edge in edges], dtype=np.int8)
    kind: np.ndarray = np.repeat(kinds, [len(edge[1]) for edge in edges])
    span = time[target] - time[source]
    possible = span >= 0
    contradicted = int((~possible).sum())
    level, cyclic = levels_of_ties(len(time), source, target, np.flatnonzero(span == 0))
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
    # Of a last arrival without the other ranks no edge tells: it wraps around.
    np.maximum(lag, 0, out=lag)
    _own_lags(lag, time, arrival, first, weight, kind)
    for node in nodes:
        node.renumber(number)
    free = sum(int((count[n.start] == 0).sum()) for n in nodes)
    columns = first, source, weight, kind, of, lag, owner
    ready = number[len(time) - len(instance) :]
    return Graph(time, *columns, nodes, contradicted, free, ready, instance)


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
    of, edge = ranges(first[late], first[late + 1] - first[late])
    of = late[of]
    missing = time[of] - arrival[edge]
    launched = (kind[edge] == LAUNCH) & (missing <= (CALLS - 1) * weight[edge])
    weight[edge[launched]] += missing[launched]
    lag[of[launched]] = 0
    decided = (missing == lag[of]) & (missing > 0) & (missing <= _OWN_LAG_NS)
    of, edge = of[decided], edge[decided]
    weight[edge] += lag[of]
    lag[of] = 0


_ROUNDS_MAX = 32


def levels_of_ties(
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
    # A long chain takes as many rounds over all edges as it has edges: walk it instead.
    moments, index = np.unique(np.concatenate([a, b]), return_inverse=True)
    level[moments] = _levels_along(len(moments), index[: len(a)], index[len(a) :])
    return level, tied[level[b] <= level[a]]


def _levels_along(count: int, source: np.ndarray, target: np.ndarray) -> list[int]:
    """Return for each moment the length of the longest way to it; a circle begins somewhere."""
    following = target[np.argsort(source, kind="stable")].tolist()
    first = np.append(0, np.cumsum(np.bincount(source, minlength=count))).tolist()
    missing = np.bincount(target, minlength=count).tolist()
    level = [0] * count
    ready = [moment for moment in range(count) if not missing[moment]]
    for begin in (-1, *range(count)):
        if begin >= 0 and missing[begin] > 0:
            missing[begin] = 0
            ready.append(begin)
        while ready:
            moment = ready.pop()
            for after in following[first[moment] : first[moment + 1]]:
                if missing[after] > 0:
                    level[after] = max(level[after], level[moment] + 1)
                    missing[after] -= 1
                    if not missing[after]:
                        ready.append(after)
    return level
