"""The dependency model of a job: its operations, what each waits for, and a simulation of steps.

An operation starts when all that it depends on has ended. Compute then takes its duration; the
members of a communication end at their latest start plus each one's own transfer. The rules are
those of "Understanding Stragglers in Large Model Training Using What-if Analysis" (2505.05713) and
its published analyzer:

- compute of a worker runs in order of start;
- a receive follows the compute before its own, and comes before it; a send follows its compute;
  sends and receives of one type run in order; the first of the backward pass follow the
  second-last forward before the first backward;
- the first forward of a chunk follows that chunk's parameter all-gather;
- what comes after the last compute (reduction of gradients, clipping, optimizer) is a chain.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from chopper import wording as fmt
from chopper.analyzers.jobs.operations import COLLECTIVES, GATHER, OTHER, P2P, Operations
from chopper.analyzers.jobs.schedules import COMPUTE, FORWARD, PASSING
from chopper.analyzers.trace.columns import distinct_rows, run_starts
from chopper.errors import InputError

CLOCK_ERROR_NS = 10_000_000
"""A transfer or a launch delay below minus this is an error of clocks, and counts as none."""
_LANES_BYTES = 1 << 27
"""Memory of the moments of one batch of simulated steps."""


@dataclass(frozen=True)
class Nodes:
    """Operations of one step of a job: the same in each step that is modelled.

    Attributes:
        role: what each is (``forward``, ``forward_recv``, ``gather`` …).
        type: code into ``types``, names of operation types.
        worker: index into ``ranks``, ``replica`` and ``stage``.
        global_stage: stage of the model's pipeline, virtual stages counted.
        turn: running number among the operations of its worker, role and global stage.
        instance: number of the recorded communication it is a member of; -1 where not known.
        ranks: global rank of each worker.
        replica, stage: of each worker: its place in all dimensions but the pipeline; its pipeline
            rank.
        places: other dimension → index of each worker.
    """

    role: np.ndarray
    type: np.ndarray
    types: tuple[str, ...]
    worker: np.ndarray
    global_stage: np.ndarray
    turn: np.ndarray
    instance: np.ndarray
    ranks: np.ndarray
    replica: np.ndarray
    stage: np.ndarray
    places: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.role)

    @cached_property
    def is_compute(self) -> np.ndarray:
        """Mask of forward and backward."""
        return np.isin(self.role, COMPUTE)

    @cached_property
    def is_communication(self) -> np.ndarray:
        """Mask of what has a transfer: its ideal is a median; that of all else is a mean."""
        return np.isin(self.role, (*P2P, *COLLECTIVES))

    @property
    def stages_count(self) -> int:
        """Pipeline ranks."""
        return int(self.stage.max(initial=0)) + 1

    @cached_property
    def virtual_stages(self) -> int:
        """Stages of the model per pipeline rank."""
        of = self.is_compute
        pairs = {*zip(self.worker[of].tolist(), self.global_stage[of].tolist(), strict=True)}
        return max(Counter(worker for worker, _ in pairs).values(), default=1)


@dataclass
class WorkerOrder:
    """Operations of one worker in the order of its schedule, by node.

    Attributes:
        compute: forward and backward in order, and other work between them.
        receive, send: compute → the receive before it, the send after it.
        streams: sends and receives of each role, in order.
        before: (operation, compute that waits for it), in order.
        during: (operation, compute that it follows, -1 for none), in order; only what is after the
            last compute waits for them.
        after: (operation, the one that it follows, -1 for the last compute), in order.
    """

    compute: list[int] = field(default_factory=list)
    receive: dict[int, int] = field(default_factory=dict)
    send: dict[int, int] = field(default_factory=dict)
    streams: dict[str, list[int]] = field(default_factory=dict)
    before: list[tuple[int, int]] = field(default_factory=list)
    during: list[tuple[int, int]] = field(default_factory=list)
    after: list[tuple[int, int]] = field(default_factory=list)


class Graph:
    """Dependencies and communications between nodes, solved level by level.

    Args:
        nodes: the operations.
        orders: of each worker.

    Raises:
        InputError: operations wait for each other in a circle.
    """

    def __init__(self, nodes: Nodes, orders: Sequence[WorkerOrder]) -> None:
        self.nodes = nodes
        self.unmatched_count = 0
        """Sends and receives whose partner is not recorded: they end after their own transfer."""
        pairs = [pair for order in orders for pair in _dependencies(nodes, order)]
        pairs += self._implied(orders)
        self.unit = self._units(orders)
        """Number of each node's communication; nodes of one unit start together."""
        before, after = np.array(sorted(set(pairs)), dtype=np.int64).reshape(-1, 2).T
        by_after = np.argsort(after, kind="stable")
        self.before, self.after = before[by_after], after[by_after]
        self._levels = [*self._ordered()]

    def _units(self, orders: Sequence[WorkerOrder]) -> np.ndarray:
        """Number the communications; every other node is its own."""
        nodes = self.nodes
        size = len(nodes)
        unit = np.arange(size)
        groups: dict[int, list[int]] = defaultdict(list)
        matched = np.flatnonzero(np.isin(nodes.role, COLLECTIVES) & (nodes.instance >= 0))
        for node, instance in zip(matched.tolist(), nodes.instance[matched].tolist(), strict=True):
            groups[instance].append(node)
        for members in groups.values():
            unit[members] = members[0]
        for send, receive in self._transfers(orders):
            unit[send] = unit[receive] = min(send, receive)
        return unit

    def _transfers(self, orders: Sequence[WorkerOrder]) -> Iterator[tuple[int, int]]:
        """Pair each send with the receive of the neighbouring stage, by compute."""
        nodes = self.nodes
        compute_of: dict[tuple[int, int, int, int], int] = {}
        sent: list[tuple[int, int]] = []
        last = int(nodes.global_stage.max(initial=0))
        for order in orders:
            for compute, receive in order.receive.items():
                compute_of[_message(nodes, compute)] = receive
            sent += order.send.items()
        for compute, send in sent:
            replica, direction, stage, turn = _message(nodes, compute)
            to = stage + (1 if direction else -1)
            receive = compute_of.pop((replica, direction, to, turn), -1)
            if receive >= 0:
                yield send, receive
            elif 0 <= to <= last:
                self.unmatched_count += 1
        self.unmatched_count += sum(
            0 <= stage - (1 if direction else -1) <= last for _, direction, stage, _ in compute_of
        )

    def _implied(self, orders: Sequence[WorkerOrder]) -> Iterator[tuple[int, int]]:
        """Without recorded receives, a stage waits for its neighbour's compute itself."""
        if any(order.receive for order in orders):
            return
        nodes = self.nodes
        passing = [n for order in orders for n in order.compute if nodes.role[n] in PASSING]
        compute_of = {_message(nodes, node): node for node in passing}
        self.unmatched_count += len(passing) - len(compute_of)
        for (replica, direction, stage, turn), node in compute_of.items():
            before = (replica, direction, stage - (1 if direction else -1), turn)
            if before in compute_of:
                yield compute_of[before], node

    def _ordered(self) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield levels: nodes sorted by unit; their dependencies; where each node's, unit's begin.

        The longest path over units decides the level; node -1 stands for the begin of the step.
        """
        unit, size = self.unit, len(self.nodes)
        level = np.zeros(size, dtype=np.int64)
        open_count = np.zeros(size, dtype=np.int64)
        np.add.at(open_count, unit[self.after], 1)
        by_before = np.argsort(unit[self.before], kind="stable")
        bounds = np.searchsorted(unit[self.before][by_before], np.arange(size + 1))
        followers = unit[self.after][by_before]
        ready = np.flatnonzero((open_count == 0) & (unit == np.arange(size)))
        done, depth = 0, 0
        while len(ready):
            level[ready] = depth
            done, depth = done + len(ready), depth + 1
            next_units = np.concatenate([followers[bounds[u] : bounds[u + 1]] for u in ready])
            np.subtract.at(open_count, next_units, 1)
            ready = np.unique(next_units[open_count[next_units] == 0])
        if done < len(np.unique(unit)):
            stuck = np.flatnonzero(open_count[unit] > 0)[0]
            nodes = self.nodes
            raise InputError(
                f"the operations of a step wait for each other in a circle, "
                f"{nodes.types[nodes.type[stuck]]} of rank {nodes.ranks[nodes.worker[stuck]]} "
                "among them: the recorded order contradicts the sends and receives"
            )
        order = np.lexsort((np.arange(size), unit, level[unit]))
        for rows in np.split(order, np.flatnonzero(np.diff(level[unit][order])) + 1):
            first = np.searchsorted(self.after, rows)
            count = np.searchsorted(self.after, rows, side="right") - first
            sources = [
                self.before[f : f + c] if c else np.array([-1])
                for f, c in zip(first.tolist(), count.tolist(), strict=True)
            ]
            begins = np.cumsum(np.maximum(count, 1)) - np.maximum(count, 1)
            units = np.flatnonzero(np.append(True, np.diff(unit[rows]) != 0))
            of_row = np.cumsum(np.isin(np.arange(len(rows)), units)) - 1
            yield rows, np.concatenate(sources), begins, units, of_row

    def simulate(self, time_ns: np.ndarray, delay_ns: np.ndarray | None = None) -> np.ndarray:
        """Return when each operation ends, in ns since its step began.

        Args:
            time_ns: duration of compute, transfer of communication; (nodes, steps).
            delay_ns: between the end of the latest dependency and the start; none by default.
        """
        end = np.zeros((len(self.nodes) + 1, time_ns.shape[1]))  # the last row: begin of the step
        for rows, sources, begins, units, of_row in self._levels:
            start = np.maximum.reduceat(end[sources], begins, axis=0)
            if delay_ns is not None:
                start += delay_ns[rows]
            latest = np.maximum.reduceat(start, units, axis=0)
            end[rows] = latest[of_row] + time_ns[rows]
        return end[:-1]

    def ready(self, end_ns: np.ndarray) -> np.ndarray:
        """Return when all that each operation depends on has ended; 0 without any."""
        moments = np.vstack([end_ns, np.zeros(end_ns.shape[1])])
        latest = np.zeros_like(end_ns)
        for rows, sources, begins, _, _ in self._levels:
            latest[rows] = np.maximum.reduceat(moments[sources], begins, axis=0)
        return latest

    def latest_start(self, start_ns: np.ndarray) -> np.ndarray:
        """Return when the last member of each operation's communication started."""
        latest = np.full_like(start_ns, -np.inf)
        np.maximum.at(latest, self.unit, start_ns)
        members: np.ndarray = latest[self.unit]
        return members


def _message(nodes: Nodes, compute: int) -> tuple[int, int, int, int]:
    """Return (replica, is forward, stage, turn) of a compute: what its send is about."""
    worker = nodes.worker[compute]
    return (
        int(nodes.replica[worker]),
        int(nodes.role[compute] == FORWARD),
        int(nodes.global_stage[compute]),
        int(nodes.turn[compute]),
    )


def _dependencies(nodes: Nodes, order: WorkerOrder) -> Iterator[tuple[int, int]]:
    """Yield (before, after) within one worker."""
    yield from pairwise(order.compute)
    for stream in order.streams.values():
        yield from pairwise(stream)
    previous: dict[bool, int] = {}
    passed = [node for node in order.compute if nodes.role[node] in PASSING]
    for compute in passed:
        is_forward = bool(nodes.role[compute] == FORWARD)
        receive = order.receive.get(compute)
        if receive is not None:
            yield receive, compute
            if is_forward in previous:
                yield previous[is_forward], receive
        previous[is_forward] = compute
    yield from order.send.items()
    backwards = [bool(nodes.role[node] != FORWARD) for node in passed]
    first = backwards.index(True) if True in backwards else 0
    if first >= 2:
        for role in ("backward_recv", "backward_send"):
            yield from ((passed[first - 2], node) for node in order.streams.get(role, [])[:1])
    yield from order.before
    during = [node for node, _ in order.before] + [node for node, _ in order.during]
    yield from pairwise(during)
    yield from ((compute, node) for node, compute in order.during if compute >= 0)
    ends = order.compute[-1:] + during[-1:]
    for node, follows in order.after:
        yield from ((end, node) for end in ([follows] if follows >= 0 else ends))


@dataclass(frozen=True, eq=False)
class Job:
    """Steps of a job that have the same operations, and the graph of one of them.

    Attributes:
        graph: dependencies, built from the first of the steps.
        orders: of each worker.
        steps: their numbers.
        own_ns: duration of compute, transfer of communication; (nodes, steps).
        delay_ns: launch delays: between the end of the latest dependency and the recorded start.
        recorded_ns: from the first start to the last end of each step.
        notes: what the model leaves out.
    """

    graph: Graph
    orders: list[WorkerOrder]
    steps: np.ndarray
    own_ns: np.ndarray
    delay_ns: np.ndarray
    recorded_ns: np.ndarray
    notes: tuple[str, ...] = ()

    @property
    def nodes(self) -> Nodes:
        """The operations of a step."""
        return self.graph.nodes

    @cached_property
    def replayed_ns(self) -> np.ndarray:
        """Each step as simulated from what was recorded, launch delays kept."""
        return step_ns(self.graph.simulate(self.own_ns, self.delay_ns))

    @cached_property
    def error_ratio(self) -> float:
        """Mean distance of the unchanged replay from the recorded steps."""
        return float(np.abs(self.replayed_ns - self.recorded_ns).mean() / self.recorded_ns.mean())

    @cached_property
    def ideal_ns(self) -> np.ndarray:
        """Mean duration, or median transfer, of each operation's type; (nodes, 1)."""
        nodes = self.nodes
        ideal = np.empty((len(nodes), 1))
        for code in np.unique(nodes.type):
            of = nodes.type == code
            typical = np.median if nodes.is_communication[of][0] else np.mean
            ideal[of] = typical(self.own_ns[of])
        return ideal

    def simulated_ns(self, times_ns: Iterable[np.ndarray]) -> np.ndarray:
        """Simulate each of several tables of times without launch delays -> (times, steps)."""
        steps = len(self.steps)
        batch = max(_LANES_BYTES // (8 * max(len(self.nodes), 1) * steps), 1)
        results: list[np.ndarray] = []
        waiting: list[np.ndarray] = []

        def run() -> None:
            lanes = self.graph.simulate(np.concatenate(waiting, axis=1))
            results.extend(np.split(step_ns(lanes), len(waiting)))
            waiting.clear()

        for times in times_ns:
            waiting.append(np.broadcast_to(times, self.own_ns.shape))
            if len(waiting) == batch:
                run()
        if waiting:
            run()
        return np.stack(results) if results else np.empty((0, steps))


def step_ns(end_ns: np.ndarray) -> np.ndarray:
    """Return the length of each simulated step: until its last operation ends."""
    return end_ns.max(axis=0, initial=0.0)


def job_of(operations: Operations) -> Job:
    """Build the model of a job.

    Raises:
        InputError: the operations cannot be modelled: which, and why.
    """
    if not len(operations):
        raise InputError("no operations of a step are recorded")
    ranks, worker = np.unique(operations.rank, return_inverse=True)
    rows, steps, notes = _kept_steps(operations, worker)
    count = len(rows) // len(steps)
    table = rows.reshape(len(steps), count).T
    step_start = operations.start_ns[table].min(axis=0)
    start, end = operations.start_ns[table] - step_start, operations.end_ns[table] - step_start
    recorded = end.max(axis=0).astype(np.float64)
    error_ns = min(CLOCK_ERROR_NS, float(recorded.mean()) / 100)
    first = table[:, 0]
    nodes = _nodes(operations, first, worker[first], ranks)
    if nodes.stages_count == 1 and np.isin(nodes.role, P2P).any():
        raise InputError(
            "sends and receives between pipeline stages were recorded, but no rank's stage is "
            "told: name it (--map stage=COLUMN, or --layout pp=N,…)"
        )
    recorder = RecordedOrders(nodes, start[:, 0], end[:, 0], error_ns)
    orders = [recorder.of_worker(w) for w in range(len(ranks))]
    graph = Graph(nodes, orders)
    if graph.unmatched_count and (batched := _by_micro_batch(operations, first, nodes)):
        by_batch = Graph(batched, orders)
        graph = by_batch if by_batch.unmatched_count < graph.unmatched_count else graph
    start, end = start.astype(np.float64), end.astype(np.float64)
    transfer = end - graph.latest_start(start)
    transfer[transfer <= -error_ns] = 0
    own = np.where(nodes.is_communication[:, None], transfer, end - start)
    delay = start - graph.ready(end)
    delay[delay <= -error_ns] = 0
    if graph.unmatched_count:
        notes.append(
            f"{graph.unmatched_count} sends and receives of a step have no partner in the "
            "recording: they end after their own transfer"
        )
    if nodes.stages_count > 1 and not any(order.receive for order in orders):
        notes.append(
            "no sends and receives between stages are known: a stage is taken to wait for its "
            "neighbour's compute, and a transfer to be launch delay"
        )
    return Job(graph, orders, steps, own, delay, recorded, (*operations.notes, *notes))


def _kept_steps(
    operations: Operations, worker: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return the rows of the steps that have the most common operations, their numbers, and notes.

    Rows are sorted by step, worker, type and start, so that each step has the same sequence.
    """
    order = np.lexsort(
        (operations.end_ns, operations.start_ns, operations.type, worker, operations.step)
    )
    steps, first = np.unique(operations.step[order], return_index=True)
    parts = np.split(order, first[1:])
    signatures = []
    is_compute = np.isin(operations.role, COMPUTE)
    for rows in parts:
        compute = rows[is_compute[rows]]
        in_order = compute[np.lexsort((operations.start_ns[compute], worker[compute]))]
        columns = (
            (worker, operations.type, rows),
            (worker, operations.type, in_order),
            (worker, operations.global_stage, in_order),
        )
        signatures.append(b"|".join(c[r].tobytes() for *cs, r in columns for c in cs))
    common, count = Counter(signatures).most_common(1)[0]
    kept = [i for i, signature in enumerate(signatures) if signature == common]
    notes = []
    if count < len(steps):
        others = [int(n) for i, n in enumerate(steps) if i not in {*kept}]
        notes.append(
            f"{fmt.plural(len(others), 'step')} of {len(steps)} ({fmt.ranges(others)}) ran other "
            "operations, or in another order, and are left out"
        )
    return np.concatenate([parts[i] for i in kept]), steps[kept], notes


def _nodes(
    operations: Operations, rows: np.ndarray, worker: np.ndarray, ranks: np.ndarray
) -> Nodes:
    """Return the nodes of one step: its rows, sorted by worker, type and start."""
    replica, stage = (np.zeros(len(ranks), dtype=np.int64) for _ in range(2))
    replica[worker], stage[worker] = operations.replica[rows], operations.stage[rows]
    role, global_stage = operations.role[rows], operations.global_stage[rows]
    turn = _running((worker, operations.type[rows]), operations.start_ns[rows])
    passing = np.isin(role, PASSING)
    in_stage = (worker, role == FORWARD, global_stage)
    turn[passing] = _running([key[passing] for key in in_stage], operations.start_ns[rows][passing])
    return Nodes(
        role=role,
        type=operations.type[rows],
        types=operations.types,
        worker=worker,
        global_stage=global_stage,
        turn=turn,
        instance=operations.instance[rows],
        ranks=ranks,
        replica=replica,
        stage=stage,
        places={
            name: np.array([index.get(rank, 0) for rank in ranks.tolist()])
            for name, index in operations.places.items()
        },
    )


def _by_micro_batch(operations: Operations, rows: np.ndarray, nodes: Nodes) -> Nodes | None:
    """Return the nodes with micro-batches as turns; None unless each is there once per stage.

    DualPipe's two directions meet in a stage, so that running numbers would name two messages.
    """
    passing = np.isin(nodes.role, PASSING)
    batch = operations.micro_batch[rows][passing]
    forward = (nodes.role == FORWARD).astype(np.int64)
    keys = [key[passing] for key in (nodes.worker, forward, nodes.global_stage)]
    if (batch < 0).any() or len(distinct_rows([*keys, batch])[0]) < len(batch):
        return None
    turn = nodes.turn.copy()
    turn[passing] = batch
    return replace(nodes, turn=turn)


def _running(keys: Sequence[np.ndarray], start_ns: np.ndarray) -> np.ndarray:
    """Number the rows of each key in order of start."""
    number = np.zeros(len(start_ns), dtype=np.int64)
    if not len(number):
        return number
    order = np.lexsort((start_ns, *keys[::-1]))
    new = run_starts(*(key[order] for key in keys))
    begin = np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))
    number[order] = np.arange(len(order)) - begin
    return number


@dataclass(frozen=True)
class RecordedOrders:
    """The order of each worker, as one step recorded it.

    Attributes:
        nodes: the operations.
        start_ns, end_ns: of each, in that step.
        error_ns: how far clocks may be apart.
    """

    nodes: Nodes
    start_ns: np.ndarray
    end_ns: np.ndarray
    error_ns: float

    @cached_property
    def _same_ns(self) -> float:
        """Times this close are the same moment."""
        return self.error_ns / 200

    def of_worker(self, worker: int) -> WorkerOrder:
        """Return the order of one worker.

        Raises:
            InputError: its sends or receives cannot be told apart by micro-batch.
        """
        rows = np.flatnonzero(self.nodes.worker == worker)
        rows = rows[np.lexsort((self.end_ns[rows], self.start_ns[rows]))]
        role = self.nodes.role[rows]
        order = WorkerOrder(compute=rows[np.isin(role, COMPUTE)].tolist())
        for name in P2P:
            stream = rows[role == name]
            if len(stream):
                order.streams[name] = stream.tolist()
                self._assign(order, name, stream)
        self._surround(order, rows[~np.isin(role, (*COMPUTE, *P2P))])
        return order

    def _assign(self, order: WorkerOrder, name: str, stream: np.ndarray) -> None:
        """Give sends or receives of one role to the computes that they are of."""
        nodes, is_receive = self.nodes, name.endswith("recv")
        is_forward = name.startswith("forward")
        computes = np.array(
            [
                node
                for node in order.compute
                if nodes.role[node] in PASSING and (nodes.role[node] == FORWARD) == is_forward
            ],
            dtype=np.int64,
        )
        if not len(computes):
            return
        # Some recorders log transfers at the edges of a step that never happened.
        if is_receive:
            real = self.start_ns[stream] <= self.start_ns[computes].max() + self._same_ns
        else:
            real = self.end_ns[stream] >= self.end_ns[computes].min() - self._same_ns
        stream = stream[real]
        peer = nodes.global_stage[computes] + (-1 if is_forward == is_receive else 1)
        own = nodes.global_stage[[node for node in order.compute if nodes.role[node] in PASSING]]
        outside = (peer >= 0) & (peer <= nodes.global_stage.max()) & ~np.isin(peer, own)
        needed = computes[outside]
        if len(stream) == len(computes):
            needed = computes
        elif is_receive and len(stream) == len(computes) - 1 and not outside[0]:
            needed = computes[1:]  # the first of an interleaved pipeline, which is none
        if len(stream) not in (0, len(needed)):
            worker = nodes.worker[computes[0]]
            raise InputError(
                f"rank {nodes.ranks[worker]} (stage {nodes.stage[worker]}) has "
                f"{len(stream)} {name.replace('_', '-')} for {len(computes)} "
                f"{'forward' if is_forward else 'backward'} operations in a step; "
                f"expected {len(needed)}: record all sends and receives"
            )
        pairs = dict(zip(needed.tolist(), stream.tolist(), strict=False))
        (order.receive if is_receive else order.send).update(pairs)

    def _surround(self, order: WorkerOrder, rows: np.ndarray) -> None:
        """Place what is neither compute nor a transfer between stages."""
        start, end, nodes = self.start_ns, self.end_ns, self.nodes
        computes = np.array(order.compute, dtype=np.int64)
        begin, last = start[computes[[0, -1]]] if len(computes) else (-1, -1)
        between: list[int] = []
        for node in rows.tolist():
            if start[node] >= last - self._same_ns:
                self._append(order.after, node)
                continue
            chunk = computes[
                (nodes.global_stage[computes] == nodes.global_stage[node])
                & (nodes.role[computes] == FORWARD)
            ]
            gathers = nodes.role[node] == GATHER and len(chunk) and start[chunk[0]] >= start[node]
            if gathers or start[node] < begin:
                order.before.append((node, int(chunk[0] if gathers else computes[0])))
                continue
            ended = computes[end[computes] <= start[node] + self._same_ns]
            overlaps = (start[computes] < end[node]) & (end[computes] > start[node])
            if nodes.role[node] == OTHER and not overlaps.any():
                between.append(node)
            else:
                order.during.append((node, int(ended[-1]) if len(ended) else -1))
        order.compute = sorted([*order.compute, *between], key=lambda n: (start[n], end[n]))

    def _append(self, chain: list[tuple[int, int]], node: int) -> None:
        """Let an operation follow the one before it, unless the two ran at the same time."""
        follows = chain[-1] if chain else (-1, -1)
        together = follows[0] >= 0 and self.start_ns[node] < self.end_ns[follows[0]] - self.error_ns
        chain.append((node, follows[1] if together else follows[0]))
