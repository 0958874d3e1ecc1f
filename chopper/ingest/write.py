"""Files to a run directory: raw traces, tables and manifests."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from chopper.errors import OutputError
from chopper.ingest import logs, snapshots
from chopper.ingest.assemble import alone, as_run, attach, collect
from chopper.ingest.counters import write_counters
from chopper.ingest.sources import find
from chopper.ingest.traces import head
from chopper.storage import manifest
from chopper.storage.files import write_atomic
from chopper.storage.manifest import RunManifest
from chopper.storage.run import MANIFEST, Run, rank_dir_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import tzinfo


def write_run(
    found: Sequence[str | Path], directory: Path, *, zone: tzinfo | None = None
) -> RunManifest:
    """Read traces and write them, with their tables, as a run directory.

    Args:
        found: files, globs and directories.
        directory: an empty directory that exists.
        zone: time zone of logs whose times name none.

    Raises:
        InputError: as :func:`import_traces`.
        OutputError: it cannot be written; what was written is the caller's to remove.
    """
    from chopper.storage import cache

    files = find(found)
    if not files:
        return _write_alone(alone(files, None, zone), directory)
    numbered, findings, _ = collect(files)
    run = as_run(numbered, findings, None)
    attach(run, files, zone)
    run.manifest.name = directory.resolve().name
    run.manifest.created_ns = time.time_ns()
    raw: dict[Path, Path] = {}
    try:
        (directory / "tables").mkdir()
        for part in run.manifest.ranks:
            file, trace = numbered[part.rank]
            folder = directory / rank_dir_name(part.rank)
            folder.mkdir()
            copies = []
            for i, source in enumerate(files.files(file)):
                kept = folder / _kept_name(source, i)
                _copy(raw.setdefault(source, kept), kept, source)
                copies.append(kept)
            part.traces = tuple(kept.name for kept in copies)
            part.source_digest = cache.digest(copies)
            write_atomic(folder / MANIFEST, manifest.encode(part))
            write_counters(run, part.rank, folder)
            logs.write(run, part.rank, folder)
            snapshots.write(run, part.rank, folder)
            cache.write(
                directory / "tables" / folder.name, part.source_digest, trace.tables, head(trace)
            )
    except OSError as exc:
        raise OutputError(f"{directory}: cannot be written ({exc.strerror})") from exc
    write_atomic(directory / MANIFEST, manifest.encode(run.manifest))
    return run.manifest


def _write_alone(run: Run, directory: Path) -> RunManifest:
    run.manifest.name = directory.resolve().name
    run.manifest.created_ns = time.time_ns()
    folder = directory / rank_dir_name(0)
    try:
        folder.mkdir()
        write_atomic(folder / MANIFEST, manifest.encode(run.part(0)))
        logs.write(run, 0, folder)
        snapshots.write(run, 0, folder)
    except OSError as exc:
        raise OutputError(f"{directory}: cannot be written ({exc.strerror})") from exc
    write_atomic(directory / MANIFEST, manifest.encode(run.manifest))
    return run.manifest


def _copy(first: Path, kept: Path, file: Path) -> None:
    """Copy a raw trace; further ranks of the same file share the first copy where links work."""
    if first != kept:
        try:
            os.link(first, kept)
        except OSError:
            pass
        else:
            return
    shutil.copyfile(file, kept)


def _kept_name(file: Path, i: int) -> str:
    """What the i-th raw trace of a rank is called: Kineto's as those that chopper records."""
    from chopper.collectors.formats import readers

    if readers.reader_of(file) is readers.KINETO:
        window = f"-{i}" if i else ""
        return f"trace{window}.json{'.gz' if _is_gzip(file) else ''}"
    return f"trace-{file.name}"


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"
