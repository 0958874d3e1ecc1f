"""What torch's caching allocator held and did, as a snapshot of it tells."""

from __future__ import annotations

from chopper.tables._base import Column, Table

_DEVICE = Column(name="device_id", type="int32", doc="Device ordinal.")


def _maybe(name: str, doc: str, unit: str | None = None) -> Column:
    return Column(name=name, type="int64", unit=unit, nullable=True, doc=doc)


def _string(name: str, doc: str) -> Column:
    return Column(name=name, type="string", nullable=True, doc=doc)


_FRAMES = _string(
    "frames", "Call stack, a line per frame (file:line: function), innermost first, where recorded."
)

ALLOCATOR_SEGMENT = Table(
    "allocator_segment",
    1,
    "What the allocator held from the driver when the snapshot was taken.",
    (
        _DEVICE,
        _maybe("address_id", "Address."),
        _maybe("stream_id", "Stream that it serves."),
        _string("kind", "small or large."),
        _maybe("total_bytes", "Size.", "bytes"),
        _maybe("allocated_bytes", "Of that, held by tensors.", "bytes"),
        _maybe("active_bytes", "The same, and what waits for a stream to let go.", "bytes"),
        _maybe("requested_bytes", "What tensors had asked for, before rounding.", "bytes"),
        Column(name="expandable", type="bool", doc="Whether it can grow."),
    ),
)

ALLOCATOR_BLOCK = Table(
    "allocator_block",
    1,
    "Blocks of those segments: tensors, and the gaps between them.",
    (
        _DEVICE,
        _maybe("segment_address_id", "Address of its segment."),
        _maybe("address_id", "Address."),
        _maybe("size_bytes", "Size.", "bytes"),
        _maybe("requested_bytes", "What was asked for, before rounding.", "bytes"),
        _string("state", "active_allocated, active_awaiting_free or inactive."),
        _FRAMES,
    ),
)

ALLOCATOR_EVENT = Table(
    "allocator_event",
    1,
    "The allocator's history before the snapshot, in time order; it begins where the recorder's "
    "limit of entries cut it off.",
    (
        Column(name="time_ns", type="int64", unit="ns", doc="Unix time, recorded to 1 µs."),
        _DEVICE,
        Column(
            name="action",
            type="string",
            doc="alloc, free_requested, free_completed, segment_alloc, segment_free, oom …",
        ),
        _maybe("address_id", "Address of the block or segment."),
        _maybe("size_bytes", "Its size.", "bytes"),
        _maybe("stream_id", "Stream."),
        _maybe("allocated_bytes", "Held by tensors after the event.", "bytes"),
        _maybe("reserved_bytes", "Held from the driver after the event.", "bytes"),
        _FRAMES,
    ),
)

MEMORY_TABLES = (ALLOCATOR_SEGMENT, ALLOCATOR_BLOCK, ALLOCATOR_EVENT)
