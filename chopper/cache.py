"""Derived tables kept on disk, keyed by the hash of what they were made from; safe to delete."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from chopper._version import __version__
from chopper.tables import TABLES, TRACE_TABLES

if TYPE_CHECKING:
    import pyarrow as pa

_KEY = b"chopper.source"


def digest(files: list[Path]) -> str:
    """Hash of the contents of files, in order, and of the reader's version."""
    state = hashlib.blake2b(digest_size=16)
    state.update(__version__.encode())
    state.update(",".join(f"{t.name}={t.version}" for t in TRACE_TABLES).encode())
    for file in files:
        with file.open("rb") as handle:
            while block := handle.read(1 << 20):
                state.update(block)
    return state.hexdigest()


def directory(key: str) -> Path:
    """Where tables of a foreign trace are kept: $XDG_CACHE_HOME/chopper/<key>."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "chopper" / key


def read(folder: Path, key: str) -> dict[str, pa.Table] | None:
    """All trace tables from ``folder``, or None when any is missing, damaged or of another key."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    found: dict[str, pa.Table] = {}
    for declared in TRACE_TABLES:
        file = folder / f"{declared.name}.parquet"
        if not file.is_file():
            return None
        try:
            table = pq.read_table(file, memory_map=True)
        except (OSError, pa.ArrowException):
            return None
        if (table.schema.metadata or {}).get(_KEY) != key.encode():
            return None
        found[declared.name] = table.cast(declared.arrow)
    return found


def write(folder: Path, key: str, tables: dict[str, pa.Table]) -> bool:
    """Keep tables; a place that cannot be written is no error, the next run reads the raw file.

    Returns:
        Whether they were written.
    """
    import pyarrow.parquet as pq

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for declared in TRACE_TABLES:
            table = tables.get(declared.name, declared.empty())
            metadata = {**(table.schema.metadata or {}), _KEY: key.encode()}
            target = folder / f"{declared.name}.parquet"
            temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
            pq.write_table(
                TABLES[declared.name].validate(table).replace_schema_metadata(metadata),
                temporary,
                compression="zstd",
            )
            temporary.replace(target)
    except OSError:
        return False
    return True
