"""Views of the allocator's snapshots: its history replayed, and who holds its memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.allocations import is_held
from chopper.analyzers.events.allocator_replay import (
    History,
    Outcome,
    Replay,
    Unreplayable,
    history_of,
)
from chopper.analyzers.events.held_memory import holders_of
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.views import Rows, view
from chopper.wording import bytes_, device_name, percent, plural

MOST_ERROR_RATIO = 0.01
"""Largest relative difference from the recorded totals with which a replay counts as the same."""
DRAWS = 5
_SEED = 0


@view
def allocator_replay(run: Attribution) -> Rows:
    """Allocator's history replayed: peaks and fragmentation, frees as recorded, drawn, deferred.

    A tensor that another stream used (`record_stream`, as in FSDP1) is free when the device has
    passed an event: timing decides which block serves the next request. `drawn` repeats the history
    with the recorded delays of such frees in another order; `deferred` frees at fixed points of the
    program, as FSDP2 does. Both need a replay that reproduces what the snapshot recorded to 1 %.

    title: Allocator replay
    section: Memory
    needs: no snapshot of the allocator (record with memory=True, or import one with the trace)
    columns:
      rank, int32: Global rank that the row is about.
      device: Device of the memory: `device N`.
      frees: When tensors are freed: as recorded, drawn or deferred.
      no_replay, text, null: Reason why there is no replay.
      peak_reserved_bytes, null: Peak of the segments' bytes; median over draws.
      peak_reserved_range_bytes, null: Largest minus smallest peak_reserved over draws.
      peak_active_bytes, null: Peak of the bytes of blocks in use; median over draws.
      peak_active_range_bytes, null: Largest minus smallest peak_active over draws.
      fragmentation_ratio, null: Share of the reserved bytes not in use at the peak.
      median_fragmentation_ratio, null: Median share of reserved bytes not in use.
      new_segment_count, null: Segments reserved in the history; largest over draws.
      cache_release_count, null: Retries: unused segments released for a request; largest over
        draws.
      delayed_free_count, null: Frees that completed later than requested: streams used them.
      error_ratio, null: Largest relative difference from the recorded totals.
      same_address_ratio, null: Share of requests served at the recorded address.
    """
    rows: list[dict[str, Any]] = []
    for rank in run.recording.ranks:
        segments, blocks, events = (
            run.recording.table(rank, f"allocator_{name}") for name in ("segment", "block", "event")
        )
        for device in np.unique(ints(events, "device_id")).tolist():
            about = {"rank": rank, "device": device_name(device)}
            try:
                history = history_of(segments, blocks, events, device)
            except Unreplayable as exc:
                rows.append(about | {"frees": "as recorded", "no_replay": str(exc)})
            else:
                rows += [about | row for row in _rows(history)]
    return rows


def determinism_advice(run: Attribution) -> str | None:
    """Say what frees at fixed points would change, of the rank whose memory depends most on timing.

    None where no free waited for a stream, where its time changes nothing, or without a replay.
    """
    rows = [row for row in allocator_replay(run).to_pylist() if row["no_replay"] is None]
    drawn = [row for row in rows if row["peak_reserved_range_bytes"] and row["frees"] == "drawn"]
    if not drawn:
        return None
    worst = max(drawn, key=lambda row: row["peak_reserved_range_bytes"])
    recorded, deferred = (
        next(row for row in rows if row["frees"] == frees and row["device"] == worst["device"]
             and row["rank"] == worst["rank"])
        for frees in ("as recorded", "deferred")
    )  # fmt: skip
    count = recorded["delayed_free_count"]
    return (
        f"{plural(count, 'free')} of rank {worst['rank']} waited for another stream "
        "(record_stream, as in FSDP1): by the allocator's replay, reserved memory peaks at "
        f"{bytes_(recorded['peak_reserved_bytes'])} and varies by "
        f"{bytes_(worst['peak_reserved_range_bytes'])} with their timing; freed at fixed points, "
        f"as in FSDP2 (fully_shard), it always peaks at {bytes_(deferred['peak_reserved_bytes'])}. "
        "On MI300X such runs kept higher, steadier clocks (arXiv 2512.08242); the replay predicts "
        "memory, not clocks (view allocator_replay)."
    )


def _rows(history: History) -> list[dict[str, Any]]:
    delayed = len(history.delays_ns)
    same = Replay(history).run()
    error = _error(history, same)
    first = _row("as recorded", [same]) | {
        "delayed_free_count": delayed,
        "error_ratio": error,
        "same_address_ratio": same.same_address_ratio,
    }
    if error > MOST_ERROR_RATIO or same.out_of_memory:
        why = (
            "out of memory" if same.out_of_memory else f"{percent(error)} from the recorded totals"
        )
        reason = f"the replay does not reproduce the recording ({why}): other allocator settings?"
    elif not delayed:
        reason = "every free completed at once: no tensor waited for a stream"
    else:
        rng = np.random.default_rng(_SEED)
        drawn = [Replay(history, delays_ns=history.drawn_delays(rng)).run() for _ in range(DRAWS)]
        deferred = [Replay(history, deferred=True).run()]
        return [first, _row("drawn", drawn), _row("deferred", deferred)]
    return [first, *({"frees": frees, "no_replay": reason} for frees in ("drawn", "deferred"))]


def _error(history: History, found: Outcome) -> float:
    """Return the largest relative difference of reserved (peak, end) and active bytes (end)."""
    pairs = (
        (found.peak_reserved_bytes, history.peak_reserved_bytes),
        (found.end_reserved_bytes, history.end_reserved_bytes),
        (found.end_active_bytes, history.end_active_bytes),
    )
    return max(abs(ours - recorded) / max(recorded, 1) for ours, recorded in pairs)


def _row(frees: str, outcomes: list[Outcome]) -> dict[str, Any]:
    full = [o for o in outcomes if o.out_of_memory]
    row: dict[str, Any] = {
        "frees": frees,
        "new_segment_count": max(o.segments_count for o in outcomes),
        "cache_release_count": max(o.retries_count for o in outcomes),
        "fragmentation_ratio": _median([o.fragmentation_ratio for o in outcomes]),
        "median_fragmentation_ratio": _median([o.median_fragmentation_ratio for o in outcomes]),
    }
    for name in ("peak_reserved", "peak_active"):
        values = [getattr(o, f"{name}_bytes") for o in outcomes]
        row[f"{name}_bytes"] = round(float(np.median(values)))
        row[f"{name}_range_bytes"] = max(values) - min(values)
    if full:
        row["no_replay"] = f"{plural(len(full), 'replay')} of {len(outcomes)} ran out of memory"
    return row


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


@view
def memory_holders(run: Attribution) -> Rows:
    """Memory in use by the source line that allocated it, when a snapshot was taken.

    A block's line is the innermost Python line, outside of installed packages, of the stack that
    allocated it; or else its innermost line.

    title: Memory by source line
    section: Memory
    needs: no snapshot of the allocator (record with memory=True, or import one with the trace)
    columns:
      rank, int32: Global rank that the row is about.
      device: Device of the memory: `device N`.
      held_bytes: Bytes in the line's blocks that are in use.
      share_ratio: Share of all bytes in use on the device.
      block_count: Number of the line's blocks that are in use.
      largest_bytes: Size of the largest of these blocks.
      where, text, null: Source line that allocated them; null where none was recorded.
    """
    rows: list[dict[str, Any]] = []
    for rank in run.recording.ranks:
        blocks = run.recording.table(rank, "allocator_block")
        blocks = blocks.filter(is_held(blocks))
        codes, stacks = strings(blocks, "frames")
        device, size = ints(blocks, "device_id"), ints(blocks, "size_bytes", null=0)
        for id_ in np.unique(device).tolist():
            found = holders_of(size[device == id_], codes[device == id_], stacks)
            rows += [{"rank": rank, "device": device_name(id_)} | row for row in found]
    rows.sort(key=lambda r: -r["held_bytes"])
    return rows
