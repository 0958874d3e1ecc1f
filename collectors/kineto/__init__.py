"""Reader of Kineto traces: every dialect that PyTorch has written, whole or damaged.

``read_trace(path)`` gives one :class:`ParsedTrace` per rank and device in the file, as declared
tables.
"""

from __future__ import annotations

from chopper.collectors.kineto._assemble import read_trace
from chopper.collectors.parsed import ParsedTrace, TraceHead

__all__ = ["ParsedTrace", "TraceHead", "read_trace"]
