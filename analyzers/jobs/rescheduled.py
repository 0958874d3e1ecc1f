"""A job under another schedule, with other virtual stages or more micro-batches.

The model's work is spread over the stages as recorded: a new stage takes the share of a forward (a
backward) that the layers at its place took. Transfers between stages take the median of their
type; what runs before and after the pipeline stays as it was.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from chopper import wording as fmt
from chopper.analyzers.jobs.model import Graph, Job, WorkerOrder, step_ns
from chopper.analyzers.jobs.operations import P2P
from chopper.analyzers.jobs.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
    PASSING,
    SCHEDULES,
    Action,
)
from chopper.analyzers.jobs.whatif import micro_batches_of, schedule_of, weight_ratio
from chopper.errors import UsageError

_WEIGHT_RATIO = 0.5
"""Part of a backward that is weight gradients where the recording does not split it."""


@dataclass(frozen=True)
class Shape:
    """What a pipeline runs: its schedule, stages per rank, and micro-batches per step."""

    schedule: str
    virtual_stages: int
    micro_batches: int


class Rescheduled:
    """A pipeline that can be simulated in other shapes.

    Args:
        job: its model.
        own_ns: times of its operations, as recorded or fixed; (nodes, steps).

    Raises:
        UsageError: it has no pipeline, or its schedule is not known.
    """

    def __init__(self, job: Job, own_ns: np.ndarray) -> None:
        nodes = job.nodes
        schedule = schedule_of(job)
        if nodes.stages_count == 1:
            raise UsageError("another schedule: the job has one pipeline stage")
        if schedule is None or schedule == "dualpipe":
            why = "is not one that Chopper knows" if schedule is None else "is dualpipe"
            raise UsageError(
                f"another schedule: the order of actions that ran {why}, so the work of each stage "
                "and micro-batch cannot be placed; known: 1f1b, gpipe, interleaved, zb1p"
            )
        self.job, self.own_ns = job, own_ns
        self.shape = Shape(schedule, nodes.virtual_stages, micro_batches_of(nodes))
        self.weight_ratio = weight_ratio(job, own_ns)

    def step_ns(self, shape: Shape) -> np.ndarray:
        """Simulate the steps in a shape, launch delays left out.

        Raises:
            UsageError: the schedule does not allow that shape.
        """
        p = self.job.nodes.stages_count
        order = SCHEDULES[shape.schedule](p, shape.micro_batches, shape.virtual_stages)
        graph, times = _Builder(self, shape, order).build()
        return step_ns(graph.simulate(times))

    def notes(self, shape: Shape) -> list[str]:
        """Say what a prediction for a shape takes for granted."""
        notes = ["memory is not modelled: check that the activations in flight fit"]
        if shape.schedule in ("zb1p", "dualpipe") and self.weight_ratio is None:
            notes.append(
                f"{shape.schedule} splits a backward; its weight part is taken to be half of it, "
                "since the recording does not tell the parts apart"
            )
        if shape.schedule == "dualpipe":
            notes.append("dualpipe: a forward and a backward that overlap take the sum of both")
        if shape.virtual_stages != self.shape.virtual_stages:
            notes.append(
                "layers are taken to be split evenly along the recorded stages; what makes a "
                "worker slow goes with its layers"
            )
        if shape.micro_batches != self.shape.micro_batches:
            per_batch = shape.micro_batches / self.shape.micro_batches
            notes.append(f"a step does {fmt.factor(per_batch)} the work")
        return notes

    def work_ns(self, worker_of: np.ndarray, stages: int) -> dict[str, np.ndarray]:
        """Return the times of a replica's forwards, backwards and their weight parts.

        Args:
            worker_of: its workers.
            stages: stages to spread the work over.

        Returns:
            Role → (stages, micro-batches, steps).
        """
        nodes, shape = self.job.nodes, self.shape
        recorded = nodes.stages_count * shape.virtual_stages
        size = (recorded, shape.micro_batches, self.own_ns.shape[1])
        work = {role: np.zeros(size) for role in (FORWARD, BACKWARD, BACKWARD_WEIGHT)}
        for node in np.flatnonzero(nodes.is_compute & np.isin(nodes.worker, worker_of)).tolist():
            role = FORWARD if nodes.role[node] == FORWARD else BACKWARD
            work[role][int(nodes.global_stage[node]), self._batch[node]] += self.own_ns[node]
        ratio = _WEIGHT_RATIO if self.weight_ratio is None else self.weight_ratio
        work[BACKWARD_WEIGHT] = work[BACKWARD] * ratio
        edges, new = np.arange(recorded + 1) / recorded, np.arange(stages + 1) / stages
        share = np.clip(
            np.minimum(new[1:, None], edges[1:]) - np.maximum(new[:-1, None], edges[:-1]), 0, None
        )
        return {role: np.tensordot(share * recorded, of, axes=1) for role, of in work.items()}

    @cached_property
    def _batch(self) -> dict[int, int]:
        """Running number of the micro-batch of each compute on its worker and stage."""
        nodes, batch = self.job.nodes, {}
        for order in self.job.orders:
            seen: dict[tuple[bool, int], int] = defaultdict(int)
            open_parts: dict[int, deque[int]] = defaultdict(deque)
            for node in order.compute:
                role, stage = nodes.role[node], int(nodes.global_stage[node])
                if role == BACKWARD_WEIGHT and open_parts[stage]:
                    batch[node] = open_parts[stage].popleft()
                elif role in COMPUTE:
                    key = (bool(role == FORWARD), stage)
                    batch[node] = seen[key]
                    seen[key] += 1
                    if role == BACKWARD_INPUT:
                        open_parts[stage].append(batch[node])
        return batch


class _Builder:
    """Builds the graph of a job in a shape."""

    def __init__(self, of: Rescheduled, shape: Shape, order: list[list[Action]]) -> None:
        self.of, self.shape, self.order = of, shape, order
        job = of.job
        nodes = job.nodes
        self.kept = np.flatnonzero(~np.isin(nodes.role, (*COMPUTE, *P2P)))
        self.new_of = {int(node): at for at, node in enumerate(self.kept)}
        self.columns: dict[str, list[object]] = {
            name: getattr(nodes, name)[self.kept].tolist()
            for name in ("role", "type", "worker", "global_stage", "turn", "instance")
        }
        self.times = [*of.own_ns[self.kept]]
        self.transfer_ns = {
            role: job.ideal_ns[nodes.role == role].mean()
            for role in P2P
            if (nodes.role == role).any()
        }

    def build(self) -> tuple[Graph, np.ndarray]:
        """Return the graph, and the times of its nodes."""
        nodes = self.of.job.nodes
        orders = [WorkerOrder() for _ in nodes.ranks]
        for replica in np.unique(nodes.replica):
            workers = np.flatnonzero(nodes.replica == replica)
            workers = workers[np.argsort(nodes.stage[workers], kind="stable")]
            p = nodes.stages_count
            work = self.of.work_ns(workers, p * self.shape.virtual_stages)
            for rank, worker in enumerate(workers.tolist()):
                self._compute(orders[worker], worker, self.order[rank], work)
        for worker, order in enumerate(orders):
            self._surround(order, self.of.job.orders[worker])
        columns: dict[str, Any] = {n: np.array(values) for n, values in self.columns.items()}
        return Graph(replace(nodes, **columns), orders), np.array(self.times)

    def _add(self, role: str, worker: int, action: Action, times: np.ndarray) -> int:
        # Types are not asked for in a simulated shape.
        values = (role, 0, worker, action.stage, action.micro_batch, -1)
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)
        self.times.append(times)
        return len(self.times) - 1

    def _compute(
        self, order: WorkerOrder, worker: int, actions: list[Action], work: dict[str, np.ndarray]
    ) -> None:
        last = len(work[FORWARD]) - 1
        for action in actions:
            at = action.stage, action.micro_batch % self.of.shape.micro_batches
            weight = work[BACKWARD_WEIGHT][at]
            times = {
                FORWARD: work[FORWARD][at],
                BACKWARD: work[BACKWARD][at],
                BACKWARD_INPUT: work[BACKWARD][at] - weight,
                BACKWARD_WEIGHT: weight,
            }[action.kind]
            node = self._add(action.kind, worker, action, times)
            order.compute.append(node)
            if action.kind not in PASSING:
                continue
            forward = action.kind == FORWARD
            direction = FORWARD if forward else BACKWARD
            if action.stage != (0 if forward else last):
                order.receive.update(self._transfer(f"{direction}_recv", node, worker, action))
            if action.stage != (last if forward else 0):
                order.send.update(self._transfer(f"{direction}_send", node, worker, action))

    def _transfer(
        self, role: str, node: int, worker: int, action: Action
    ) -> Iterator[tuple[int, int]]:
        if role in self.transfer_ns:
            times = np.full(self.of.own_ns.shape[1], self.transfer_ns[role])
            yield node, self._add(role, worker, action, times)

    def _surround(self, order: WorkerOrder, recorded: WorkerOrder) -> None:
        """Place what is no compute where it was: before, during and after the computes."""
        nodes = self.of.job.nodes
        new = self.new_of
        first = order.compute[0]
        order.before = [(new[node], first) for node, _ in recorded.before]
        place = {node: at / len(recorded.compute) for at, node in enumerate(recorded.compute)}
        for node in recorded.compute:
            if nodes.role[node] not in COMPUTE:
                at = round(place[node] * len(order.compute))
                order.compute.insert(at, new[node])
        for node, follows in recorded.during:
            at = int(place.get(follows, 0.0) * len(order.compute))
            order.during.append((new[node], order.compute[at] if follows >= 0 else -1))
        order.after = [(new[node], new.get(follows, -1)) for node, follows in recorded.after]
