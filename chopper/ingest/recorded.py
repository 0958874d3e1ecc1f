"""Trace tables of one rank of a run directory."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pyarrow as pa

from chopper.collectors.formats import readers
from chopper.collectors.formats.kineto import ParsedTrace
from chopper.collectors.formats.kineto.chunked import LargeTrace, read_or_cut
from chopper.errors import InputError, OutputError
from chopper.ingest.filed import TraceTables, cut, left, left_tables, rows_of, valid
from chopper.ingest.sampled import with_samples
from chopper.ingest.windows import join
from chopper.storage import parquet, results
from chopper.storage.files import inside, write_atomic
from chopper.storage.findings import finding
from chopper.storage.layout import rank_dir_name
from chopper.storage.manifest import Finding, RankManifest
from chopper.storage.run import recorded_tables
from chopper.version import __version__


def read_traces(
    files: Sequence[Path], columns: Mapping[str, str] | None = None
) -> list[ParsedTrace]:
    """Read the traces of one recording; with ``columns`` from tables of spans.

    Raises:
        InputError: it cannot be read.
    """
    if columns:
        mapped: list[ParsedTrace] = readers.MAPPED.load().read(files, columns)
        return mapped
    try:
        reader = readers.reader_of(files[0])
    except OSError as exc:
        raise InputError(f"{files[0]}: cannot be read ({exc.strerror or exc})") from exc
    if reader is not None and reader.kind == "counters":
        reader = next(r for r in readers.READERS if r.grouped)
    traces: list[ParsedTrace] = (reader or readers.KINETO).load().read(files)
    return traces


def filed_tables(folder: Path, part: RankManifest) -> dict[str, Path]:
    """Return the Parquet files of a rank's folder in place of its traces, by table.

    None of a rank with a raw trace whose manifest was lost.
    """
    return parquet.files(folder) if part.status == "imported" or not part.traces else {}


def read_rank(
    directory: Path, part: RankManifest, rows: Path | None = None, threads: int = 1
) -> tuple[RankManifest, Mapping[str, pa.Table]]:
    """Make the trace tables of one rank from its raw traces, by name; none where none can be read.

    Its part comes with what its trace says of devices, and with what was found while reading.
    ``rows`` and ``threads`` are as for :func:`read_task`.
    """
    rank = part.rank
    files = [f for f in (inside(directory, name) for name in part.traces) if f.is_file()]
    if not files:
        reasons = (c.reason for c in part.collectors if c.name == "torch_trace" and c.reason)
        why = next(reasons, part.error or "nothing to attribute there")
        return _with_findings(part, [finding("trace.absent", rank=rank, why=why)]), {}
    try:
        trace = _trace_of(files, part, rows, threads)
    except InputError as exc:
        # A rank that was killed while it wrote leaves a file without events.
        return with_lost(part, str(exc)), {}
    # Each rank's file has the same name: without the rank nobody could tell which is meant.
    part = _with_findings(part, [msgspec.structs.replace(f, rank=rank) for f in trace.findings])
    device_id = trace.device_id if part.device_id is None else part.device_id
    devices = part.devices or trace.devices
    return msgspec.structs.replace(part, device_id=device_id, devices=devices), trace.tables


def read_task(
    files: Sequence[Path],
    finished: Path | None,
    rows: Path | None,
    threads: int,
    folder: Path | None,
    columns: Mapping[str, str] | None = None,
) -> list[ParsedTrace]:
    """Read the traces of one recording; leave their tables in a folder.

    Args:
        files: of the recording.
        finished: folder of what was read, for a next call where this one is killed; None for none.
        rows: where the rows of a trace go that is too large to be held; None where it is not.
        threads: how many read such a trace at a time.
        folder: of the engine.
        columns: which column of a table of spans is what; None where their names say so.
    """
    if rows is not None and not columns and readers.reader_of(files[0]) in (None, readers.KINETO):
        read = read_or_cut(files[0], rows, threads)
        if isinstance(read, LargeTrace):
            return [replace(read.trace, tables=cut(read))]
        return [left(trace, folder) for trace in read]
    if finished is None:
        return [left(trace, folder) for trace in read_traces(files, columns)]
    path = finished / _fingerprint(files, columns)
    with contextlib.suppress(OSError, InputError):
        return [left(trace, folder) for trace in results.decode(path.read_bytes())]
    traces = read_traces(files, columns)
    with contextlib.suppress(OutputError):  # without room for it, the next call reads them again
        write_atomic(path, results.encode(traces, compressed=True))
    return [left(trace, folder) for trace in traces]


def _fingerprint(files: Sequence[Path], columns: Mapping[str, str] | None) -> str:
    """Return a name that changes with the files' names, sizes and times, and with chopper."""
    parts = [__version__, repr(columns)]
    for file in files:
        with contextlib.suppress(OSError):
            facts = file.stat()
            parts.append(f"{file.absolute()} {facts.st_size} {facts.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def rank_task(
    path: Path, part: RankManifest, rows: Path | None, threads: int, folder: Path | None
) -> tuple[RankManifest, TraceTables]:
    """Read one rank of a run directory; leave its tables in a folder.

    Returns:
        Its completed part, and its tables. ``rows``, ``threads`` and ``folder`` are as for
        :func:`read_task`.
    """
    recorded, tables = recorded_tables(path, part)
    part, of_trace = read_rank(inside(path, rank_dir_name(part.rank)), recorded, rows, threads)
    # What was recorded beside the trace knows better: it goes on where the trace stops.
    if isinstance(of_trace, TraceTables):
        small = valid({**of_trace.small, **tables})
        rows_count = {**of_trace.rows_count, **rows_of(small)}
        return part, replace(of_trace, small=small, rows_count=rows_count)
    return part, left_tables(valid(with_samples({**of_trace, **tables})), folder)


def with_lost(part: RankManifest, reason: str) -> RankManifest:
    """Return the part of a rank whose traces could not be read, and why."""
    return _with_findings(part, [finding("trace.unreadable", rank=part.rank, reason=reason)])


def _with_findings(part: RankManifest, findings: Sequence[Finding]) -> RankManifest:
    """Return a part with findings added, each once."""
    every = [*part.findings]
    for found in findings:
        # An imported run has it from the import, under the file's first name.
        if all((f.code, f.count) != (found.code, found.count) for f in every):
            every.append(found)
    return msgspec.structs.replace(part, findings=every)


def _trace_of(
    files: Sequence[Path], part: RankManifest, rows: Path | None, threads: int
) -> ParsedTrace:
    """Read the trace in a rank's raw files: of all where they are one recording or windows of one
    process, else of the last.
    """
    if rows is not None and len(files) == 1:
        read = read_or_cut(files[0], rows, threads)
        if isinstance(read, LargeTrace):
            return replace(read.trace, tables=cut(read))
        return _of_part(read, part)
    if all(readers.is_csv(file) for file in files):
        return _of_part(read_traces(files), part)
    if part.status != "imported":
        files = files[-1:]
    windows = [_of_part(read_traces([file]), part) for file in files]
    return join(windows) if len(windows) > 1 else windows[0]


def _of_part(traces: list[ParsedTrace], part: RankManifest) -> ParsedTrace:
    """Return the trace in a file that is this part's: its process and its device."""
    mine = [t for t in traces if t.host_pid == part.pid] or traces
    # The main device comes first.
    return next((t for t in mine if t.device_id == part.device_id), mine[0])
