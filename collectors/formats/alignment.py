"""The clock of a device checked against the host's, by the calls that launched its events.

No event begins before its call, and none of a device ends after a call that waited for the device
has returned. Where the events of a trace do, its clocks were not aligned: they are shifted by what
makes the quickest launch as quick as on other machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from chopper.arrow import with_column
from chopper.collectors.formats.arrays import NO_VALUE, to_arrow, to_numpy
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
_PARTS = 4
"""Of a trace whose quickest launches are compared; each of ``_LEAST_LAUNCHES``."""
_LEAST_LAUNCHES = 8
_WAITS_FOR_DEVICE = ("DeviceSynchronize", "CtxSynchronize")


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
    if not foreign.any():
        return host
    own = to_arrow(called, foreign | (called == NO_VALUE))
    return with_column(host, "correlation_id", own)


def aligned(host: pa.Table, device: pa.Table, source: str) -> tuple[pa.Table, list[Finding]]:
    """Shift the events of one device to the host's clock if they contradict it.

    HOST_SPAN, DEVICE_EVENT -> DEVICE_EVENT, and what was found.

    If the clock drifts, events are shifted as far as all of them need, and the finding withholds
    the causes of idle time.
    """
    pairs = _Launches.of(host, device)
    if len(pairs.call_ns) < 2:
        return device, []
    latency = pairs.start_ns - pairs.call_ns
    early_ns = -_least(latency)
    late_ns, why = _late(host, pairs, latency)
    shift_ns, steady = -late_ns, True
    if early_ns > _SLACK_NS:
        count = int((latency < -_SLACK_NS).sum())
        why = f"{count} of {len(latency)} events begin before the calls that launched them"
        shift_ns = early_ns + _QUICKEST_NS
        waited = latency[pairs.waited]
        violating = (waited < -_SLACK_NS).sum()
        if ((waited >= -_SLACK_NS) & (waited <= _HEALTHY_NS)).sum() > violating:
            # Most launches say that the clock is right.
            if violating < max(_DRIFT_RATIO * len(waited), 2):
                return device, []
            shift_ns, steady = 0, False
    if not shift_ns and steady:
        return device, []
    parts = np.array_split(latency[pairs.waited], _PARTS)
    quickest_ns = [_least(part) for part in parts if len(part) >= _LEAST_LAUNCHES]
    steady &= not quickest_ns or max(quickest_ns) - min(quickest_ns) < _DRIFT_NS
    side = "ahead of" if shift_ns < 0 else "behind"
    said = f"the device's clock is {duration(abs(shift_ns))} {side} the host's ({why})"
    finding = Finding(
        code="device.clock_corrected" if steady else "device.clock_drifts",
        severity="warning",
        message=f"{source}: {said}; corrected by matched correlation ids"
        if steady
        else f"{source}: the device's clock drifts against the host's ({why}): causes of idle time "
        "are withheld",
        count=len(latency),
        withholds=() if steady else ("idle.causes",),
    )
    moved = to_arrow(to_numpy(device["start_ns"]) + shift_ns)
    return with_column(device, "start_ns", moved), [finding]


@dataclass(frozen=True)
class _Launches:
    """Calls and the first event of each, by ids that are used once; in the events' order.

    Attributes:
        call_ns: starts of the calls.
        start_ns, end_ns: of the events.
        waited: mask of the events before which the device was idle for long.
    """

    call_ns: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    waited: np.ndarray

    @classmethod
    def of(cls, host: pa.Table, device: pa.Table) -> _Launches:
        """Pair the calls and events of a trace."""
        called = to_numpy(host["correlation_id"], 0)
        category = host["category"].combine_chunks()
        kinds = category.dictionary.to_pylist()
        calling = [i for i, kind in enumerate(kinds) if kind in ("runtime", "driver")]
        calls = np.flatnonzero((called > 0) & np.isin(to_numpy(category.indices, -1), calling))
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
        own, row = np.unique(to_numpy(device["correlation_id"], 0), return_index=True)
        usable = np.isin(own, ids) & ~np.isin(own, again)
        own, row = own[usable], row[usable]
        order = np.argsort(row)
        call_ns, row = start[first[np.searchsorted(ids, own)]][order], row[order]
        return cls(call_ns, event_ns[row], event_ns[row] + dur[row], idle_ns[row] >= _GAP_NS)


def _least(values: np.ndarray) -> int:
    """Return the least value without the lowest hundredth, and at least without the first.

    Few pairs are mismatched, of ids that were lost and used again.
    """
    skipped = min(max(1, len(values) // 100), len(values) - 1)
    return int(np.partition(values, skipped)[skipped])


def _late(host: pa.Table, pairs: _Launches, latency: np.ndarray) -> tuple[int, str]:
    """Return by how much the device's clock is late, in ns, and what says so; 0 if nothing does.

    A call that waits for the device returns after all that was launched before it. And a device
    that was idle does not always begin late by nearly the same time.
    """
    name = host["name"].combine_chunks()
    texts = enumerate(name.dictionary.to_pylist())
    waiting = [i for i, text in texts if text and text.endswith(_WAITS_FOR_DEVICE)]
    rows = np.flatnonzero(np.isin(to_numpy(name.indices, -1), waiting))
    order = np.argsort(pairs.call_ns, kind="stable")
    before = np.searchsorted(pairs.call_ns[order], to_numpy(host["start_ns"])[rows])
    rows, before = rows[before > 0], before[before > 0]
    returned_ns = (to_numpy(host["start_ns"]) + to_numpy(host["dur_ns"]))[rows]
    done_ns = np.maximum.accumulate(pairs.end_ns[order])[before - 1]
    late_ns = -_least(returned_ns - done_ns) if len(rows) else 0
    if late_ns > _GAP_NS:
        return late_ns, "events end after calls that waited for them have returned"
    waited = latency[pairs.waited]
    if len(waited) >= _LEAST_LAUNCHES:
        least, most = _least(waited), int(np.quantile(waited, 0.9))
        if least > _HEALTHY_NS and most - least < _HEALTHY_NS:
            said = f"an idle device never began work within {duration(least)} of a launch"
            return least - _QUICKEST_NS, said
    return 0, ""
