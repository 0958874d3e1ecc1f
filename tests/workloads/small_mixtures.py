"""Small mixtures on disk, for the tests of loading; each is written once and removed at the end."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from chopper.workloads.planning import Cost, Draw
from chopper.workloads.sources import SourceSpec, write_sources

HOME = tempfile.TemporaryDirectory(prefix="chopper-mixtures-")


@functools.cache
def sources(fault: str = "none", count: int = 5, **changes: Any) -> tuple[SourceSpec, ...]:
    """Sources as the workload makes them.

    ``fault``: storage of the second one ``raises`` (its images are missing) or ``hangs`` (they are
    a pipe that nobody writes to).
    """
    options: dict[str, Any] = {
        "state_bytes": 50_000,
        "latency_s": 1e-4,
        "tokens": 20,
        "longest": 64,
        "seed": 2,
    }
    folder = Path(tempfile.mkdtemp(dir=HOME.name))
    specs = write_sources(folder, count=count, **options | changes)
    if fault != "none":
        images = folder / specs[1].name / "images.bin"
        images.unlink()
        if fault == "hangs":
            os.mkfifo(images)
    return specs


@functools.cache
def of_lengths(name: str, lengths: tuple[int, ...], rows: int, number: int = 0) -> SourceSpec:
    """A source of texts of so many tokens, in row groups of so many rows."""
    path = Path(tempfile.mkdtemp(dir=HOME.name)) / "0.parquet"
    texts = ["x" * length for length in lengths]
    table = pa.table(
        {"length": pa.array(lengths, pa.int64()), "text": pa.array(texts, pa.string())}
    )
    pq.write_table(table, path, row_group_size=rows)
    groups = [(0, at // rows, min(rows, len(lengths) - at)) for at in range(0, len(lengths), rows)]
    return SourceSpec(
        name=name,
        number=number,
        shards=(str(path),),
        groups=tuple(groups),
        weight=1.0,
        state_bytes=table.nbytes,
    )


def draw(specs: tuple[SourceSpec, ...], **changes: Any) -> Draw:
    """A draw from sources."""
    options: dict[str, Any] = {
        "sources": specs,
        "batch": 4,
        "ranks": 2,
        "seed": 1,
        "cost": Cost(),
        "method": "random",
    }
    return Draw(**options | changes)
