"""Trace tables of one rank of a run directory."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from chopper.errors import InputError
from chopper.ingest import traces as reading
from chopper.ingest.windows import join
from chopper.storage.files import inside
from chopper.storage.manifest import Finding, RankManifest
from chopper.storage.run import Run, rank_dir_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.collectors.formats.kineto import ParsedTrace


def ingest_rank(run: Run, rank: int) -> None:
    """Make the trace tables of one rank of a run directory from its raw traces.

    Tables that an earlier call left in ``tables/`` are used when they were made from these very
    files; else they are made and, when the run is let go of, left there.
    """
    import msgspec

    from chopper.storage import cache

    part = run.part(rank)
    directory = run.rank_dir(rank)
    files = [f for f in (inside(directory, name) for name in part.traces) if f.is_file()]
    if not files:
        _note(
            run,
            rank,
            Finding(
                code="trace.absent",
                severity="warning",
                rank=rank,
                message=f"rank {rank} has no kernel trace: nothing to attribute there",
                withholds=("attribution",),
            ),
        )
        return
    try:
        key = cache.digest(files)
    except OSError as exc:
        raise InputError(f"{files[-1]}: cannot be read ({exc.strerror})") from exc
    folder = inside(directory.parent, Path("tables", rank_dir_name(rank)))
    kept = cache.read(folder, key)
    trace = None if kept is None else reading.rebuilt(kept[1].head, kept[0])
    if trace is None:
        try:
            trace = _read_kept(files, part)
        except InputError as exc:
            # A rank that was killed while it wrote leaves a file without events.
            _note(
                run,
                rank,
                Finding(
                    code="trace.unreadable",
                    severity="warning",
                    rank=rank,
                    message=f"rank {rank}: {exc}",
                    withholds=("attribution",),
                ),
            )
            return
        weakref.finalize(run, reading.keep_in_run, folder.absolute(), key, trace)
    for finding in trace.findings:
        # Each rank's file has the same name: without the rank nobody could tell which is meant.
        _note(run, rank, msgspec.structs.replace(finding, rank=rank))
    if part.device_id is None:
        part.device_id = trace.device_id
    if not part.devices:
        part.devices = trace.devices
    for name, table in trace.tables.items():
        # What was recorded beside the trace knows better: it goes on where the trace stops.
        if (rank, name) not in run.store and not (directory / f"{name}.arrow").is_file():
            run.put(rank, name, table)


def _read_kept(files: Sequence[Path], part: RankManifest) -> ParsedTrace:
    """The trace in a rank's raw files: of all where they are one recording or windows of one
    process, else of the last.

    Raises:
        InputError: they cannot be read.
    """
    from chopper.collectors.formats import readers

    if all(readers.is_csv(file) for file in files):
        return _of_part(reading.read(files), part)
    if part.status != "imported":
        files = files[-1:]
    windows = [_of_part(reading.read([file]), part) for file in files]
    return join(windows) if len(windows) > 1 else windows[0]


def _of_part(traces: list[ParsedTrace], part: RankManifest) -> ParsedTrace:
    """The trace in a file that is this part's: its process and its device."""
    mine = [t for t in traces if t.host_pid == part.pid] or traces
    # The main device comes first.
    return next((t for t in mine if t.device_id == part.device_id), mine[0])


def _note(run: Run, rank: int, finding: Finding) -> None:
    """Add a finding to a rank, once."""
    findings = run.part(rank).findings
    # An imported run has it from the import, under the file's first name.
    if all((f.code, f.count) != (finding.code, finding.count) for f in findings):
        findings.append(finding)
