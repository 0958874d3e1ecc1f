"""Snapshots of torch's allocator joined to imported traces, or read alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper.errors import InputError
from chopper.storage.manifest import CollectorReport, Finding
from chopper.storage.run import StreamWriter

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from chopper.storage.manifest import RankManifest
    from chopper.storage.run import Run

_NAME = "memory_snapshot"


def attach(run: Run, files: dict[Path, int | None]) -> None:
    """Give each rank what a snapshot says of its device.

    Args:
        run: what they are joined to.
        files: snapshots, and the rank that each names, if it does.

    Raises:
        InputError: one cannot be read, or nobody can tell which rank it is of.
    """
    from chopper.collectors.snapshot import read_snapshot

    for file, rank in files.items():
        tables = read_snapshot(file)
        if not any(table.num_rows for table in tables.values()):
            raise InputError(f"{file}: a memory snapshot without a segment and without history")
        parts = [p for p in run.manifest.ranks if rank is None or p.rank == rank]
        taken = [part for part in parts if _give(run, part, tables, alone=len(parts) == 1)]
        if not taken:
            devices = sorted({d for t in tables.values() for d in t["device_id"].to_pylist()})
            raise InputError(
                f"{file}: a memory snapshot of device {', '.join(map(str, devices)) or 'none'}, "
                f"which none of the {len(parts)} ranks computes on; put the rank's number into the "
                "file's name, as snapshot-rank0.pickle"
            )
        for part in taken:
            part.collectors.append(
                CollectorReport(name=_NAME, status="obtained", files=(file.name,))
            )
            part.findings += _findings(file, part, tables["allocator_event"])


def _give(run: Run, part: RankManifest, tables: dict[str, pa.Table], *, alone: bool) -> bool:
    """Put a device's rows into a rank; whether there were any."""
    import pyarrow.compute as pc

    found = False
    for name, table in tables.items():
        mine = table
        if part.device_id is not None and not alone:
            mine = table.filter(pc.equal(table["device_id"], part.device_id))
        if mine.num_rows:
            run.put(part.rank, name, mine)
            found = True
    return found


def _findings(file: Path, part: RankManifest, events: pa.Table) -> list[Finding]:
    if not events.num_rows:
        return [
            Finding(
                code="memory.no_history",
                severity="info",
                rank=part.rank,
                message=f"{file.name}: a snapshot without history: what was held at its end is "
                "known, not when; call torch.cuda.memory._record_memory_history first",
            )
        ]
    if part.start_ns is None or part.end_ns is None:
        return []
    first, last = events["time_ns"][0].as_py(), events["time_ns"][events.num_rows - 1].as_py()
    if first <= part.end_ns and part.start_ns <= last:
        return []
    return [
        Finding(
            code="memory.no_common_time",
            severity="warning",
            rank=part.rank,
            message=f"{file.name}: its history and the trace share no moment: phases and steps of "
            "allocations are not known",
        )
    ]


def write(run: Run, rank: int, folder: Path) -> None:
    """Keep a rank's allocator tables beside its trace."""
    from chopper.tables import MEMORY_TABLES

    for declared in MEMORY_TABLES:
        table = run.table(rank, declared.name)
        if table.num_rows:
            writer = StreamWriter(folder / f"{declared.name}.arrow", declared.name)
            try:
                writer.write(table.to_pydict())
            finally:
                writer.close()
