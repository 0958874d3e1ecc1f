"""Reader of Kineto traces: every dialect that PyTorch has written, whole or damaged.

``read_trace(path)`` gives one :class:`ParsedTrace` per rank and device in the file, as declared
tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from chopper.collectors.formats.kineto._assemble import read_trace
from chopper.collectors.formats.parsed import ParsedTrace

__all__ = ["ParsedTrace", "read", "read_trace"]


def read(files: Sequence[Path]) -> list[ParsedTrace]:
    """Read one file; see :func:`read_trace`."""
    (path,) = files
    return read_trace(path)
