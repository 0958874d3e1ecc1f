"""The model of the caching allocator against rules worked by hand and recorded histories."""

from __future__ import annotations

import os
import pickle
import random
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper import pipeline
from chopper.analyzers.events.allocator_replay import History, Replay, history_of
from chopper.analyzers.events.caching_allocator import Block, CachingAllocator, OutOfMemoryError
from chopper.collectors.snapshot import tables_of
from chopper.views import view

MIB = 1 << 20


@pytest.mark.parametrize(
    ("requested", "reserved", "active"),
    [
        # Rounded to 512 B; up to 1 MiB in segments of 2 MiB; below 10 MiB of 20; above, to 2 MiB.
        (1, 2 * MIB, 512),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # Only a rest of more than 1 MiB is split off.
        (13 * MIB, 14 * MIB, 14 * MIB),
    ],
)
def test_segments_by_size_of_the_request(requested: int, reserved: int, active: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(requested, 0)
    assert (allocator.reserved_bytes, allocator.active_bytes) == (reserved, active)


def test_the_smallest_block_that_fits_serves_and_streams_share_none() -> None:
    allocator = CachingAllocator()
    a, _, c, _ = (allocator.allocate(n * MIB, 0) for n in (4, 2, 3, 2))
    allocator.free(a)
    allocator.free(c)
    # Free: 4 and 3 MiB, and 9 at the end of the 20.
    assert allocator.allocate(5 * MIB // 2, 0).address == c.address
    assert allocator.reserved_bytes == 20 * MIB
    allocator.allocate(2 * MIB, 1)
    assert allocator.reserved_bytes == 40 * MIB


def test_free_neighbours_merge() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB, 0) for _ in range(4)]
    start = blocks[0].address
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.free(block)
    assert allocator.allocate(15 * MIB, 0).address == start
    assert allocator.reserved_bytes == 20 * MIB


def test_a_retry_releases_what_is_unused() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    allocator.free(allocator.allocate(24 * MIB, 0))
    # 24 + 30 do not fit in 40: the 24 are released.
    allocator.allocate(30 * MIB, 0)
    assert (allocator.reserved_bytes, allocator.retries_count) == (30 * MIB, 1)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(12 * MIB, 0)


class Recorder:
    """Runs a program on the model and writes the history that a snapshot would have of it."""

    def __init__(self) -> None:
        self.allocator = CachingAllocator()
        self.blocks: dict[int, tuple[Block, int]] = {}
        self.entries: list[dict[str, Any]] = []
        self.segments: dict[int, int] = {}
        self.time_us = 1_700_000_000_000_000
        self._names = count()

    def add(self, action: str, address: int, size: int) -> None:
        self.time_us += 1
        self.entries.append(
            {"action": action, "addr": address, "size": size, "stream": 0, "time_us": self.time_us}
        )

    def allocate(self, size: int) -> int:
        before = self.allocator.reserved_bytes
        block = self.allocator.allocate(size, 0)
        reserved = self.allocator.reserved_bytes - before
        if reserved:
            self.segments[block.address] = reserved
            self.add("segment_alloc", block.address, reserved)
        self.add("alloc", block.address, size)
        name = next(self._names)
        self.blocks[name] = block, size
        return name

    def request(self, name: int) -> None:
        block, size = self.blocks[name]
        self.add("free_requested", block.address, size)

    def complete(self, name: int) -> None:
        block, size = self.blocks.pop(name)
        self.add("free_completed", block.address, size)
        self.allocator.free(block)

    def free(self, name: int) -> None:
        self.request(name)
        self.complete(name)

    def snapshot(self, last: int | None = None) -> dict[str, Any]:
        """As torch gives it, with the last entries of the history only."""
        listed = []
        for address, total in self.segments.items():
            own = [b for b, _ in self.blocks.values() if address <= b.address < address + total]
            held = sum(b.size_bytes for b in own)
            listed.append(
                {"device": 0, "address": address, "total_size": total, "allocated_size": held,
                 "active_size": held, "stream": 0, "is_expandable": False,
                 "segment_type": "small" if total == 2 * MIB else "large",
                 "blocks": [{"address": b.address, "size": b.size_bytes,
                             "state": "active_allocated"} for b in own]}
            )  # fmt: skip
        return {
            "segments": listed,
            "device_traces": [self.entries if last is None else self.entries[-last:]],
        }


def history(snapshot: dict[str, Any]) -> History:
    found = tables_of(snapshot, "here")
    segment, block, event = (found[f"allocator_{n}"] for n in ("segment", "block", "event"))
    return history_of(segment, block, event, 0)


_SIZES = st.sampled_from([1, 700, 4096, MIB, MIB + 1, 2_359_296, 9 * MIB, 10 * MIB, 37 * MIB])


@given(st.lists(st.tuples(st.booleans(), _SIZES), min_size=1, max_size=60), st.integers(0, 99))
def test_a_history_is_reproduced(program: list[tuple[bool, int]], seed: int) -> None:
    recorder, rng = Recorder(), random.Random(seed)
    middle = 0
    for i, (frees, size) in enumerate(program):
        if i == len(program) // 2:
            middle = len(recorder.entries)
        if frees and recorder.blocks:
            recorder.free(rng.choice(sorted(recorder.blocks)))
        else:
            recorder.allocate(size)
    found = Replay(history(recorder.snapshot())).run()
    assert found.end_reserved_bytes == recorder.allocator.reserved_bytes
    assert found.end_active_bytes == recorder.allocator.active_bytes
    assert found.same_address_ratio == 1
    # Of a ring that is full only the end is there: what was held before is undone from the end.
    late = Replay(history(recorder.snapshot(len(recorder.entries) - middle))).run()
    assert late.end_reserved_bytes >= recorder.allocator.reserved_bytes


def sharded(delays_us: tuple[int, ...]) -> Recorder:
    """Twelve units that gather 30 MiB and use 4 MiB; frees of what was gathered take this long."""
    recorder = Recorder()
    waiting: list[tuple[int, int]] = []
    for unit in range(12):
        gathered = recorder.allocate(30 * MIB)
        used = recorder.allocate(4 * MIB)
        recorder.request(gathered)
        waiting.append((recorder.time_us + delays_us[unit % len(delays_us)], gathered))
        recorder.free(used)
        recorder.time_us += 10
        for due_us, name in list(waiting):
            if due_us <= recorder.time_us:
                recorder.complete(name)
                waiting.remove((due_us, name))
    for _, name in waiting:
        recorder.complete(name)
    return recorder


UNSTEADY_US = (5, 35, 5, 5, 5, 75)


def test_drawn_frees_vary_and_deferred_ones_do_not() -> None:
    found = history(sharded(UNSTEADY_US).snapshot())
    assert len(found.delays_ns) == 12
    draws = [found.drawn_delays(np.random.default_rng(seed)) for seed in range(20)]
    peaks = {Replay(found, delays_ns=drawn).run().peak_reserved_bytes for drawn in draws}
    assert len(peaks) > 1
    # Freed at the request of the next: two of 30 at a time, 4 in a segment of 20 MiB.
    deferred = Replay(found, deferred=True).run()
    assert deferred.peak_reserved_bytes == 80 * MIB
    assert deferred.peak_active_bytes == 64 * MIB
    assert min(peaks) >= 50 * MIB


def test_equal_delays_leave_nothing_to_draw() -> None:
    found = history(sharded((5,)).snapshot())
    assert len({*found.delays_ns.values()}) == 1
    drawn = found.drawn_delays(np.random.default_rng(0))
    assert drawn == found.delays_ns
    one, same = Replay(found, delays_ns=drawn).run(), Replay(found).run()
    assert one.peak_reserved_bytes == same.peak_reserved_bytes


def rows_of(folder: Path, snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    path = folder / "s.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    rows: list[dict[str, Any]] = view(pipeline.attribute(path), "allocator_replay").to_pylist()
    return rows


def test_the_view_shows_all_three(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, sharded(UNSTEADY_US).snapshot())
    assert [r["frees"] for r in rows] == ["as recorded", "drawn", "deferred"]
    recorded, drawn, deferred = rows
    assert (recorded["error_ratio"], recorded["same_address_ratio"]) == (0, 1)
    assert recorded["delayed_free_count"] == 12
    assert drawn["peak_reserved_range_bytes"] > 0
    assert deferred["peak_reserved_range_bytes"] == 0


def test_other_rules_are_noticed_and_nothing_more_is_claimed(tmp_path: Path) -> None:
    made = sharded((5, 35)).snapshot()
    # As if roundup_power2_divisions had been set: segments of 32 MiB for 30 MiB.
    for segment in made["segments"]:
        if segment["total_size"] == 30 * MIB:
            segment["total_size"] = 32 * MIB
    for entry in made["device_traces"][0]:
        if entry["action"] == "segment_alloc" and entry["size"] == 30 * MIB:
            entry["size"] = 32 * MIB
    rows = rows_of(tmp_path, made)
    assert rows[0]["error_ratio"] > 0.01
    assert all("does not reproduce" in r["no_replay"] for r in rows[1:])
    assert all(r["peak_reserved_bytes"] is None for r in rows[1:])


def test_what_cannot_be_replayed_says_why(tmp_path: Path) -> None:
    expandable = sharded((5,)).snapshot()
    expandable["segments"][0]["is_expandable"] = True
    assert rows_of(tmp_path, expandable)[0]["no_replay"] == "expandable segments are not modelled"
    torn = sharded((5,)).snapshot()
    entries = torn["device_traces"][0]
    torn["device_traces"][0] = [e for e in entries if e["action"] != "free_completed"]
    assert "contradicts" in rows_of(tmp_path, torn)[0]["no_replay"]


def test_a_recorded_retry_shows_the_capacity() -> None:
    recorder = Recorder()
    recorder.free(recorder.allocate(30 * MIB))
    ((address, total),) = recorder.segments.items()
    recorder.add("segment_free", address, total)
    recorder.segments.clear()
    recorder.allocator.release_unused()
    recorder.allocate(40 * MIB)
    found = history(recorder.snapshot())
    assert (found.retries_count, found.capacity_bytes) == (1, 70 * MIB - 1)
    again = Replay(found).run()
    assert (again.retries_count, again.peak_reserved_bytes) == (1, 40 * MIB)


@pytest.mark.skipif("CHOPPER_TRACES" not in os.environ, reason="CHOPPER_TRACES: no real traces")
def test_a_public_snapshot_is_reproduced_to_the_address() -> None:
    folder = Path(os.environ["CHOPPER_TRACES"]) / "memory-snapshots"
    path = folder / "cuda-memory-snapshot-transformer.pickle.gz"
    recorded, *others = view(pipeline.attribute(path), "allocator_replay").to_pylist()
    # 96 segments, 2 162 requests: all served where they were recorded, none by a new segment.
    assert recorded["error_ratio"] == 0
    assert recorded["same_address_ratio"] == 1
    assert (recorded["peak_reserved_bytes"], recorded["new_segment_count"]) == (4_238_344_192, 0)
    assert {r["no_replay"] for r in others} == {
        "every free completed at once: no tensor waited for a stream"
    }
