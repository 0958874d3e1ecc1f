"""Waits of one rank's device events beside their launch: recorded, and for streams.

CUDA's synchronization records name the call that asked, the stream that waited, and the call that
recorded the event, so the work waited for is what that stream had been given before. Without them,
a stream runs in order. It waits for another one after a call for an event (cudaStreamWaitEvent),
which belongs to the launch that follows it. Where the trace does not say which event, it is taken
to be the last one that had been launched on each other stream before the call, as far as that had
ended in time. Where no call tells, an event that begins right when another stream's ends waits for
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import compact, ints, matching, row_set, strings
from chopper.analyzers.trace.join import COMMUNICATION, Links, latest_before
from chopper.analyzers.trace.phases import PHASES

if TYPE_CHECKING:
    import pyarrow as pa

    from chopper.analyzers.trace.collectives import Communication

_RIGHT_AFTER_NS = 50_000
"""An event that begins so soon after another stream's has ended may have waited for it."""
CALLS = 1.5
"""An event that begins within so many lengths of its launching call began because of it."""
_BACK = 4
"""So many collectives back is looked for the one that a stream waited for."""
_STREAMS_MAX = 24
"""With more streams, only those with communication are looked at as what others wait for."""


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


@dataclass(frozen=True)
class Waits:
    """Edges between device events, and what they take at least.

    Attributes:
        previous: event before each one on its stream, -1 for none.
        stream_ns: what a stream takes from one event to the next, in this trace's mean case.
        source, target: events of which the second waits for the first on another stream.
        event_ns: what that takes.
        launch_ns: what a launch takes beyond its call, of events whose stream was free.
    """

    previous: np.ndarray
    stream_ns: int
    source: np.ndarray
    target: np.ndarray
    event_ns: int
    launch_ns: int


def waits(links: Links, communication: Communication, recorded: Recorded) -> Waits:
    """Return the waits of the events of one rank."""
    events = links.events
    previous = previous_on_stream(links)
    start, end = events.start_ns, events.end_ns
    free = np.where(previous >= 0, end[previous], np.iinfo(np.int64).min)
    launched = links.has_launch
    queued = launched & (previous >= 0) & (links.returned_ns <= free)
    gap = start[queued] - free[queued]
    gap = gap[(gap >= 0) & (gap <= _RIGHT_AFTER_NS)]
    stream_ns = int(np.median(gap)) if len(gap) else 0
    idle = launched & (free <= links.launch_ns)
    beyond = start[idle] - links.returned_ns[idle]
    beyond = beyond[np.abs(beyond) <= _RIGHT_AFTER_NS]
    launch_ns = int(np.median(beyond)) if len(beyond) else 0
    told_source, told_target = _called_waits(links, communication, previous, recorded.calls)
    seen_source, seen_target = _observed_waits(links, free, stream_ns, launch_ns)
    # Of what waits for a reason that was recorded no other is guessed.
    guessed = ~row_set(recorded.target, len(events))[seen_target]
    seen_source, seen_target = seen_source[guessed], seen_target[guessed]
    source = np.concatenate([recorded.source, told_source, seen_source])
    target = np.concatenate([recorded.target, told_target, seen_target])
    _, first = np.unique(source * len(events) + target, return_index=True)
    source, target = source[first], target[first]
    delay = start[target] - end[source]
    bound = (delay <= _RIGHT_AFTER_NS) & (free[target] + stream_ns < start[target])
    # What was launched only then waited for its launch.
    bound = delay[bound & (links.returned_ns[target] <= end[source])]
    event_ns = int(np.median(bound)) if len(bound) else 0
    return Waits(previous, stream_ns, source, target, event_ns, launch_ns)


def previous_on_stream(links: Links) -> np.ndarray:
    """The event before each one on its stream, -1 for none."""
    stream_key = links.events.stream_key
    order = np.argsort(stream_key, kind="stable")
    previous = np.full(len(stream_key), -1, dtype=np.int64)
    together = stream_key[order[1:]] == stream_key[order[:-1]]
    previous[order[1:][together]] = order[:-1][together]
    return previous


def _observed_waits(
    links: Links, free: np.ndarray, stream_ns: int, launch_ns: int
) -> tuple[np.ndarray, np.ndarray]:
    """Events that begin right after another stream's, and for no other reason."""
    events = links.events
    start, end = events.start_ns, events.end_ns
    stream_key = links.events.stream_key
    order = np.argsort(end, kind="stable")
    last = np.searchsorted(end[order], start, side="right") - 1
    source = np.where(last >= 0, order[np.maximum(last, 0)], 0)
    # The longer a launching call, the more a launch varies.
    call = links.returned_ns - links.launch_ns
    launched = links.returned_ns + np.maximum(launch_ns, (CALLS - 1) * call)
    ready_ns = np.maximum(free + stream_ns, np.where(links.has_launch, launched, 0))
    target = np.flatnonzero(
        (last >= 0)
        & (stream_key[source] != stream_key)
        & (start - end[source] <= _RIGHT_AFTER_NS)
        & (end[source] >= ready_ns)
        & (events.device_id[source] == events.device_id)
    )
    return source[target], target


def _called_waits(
    links: Links, communication: Communication, previous: np.ndarray, recorded: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Waits that follow from calls for events, but for those whose event was recorded."""
    host, events = links.host, links.events
    nothing = np.zeros(0, np.int64)
    asks = host.of("runtime", "driver") & host.named(names.is_event_wait) if len(host) else nothing
    launched = np.flatnonzero(links.has_launch)
    if len(recorded):
        asks[recorded] = False
    if not asks.any() or not len(launched):
        return nothing, nothing
    called_ns = host.start_ns[asks]
    calls = np.sort(links.launch_ns[launched])
    # A call for an event belongs to the next launch of all.
    follower = np.searchsorted(calls, called_ns, side="right")
    called_ns, follower = called_ns[follower < len(calls)], follower[follower < len(calls)]
    if not len(called_ns):
        return nothing, nothing
    launch, first = np.unique(calls[follower], return_index=True)
    of_launch = np.append(first[1:], len(called_ns)) - 1
    at = np.searchsorted(launch, links.launch_ns[launched])
    hit = (at < len(launch)) & (
        launch[np.minimum(at, len(launch) - 1)] == links.launch_ns[launched]
    )
    target = launched[hit]
    # One launch of a graph starts many events: its first of each stream waits.
    before = previous[target]
    alone = (before < 0) | (links.launch_row[before] != links.launch_row[target])
    target, when = target[alone], called_ns[of_launch[at[hit][alone]]]
    gathers, copies = _sharding(links, communication)
    updates = links.phase == PHASES.index("optimizer")
    stream_key = links.events.stream_key
    distinct, stream = compact(stream_key)
    communicates = links.work_class == COMMUNICATION
    sources, targets = [nothing], [nothing]
    for number in range(len(distinct)):
        mine = launched[stream[launched] == number]
        of_communication = bool(communicates[mine].any())
        if not len(mine) or (len(distinct) > _STREAMS_MAX and not of_communication):
            continue
        mine = mine[np.argsort(links.launch_ns[mine], kind="stable")]
        other_streams = stream[target] != number
        sharding = gathers | copies
        for asking, from_ in (
            (other_streams & ~sharding[target], mine),
            (
                other_streams & gathers[target],
                mine[copies[mine] | updates[mine] | communicates[mine]],
            ),
            (other_streams & copies[target], mine[gathers[mine] | ~communicates[mine]]),
        ):
            rows = np.flatnonzero(asking)
            last = np.searchsorted(links.launch_ns[from_], when[rows], side="left") - 1
            open_ = last >= 0
            for back in range(_BACK if of_communication else 1):
                if not open_.any():
                    break
                row = from_[np.maximum(last - back, 0)]
                fits = open_ & (last >= back)
                fits &= events.end_ns[row] <= events.start_ns[target[rows]]
                sources.append(row[fits])
                targets.append(target[rows[fits]])
                open_ &= ~fits
    return np.concatenate(sources), np.concatenate(targets)


def _sharding(links: Links, communication: Communication) -> tuple[np.ndarray, np.ndarray]:
    """Masks of the all-gathers of parameters, and of the copies around them.

    Parameters do not depend on what the model computes: their all-gather waits for the optimizer
    and for copies into and out of its buffers, not for the last product; and what copies them out
    waits for an all-gather, not for the last reduction of gradients.
    """
    host = links.host
    region = host.nesting.nearest(host.named(names.is_sharding_region)) >= 0
    inside = np.append(region, np.array([False]))
    of_sharding = inside[np.where(links.launch_row >= 0, links.launch_row, links.op_row)]
    gathers = np.zeros(len(of_sharding), dtype=bool)
    what = np.array([kind.what == "allgather" for kind in communication.kinds] + [False])
    gathers[communication.event_row] = what[communication.kind]
    return gathers & of_sharding, of_sharding & (links.work_class != COMMUNICATION)
