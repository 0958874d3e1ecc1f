"""Waits that a trace records: the event that a stream or a host thread waited for.

CUDA's synchronization records name the call that asked, the stream that waited, and the call that
recorded the event, so the work waited for is what that stream had been given before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.trace.columns import ints, matching, strings
from chopper.analyzers.trace.join import Links, latest_before

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Recorded:
    """Waits that the trace tells of.

    Attributes:
        source, target: device events of which the second's stream was told to wait for the first.
        calls: rows of the calls that made streams wait; all that these waited for is known.
        call: rows of the calls with which the host waited for an event or for a stream.
        awaited: the device event that each of them waited for, -1 where there was nothing.
    """

    source: np.ndarray
    target: np.ndarray
    calls: np.ndarray
    call: np.ndarray
    awaited: np.ndarray


def recorded_waits(links: Links, table: pa.Table | None) -> Recorded:
    """SYNCHRONIZATION of one rank -> what waited for what."""
    nothing = np.zeros(0, np.int64)
    if table is None or not table.num_rows or not len(links.host):
        return Recorded(nothing, nothing, nothing, nothing, nothing)
    host = links.host
    calls = _Calls(links)
    call = calls.latest(ints(table, "correlation_id"), ints(table, "start_ns"))
    record = calls.latest(ints(table, "event_correlation_id"), host.start_ns[call])
    stream, event_stream = ints(table, "stream_id"), ints(table, "event_stream_id")
    named = strings(table, "name")
    waits, event, stream_sync = (
        matching(*named, kind.__eq__) for kind in ("Stream Wait Event", "Event Sync", "Stream Sync")
    )
    of_event = (call >= 0) & (record >= 0) & (event_stream >= 0)
    submitted = _SubmissionOrder(links, ints(table, "device_id"))
    recorded = np.flatnonzero(waits & of_event & (stream >= 0))
    source = submitted.last(event_stream[recorded], host.start_ns[record[recorded]], recorded)
    target = submitted.last(stream[recorded], host.start_ns[call[recorded]], recorded, step=0)
    both = (source >= 0) & (target >= 0)
    of_stream = np.flatnonzero(stream_sync & (call >= 0) & (stream >= 0))
    synced = np.flatnonzero(event & of_event)
    waiting = np.concatenate([call[synced], call[of_stream]])
    of_events = submitted.last(event_stream[synced], host.start_ns[record[synced]], synced)
    of_streams = submitted.last(stream[of_stream], host.start_ns[call[of_stream]], of_stream)
    awaited = np.concatenate([of_events, of_streams])
    return Recorded(source[both], target[both], call[recorded], waiting, awaited)


class _Calls:
    """Runtime calls by their correlation id."""

    def __init__(self, links: Links) -> None:
        host = links.host
        correlation = ints(host.table, "correlation_id")
        rows = np.flatnonzero((correlation > 0) & host.of("runtime", "driver"))
        self.rows = rows[np.argsort(correlation[rows], kind="stable")]
        self.keys, self.times = correlation[self.rows], host.start_ns[self.rows]

    def latest(self, wanted: np.ndarray, at_ns: np.ndarray) -> np.ndarray:
        """Row of the last call with each id that began by a time, -1 for none."""
        if not len(self.rows):
            return np.full(len(wanted), -1, dtype=np.int64)
        position = latest_before(self.keys, self.times, wanted, at_ns)
        fits = (position >= 0) & (self.keys[position] == wanted) & (wanted > 0)
        return np.where(fits, self.rows[position], -1)


class _SubmissionOrder:
    """Device events in the order of their submission to a stream."""

    def __init__(self, links: Links, device: np.ndarray) -> None:
        self.events, self.device = links.events, device
        launched = np.flatnonzero(links.has_launch)
        self.rows = launched[np.argsort(links.launch_ns[launched], kind="stable")]
        self.time_ns = links.launch_ns

    def last(
        self, stream: np.ndarray, time_ns: np.ndarray, row: np.ndarray, step: int = -1
    ) -> np.ndarray:
        """Return the last event submitted to each stream before a time, or ``step`` + 1 later."""
        events = np.full(len(stream), -1, dtype=np.int64)
        places = np.stack([self.device[row], stream])
        for device, number in np.unique(places, axis=1).T.tolist():
            asking = np.flatnonzero((places[0] == device) & (stream == number))
            mine = (self.events.stream_id == number) & (self.events.device_id == device)
            rows = self.rows[mine[self.rows]]
            at = np.searchsorted(self.time_ns[rows], time_ns[asking], side="left") + step
            some = (at >= 0) & (at < len(rows))
            events[asking[some]] = rows[at[some]]
        return events
