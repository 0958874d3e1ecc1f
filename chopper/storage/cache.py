"""Derived tables kept on disk, keyed by the hash of what they were made from; safe to delete.

Beside the tables of a trace stands ``about.json``: the key, how many traces the file holds, and
what is known of this one, with a hash of all of it. It is written last: without it there is no entry, and an
entry whose hash differs is not used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from chopper._version import __version__
from chopper.errors import InputError, OutputError, SchemaError
from chopper.storage.files import arrow_errors, read_bytes, write_atomic
from chopper.tables import TABLES, TRACE_TABLES

if TYPE_CHECKING:
    import pyarrow as pa

ABOUT = "about.json"
KEPT_TABLES = tuple(t for t in TRACE_TABLES if t.name not in ("layer_sequence", "program_phase"))
"""Tables made from a raw trace; the other two are recorded beside it."""
_KEPT_S = 30 * 24 * 3600
"""Entries of foreign traces that nobody has read for a month are dropped."""


class About(msgspec.Struct, kw_only=True):
    """What stands beside the tables."""

    key: str
    """Hash of the source."""
    digest: str
    """Hash of all else that is here, the tables' files included: nothing damaged is used."""
    count: int
    """Traces in the source; each has a folder of its own."""
    head: msgspec.Raw
    """What is known of this trace, as whoever wrote it encodes it."""


@functools.cache
def _reader() -> bytes:
    """The reader's version and text: between releases the version alone stays the same."""
    state = hashlib.blake2b(__version__.encode(), digest_size=16)
    formats = Path(__file__).parents[1] / "collectors" / "formats"
    for file in sorted(formats.glob("**/*.py")):
        state.update(file.read_bytes())
    return state.digest()


def digest(files: list[Path]) -> str:
    """Hash of the contents of files, in order, and of the reader that makes tables of them."""
    state = hashlib.blake2b(digest_size=16)
    state.update(_reader())
    state.update(",".join(f"{t.name}={t.version}" for t in KEPT_TABLES).encode())
    for file in files:
        with file.open("rb") as handle:
            while block := handle.read(1 << 20):
                state.update(block)
    return state.hexdigest()


def directory(key: str) -> Path | None:
    """Where a foreign trace is kept: $XDG_CACHE_HOME/chopper/<key>; None without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "chopper" / key
    except RuntimeError:
        return None


def read(folder: Path, key: str) -> tuple[dict[str, pa.Table], About] | None:
    """All trace tables in ``folder``, or None when any is missing, damaged or of another key."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        about = msgspec.json.decode(read_bytes(folder / ABOUT), type=About)
        if about.key != key:
            return None
        files = {t.name: read_bytes(folder / f"{t.name}.parquet") for t in KEPT_TABLES}
        if about.digest != _digest_of(about, files):
            return None
        found: dict[str, pa.Table] = {}
        for declared in KEPT_TABLES:
            table = pq.read_table(
                pa.BufferReader(files.pop(declared.name)), page_checksum_verification=True
            )
            table.validate(full=True)
            found[declared.name] = declared.validate(table.select(declared.arrow.names)).cast(
                declared.arrow
            )
    except arrow_errors():
        return None
    except (KeyError, InputError, SchemaError, RecursionError):
        return None
    return found, about


def _digest_of(about: About, files: dict[str, bytes]) -> str:
    """Hash of an entry: what ``about.json`` says, and the files of the tables."""
    state = hashlib.blake2b(digest_size=16)
    state.update(msgspec.json.encode([about.key, about.count]))
    for part in (bytes(about.head), *files.values()):
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def write(
    folder: Path, key: str, tables: dict[str, pa.Table], head: bytes, *, count: int = 1
) -> bool:
    """Keep tables; a place that cannot be written is no error, the next run reads the raw file.

    Args:
        folder: where to; its parent must exist.
        key: hash of the source.
        tables: those of :data:`KEPT_TABLES` that there are.
        head: JSON of what is known of the trace.
        count: traces in the source.

    Returns:
        Whether they were written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        folder.mkdir(exist_ok=True)
        (folder / ABOUT).unlink(missing_ok=True)
        files: dict[str, bytes] = {}
        for declared in KEPT_TABLES:
            table = TABLES[declared.name].validate(tables.get(declared.name, declared.empty()))
            out = pa.BufferOutputStream()
            pq.write_table(table, out, compression="zstd", write_page_checksum=True)
            files[declared.name] = out.getvalue().to_pybytes()
            write_atomic(folder / f"{declared.name}.parquet", files[declared.name])
        about = About(key=key, digest="", count=count, head=msgspec.Raw(head))
        about.digest = _digest_of(about, files)
        write_atomic(folder / ABOUT, msgspec.json.encode(about))
    except (OSError, OutputError, SchemaError, pa.ArrowException):
        return False
    return True


def prune(folder: Path) -> None:
    """Drop entries beside ``folder`` that were not read for a month, and mark this one as read."""
    import shutil

    with contextlib.suppress(OSError):
        os.utime(folder)
        for entry in folder.parent.iterdir():
            if entry.is_dir() and time.time() - entry.stat().st_mtime > _KEPT_S:
                shutil.rmtree(entry, ignore_errors=True)
