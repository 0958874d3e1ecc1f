"""The distinct works of one rank: what the factors of computing rest on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.causes.factors import Factors
from chopper.analyzers.events.groups import sum_by, text_rows, time_in
from chopper.analyzers.trace.columns import ints, strings
from chopper.tables import Table, column, optional

COLUMNS = (
    column("rank", "Rank that the kernel ran on.", "int32"),
    optional("op", "Operator that launched the kernel; null where none did."),
    column("kernel", "Kernel. Same operator, shapes, kernel and grid are one row."),
)


@dataclass(frozen=True)
class Works:
    """The distinct works of one rank.

    Attributes:
        signature: work of each event, -1 for none.
        first: an event of each work.
        count, time_ns: instances and their device time.
    """

    rank: int
    events: pa.Table
    ops: pa.Table
    signature: np.ndarray
    first: np.ndarray
    count: np.ndarray
    time_ns: np.ndarray

    def time_in(self, pieces: pa.Table, cause: str) -> np.ndarray:
        """Return the time of each work's events in a cause. PIECE -> ns."""
        rows = np.flatnonzero(self.signature >= 0)
        time_ns = time_in(pieces, np.full(len(rows), self.rank), rows, cause)
        return sum_by(self.signature[rows], time_ns, len(self.first))

    def table(self, declared: Table, rows: np.ndarray, columns: dict[str, object]) -> pa.Table:
        """Build the rows of some works.

        Args:
            declared: table of a view.
            rows: works.
            columns: all but those of every work.
        """
        one = self.first[rows]
        return declared.of(
            {
                "rank": np.full(len(rows), self.rank),
                "op": text_rows(strings(self.ops, "op"), one),
                "kernel": text_rows(strings(self.events, "name"), one),
                "count": self.count[rows],
                "time_ns": self.time_ns[rows],
                **columns,
            }
        )


def works_of(run: Attributed, rank: int, factors: Factors) -> Works:
    """Return the distinct works of a rank. DEVICE_EVENT, EVENT_LINK -> one row per work."""
    events = run.joined[rank].device_event
    size = len(factors.by_signature.value)
    rows = np.flatnonzero(factors.signature >= 0)
    group = factors.signature[rows]
    first = np.zeros(size, dtype=np.int64)
    first[group[::-1]] = rows[::-1]
    return Works(
        rank=rank,
        events=events,
        ops=run.links[rank],
        signature=factors.signature,
        first=first,
        count=np.bincount(group, minlength=size),
        time_ns=sum_by(group, ints(events, "dur_ns")[rows], size),
    )
