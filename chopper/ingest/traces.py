"""Traces of files, read or as an earlier reading kept them as tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from chopper.errors import InputError, RunFormatError
from chopper.storage.files import JSON_ERRORS, encode_json, inside

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from chopper.collectors.formats.kineto import ParsedTrace

_QUICK_BYTES = 1 << 20
"""Smaller files are read faster than that in any case, so nobody looks for their tables."""


def read(files: Sequence[Path]) -> list[ParsedTrace]:
    """The traces of one recording.

    Raises:
        InputError: it cannot be read.
    """
    from chopper.collectors.formats import readers

    try:
        reader = readers.reader_of(files[0])
    except OSError as exc:
        raise InputError(f"{files[0]}: cannot be read ({exc.strerror or exc})") from exc
    if reader is not None and reader.kind == "counters":
        reader = next(r for r in readers.READERS if r.grouped)
    return (reader or readers.KINETO).read(files)


def from_cache(files: Sequence[Path]) -> list[ParsedTrace] | None:
    """The traces of a recording as an earlier run kept them, or None."""
    from chopper.storage import cache

    file = files[0]
    try:
        if file.stat().st_size < _QUICK_BYTES:
            return None
        base = cache.directory("")
        if base is None or not base.is_dir():
            return None
        key = cache.digest(list(files))
    except OSError:
        return None
    folder = base / key
    traces: list[ParsedTrace] = []
    count = 1
    while len(traces) < count:
        kept = cache.read(folder / str(len(traces)), key)
        if kept is None:
            return None
        tables, about = kept
        count = about.count
        trace = rebuilt(about.head, tables)
        if trace is None:
            return None
        trace.source = file.name
        traces.append(trace)
    cache.prune(folder)
    return traces


def rebuilt(head: bytes, tables: dict[str, pa.Table]) -> ParsedTrace | None:
    """A trace from its tables and what :func:`head` wrote; None where that is another version's."""
    import msgspec

    from chopper.collectors.formats.kineto import ParsedTrace, TraceHead

    try:
        known = msgspec.json.decode(head, type=TraceHead)
    except JSON_ERRORS:
        return None
    return ParsedTrace(**vars(known), tables=tables)


def keep(fresh: list[tuple[list[Path], list[ParsedTrace]]]) -> None:
    """Write what was read to the user's cache; best effort."""
    from chopper.storage import cache

    kept = {table.name for table in cache.KEPT_TABLES}
    for files, traces in fresh:
        if any(not trace.tables.keys() <= kept for trace in traces):
            continue
        try:
            if files[0].stat().st_size < _QUICK_BYTES:
                continue
            key = cache.digest(files)
            folder = cache.directory(key)
            if folder is None:
                return
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return
        for i, trace in enumerate(traces):
            written = cache.write(
                folder / str(i), key, trace.tables, head(trace), count=len(traces)
            )
            if not written:
                return
        cache.prune(folder)


def keep_in_run(folder: Path, key: str, trace: ParsedTrace) -> None:
    """Leave tables in a run directory that is still there; best effort."""
    from chopper.storage import cache

    try:
        if not folder.parent.parent.is_dir():
            return
        inside(folder.parent.parent, Path(folder.parent.name, folder.name))
        folder.parent.mkdir(exist_ok=True)
    except (OSError, RunFormatError):
        return
    cache.write(folder, key, trace.tables, head(trace))


def head(trace: ParsedTrace) -> bytes:
    """What is known of a trace beside its tables."""
    return encode_json(trace.head())
