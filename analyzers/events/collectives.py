"""Matched collectives of a run."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.trace.collectives import LEFT_EARLY_NS
from chopper.analyzers.trace.columns import ints, run_starts


class Members:
    """The matched rows of the `communication` table, collective by collective.

    A collective of which a member has no row (it lies outside that rank's steps) is left out: the
    rank that came last may be the one that is missing.

    Attributes:
        table: those rows, sorted by collective (dense numbers in ``of``), then rank.
        first: first row of each collective.
        row: row of the device event.
        wait_ns: how long each rank waited; 0 for one that left before the last rank came.
        straggler: row of the rank that came last, per collective.
    """

    def __init__(self, table: pa.Table) -> None:
        matched = table.filter(table["instance_id"].is_valid())
        _, instance, counts = np.unique(
            ints(matched, "instance_id"), return_inverse=True, return_counts=True
        )
        matched = matched.filter(pa.array(counts[instance] == ints(matched, "rank_count")))
        order = np.lexsort((ints(matched, "rank"), ints(matched, "instance_id")))
        self.table = matched.take(pa.array(order)).combine_chunks()
        instance = ints(self.table, "instance_id")
        new = run_starts(instance)
        self.first = np.flatnonzero(new)
        self.of = np.cumsum(new) - 1
        self.rank = ints(self.table, "rank")
        self.row = ints(self.table, "event_row")
        self.arrival_ns = ints(self.table, "arrival_ns")
        self.left_ns = ints(self.table, "left_ns")
        self.ready_ns = ints(self.table, "ready_ns")
        until = np.minimum(self.ready_ns, self.left_ns)
        stayed = self.left_ns >= self.ready_ns - LEFT_EARLY_NS
        self.wait_ns = np.where(stayed, np.maximum(until - self.arrival_ns, 0), 0)
        by_arrival = np.lexsort((self.arrival_ns, self.of))
        self.straggler = by_arrival[np.append(self.first[1:], len(instance))[: len(self)] - 1]

    def __len__(self) -> int:
        return len(self.first)

    @property
    def rank_count(self) -> np.ndarray:
        """Ranks that took part in each collective."""
        return np.diff(np.append(self.first, len(self.of)))

    def total(self, values: np.ndarray) -> np.ndarray:
        """Sum of a column of the rows per collective."""
        return np.add.reduceat(values, self.first) if len(self) else values[:0]


def members_of(run: Attribution) -> Members:
    """Return the matched collectives of a run."""
    return Members(run.communication)
