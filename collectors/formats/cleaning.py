"""Checks and repairs that the rows of every recorder need: numbers, texts, times, devices, clocks.

The device's clock is checked against the host's by the calls that launched its events: no event
begins before its call, and none ends after a later call that waited for the device has returned.
Where events do, the clocks were not aligned, and the events are shifted. A steady latency alone
says nothing: the launches of some systems take that long.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from chopper.arrow import with_column
from chopper.collectors.formats.parsed import NO_VALUE, is_one_of, to_arrow, to_numpy
from chopper.storage.findings import finding
from chopper.storage.manifest import Finding
from chopper.wording import device_name, duration

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


def damage_findings(counts: Counter[str], source: str) -> list[Finding]:
    """Say how many events of a file were repaired or dropped."""
    return [finding(code, count=count, source=source) for code, count in sorted((+counts).items())]


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
        findings.append(
            finding("trace.several_devices", count=len(used) + 1, source=source, devices=listed)
        )
    unknown = int(np.isin(inverse, [i for i in (main, *used) if devices[i] == -1]).sum())
    if unknown:
        findings.append(finding("device.unknown", count=unknown, source=source))
    if unused:
        events = int(np.isin(inverse, unused).sum())
        listed = ", ".join(device_name(devices[i]) for i in unused)
        note = finding(
            "device.stray_events",
            count=events,
            source=source,
            time_ms=sum(all_work[i] for i in unused) / 1e6,
            devices=listed,
        )
        findings.append(note)
    if not findings:
        return [(int(devices[main]), rows)], []
    every = np.ones(len(device["device_id"]), dtype=bool) if rows is None else rows
    return [
        (int(devices[i]), every & (device["device_id"] == devices[i])) for i in [main, *used]
    ], findings


_SLACK_NS = 2_000
"""Times cut to whole microseconds may be off by one on both sides."""
_QUICKEST_NS = 5_000
"""From the start of a call to that of its event, at least: 3 to 13 µs in traces of many GPUs."""
_GAP_NS = 10_000
"""A device that was idle for longer waited for a launch."""
_HEALTHY_NS = 100_000
"""From the start of a call to that of its event, at most, if the device was idle."""
_DRIFT_NS = 100_000
_DRIFT_RATIO = 0.05
_PARTS, _LEAST_LAUNCHES = 4, 8
"""Parts of a trace whose quickest launches are compared, and the least number of these."""
_WAITS_FOR_DEVICE = ("DeviceSynchronize", "CtxSynchronize")


class _Launches(NamedTuple):
    """Calls and the first event of each, in the events' order.

    ``waited`` is a mask of the events before which the device was idle for long.
    """

    call_ns: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    waited: np.ndarray


def calls_of_device(
    host: pa.Table, device: dict[str, Any], of_process: np.ndarray | None, rows: np.ndarray | None
) -> pa.Table:
    """Return the host's spans without the correlation ids of work on the process' other devices.

    Args:
        host: HOST_SPAN.
        device: columns of the device events of all devices.
        of_process, rows: masks of the events of the process, and of the device; None for all.
    """
    if rows is None:
        return host
    ids = device["correlation_id"]
    elsewhere = np.setdiff1d(ids[~rows if of_process is None else of_process & ~rows], ids[rows])
    called = to_numpy(host["correlation_id"], NO_VALUE)
    foreign = np.isin(called, elsewhere[elsewhere > 0])
    return with_column(host, "correlation_id", to_arrow(called, foreign | (called == NO_VALUE)))


def aligned(
    host: pa.Table, device: pa.Table, source: str, *, only_device: bool
) -> tuple[pa.Table, list[Finding]]:
    """Shift the events of one device to the host's clock if they contradict it.

    HOST_SPAN, DEVICE_EVENT -> DEVICE_EVENT, and what was found. If the clock drifts, the events are
    shifted as far as all of them need, and the finding withholds the causes of idle time. Calls
    that wait for a device do not say for which: they count if the process uses ``only_device``.
    """
    pairs = _launches(host, device)
    if len(pairs.call_ns) < 2:
        return device, []
    latency = pairs.start_ns - pairs.call_ns
    waited = latency[pairs.waited]
    early_ns = -_least(latency)
    shift_ns, steady = -_late_ns(host, pairs) if only_device else 0, True
    why = "events end after calls that waited for them have returned"
    if early_ns > _SLACK_NS:
        early = waited < -_SLACK_NS
        shift_ns = early_ns + _QUICKEST_NS
        if (~early & (waited <= _HEALTHY_NS)).sum() > early.sum():
            # Most launches say that the clock is right: of some the id may be wrong.
            shift_ns, steady = 0, early.sum() < max(_DRIFT_RATIO * len(waited), 2)
        count = int((latency < -_SLACK_NS).sum())
        why = f"{count} of {len(latency)} events begin before the calls that launched them"
    if not shift_ns and steady:
        return device, []
    parts = (p for p in np.array_split(waited, _PARTS) if len(p) >= _LEAST_LAUNCHES)
    quickest_ns = [_least(part) for part in parts]
    if steady and (not quickest_ns or np.ptp(quickest_ns) < _DRIFT_NS):
        note = finding(
            "device.clock_corrected",
            count=len(latency),
            source=source,
            offset=duration(abs(shift_ns)),
            side="ahead of" if shift_ns < 0 else "behind",
            why=why,
        )
    else:
        note = finding("device.clock_drifts", count=len(latency), source=source, why=why)
    moved = to_arrow(to_numpy(device["start_ns"]) + shift_ns)
    return with_column(device, "start_ns", moved), [note]


def _launches(host: pa.Table, device: pa.Table) -> _Launches:
    """Pair calls with the first event of each, by ids that are used once."""
    called = to_numpy(host["correlation_id"], 0)
    category = host["category"].combine_chunks()
    kinds = to_numpy(category.indices, -1), category.dictionary.to_pylist()
    calls = np.flatnonzero((called > 0) & is_one_of(kinds, "runtime", "driver"))
    start = to_numpy(host["start_ns"])[calls]
    order = np.lexsort((start, called[calls]))
    end, start = (start + to_numpy(host["dur_ns"])[calls])[order], start[order]
    called = called[calls][order]
    ids, first = np.unique(called, return_index=True)
    # A call of the driver lies within that of the runtime; later calls use an id again.
    again = called[1:][(called[1:] == called[:-1]) & (start[1:] > end[:-1])]
    event_ns, dur = to_numpy(device["start_ns"]), to_numpy(device["dur_ns"])
    done_ns = np.maximum.accumulate(event_ns + dur)
    idle_ns = event_ns - np.append(event_ns[:1], done_ns[:-1])
    device_ids, row = np.unique(to_numpy(device["correlation_id"], 0), return_index=True)
    usable = np.isin(device_ids, ids) & ~np.isin(device_ids, again)
    order = np.argsort(row[usable])
    device_ids, row = device_ids[usable][order], row[usable][order]
    call_ns = start[first[np.searchsorted(ids, device_ids)]]
    return _Launches(call_ns, event_ns[row], (event_ns + dur)[row], idle_ns[row] >= _GAP_NS)


def _least(values: np.ndarray) -> int:
    """Return the least value without the lowest hundredth, and at least without the first.

    Few pairs are mismatched, of ids that were lost and used again.
    """
    skipped = min(max(1, len(values) // 100), len(values) - 1)
    return int(np.partition(values, skipped)[skipped])


def _late_ns(host: pa.Table, pairs: _Launches) -> int:
    """Return by how much the device's clock is late, in ns; 0 if nothing says so.

    A call that waits for the device returns after all that was launched before it.
    """
    name = host["name"].combine_chunks()
    texts = enumerate(name.dictionary.to_pylist())
    waiting = [i for i, text in texts if text and text.endswith(_WAITS_FOR_DEVICE)]
    rows = np.flatnonzero(np.isin(to_numpy(name.indices, -1), waiting))
    order = np.argsort(pairs.call_ns, kind="stable")
    start_ns = to_numpy(host["start_ns"])[rows]
    before = np.searchsorted(pairs.call_ns[order], start_ns)
    returned_ns = start_ns + to_numpy(host["dur_ns"])[rows]
    done_ns = np.maximum.accumulate(pairs.end_ns[order])[before - 1]
    early_ns = (returned_ns - done_ns)[before > 0]
    late_ns = -_least(early_ns) if len(early_ns) else 0
    return late_ns if late_ns > _GAP_NS else 0
