"""Files to a run directory: raw traces, tables and manifests."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import tzinfo
from pathlib import Path

import msgspec

from chopper.addresses import is_address, without_secrets
from chopper.collectors.formats import readers
from chopper.collectors.formats.exported import encoded, unpack
from chopper.collectors.formats.unpack import PACKED
from chopper.engines import Engine
from chopper.errors import OutputError, reason_of
from chopper.hardware.ceilings import Stated, with_devices
from chopper.ingest.read import read_sources
from chopper.ingest.sources import find
from chopper.storage import manifest
from chopper.storage.caches import scratch
from chopper.storage.files import write_atomic
from chopper.storage.layout import MANIFEST, rank_dir_name
from chopper.storage.parquet import FiledTables, TablesWriter, row_groups
from chopper.storage.parts import read_manifest
from chopper.storage.run import Run, Store
from chopper.storage.streams import write_table


def write_run(
    named: Sequence[str | Path],
    directory: Path,
    *,
    zone: tzinfo | None = None,
    device: Stated | None = None,
    columns: Mapping[str, str] | None = None,
    engine: Engine | None = None,
    finished: Path | None = None,
) -> manifest.RunManifest:
    """Copy traces into an empty directory as a run, with its tables as Parquet files.

    Args:
        named: trace files, globs and directories of traces.
        directory: where to.
        zone: of logs whose times name none.
        device: the device that it was recorded on, or rank → device, as the user says.
        columns: which column of a table of spans is what; None where their names say so.
        engine: what reads the files; by default this process.
        finished: folder of what was read, for a next call where this one is killed.

    Raises:
        InputError: they cannot be read, or are not of one run.
        UsageError: the device is not in the table, or a rank not in the run.
        OutputError: it cannot be written; what was written is the caller's to remove.
    """
    sources = find(named, columns)
    if carrying := sources.run():
        return _write_carried(carrying, directory, device)
    imported = read_sources(sources, zone=zone, engine=engine, finished=finished)
    recording = imported.run if device is None else with_devices(imported.run, device)
    run = recording.manifest
    run.addresses = tuple(without_secrets(str(item)) for item in named if is_address(item))
    if engine is not None:
        run.engine = manifest.EngineChoice(
            name=engine.name, workers=engine.workers, reason=engine.reason
        )
    run.name, run.created_ns = directory.resolve().name, time.time_ns()
    copies: dict[Path, Path] = {}
    try:
        for part in run.ranks:
            folder = directory / rank_dir_name(part.rank)
            folder.mkdir()
            names = []
            for i, source in enumerate(imported.files.get(part.rank, ())):
                copy = folder / _copy_name(source, i)
                _copy(copies.setdefault(source, copy), copy, source)
                names.append(copy.name)
            part.traces = tuple(names)
            write_atomic(folder / MANIFEST, manifest.encode(part))
            for rank, name in sorted(imported.attached):
                table = imported.run.table(rank, name)
                if rank == part.rank and table.num_rows:
                    write_table(folder, name, table.to_pydict())
            with TablesWriter(folder, part.rank) as writer:
                _write_tables(writer, imported.run.tables, part.rank)
    except OSError as exc:
        raise OutputError(f"{directory}: cannot be written ({exc.strerror})") from exc
    write_atomic(directory / MANIFEST, manifest.encode(run))
    return run


def _write_carried(timeline: Path, directory: Path, device: Stated | None) -> manifest.RunManifest:
    """Write the run that an exported timeline carries."""
    try:
        unpack(timeline, directory)
        run = read_manifest(directory)
        if device is not None:
            run = with_devices(Run(run, directory), device).manifest
        _write_manifests(run, directory)
    except OSError as exc:
        raise OutputError(f"{directory}: cannot be written ({reason_of(exc)})") from exc
    return run


def carried(run: Run) -> Iterator[bytes]:
    """Yield what a timeline carries of a run: its manifest and all tables, no raw traces.

    It is a key and its value in JSON, in pieces.

    Raises:
        InputError: a table cannot be read.
        OutputError: the tables cannot be written among the temporary files.
    """
    parts = [msgspec.structs.replace(part, traces=()) for part in run.manifest.ranks]
    with scratch("export") as directory:
        for part in parts:
            folder = directory / rank_dir_name(part.rank)
            folder.mkdir()
            with TablesWriter(folder, part.rank) as writer:
                _write_tables(writer, run.tables, part.rank)
        data = manifest.encode(msgspec.structs.replace(run.manifest, ranks=parts))
        write_atomic(directory / MANIFEST, data)
        yield from encoded(directory)


def _write_manifests(run: manifest.RunManifest, directory: Path) -> None:
    for part in run.ranks:
        folder = directory / rank_dir_name(part.rank)
        folder.mkdir(exist_ok=True)
        write_atomic(folder / MANIFEST, manifest.encode(part))
    write_atomic(directory / MANIFEST, manifest.encode(run))


def _write_tables(writer: TablesWriter, store: Store, rank: int) -> None:
    """Write the tables of a rank: some rows at a time where it is too large to be held."""
    held = store.held.get(rank)
    files = held.files if store.stretches(rank) and isinstance(held, FiledTables) else {}
    for name in [name for of, name in store if of == rank]:
        if name in files and (rank, name) not in store.in_memory:
            for rows in row_groups(files[name], name):
                writer.write(name, rows)
        else:
            writer.write(name, store[rank, name])


def _copy(first: Path, copy: Path, source: Path) -> None:
    """Copy a raw trace; further ranks of the same file share the first copy where links work."""
    if first != copy:
        try:
            os.link(first, copy)
        except OSError:
            pass
        else:
            return
    shutil.copyfile(source, copy)


def _copy_name(file: Path, i: int) -> str:
    """Return the name of the i-th raw trace of a rank: Kineto's as those that chopper records."""
    if readers.reader_of(file) is readers.KINETO:
        with file.open("rb") as opened:
            head = opened.read(4)
        suffix = next((s for magic, s in PACKED.items() if head.startswith(magic)), "")
        return f"trace{f'-{i}' if i else ''}.json{suffix}"
    return f"trace-{file.name}"
