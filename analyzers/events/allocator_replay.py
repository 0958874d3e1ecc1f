"""The requests of an allocator's history, served again by a model of the allocator.

The state at the beginning of the history is the snapshot's, with the history undone. Then
:mod:`chopper.analyzers.events.caching_allocator` serves every request, with frees

- as recorded: the replay must reproduce the recorded segments, or nothing else is claimed;
- drawn: a tensor that another stream used (``record_stream``, as in FSDP1) is free once that stream
  has passed an event, so that timing decides which block serves the next request. The recorded
  delays between request and completion are drawn anew among blocks of the same size; the next
  allocation notices a completion, as in PyTorch;
- deferred, as in FSDP2: such a tensor is freed where the program frees the next one of its stream.
  The order of the program alone decides.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.events.allocations import is_held
from chopper.analyzers.events.caching_allocator import (
    Block,
    CachingAllocator,
    OutOfMemoryError,
    is_split,
    rounded_bytes,
)
from chopper.analyzers.trace.columns import ints

MOST_EVENTS = 250_000
_MOST_BYTES = 1 << 40
"""Of one block or segment: more than any device has."""
_MODELLED = {
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "oom", "snapshot",
}  # fmt: skip
_ALLOCATE, _FREE, _REQUEST, _COMPLETE, _RELEASE = range(5)
_SMALL_SEGMENT_BYTES = 2 << 20


class Unreplayable(Exception):
    """Reason why a history cannot be replayed."""


class Event(NamedTuple):
    """One row of ALLOCATOR_EVENT."""

    time_ns: int
    action: str
    address: int
    size_bytes: int
    stream_id: int


class Operation(NamedTuple):
    """A step of the replay: what happens to which block (index into `History.sizes_bytes`)."""

    time_ns: int
    kind: int
    block: int


@dataclass(slots=True)
class Segment:
    """A segment at the beginning of the history, with its blocks in use (address -> size)."""

    address: int
    size_bytes: int
    stream_id: int
    small: bool
    used: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class History:
    """An allocator's history on one device, as requests.

    Attributes:
        segments: at its beginning.
        operations: in order.
        sizes_bytes, streams, addresses: of each block; those in use at the beginning come first.
        segment_addresses: where the driver placed the segment reserved for a block.
        delays_ns: of blocks whose free was requested and completed apart: the time between.
        capacity_bytes: what the driver gave at most, if a retry shows it.
        retries_count, peak_reserved_bytes: as recorded.
        end_reserved_bytes, end_active_bytes: as the snapshot's segments state.
    """

    segments: list[Segment]
    operations: list[Operation] = field(default_factory=list)
    sizes_bytes: list[int] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    segment_addresses: dict[int, int] = field(default_factory=dict)
    delays_ns: dict[int, int] = field(default_factory=dict)
    capacity_bytes: int | None = None
    retries_count: int = 0
    peak_reserved_bytes: int = 0
    end_reserved_bytes: int = 0
    end_active_bytes: int = 0

    def drawn_delays(self, rng: np.random.Generator) -> dict[int, int]:
        """Return the delays, drawn anew with replacement among blocks of the same size."""
        alike: dict[int, list[int]] = defaultdict(list)
        for block in self.delays_ns:
            alike[rounded_bytes(self.sizes_bytes[block])].append(block)
        found: dict[int, int] = {}
        for blocks in alike.values():
            observed = [self.delays_ns[block] for block in blocks]
            found |= zip(blocks, rng.choice(observed, len(blocks)).tolist(), strict=True)
        return found


@dataclass(slots=True)
class Outcome:
    """Totals of a replay.

    Attributes:
        fragmentation_ratio: share of reserved bytes not in use when most were reserved.
        median_fragmentation_ratio: of all operations.
        same_address_ratio: share of requests served at the recorded address; null without any.
        out_of_memory: a request did not fit although unused segments were released.
    """

    peak_reserved_bytes: int
    peak_active_bytes: int
    end_reserved_bytes: int
    end_active_bytes: int
    fragmentation_ratio: float | None
    median_fragmentation_ratio: float | None
    segments_count: int
    retries_count: int
    same_address_ratio: float | None
    out_of_memory: bool


def history_of(segments: pa.Table, blocks: pa.Table, events: pa.Table, device: int) -> History:
    """ALLOCATOR_SEGMENT, ALLOCATOR_BLOCK, ALLOCATOR_EVENT -> the requests of one device.

    Raises:
        Unreplayable: it holds what the model does not know, or contradicts itself.
    """
    segments, blocks, events = (
        t.filter(pc.equal(t["device_id"], device)) for t in (segments, blocks, events)
    )
    if pc.any(segments["expandable"]).as_py():
        raise Unreplayable("expandable segments are not modelled")
    if events.num_rows > MOST_EVENTS:
        raise Unreplayable(f"{events.num_rows} events; at most {MOST_EVENTS} are replayed")
    rows = _events(events)
    other = sorted({e.action for e in rows} - _MODELLED)
    if other:
        raise Unreplayable(f"events that are not modelled: {', '.join(other)}")
    _check_sizes(segments, blocks, rows)
    history = History(
        _undone(segments, blocks, rows),
        peak_reserved_bytes=int(ints(events, "reserved_bytes").max(initial=0)),
        end_reserved_bytes=pc.sum(segments["total_bytes"]).as_py() or 0,
        end_active_bytes=pc.sum(segments["active_bytes"]).as_py() or 0,
    )
    _add_operations(history, rows, ints(events, "reserved_bytes").tolist())
    return history


def _events(events: pa.Table) -> list[Event]:
    numbers = (ints(events, n) for n in ("time_ns", "address_id", "size_bytes", "stream_id"))
    time_ns, address, size, stream = (values.tolist() for values in numbers)
    actions = events["action"].to_pylist()
    return [Event(*row) for row in zip(time_ns, actions, address, size, stream, strict=True)]


def _check_sizes(segments: pa.Table, blocks: pa.Table, events: list[Event]) -> None:
    sizes = (ints(segments, "total_bytes"), ints(blocks, "size_bytes"))
    for size in (*np.concatenate(sizes).tolist(), *(e.size_bytes for e in events)):
        if not 0 <= size <= _MOST_BYTES:
            raise Unreplayable("a size in the snapshot is unknown, or larger than any device")


def _undone(segments: pa.Table, blocks: pa.Table, events: list[Event]) -> list[Segment]:
    """Return the segments before the history, with the blocks in use then."""
    columns = (ints(segments, n) for n in ("address_id", "total_bytes", "stream_id"))
    kinds = segments["kind"].to_pylist()
    found = {
        address: Segment(address, size, stream, kind == "small")
        for address, size, stream, kind in zip(*(c.tolist() for c in columns), kinds, strict=True)
    }
    held = blocks.filter(pa.array(is_held(blocks)))
    sizes = (ints(held, n).tolist() for n in ("address_id", "size_bytes"))
    used = dict(zip(*sizes, strict=True))
    for event in reversed(events):
        known = True
        if event.action == "alloc":
            known = used.pop(event.address, None) is not None
        elif event.action == "free_completed":
            known = event.address not in used
            used[event.address] = rounded_bytes(event.size_bytes)
        elif event.action == "segment_alloc":
            known = found.pop(event.address, None) is not None
        elif event.action == "segment_free":
            known = event.address not in found
            small = event.size_bytes == _SMALL_SEGMENT_BYTES
            found[event.address] = Segment(event.address, event.size_bytes, event.stream_id, small)
        if not known:
            raise Unreplayable(
                f"the history contradicts the blocks at its end ({event.action} of "
                f"{event.size_bytes} bytes)"
            )
    _put_into(found, used)
    return list(found.values())


def _put_into(segments: dict[int, Segment], used: dict[int, int]) -> None:
    """Give each segment its blocks; what would not have been split off belongs to its block."""
    listed = sorted(segments.values(), key=lambda s: s.address)
    if any(a.address + a.size_bytes > b.address for a, b in pairwise(listed)):
        raise Unreplayable("two segments overlap")
    order = np.array([s.address for s in listed], dtype=np.int64)
    for address, size in used.items():
        at = int(np.searchsorted(order, address, side="right")) - 1
        segment = listed[at] if at >= 0 else None
        if segment is None or address + size > segment.address + segment.size_bytes:
            raise Unreplayable(f"a block of {size} bytes lies in no segment")
        segment.used[address] = size
    for segment in listed:
        segment.used = dict(sorted(segment.used.items()))
        end = segment.address + segment.size_bytes
        for address in sorted(segment.used, reverse=True):
            rest = end - address - segment.used[address]
            if rest < 0:
                raise Unreplayable("two blocks in use overlap")
            if rest and not is_split(rest, small=segment.small):
                segment.used[address] += rest
            end = address


def _add_operations(history: History, events: list[Event], reserved_bytes: list[int]) -> None:
    live: dict[int, int] = {}
    for segment in history.segments:
        for address, size in segment.used.items():
            live[address] = _add_block(history, address, size, segment.stream_id)
    requests_ns: dict[int, int] = {}
    new_segment: int | None = None
    released_at: int | None = None
    for i, event in enumerate(events):
        if event.action == "segment_free":
            released_at = i if released_at is None else released_at
            continue
        if released_at is not None:
            if event.action == "segment_alloc":
                history.retries_count += 1
                before = reserved_bytes[released_at] + events[released_at].size_bytes
                limit = before + event.size_bytes - 1
                history.capacity_bytes = min(history.capacity_bytes or limit, limit)
            else:
                history.operations.append(Operation(event.time_ns, _RELEASE, -1))
            released_at = None
        if event.action == "segment_alloc":
            new_segment = event.address
        elif event.action == "alloc":
            block = _add_block(history, event.address, event.size_bytes, event.stream_id)
            live[event.address] = block
            if new_segment is not None:
                history.segment_addresses[block] = new_segment
                new_segment = None
            history.operations.append(Operation(event.time_ns, _ALLOCATE, block))
        elif event.action == "free_requested":
            if event.address not in live or event.address in requests_ns:
                continue
            after = events[i + 1] if i + 1 < len(events) else None
            if after and (after.action, after.address) == ("free_completed", event.address):
                continue
            requests_ns[event.address] = event.time_ns
            history.operations.append(Operation(event.time_ns, _REQUEST, live[event.address]))
        elif event.action == "free_completed":
            block = live.pop(event.address)
            began_ns = requests_ns.pop(event.address, None)
            if began_ns is not None:
                history.delays_ns[block] = max(0, event.time_ns - began_ns)
            kind = _FREE if began_ns is None else _COMPLETE
            history.operations.append(Operation(event.time_ns, kind, block))
    if released_at is not None:
        history.operations.append(Operation(events[-1].time_ns, _RELEASE, -1))
    if history.capacity_bytes is not None:
        history.capacity_bytes = max(history.capacity_bytes, history.peak_reserved_bytes)


def _add_block(history: History, address: int, size_bytes: int, stream_id: int) -> int:
    history.addresses.append(address)
    history.sizes_bytes.append(size_bytes)
    history.streams.append(stream_id)
    return len(history.addresses) - 1


class Replay:
    """One replay of a history.

    Args:
        history: what is served.
        delays_ns: by block, between request and completion of a free; None: as recorded.
        deferred: frees of such blocks happen when the next one of their stream is freed.
    """

    def __init__(
        self,
        history: History,
        *,
        delays_ns: dict[int, int] | None = None,
        deferred: bool = False,
    ) -> None:
        self._history = history
        self._delays_ns = delays_ns
        self._deferred = deferred
        self._waiting: list[tuple[int, int]] = []
        self._last: dict[int, int] = {}
        self._allocator = CachingAllocator(
            history.capacity_bytes, before_release=lambda: self._complete(None)
        )
        self._live: dict[int, Block] = {}
        for segment in history.segments:
            for block in self._allocator.adopt(
                segment.address,
                segment.size_bytes,
                segment.stream_id,
                small=segment.small,
                used=segment.used,
            ):
                self._live[len(self._live)] = block

    def run(self) -> Outcome:
        """Serve all requests."""
        allocator, history = self._allocator, self._history
        totals = [(allocator.reserved_bytes, allocator.active_bytes)]
        same = served = 0
        out_of_memory = False
        for operation in history.operations:
            if operation.kind == _ALLOCATE:
                try:
                    block = self._allocate(operation)
                except OutOfMemoryError:
                    out_of_memory = True
                    break
                served += 1
                same += block.address == history.addresses[operation.block]
            else:
                self._other(operation)
            totals.append((allocator.reserved_bytes, allocator.active_bytes))
        reserved, active = np.array(totals, dtype=np.int64).T
        unused = 1 - active[reserved > 0] / reserved[reserved > 0]
        peak = int(reserved.argmax())
        return Outcome(
            peak_reserved_bytes=int(reserved[peak]),
            peak_active_bytes=int(active.max()),
            end_reserved_bytes=int(reserved[-1]),
            end_active_bytes=int(active[-1]),
            # The fullest moment at the peak: afterwards a segment merely stays.
            fragmentation_ratio=float(1 - active[reserved == reserved[peak]].max() / reserved[peak])
            if reserved[peak]
            else None,
            median_fragmentation_ratio=float(np.median(unused)) if len(unused) else None,
            segments_count=allocator.segments_count,
            retries_count=allocator.retries_count,
            same_address_ratio=same / served if served else None,
            out_of_memory=out_of_memory,
        )

    def _allocate(self, operation: Operation) -> Block:
        history, block = self._history, operation.block
        self._complete(operation.time_ns)
        self._live[block] = self._allocator.allocate(
            history.sizes_bytes[block],
            history.streams[block],
            address_of_segment=history.segment_addresses.get(block),
        )
        return self._live[block]

    def _other(self, operation: Operation) -> None:
        block, recorded = operation.block, self._delays_ns is None and not self._deferred
        if operation.kind == _RELEASE:
            self._allocator.release_unused()
        elif operation.kind == _FREE or (operation.kind == _COMPLETE and recorded):
            self._free(block)
        elif operation.kind == _REQUEST and self._deferred:
            stream = self._history.streams[block]
            if stream in self._last:
                self._free(self._last[stream])
            self._last[stream] = block
        elif operation.kind == _REQUEST and self._delays_ns is not None:
            delay_ns = self._delays_ns.get(block)
            # Not complete at the end of the history: never known to be.
            if delay_ns is not None:
                heappush(self._waiting, (operation.time_ns + delay_ns, block))

    def _complete(self, until_ns: int | None) -> None:
        while self._waiting and (until_ns is None or self._waiting[0][0] <= until_ns):
            self._free(heappop(self._waiting)[1])

    def _free(self, block: int) -> None:
        self._allocator.free(self._live.pop(block))
