"""A changed run: the time of each edge of the graph after changes, and the new schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.replay import graph as g
from chopper.analyzers.replay.program import CALL, OP_START, STEP
from chopper.analyzers.trace.join import COMMUNICATION

if TYPE_CHECKING:
    from chopper.analyzers.replay.graph import Graph, RankNodes

try:
    from chopper.analyzers.replay._longest import longest as _longest

    COMPILED = True
except ImportError:  # no compiler when it was installed
    COMPILED = False


def solve(graph: Graph, weight_ns: np.ndarray, lag_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the time of each moment in ns, and the edge that decided it (-1 for none).

    Args:
        graph: moments and edges, in order.
        weight_ns: what each edge takes at least, ``graph.ABSENT`` for none.
        lag_ns: what each moment takes beyond its latest predecessor.
    """
    time = np.empty(len(graph.time_ns), dtype=np.int64)
    decided = np.empty(len(time), dtype=np.int32)
    if COMPILED:
        _longest(graph.first, graph.source, weight_ns, lag_ns, graph.time_ns, time, decided)
    else:
        in_python(graph.first, graph.source, weight_ns, lag_ns, graph.time_ns, time, decided)
    return time, decided


def in_python(
    first: np.ndarray,
    source: np.ndarray,
    weight_ns: np.ndarray,
    lag_ns: np.ndarray,
    anchor_ns: np.ndarray,
    time_ns: np.ndarray,
    decided: np.ndarray,
) -> None:
    """Run the same pass in Python, on lists, where no compiler was available."""
    times: list[int] = []
    by: list[int] = []
    sources, weights = source.tolist(), weight_ns.tolist()
    low = 0
    for high, lag, anchor in zip(
        first[1:].tolist(), lag_ns.tolist(), anchor_ns.tolist(), strict=True
    ):
        best, edge = g.ABSENT, -1
        for at in range(low, high):
            weight = weights[at]
            if weight != g.ABSENT and (reached := times[sources[at]] + weight) > best:
                best, edge = reached, at
        times.append(anchor if edge < 0 else best + lag)
        by.append(edge)
        low = high
    time_ns[:] = times
    decided[:] = by


class Base:
    """The graph as it was observed, with what every scenario looks up in it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.time_ns, self.decided = solve(graph, graph.weight_ns, graph.lag_ns)
        moments = np.arange(len(graph.time_ns), dtype=np.int32)
        self.target = np.repeat(moments, np.diff(graph.first))
        self.call_ns = np.concatenate([node.call_ns for node in graph.ranks])
        self._edges: dict[int, np.ndarray] = {}
        self._edge_of: dict[int, np.ndarray] = {}
        self._to_rank: dict[int, list[np.ndarray]] = {}
        self._bounds: dict[int, WindowBounds] = {}

    @cached_property
    def outcome(self) -> Outcome:
        """The graph solved as it is."""
        graph = self.graph
        return Outcome(Scenario(self), self.time_ns, self.decided, graph.weight_ns, graph.lag_ns)

    def edges(self, kind: int) -> np.ndarray:
        """Edges of a kind, in order."""
        if kind not in self._edges:
            self._edges[kind] = np.flatnonzero(self.graph.kind == kind)
        return self._edges[kind]

    def edges_to(self, rank_index: int, kind: int) -> np.ndarray:
        """Edges of a kind that lead to moments of a rank, in order."""
        if kind not in self._to_rank:
            edges = self.edges(kind)
            rank = self.graph.rank[self.target[edges]]
            edges = edges[np.argsort(rank, kind="stable")]
            ends = np.searchsorted(np.sort(rank), np.arange(len(self.graph.ranks)), side="right")
            self._to_rank[kind] = np.split(edges, ends)[:-1]
        return self._to_rank[kind][rank_index]

    def edge_of(self, kind: int, of: np.ndarray) -> np.ndarray:
        """Return the edge of a kind for each interval or event, -1 for none."""
        if kind not in self._edge_of:
            edges = self.edges(kind)
            last = self.graph.ranks[-1]
            intervals, events = last.interval_base + len(last.program), len(self.call_ns)
            count = intervals if kind == g.PROGRAM else events
            self._edge_of[kind] = np.full(count, -1, dtype=np.int64)
            self._edge_of[kind][self.graph.of[edges]] = edges
        return np.asarray(self._edge_of[kind][of])

    def bounds(self, rank_index: int) -> WindowBounds:
        """Return what bounds the windows of a rank, with its events in their own steps."""
        if rank_index not in self._bounds:
            node = self.graph.ranks[rank_index]
            self._bounds[rank_index] = window_bounds(node, node.links.step)
        return self._bounds[rank_index]

    @property
    def events_count(self) -> int:
        """Device events of all ranks."""
        return len(self.call_ns)

    @cached_property
    def communication(self) -> tuple[np.ndarray, np.ndarray]:
        """Masks of the moments at which communication starts, and ends."""
        starts, ends = np.zeros((2, len(self.graph.time_ns)), dtype=bool)
        for node in self.graph.ranks:
            sent = node.links.work_class == COMMUNICATION
            starts[node.start[sent]] = True
            ends[node.end[sent]] = True
        return starts, ends


@dataclass
class Scenario:
    """Changes to a graph, gathered rank by rank and then solved.

    Attributes:
        base: the graph as observed.
        removed: rank's index → mask of its host parts that take no time.
        run_scale: rank's index → how much longer each event runs (transfer of coupled ones).
        run_ns: rank's index → durations that replace the observed ones where they are ≥ 0.
        gone: rank's index → mask of the events that do not happen.
        calls, latency, dependency: launching calls, the device's own latencies, and those between
            streams take no time.
        synchronization: the host does not wait for the device.
        calm: rank's index → mask of the moments of its program at which it does not wait.
        uncoupled: ranks do not wait for each other.
        overlap: nothing but communication, and the end of a step, waits for communication.
        new_clock: the device's clock is not the one that was sampled.
        part_scale: rank's index → how many times as long each host part takes.
        freed: rank's index → nanoseconds waited for a core that are gone, and that stay; each of
            computing and of preparing, by window.
    """

    base: Base

    def __post_init__(self) -> None:
        self.removed: dict[int, np.ndarray] = {}
        self.run_scale: dict[int, np.ndarray] = {}
        self.run_ns: dict[int, np.ndarray] = {}
        self.gone: dict[int, np.ndarray] = {}
        self.calm: dict[int, np.ndarray] = {}
        self.part_scale: dict[int, np.ndarray] = {}
        self.freed: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.calls = self.latency = self.dependency = False
        self.synchronization = self.uncoupled = self.overlap = self.new_clock = False

    @property
    def ranks(self) -> list[RankNodes]:
        """The ranks, in the order of the graph."""
        return self.base.graph.ranks

    def without_host(self, rank_index: int, parts: np.ndarray) -> None:
        """Host parts (a mask) take no time."""
        self.removed[rank_index] = parts | self.removed.get(rank_index, False)

    def scale(self, rank_index: int, factor: np.ndarray) -> None:
        """Multiply the time of each event by a factor."""
        self.run_scale[rank_index] = factor * self.run_scale.get(rank_index, 1.0)

    def without_events(self, rank_index: int, events: np.ndarray) -> None:
        """Events (a mask) do not happen; those before the first step do."""
        self.gone[rank_index] = events & ~self.outside(rank_index) | self.gone.get(
            rank_index, False
        )

    def happens(self, rank_index: int) -> np.ndarray:
        """Mask of the events of a rank that happen."""
        return ~self.gone.get(rank_index, np.zeros(len(self.ranks[rank_index].start), dtype=bool))

    def bounds(self, rank_index: int) -> WindowBounds:
        """Return what bounds the windows of a rank, with its events in their own steps."""
        if rank_index not in self.gone:
            return self.base.bounds(rank_index)
        node = self.ranks[rank_index]
        return window_bounds(node, node.links.step, self.happens(rank_index))

    def removed_parts(self, rank_index: int) -> np.ndarray:
        """Mask of the host parts of a rank that take no time."""
        parts = self.ranks[rank_index].program.parts
        mask = self.removed.get(rank_index, np.zeros(len(parts.owner), dtype=bool))
        if self.calls:
            mask = mask | (parts.cause == CALL)
        return mask & (parts.owner >= self._first_step(rank_index))

    def durations(self, rank_index: int) -> np.ndarray:
        """Nanoseconds that each event of a rank runs; coupled ones, after the last arrival."""
        node = self.ranks[rank_index]
        events = node.links.events
        run = observed = np.where(node.coupled, node.transfer_ns, events.dur_ns)
        if rank_index in self.run_ns:
            run = np.where(self.run_ns[rank_index] >= 0, self.run_ns[rank_index], run)
        if rank_index in self.run_scale:
            run = np.rint(run * self.run_scale[rank_index]).astype(np.int64)
        if rank_index in self.gone:
            run = np.where(self.gone[rank_index], 0, run)
        return np.where(self.outside(rank_index), observed, run)

    def solve(self) -> Outcome:
        """Compute the time of every moment under the changes."""
        weight, lag = self.weights()
        return Outcome(self, *solve(self.base.graph, weight, lag), weight, lag)

    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Return what each edge takes under the changes, and the lag of each moment."""
        base, graph = self.base, self.base.graph
        weight, lag = graph.weight_ns.copy(), graph.lag_ns.copy()
        for rank_index, node in enumerate(self.ranks):
            self._host(rank_index, node, weight, self.removed_parts(rank_index))
            changed = (self.run_scale, self.run_ns, self.gone)
            if any(rank_index in known for known in changed):
                self._events(rank_index, node, weight, lag)
        self._device(weight, lag)
        if self.uncoupled:
            weight[base.edges(g.TRANSFER)] = g.ABSENT
        if self.overlap:
            weight[self._early_waits()] = g.ABSENT
            weight[base.edges(g.TURN)] = 0
        if self.synchronization:
            weight[base.edges(g.SYNCHRONIZE)] = g.ABSENT
        self._keep_before(weight, lag)
        return weight, lag

    def _early_waits(self) -> np.ndarray:
        """Edges by which something waits for communication that is not its step's last.

        A step cannot end before all of its communication has: else each would leave more of it to
        the next, and a link that is slower than the program would cost nothing.
        """
        base, graph = self.base, self.base.graph
        starts, ends = base.communication
        kinds = (g.EVENT, g.SYNCHRONIZE, g.COLLECTIVE_WAIT)
        edges = np.concatenate([base.edges(kind) for kind in kinds])
        edges = edges[ends[graph.source[edges]] & ~starts[base.target[edges]]]
        sent_ns, rank = graph.time_ns[graph.source[edges]], graph.rank[base.target[edges]]
        early = np.ones(len(edges), dtype=bool)
        for rank_index, node in enumerate(self.ranks):
            own = np.flatnonzero(rank == rank_index)
            own_ns = sent_ns[own] + node.offset_ns
            window = np.searchsorted(node.joined.windows.bounds_ns, own_ns)
            last_ns = np.full(window.max(initial=-1) + 1, -1)
            np.maximum.at(last_ns, window, sent_ns[own])
            early[own] = sent_ns[own] < last_ns[window]
        return edges[early]

    def _keep_before(self, weight: np.ndarray, lag: np.ndarray) -> None:
        """Keep what lies before the first window as it was, and so the beginning of that."""
        graph = self.base.graph
        for rank_index, node in enumerate(self.ranks):
            outside = self.outside(rank_index)
            host = node.moment[: self._first_step(rank_index)]
            moments = np.concatenate([host, node.start[outside], node.end[outside]])
            first = graph.first[moments]
            entering = g.ranges(first, graph.first[moments + 1] - first)[1]
            weight[entering] = graph.weight_ns[entering]
            lag[moments] = graph.lag_ns[moments]

    def _first_step(self, rank_index: int) -> int:
        """Moments of the program of a rank before its first step."""
        steps = np.flatnonzero(self.ranks[rank_index].program.kind == STEP)
        return int(steps[0]) if len(steps) else 0

    def outside(self, rank_index: int) -> np.ndarray:
        """Mask of the device events before the first step."""
        links = self.ranks[rank_index].links
        return (links.step < 0) & bool(len(links.steps.start_ns))

    def part_ns(self, rank_index: int) -> np.ndarray:
        """Nanoseconds that each host part of a rank takes."""
        parts = self.ranks[rank_index].program.parts
        length = np.where(self.removed_parts(rank_index), 0, parts.end_ns - parts.start_ns)
        if rank_index in self.part_scale:
            length = np.rint(length * self.part_scale[rank_index]).astype(np.int64)
        return length

    def _host(
        self, rank_index: int, node: RankNodes, weight: np.ndarray, removed: np.ndarray
    ) -> None:
        base, program = self.base, node.program
        if removed.any() or rank_index in self.part_scale:
            parts = program.parts
            length = parts.end_ns - parts.start_ns - self.part_ns(rank_index)
            taken = np.bincount(parts.owner, weights=length, minlength=len(program))
            taken_ns = taken.astype(np.int64)
            edge = base.edge_of(g.PROGRAM, node.interval_base + np.arange(len(program)))
            some = np.flatnonzero((edge >= 0) & (taken_ns > 0))
            weight[edge[some]] = np.maximum(weight[edge[some]] - taken_ns[some], 0)
            # What the host does once it is awake is a part of the same work.
            for kind in (g.SYNCHRONIZE, g.COLLECTIVE_WAIT):
                edges = base.edges_to(rank_index, kind)
                interval = np.searchsorted(node.moment, base.target[edges])
                remaining = 1 - taken_ns[interval] / np.maximum(program.work_ns[interval], 1)
                weight[edges] = (weight[edges] * np.clip(remaining, 0.0, 1.0)).astype(np.int64)
        if rank_index in self.calm and self.calm[rank_index].any():
            edges = base.edges_to(rank_index, g.SYNCHRONIZE)
            interval = np.searchsorted(node.moment, base.target[edges])
            weight[edges[self.calm[rank_index][interval]]] = g.ABSENT

    def _events(
        self, rank_index: int, node: RankNodes, weight: np.ndarray, lag: np.ndarray
    ) -> None:
        base = self.base
        run = self.durations(rank_index)
        observed = np.where(node.coupled, node.transfer_ns, node.links.events.dur_ns)
        of = node.event_base + np.arange(len(run))
        for kind in (g.RUN, g.TRANSFER):
            edge = base.edge_of(kind, of)
            some = np.flatnonzero((edge >= 0) & (run != observed))
            # Where the observed order left an edge less than its event ran, it keeps that share.
            share = np.minimum(weight[edge[some]] / np.maximum(observed[some], 1), 1.0)
            weight[edge[some]] = np.where(observed[some] > 0, np.rint(run[some] * share), run[some])
        if rank_index not in self.gone:
            return
        gone = np.flatnonzero(self.gone[rank_index])
        lag[node.start[gone]] = 0
        lag[node.end[gone]] = 0
        for kind in (g.LAUNCH, g.STREAM):
            edge = base.edge_of(kind, of[gone])
            weight[edge[edge >= 0]] = 0
        edges = base.edges_to(rank_index, g.EVENT)
        weight[edges[self.gone[rank_index][base.graph.of[edges] - node.event_base]]] = 0

    def _device(self, weight: np.ndarray, lag: np.ndarray) -> None:
        base = self.base
        launches, streams, events = (base.edges(kind) for kind in (g.LAUNCH, g.STREAM, g.EVENT))
        call = base.call_ns[base.graph.of[launches]]
        if self.calls:
            weight[launches] = np.maximum(weight[launches] - call, 0)
        if not (self.latency or self.dependency):
            return
        starts = np.concatenate([n.start for n in self.ranks])
        decided = base.decided[starts]
        depends = (decided >= 0) & (base.graph.kind[decided] == g.EVENT)
        if self.latency:
            lag[starts[~depends]] = 0
            weight[streams] = np.minimum(weight[streams], 0)
            weight[launches] = np.minimum(weight[launches], call)
        if self.dependency:
            lag[starts[depends]] = 0
            weight[events] = np.minimum(weight[events], 0)


@dataclass(frozen=True)
class Outcome:
    """A solved scenario.

    Attributes:
        scenario: what was solved.
        time_ns: when each moment comes.
        decided: edge that decided each moment, -1 for none.
        weight_ns, lag_ns: what was solved with.
    """

    scenario: Scenario
    time_ns: np.ndarray
    decided: np.ndarray
    weight_ns: np.ndarray
    lag_ns: np.ndarray

    def windows(self, rank_index: int) -> np.ndarray:
        """Bounds of the step windows of a rank, as :func:`windows.cut_windows` cuts them.

        Those that were observed: a step that has nothing left keeps a window of no length.
        """
        node = self.scenario.ranks[rank_index]
        bounds = self.scenario.bounds(rank_index)
        if node.joined.host_only and len(node.links.steps.start_ns) and len(node.joined.windows):
            happening = self.scenario.happens(rank_index)
            bounds = window_bounds(node, self._steps(rank_index), happening)
        latest = np.full(bounds.count, g.ABSENT, dtype=np.int64)
        np.maximum.at(latest, bounds.of, self.time_ns[bounds.moment] + bounds.late_ns)
        earliest = self.time_ns[bounds.earliest]
        return windows_of(bounds.lasting, bounds.begin_ns, latest, earliest)

    def _steps(self, rank_index: int) -> np.ndarray:
        """Step of each event without a device; beside the program, the one in which it begins."""
        node = self.scenario.ranks[rank_index]
        links, program = node.links, node.program
        step: np.ndarray = links.step.copy()
        threaded = np.ones(len(step), dtype=bool)
        threaded[program.row[program.kind == OP_START]] = False
        begun = self.time_ns[node.start[threaded]]
        last = np.searchsorted(program.time_ns, links.steps.end_ns[-1], side="right") - 1
        until = self.time_ns[node.moment[last]] + links.steps.end_ns[-1] - program.time_ns[last]
        step_begun = np.searchsorted(self.time_ns[node.step], begun, side="right") - 1
        step[threaded] = np.where(begun >= until, len(links.steps.start_ns), step_begun)
        return step


@dataclass(frozen=True)
class WindowBounds:
    """The moments that bound the step windows of a rank: each bound comes with the latest of its.

    Attributes:
        of, moment, late_ns: moments, the bound that each is of, and how long after it that comes.
        earliest: moments of which the first is the begin where it comes before bound 0.
        begin_ns: time before which the windows do not begin; None for none.
        lasting: mask of the bounds after the first that end a window.
    """

    of: np.ndarray
    moment: np.ndarray
    late_ns: np.ndarray
    earliest: np.ndarray
    begin_ns: int | None
    lasting: np.ndarray

    @property
    def count(self) -> int:
        """Number of the bounds."""
        return 1 + len(self.lasting)


def windows_of(
    lasting: np.ndarray, begin_ns: int | None, latest_ns: np.ndarray, earliest_ns: np.ndarray
) -> np.ndarray:
    """Return the bounds of the windows of a rank: their begin, and the end of each.

    Args:
        lasting, begin_ns: as in :class:`WindowBounds`.
        latest_ns: when the latest moment of each bound comes, ABSENT for none.
        earliest_ns: times of the moments of which the first may be the begin.
    """
    if not len(lasting):
        return np.zeros(0, np.int64)
    bounds = latest_ns.copy()
    if len(earliest_ns):
        first = int(earliest_ns.min())
        bounds[0] = first if bounds[0] == g.ABSENT else min(int(bounds[0]), first)
    if begin_ns is not None:
        bounds[0] = max(int(bounds[0]), begin_ns)
    bounds = np.maximum.accumulate(bounds)
    return np.concatenate([bounds[:1], bounds[1:][lasting]])


def window_bounds(
    node: RankNodes, step: np.ndarray, happening: np.ndarray | None = None
) -> WindowBounds:
    """Return what bounds the windows of a rank.

    Args:
        node: the rank.
        step: of each device event.
        happening: mask of the events that happen; None for all. What does not ends nothing: it
            would hold the window of its step.
    """
    links, observed = node.links, node.joined.windows
    if happening is None:
        happening = np.ones(len(step), dtype=bool)
    steps, nothing = len(links.steps.start_ns), np.zeros(0, dtype=np.int64)
    inside = (step >= 0) & (step < steps)
    if not len(observed):
        return WindowBounds(nothing, nothing, nothing, nothing, None, nothing.astype(bool))
    if observed.numbers[0] < 0 or not steps or not inside.any():
        return _trace_bounds(node, happening if happening.any() else ~happening)
    # What ran nothing on the device, between steps that did, ends on the host.
    works = np.flatnonzero(np.bincount(links.step[inside], minlength=steps))
    empty = np.setdiff1d(np.arange(works[0], works[-1]), works)
    until_next_ns = links.steps.start_ns[empty + 1] - links.steps.end_ns[empty]
    ended = np.flatnonzero(inside & happening)
    ended = ended[~np.isin(step[ended], empty)]
    span = node.joined.inputs.span
    of_others_ns = None if span is None else span.device_begin_ns
    before = np.flatnonzero((step < 0) & happening)
    begin = node.step[:1] if of_others_ns is None else nothing
    is_first = of_others_ns is None and not len(before)
    earliest = node.start[_first_of_streams(node, inside)] if is_first else nothing
    moments = [begin, node.end[before], node.end[ended], node.step[empty + 1]]
    late_ns = [np.zeros(len(begin), np.int64), node.late_ns[before], node.late_ns[ended]]
    bounds = [np.zeros(len(begin) + len(before), np.int64), 1 + step[ended], 1 + empty]
    # Steps that had no window of their own when observed have none now.
    was = np.full(steps, np.iinfo(np.int64).min, dtype=np.int64)
    own = (links.step >= 0) & (links.step < steps)
    np.maximum.at(was, links.step[own], (links.events.end_ns + node.late_ns)[own])
    was[empty] = links.steps.end_ns[empty]
    first = int(observed.bounds_ns[0])
    return WindowBounds(
        np.concatenate(bounds),
        np.concatenate(moments),
        np.concatenate([*late_ns, -until_next_ns]),
        earliest,
        of_others_ns,
        np.diff(np.maximum.accumulate(np.concatenate([[first], was]))) > 0,
    )


def _trace_bounds(node: RankNodes, some: np.ndarray) -> WindowBounds:
    """Return what bounds the window of a trace without steps: its begin and its last moment."""
    program, ends_ns = node.program, (node.links.events.end_ns + node.late_ns)[some]
    last_ns = int(max(program.time_ns.max(initial=0), ends_ns.max()))
    after_ns = max(int(node.joined.windows.bounds_ns[-1]) - last_ns, 0)
    moment = np.concatenate([node.moment, node.end[some]])
    late_ns = np.concatenate([np.zeros(len(node.moment), np.int64), node.late_ns[some]])
    earliest = np.concatenate([node.step[:1], node.start[_first_of_streams(node, some)]])
    of = np.ones(len(moment), dtype=np.int64)
    return WindowBounds(of, moment, late_ns + after_ns, earliest, None, np.ones(1, dtype=bool))


def _first_of_streams(node: RankNodes, some: np.ndarray) -> np.ndarray:
    """Rows of those of some events (a mask) before which none of them can begin.

    On a device streams run in order; without one, each may be the first.
    """
    rows = np.flatnonzero(some)
    if node.joined.host_only:
        return rows
    first: np.ndarray = rows[np.unique(node.links.events.stream_key[rows], return_index=True)[1]]
    return first
