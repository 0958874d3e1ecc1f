"""What injections add to the program at the beginning of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper.validation.model.host import US, Host

if TYPE_CHECKING:
    from chopper.validation.model.engine import Program


class Extras(Host):
    """A program with knobs to make it slower."""

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
            yield from self.busy(2 * US, "dispatch")
            yield from self.runtime("Malloc", allocating, "allocator")
            yield from self.busy(1 * US, "dispatch")
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
        """A copy from the host that the device needs."""
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
        yield from self.busy(5 * US, "dispatch")
        yield from self.launch(task, key + "/offload", call=self.node.prefix + "MemcpyAsync")
        yield from self.busy(1 * US, "dispatch")
        self.span("aten::copy_", "cpu_op", start, **{"External id": external})
        before = self.offloaded.pop("ahead", None)
        if self.plan.copy_ahead:
            self.offloaded["ahead"] = task.done
            if before is not None:
                yield from self.wait_stream(self.compute, before)
        else:
            yield from self.wait_stream(self.compute, task.done)
