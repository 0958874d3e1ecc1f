"""Memory in use by the source line that allocated it, when a snapshot was taken.

A block's line is the innermost Python line, outside of installed packages, of the stack that
allocated it; or else its innermost line.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.allocations import is_held
from chopper.analyzers.events.held_memory import source_line
from chopper.analyzers.trace.columns import dictionary, strings
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


def memory_holders(run: Attributed) -> pa.Table:
    """ALLOCATOR_BLOCK -> MEMORY_HOLDERS, most memory first."""
    rows: list[dict[str, Any]] = []
    for rank in run.recording.ranks:
        blocks = run.recording.table(rank, "allocator_block")
        blocks = blocks.filter(is_held(blocks))
        codes, stacks = strings(blocks, "frames")
        lines_of = dictionary(codes, list(map(source_line, stacks))).cast(pa.string())
        sizes = pc.fill_null(blocks["size_bytes"], 0)
        blocks = pa.table([blocks["device_id"], lines_of, sizes], ["device_id", "where", "size"])
        columns = [("size", "sum"), ("size", "max"), ("size", "count")]
        by_line = blocks.group_by(["device_id", "where"]).aggregate(columns)
        in_use = blocks.group_by("device_id").aggregate([("size", "sum")]).to_pylist()
        total = {row["device_id"]: row["size_sum"] for row in in_use}
        for row in by_line.sort_by(
            [("device_id", "ascending"), ("where", "ascending")]
        ).to_pylist():
            rows.append(
                {
                    "rank": rank,
                    "device": device_name(row["device_id"]),
                    "held_bytes": row["size_sum"],
                    "share_ratio": row["size_sum"] / (total[row["device_id"]] or 1),
                    "block_count": row["size_count"],
                    "largest_bytes": row["size_max"],
                    "where": row["where"],
                }
            )
    rows.sort(key=lambda r: -r["held_bytes"])
    return VIEW.of_rows(rows)
