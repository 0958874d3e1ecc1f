"""Files to a run in memory: traces by rank, and what lies beside them."""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from chopper._version import __version__
from chopper.errors import InputError
from chopper.ingest import beside, logs, snapshots
from chopper.ingest import traces as reading
from chopper.ingest.counters import attach_counters
from chopper.ingest.ranks import (
    Numbered,
    check_one_run,
    check_ranks,
    credible,
    number_ranks,
    part_of,
    rank_in,
)
from chopper.ingest.sources import Found
from chopper.ingest.windows import joined_windows
from chopper.storage.manifest import Finding, RankManifest, RunManifest
from chopper.storage.run import Run

if TYPE_CHECKING:
    from datetime import tzinfo

    from chopper.collectors.formats.kineto import ParsedTrace

_SLOW_S = 2.0
"""Foreign traces that took longer to read are kept as tables for the next time."""


def as_read(found: Found, *, source: str | None) -> Run:
    """Read files as a run in memory; what took long to read is kept for the next time."""
    if not found:
        return alone(found, source)
    began = time.perf_counter()
    numbered, findings, fresh = collect(found)
    run = as_run(numbered, findings, source)
    if len(numbered) == 1 and (windows := sum(map(len, found.parts.values()))) > 1:
        run.manifest.name = f"{windows} traces"
    attach(run, found)
    if fresh and time.perf_counter() - began > _SLOW_S:
        # When the run is let go of, so that results come first.
        weakref.finalize(run, reading.keep, fresh)
    return run


def alone(found: Found, source: str | None, zone: tzinfo | None = None) -> Run:
    """What stands without a trace, as a run: looked at, not attributed."""
    files = [*found.logs, *found.snapshots]
    part = RankManifest(rank=0, label=files[0].name, status="imported")
    run = Run(
        RunManifest(kind="imported", name=files[0].name, ranks=[part]),
        None,
        source=source or str(files[0]),
    )
    attach(run, found, zone)
    rows = sum(table.num_rows for table in run.store.values())
    views = ["memory_segments"] * bool(found.snapshots) + ["energy"] * bool(found.logs)
    run.manifest.findings.append(
        Finding(
            code="run.no_trace",
            severity="info",
            message=f"{files[0].name}: no kernel trace, so nothing is attributed; {rows} rows of "
            f"{', '.join(sorted({name for _, name in run.store}))} are here (chopper report, chopper "
            f"export, chopper analyze --view {' or '.join(views)})",
        )
    )
    return run


def attach(run: Run, found: Found, zone: tzinfo | None = None) -> None:
    """Join to a run what was found beside its traces.

    Raises:
        InputError: a file cannot be read, or nobody can tell which rank it is of.
    """
    attach_counters(run, found.counters)
    if found.logs:
        logs.attach(run, found.logs, zone)
    ranks = {file: rank_in(file, run.ranks) for file in found.snapshots}
    snapshots.attach(run, ranks)


def collect(
    found: Found,
) -> tuple[Numbered, list[Finding], list[tuple[list[Path], list[ParsedTrace]]]]:
    """The traces of files by rank, what is odd about them, and which were read afresh."""
    traces: list[tuple[Path, ParsedTrace]] = []
    fresh: list[tuple[list[Path], list[ParsedTrace]]] = []
    findings: list[Finding] = []
    refused: InputError | None = None
    for file, is_named in found.items():
        try:
            files = found.files(file)
            kept = reading.from_cache(files)
            read = kept or reading.read(files)
        except InputError as exc:
            if is_named or len(found) == 1:
                raise
            # One bad file in a directory must not hide the others.
            refused = refused or exc
            findings.append(
                Finding(code="run.file_left_out", severity="warning", message=f"left out: {exc}")
            )
            continue
        findings += credible(read)
        traces += [(file, trace) for trace in read]
        if kept is None:
            fresh.append((files, read))
    if refused is not None and not traces:
        raise refused
    traces, left_out = beside.joined(traces, found)
    traces = joined_windows(traces, found)
    findings += [*left_out, *check_one_run(traces)]
    numbered = number_ranks(traces)
    return numbered, findings + check_ranks(numbered), fresh


def as_run(numbered: Numbered, findings: list[Finding], source: str | None) -> Run:
    """A run of traces that have their ranks."""
    files = list(dict.fromkeys(file for file, _ in numbered.values()))
    run = Run(
        RunManifest(
            chopper_version=__version__,
            kind="imported",
            name=files[0].name if len(files) == 1 else f"{len(files)} traces",
            ranks=[part_of(rank, file, trace) for rank, (file, trace) in sorted(numbered.items())],
            findings=findings,
        ),
        None,
        source=source or " ".join(str(f) for f in files),
    )
    for rank, (_, trace) in numbered.items():
        for name, table in trace.tables.items():
            run.put(rank, name, table)
    return run
