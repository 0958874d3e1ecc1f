"""What a sampler wrote."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from chopper.storage.streams import read_stream

MS = 1_000_000
SECOND = 1_000_000_000


def rows(directory: Path, table: str = "nic") -> pa.Table:
    read, finding = read_stream(directory / f"{table}.arrow", table)
    assert finding is None, finding
    return read
