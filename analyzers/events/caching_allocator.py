"""A model of PyTorch's caching allocator: which block serves a request, when segments are reserved.

The rules are those that PyTorch documents for its CUDA and HIP allocator with default settings
(https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management):

- a request is rounded up to 512 B; up to 1 MiB it is served by the small pool, else by the large;
- the smallest free block that fits, of the same pool and stream, serves it; the lowest address of
  equal ones;
- without one a segment is reserved: 2 MiB in the small pool; in the large one 20 MiB for requests
  below 10 MiB, otherwise the request rounded up to 2 MiB;
- a larger block is split if the rest is at least 512 B (small) or more than 1 MiB (large);
- a freed block merges with free neighbours of its segment;
- where the driver has no memory left, unused segments are released and the request is repeated.

Expandable segments, private pools of graphs, ``max_split_size_mb``, ``roundup_power2_divisions``
and the garbage collection threshold are not modelled.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

_MIB = 1 << 20
_ROUND_BYTES = 512
_SMALL_BYTES = _MIB
_SMALL_SEGMENT_BYTES = 2 * _MIB
_LARGE_SEGMENT_BYTES = 20 * _MIB
_OWN_SEGMENT_BYTES = 10 * _MIB
_SEGMENT_ROUND_BYTES = 2 * _MIB
_FIRST_ADDRESS = 1 << 40


class OutOfMemoryError(Exception):
    """A request that does not fit although all unused segments were released."""


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment. Its neighbours in the segment are linked; None at the edges."""

    address: int
    size_bytes: int
    stream_id: int
    small: bool
    in_use: bool = False
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)

    @property
    def key(self) -> tuple[int, int]:
        """Order of the search for the best fit."""
        return self.size_bytes, self.address


def rounded_bytes(requested_bytes: int) -> int:
    """Return the size of the block that a request needs."""
    return max(_ROUND_BYTES, -(-requested_bytes // _ROUND_BYTES) * _ROUND_BYTES)


def segment_bytes(block_bytes: int) -> int:
    """Return the size of the segment that is reserved for a block of a rounded size."""
    if block_bytes <= _SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if block_bytes < _OWN_SEGMENT_BYTES:
        return _LARGE_SEGMENT_BYTES
    return -(-block_bytes // _SEGMENT_ROUND_BYTES) * _SEGMENT_ROUND_BYTES


def is_small(block_bytes: int) -> bool:
    """Return whether the small pool serves blocks of this rounded size."""
    return block_bytes <= _SMALL_BYTES


def is_split(rest_bytes: int, *, small: bool) -> bool:
    """Return whether a block is split when this much of it is left over."""
    return rest_bytes >= _ROUND_BYTES if small else rest_bytes > _SMALL_BYTES


class CachingAllocator:
    """Serves requests as PyTorch's allocator does, on addresses without memory.

    Args:
        capacity_bytes: what the driver gives at most; None for no limit.
        before_release: called before unused segments are released, to free what waits for events.

    Attributes:
        reserved_bytes: size of all segments.
        active_bytes: size of all blocks in use.
        retries_count: requests for which unused segments were released.
        segments_count: segments reserved since the beginning.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        before_release: Callable[[], object] = lambda: None,
    ) -> None:
        self.reserved_bytes = self.active_bytes = self.retries_count = self.segments_count = 0
        self._capacity_bytes = capacity_bytes
        self._before_release = before_release
        self._free: dict[tuple[bool, int], list[tuple[int, int]]] = {}
        self._blocks: dict[int, Block] = {}
        """Free blocks by address."""
        self._segments: dict[int, int] = {}
        """Size by address."""
        self._next_address = _FIRST_ADDRESS

    def adopt(
        self, address: int, size_bytes: int, stream_id: int, *, small: bool, used: dict[int, int]
    ) -> list[Block]:
        """Take over a segment with blocks in use (address -> size); return those blocks."""
        blocks: list[Block] = []
        at, end = address, address + size_bytes
        for start, size in [*sorted(used.items()), (end, 0)]:
            if start > at:
                blocks.append(Block(at, start - at, stream_id, small))
            if size:
                blocks.append(Block(start, size, stream_id, small, in_use=True))
            at = start + size
        for before, after in pairwise(blocks):
            before.after, after.before = after, before
        for block in blocks:
            if block.in_use:
                self.active_bytes += block.size_bytes
            else:
                self._insert(block)
        self._add_segment(address, size_bytes)
        return [block for block in blocks if block.in_use]

    def allocate(
        self, requested_bytes: int, stream_id: int, *, address_of_segment: int | None = None
    ) -> Block:
        """Return the block that serves a request.

        Args:
            requested_bytes: before rounding.
            stream_id: whose free blocks may serve it.
            address_of_segment: where the driver would place a new segment, if that is known.

        Raises:
            OutOfMemoryError: it does not fit in the capacity.
        """
        size = rounded_bytes(requested_bytes)
        small = is_small(size)
        free = self._free.get((small, stream_id), [])
        at = bisect_left(free, (size, -(1 << 63)))
        if at < len(free):
            block = self._blocks.pop(free.pop(at)[1])
        else:
            block = self._reserve(size, stream_id, small, address_of_segment)
        if is_split(block.size_bytes - size, small=small):
            rest = Block(block.address + size, block.size_bytes - size, stream_id, small)
            rest.before, rest.after = block, block.after
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size_bytes = rest, size
            self._insert(rest)
        block.in_use = True
        self.active_bytes += block.size_bytes
        return block

    def free(self, block: Block) -> None:
        """Take a block back and merge it with its free neighbours."""
        block.in_use = False
        self.active_bytes -= block.size_bytes
        before, after = block.before, block.after
        if before is not None and not before.in_use:
            self._remove(before)
            block.address, block.before = before.address, before.before
            block.size_bytes += before.size_bytes
            if block.before is not None:
                block.before.after = block
        if after is not None and not after.in_use:
            self._remove(after)
            block.size_bytes += after.size_bytes
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        self._insert(block)

    def release_unused(self) -> None:
        """Give all segments without a block in use back to the driver."""
        for block in [b for b in self._blocks.values() if b.before is None and b.after is None]:
            self._remove(block)
            self.reserved_bytes -= self._segments.pop(block.address)

    def _reserve(self, size: int, stream_id: int, small: bool, address: int | None) -> Block:
        total = segment_bytes(size)
        if not self._fits(total):
            self.retries_count += 1
            self._before_release()
            self.release_unused()
            if not self._fits(total):
                raise OutOfMemoryError(f"{total} bytes beside {self.reserved_bytes} reserved")
        if address is None or self._is_taken(address, total):
            address = self._next_address
        self._add_segment(address, total)
        self.segments_count += 1
        return Block(address, total, stream_id, small)

    def _add_segment(self, address: int, size_bytes: int) -> None:
        self._segments[address] = size_bytes
        self._next_address = max(self._next_address, address + size_bytes)
        self.reserved_bytes += size_bytes

    def _is_taken(self, address: int, total: int) -> bool:
        return any(a < address + total and address < a + n for a, n in self._segments.items())

    def _fits(self, total: int) -> bool:
        return self._capacity_bytes is None or self.reserved_bytes + total <= self._capacity_bytes

    def _insert(self, block: Block) -> None:
        insort(self._free.setdefault((block.small, block.stream_id), []), block.key)
        self._blocks[block.address] = block

    def _remove(self, block: Block) -> None:
        free = self._free[block.small, block.stream_id]
        del free[bisect_left(free, block.key)]
        del self._blocks[block.address]
