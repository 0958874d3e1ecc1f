"""Files beside traces, joined to the ranks: counters of kernels, snapshots of the allocator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from chopper.collectors.formats.counters import read_counters
from chopper.errors import InputError
from chopper.ingest.ranks import rank_in
from chopper.storage.manifest import CollectorReport, Finding, RankManifest, Severity, add_finding
from chopper.wording import some


@dataclass
class Attachments:
    """Tables and findings that files beside the traces add to a run."""

    tables: dict[tuple[int, str], pa.Table] = field(default_factory=dict)
    """By (rank, name)."""
    findings: list[Finding] = field(default_factory=list)
    """About the run as a whole."""
    findings_by_rank: dict[int, list[Finding]] = field(default_factory=dict)
    reports_by_rank: dict[int, list[CollectorReport]] = field(default_factory=dict)

    def note(self, rank: int, code: str, message: str, severity: Severity = "warning") -> None:
        """Add a finding about one rank."""
        findings = self.findings_by_rank.setdefault(rank, [])
        add_finding(findings, code, message, severity=severity, rank=rank)

    def report(self, rank: int, collector: str, files: Sequence[Path]) -> None:
        """Say that files gave a rank what a collector would have recorded."""
        report = CollectorReport(
            name=collector, status="obtained", files=tuple(file.name for file in files)
        )
        self.reports_by_rank.setdefault(rank, []).append(report)


def attach_counters(
    attachments: Attachments, parts: Sequence[RankManifest], files: Sequence[Path]
) -> None:
    """Give each rank the hardware counters that are its own.

    Raises:
        InputError: a file cannot be read, or nobody can tell which rank it is of.
    """
    by_rank: dict[int, list[pa.Table]] = {}
    ranks = sorted(part.rank for part in parts)
    for file in files:
        rank = _rank_of_counters(ranks, file)
        table, damages = read_counters(file)
        by_rank.setdefault(rank, []).append(table)
        for line in damages:
            attachments.note(rank, "counters.damaged", line)
    for rank, tables in by_rank.items():
        attachments.tables[rank, "kernel_counter"] = pa.concat_tables(tables).unify_dictionaries()


def _rank_of_counters(ranks: list[int], file: Path) -> int:
    named = rank_in(file, ranks)
    if named is not None:
        return named
    if len(ranks) == 1:
        return ranks[0]
    raise InputError(
        f"{file}: counters of which rank? The traces are of {len(ranks)} ranks ({some(ranks)}); "
        f"put its number into the file name, as counters-rank{ranks[0]}.csv"
    )


def attach_snapshots(
    attachments: Attachments, parts: Sequence[RankManifest], files: Sequence[Path]
) -> None:
    """Give each rank what a snapshot of torch's allocator says of its device.

    Raises:
        InputError: one cannot be read, or nobody can tell which rank it is of.
    """
    from chopper.collectors.snapshot import read_snapshot

    for file in files:
        rank = rank_in(file, [part.rank for part in parts])
        tables = read_snapshot(file)
        if not any(table.num_rows for table in tables.values()):
            raise InputError(f"{file}: a memory snapshot without a segment and without history")
        named = [p for p in parts if rank is None or p.rank == rank]
        taken = False
        for part in named:
            rank_tables = _of_device(tables, None if len(named) == 1 else part.device_id)
            attachments.tables |= {(part.rank, name): table for name, table in rank_tables.items()}
            if rank_tables:
                taken = True
                attachments.report(part.rank, "memory_snapshot", [file])
                _check_history(attachments, file, part, tables["allocator_event"])
        if not taken:
            devices = sorted({d for t in tables.values() for d in t["device_id"].to_pylist()})
            raise InputError(
                f"{file}: a memory snapshot of device {', '.join(map(str, devices)) or 'none'}, "
                f"which none of the {len(named)} ranks computes on; put the rank's number into the "
                "file's name, as snapshot-rank0.pickle"
            )


def _of_device(tables: dict[str, pa.Table], device_id: int | None) -> dict[str, pa.Table]:
    """Return the rows of a device, of all with None; tables without any are left out."""
    if device_id is not None:
        tables = {n: t.filter(pc.equal(t["device_id"], device_id)) for n, t in tables.items()}
    return {name: table for name, table in tables.items() if table.num_rows}


def _check_history(
    attachments: Attachments, file: Path, part: RankManifest, events: pa.Table
) -> None:
    """Note discrepancies between a snapshot's history and the rank's trace."""
    if not events.num_rows:
        attachments.note(
            part.rank,
            "memory.no_history",
            f"{file.name}: a snapshot without history: what was held at its end is known, not "
            "when; call torch.cuda.memory._record_memory_history first",
            "info",
        )
    elif part.start_ns is not None and part.end_ns is not None:
        first, last = events["time_ns"][0].as_py(), events["time_ns"][-1].as_py()
        if first > part.end_ns or part.start_ns > last:
            attachments.note(
                part.rank,
                "memory.no_common_time",
                f"{file.name}: its history does not overlap the trace in time: phases and steps "
                "of allocations are unknown",
            )
