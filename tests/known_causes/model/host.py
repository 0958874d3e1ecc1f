"""Program on a host: be busy, call the runtime, launch kernels, run operators; and what injections
add to it at the beginning of each layer.
"""

from __future__ import annotations

import contextlib
import random
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tests.known_causes.model.engine import Event, Program, Task
from tests.known_causes.model.machine import RECORDED
from tests.known_causes.model.records import Span

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from tests.known_causes.model.engine import Device, Simulation
    from tests.known_causes.model.machine import Machine
    from tests.known_causes.model.plan import Plan
    from tests.known_causes.model.records import Groups, RankRecord

BF16 = "c10::BFloat16"
US = 1000


@lru_cache(maxsize=200_000)
def normal(seed: int, rank: int, step: int, key: str) -> float:
    """A standard normal number of its own for each place in the program, cut at three."""
    value = random.Random(f"{seed}/{rank}/{step}/{key}").gauss(0.0, 1.0)
    return min(max(value, -3.0), 3.0)


class Host:
    """A program of one rank: its time, its calls, its kernels."""

    def __init__(
        self,
        plan: Plan,
        node: Machine,
        simulation: Simulation,
        device: Device,
        record: RankRecord,
        groups: Groups,
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
        self.sequences: dict[str, int] = {}
        self.compute = node.compute_stream
        self.gathered: dict[str, Event] = {}
        self.reduced: list[Event] = []
        self.forward_done: Event | None = None
        self.copied_out: Event | None = None
        self.offloaded: Event | None = None
        self.graph_tasks: list[Task] | None = None
        self.graphs = 0

    def random(self, key: str) -> float:
        """Noise of a place in the program; its n-th visit in a step has its own."""
        return normal(self.plan.seed, self.rank, self.step, key)

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

    @contextlib.contextmanager
    def row(self, name: str, category: str, **args: Any) -> Iterator[None]:
        """Record a row of this thread around the block."""
        start = self.now
        yield
        self.record.spans.append(Span(name, category, self.tid, start, self.now, args))

    def operator(
        self, name: str, category: str = "cpu_op", **args: Any
    ) -> AbstractContextManager[None]:
        """Record an operator with an External id of its own around the block."""
        self.external += 1
        return self.row(name, category, **{"External id": self.external}, **args)

    @contextlib.contextmanager
    def runtime_call(self, name: str, **args: Any) -> Iterator[int]:
        """Record a call of the runtime around the block, which gets its correlation."""
        self.correlation += 1
        correlation, external = self.correlation, self.external
        with self.row(
            name, "cuda_runtime", correlation=correlation, **{"External id": external}, **args
        ):
            yield correlation

    @property
    def now(self) -> int:
        """True time."""
        return self.simulation.now_ns

    @property
    def quiet(self) -> bool:
        """True in a step that communicates nothing."""
        every = self.plan.quiet_every
        return every > 0 and self.step % every == 0

    def runtime(self, name: str, ns: float, what: str | Task) -> Program:
        """A runtime call that is no launch of a kernel."""
        with self.runtime_call(self.node.prefix + name):
            yield from self.busy(ns, what)

    def launch(self, task: Task, key: str, *, call: str | None = None) -> Program:
        """Launch one task."""
        if self.graph_tasks is not None:
            self.graph_tasks.append(task)
            return
        task.external = self.external
        task.call = call or (
            self.node.launch_communication if task.collective is not None else self.node.launch
        )
        length = self.around(4.5 * US, key + "/call")
        length += round(self.plan.call.at(self.rank, self.step))
        task.launch_ns, task.returned_ns = self.now, self.now + length
        task.available_ns = self.now + round(length * (1.0 + 0.12 * self.random(key + "/submit")))
        self.device.stream(task.stream).push(task)
        args: dict[str, Any] = {}
        if self.node.flavour == "rocm" and "grid" in task.shape:
            grid, block = task.shape["grid"], task.shape["block"]
            args = {"kernel": task.name, "grid": grid, "block": block, "shared memory": 0}
        with self.runtime_call(task.call, **args) as task.correlation:
            yield from self.busy(length, task)

    def wait_stream(self, stream: int, event: Event) -> Program:
        """A stream waits for an event: cudaStreamWaitEvent."""
        if self.graph_tasks is not None:
            return
        self.device.stream(stream).push(event)
        yield from self.runtime("StreamWaitEvent", 1.1 * US, "runtime")

    def op(
        self,
        name: str,
        key: str,
        tasks: list[Task],
        *,
        dims: list[Any],
        node: bool = False,
        around: str | None = None,
        recorded: bool = True,
    ) -> Program:
        """An operator with its kernels; where it is ``recorded``, some Python runs before it.

        ``dims`` are of its arguments as recorded; of a ``node`` autograd takes a sequence number; a
        composite operator may stand ``around`` it.
        """
        if self.graph_tasks is not None:
            self.graph_tasks += tasks
            return
        if recorded:
            yield from self.busy(self.around(3.5 * US, key + "/python"), "python")
        told = RECORDED.get(name)
        args: dict[str, Any] = {
            "Concrete Inputs": (told and told.concrete) or [""] * len(dims),
            "Input type": told.types if told else [BF16] * len(dims),
            "Input Dims": dims,
        }
        sequence: dict[str, Any] = {}
        if node:
            self.sequence += 1
            self.sequences[key] = self.sequence
            sequence = {"Sequence number": self.sequence, "Fwd thread id": 0}
        inner = self._dispatch(name, key, tasks, args | sequence)
        if around is None:
            yield from inner
            return
        with self.operator(around, **sequence):
            yield from self.busy(self.around(1.6 * US, key + "/outer"), "dispatch")
            yield from inner
            yield from self.busy(self.around(0.7 * US, key + "/outer_after"), "dispatch")

    def _dispatch(self, name: str, key: str, tasks: list[Task], args: dict[str, Any]) -> Program:
        extra = self.plan.dispatch.at(self.rank, self.step)
        with self.operator(name, **args):
            yield from self.busy(self.around(5 * US, key + "/dispatch") + extra, "dispatch")
            for i, task in enumerate(tasks):
                yield from self.launch(task, f"{key}/{i}")
            yield from self.busy(self.around(1.2 * US, key + "/after"), "dispatch")

    def autograd(self, name: str, key: str, *inside: Program) -> Program:
        """A node of autograd's engine around operators, for the operator at a place."""
        args: dict[str, Any] = {}
        if key in self.sequences:
            args = {"Sequence number": self.sequences[key], "Fwd thread id": 1}
        with self.operator(f"autograd::engine::evaluate_function: {name}", **args):
            yield from self.busy(2.0 * US, "dispatch")
            with self.operator(name, **args):
                yield from self.busy(1.0 * US, "dispatch")
                for program in inside:
                    yield from program
                yield from self.busy(0.6 * US, "dispatch")
            yield from self.busy(0.4 * US, "dispatch")

    def noisy(self, ns: float, key: str) -> float:
        """A kernel's time with its noise."""
        return ns * (1 + self.plan.noise_ratio * self.random(key + "/noise"))

    def math(self, key: str, flop: float, bytes_count: float, *, name: str) -> Task:
        """A kernel of model math; its utilization is its shape's own."""
        ideal = flop / self.node.flop_per_ns
        roofline = max(ideal, bytes_count / self.node.bytes_per_ns)
        # Equal products on equal devices are equally efficient, wherever they stand.
        below = 1.32 + 0.05 * normal(0, 0, 0, f"{name}/{flop}/{bytes_count}")
        below *= 1 + self.plan.slow.at(self.rank, self.step)
        units = self.node.units
        rounds = 3
        beyond = self.plan.wave.at(self.rank, self.step)
        blocks = rounds * units + round(beyond * units)
        # Rounds that are not full lengthen the arithmetic; memory may take longer all the same.
        wave = max(ideal * -(-blocks // units) / (blocks / units), roofline) / roofline
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
        """A matrix product of m × k and k × n."""
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
        """A copy, or a memset."""
        return Task(
            name=name,
            lane="copy",
            stream=stream,
            account=account,
            alone_ns=ns,
            shape={"bytes": bytes_count},
        )

    def collect(self, ns: float) -> Program:
        """Python's garbage collector."""
        cuda = self.node.flavour == "cuda"
        with (
            self.row("chopper::gc::2", "cpu_op", **{"External id": 0})
            if cuda
            else self.row("Python GC", "python_function")
        ):
            yield from self.busy(ns, "gc")

    def extras(self, key: str) -> Program:
        """Add what the plan asks for at the beginning of each layer."""
        plan, rank, step = self.plan, self.rank, self.step
        if self.graph_tasks is not None:
            return
        yield from self.busy(plan.python.at(rank, step), "python")
        if collecting_ns := plan.collection.at(rank, step):
            yield from self.collect(collecting_ns)
        if profiler_ns := plan.profiler.at(rank, step):
            with self.row("Activity Buffer Request", "overhead"):
                yield from self.busy(profiler_ns, "profiler")
        if allocator_ns := plan.allocator.at(rank, step):
            with self.operator("aten::empty"):
                yield from self.busy(2 * US, "dispatch")
                yield from self.runtime("Malloc", allocator_ns, "allocator")
                yield from self.busy(1 * US, "dispatch")
        if query_ns := plan.query.at(rank, step):
            yield from self.runtime("FuncGetAttributes", query_ns, "runtime")
        if fill_ns := plan.fill.at(rank, step):
            task = self.copy(
                self.node.memset, "copy.memset", fill_ns, self.compute, round(fill_ns * 1000)
            )
            yield from self.op("aten::zero_", key + "/fill", [task], dims=[[round(fill_ns * 500)]])
        if copy_ns := plan.copy.at(rank, step):
            yield from self.offload(copy_ns, key + "/offload")

    def offload(self, copy_ns: float, key: str) -> Program:
        """A copy from the host that the device needs."""
        stream = self.node.copy_stream
        bytes_count = round(copy_ns * self.node.bus_bytes_per_s / 1e9)
        task = self.copy(
            self.node.copy_to_device, "copy.host_to_device", copy_ns, stream, bytes_count
        )
        if self.copied_out is not None:
            # The device's buffer is free once the layer before is under way.
            yield from self.wait_stream(stream, self.copied_out)
        with self.operator("aten::copy_"):
            yield from self.busy(5 * US, "dispatch")
            yield from self.launch(task, key, call=self.node.prefix + "MemcpyAsync")
            yield from self.busy(1 * US, "dispatch")
        needed: Event | None = task.done
        if self.plan.copy_ahead:
            needed, self.offloaded = self.offloaded, task.done
        if needed is not None:
            yield from self.wait_stream(self.compute, needed)
