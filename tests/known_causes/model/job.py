"""The model's training job: a Llama-like step under FSDP, with knobs that injections turn.

Every rank runs the same program: next batch, copy it to the device, forward with parameters
gathered one layer ahead, backward on autograd's thread with gradients reduced behind it, optimizer,
loss read back. Knobs add work of one kind at one place; at zero they change nothing, not even the
noise.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tests.known_causes.model.engine import Collective, Device, Event, Program, Simulation, Task
from tests.known_causes.model.host import BF16, US, normal
from tests.known_causes.model.layers import TOKENS, Layers
from tests.known_causes.model.machine import MACHINES
from tests.known_causes.model.records import Groups, RankRecord, Recording
from tests.known_causes.model.sharded import LAYER_PARAMETERS

if TYPE_CHECKING:
    from tests.known_causes.model.plan import Clock, Plan


def simulate(plan: Plan) -> Recording:
    """Run the job."""
    node = MACHINES[plan.flavour]
    simulation = Simulation()
    records = [RankRecord(rank) for rank in range(plan.ranks)]
    groups = Groups(plan)
    # The clock's dips count from when the first traced step begins, which the warm-up decides.
    begins = Event()
    clocks: list[list[tuple[int, float, int]]] = [
        [(0, node.reference_hz, 0)] for _ in range(plan.ranks)
    ]
    for record in records:
        changes = clocks[record.rank]
        dips = [d for d in plan.clocks if d.ranks is None or record.rank in d.ranks]
        for dip in dips:
            if dip.begin_ns is None:
                changes[0] = (0, node.reference_hz * dip.ratio, dip.reason)
        device = Device(
            simulation=simulation,
            rank=record.rank,
            clock_hz=changes[0][1],
            reference_hz=node.reference_hz,
            contention_ratio=1.0 + plan.contention.at(record.rank, 0),
            stream_gap_ns=plan.stream_gap_ns,
            event_gap_ns=plan.event_gap_ns,
            leave_ns=partial(_leave_ns, plan, record.rank),
        )
        host = _Program(plan, node, simulation, device, record, groups, begins)
        simulation.spawn(host.train())
        _schedule_clock(dips, device, begins, changes)
    simulation.run()
    for record in records:
        record.tasks.sort(key=lambda t: (t.start_ns, -t.end_ns))
    return Recording(plan, node, records, groups.listed(), clocks, simulation.now_ns)


def _schedule_clock(
    dips: list[Clock], device: Device, begins: Event, changes: list[tuple[int, float, int]]
) -> None:
    _, usual_hz, usual_reason = changes[0]

    def start() -> None:
        zero = device.simulation.now_ns
        for dip in dips:
            if dip.begin_ns is None:
                continue
            hz = device.reference_hz * dip.ratio
            begin, end = zero + dip.begin_ns, zero + (dip.end_ns or dip.begin_ns)
            changes.extend([(begin, hz, dip.reason), (end, usual_hz, usual_reason)])
            device.set_clock(begin, hz)
            device.set_clock(end, usual_hz)
        changes.sort(key=lambda change: change[0])

    begins.on(start)


def _leave_ns(plan: Plan, rank: int, collective: Collective) -> int:
    key = f"leave/{collective.group}/{collective.sequence}"
    return round(300 + 100 * normal(plan.seed, rank, 0, key))


class _Program(Layers):
    """The loop around the model."""

    def train(self) -> Program:
        plan = self.plan
        yield from self.busy(10 * US * (self.rank + 1), "python")
        for step in range(plan.warmup_steps + plan.steps):
            self.step = step
            self.sequences.clear()
            if step == plan.warmup_steps:
                self.record.recording_ns = self.now
                yield from self.busy(20 * US, "python")
                if self.begins.time_ns is None:
                    self.begins.fire(self.now)
            start = self.now
            if step < plan.warmup_steps:
                yield from self.one_step()
                continue
            number = 10 + step
            with self.row(f"ProfilerStep#{number}", "user_annotation"):
                yield from self.one_step()
            self.record.steps.append((number, start, self.now))
        self.record.tasks = self.device.tasks

    def one_step(self) -> Program:
        plan, rank, step = self.plan, self.rank, self.step
        yield from self.limit_lead()
        yield from self.next_batch()
        yield from self.copy_batch()
        if barrier_ns := plan.barrier.at(rank, step):
            with self.row("c10d::barrier", "cpu_op", **{"External id": 0}):
                yield from self.busy(barrier_ns, "collective_wait")
        yield from self.busy(6 * US, "python")
        with self.row("Optimizer.zero_grad#AdamW.zero_grad", "user_annotation"):
            yield from self.busy(self.around(9 * US, "zero_grad"), "python")
        yield from self.forward()
        for i in range(plan.synchronization_count):
            yield from self.item(f"further{i}", plan.synchronization.at(rank, step))
        yield from self.backward()
        if not self.quiet:
            yield from self.optimizer()
        if not plan.ahead:
            yield from self.item("loss", 0)
        yield from self.busy(plan.before_boundary.at(rank, step), "python")
        yield from self.busy(self.around(15 * US, "logging"), "python")

    def limit_lead(self) -> Program:
        """Wait for the forward of the step before."""
        if not self.plan.ahead or self.forward_done is None:
            return
        self.correlation += 1
        with self.row(
            self.node.prefix + "EventSynchronize", "cuda_runtime", correlation=self.correlation
        ):
            yield from self.until(self.forward_done, "synchronization")
            yield from self.busy(4 * US, "synchronization")

    def next_batch(self) -> Program:
        with self.row(
            "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "user_annotation"
        ):
            yield from self.busy(self.around(45 * US, "batch"), "data")
            if collecting_ns := self.plan.data_collection.at(self.rank, self.step):
                yield from self.collect(collecting_ns)
                yield from self.busy(20 * US, "data")
            yield from self.busy(self.plan.data.at(self.rank, self.step), "data")

    def copy_batch(self) -> Program:
        yield from self.busy(5 * US, "python")
        shape: dict[str, Any] = {
            "Concrete Inputs": ["", "", "True"],
            "Input type": ["long int", "long int", "Scalar"],
            "Input Dims": [[1, TOKENS], [1, TOKENS], []],
        }
        task = self.copy(
            self.node.copy_to_device, "copy.host_to_device", 9400.0, self.compute, 8 * TOKENS
        )
        with self.operator("aten::to"):
            yield from self.busy(4 * US, "dispatch")
            with self.operator("aten::copy_", **shape):
                yield from self.busy(3 * US, "dispatch")
                yield from self.launch(task, "batch", call=self.node.prefix + "MemcpyAsync")
                yield from self.busy(1 * US, "dispatch")
            yield from self.busy(1 * US, "dispatch")

    def optimizer(self) -> Program:
        with self.row("Optimizer.step#AdamW.step", "user_annotation"):
            yield from self.busy(25 * US, "python")
            for event in self.reduced:
                yield from self.wait_stream(self.compute, event)
            self.reduced.clear()
            self.gathered.clear()
            shard = self.plan.layers * LAYER_PARAMETERS // len(self.groups.shard[self.rank])
            task = self.vector(
                "optimizer", 14.0 * shard, "FusedAdamMathFunctor<float, 4>", "compute.optimizer"
            )
            yield from self.op(
                "aten::_fused_adamw_",
                "optimizer",
                [task],
                dims=[[[shard]]] * 4,
            )
            self.copied_out = task.done

    def item(self, key: str, wake_ns: float) -> Program:
        """Read a value back: a copy to the host, and waiting for it."""
        yield from self.busy(4 * US, "python")
        task = self.copy(self.node.copy_to_host, "copy.device_to_host", 7600.0, self.compute, 4)
        shape: dict[str, Any] = {"Concrete Inputs": [""], "Input type": [BF16], "Input Dims": [[]]}
        with self.operator("aten::item", **shape):
            yield from self.busy(2 * US, "synchronization")
            with self.operator("aten::_local_scalar_dense", **shape):
                yield from self.busy(2 * US, "synchronization")
                if self.node.flavour == "cuda":
                    call = self.node.prefix + "MemcpyAsync"
                    yield from self.launch(task, key + "/item", call=call)
                    with self.runtime_call(self.node.prefix + "StreamSynchronize"):
                        yield from self.until(task.done, "synchronization")
                        yield from self.busy(5 * US + wake_ns, "synchronization")
                else:
                    yield from self.blocking_copy(task, wake_ns)
                yield from self.busy(1 * US, "synchronization")
            yield from self.busy(1 * US, "synchronization")

    def blocking_copy(self, task: Task, wake_ns: float) -> Program:
        task.call = self.node.prefix + "MemcpyWithStream"
        task.external = self.external
        task.launch_ns = self.now
        task.available_ns = self.now + 4 * US
        self.device.stream(task.stream).push(task)
        with self.runtime_call(task.call, bytes=task.shape["bytes"]) as task.correlation:
            yield from self.until(task.done, "synchronization")
            yield from self.busy(5 * US + wake_ns, "synchronization")
        task.returned_ns = self.now
