"""Memory in use by the source line that allocated it, when a snapshot was taken.

A block's line is the innermost Python line of the stack that allocated it, else its innermost line.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.allocations import is_held
from chopper.analyzers.events.groups import Groups
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
    title="Who holds memory",
    section="Memory",
    needs="no snapshot of the allocator (record with memory=True, or import one beside the trace)",
)


def memory_holders(run: Attributed) -> pa.Table:
    """ALLOCATOR_BLOCK -> MEMORY_HOLDERS, most memory first."""
    rows: list[dict[str, Any]] = []
    for rank in run.recording.ranks:
        blocks = run.recording.table(rank, "allocator_block")
        blocks = blocks.filter(is_held(blocks))
        codes, stacks = strings(blocks, "frames")
        frames = [stack.split("\n") for stack in stacks]
        lines = [next((line for line in of if ".py:" in line), of[0]) for of in frames]
        names = sorted(set(lines))
        number = {name: i for i, name in enumerate(names)}
        line = np.array([*(number[name] for name in lines), -1], dtype=np.int64)[codes]
        device, size = ints(blocks, "device_id"), ints(blocks, "size_bytes", null=0)
        devices = Groups([device])
        in_use = devices.sum(size)
        groups = Groups([device, line])
        largest = np.zeros(len(groups), dtype=np.int64)
        np.maximum.at(largest, groups.of_row, size)
        held = groups.sum(size)
        for i, first in enumerate(groups.first.tolist()):
            total = int(in_use[devices.of_row[first]])
            rows.append(
                {
                    "rank": rank,
                    "device": device_name(device[first]),
                    "held_bytes": int(held[i]),
                    "share_ratio": int(held[i]) / total if total else 0.0,
                    "block_count": int(groups.count[i]),
                    "largest_bytes": int(largest[i]),
                    "where": names[line[first]] if line[first] >= 0 else None,
                }
            )
    rows.sort(key=lambda r: -r["held_bytes"])
    return VIEW.of_rows(rows)
