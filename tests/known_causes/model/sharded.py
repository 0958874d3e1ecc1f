"""Parameters sharded over ranks: gathered a layer ahead, gradients reduced behind backward."""

from __future__ import annotations

from typing import Any

from tests.known_causes.model.engine import Collective, Event, Program, Task
from tests.known_causes.model.host import US, Host, normal

HIDDEN, FFN = 4096, 11008
LAYER_PARAMETERS = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN


class Sharded(Host):
    """FSDP: what it does before and after each layer."""

    def collective(self, name: str, members: tuple[int, ...], elements: int, stream: int) -> Task:
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
            noise = 1 + self.plan.noise_ratio * normal(
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
        collective = task.collective
        described: dict[str, Any] = {
            "Process Group Name": collective.group,
            "Process Group Ranks": str(list(collective.members)),
            "Group size": len(collective.members),
            "In msg nelems": collective.in_elements,
            "Out msg nelems": collective.out_elements,
            "dtype": "BFloat16",
            "Collective name": collective.name,
        }
        with self.operator(operator):
            yield from self.busy(4 * US, "dispatch")
            with self.operator("record_param_comms", **described):
                yield from self.busy(3 * US, "dispatch")
                with self.operator(backend, "user_annotation"):
                    yield from self.busy(2 * US, "dispatch")
                    yield from self.launch(task, key)
                yield from self.busy(1 * US, "dispatch")
            yield from self.busy(1 * US, "dispatch")

    def gather(self, layer: int, key: str) -> Program:
        """All-gather a layer's parameters on the communication stream."""
        stream = self.node.communication_stream
        members = self.groups.shard[self.rank]
        with self.row(f"FSDP::all_gather (layers.{layer})", "user_annotation"):
            task = self.collective("_allgather_base", members, LAYER_PARAMETERS, stream)
            yield from self.busy(5 * US, "python")
            yield from self.issue(
                "c10d::_allgather_base_",
                "nccl:_all_gather_base",
                task,
                key,
                self.copied_out,
                stream,
            )
            self.gathered[key] = task.done

    def unshard(self, layer: int, key: str, ahead: tuple[int, str] | None) -> Program:
        """Wait for a layer's parameters, copy them out, and gather the next layer's."""
        if self.quiet:
            return
        name = "pre_forward" if "forward" in key else "pre_backward"
        with self.row(f"FSDP::{name} (layers.{layer})", "user_annotation"):
            yield from self.busy(4 * US, "python")
            if key not in self.gathered:
                yield from self.gather(layer, key)
            yield from self.wait_stream(self.compute, self.gathered[key])
            task = self.shard_copy(key + "/copy_out", "direct_copy_kernel")
            yield from self.op(
                "fsdp::split_with_sizes_copy",
                key + "/copy_out",
                [task],
                dims=[[len(self.groups.shard[self.rank]), LAYER_PARAMETERS // 2], [], [], []],
            )
            self.copied_out = task.done
            if ahead is not None and ahead[0] >= self.plan.late_layers:
                yield from self.gather(*ahead)

    def shard_copy(self, key: str, kernel: str) -> Task:
        """FSDP's copy of a layer's parameters or gradients."""
        return self.vector(key, 4.0 * LAYER_PARAMETERS, kernel, account="compute.fsdp_copy")

    def reduce(self, layer: int, key: str) -> Program:
        """Reduce a layer's gradients on the communication stream."""
        if self.quiet:
            return
        with self.row(f"FSDP::post_backward_reduce (layers.{layer})", "user_annotation"):
            yield from self.busy(4 * US, "python")
            task = self.shard_copy(key + "/copy_in", "chunk_cat_cuda_kernel")
            yield from self.op(
                "fsdp::chunk_cat",
                key + "/copy_in",
                [task],
                dims=[[[LAYER_PARAMETERS]], [], [], [LAYER_PARAMETERS]],
            )
            stream = self.node.communication_stream
            members = self.groups.shard[self.rank]
            sent = self.collective("_reduce_scatter_base", members, LAYER_PARAMETERS, stream)
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
                whole = self.collective("allreduce", across, LAYER_PARAMETERS // 2, second)
                yield from self.issue(
                    "c10d::allreduce_", "nccl:all_reduce", whole, key + "/across", sent.done, second
                )
                self.reduced.append(whole.done)
