"""Files beside traces, joined to the ranks: counters, allocator snapshots, samplers' logs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from chopper.collectors.formats.counters import read_counters
from chopper.collectors.formats.telemetry_csv import TelemetryLog, read_log
from chopper.collectors.formats.unpack import DAMAGE, lines
from chopper.errors import InputError, UsageError
from chopper.ingest.ranks import rank_in
from chopper.storage.findings import finding
from chopper.storage.manifest import CollectorReport, Finding, RankManifest
from chopper.wording import ranges, some


@dataclass
class Attachments:
    """Tables and findings that files beside the traces add to a run."""

    tables: dict[tuple[int, str], pa.Table] = field(default_factory=dict)
    """By (rank, name)."""
    findings: list[Finding] = field(default_factory=list)
    """About the run as a whole."""
    findings_by_rank: dict[int, list[Finding]] = field(default_factory=lambda: defaultdict(list))
    reports_by_rank: dict[int, list[CollectorReport]] = field(default_factory=dict)

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
        attachments.findings_by_rank[rank] += [
            finding("counters.damaged", rank=rank, damage=line) for line in damages
        ]
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
    findings = attachments.findings_by_rank[part.rank]
    if not events.num_rows:
        findings.append(finding("memory.no_history", rank=part.rank, source=file.name))
    elif part.start_ns is not None and part.end_ns is not None:
        first, last = events["time_ns"][0].as_py(), events["time_ns"][-1].as_py()
        if first > part.end_ns or part.start_ns > last:
            findings.append(finding("memory.no_common_time", rank=part.rank, source=file.name))


_HELD_RATIO = 8
"""Memory for each byte of a log: rows of 50 bytes as columns of Python's numbers."""


def _read(file: Path, zone: tzinfo | None) -> TelemetryLog:
    try:
        return read_log(lines(file, held_ratio=_HELD_RATIO), str(file), zone=zone)
    except (*DAMAGE, OSError) as exc:
        raise InputError(f"{file}: cannot be read ({exc})") from exc


def zone_of(name: str) -> tzinfo:
    """Return a time zone: ``Europe/Berlin``, ``+02:00``, ``UTC`` or ``local``.

    Raises:
        UsageError: there is no such zone.
    """
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    offset = re.fullmatch(r"(?:UTC)?([+-])(\d{1,2}):?(\d{2})?", name.strip())
    if offset and int(offset[2]) < 24:
        minutes = int(offset[2]) * 60 + int(offset[3] or 0)
        return timezone(timedelta(minutes=minutes if offset[1] == "+" else -minutes))
    if name.strip().lower() == "local":
        return datetime.now(UTC).astimezone().tzinfo or UTC
    try:
        return ZoneInfo(name.strip())
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        raise UsageError(
            f"unknown time zone {name!r}; specify one as Europe/Berlin, +02:00, UTC or local"
        ) from exc


def attach_logs(
    attachments: Attachments,
    parts: Sequence[RankManifest],
    files: Sequence[Path],
    zone: tzinfo | None = None,
) -> None:
    """Give each rank the rows of its device, as a table of its own.

    ``zone`` is that of times that name none.

    Raises:
        InputError: a file cannot be read, or its times cannot be compared with the trace's.
    """
    if not files:
        return

    by_table: dict[str, list[pa.Table]] = {}
    findings = attachments.findings
    spans: dict[tuple[int, str], list[tuple[int, int, Path]]] = {}
    for file in files:
        log = _read(file, zone)
        _check_once(spans, file, log)
        _note_oddities(findings, file, log, zoned=zone is not None)
        _check_times(findings, parts, file, log, zoned=zone is not None)
        for name, table in log.tables.items():
            by_table.setdefault(name, []).append(table)
    # Ordinals repeat on several hosts, or where each rank sees its own device.
    ranks_of = Counter(p.device_id for p in parts)
    alike = [p.rank for p in parts if p.device_id is not None and ranks_of[p.device_id] > 1]
    if alike:
        names = ", ".join(f.name for f in files)
        findings.append(finding("telemetry.device_unknown", ranks=ranges(alike), files=names))
    for part in parts:
        if part.rank in alike:
            continue
        for name, tables in by_table.items():
            table = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
            if part.device_id is not None:
                table = table.filter(pc.equal(table["device_id"], part.device_id))
            if table.num_rows:
                attachments.tables[part.rank, name] = table.sort_by("time_ns")
        attachments.report(part.rank, "telemetry_log", files)


def _check_once(
    spans_by_column: dict[tuple[int, str], list[tuple[int, int, Path]]],
    file: Path,
    log: TelemetryLog,
) -> None:
    """Note the span in which a log holds each column of each device."""
    for name, table in log.tables.items():
        if name == "energy_window":  # spans may lie in one another
            continue
        columns = [c for c in table.column_names if c not in _NAMES_A_ROW]
        for device in pc.unique(table["device_id"]).to_pylist():
            device_rows = table.filter(pc.equal(table["device_id"], device))
            span = pc.min_max(device_rows["time_ns"]).as_py()
            for column in columns:
                if device_rows[column].null_count == device_rows.num_rows:
                    continue
                spans = spans_by_column.setdefault((device, f"{name}.{column}"), [])
                for first, last, other in spans:
                    if first <= span["max"] and span["min"] <= last:
                        raise InputError(
                            f"{file}: reports {column} of device {device} at the same time as "
                            f"{other.name}: if both are of one host, leave one out; if of two, "
                            "import each with the traces of its own host"
                        )
                spans.append((span["min"], span["max"], file))


_NAMES_A_ROW = frozenset(("time_ns", "span_ns", "device_id", "device_uuid"))
_SINCE_1970_NS = 10**17
"""Later than 1973: what counts from the start of a host never gets there."""


def _check_times(
    findings: list[Finding],
    parts: Sequence[RankManifest],
    file: Path,
    log: TelemetryLog,
    *,
    zoned: bool,
) -> None:
    """Check that a log can be joined to the traces, and find out whether it meets them."""
    traced = [p for p in parts if p.start_ns is not None and p.end_ns is not None]
    tables = [table for table in log.tables.values() if table.num_rows]
    if not traced or not tables:
        return
    if log.local_time and not zoned:
        raise InputError(
            f"{file}: its times name no time zone, so they cannot be matched; specify it: "
            "chopper import … --time-zone Europe/Berlin (or +02:00, UTC, local)"
        )
    limits = [pc.min_max(t["time_ns"]).as_py() for t in tables]
    first, last = min(m["min"] for m in limits), max(m["max"] for m in limits)
    start = min(p.start_ns for p in traced if p.start_ns is not None)
    end = max(p.end_ns for p in traced if p.end_ns is not None)
    if (first > _SINCE_1970_NS) != (start > _SINCE_1970_NS):
        whose = "the log's" if first <= _SINCE_1970_NS else "the trace's"
        raise InputError(
            f"{file}: {whose} times count from the start of a host, the other's from 1970: they "
            "cannot be joined; import them separately, or record both with Unix times"
        )
    if first > end or start > last:
        note = finding(
            "telemetry.no_common_time",
            source=file.name,
            apart_s=max(first - end, start - last) / 1e9,
            side="after" if first > end else "before",
        )
        findings.append(note)


def _note_oddities(findings: list[Finding], file: Path, log: TelemetryLog, *, zoned: bool) -> None:
    if log.local_time and not zoned:
        findings.append(finding("telemetry.time_zone", source=file.name))
    if log.repeated_count:
        note = finding("telemetry.clock_set_back", count=log.repeated_count, source=file.name)
        findings.append(note)
    if log.bad_rows_count:
        note = finding(
            "telemetry.rows_lost",
            count=log.bad_rows_count,
            source=file.name,
            rows=log.bad_rows_count + log.rows_count,
        )
        findings.append(note)
