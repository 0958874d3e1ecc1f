"""The model's training job: a Llama-like step under FSDP, with knobs that injections turn.

Every rank runs the same program: next batch, copy it to the device, forward with parameters gathered
one layer ahead, backward on autograd's thread with gradients reduced behind it, optimizer, loss
read back. Knobs add work of one kind at one place; at zero they change nothing, not even the noise.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from chopper.validation.model.engine import Collective, Device, Event, Program, Simulation, Task
from chopper.validation.model.machine import Machine, machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_B = "c10::BFloat16"
_HIDDEN, _FFN, _HEADS, _VOCABULARY, _TOKENS = 4096, 11008, 32, 16_000, 4096
_HEAD = _HIDDEN // _HEADS
_LAYER_PARAMETERS = 4 * _HIDDEN * _HIDDEN + 3 * _HIDDEN * _FFN
_US = 1000


@dataclass(frozen=True, slots=True)
class Dose:
    """How much of something, on which ranks, how often."""

    amount: float = 0.0
    ranks: tuple[int, ...] | None = None
    """None: on all."""
    every: int = 1
    """In every n-th step."""

    def at(self, rank: int, step: int) -> float:
        """The amount in one step of one rank."""
        if self.ranks is not None and rank not in self.ranks:
            return 0.0
        return self.amount if step % self.every == 0 else 0.0


_NONE = Dose()


@dataclass(frozen=True, slots=True)
class Clock:
    """A lower device clock between two times, counted from the first traced step.

    Attributes:
        ratio: of the reference clock.
        begin_ns, end_ns: None for always.
        reason: NVML's bit of why.
    """

    ratio: float
    reason: int
    begin_ns: int | None = None
    end_ns: int | None = None
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run: the machine, its size, and every knob.

    Times in the doses are nanoseconds, ratios are factors less one.
    """

    flavour: str = "cuda"
    seed: int = 0
    ranks: int = 2
    layers: int = 3
    warmup_steps: int = 1
    steps: int = 4
    ahead: bool = False
    """The loss is not read back: the host runs ahead, up to the forward of the step before."""
    hybrid: bool = False
    """Parameters are sharded over pairs of ranks and gradients reduced across pairs, too."""
    noise_ratio: float = 0.004
    """Standard deviation of kernel durations and of host times (ten times as much)."""
    telemetry_hz: float = 1000.0
    host_offsets_ns: tuple[int, ...] = (0, 2_300_417_003, -1_100_000_450, 733_000)
    """How far each rank's clock is ahead."""
    host_drift_ns_per_s: tuple[float, ...] = (0.0, 4000.0, -7000.0, 2500.0)

    quiet_every: int = 0
    """Every n-th step only accumulates gradients: nothing is gathered, reduced or updated."""
    late_layers: int = 0
    """So many layers' parameters are gathered only when they are needed."""
    graph: bool = False
    """Each layer's forward is replayed from one graph."""
    data: Dose = _NONE
    data_collection: Dose = _NONE
    """Garbage collection while a batch is made."""
    before_boundary: Dose = _NONE
    """User Python at the end of a step."""
    synchronization: Dose = _NONE
    """How long the host takes to come back from each further ``.item()``."""
    synchronization_count: int = 0
    dispatch: Dose = _NONE
    """Per operator."""
    call: Dose = _NONE
    """Per launch."""
    query: Dose = _NONE
    """Other runtime calls, per layer."""
    python: Dose = _NONE
    """Per layer."""
    collection: Dose = _NONE
    """Garbage collection, per layer."""
    allocator: Dose = _NONE
    """Per layer."""
    profiler: Dose = _NONE
    """The profiler's own work, per layer."""
    barrier: Dose = _NONE
    """A host-side wait for a collective, per step."""
    slow: Dose = _NONE
    """Model math takes so much longer: on one rank, a straggler."""
    link: Dose = _NONE
    """Transfers take so much longer."""
    copy: Dose = _NONE
    """Nanoseconds of copies from the host that the device waits for, per layer."""
    copy_ahead: bool = False
    """These copies start one layer earlier and are hidden in part."""
    fill: Dose = _NONE
    """Nanoseconds of memset, per layer."""
    contention: Dose = _NONE
    """Kernels beside communication take so much longer."""
    recompute: Dose = _NONE
    """Layers that run their forward again in backward."""
    vector: Dose = _NONE
    """Memory-bound work takes so much longer."""
    wave: Dose = _NONE
    """Blocks beyond full rounds, as a share of a round."""
    stream_gap_ns: int = 900
    """Between two kernels of a stream."""
    event_gap_ns: int = 1800
    """Between the end of a task and the start of one of another stream that waits for it."""
    clocks: tuple[Clock, ...] = ()
    sensitivity: float = 1.0
    """Of model math to the clock."""


@dataclass(slots=True)
class Span:
    """One row of a host thread."""

    name: str
    category: str
    tid: int
    start_ns: int
    end_ns: int
    args: dict[str, Any]


@dataclass(slots=True)
class RankRecord:
    """Everything that happened on a rank.

    Attributes:
        segments: (start, end, what) of the program, in order: what is a label, or the task that
            a call launched.
        steps: (number, start, end) of the host's steps.
    """

    rank: int
    spans: list[Span] = field(default_factory=list)
    segments: list[tuple[int, int, str | Task]] = field(default_factory=list)
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    recording_ns: int = 0


@dataclass(slots=True)
class Recording:
    """A whole simulated run."""

    plan: Plan
    machine: Machine
    ranks: list[RankRecord]
    groups: list[tuple[str, tuple[int, ...]]]
    clocks: list[list[tuple[int, float, int]]]
    """Per rank: (from when, clock, reason bits)."""
    end_ns: int


@lru_cache(maxsize=200_000)
def _normal(seed: int, rank: int, step: int, key: str) -> float:
    """A standard normal number of its own for each place in the program, cut at three."""
    value = random.Random(f"{seed}/{rank}/{step}/{key}").gauss(0.0, 1.0)
    return min(max(value, -3.0), 3.0)


def simulate(plan: Plan) -> Recording:
    """Run the job."""
    node = machine(plan.flavour)
    simulation = Simulation()
    records = [RankRecord(rank) for rank in range(plan.ranks)]
    groups = _Groups(plan)
    # The clock's dips count from when the first traced step begins, which the warm-up decides.
    begins = Event()
    clocks: list[list[tuple[int, float, int]]] = [
        [(0, node.reference_hz, 0)] for _ in range(plan.ranks)
    ]
    for record in records:
        device = Device(
            simulation,
            record.rank,
            clock_hz=node.reference_hz * _always(plan, record.rank),
            reference_hz=node.reference_hz,
            contention_ratio=1.0 + plan.contention.at(record.rank, 0),
            stream_gap_ns=plan.stream_gap_ns,
            event_gap_ns=plan.event_gap_ns,
            leave_ns=_leaving(plan, record.rank),
        )
        host = _Host(plan, node, simulation, device, record, groups, begins)
        simulation.spawn(host.train())
        _schedule_clock(plan, device, record.rank, node, begins, clocks[record.rank])
    simulation.run()
    for record in records:
        record.tasks.sort(key=lambda t: (t.start_ns, -t.end_ns))
    return Recording(plan, node, records, groups.listed(), clocks, simulation.now_ns)


def _always(plan: Plan, rank: int) -> float:
    ratio = 1.0
    for dip in plan.clocks:
        if dip.begin_ns is None and (dip.ranks is None or rank in dip.ranks):
            ratio *= dip.ratio
    return ratio


def _schedule_clock(
    plan: Plan,
    device: Device,
    rank: int,
    node: Machine,
    begins: Event,
    kept: list[tuple[int, float, int]],
) -> None:
    mine = [d for d in plan.clocks if d.ranks is None or rank in d.ranks]
    for dip in mine:
        if dip.begin_ns is None:
            kept[0] = (0, node.reference_hz * dip.ratio, dip.reason)
    usual = kept[0]

    def start() -> None:
        zero = device.simulation.now_ns
        for dip in mine:
            if dip.begin_ns is None:
                continue
            begin, end = zero + dip.begin_ns, zero + (dip.end_ns or dip.begin_ns)
            kept.append((begin, node.reference_hz * dip.ratio, dip.reason))
            kept.append((end, usual[1], usual[2]))
            device.set_clock(begin, node.reference_hz * dip.ratio)
            device.set_clock(end, usual[1])
        kept.sort(key=lambda k: k[0])

    begins.on(start)


def _leaving(plan: Plan, rank: int) -> Callable[[Collective], int]:
    def leave_ns(collective: Collective) -> int:
        key = f"leave/{collective.group}/{collective.sequence}"
        return round(300 + 100 * _normal(plan.seed, rank, 0, key))

    return leave_ns


class _Groups:
    """Process groups, and the collectives that are under way in them."""

    def __init__(self, plan: Plan) -> None:
        everyone = tuple(range(plan.ranks))
        pairs = plan.ranks // 2
        self.shard = (
            {r: tuple(q for q in everyone if q // 2 == r // 2) for r in everyone}
            if plan.hybrid
            else dict.fromkeys(everyone, everyone)
        )
        self.replicate = (
            {r: tuple(q for q in everyone if q % 2 == r % 2) for r in everyone}
            if plan.hybrid and pairs > 1
            else {}
        )
        self._open: dict[tuple[str, int], Collective] = {}
        self._count: dict[tuple[int, str], int] = {}

    def name(self, members: tuple[int, ...], rank: int) -> str:
        """Name of a group as the trace has it."""
        if members != self.shard[rank]:
            return str(1 + len(self.shard) // 2 + rank % 2)
        return str(1 + rank // 2) if self.replicate else "0"

    def listed(self) -> list[tuple[str, tuple[int, ...]]]:
        """All groups by name."""
        found = {"0": tuple(self.shard)}
        for groups in (self.shard, self.replicate):
            found |= {self.name(members, rank): members for rank, members in groups.items()}
        return sorted(found.items())

    def enter(
        self, rank: int, members: tuple[int, ...], make: Callable[[str, int], Collective]
    ) -> Collective:
        """The rank's next collective of a group; the first to come makes it."""
        group = self.name(members, rank)
        number = self._count.get((rank, group), 0) + 1
        self._count[rank, group] = number
        if (group, number) not in self._open:
            self._open[group, number] = make(group, number)
        return self._open[group, number]


class _Host:
    """The program of one rank."""

    def __init__(
        self,
        plan: Plan,
        node: Machine,
        simulation: Simulation,
        device: Device,
        record: RankRecord,
        groups: _Groups,
        begins: Event,
    ) -> None:
        self.plan, self.node, self.simulation, self.device = plan, node, simulation, device
        self.record, self.groups, self.begins = record, groups, begins
        self.rank = record.rank
        self.main_tid = 1000 * (record.rank + 1)
        self.tid = self.main_tid
        self.step = 0
        self.correlation = 0
        self.external = 0
        self.sequence = 100
        self.record_function = 0
        self.calls: dict[str, int] = {}
        self.sequences: dict[str, int] = {}
        self.compute = node.compute_stream
        self.gathered: dict[str, Event] = {}
        self.reduced: list[Event] = []
        self.forward_done: Event | None = None
        self.copied_out: Event | None = None
        self.offloaded: dict[str, Event] = {}
        self.graph_tasks: list[Task] | None = None
        self.graphs = 0

    # ---- time ---------------------------------------------------------------------------------

    def random(self, key: str) -> float:
        """Noise of a place in the program; its n-th visit in a step has its own."""
        return _normal(self.plan.seed, self.rank, self.step, key)

    def around(self, ns: float, key: str) -> int:
        """A host time with its noise."""
        return max(round(ns * (1 + 10 * self.plan.noise_ratio * self.random(key))), 1)

    def busy(self, ns: float, what: str | Task) -> Program:
        """The program is busy with something."""
        length = round(ns)
        if length <= 0:
            return
        start = self.simulation.now_ns
        yield length
        self.record.segments.append((start, start + length, what))

    def until(self, event: Event, what: str) -> Program:
        """The program waits for something."""
        start = self.simulation.now_ns
        yield event
        if self.simulation.now_ns > start:
            self.record.segments.append((start, self.simulation.now_ns, what))

    def span(self, name: str, category: str, start: int, **args: Any) -> None:
        """Record a row that began earlier and ends now."""
        self.record.spans.append(
            Span(name, category, self.tid, start, self.simulation.now_ns, args)
        )

    @property
    def now(self) -> int:
        return self.simulation.now_ns

    @property
    def quiet(self) -> bool:
        """Whether this step communicates nothing."""
        every = self.plan.quiet_every
        return every > 0 and self.step % every == 0

    # ---- calls --------------------------------------------------------------------------------

    def runtime(self, name: str, ns: float, what: str | Task, **args: Any) -> Program:
        """A runtime call that is no launch of a kernel."""
        start = self.now
        self.correlation += 1
        correlation = self.correlation
        yield from self.busy(ns, what)
        self.span(
            self.node.prefix + name,
            "cuda_runtime",
            start,
            correlation=correlation,
            **{"External id": self.external},
            **args,
        )

    def launch(self, task: Task, key: str, *, call: str | None = None) -> Program:
        """Launch one task."""
        if self.graph_tasks is not None:
            self.graph_tasks.append(task)
            return
        start = self.now
        self.correlation += 1
        task.correlation = self.correlation
        task.external = self.external
        task.call = call or (
            self.node.launch_communication if task.collective is not None else self.node.launch
        )
        length = self.around(4.5 * _US, key + "/call")
        length += round(self.plan.call.at(self.rank, self.step))
        task.launch_ns, task.returned_ns = start, start + length
        task.available_ns = start + round(length * (1.0 + 0.12 * self.random(key + "/submit")))
        self.device.stream(task.stream).push(task)
        yield from self.busy(length, task)
        self.span(
            task.call,
            "cuda_runtime",
            start,
            correlation=task.correlation,
            **{"External id": self.external},
            **self.launch_args(task),
        )

    def launch_args(self, task: Task) -> dict[str, Any]:
        """What ROCm writes beside a launch."""
        if self.node.flavour == "cuda" or "grid" not in task.shape:
            return {}
        return {
            "kernel": task.name,
            "grid": task.shape["grid"],
            "block": task.shape["block"],
            "shared memory": 0,
        }

    def wait_stream(self, stream: int, event: Event) -> Program:
        """A stream waits for an event: cudaStreamWaitEvent."""
        if self.graph_tasks is not None:
            return
        self.device.stream(stream).push(event)
        yield from self.runtime("StreamWaitEvent", 1.1 * _US, "runtime")

    # ---- operators ----------------------------------------------------------------------------

    def op(
        self,
        name: str,
        key: str,
        tasks: list[Task],
        *,
        dims: list[Any] | None = None,
        types: list[str] | None = None,
        concrete: list[str] | None = None,
        node: str | None = None,
        around: str | None = None,
        recorded: bool = True,
    ) -> Program:
        """An operator with its kernels, some Python before it.

        Args:
            name: as recorded.
            key: place in the program.
            tasks: kernels.
            dims, types, concrete: its arguments as recorded.
            node: place whose sequence number it takes, because autograd makes a node of it.
            around: a composite operator that calls it.
            recorded: whether Python runs before it (not inside autograd).
        """
        if self.graph_tasks is not None:
            self.graph_tasks += tasks
            return
        if recorded:
            yield from self.busy(self.around(3.5 * _US, key + "/python"), "python")
        outer = self.now
        outer_external = 0
        shapes: dict[str, Any] = {}
        if dims is not None:
            shapes = {
                "Concrete Inputs": concrete or [""] * len(dims),
                "Input type": types or [_B] * len(dims),
                "Input Dims": dims,
            }
        more: dict[str, Any] = {}
        if node is not None:
            self.sequence += 1
            self.sequences[node] = self.sequence
            more = {"Sequence number": self.sequence, "Fwd thread id": 0}
        if around is not None:
            self.external += 1
            outer_external = self.external
            yield from self.busy(self.around(1.6 * _US, key + "/outer"), "dispatch")
        start = self.now
        self.external += 1
        external = self.external
        extra = self.plan.dispatch.at(self.rank, self.step)
        yield from self.busy(self.around(5 * _US, key + "/dispatch") + extra, "dispatch")
        for i, task in enumerate(tasks):
            yield from self.launch(task, f"{key}/{i}")
        yield from self.busy(self.around(1.2 * _US, key + "/after"), "dispatch")
        self.span(name, "cpu_op", start, **{"External id": external}, **shapes, **more)
        if around is not None:
            yield from self.busy(self.around(0.7 * _US, key + "/outer_after"), "dispatch")
            self.span(around, "cpu_op", outer, **{"External id": outer_external}, **more)

    def autograd(self, name: str, place: str | None, inside: Iterator[Any]) -> Program:
        """A node of autograd's engine around operators."""
        outer = self.now
        args: dict[str, Any] = {}
        if place is not None and place in self.sequences:
            args = {"Sequence number": self.sequences[place], "Fwd thread id": 1}
        self.external += 2
        externals = self.external - 1, self.external
        yield from self.busy(2.0 * _US, "dispatch")
        start = self.now
        yield from self.busy(1.0 * _US, "dispatch")
        yield from inside
        yield from self.busy(0.6 * _US, "dispatch")
        self.span(name, "cpu_op", start, **{"External id": externals[1]}, **args)
        yield from self.busy(0.4 * _US, "dispatch")
        self.span(
            f"autograd::engine::evaluate_function: {name}",
            "cpu_op",
            outer,
            **{"External id": externals[0]},
            **args,
        )

    # ---- tasks --------------------------------------------------------------------------------

    def noisy(self, ns: float, key: str) -> float:
        return ns * (1 + self.plan.noise_ratio * self.random(key + "/noise"))

    def math(self, key: str, flop: float, bytes_count: float, *, name: str) -> Task:
        """A kernel of model math; its utilization is its shape's own."""
        ideal = flop / self.node.flop_per_ns
        roofline = max(ideal, bytes_count / self.node.bytes_per_ns)
        # Equal products on equal devices are equally efficient, wherever they stand.
        below = 1.32 + 0.05 * _normal(0, 0, 0, f"{name}/{flop}/{bytes_count}")
        below *= 1 + self.plan.slow.at(self.rank, self.step)
        units = self.node.units
        rounds = 3
        beyond = self.plan.wave.at(self.rank, self.step)
        blocks = rounds * units + round(beyond * units)
        wave = -(-blocks // units) / (blocks / units)
        return Task(
            name=name,
            lane="compute",
            stream=self.compute,
            account="math",
            alone_ns=self.noisy(roofline * below * wave, key),
            ideal_ns=ideal,
            roofline_ns=roofline,
            wave_ratio=wave,
            sensitivity=self.plan.sensitivity if roofline == ideal else 0.0,
            shape={
                "grid": [blocks, 1, 1],
                "block": [self.node.block, 1, 1],
                **self.node.gemm_shape,
            },
        )

    def gemm(self, key: str, m: int, k: int, n: int) -> Task:
        bytes_count = 2 * (m * k + k * n + m * n)
        return self.math(key, 2.0 * m * k * n, bytes_count, name=self.node.gemm)

    def vector(
        self, key: str, bytes_count: float, what: str, account: str = "vector", ratio: float = 1.18
    ) -> Task:
        """A memory-bound kernel."""
        roofline = bytes_count / self.node.bytes_per_ns
        if account == "vector":
            ratio *= 1 + self.plan.vector.at(self.rank, self.step)
        return Task(
            name=self.node.elementwise(what),
            lane="compute",
            stream=self.compute,
            account=account,
            alone_ns=self.noisy(max(roofline * ratio, 1500.0), key),
            roofline_ns=roofline,
            shape={"grid": [8192, 1, 1], "block": [128, 1, 1], "registers per thread": 32},
        )

    def copy(self, name: str, account: str, ns: float, stream: int, bytes_count: int) -> Task:
        return Task(
            name=name,
            lane="copy",
            stream=stream,
            account=account,
            alone_ns=ns,
            shape={"bytes": bytes_count},
        )

    # ---- the program --------------------------------------------------------------------------

    def train(self) -> Program:
        plan = self.plan
        yield from self.busy(10 * _US * (self.rank + 1), "python")
        for step in range(plan.warmup_steps + plan.steps):
            self.step = step
            self.sequences.clear()
            if step == plan.warmup_steps:
                self.record.recording_ns = self.now
                yield from self.busy(20 * _US, "python")
                if self.begins.time_ns is None:
                    self.begins.fire(self.now)
            start = self.now
            yield from self.one_step()
            if step >= plan.warmup_steps:
                number = 10 + step
                self.span(f"ProfilerStep#{number}", "user_annotation", start)
                self.record.steps.append((number, start, self.now))
        self.record.tasks = self.device.tasks

    def one_step(self) -> Program:
        plan, rank, step = self.plan, self.rank, self.step
        yield from self.limit_lead()
        yield from self.next_batch()
        yield from self.copy_batch()
        barrier = plan.barrier.at(rank, step)
        if barrier:
            start = self.now
            yield from self.busy(barrier, "collective_wait")
            self.span("c10d::barrier", "cpu_op", start, **{"External id": 0})
        yield from self.busy(6 * _US, "python")
        start = self.now
        yield from self.busy(self.around(9 * _US, "zero_grad"), "python")
        self.span("Optimizer.zero_grad#AdamW.zero_grad", "user_annotation", start)
        yield from self.forward()
        for i in range(plan.synchronization_count):
            yield from self.item(f"further{i}", plan.synchronization.at(rank, step))
        yield from self.backward()
        if not self.quiet:
            yield from self.optimizer()
        if not plan.ahead:
            yield from self.item("loss", 0)
        yield from self.busy(plan.before_boundary.at(rank, step), "python")
        yield from self.busy(self.around(15 * _US, "logging"), "python")

    def limit_lead(self) -> Program:
        if not self.plan.ahead or self.forward_done is None:
            return
        start = self.now
        self.correlation += 1
        correlation = self.correlation
        yield from self.until(self.forward_done, "synchronization")
        yield from self.busy(4 * _US, "synchronization")
        self.span(
            self.node.prefix + "EventSynchronize",
            "cuda_runtime",
            start,
            correlation=correlation,
        )

    def next_batch(self) -> Program:
        start = self.now
        yield from self.busy(self.around(45 * _US, "batch"), "data")
        collecting = self.plan.data_collection.at(self.rank, self.step)
        if collecting:
            yield from self.collect(collecting)
            yield from self.busy(20 * _US, "data")
        yield from self.busy(self.plan.data.at(self.rank, self.step), "data")
        self.span(
            "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
            "user_annotation",
            start,
        )

    def copy_batch(self) -> Program:
        yield from self.busy(5 * _US, "python")
        outer = self.now
        self.external += 2
        externals = self.external - 1, self.external
        yield from self.busy(4 * _US, "dispatch")
        start = self.now
        yield from self.busy(3 * _US, "dispatch")
        name = (
            "Memcpy HtoD (Pinned -> Device)"
            if self.node.flavour == "cuda"
            else "Memcpy HtoD (Host -> Device)"
        )
        yield from self.launch(
            self.copy(name, "copy.host_to_device", 9400.0, self.compute, 8 * _TOKENS),
            "batch",
            call=self.node.prefix + "MemcpyAsync",
        )
        yield from self.busy(1 * _US, "dispatch")
        shape = {
            "Concrete Inputs": ["", "", "True"],
            "Input type": ["long int", "long int", "Scalar"],
            "Input Dims": [[1, _TOKENS], [1, _TOKENS], []],
        }
        self.span("aten::copy_", "cpu_op", start, **{"External id": externals[1]}, **shape)
        yield from self.busy(1 * _US, "dispatch")
        self.span("aten::to", "cpu_op", outer, **{"External id": externals[0]})

    def collect(self, ns: float) -> Program:
        """Python's garbage collector."""
        start = self.now
        yield from self.busy(ns, "gc")
        if self.node.flavour == "cuda":
            self.span("chopper::gc::2", "cpu_op", start, **{"External id": 0})
        else:
            self.span("Python GC", "python_function", start)

    def extras(self, key: str) -> Program:
        """What injections add at the beginning of each layer."""
        plan, rank, step = self.plan, self.rank, self.step
        if self.graph_tasks is not None:
            return
        yield from self.busy(plan.python.at(rank, step), "python")
        collecting = plan.collection.at(rank, step)
        if collecting:
            yield from self.collect(collecting)
        overhead = plan.profiler.at(rank, step)
        if overhead:
            start = self.now
            yield from self.busy(overhead, "profiler")
            self.span("Activity Buffer Request", "overhead", start)
        allocating = plan.allocator.at(rank, step)
        if allocating:
            start = self.now
            self.external += 1
            external = self.external
            yield from self.busy(2 * _US, "dispatch")
            yield from self.runtime("Malloc", allocating, "allocator")
            yield from self.busy(1 * _US, "dispatch")
            self.span("aten::empty", "cpu_op", start, **{"External id": external})
        asking = plan.query.at(rank, step)
        if asking:
            yield from self.runtime("FuncGetAttributes", asking, "runtime")
        filling = plan.fill.at(rank, step)
        if filling:
            name = (
                "Memset (Device)"
                if self.node.flavour == "cuda"
                else "__amd_rocclr_fillBufferAligned"
            )
            task = self.copy(name, "copy.memset", filling, self.compute, round(filling * 1000))
            yield from self.op(
                "aten::zero_",
                key + "/fill",
                [task],
                dims=[[round(filling * 500)]],
            )
        yield from self.copies(key)

    def copies(self, key: str) -> Program:
        copying = self.plan.copy.at(self.rank, self.step)
        if not copying:
            return
        name = (
            "Memcpy HtoD (Pinned -> Device)"
            if self.node.flavour == "cuda"
            else "Memcpy HtoD (Host -> Device)"
        )
        stream = self.node.copy_stream
        bytes_count = round(copying * self.node.bus_bytes_per_s / 1e9)
        task = self.copy(name, "copy.host_to_device", copying, stream, bytes_count)
        if self.copied_out is not None:
            # The device's buffer is free once the layer before is under way.
            yield from self.wait_stream(stream, self.copied_out)
        start = self.now
        self.external += 1
        external = self.external
        yield from self.busy(5 * _US, "dispatch")
        yield from self.launch(task, key + "/offload", call=self.node.prefix + "MemcpyAsync")
        yield from self.busy(1 * _US, "dispatch")
        self.span("aten::copy_", "cpu_op", start, **{"External id": external})
        before = self.offloaded.pop("ahead", None)
        if self.plan.copy_ahead:
            self.offloaded["ahead"] = task.done
            if before is not None:
                yield from self.wait_stream(self.compute, before)
        else:
            yield from self.wait_stream(self.compute, task.done)

    # ---- FSDP ---------------------------------------------------------------------------------

    def collective(
        self, name: str, members: tuple[int, ...], elements: int, key: str, stream: int
    ) -> Task:
        """A collective's kernel on this rank."""
        size = len(members)
        scattered = name == "_reduce_scatter_base"
        whole, part = elements, elements // size
        if name == "allreduce":
            in_elements = out_elements = elements
            bus_bytes = 2 * elements * 2 * (size - 1) / size
        else:
            in_elements, out_elements = (whole, part) if scattered else (part, whole)
            bus_bytes = elements * 2 * (size - 1) / size
        bus_ns = bus_bytes / self.node.link_bytes_per_ns

        def make(group: str, sequence: int) -> Collective:
            length = bus_ns * 1.25 * (1 + self.plan.link.at(self.rank, self.step)) + 12_000
            noise = 1 + self.plan.noise_ratio * _normal(
                self.plan.seed, 0, self.step, f"transfer/{group}/{sequence}"
            )
            return Collective(
                name,
                group,
                members,
                sequence,
                in_elements,
                out_elements,
                bus_ns,
                round(length * noise),
            )

        del key
        return Task(
            name=self.node.collective(name),
            lane="communication",
            stream=stream,
            account="communication",
            alone_ns=0.0,
            contended=False,
            collective=self.groups.enter(self.rank, members, make),
            shape={"grid": [24, 1, 1], "block": [544, 1, 1]},
        )

    def issue(
        self, operator: str, backend: str, task: Task, key: str, after: Event | None, stream: int
    ) -> Program:
        """The host's side of a collective."""
        assert task.collective is not None
        if after is not None:
            yield from self.wait_stream(stream, after)
        start = self.now
        self.external += 3
        c10d, comms, inner = self.external - 2, self.external - 1, self.external
        yield from self.busy(4 * _US, "dispatch")
        middle = self.now
        yield from self.busy(3 * _US, "dispatch")
        deep = self.now
        yield from self.busy(2 * _US, "dispatch")
        yield from self.launch(task, key)
        self.span(backend, "user_annotation", deep, **{"External id": inner})
        yield from self.busy(1 * _US, "dispatch")
        told = task.collective
        self.span(
            "record_param_comms",
            "cpu_op",
            middle,
            **{
                "External id": comms,
                "Process Group Name": told.group,
                "Process Group Ranks": str(list(told.members)),
                "Group size": len(told.members),
                "In msg nelems": told.in_elements,
                "Out msg nelems": told.out_elements,
                "dtype": "BFloat16",
                "Collective name": told.name,
            },
        )
        yield from self.busy(1 * _US, "dispatch")
        self.span(operator, "cpu_op", start, **{"External id": c10d})

    def gather(self, layer: int, key: str) -> Program:
        """All-gather a layer's parameters on the communication stream."""
        start = self.now
        stream = self.node.communication_stream
        members = self.groups.shard[self.rank]
        task = self.collective("_allgather_base", members, _LAYER_PARAMETERS, key, stream)
        yield from self.busy(5 * _US, "python")
        yield from self.issue(
            "c10d::_allgather_base_", "nccl:_all_gather_base", task, key, self.copied_out, stream
        )
        self.gathered[key] = task.done
        self.span(f"FSDP::all_gather (layers.{layer})", "user_annotation", start)

    def unshard(self, layer: int, key: str, ahead: tuple[int, str] | None) -> Program:
        """Wait for a layer's parameters, copy them out, and gather the next layer's."""
        if self.quiet:
            return
        start = self.now
        yield from self.busy(4 * _US, "python")
        if key not in self.gathered:
            yield from self.gather(layer, key)
        yield from self.wait_stream(self.compute, self.gathered[key])
        task = self.vector(
            key + "/copy_out",
            4.0 * _LAYER_PARAMETERS,
            "direct_copy_kernel",
            account="compute.fsdp_copy",
        )
        yield from self.op(
            "fsdp::split_with_sizes_copy",
            key + "/copy_out",
            [task],
            dims=[[len(self.groups.shard[self.rank]), _LAYER_PARAMETERS // 2], [], [], []],
            types=[_B, "", "Scalar", "TensorList"],
            concrete=["", "", "1", ""],
        )
        self.copied_out = task.done
        if ahead is not None and ahead[0] >= self.plan.late_layers:
            yield from self.gather(*ahead)
        name = "pre_forward" if "forward" in key else "pre_backward"
        self.span(f"FSDP::{name} (layers.{layer})", "user_annotation", start)

    def reduce(self, layer: int, key: str) -> Program:
        """Reduce a layer's gradients on the communication stream."""
        if self.quiet:
            return
        start = self.now
        yield from self.busy(4 * _US, "python")
        task = self.vector(
            key + "/copy_in",
            4.0 * _LAYER_PARAMETERS,
            "chunk_cat_cuda_kernel",
            account="compute.fsdp_copy",
        )
        yield from self.op(
            "fsdp::chunk_cat",
            key + "/copy_in",
            [task],
            dims=[[[_LAYER_PARAMETERS]], [], [], [_LAYER_PARAMETERS]],
            types=["TensorList", "Scalar", "Scalar", _B],
            concrete=["", "0", "2", ""],
        )
        stream = self.node.communication_stream
        members = self.groups.shard[self.rank]
        sent = self.collective("_reduce_scatter_base", members, _LAYER_PARAMETERS, key, stream)
        yield from self.issue(
            "c10d::_reduce_scatter_base_",
            "nccl:_reduce_scatter_base",
            sent,
            key,
            task.done,
            stream,
        )
        self.reduced.append(sent.done)
        if self.groups.replicate:
            across = self.groups.replicate[self.rank]
            second = self.node.second_communication_stream
            whole = self.collective("allreduce", across, _LAYER_PARAMETERS // 2, key, second)
            yield from self.issue(
                "c10d::allreduce_", "nccl:all_reduce", whole, key + "/across", sent.done, second
            )
            self.reduced.append(whole.done)
        self.span(f"FSDP::post_backward_reduce (layers.{layer})", "user_annotation", start)

    # ---- forward ------------------------------------------------------------------------------

    def forward(self) -> Program:
        yield from self.busy(10 * _US, "python")
        key = "embedding"
        yield from self.op(
            "aten::embedding",
            key,
            [self.vector(key, 8 * _TOKENS + 4.0 * _TOKENS * _HIDDEN, "index_select_kernel")],
            dims=[[_VOCABULARY, _HIDDEN], [1, _TOKENS], [], [], []],
            types=[_B, "long int", "Scalar", "Scalar", "Scalar"],
            concrete=["", "", "-1", "False", "False"],
            node=key,
        )
        for layer in range(self.plan.layers):
            key = f"forward/{layer}"
            yield from self.extras(key)
            ahead = (layer + 1, f"forward/{layer + 1}") if layer + 1 < self.plan.layers else None
            yield from self.unshard(layer, key, ahead)
            if self.plan.graph:
                yield from self.replay(layer, key)
            else:
                yield from self.layer(layer, key)
        yield from self.head()

    def replay(self, layer: int, key: str) -> Program:
        """A layer's forward from a graph: one launch for all its kernels."""
        self.graph_tasks = []
        yield from self.layer(layer, key)
        tasks, self.graph_tasks = self.graph_tasks, None
        start = self.now
        self.correlation += 1
        length = self.around(30 * _US, key + "/graph")
        self.graphs += 1
        for i, task in enumerate(tasks):
            task.correlation = self.correlation
            task.launch_ns, task.returned_ns = start, start + length
            task.available_ns = start + round(0.8 * length)
            task.account = "compute.unmodelled"
            task.call = self.node.prefix + "GraphLaunch"
            task.graph = (self.graphs, i + 1)
            self.device.stream(task.stream).push(task)
        yield from self.busy(length, tasks[0])
        self.span(
            self.node.prefix + "GraphLaunch",
            "cuda_runtime",
            start,
            correlation=tasks[0].correlation,
        )

    def layer(self, layer: int, key: str, *, again: bool = False) -> Program:
        """Forward of one layer; ``again`` in backward."""
        start = self.now
        size = 2.0 * _TOKENS * _HIDDEN
        wide = 2.0 * _TOKENS * _FFN
        x, h = [1, _TOKENS, _HIDDEN], [1, _TOKENS, _FFN]
        account = "compute.recompute" if again else "vector"
        node = None if again else key

        def place(name: str) -> str | None:
            # Recomputed operators take sequence numbers of their own.
            return f"{key}/{name}" if node is None else f"{node}/{name}"

        def linear(name: str, k: int, n: int) -> Program:
            task = self.gemm(f"{key}/{name}", _TOKENS, k, n)
            if again:
                task.account = account
            return self.op(
                "aten::mm",
                f"{key}/{name}",
                [task],
                dims=[[_TOKENS, k], [k, n]],
                node=place(name),
                around="aten::linear",
            )

        def vector(
            operator: str, name: str, bytes_count: float, what: str, dims: list[Any], **told: Any
        ) -> Program:
            task = self.vector(f"{key}/{name}", bytes_count, what, account=account)
            return self.op(operator, f"{key}/{name}", [task], dims=dims, node=place(name), **told)

        def norm(name: str) -> Program:
            return vector(
                "aten::_fused_rms_norm",
                name,
                2 * size + 2 * _HIDDEN,
                "vectorized_layer_norm_kernel",
                [x, [], [_HIDDEN], []],
                types=[_B, "ScalarList", _B, "Scalar"],
                concrete=["", f"[{_HIDDEN}]", "", "1e-05"],
            )

        yield from norm("norm1")
        for name in "qkv":
            yield from linear(name, _HIDDEN, _HIDDEN)
        for name in ("rope_q", "rope_k"):
            yield from vector("aten::mul", name, 3 * size, "MulFunctor<float>", [x, x])
        yield from self.attention(key, again)
        yield from linear("o", _HIDDEN, _HIDDEN)
        yield from vector(
            "aten::add",
            "residual1",
            3 * size,
            "CUDAFunctor_add<c10::BFloat16>",
            [x, x, []],
            types=[_B, _B, "Scalar"],
            concrete=["", "", "1"],
        )
        yield from norm("norm2")
        yield from linear("gate", _HIDDEN, _FFN)
        yield from linear("up", _HIDDEN, _FFN)
        yield from vector("aten::silu", "silu", 2 * wide, "silu_kernel", [h])
        yield from vector("aten::mul", "gated", 3 * wide, "MulFunctor<float>", [h, h])
        yield from linear("down", _FFN, _HIDDEN)
        yield from vector(
            "aten::add",
            "residual2",
            3 * size,
            "CUDAFunctor_add<c10::BFloat16>",
            [x, x, []],
            types=[_B, _B, "Scalar"],
            concrete=["", "", "1"],
        )
        if self.graph_tasks is None:
            kind = "recompute" if again else "layer"
            self.span(f"chopper::{kind}::layers.{layer}", "cpu_op", start, **{"External id": 0})

    def attention(self, key: str, again: bool) -> Program:
        pairs = _TOKENS * (_TOKENS + 1) / 2
        size = 2.0 * _TOKENS * _HIDDEN
        task = self.math(
            f"{key}/attention",
            4.0 * _HEADS * _HEAD * pairs,
            4 * size + 4 * _HEADS * _TOKENS,
            name=self.node.flash_forward,
        )
        if again:
            task.account = "compute.recompute"
        q = [1, _HEADS, _TOKENS, _HEAD]
        return self.op(
            "aten::_scaled_dot_product_flash_attention",
            f"{key}/attention",
            [task],
            dims=[q, q, q, [], [], [], []],
            types=[_B, _B, _B, "Scalar", "Scalar", "Scalar", ""],
            concrete=["", "", "", "0.", "True", "False", ""],
            node=f"{key}/attention",
            around="aten::scaled_dot_product_attention",
        )

    def head(self) -> Program:
        yield from self.op(
            "aten::mm",
            "head/mm",
            [self.gemm("head/mm", _TOKENS, _HIDDEN, _VOCABULARY)],
            dims=[[_TOKENS, _HIDDEN], [_HIDDEN, _VOCABULARY]],
            node="head/mm",
            around="aten::linear",
        )
        logits = 2.0 * _TOKENS * _VOCABULARY
        task = self.vector("head/softmax", 2 * logits, "cunn_SoftMaxForward")
        yield from self.op(
            "aten::_log_softmax",
            "head/softmax",
            [task],
            dims=[[_TOKENS, _VOCABULARY], [], []],
            types=[_B, "Scalar", "Scalar"],
            concrete=["", "1", "False"],
            node="head/softmax",
        )
        self.forward_done = task.done

    # ---- backward -----------------------------------------------------------------------------

    def backward(self) -> Program:
        yield from self.busy(12 * _US, "python")
        self.tid = self.main_tid + 77
        yield from self.backward_head()
        for layer in reversed(range(self.plan.layers)):
            yield from self.backward_layer(layer)
        key = "backward/embedding"
        task = self.vector(
            key,
            2.0 * _TOKENS * _HIDDEN + 8 * _TOKENS + 2.0 * _VOCABULARY * _HIDDEN,
            "embedding_backward_feature_kernel",
        )
        yield from self.autograd(
            "EmbeddingBackward0",
            "embedding",
            self.op(
                "aten::embedding_dense_backward",
                key,
                [task],
                dims=[[1, _TOKENS, _HIDDEN], [1, _TOKENS], [], [], []],
                types=[_B, "long int", "Scalar", "Scalar", "Scalar"],
                concrete=["", "", str(_VOCABULARY), "-1", "False"],
                recorded=False,
            ),
        )
        self.tid = self.main_tid
        yield from self.busy(14 * _US, "python")

    def product_backward(self, key: str, m: int, k: int, n: int) -> Program:
        """Both gradients of a matrix product."""
        for name, dims in (("dx", (m, n, k)), ("dw", (k, m, n))):
            a, b, c = dims
            yield from self.op(
                "aten::mm",
                f"{key}/{name}",
                [self.gemm(f"{key}/{name}", a, b, c)],
                dims=[[a, b], [b, c]],
                recorded=False,
            )

    def backward_head(self) -> Program:
        logits = 2.0 * _TOKENS * _VOCABULARY
        key = "backward/head"
        yield from self.autograd(
            "LogSoftmaxBackward0",
            "head/softmax",
            self.op(
                "aten::_log_softmax_backward_data",
                key + "/softmax",
                [self.vector(key + "/softmax", 3 * logits, "cunn_SoftMaxBackward")],
                dims=[[_TOKENS, _VOCABULARY], [_TOKENS, _VOCABULARY], [], []],
                types=[_B, _B, "Scalar", "Scalar"],
                concrete=["", "", "1", "15"],
                recorded=False,
            ),
        )
        yield from self.autograd(
            "MmBackward0",
            "head/mm",
            self.product_backward(key + "/mm", _TOKENS, _HIDDEN, _VOCABULARY),
        )

    def backward_layer(self, layer: int) -> Program:
        key, forward = f"backward/{layer}", f"forward/{layer}"
        size = 2.0 * _TOKENS * _HIDDEN
        wide = 2.0 * _TOKENS * _FFN
        x, h = [1, _TOKENS, _HIDDEN], [1, _TOKENS, _FFN]
        ahead = (layer - 1, f"backward/{layer - 1}") if layer else None
        yield from self.extras(key)
        yield from self.unshard(layer, key, ahead)

        def vector(operator: str, name: str, bytes_count: float, what: str, dims: Any) -> Program:
            return self.op(
                operator,
                f"{key}/{name}",
                [self.vector(f"{key}/{name}", bytes_count, what)],
                dims=dims,
                recorded=False,
            )

        def linear(name: str, k: int, n: int) -> Program:
            return self.autograd(
                "MmBackward0",
                f"{forward}/{name}",
                self.product_backward(f"{key}/{name}", _TOKENS, k, n),
            )

        def norm(name: str) -> Program:
            task = self.vector(
                f"{key}/{name}",
                3 * size + 4 * _TOKENS + 4 * _HIDDEN,
                "layer_norm_grad_input_kernel",
            )
            return self.autograd(
                "FusedRmsNormBackward0",
                f"{forward}/{name}",
                self.op(
                    "aten::_fused_rms_norm_backward",
                    f"{key}/{name}",
                    [task],
                    dims=[x, x, [], [1, _TOKENS, 1], [_HIDDEN], []],
                    types=[_B, _B, "ScalarList", "float", _B, ""],
                    concrete=["", "", f"[{_HIDDEN}]", "", "", "[True, True]"],
                    recorded=False,
                ),
            )

        def first() -> Program:
            if layer < self.plan.recompute.at(self.rank, self.step):
                yield from self.layer(layer, f"again/{layer}", again=True)
            yield from self.product_backward(f"{key}/down", _TOKENS, _FFN, _HIDDEN)

        yield from self.autograd("MmBackward0", f"{forward}/down", first())
        both = self.sequence_of(
            vector("aten::mul", "gated1", 3 * wide, "MulFunctor<float>", [h, h]),
            vector("aten::mul", "gated2", 3 * wide, "MulFunctor<float>", [h, h]),
        )
        yield from self.autograd("MulBackward0", f"{forward}/gated", both)
        yield from self.autograd(
            "SiluBackward0",
            f"{forward}/silu",
            vector("aten::silu_backward", "silu", 3 * wide, "silu_backward_kernel", [h, h]),
        )
        yield from linear("up", _HIDDEN, _FFN)
        yield from linear("gate", _HIDDEN, _FFN)
        yield from norm("norm2")
        yield from linear("o", _HIDDEN, _HIDDEN)
        yield from self.attention_backward(key, forward)
        for name in ("rope_q", "rope_k"):
            yield from self.autograd(
                "MulBackward0",
                f"{forward}/{name}",
                vector("aten::mul", name, 3 * size, "MulFunctor<float>", [x, x]),
            )
        for name in "vkq":
            yield from linear(name, _HIDDEN, _HIDDEN)
        yield from norm("norm1")
        yield from self.reduce(layer, key + "/reduce")

    def sequence_of(self, *programs: Program) -> Program:
        for program in programs:
            yield from program

    def attention_backward(self, key: str, forward: str) -> Program:
        pairs = _TOKENS * (_TOKENS + 1) / 2
        size = 2.0 * _TOKENS * _HIDDEN
        task = self.math(
            f"{key}/attention",
            10.0 * _HEADS * _HEAD * pairs,
            8 * size + 4 * _HEADS * _TOKENS,
            name=self.node.flash_backward,
        )
        q = [1, _HEADS, _TOKENS, _HEAD]
        inner = self.op(
            "aten::_scaled_dot_product_flash_attention_backward",
            f"{key}/attention",
            [task],
            dims=[q, q, q, q, q, [1, _HEADS, _TOKENS], *[[]] * 9],
            types=[_B] * 5
            + ["float", "", "", "Scalar", "Scalar", "Scalar", "Scalar"]
            + ["unsigned long", "unsigned long", "Scalar"],
            concrete=[""] * 8 + [str(_TOKENS), str(_TOKENS), "0.", "True", "", "", "0.088"],
            recorded=False,
        )
        return self.autograd(
            "ScaledDotProductFlashAttentionBackward0", f"{forward}/attention", inner
        )

    # ---- the end of a step --------------------------------------------------------------------

    def optimizer(self) -> Program:
        start = self.now
        yield from self.busy(25 * _US, "python")
        for event in self.reduced:
            yield from self.wait_stream(self.compute, event)
        self.reduced.clear()
        self.gathered.clear()
        shard = self.plan.layers * _LAYER_PARAMETERS // len(self.groups.shard[self.rank])
        task = self.vector(
            "optimizer", 14.0 * shard, "FusedAdamMathFunctor<float, 4>", "compute.optimizer"
        )
        yield from self.op(
            "aten::_fused_adamw_",
            "optimizer",
            [task],
            dims=[[[shard]], [[shard]], [[shard]], [[shard]]],
            types=["TensorList"] * 4,
        )
        self.copied_out = task.done
        self.span("Optimizer.step#AdamW.step", "user_annotation", start)

    def item(self, key: str, wake_ns: float) -> Program:
        """Read a value back: a copy to the host, and waiting for it."""
        yield from self.busy(4 * _US, "python")
        outer = self.now
        self.external += 2
        externals = self.external - 1, self.external
        yield from self.busy(2 * _US, "synchronization")
        start = self.now
        yield from self.busy(2 * _US, "synchronization")
        task = self.copy(
            "Memcpy DtoH (Device -> Pageable)"
            if self.node.flavour == "cuda"
            else "Memcpy DtoH (Device -> Host)",
            "copy.device_to_host",
            7600.0,
            self.compute,
            4,
        )
        call = "MemcpyAsync" if self.node.flavour == "cuda" else "MemcpyWithStream"
        if self.node.flavour == "cuda":
            yield from self.launch(task, key + "/item", call=self.node.prefix + call)
            waiting = self.now
            self.correlation += 1
            correlation = self.correlation
            yield from self.until(task.done, "synchronization")
            yield from self.busy(5 * _US + wake_ns, "synchronization")
            self.span(
                self.node.prefix + "StreamSynchronize",
                "cuda_runtime",
                waiting,
                correlation=correlation,
                **{"External id": externals[1]},
            )
        else:
            yield from self.blocking(task, self.node.prefix + call, wake_ns)
        yield from self.busy(1 * _US, "synchronization")
        shape = {"Concrete Inputs": [""], "Input type": [_B], "Input Dims": [[]]}
        self.span(
            "aten::_local_scalar_dense", "cpu_op", start, **{"External id": externals[1]}, **shape
        )
        yield from self.busy(1 * _US, "synchronization")
        self.span("aten::item", "cpu_op", outer, **{"External id": externals[0]}, **shape)

    def blocking(self, task: Task, call: str, wake_ns: float) -> Program:
        """A copy call that returns when the copy is done."""
        start = self.now
        self.correlation += 1
        task.correlation, task.call = self.correlation, call
        task.external = self.external
        task.launch_ns = start
        task.available_ns = start + 4 * _US
        self.device.stream(task.stream).push(task)
        yield from self.until(task.done, "synchronization")
        yield from self.busy(5 * _US + wake_ns, "synchronization")
        task.returned_ns = self.now
        self.span(
            call,
            "cuda_runtime",
            start,
            correlation=task.correlation,
            **{"External id": self.external},
            bytes=task.shape["bytes"],
        )
