"""Snapshots of torch's caching allocator as typed tables: files, and what a run records itself.

``torch.cuda.memory._dump_snapshot`` writes a pickle. It is read by a machine that knows plain values
only (:mod:`chopper.collectors.snapshot._machine`); nothing of it can run.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from chopper.collectors.snapshot._machine import load
from chopper.collectors.snapshot._tables import tables_of
from chopper.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

__all__ = ["read_snapshot", "sniff", "tables_of"]

_PROTOCOLS = range(2, 6)
_LARGEST_BYTES = 4 << 30


def sniff(head: bytes) -> bool:
    """Whether a file begins as pickles do."""
    return len(head) > 2 and head[0] == 0x80 and head[1] in _PROTOCOLS


def read_snapshot(path: Path) -> dict[str, pa.Table]:
    """ALLOCATOR_SEGMENT, ALLOCATOR_BLOCK and ALLOCATOR_EVENT of a file, packed or not.

    Raises:
        InputError: it is damaged, no snapshot, or holds more than plain values.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
    except OSError as exc:
        raise InputError(f"{path}: cannot be read ({exc.strerror or exc})") from exc
    if data[:2] == b"\x1f\x8b":
        inflate = zlib.decompressobj(wbits=31)
        try:
            data = inflate.decompress(data, _LARGEST_BYTES + 1)
        except zlib.error as exc:
            raise InputError(f"{path}: the gzip stream is damaged ({exc})") from exc
    if len(data) > _LARGEST_BYTES:
        raise InputError(
            f"{path}: a snapshot of more than {_LARGEST_BYTES >> 30} GiB; record fewer entries "
            "(max_entries)"
        )
    return tables_of(load(data, str(path)), str(path))
