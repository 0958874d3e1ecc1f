"""Kernels without an operator take the work of the same kernels seen with one.

A trace that begins in the middle of a step holds kernels whose launches it lacks; a graph replay
launches hundreds with one call. The same kernels often ran with their operators at another place
of the trace: in the next step, or before the graph was captured. They are recognized by name,
grid and what runs around them on their stream.
"""

from __future__ import annotations

import numpy as np

from chopper.analyzers.trace.columns import strings
from chopper.analyzers.trace.tables import DeviceEvents

_RADII = (16, 3, 1, 0)
"""Neighbours on the stream that have to be the same, tried from the surest on."""
_ONE_SIDED = 8
_DURATION_FACTOR = 1.5
"""A kernel that is this much longer or shorter than all its likes is not one of them."""
_BASE = np.uint64(0x9E3779B97F4A7C15)


def match_instances(events: DeviceEvents, known: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """For each wanted event, the row of one that it repeats; -1 for none, or where likes differ.

    Args:
        events: of one rank.
        known: per event a code of its work, -1 where that is not known.
        wanted: mask of the events to find one for.
    """
    like_row = np.full(len(events), -1, dtype=np.int64)
    if not wanted.any() or not (known >= 0).any():
        return like_row
    order = np.lexsort((events.start_ns, events.stream_id, events.device_id))
    name = _mixed(events.names[0][order])
    grid_code, block_code = (strings(events.table, c)[0][order] for c in ("grid", "block"))
    has_grid = grid_code >= 0
    grid = _mixed(grid_code) ^ (_mixed(block_code) * _BASE)
    dur = events.dur_ns[order]
    work = known[order]
    open_ = wanted[order] & (work < 0)
    for radius in _RADII:
        if not open_.any():
            break
        for key in _contexts(name, radius):
            keys = [(open_ & has_grid, key * _BASE + grid)]
            if radius:  # a name alone is no proof
                keys.append((open_ & ~has_grid, key))
            for mask, event_key in keys:
                rows = np.flatnonzero(mask)
                if not len(rows):
                    continue
                like = _unanimous(event_key, work, dur, rows)
                hit = like >= 0
                like_row[order[rows[hit]]] = order[like[hit]]
                open_[rows[hit]] = False
    return like_row


def _unanimous(key: np.ndarray, work: np.ndarray, dur: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """For each of ``rows`` an event with its key, where all those of known work agree on it."""
    keys = np.unique(key[rows])
    sources = np.flatnonzero(work >= 0)
    at = np.minimum(np.searchsorted(keys, key[sources]), len(keys) - 1)
    hit = keys[at] == key[sources]
    sources, at = sources[hit], at[hit]
    first = np.full(len(keys), -1, dtype=np.int64)
    first[at[::-1]] = sources[::-1]
    low = np.full(len(keys), np.iinfo(np.int64).max)
    high = np.full(len(keys), -1, dtype=np.int64)
    shortest, longest = low.copy(), high.copy()
    for extreme, fold, values in (
        (low, np.minimum, work),
        (high, np.maximum, work),
        (shortest, np.minimum, dur),
        (longest, np.maximum, dur),
    ):
        fold.at(extreme, at, values[sources])
    mine = np.searchsorted(keys, key[rows])
    time = dur[rows]
    agree = (
        (low[mine] == high[mine])
        & (time <= longest[mine] * _DURATION_FACTOR)
        & (time * _DURATION_FACTOR >= shortest[mine])
    )
    return np.where(agree, first[mine], -1)


def _contexts(name: np.ndarray, radius: int) -> list[np.ndarray]:
    """Hashes of each event's name with ``radius`` neighbours: on both sides, after, before.

    Few neighbours on one side only are no proof.
    """
    if not radius:
        return [name]
    after = _ahead(name, radius + 1)
    before = _ahead(name[::-1], radius + 1)[::-1]
    both = after * _BASE ^ before
    return [both] if radius < _ONE_SIDED else [both, after, before]


def _ahead(name: np.ndarray, count: int) -> np.ndarray:
    """A hash of each element and the ``count`` - 1 that follow; past the end there is nothing."""
    total = np.zeros(len(name), dtype=np.uint64)
    part, width, at = name, 1, 0
    # Binary powers: `part` hashes `width` elements, `total` the first `at`.
    while count:
        if count & 1:
            total = total * _power(width) + _shift(part, at)
            at += width
        part = part * _power(width) + _shift(part, width)
        width *= 2
        count >>= 1
    return total


def _power(exponent: int) -> np.uint64:
    return np.uint64(pow(int(_BASE), exponent, 1 << 64))


def _shift(values: np.ndarray, by: int) -> np.ndarray:
    if not by:
        return values
    moved = np.zeros_like(values)
    moved[: max(len(values) - by, 0)] = values[by:]
    return moved


def _mixed(codes: np.ndarray) -> np.ndarray:
    """Codes as well-spread 64-bit numbers."""
    with np.errstate(over="ignore"):
        value = (codes.astype(np.uint64) + np.uint64(1)) * _BASE
        value = (value ^ (value >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return value ^ (value >> np.uint64(32))
