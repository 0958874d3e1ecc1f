"""Logs of other samplers joined to imported traces, or read alone."""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING

from chopper.errors import InputError
from chopper.manifest import CollectorReport, Finding
from chopper.run import StreamWriter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pyarrow as pa

    from chopper.collectors.telemetry_log import TelemetryLog
    from chopper.run import Run

_NAME = "telemetry_log"


def _text(file: Path, size: int = -1) -> str:
    opened = gzip.open if file.name.lower().endswith(".gz") else open
    with opened(file, "rt", encoding="utf-8", errors="replace") as stream:
        return str(stream.read(size))


def _read(file: Path) -> TelemetryLog:
    from chopper.collectors.telemetry_log import read_log

    try:
        text = _text(file)
    except (zlib.error, EOFError, OSError) as exc:
        raise InputError(f"{file}: cannot be read ({exc})") from exc
    return read_log(text, str(file))


def attach(run: Run, files: Sequence[Path]) -> None:
    """Give each rank of a run the rows of its device, as a table of its own.

    Raises:
        InputError: a file cannot be read.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    by_table: dict[str, list[pa.Table]] = {}
    findings: list[Finding] = []
    for file in files:
        log = _read(file)
        findings += _findings(file, log)
        for name, table in log.tables.items():
            by_table.setdefault(name, []).append(table)
    for part in run.manifest.ranks:
        for name, tables in by_table.items():
            table = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
            if part.device_id is not None:
                table = table.filter(pc.equal(table["device_id"], part.device_id))
            if table.num_rows:
                run.put(part.rank, name, table.sort_by("time_ns"))
        part.collectors.append(
            CollectorReport(name=_NAME, status="obtained", files=tuple(f.name for f in files))
        )
    run.manifest.findings += findings


def _findings(file: Path, log: TelemetryLog) -> list[Finding]:
    found = []
    if log.local_time:
        found.append(
            Finding(
                code="telemetry.time_zone",
                severity="warning",
                message=f"{file.name}: its times name no zone and were read as UTC; where they are "
                "local, they miss the trace by hours and no clock is joined",
            )
        )
    if log.bad_rows_count:
        found.append(
            Finding(
                code="telemetry.rows_lost",
                severity="info",
                count=log.bad_rows_count,
                message=f"{file.name}: {log.bad_rows_count} of "
                f"{log.bad_rows_count + log.rows_count} rows name no device or no time and are "
                "left out",
            )
        )
    return found


def write(run: Run, rank: int, folder: Path) -> None:
    """Keep a rank's device tables beside its trace."""
    from chopper.telemetry import DEVICE_TABLES

    for name in DEVICE_TABLES:
        table = run.table(rank, name)
        if table.num_rows:
            writer = StreamWriter(folder / f"{name}.arrow", name)
            try:
                writer.write(table.to_pydict())
            finally:
                writer.close()
