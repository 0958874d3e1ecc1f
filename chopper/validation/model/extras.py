"""Work that injections add to the program at the beginning of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper.validation.model.host import US, Host

if TYPE_CHECKING:
    from chopper.validation.model.engine import Event, Program


class Extras(Host):
    """A program with knobs to make it slower."""

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
