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

ABSENT = int(np.iinfo(np.int64).min)
"""Weight of an edge that is not there."""


def solve(graph: Graph, weight_ns: np.ndarray, lag_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the time of each moment in ns, and the edge that decided it (-1 for none).

    Args:
        graph: moments and edges, in order.
        weight_ns: what each edge takes at least, ABSENT for none.
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
        best, edge = ABSENT, -1
        for at in range(low, high):
            weight = weights[at]
            if weight != ABSENT and (reached := times[sources[at]] + weight) > best:
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
        self.target = np.repeat(np.arange(len(graph.time_ns)), np.diff(graph.first))
        self.call_ns = np.concatenate([node.call_ns for node in graph.ranks])
        self._edges: dict[int, np.ndarray] = {}
        self._edge_of: dict[int, np.ndarray] = {}

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
        base, graph = self.base, self.base.graph
        weight, lag = graph.weight_ns.copy(), graph.lag_ns.copy()
        for rank_index, node in enumerate(self.ranks):
            self._host(rank_index, node, weight, self.removed_parts(rank_index))
            changed = (self.run_scale, self.run_ns, self.gone)
            if any(rank_index in known for known in changed):
                self._events(rank_index, node, weight, lag)
        self._device(weight, lag)
        if self.uncoupled:
            weight[base.edges(g.TRANSFER)] = ABSENT
        if self.overlap:
            weight[self._early_waits()] = ABSENT
            weight[base.edges(g.TURN)] = 0
        if self.synchronization:
            weight[base.edges(g.SYNCHRONIZE)] = ABSENT
        self._keep_before(weight, lag)
        time, decided = solve(graph, weight, lag)
        return Outcome(self, time, decided, weight, lag)

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
        base, graph = self.base, self.base.graph
        program = node.program
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
                edges = base.edges(kind)
                edges = edges[graph.rank[base.target[edges]] == rank_index]
                interval = np.searchsorted(node.moment, base.target[edges])
                remaining = 1 - taken_ns[interval] / np.maximum(program.work_ns[interval], 1)
                weight[edges] = (weight[edges] * np.clip(remaining, 0.0, 1.0)).astype(np.int64)
        if rank_index in self.calm and self.calm[rank_index].any():
            still = np.zeros(len(graph.time_ns), dtype=bool)
            still[node.moment[self.calm[rank_index]]] = True
            edges = base.edges(g.SYNCHRONIZE)
            weight[edges[still[base.target[edges]]]] = ABSENT

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
        edges = base.edges(g.EVENT)
        weight[edges[np.isin(base.graph.of[edges], of[gone])]] = 0

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
        links = node.links
        observed = node.joined.windows
        start, end = self.time_ns[node.start], self.time_ns[node.end] + node.late_ns
        # What does not happen ends nothing: it would hold the window of its step.
        happening = self.scenario.happens(rank_index)
        steps = len(links.steps.start_ns)
        if not len(observed):
            return np.zeros(0, np.int64)
        step = self._steps(rank_index) if node.joined.host_only and steps else links.step
        inside = (step >= 0) & (step < steps)
        if observed.numbers[0] < 0 or not steps or not inside.any():
            return self._trace_window(
                node, start, end, happening if happening.any() else ~happening
            )
        latest = np.full(steps, np.iinfo(np.int64).min, dtype=np.int64)
        np.maximum.at(latest, step[inside & happening], end[inside & happening])
        # What ran nothing on the device, between steps that did, ends on the host.
        works = np.flatnonzero(np.bincount(links.step[inside], minlength=steps))
        empty = np.setdiff1d(np.arange(works[0], works[-1]), works)
        until_next_ns = links.steps.start_ns[empty + 1] - links.steps.end_ns[empty]
        latest[empty] = self.time_ns[node.step[empty + 1]] - until_next_ns
        span = node.joined.inputs.span
        of_others_ns = None if span is None else span.device_begin_ns
        begin = int(self.time_ns[node.step[0]]) if of_others_ns is None else of_others_ns
        before = (step < 0) & happening
        if before.any():
            begin = max(begin, int(end[before].max()))
        elif of_others_ns is None:
            begin = min(begin, int(start[inside].min()))
        bounds = np.maximum.accumulate(np.concatenate([[begin], latest]))
        # Steps that had no window of their own when observed have none now.
        was = np.full(steps, np.iinfo(np.int64).min, dtype=np.int64)
        inside = (links.step >= 0) & (links.step < steps)
        np.maximum.at(was, links.step[inside], (links.events.end_ns + node.late_ns)[inside])
        was[empty] = links.steps.end_ns[empty]
        first = int(observed.bounds_ns[0])
        lasting = np.diff(np.maximum.accumulate(np.concatenate([[first], was]))) > 0
        return np.concatenate([bounds[:1], bounds[1:][lasting]])

    def _trace_window(
        self, node: RankNodes, start: np.ndarray, end: np.ndarray, some: np.ndarray
    ) -> np.ndarray:
        """Bounds of the window of a trace without steps: from its begin to its last moment."""
        program, events = node.program, node.links.events
        begin = int(min(self.time_ns[node.step[:1]].min(initial=1 << 62), start[some].min()))
        last_ns = int(
            max(program.time_ns.max(initial=0), (events.end_ns + node.late_ns)[some].max())
        )
        last = max(int(self.time_ns[node.moment].max(initial=0)), int(end[some].max()))
        after_ns = int(node.joined.windows.bounds_ns[-1]) - last_ns
        return np.array([begin, last + max(after_ns, 0)])

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
