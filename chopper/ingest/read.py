"""Reads files into a run: each rank's trace, attached files, and findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import tzinfo
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from chopper import limits
from chopper.addresses import without_secrets
from chopper.collectors.formats.exported import unpack
from chopper.collectors.formats.kineto import ParsedTrace
from chopper.engines import Engine, Lost, Serial
from chopper.engines.choice import trace_bytes
from chopper.errors import ChopperError, InputError
from chopper.ingest.attachments import Attachments, attach_counters, attach_logs, attach_snapshots
from chopper.ingest.filed import TraceTables, in_files, stretches_of, valid
from chopper.ingest.ranks import (
    check_one_run,
    check_ranks,
    credible,
    number_ranks,
    part_of,
    without_foreign,
)
from chopper.ingest.recorded import filed_tables, rank_task, read_task, with_lost
from chopper.ingest.sources import Sources, check_names, find
from chopper.ingest.windows import joined_windows
from chopper.storage import parquet
from chopper.storage.files import inside
from chopper.storage.findings import finding
from chopper.storage.layout import MANIFEST, is_run, rank_dir_name
from chopper.storage.manifest import Finding, RankManifest, RunManifest
from chopper.storage.parts import read_manifest
from chopper.storage.remote import here, in_addresses
from chopper.storage.results import Folder
from chopper.storage.run import HeldTables, Run, Store, Stretch
from chopper.version import __version__

_MOST_THREADS = 8
"""Of one recording: each holds 16 MB of text and its rows, and one thread unpacks for all."""


def read(
    named: Sequence[str | Path],
    engine: Engine | None = None,
    columns: Mapping[str, str] | None = None,
) -> Run:
    """Read a run directory with its traces, or traces as a run.

    Args:
        named: one run directory, or trace files, globs and directories of traces.
        engine: what reads the files, and holds their tables; by default this process.
        columns: which column of a table of spans is what; None where their names say so.

    Raises:
        InputError: what is named is neither; one line says what was found.
    """
    if not named:
        raise InputError("nothing to load: name a run directory or trace files")
    check_names(named)
    source = " ".join(without_secrets(str(item)) for item in named)
    try:
        return _read(here(named), engine or Serial(), source, columns)
    except InputError as exc:
        raise InputError(in_addresses(str(exc))) from exc


def _read(
    named: Sequence[str | Path], engine: Engine, source: str, columns: Mapping[str, str] | None
) -> Run:
    if len(named) == 1 and is_run(Path(named[0])):
        return replace(_read_directory(Path(named[0]), engine), source=source)
    for item in named:
        if is_run(Path(item)):
            raise InputError(
                f"{item}: is a run directory; name it alone, not with other files (`chopper gather "
                "A B -o DIR` makes one run of those of several nodes)"
            )
    sources = find(named, columns)
    traces = list(sources.traces)
    if len(traces) == 1 and traces[0].name == MANIFEST and is_run(traces[0].parent):
        return _read_directory(traces[0].parent, engine)
    if carrying := sources.run():
        folder = Folder()
        unpack(carrying, folder.path)
        run = _read_directory(folder.path, engine, folder)
        # Nodes of a cluster need not share a disk.
        store = {key: run.store[key] for key in run.store} if engine.name == "ray" else run.store
        return replace(run, path=None, source=source, store=store, originals={})
    return read_sources(sources, source=source, engine=engine).run


def _read_directory(path: Path, engine: Engine, keeper: Folder | None = None) -> Run:
    """Read a run directory: its recorded tables, and the tables of its raw traces.

    The tables of an imported rank stay in their files, which ``keeper`` removes with the run.
    """
    manifest = read_manifest(path)
    parts: dict[int, RankManifest] = {part.rank: part for part in manifest.ranks}
    held: dict[int, HeldTables] = {}
    rows_count: dict[tuple[int, str], int] = {}
    stretches: dict[int, Sequence[Stretch]] = {}
    for rank, part in parts.items():
        if files := filed_tables(inside(path, rank_dir_name(rank)), part):
            held[rank] = parquet.FiledTables(files, keeper)
            rows = {name: parquet.rows_count(file) for name, file in files.items()}
            rows_count |= {(rank, name): count for name, count in rows.items()}
            stretches[rank] = stretches_of(files, rows)
    unread = [part for rank, part in parts.items() if rank not in held]
    folders = [_room_for(engine, _raw_traces(path, part)) for part in unread]
    threads = _threads_of(engine, len(unread))
    calls = [
        (path, part, _rows_of(folder), threads, engine.folder)
        for part, folder in zip(unread, folders, strict=True)
    ]
    results = [*engine.map(rank_task, calls, label="read")]
    tables: dict[tuple[int, str], pa.Table] = {}
    for part, folder, done in zip(unread, folders, results, strict=True):
        rank = part.rank
        if isinstance(done, Lost):
            if isinstance(done.error, ChopperError):
                raise done.error
            parts[rank] = with_lost(part, done.reason)
            continue
        parts[rank], own = done
        own = in_files(own, folder, engine)
        held[rank], stretches[rank] = own.held, own.stretches
        tables |= {(rank, name): table for name, table in own.small.items()}
        rows_count |= {(rank, name): count for name, count in own.rows_count.items()}
    manifest = _in_addresses(msgspec.structs.replace(manifest, ranks=[*parts.values()]))
    # Of a rank that was recorded, the last trace is read.
    originals = {
        part.rank: _raw_traces(path, part)[0 if part.status == "imported" else -1 :]
        for part in manifest.ranks
    }
    store = Store(tables, held, rows_count, stretches)
    return Run(manifest, path, store, originals=originals)


def _raw_traces(path: Path, part: RankManifest) -> list[Path]:
    """Return the raw traces of a rank of a run directory."""
    return [inside(path, rank_dir_name(part.rank)) / name for name in part.traces]


@dataclass(frozen=True)
class Imported:
    """A run in memory and its source files."""

    run: Run
    files: dict[int, list[Path]]
    """Raw traces of each rank."""
    attached: frozenset[tuple[int, str]]
    """Tables, as (rank, name), that the raw traces do not hold."""


def read_sources(
    sources: Sources,
    *,
    source: str | None = None,
    zone: tzinfo | None = None,
    engine: Engine | None = None,
    finished: Path | None = None,
) -> Imported:
    """Read files as a run.

    Args:
        sources: the files.
        source: what messages call the run.
        zone: of logs whose times name none.
        engine: what reads the files, and holds their tables; by default this process.
        finished: folder of what was read, for a next call where this one is killed.

    Raises:
        InputError: a file cannot be read, two are the same rank, or they are of two runs.
    """
    numbered, findings, files = _numbered(sources, engine or Serial(), finished)
    parts = [part_of(rank, file, trace) for rank, (file, trace) in sorted(numbered.items())]
    named = list(dict.fromkeys(file for file, _ in numbered.values()))
    if not parts:
        named = [*sources.logs, *sources.snapshots]
        parts = [RankManifest(rank=0, label=named[0].name, status="imported")]
    store = _store({rank: trace for rank, (_, trace) in numbered.items()})
    attachments = Attachments()
    attach_counters(attachments, parts, sources.counters)
    attach_logs(attachments, parts, sources.logs, zone)
    attach_snapshots(attachments, parts, sources.snapshots)
    store = store.with_tables(valid(attachments.tables))
    findings += attachments.findings
    if not numbered:
        findings.append(_without_trace(named[0], sources, store))
    for part in parts:
        part.findings = [*part.findings, *attachments.findings_by_rank.get(part.rank, ())]
        part.collectors = attachments.reports_by_rank.get(part.rank, [])
    count = max(len(named), sum(map(len, files.values())) if len(numbered) == 1 else 0)
    name = named[0].name if count == 1 else f"{count} traces"
    if count == 1 < min(len(numbered), len(sources.files(named[0]))):
        name = named[0].resolve().parent.name  # ranks in several files of one recording
    manifest = RunManifest(
        chopper_version=__version__,
        kind="imported",
        name=name,
        ranks=parts,
        findings=findings,
    )
    borrowed = {(r, name) for r, (_, trace) in numbered.items() for name in trace.borrowed}
    originals = {rank: files.get(file, [file]) for rank, (file, _) in numbered.items()}
    source = source or " ".join(map(str, named))
    return Imported(
        Run(_in_addresses(manifest), None, store, source, originals),
        originals,
        frozenset(attachments.tables.keys() | borrowed),
    )


def _in_addresses(manifest: RunManifest) -> RunManifest:
    """Return a manifest with findings that name addresses in place of copies."""
    parts: list[RankManifest | RunManifest] = [manifest, *manifest.ranks]
    for part in parts:
        part.findings = [
            msgspec.structs.replace(f, message=in_addresses(f.message)) for f in part.findings
        ]
    return manifest


def _store(traces: dict[int, ParsedTrace]) -> Store:
    """Return the tables of traces by rank: held where they are, else in memory."""
    tables: dict[tuple[int, str], pa.Table] = {}
    held: dict[int, HeldTables] = {}
    rows_count: dict[tuple[int, str], int] = {}
    stretches: dict[int, Sequence[Stretch]] = {}
    for rank, trace in traces.items():
        trace_tables = trace.tables
        if isinstance(trace_tables, TraceTables):
            held[rank], stretches[rank] = trace_tables.held, trace_tables.stretches
            tables |= {(rank, name): table for name, table in trace_tables.small.items()}
            rows_count |= {(rank, name): count for name, count in trace_tables.rows_count.items()}
        else:
            tables |= {(rank, name): table for name, table in trace_tables.items()}
    return Store(valid(tables), held, rows_count, stretches)


def _without_trace(file: Path, sources: Sources, store: Store) -> Finding:
    """Return what can be done with files that hold no kernels."""
    rows = sum(map(store.rows_count, store))
    views = ["memory_segments"] * bool(sources.snapshots) + ["energy"] * bool(sources.logs)
    return finding(
        "run.no_trace",
        source=file.name,
        rows=rows,
        tables=", ".join(sorted({name for _, name in store})),
        views=" or ".join(views),
    )


def _filed(trace: ParsedTrace, folder: Folder | None, engine: Engine) -> ParsedTrace:
    """Return a trace, its tables in files if it was cut."""
    if not isinstance(trace.tables, TraceTables):
        return trace
    return replace(trace, tables=in_files(trace.tables, folder, engine))


def _room_for(engine: Engine, files: Sequence[Path]) -> Folder | None:
    """Return a folder for the rows of a recording that may be too large to be held.

    Not on a cluster, whose nodes need not share a disk.
    """
    if (
        len(files) > 1
        or engine.name == "ray"
        or sum(trace_bytes(files)) < limits.LARGE_TRACE_BYTES // 4
    ):
        return None
    return Folder()


def _rows_of(folder: Folder | None) -> Path | None:
    return None if folder is None else folder.path / "rows"


def _threads_of(engine: Engine, recordings_count: int) -> int:
    """Return how many threads may read a recording, so that all cores are used and no more."""
    together = max(1, min(engine.workers, recordings_count))
    return max(1, min(_MOST_THREADS, limits.usable_cores() // together))


def _numbered(
    sources: Sources, engine: Engine, finished: Path | None
) -> tuple[dict[int, tuple[Path, ParsedTrace]], list[Finding], dict[Path, list[Path]]]:
    """Read the traces of files.

    Returns the traces by rank, each with its first file; what is odd about them; and all files of a
    recording that is several, by its first.
    """
    traces: list[tuple[Path, ParsedTrace]] = []
    findings: list[Finding] = []
    refused: ChopperError | None = None
    members: dict[str, list[Any]] = {}
    folders = [_room_for(engine, sources.files(file)) for file in sources.traces]
    threads = _threads_of(engine, len(sources.traces))
    calls = (
        (sources.files(file), finished, _rows_of(folder), threads, engine.folder, sources.columns)
        for file, folder in zip(sources.traces, folders, strict=True)
    )
    results = [*engine.map(read_task, calls, label="read")]
    for (file, is_named), folder, done in zip(
        sources.traces.items(), folders, results, strict=True
    ):
        if isinstance(done, Lost):
            error = done.error if isinstance(done.error, ChopperError) else None
            refusal = error or InputError(f"{file}: {done.reason}")
            if len(sources.traces) == 1 or (error is not None and is_named):
                raise refusal
            # One bad file in a directory must not hide the others.
            refused = refused or refusal
            findings.append(finding("run.file_left_out", reason=refusal))
            continue
        recording: list[ParsedTrace] = [_filed(trace, folder, engine) for trace in done]
        for group in (group for trace in recording for group in trace.process_groups):
            # Every rank lists those of a group that has all: once is enough.
            if isinstance(ranks := group.get("ranks"), list):
                group["ranks"] = members.setdefault(str(ranks), ranks)
        findings += credible(recording)
        traces += [(file, trace) for trace in recording]
    if refused is not None and not traces:
        raise refused
    traces, left_out = without_foreign(traces, sources.traces)
    traces, windows, by_pid = joined_windows(traces, engine)
    findings += [*left_out, *by_pid, *check_one_run(traces)]
    numbered = number_ranks(traces)
    files = {
        first: [f for file in group for f in sources.files(file)]
        for first, group in windows.items()
    }
    return numbered, findings + check_ranks(numbered), {**sources.parts, **files}
