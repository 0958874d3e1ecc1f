"""Segments that the allocator held from the driver, and their fragmentation.

A gap cannot serve a request larger than itself: the largest gap shows what still fits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.allocations import is_held
from chopper.analyzers.events.groups import Groups, rows_of
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.views import View, column, optional
from chopper.wording import device_name

VIEW = View(
    "memory_segments",
    __doc__,
    (
        column("rank", "Global rank that the row is about.", "int32"),
        column("device", "Device of the memory: `device N`."),
        optional("kind", "Kind of segment: small (blocks of up to 1 MiB) or large."),
        optional("stream_id", "Stream that the segments serve; null where not recorded.", "int64"),
        column("segment_count", "Number of segments."),
        column("reserved_bytes", "Size of the segments, reserved from the driver."),
        column("allocated_bytes", "Bytes of the segments that tensors hold."),
        optional("fragmentation_ratio", "Share of the segments' bytes that no tensor holds."),
        column("gap_count", "Number of gaps between tensors, free segments included."),
        column("largest_gap_bytes", "Size of the largest gap: what fits without a new segment."),
        column("whole_free_bytes", "Bytes in unused segments, which empty_cache() returns."),
        optional("rounding_bytes", "Bytes held beyond what tensors requested."),
    ),
    title="Memory segments",
    section="Memory",
    needs="no snapshot of the allocator (record with memory=True, or import one with the trace)",
)


def memory_segments(run: Attributed) -> pa.Table:
    """ALLOCATOR_SEGMENT, ALLOCATOR_BLOCK -> MEMORY_SEGMENTS, by rank, device, kind and stream."""
    rows: list[dict[str, Any]] = []
    for rank in run.recording.ranks:
        segments = run.recording.table(rank, "allocator_segment")
        if segments.num_rows:
            blocks = run.recording.table(rank, "allocator_block")
            rows += [{"rank": rank} | row for row in _rows(segments, blocks)]
    rows.sort(key=lambda r: -r["reserved_bytes"])
    return VIEW.of_rows(rows)


def _rows(segments: pa.Table, blocks: pa.Table) -> list[dict[str, Any]]:
    kinds, kind_names = strings(segments, "kind")
    device, stream = ints(segments, "device_id"), ints(segments, "stream_id")
    total = ints(segments, "total_bytes", null=0)
    allocated = ints(segments, "allocated_bytes", null=0)
    groups = Groups([device, kinds, stream])
    segment = rows_of(
        [device, ints(segments, "address_id")],
        [ints(blocks, "device_id"), ints(blocks, "segment_address_id")],
    )
    group_of_block = np.append(groups.of_row, -1)[segment]
    size = ints(blocks, "size_bytes", null=0)
    requested = ints(blocks, "requested_bytes", null=0)
    held = is_held(blocks)
    rows = []
    for i, first in enumerate(groups.first.tolist()):
        mine = groups.of_row == i
        gaps = size[(group_of_block == i) & ~held]
        live = (group_of_block == i) & held
        rounding = int(size[live].sum() - requested[live].sum())
        reserved_bytes, allocated_bytes = int(total[mine].sum()), int(allocated[mine].sum())
        rows.append(
            {
                "device": device_name(device[first]),
                "kind": kind_names[kinds[first]] if kinds[first] >= 0 else None,
                "stream_id": stream[first],
                "segment_count": int(mine.sum()),
                "reserved_bytes": reserved_bytes,
                "allocated_bytes": allocated_bytes,
                "fragmentation_ratio": 1 - allocated_bytes / reserved_bytes
                if reserved_bytes
                else None,
                "gap_count": len(gaps),
                "largest_gap_bytes": int(gaps.max(initial=0)),
                "whole_free_bytes": int(total[mine & (allocated == 0)].sum()),
                "rounding_bytes": max(0, rounding) if (requested[live] > 0).any() else None,
            }
        )
    return rows
