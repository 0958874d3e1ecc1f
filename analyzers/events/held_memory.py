"""What held a device's memory when an allocation failed, or when a snapshot of it was taken."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.events.allocations import SIGNS, is_held, known_bytes
from chopper.analyzers.trace.columns import dictionary, ints, matching, strings
from chopper.storage.run import Run
from chopper.wording import bytes_, device_name, plural, ratio

_LIBRARY = ("site-packages/", "dist-packages/", "<frozen ", "/torch/")
_HOLDERS = 5
_EXPAND = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
_HOLD_LESS = (
    "Hold less: free what the largest holder keeps, use smaller micro-batches with gradient "
    "accumulation, recompute activations, or shard parameters and optimizer states (`chopper "
    "estimate memory` predicts what each needs)."
)


class HeldMemory(NamedTuple):
    """Memory of one device of a rank, at the last allocation that failed or else at the end.

    Attributes:
        asked_bytes, free_bytes: of the allocation that failed, and what the driver had left; None
            without one, or where that was not recorded.
        asked_by: source line of the allocation that failed.
        allocated_bytes, reserved_bytes: held by tensors, and reserved from the driver, then.
        peak_bytes: most that tensors held in the history; None without a history.
        holders: as `holders_of` gives them.
    """

    rank: int
    device: str
    asked_bytes: int | None
    free_bytes: int | None
    asked_by: str | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    peak_bytes: int | None
    holders: list[dict[str, Any]]

    @property
    def headline(self) -> str:
        """What happened, in one sentence."""
        held, reserved = bytes_(self.allocated_bytes), bytes_(self.reserved_bytes)
        most = f"; the largest holder is {self.largest[0]}" if self.holders else ""
        if self.asked_bytes is not None:
            return (
                f"Out of memory on {self.device}: asked for {bytes_(self.asked_bytes)}, free "
                f"{bytes_(self.free_bytes)}, allocated {held}, reserved {reserved}{most}."
            )
        peak = "" if self.peak_bytes is None else f" at the end, {bytes_(self.peak_bytes)} at most"
        return f"Tensors on {self.device} held {held}{peak}; {reserved} were reserved{most}."

    @property
    def largest(self) -> list[str]:
        """The largest holders, most memory first."""
        return [
            f"{row['where'] or 'no stack recorded'}: {bytes_(row['held_bytes'])}, "
            f"{ratio(row['share_ratio'])}, {plural(row['block_count'], 'block')}"
            for row in self.holders[:_HOLDERS]
        ]

    @property
    def detail(self) -> str:
        """The largest holders, and what to do where an allocation failed."""
        text = f"Next holders: {'; '.join(self.largest[1:])}." if len(self.holders) > 1 else ""
        if self.asked_bytes is None:
            history = "" if self.peak_bytes is not None else " The peak is unknown: no history."
            return f"{text}{history}".strip()
        text += f" It was asked for at {self.asked_by}." if self.asked_by else ""
        unused = (self.reserved_bytes or 0) - (self.allocated_bytes or 0)
        remedy = _HOLD_LESS
        if unused >= self.asked_bytes:
            remedy = f"{bytes_(unused)} were reserved and unused, but not in one piece: {_EXPAND}"
        return f"{text} {remedy}".strip()


def source_line(stack: str) -> str:
    """Return the innermost Python line of a stack outside of libraries, or else its innermost."""
    lines = stack.split("\n")
    python = [line for line in lines if ".py:" in line]
    own = [line for line in python if not any(part in line for part in _LIBRARY)]
    return (own or python or lines)[0]


def held_memory(recording: Run) -> list[HeldMemory]:
    """ALLOCATOR_SEGMENT, ALLOCATOR_BLOCK, ALLOCATOR_EVENT -> memory of each rank's devices.

    Devices on which an allocation failed come first, then those with most memory held.
    """
    found = []
    for rank in recording.ranks:
        names = ("allocator_segment", "allocator_block", "allocator_event")
        tables = [recording.table(rank, name) for name in names]
        devices = np.unique(np.concatenate([ints(table, "device_id") for table in tables]))
        for device in devices.tolist():
            own = [table.filter(pc.equal(table["device_id"], device)) for table in tables]
            found.append(_of_device(rank, device, *own))
    found.sort(key=lambda one: (one.asked_bytes is None, -(one.allocated_bytes or 0)))
    return found


def _of_device(
    rank: int, device: int, segments: pa.Table, blocks: pa.Table, events: pa.Table
) -> HeldMemory:
    failed = np.flatnonzero(matching(*strings(events, "action"), lambda action: action == "oom"))
    at = int(failed[-1]) if len(failed) else len(events)
    asked = events.slice(at, 1).to_pylist()[0] if len(failed) else {}
    ended = {
        "allocated_bytes": known_bytes(ints(segments, "allocated_bytes", null=0).sum()),
        "reserved_bytes": known_bytes(ints(segments, "total_bytes", null=0).sum()),
    }
    return HeldMemory(
        rank=rank,
        device=device_name(device),
        asked_bytes=asked.get("size_bytes"),
        free_bytes=asked.get("device_free_bytes"),
        asked_by=source_line(asked["frames"]) if asked.get("frames") else None,
        peak_bytes=known_bytes(ints(events, "allocated_bytes").max(initial=-1)),
        holders=holders_of(*_blocks_at(blocks, events, at)),
        **{name: asked.get(name, value) for name, value in ended.items()},
    )


def holders_of(sizes: np.ndarray, codes: np.ndarray, stacks: list[str]) -> list[dict[str, Any]]:
    """Return blocks by source line, most memory first. -> MEMORY_HOLDERS without rank and device.

    Args:
        sizes: bytes of each block.
        codes: its stack among ``stacks``; -1 for none.
    """
    lines = dictionary(codes, list(map(source_line, stacks))).cast(pa.string())
    table = pa.table([lines, pa.array(sizes)], ["where", "size"])
    groups = table.group_by("where").aggregate([("size", f) for f in ("sum", "max", "count")])
    return [
        {
            "held_bytes": row["size_sum"],
            "share_ratio": row["size_sum"] / (int(sizes.sum()) or 1),
            "block_count": row["size_count"],
            "largest_bytes": row["size_max"],
            "where": row["where"],
        }
        for row in groups.sort_by([("size_sum", "descending"), ("where", "ascending")]).to_pylist()
    ]


def _blocks_at(
    blocks: pa.Table, events: pa.Table, at: int
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return the sizes and stacks (as codes, -1 for none) of the blocks in use before an event.

    A block was in use from its allocation, or from before the history, until it was freed.
    """
    block_codes, block_stacks = strings(blocks, "frames")
    block_bytes, held = ints(blocks, "size_bytes", null=0), is_held(blocks)
    if at == len(events):
        return block_bytes[held], block_codes[held], block_stacks
    codes, actions = strings(events, "action")
    sign = np.array([SIGNS.get(a, 0) for a in actions], dtype=np.int64)[codes]
    rows = np.flatnonzero(sign)
    address, size = ints(events, "address_id"), ints(events, "size_bytes", null=0)
    rows = rows[np.lexsort((rows, address[rows]))]
    begins = np.append(True, address[rows][1:] != address[rows][:-1])[: len(rows)]
    freed = np.append(np.where(begins[1:], len(events), rows[1:]), len(events))[: len(rows)]
    allocates = sign[rows] > 0
    in_use = np.where(allocates, (rows < at) & (freed >= at), begins & (rows >= at))
    event_codes, event_stacks = strings(events, "frames")
    untouched = held & ~np.isin(ints(blocks, "address_id"), address[rows])
    # Who frees a block did not allocate it.
    stacks = np.where(allocates, event_codes[rows], -1)[in_use]
    older = block_codes[untouched]
    older = np.where(older >= 0, older + len(event_stacks), -1)
    sizes = np.append(size[rows][in_use], block_bytes[untouched])
    return sizes, np.append(stacks, older), [*event_stacks, *block_stacks]
