"""The clock of a device checked against the host's, by the calls that launched its events.

No event begins before its call, and none ends after a later call that waited for the device has
returned. Where events do, the clocks were not aligned, and the events are shifted. A steady latency
alone says nothing: the launches of some systems take that long.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from chopper.arrow import with_column
from chopper.collectors.formats.arrays import NO_VALUE, is_one_of, to_arrow, to_numpy
from chopper.storage.manifest import Finding
from chopper.wording import duration

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
    code, withholds = "device.clock_drifts", ["idle.causes"]
    state = f"drifts against the host's ({why}): causes of idle time are withheld"
    if steady and (not quickest_ns or np.ptp(quickest_ns) < _DRIFT_NS):
        side = "ahead of" if shift_ns < 0 else "behind"
        code, withholds = "device.clock_corrected", []
        state = f"is {duration(abs(shift_ns))} {side} the host's ({why}); corrected by matched ids"
    finding = Finding(
        code=code,
        severity="warning",
        message=f"{source}: the device's clock {state}",
        count=len(latency),
        withholds=tuple(withholds),
    )
    moved = to_arrow(to_numpy(device["start_ns"]) + shift_ns)
    return with_column(device, "start_ns", moved), [finding]


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
