"""Files to a run: the traces of each rank, what lies beside them, and what was found on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import tzinfo
from pathlib import Path

import msgspec
import pyarrow as pa

from chopper.collectors.formats.kineto import ParsedTrace
from chopper.errors import InputError
from chopper.ingest import foreign_traces, logs
from chopper.ingest.attachments import Attachments, attach_counters, attach_snapshots
from chopper.ingest.ranks import check_one_run, check_ranks, credible, number_ranks, part_of
from chopper.ingest.recorded import read_rank, read_traces
from chopper.ingest.sources import Sources, check_names, find
from chopper.ingest.windows import joined_windows
from chopper.storage.layout import MANIFEST, is_run
from chopper.storage.manifest import Finding, RankManifest, RunManifest, add_finding
from chopper.storage.run import Run
from chopper.version import __version__


def read(named: Sequence[str | Path]) -> Run:
    """Read a run directory with its traces, or traces as a run in memory.

    Args:
        named: one run directory, or trace files, globs and directories of traces.

    Raises:
        InputError: what is named is neither; one line says what was found.
    """
    if not named:
        raise InputError("nothing to load: name a run directory or trace files")
    check_names(named)
    if len(named) == 1 and is_run(Path(named[0])):
        return _read_directory(Path(named[0]))
    for item in named:
        if is_run(Path(item)):
            raise InputError(
                f"{item}: is a run directory; name it alone, not with other files (`chopper import "
                "A B -o DIR` joins run directories of one run)"
            )
    sources = find(named)
    traces = list(sources.traces)
    if len(traces) == 1 and traces[0].name == MANIFEST and is_run(traces[0].parent):
        return _read_directory(traces[0].parent)
    return read_sources(sources, source=" ".join(str(n) for n in named)).run


def _read_directory(path: Path) -> Run:
    """Read a run directory: what was recorded, and the tables of its raw traces."""
    run = Run.open(path)
    parts: list[RankManifest] = []
    store: dict[tuple[int, str], pa.Table] = {}
    for part in run.manifest.ranks:
        complete, tables = read_rank(run.rank_dir(part.rank), part)
        parts.append(complete)
        store |= {(part.rank, name): table for name, table in tables.items()}
    manifest = msgspec.structs.replace(run.manifest, ranks=parts)
    # What was recorded beside the trace knows better: it goes on where the trace stops.
    return Run(manifest, path, {}, run.source).with_tables({**store, **run.store})


@dataclass(frozen=True)
class Imported:
    """A run in memory, and what it was read from."""

    run: Run
    files: dict[int, list[Path]]
    """Raw traces of each rank."""
    attached: frozenset[tuple[int, str]]
    """Tables, as (rank, name), that the raw traces do not hold."""


def read_sources(
    sources: Sources, *, source: str | None = None, zone: tzinfo | None = None
) -> Imported:
    """Read files as a run in memory, which messages call ``source``.

    ``zone`` is that of logs whose times name none.

    Raises:
        InputError: a file cannot be read, two are the same rank, or they are of two runs.
    """
    numbered, findings, files = _numbered(sources)
    parts = [part_of(rank, file, trace) for rank, (file, trace) in sorted(numbered.items())]
    named = list(dict.fromkeys(file for file, _ in numbered.values()))
    if not parts:
        named = [*sources.logs, *sources.snapshots]
        parts = [RankManifest(rank=0, label=named[0].name, status="imported")]
    store = {(r, name): t for r, (_, trace) in numbered.items() for name, t in trace.tables.items()}
    attachments = Attachments()
    attach_counters(attachments, parts, sources.counters)
    logs.attach_logs(attachments, parts, sources.logs, zone)
    attach_snapshots(attachments, parts, sources.snapshots)
    store |= attachments.tables
    findings += attachments.findings
    if not numbered:
        findings.append(_without_trace(named[0], sources, store))
    for part in parts:
        part.findings = [*part.findings, *attachments.findings_by_rank.get(part.rank, ())]
        part.collectors = attachments.reports_by_rank.get(part.rank, [])
    count = max(len(named), sum(map(len, files.values())) if len(numbered) == 1 else 0)
    manifest = RunManifest(
        chopper_version=__version__,
        kind="imported",
        name=named[0].name if count == 1 else f"{count} traces",
        ranks=parts,
        findings=findings,
    )
    borrowed = {(r, name) for r, (_, trace) in numbered.items() for name in trace.borrowed}
    return Imported(
        Run(manifest, None, {}, source or " ".join(map(str, named))).with_tables(store),
        {rank: files.get(file, [file]) for rank, (file, _) in numbered.items()},
        frozenset(attachments.tables.keys() | borrowed),
    )


def _without_trace(file: Path, sources: Sources, store: dict[tuple[int, str], pa.Table]) -> Finding:
    """Return what can be done with files that hold no kernels."""
    rows = sum(table.num_rows for table in store.values())
    views = ["memory_segments"] * bool(sources.snapshots) + ["energy"] * bool(sources.logs)
    return Finding(
        code="run.no_trace",
        severity="info",
        message=f"{file.name}: no kernel trace, so nothing is attributed; it has {rows} rows of "
        f"{', '.join(sorted({name for _, name in store}))} (chopper report, chopper export, "
        f"chopper analyze --view {' or '.join(views)})",
    )


def _numbered(
    sources: Sources,
) -> tuple[dict[int, tuple[Path, ParsedTrace]], list[Finding], dict[Path, list[Path]]]:
    """Read the traces of files.

    Returns the traces by rank, each with its first file; what is odd about them; and all files of a
    recording that is several, by its first.
    """
    traces: list[tuple[Path, ParsedTrace]] = []
    findings: list[Finding] = []
    refused: InputError | None = None
    for file, is_named in sources.traces.items():
        try:
            recording = read_traces(sources.files(file))
        except InputError as exc:
            if is_named or len(sources.traces) == 1:
                raise
            # One bad file in a directory must not hide the others.
            refused = refused or exc
            add_finding(
                findings,
                "run.file_left_out",
                f"left out: {exc}",
            )
            continue
        findings += credible(recording)
        traces += [(file, trace) for trace in recording]
    if refused is not None and not traces:
        raise refused
    traces, left_out = foreign_traces.joined(traces, sources.traces)
    traces, windows, by_pid = joined_windows(traces)
    findings += [*left_out, *by_pid, *check_one_run(traces)]
    numbered = number_ranks(traces)
    files = {
        first: [f for file in group for f in sources.files(file)]
        for first, group in windows.items()
    }
    return numbered, findings + check_ranks(numbered), {**sources.parts, **files}
