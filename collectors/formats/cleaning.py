"""Checks and repairs that the rows of every recorder need: numbers, texts, times, devices."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from chopper.collectors.formats.arrays import NO_VALUE, is_one_of
from chopper.storage.manifest import Finding, add_finding
from chopper.wording import device_name

MAX_DURATION_NS = 30 * 24 * 3600 * 10**9
"""Longer spans are overflows of the recorder: no step takes a month."""
LAST_NS = 1 << 62
"""Times beyond the year 2116, or as long before 1970, are no times."""
_DAY_NS = 24 * 3600 * 10**9
"""A trace is held in memory while it is recorded: none is a day long."""
_OVERRUN_NS = 50_000
"""Recorders' clocks err by less where kernels of one stream overlap."""
_TIMELINE_RATIO = 0.01
"""A device with less of the busiest device's kernel time was touched, not used."""


DAMAGES = {
    "event.without_ts": "events without a usable ts were dropped",
    "event.without_name": "events without a name were dropped",
    "event.without_dur": "events without a dur count as points in time",
    "event.negative_duration": "events with a negative dur count as points in time",
    "event.overflowing_duration": "events with an overflowing dur (over 30 days) count as points",
    "event.repaired": "events were not JSON (a bare quote, backslash or line break in a name) and "
    "were fixed",
    "event.not_json": "events were not JSON and could not be fixed; they were dropped",
    "event.overrun": "kernels last beyond later kernels of their stream (the recorder's overflow); "
    "each was cut at the next start on its stream",
    "event.without_time": "kernels without a time (ts 0 and dur 0: records were damaged) were left "
    "out",
    "event.unpaired": "begin or end events without the other half were dropped",
    "trace.nan": "events hold NaN or infinity, which are not JSON; taken as unknown",
    "event.nested_too_deep": "events nested implausibly deep were dropped",
    "event.not_an_object": "entries of traceEvents that are not objects were dropped",
    "event.without_ph": "events without a phase (ph) were dropped",
    "event.without_category": "events without a category were not used",
    "event.nanosecond_unit": "events count in nanoseconds where the format says microseconds; "
    "converted",
    "event.far_in_time": "events lie more than a day from the rest of the trace (another clock, or "
    "a wrong ts) and were dropped",
    "event.duplicate": "events were recorded twice; the repetitions were dropped",
}
"""Repairs of single events, by the code of the finding."""


def damage_findings(counts: Counter[str], source: str) -> list[Finding]:
    """Say how many events of a file were repaired or dropped."""
    return [
        Finding(
            code=code,
            severity="info" if code == "event.without_category" else "warning",
            message=f"{source}: {count} {DAMAGES[code]}",
            count=count,
        )
        for code, count in sorted((+counts).items())
    ]


def _has_underscore(value: Any) -> bool:
    """Return whether a text is a number to Python only: 1_000 is none in any file."""
    return isinstance(value, str) and "_" in value


def number(value: Any) -> float | None:
    """Return a finite float, else None."""
    if isinstance(value, bool) or value is None or _has_underscore(value):
        return None
    try:
        real = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return real if math.isfinite(real) else None


def integer(value: Any) -> int | None:
    """Return a 64-bit integer, else None; strings are parsed."""
    if isinstance(value, bool) or value is None or _has_underscore(value):
        return None
    try:
        result = int(value)
    except (TypeError, ValueError, OverflowError):
        real = number(value)
        if real is None:
            return None
        result = int(real)
    return result if -(2**63) <= result < 2**63 else None


def clean(text: str) -> str:
    """Text that UTF-8 can hold: half a surrogate pair, as broken names have, is replaced."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def usable_starts(
    counts: Counter[str], base_ns: int, start: np.ndarray, ok: np.ndarray, in_ns: np.ndarray | None
) -> np.ndarray:
    """Mask of the events with a possible start in ns, however they were read; counts the others.

    ``base_ns`` will be added to each; ``in_ns`` says what was recorded in ns instead of µs.
    """
    ok = ok & (np.abs(start) < LAST_NS) & (np.abs(start + base_ns) < LAST_NS)
    counts["event.without_ts"] += int((~ok).sum())
    if in_ns is not None:
        counts["event.nanosecond_unit"] += int((ok & in_ns).sum())
    return ok


def usable_spans(
    counts: Counter[str],
    ok: np.ndarray,
    named: np.ndarray,
    dur: np.ndarray,
    dur_ok: np.ndarray,
    missing: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Mask of the usable spans, and all durations repaired, in ns; counts others and repairs.

    ``dur_ok`` says which durations could be read, ``missing`` which are not there.
    """
    counts["event.without_name"] += int((ok & ~named).sum())
    ok = ok & named
    negative = dur_ok & (dur < 0)
    overflow = (~dur_ok & ~missing) | (dur_ok & (dur > MAX_DURATION_NS))
    counts["event.without_dur"] += int((ok & missing).sum())
    counts["event.negative_duration"] += int((ok & negative).sum())
    counts["event.overflowing_duration"] += int((ok & overflow).sum())
    good = dur_ok & ~negative & ~overflow
    return ok, dur if good.all() else np.where(good, dur, 0)


def far_in_time(
    host: dict[str, Any], device: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Masks of the events that lie more than a day from the middle of the trace, if any do."""
    starts = host["start_ns"], device["start_ns"]
    both = np.concatenate(starts)
    if int(both.max()) - int(both.min()) <= _DAY_NS:
        return None
    middle = np.partition(both, len(both) // 2)[len(both) // 2]
    far = np.abs(starts[0] - middle) > _DAY_NS, np.abs(starts[1] - middle) > _DAY_NS
    return far if far[0].any() or far[1].any() else None


def cut_overruns(
    counts: Counter[str], device: dict[str, Any], rows: np.ndarray | None = None
) -> dict[str, Any]:
    """Return device events of one process, with kernels cut that end after a later one ended.

    A stream runs in order: such a kernel's duration overflowed, and it ended by the next start.
    Kernels of one launch are branches of a graph, which may run beside each other.

    Args:
        counts: of what is repaired, by code; added to.
        device: columns, times in ns.
        rows: mask of the process' events; None for all.
    """
    start, dur = device["start_ns"], device["dur_ns"]
    kernels = is_one_of(device["kind"], "kernel") & (dur > 0)
    kernels &= ~np.isin(device["stream_id"], (-1, NO_VALUE))
    at = np.flatnonzero(kernels if rows is None else kernels & rows)
    at = at[np.lexsort((start[at], device["stream_id"][at], device["device_id"][at]))]
    streams = np.stack([device["device_id"][at], device["stream_id"][at]])
    cut = dur.copy()
    for stream_rows in np.split(at, np.flatnonzero((np.diff(streams) != 0).any(axis=0)) + 1):
        ids, begin, end = (
            device["correlation_id"][stream_rows],
            start[stream_rows],
            (start + dur)[stream_rows],
        )
        launches = np.flatnonzero((np.diff(ids) != 0) | (ids[1:] == NO_VALUE)) + 1
        candidate = np.arange(len(stream_rows))
        following = np.searchsorted(launches, candidate, side="right")
        candidate = candidate[following < len(launches)]
        following = launches[following[candidate]]
        earliest = np.minimum.accumulate(end[::-1])[::-1][following]
        over = (earliest < end[candidate]) & (end[candidate] - begin[following] > _OVERRUN_NS)
        cut[stream_rows[candidate[over]]] = (begin[following] - begin[candidate])[over]
        counts["event.overrun"] += int(over.sum())
    return {**device, "dur_ns": cut}


def timelines_of(
    device: dict[str, Any], rows: np.ndarray | None, source: str
) -> tuple[list[tuple[int | None, np.ndarray | None]], list[Finding]]:
    """Return the devices that a process drives, each with its rows, and a finding on the others.

    The first is the main one. A device counts when it ran at least 1 % of the kernel time of the
    busiest one; a stray copy or a context opened on another device is no timeline. ``rows`` is the
    mask of the process' events, returned as it is if they are of one device; None for all.
    """
    ids, dur = device["device_id"], device["dur_ns"]
    codes, kinds = device["kind"]
    if rows is not None:
        ids, dur, codes = ids[rows], dur[rows], codes[rows]
    devices, inverse = np.unique(ids, return_inverse=True)
    if not len(devices):
        return [(None, rows)], []
    is_kernel = is_one_of((codes, kinds), "kernel")
    busy = np.bincount(inverse, weights=dur * is_kernel)
    all_work = np.bincount(inverse, weights=dur)
    # The first of those that do most: equal partners keep their order from run to run.
    work = busy if busy.any() else all_work
    main = int(np.flatnonzero(work * 2 >= work.max())[0])
    used = [
        i for i in range(len(devices)) if i != main and 0 < busy.max() * _TIMELINE_RATIO <= busy[i]
    ]
    unused = [i for i in range(len(devices)) if i != main and i not in used]
    findings: list[Finding] = []
    if used:
        listed = ", ".join(device_name(devices[i]) for i in sorted([main, *used]))
        add_finding(
            findings,
            "trace.several_devices",
            f"{source}: one process drives {listed}; each is a timeline of its own",
            severity="info",
            count=len(used) + 1,
        )
    unknown = int(np.isin(inverse, [i for i in (main, *used) if devices[i] == -1]).sum())
    if unknown:
        add_finding(
            findings,
            "device.unknown",
            f"{source}: {unknown} device events do not say which device ran them; they "
            "are a timeline of their own, to which no log of a device is joined",
            count=unknown,
        )
    if unused:
        events = int(np.isin(inverse, unused).sum())
        listed = ", ".join(device_name(devices[i]) for i in unused)
        add_finding(
            findings,
            "device.stray_events",
            f"{source}: {events} events ({sum(all_work[i] for i in unused) / 1e6:.3f} ms)"
            f" on {listed}, which the process does not compute on, are left out",
            severity="info",
            count=events,
        )
    if not findings:
        return [(int(devices[main]), rows)], []
    every = np.ones(len(device["device_id"]), dtype=bool) if rows is None else rows
    return [
        (int(devices[i]), every & (device["device_id"] == devices[i])) for i in [main, *used]
    ], findings
