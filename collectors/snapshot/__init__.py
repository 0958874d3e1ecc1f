"""Snapshots of torch's caching allocator as typed tables: files, and what a run records itself.

``torch.cuda.memory._dump_snapshot`` writes a pickle. It is read by a machine that knows plain
values only (:mod:`chopper.collectors.snapshot._plain_pickle`); nothing of it can run.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from chopper.collectors.formats.unpack import DAMAGE, pieces
from chopper.collectors.snapshot._plain_pickle import load
from chopper.collectors.snapshot._tables import tables_of
from chopper.errors import InputError
from chopper.limits import Intake

__all__ = ["read_snapshot", "sniff", "tables_of"]

_PROTOCOLS = range(2, 6)
_HELD_RATIO = 40
"""Memory for each byte of a pickle: an entry of 60 bytes becomes a dict, and a row."""


def sniff(head: bytes) -> bool:
    """Return whether a file begins as pickles do."""
    return len(head) > 2 and head[0] == 0x80 and head[1] in _PROTOCOLS


def read_snapshot(path: Path) -> dict[str, pa.Table]:
    """ALLOCATOR_SEGMENT, ALLOCATOR_BLOCK and ALLOCATOR_EVENT of a file, packed or not.

    Raises:
        InputError: it is damaged, no snapshot, or holds more than plain values.
    """
    try:
        with path.open("rb") as file:
            data = b"".join(pieces(file, Intake(path, _HELD_RATIO)))
    except OSError as exc:
        raise InputError(f"{path}: cannot be read ({exc.strerror or exc})") from exc
    except DAMAGE as exc:
        raise InputError(f"{path}: the gzip stream is damaged ({exc})") from exc
    return tables_of(load(data, str(path)), str(path), len(data))
