"""The file of a collector that reads once at each step's end, in the process that trains."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from chopper.storage.manifest import CollectorReport

if TYPE_CHECKING:
    from pathlib import Path

    from chopper.storage.streams import StreamWriter

_FLUSH_NS = 1_000_000_000


class StepReadings:
    """Rows of one declared table, on disk about once a second, and what each reading cost.

    Args:
        table: name of the table, and of its file.
    """

    def __init__(self, table: str) -> None:
        self.table = table
        self.problem: str | None = None
        """Why nothing is read any more."""
        self._writer: StreamWriter | None = None
        self._rows: list[tuple[Any, ...]] = []
        self._costs_ns: list[int] = []
        self._flushed_ns = 0

    def open(self, directory: Path) -> None:
        """Create the file.

        Raises:
            OutputError: it cannot be written.
        """
        from chopper.storage.streams import StreamWriter

        self._writer = StreamWriter(directory / f"{self.table}.arrow", self.table)

    def add(self, row: tuple[Any, ...], span_ns: int) -> None:
        """Keep a row, in the order of the table's columns, that took ``span_ns`` to read."""
        self._costs_ns.append(span_ns)
        self._rows.append(row)
        if time.monotonic_ns() - self._flushed_ns > _FLUSH_NS:
            self._flush()

    def _flush(self) -> None:
        from chopper.tables import TABLES

        self._flushed_ns = time.monotonic_ns()
        if self._rows and self._writer is not None:
            names = [column.name for column in TABLES[self.table].columns]
            columns = zip(*self._rows, strict=True)
            self._rows = []
            self._writer.write(dict(zip(names, columns, strict=True)))

    def close(self, name: str) -> CollectorReport:
        """Write what is left, close the file, say what became of the collector ``name``."""
        assert self._writer is not None
        try:
            self._flush()
        finally:
            self._writer.close()
        costs_ns = sorted(self._costs_ns)
        return CollectorReport(
            name=name,
            status="obtained" if self.problem is None else "failed",
            reason=self.problem,
            files=(f"{self.table}.arrow",),
            samples_count=len(costs_ns),
            dropped_count=0,
            call_p50_ns=costs_ns[len(costs_ns) // 2] if costs_ns else None,
            call_p99_ns=costs_ns[len(costs_ns) * 99 // 100] if costs_ns else None,
        )
