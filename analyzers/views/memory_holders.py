"""Memory in use by the source line that allocated it, when a snapshot was taken.

A block's line is the innermost Python line, outside of installed packages, of the stack that
allocated it; or else its innermost line.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.allocations import is_held
from chopper.analyzers.events.held_memory import holders_of
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.views import View, column, optional
from chopper.wording import device_name

VIEW = View(
    "memory_holders",
    __doc__,
    (
        column("rank", "Global rank that the row is about.", "int32"),
        column("device", "Device of the memory: `device N`."),
        column("held_bytes", "Bytes in the line's blocks that are in use."),
        column("share_ratio", "Share of all bytes in use on the device."),
        column("block_count", "Number of the line's blocks that are in use."),
        column("largest_bytes", "Size of the largest of these blocks."),
        optional("where", "Source line that allocated them; null where none was recorded.", "text"),
    ),
    title="Memory by source line",
    section="Memory",
    needs="no snapshot of the allocator (record with memory=True, or import one with the trace)",
)


def memory_holders(run: Attribution) -> pa.Table:
    """ALLOCATOR_BLOCK -> MEMORY_HOLDERS, most memory first."""
    rows: list[dict[str, Any]] = []
    for rank in run.recording.ranks:
        blocks = run.recording.table(rank, "allocator_block")
        blocks = blocks.filter(is_held(blocks))
        codes, stacks = strings(blocks, "frames")
        device, size = ints(blocks, "device_id"), ints(blocks, "size_bytes", null=0)
        for id_ in np.unique(device).tolist():
            found = holders_of(size[device == id_], codes[device == id_], stacks)
            rows += [{"rank": rank, "device": device_name(id_)} | row for row in found]
    rows.sort(key=lambda r: -r["held_bytes"])
    return VIEW.of_rows(rows)
