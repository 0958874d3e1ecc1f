"""Tables of a snapshot of torch's caching allocator: segments, blocks and history."""

from __future__ import annotations

from chopper.tables._base import Table, column, ns, optional

_DEVICE = column("device_id", "int32", "Device ordinal.")


_FRAMES = optional(
    "frames",
    "string",
    "Call stack, a line per frame (file:line: function), innermost first, where recorded.",
)

ALLOCATOR_SEGMENT = Table(
    "allocator_segment",
    1,
    "What the allocator held from the driver when the snapshot was taken.",
    (
        _DEVICE,
        optional("address_id", "int64", "Address."),
        optional("stream_id", "int64", "Stream that it serves."),
        optional("kind", "string", "small or large."),
        optional("total_bytes", "int64", "Size."),
        optional("allocated_bytes", "int64", "Of that, held by tensors."),
        optional("active_bytes", "int64", "The same, and what waits for a stream to let go."),
        optional("requested_bytes", "int64", "What tensors had asked for, before rounding."),
        column("expandable", "bool", "Whether it can grow."),
    ),
)

ALLOCATOR_BLOCK = Table(
    "allocator_block",
    1,
    "Blocks of those segments: tensors, and the gaps between them.",
    (
        _DEVICE,
        optional("segment_address_id", "int64", "Address of its segment."),
        optional("address_id", "int64", "Address."),
        optional("size_bytes", "int64", "Size."),
        optional("requested_bytes", "int64", "What was asked for, before rounding."),
        optional("state", "string", "active_allocated, active_awaiting_free or inactive."),
        _FRAMES,
    ),
)

ALLOCATOR_EVENT = Table(
    "allocator_event",
    1,
    "The allocator's history before the snapshot, in time order; it begins where the recorder's "
    "limit of entries cut it off.",
    (
        ns("time_ns", "Unix time, recorded to 1 µs."),
        _DEVICE,
        column(
            "action",
            "string",
            "alloc, free_requested, free_completed, segment_alloc, segment_free, oom …",
        ),
        optional("address_id", "int64", "Address of the block or segment."),
        optional("size_bytes", "int64", "Its size."),
        optional("stream_id", "int64", "Stream."),
        optional("allocated_bytes", "int64", "Held by tensors after the event."),
        optional("reserved_bytes", "int64", "Held from the driver after the event."),
        _FRAMES,
    ),
)

MEMORY_TABLES = (ALLOCATOR_SEGMENT, ALLOCATOR_BLOCK, ALLOCATOR_EVENT)
