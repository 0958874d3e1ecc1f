"""Trees that sources read, what they read, and what a sampler wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from chopper.collectors.sampler import Sink
from chopper.storage.streams import read_stream
from chopper.tables import TABLES

MS = 1_000_000
SECOND = 1_000_000_000


def rows(directory: Path, table: str = "nic") -> pa.Table:
    read, finding = read_stream(directory / f"{table}.arrow", table)
    assert finding is None, finding
    return read


def put(root: Path, path: str, text: str) -> Path:
    """Write a file in place, as the kernel's files change: a kept descriptor sees the new text."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("r+" if file.exists() else "w") as out:
        out.write(text)
        out.truncate()
    return file


def take(source: Any, now_ns: int = 0) -> list[tuple[Any, ...]]:
    """Read a source once; return the values of each row after its times."""
    sink = Sink()
    source.sample(sink, now_ns)
    return [values for _, values in sink.take()]


def taken(source: Any, now_ns: int = 0) -> list[dict[str, Any]]:
    """Read a source once; return its rows by column."""
    sink = Sink()
    source.sample(sink, now_ns)
    return [
        dict(zip([c.name for c in TABLES[table].columns][2:], values, strict=True))
        for table, values in sink.take()
    ]
