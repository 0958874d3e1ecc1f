"""Who takes part in the communication of spans, and how it is numbered.

Where the file does not name the group, it follows from the worker's place: sends go to the next
stage of the same data-parallel rank, gradients are summed over the replicas of a stage.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from chopper.collectors.formats.parsed import NO_VALUE, dictionary, numbers, to_arrow
from chopper.collectors.formats.spans.columns import Scope, Spans
from chopper.tables import TABLES

_EARLY_NS = 1_000_000
"""Clocks that agree are not off by more."""


class Members(NamedTuple):
    """Who takes part in spans of one operation of one worker.

    Attributes:
        channel: what their numbers count: messages of one pass, or calls of one operation.
    """

    collective: str
    channel: str
    group: str | None = None
    ranks: tuple[int, ...] = ()
    source: int = NO_VALUE
    target: int = NO_VALUE


class Communication:
    """The communication of the workers: who takes part in each span, and its number.

    Attributes:
        members: each kind of communication of each worker.
        kind: of each span, an index into these; -1 for computing.
    """

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self.stage, self.data_rank = spans.place("stage"), spans.place("data_rank")
        rows = np.flatnonzero(spans.communicates)
        group = np.full(len(rows), -1) if spans.group is None else spans.group[rows]
        size = (len(spans.workers), len(spans.names), len(spans.groups) + 1)
        keys = np.ravel_multi_index((spans.worker[rows], spans.op[rows], group + 1), size)
        distinct, kind = np.unique(keys, return_inverse=True)
        self.kind = np.full(len(spans.op), -1, dtype=np.int64)
        self.kind[rows] = kind
        self._of_group: dict[int, tuple[int, ...]] = {}
        for number in np.unique(group[group >= 0]).tolist():
            self._of_group[number] = tuple(np.unique(spans.rank[rows][group == number]).tolist())
        worker, op, code = np.unravel_index(distinct, size)
        self._first = np.searchsorted(worker, np.arange(len(spans.workers) + 1)).tolist()
        each = zip(worker.tolist(), op.tolist(), (code - 1).tolist(), strict=True)
        self.members = [self._members(*one) for one in each]

    def _members(self, worker: int, op: int, group: int) -> Members:
        """Return who takes part in an operation of a worker."""
        spans, rank = self._spans, int(self._spans.workers[worker])
        name, operation = spans.names[op], spans.operations[op]
        is_pair = operation.collective in ("send", "recv")
        channel = f"pipeline {operation.action}" if is_pair else name
        one = Members(operation.collective or name, channel)
        if is_pair:
            peer = self._peer(worker, 1 if operation.scope == "next" else -1)
            if peer is None or peer == rank:
                return one
            ends = (rank, peer) if operation.collective == "send" else (peer, rank)
            return one._replace(
                group=channel, ranks=tuple(sorted(ends)), source=ends[0], target=ends[1]
            )
        if group >= 0:
            return one._replace(group=spans.groups[group], ranks=self._of_group[group])
        of = self._group(worker, operation.scope)
        return one if of is None else one._replace(group=of[0], ranks=of[1])

    def _peer(self, worker: int, way: int) -> int | None:
        """Return the rank one stage further, or back, of the same data-parallel rank."""
        if self.stage is None:
            return None
        stage = (self.stage[worker] + way) % (self.stage.max() + 1)
        there = self._ranks((self.stage == stage) & self._alike(self.data_rank, worker))
        return there[0] if len(there) == 1 else None

    def _group(self, worker: int, scope: Scope | None) -> tuple[str, tuple[int, ...]] | None:
        """Return name and ranks of a group; None where the file does not tell them."""
        if scope == "all":
            return "all workers", tuple(self._spans.workers.tolist())
        if self.stage is None or scope is None:
            return None
        if scope == "replicas":
            stage = self.stage[worker]
            return f"data, stage {stage}", self._ranks(self.stage == stage)
        ends = (self.stage == self.stage.min()) | (self.stage == self.stage.max())
        ranks = self._ranks(ends & self._alike(self.data_rank, worker))
        of = "" if self.data_rank is None else f", data rank {self.data_rank[worker]}"
        return f"embedding{of}", ranks

    def _ranks(self, mask: np.ndarray) -> tuple[int, ...]:
        return tuple(self._spans.workers[mask].tolist())

    def _alike(self, places: np.ndarray | None, worker: int) -> np.ndarray:
        """Return the mask of the workers at the same place."""
        if places is None:
            return np.ones(len(self._spans.workers), dtype=bool)
        return np.asarray(places == places[worker])

    def _own(self, worker: int) -> list[Members]:
        """Return the kinds of communication of a worker."""
        return self.members[self._first[worker] : self._first[worker + 1]]

    def groups_of(self, worker: int) -> list[dict[str, Any]]:
        """Return the process groups of a worker, as manifests list them."""
        own = (m for m in self._own(worker) if m.group and m.source == NO_VALUE)
        groups = {m.group: [*m.ranks] for m in own}
        return [
            {"pg_name": name, "pg_size": len(ranks), "ranks": ranks}
            for name, ranks in groups.items()
        ]

    def contradicts(self, start_ns: np.ndarray, end_ns: np.ndarray) -> bool:
        """Return whether workers leave what another of them enters later, by their times.

        Nobody leaves a collective, or has received, before all others have begun; what is sent may
        be on its way.
        """
        names = {name: at for at, name in enumerate(dict.fromkeys(m.group for m in self.members))}
        group = np.array([names[m.group] if m.ranks else -1 for m in self.members] + [-1])
        rows = np.flatnonzero(group[self.kind] >= 0)
        keys = group[self.kind[rows]] * (int(self._number[rows].max(initial=0)) + 1)
        _, instance = np.unique(keys + self._number[rows], return_inverse=True)
        latest_ns = np.full(len(rows), np.iinfo(np.int64).min)
        np.maximum.at(latest_ns, instance, start_ns[rows])
        waits = np.array([m.collective != "send" for m in self.members] + [False])
        early = latest_ns[instance] - end_ns[rows] > _EARLY_NS
        return bool((early & waits[self.kind[rows]]).any())

    @cached_property
    def _number(self) -> np.ndarray:
        """Number of each span in its channel, counted on from step to step; -1 for computing."""
        spans = self._spans
        names = dict.fromkeys(m.channel for m in self.members)
        channels = {name: at for at, name in enumerate(names)}
        channel = np.array([channels[m.channel] for m in self.members] + [-1])[self.kind]
        step = np.zeros(len(channel), dtype=np.int64)
        if spans.step is not None:
            step = np.unique(spans.step, return_inverse=True)[1]
        order = np.lexsort((spans.start_ns, self.kind, step, spans.worker))
        keys = np.stack([spans.worker, step, self.kind])[:, order]
        begins = np.append(True, (np.diff(keys) != 0).any(axis=0))
        nth = np.empty(len(order), dtype=np.int64)
        position = np.arange(len(order))
        nth[order] = position - np.maximum.accumulate(np.where(begins, position, 0))
        if spans.sequence is not None:
            nth = np.where(spans.sequence >= 0, spans.sequence, nth)
        number = (step * len(channels) + channel) * (int(nth.max(initial=0)) + 1) + nth
        return np.where(channel < 0, NO_VALUE, number)

    def table(self, worker: int, rows: np.ndarray, moved: np.ndarray) -> pa.Table:
        """Return COLLECTIVE of a worker's spans, by their rows in DEVICE_EVENT."""
        of = np.flatnonzero(self.kind[rows] >= 0)
        of = of[np.argsort(moved[of])]
        kind = self.kind[rows[of]] - self._first[worker]
        members = self._own(worker)
        texts: dict[str, list[str | None]] = {
            "collective": [m.collective for m in members],
            "group_name": [m.group for m in members],
            "group_ranks": [json.dumps(m.ranks) if m.ranks else None for m in members],
        }
        integers = {
            "group_size_count": [len(m.ranks) or NO_VALUE for m in members],
            "source_rank_id": [m.source for m in members],
            "target_rank_id": [m.target for m in members],
        }
        columns = {
            "source": dictionary(np.ones(len(of), dtype=np.int32), [None, "device_event"]),
            "row": to_arrow(moved[of]),
            "sequence_id": numbers(self._number[rows[of]], pa.int64()),
            **{
                name: dictionary(kind.astype(np.int32) + 1, [None, *values])
                for name, values in texts.items()
            },
            **{
                name: numbers(np.array(values, dtype=np.int64)[kind], pa.int64())
                for name, values in integers.items()
            },
        }
        declared = TABLES["collective"]
        absent = {f.name: pa.nulls(len(of), f.type) for f in declared.arrow}
        return declared.of({**absent, **columns})
