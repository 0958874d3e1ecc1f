"""The distinct works of each rank: what the factors of computing rest on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.factors import Factors
from chopper.analyzers.events.groups import sum_by, time_in
from chopper.analyzers.trace.columns import ints
from chopper.tables import Table, column, optional

COLUMNS = (
    column("rank", "Rank that the kernel ran on.", "int32"),
    optional("op", "Operator that launched the kernel; null where none did."),
    column("kernel", "Kernel; one row per operator, shapes, kernel and grid."),
)


@dataclass(frozen=True)
class Works:
    """The distinct works of one rank: an event of each (row, DEVICE_EVENT), and its instances."""

    run: Attribution
    rank: int
    factors: Factors
    first: np.ndarray
    events: pa.Table
    count: np.ndarray

    def time_in(self, cause: str) -> np.ndarray:
        """Return the time of each work's events in a cause. PIECE -> ns."""
        rows = np.flatnonzero(self.factors.signature >= 0)
        time_ns = time_in(self.run.pieces, np.full(len(rows), self.rank), rows, cause)
        return sum_by(self.factors.signature[rows], time_ns, len(self.first))


Columns = tuple[np.ndarray, dict[str, object]]
"""Mask of the works that a view shows, and its columns but those that all such views have."""


def works_table(
    table: Table, run: Attribution, columns_of: Callable[[Works], Columns | None]
) -> pa.Table:
    """Build a view of works from its columns of each rank; None leaves a rank out."""
    parts = []
    for rank, factors in run.factors.items():
        events = run.joined[rank].device_event
        size = len(factors.by_signature.value)
        rows = np.flatnonzero(factors.signature >= 0)
        group = factors.signature[rows]
        first = np.zeros(size, dtype=np.int64)
        first[group[::-1]] = rows[::-1]
        count = np.bincount(group, minlength=size)
        works = Works(run, rank, factors, first, events.take(first), count)
        found = columns_of(works)
        if found is not None:
            shown, columns = found
            columns |= {
                "rank": np.full(size, rank),
                "op": run.links[rank]["op"].take(first),
                "kernel": works.events["name"],
                "count": count,
                "time_ns": sum_by(group, ints(events, "dur_ns")[rows], size),
            }
            parts.append(table.of(columns).filter(pa.array(shown)))
    return table.joined(parts)
