"""Derived tables kept on disk, keyed by the hash of what they were made from; safe to delete.

Beside the tables of a trace stands ``about.json``: the key, how many traces the file holds, and
what is known of this one. It is written last: without it there is no entry.
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
from chopper.errors import SchemaError
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
    count: int
    """Traces in the source; each has a folder of its own."""
    head: msgspec.Raw
    """What is known of this trace, as whoever wrote it encodes it."""


@functools.cache
def _reader() -> bytes:
    """The reader's version and text: between releases the version alone stays the same."""
    state = hashlib.blake2b(__version__.encode(), digest_size=16)
    folder = Path(__file__).parent / "collectors"
    for file in sorted([*folder.glob("kineto/*.py"), *folder.glob("formats/*.py")]):
        state.update(file.read_bytes())
    for name in ("_arrays.py", "parsed.py"):
        state.update((folder / name).read_bytes())
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
        about = msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)
        if about.key != key:
            return None
        found: dict[str, pa.Table] = {}
        for declared in KEPT_TABLES:
            table = pq.read_table(folder / f"{declared.name}.parquet", memory_map=True)
            found[declared.name] = declared.validate(table.select(declared.arrow.names)).cast(
                declared.arrow
            )
    except (OSError, KeyError, SchemaError, msgspec.MsgspecError, pa.ArrowException):
        return None
    return found, about


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

    mark = f".{os.getpid()}.tmp"
    try:
        folder.mkdir(exist_ok=True)
        (folder / ABOUT).unlink(missing_ok=True)
        for declared in KEPT_TABLES:
            table = TABLES[declared.name].validate(tables.get(declared.name, declared.empty()))
            target = folder / f"{declared.name}.parquet"
            temporary = target.with_name(f".{target.name}{mark}")
            pq.write_table(table, temporary, compression="zstd")
            temporary.replace(target)
        about = msgspec.json.encode(About(key=key, count=count, head=msgspec.Raw(head)))
        temporary = folder / f".{ABOUT}{mark}"
        temporary.write_bytes(about)
        temporary.replace(folder / ABOUT)
    except (OSError, pa.ArrowException):
        # A full disk must not keep half a table.
        for rest in folder.glob(f".*{mark}"):
            with contextlib.suppress(OSError):
                rest.unlink()
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
