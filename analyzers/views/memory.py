"""Memory over time, and what a snapshot of the allocator shows: segments, gaps, who holds what."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.views.memory_timeline import CPU, traced_steps
from chopper.tables import TABLES

if TYPE_CHECKING:
    from typing import Any

    from chopper.attribution import Attribution

_MOST_SPANS = 100
_HELD = "active"
"""States of blocks that tensors hold, or that wait for a stream: ``active_…``."""


def memory_over_time(attribution: Attribution) -> pa.Table:
    """MEMORY_OVER_TIME: most of each kind of memory in each step, device and host.

    ALLOCATOR_EVENT or MEMORY_EVENT, DEVICE_MEMORY, DEVICE_COUNTER, PROCESS, HOST, STEP -> a row for
    each rank and step; without steps, and with more steps than fit a page, for each of equal spans.
    """
    rows: list[dict[str, Any]] = []
    for rank in attribution.run.ranks:
        series = _series(attribution, rank)
        if not series:
            continue
        spans = _spans(attribution, rank, series)
        for number, start, end in spans:
            row: dict[str, Any] = {"rank": rank, "step": number}
            row |= {"since_ns": start - spans[0][1], "dur_ns": end - start}
            for column, (time, values, lowest) in series.items():
                low, high = np.searchsorted(time, (start, end))
                if high > low:
                    chosen = values[low:high]
                    row[column] = int(chosen.min() if lowest else chosen.max())
            if len(row) > 4:
                rows.append(row)
    return pa.Table.from_pylist(rows, schema=TABLES["memory_over_time"].arrow)


_Series = dict[str, tuple[np.ndarray, np.ndarray, bool]]


def _series(attribution: Attribution, rank: int) -> _Series:
    """(times, ascending; values; whether the lowest counts) of each column that there is."""
    run = attribution.run
    found: _Series = {}
    for name, column, target in (
        ("device_memory", "allocated_bytes", "allocated_bytes"),
        ("device_memory", "reserved_bytes", "reserved_bytes"),
        ("allocator_event", "allocated_bytes", "allocated_bytes"),
        ("allocator_event", "reserved_bytes", "reserved_bytes"),
        ("memory_event", "allocated_bytes", "allocated_bytes"),
        ("memory_event", "reserved_bytes", "reserved_bytes"),
    ):
        table = run.table(rank, name)
        if name == "memory_event" and table.num_rows:
            table = table.filter(pc.not_equal(table["device_type"].fill_null(1), CPU))
        _add(found, target, table, column)
    counters = attribution.run.table(rank, "device_counter")
    part = run.part(rank)
    if part.device_id is not None and counters.num_rows:
        counters = counters.filter(pc.equal(counters["device_id"], part.device_id))
    _add(found, "device_used_bytes", counters, "memory_used_bytes")
    process = run.table(rank, "process")
    if process.num_rows:
        process = process.filter(pc.equal(process["rank"], rank))
    _add(found, "host_process_bytes", process, "rss_bytes")
    _add(found, "host_available_bytes", run.table(rank, "host"), "memory_available_bytes", low=True)
    return found


def _add(found: _Series, target: str, table: pa.Table, column: str, *, low: bool = False) -> None:
    if not table.num_rows:
        return
    table = table.filter(pc.is_valid(table[column]))
    values, time = ints(table, column), ints(table, "time_ns")
    if not (values > 0).any():
        # A recorder that does not keep a total writes zeros.
        return
    order = np.argsort(time, kind="stable")
    found[target] = time[order], values[order], low


def _spans(
    attribution: Attribution, rank: int, series: _Series
) -> list[tuple[int | None, int, int]]:
    numbers, starts, ends = traced_steps(attribution, rank)
    step = attribution.run.table(rank, "step")
    if len(numbers) == 0 and step.num_rows:
        numbers, starts, ends = (ints(step, n) for n in ("number", "start_ns", "end_ns"))
    if 0 < len(numbers) <= _MOST_SPANS:
        return list(zip(numbers.tolist(), starts.tolist(), ends.tolist(), strict=True))
    first = min(int(time[0]) for time, _, _ in series.values())
    last = max(int(time[-1]) for time, _, _ in series.values())
    edges = np.linspace(0, last - first + 1, min(_MOST_SPANS, last - first + 1) + 1)
    cuts = (first + np.unique(edges.astype(np.int64))).tolist()
    return [(None, a, b) for a, b in pairwise(cuts)]


def memory_segments(attribution: Attribution) -> pa.Table:
    """MEMORY_SEGMENTS: what the allocator held, and how much of it no tensor could have used.

    ALLOCATOR_SEGMENT, ALLOCATOR_BLOCK -> a row for each rank, device, kind and stream. A gap is
    unusable for a request that is larger than it: the largest gap says what still fits.
    """
    rows: list[dict[str, Any]] = []
    for rank in attribution.run.ranks:
        segments = attribution.run.table(rank, "allocator_segment")
        blocks = attribution.run.table(rank, "allocator_block")
        if not segments.num_rows:
            continue
        kinds, kind_names = strings(segments, "kind")
        device, stream = ints(segments, "device_id"), ints(segments, "stream_id")
        total = ints(segments, "total_bytes", null=0)
        held = ints(segments, "allocated_bytes", null=0)
        keys = np.stack([device, kinds, stream], axis=1)
        found, group = np.unique(keys, axis=0, return_inverse=True)
        group = group.reshape(-1)
        of_block = _segment_of(blocks, segments)
        gap = ~_held(blocks) & (of_block >= 0)
        size = ints(blocks, "size_bytes", null=0)
        for i, (device_id, kind, stream_id) in enumerate(found.tolist()):
            mine = group == i
            within = (of_block >= 0) & np.isin(of_block, np.flatnonzero(mine))
            gaps = size[gap & within]
            live = within & ~gap
            asked = ints(blocks, "requested_bytes", null=0)[live]
            reserved, allocated = int(total[mine].sum()), int(held[mine].sum())
            rows.append(
                {
                    "rank": rank,
                    "device": f"device {device_id}",
                    "kind": kind_names[kind] if kind >= 0 else None,
                    "stream_id": stream_id,
                    "segment_count": int(mine.sum()),
                    "reserved_bytes": reserved,
                    "allocated_bytes": allocated,
                    "fragmentation_ratio": 1 - allocated / reserved if reserved else None,
                    "gap_count": len(gaps),
                    "largest_gap_bytes": int(gaps.max()) if len(gaps) else 0,
                    "whole_free_bytes": int(total[mine & (held == 0)].sum()),
                    "rounding_bytes": max(0, int(size[live].sum() - asked.sum()))
                    if (asked > 0).any()
                    else None,
                }
            )
    rows.sort(key=lambda r: -r["reserved_bytes"])
    return pa.Table.from_pylist(rows, schema=TABLES["memory_segments"].arrow)


def _segment_of(blocks: pa.Table, segments: pa.Table) -> np.ndarray:
    """Row of each block's segment, by device and address; -1 for none."""
    if not blocks.num_rows:
        return np.zeros(0, dtype=np.int64)
    wanted = np.stack([ints(blocks, "device_id"), ints(blocks, "segment_address_id")], axis=1)
    keys = np.stack([ints(segments, "device_id"), ints(segments, "address_id")], axis=1)
    _, codes = np.unique(np.concatenate([keys, wanted]), axis=0, return_inverse=True)
    codes = codes.reshape(-1)
    row = np.full(int(codes.max()) + 1, -1, dtype=np.int64)
    row[codes[: len(keys)]] = np.arange(len(keys))
    return row[codes[len(keys) :]]


def _held(blocks: pa.Table) -> np.ndarray:
    codes, names = strings(blocks, "state")
    held = np.array([name.startswith(_HELD) for name in names] + [False])
    return held[codes]


def memory_holders(attribution: Attribution) -> pa.Table:
    """MEMORY_HOLDERS: who holds the memory that a snapshot found in use.

    ALLOCATOR_BLOCK -> blocks in use by the innermost Python line of the stack that allocated them,
    else by its innermost line.
    """
    rows: list[dict[str, Any]] = []
    for rank in attribution.run.ranks:
        blocks = attribution.run.table(rank, "allocator_block")
        if not blocks.num_rows:
            continue
        codes, stacks = strings(blocks, "frames")
        lines = [_line(stack) for stack in stacks]
        names, of_stack = (
            np.unique(np.array(lines, dtype=object), return_inverse=True)
            if lines
            else (np.zeros(0, object), np.zeros(0, np.int64))
        )
        line = np.append(of_stack, -1)[codes]
        held = _held(blocks)
        device, size = ints(blocks, "device_id"), ints(blocks, "size_bytes", null=0)
        for device_id in np.unique(device[held]).tolist():
            total = int(size[held & (device == device_id)].sum())
            for code in np.unique(line[held & (device == device_id)]).tolist():
                mine = held & (device == device_id) & (line == code)
                rows.append(
                    {
                        "rank": rank,
                        "device": f"device {device_id}",
                        "held_bytes": int(size[mine].sum()),
                        "share_ratio": int(size[mine].sum()) / total if total else 0.0,
                        "block_count": int(mine.sum()),
                        "largest_bytes": int(size[mine].max()),
                        "where": str(names[code]) if code >= 0 else None,
                    }
                )
    rows.sort(key=lambda r: -r["held_bytes"])
    return pa.Table.from_pylist(rows, schema=TABLES["memory_holders"].arrow)


def _line(stack: str) -> str:
    frames = stack.split("\n")
    return next((frame for frame in frames if ".py:" in frame), frames[0])
