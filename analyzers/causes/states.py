"""Level 1: exclusive states of the device, and each event's share of them.

A sweep over all event boundaries. At any moment the device is in one state, by priority compute >
communication > copy > idle; events of the winning class share the moment equally.

Exposed communication and copies are what no compute hid. A matched collective waits until its last
rank has come; what follows is transfer, at link peak as far as its bytes need that long, below peak
for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace import names
from chopper.analyzers.trace.collectives import LEFT_EARLY_NS, link_peaks
from chopper.analyzers.trace.columns import nullable, run_starts
from chopper.analyzers.trace.join import COMMUNICATION, COMPUTE, COPY, Links
from chopper.analyzers.trace.match import Matched
from chopper.analyzers.trace.rank_join import JoinedRank
from chopper.analyzers.trace.tables import DeviceEvents
from chopper.analyzers.trace.windows import Windows
from chopper.analyzers.work.kernels import NameSearch
from chopper.arrow import to_arrow
from chopper.causes import CODES
from chopper.tables import TABLES
from chopper.wording import ranges


@dataclass(frozen=True, slots=True)
class States:
    """Exclusive time of one rank.

    Attributes:
        event_row, window, share_ns: one row per event and window it touches; the shares of a
            window and its idle time sum to the window exactly.
        length_ns: how long the event ran in the window, whatever ran beside it.
        gap_start_ns, gap_end_ns, gap_window: idle intervals in order.
    """

    event_row: np.ndarray
    window: np.ndarray
    share_ns: np.ndarray
    length_ns: np.ndarray
    gap_start_ns: np.ndarray
    gap_end_ns: np.ndarray
    gap_window: np.ndarray


class Shares(NamedTuple):
    """Time of fragments of `States` by leaf cause; a fragment's rows sum to its share.

    Attributes:
        fragment: index of the fragment.
        cause: code of the leaf.
        time_ns: more than 0.
    """

    fragment: np.ndarray
    cause: np.ndarray
    time_ns: np.ndarray


def stacked(parts: Iterable[tuple[np.ndarray, np.ndarray | int, np.ndarray]]) -> Shares:
    """Put parts (fragments, their cause or causes, times) one after another, zeros left out."""
    blocks = []
    for fragment, cause, time_ns in parts:
        rows = np.flatnonzero(time_ns)
        causes = np.broadcast_to(cause, len(time_ns))
        blocks.append((fragment[rows], causes[rows], time_ns[rows]))
    return Shares(*map(np.concatenate, zip(*blocks, strict=True)))


def exclusive_states(
    start_ns: np.ndarray, end_ns: np.ndarray, work_class: np.ndarray, windows: Windows
) -> States:
    """Sweep the events of one rank inside its windows.

    Args:
        start_ns, end_ns: events, sorted by start.
        work_class: COMPUTE, COMMUNICATION or COPY per event.
        windows: they tile the swept time; what lies outside is not swept.
    """
    bounds = windows.bounds_ns
    row, window, start, end = _fragments(start_ns, end_ns, bounds)
    klass = work_class[row]
    # Stable is the fast kind here: the parts are sorted, or nearly so.
    times = np.sort(np.concatenate([start, end, bounds]), kind="stable")
    times = times[run_starts(times)]
    first = np.searchsorted(times, start)
    last = np.searchsorted(times, end)
    length = np.diff(times)
    idle = np.ones(len(length), dtype=bool)
    share = np.zeros(len(row), dtype=np.int64)
    for c in (COMPUTE, COMMUNICATION, COPY):
        mine = klass == c
        if not mine.any():
            continue
        begun, ended = (np.bincount(at[mine], minlength=len(times)) for at in (first, last))
        count = np.cumsum(begun - ended)[:-1]
        wins = idle & (count > 0)
        idle &= ~wins
        each = np.zeros(len(length), dtype=np.int64)
        np.floor_divide(length, count, out=each, where=wins)
        total = np.zeros(len(times), dtype=np.int64)
        np.cumsum(each, out=total[1:])
        share[mine] = total[last[mine]] - total[first[mine]]
        rest = each
        rest *= count
        np.subtract(length, rest, out=rest, where=wins)
        if rest.any():
            _give_rest(share, rest, mine, first, last, window, times, bounds)
    hard = np.zeros(len(times), dtype=bool)
    hard[first] = True
    hard[np.searchsorted(times, bounds)] = True
    gap_start, gap_end, gap_window = _gaps(times, idle, bounds, hard)
    return States(row, window, share, end - start, gap_start, gap_end, gap_window)


def _fragments(
    start: np.ndarray, end: np.ndarray, bounds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut events at window bounds: (event row, window, start, end), events outside dropped."""
    count = len(bounds) - 1
    low = np.clip(np.searchsorted(bounds, start, side="right") - 1, 0, count - 1)
    high = np.clip(np.searchsorted(bounds, end, side="left") - 1, 0, count - 1)
    high = np.maximum(high, low)
    inside = (end >= bounds[0]) & (start <= bounds[-1])
    # A point in time on the border belongs to the window that it closes, or opens at the start.
    inside &= (end > bounds[0]) | (start >= bounds[0])
    inside &= (start < bounds[-1]) | ((start == end) & (start == bounds[-1]))
    repeat = np.where(inside, high - low + 1, 0)
    row = np.repeat(np.arange(len(start)), repeat)
    offset = np.arange(len(row)) - np.repeat(np.cumsum(repeat) - repeat, repeat)
    window = low[row] + offset
    piece_start = np.maximum(start[row], bounds[window])
    piece_end = np.minimum(end[row], bounds[window + 1])
    return row, window, piece_start, np.maximum(piece_end, piece_start)


def _give_rest(
    share: np.ndarray,
    rest: np.ndarray,
    mine: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
    window: np.ndarray,
    times: np.ndarray,
    bounds: np.ndarray,
) -> None:
    """Hand the nanoseconds that do not divide evenly to events that were running then.

    Each goes, one by one, to the events that took part in a shared moment with a rest, per
    window and in time order; no event gets more than its even part of them.
    """
    marks = np.concatenate([[0], np.cumsum(rest > 0)])
    takes_part = mine & (marks[last] > marks[first])
    interval_window = np.clip(
        np.searchsorted(bounds, times[:-1], side="right") - 1, 0, len(bounds) - 2
    )
    owed = np.zeros(len(bounds) - 1, dtype=np.int64)
    np.add.at(owed, interval_window, rest)
    for w in np.flatnonzero(owed):
        rows = np.flatnonzero(takes_part & (window == w))
        quotient, extra = divmod(int(owed[w]), len(rows))
        share[rows] += quotient
        share[rows[:extra]] += 1


def _gaps(
    times: np.ndarray, idle: np.ndarray, bounds: np.ndarray, hard: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Idle intervals, joined where nothing starts and no window ends between them.

    Args:
        hard: mask of the times at which something starts or a window ends.
    """
    index = np.flatnonzero(idle)
    if not len(index):
        return index, index, index
    new = run_starts(index - np.arange(len(index))) | hard[index]
    begin = index[new]
    stop = np.append(index[np.flatnonzero(new)[1:] - 1], index[-1])
    start = times[begin]
    window = np.clip(np.searchsorted(bounds, start, side="right") - 1, 0, len(bounds) - 2)
    return start, times[stop + 1], window


_DIRECTIONS = {
    "copy.device_to_device": NameSearch("DtoD|PtoP|DeviceToDevice"),
    "copy.device_to_host": NameSearch("DtoH|DeviceToHost"),
    "copy.host_to_device": names.is_copy_to_device,
    "copy.memset": names.is_fill,
}
"""Names of copies; the last one that fits counts."""


def split_exposed(
    states: States,
    links: Links,
    joined: JoinedRank,
    matched: Matched | None,
    waiting: np.ndarray,
) -> Shares:
    """Exposed communication and copies by cause; ``waiting``: fragments before the last rank."""
    events, event, share = links.events, states.event_row, states.share_ns
    klass = links.work_class[event]
    copies = np.flatnonzero((klass == COPY) & (share > 0))
    sent = np.flatnonzero((klass == COMMUNICATION) & (share > 0))
    ready_ns = np.full(len(events), -1) if matched is None else matched.ready_ns
    # The root of a broadcast need not stay until all have come; nor do ranks of other clocks.
    until_ready = (ready_ns >= 0) & (events.end_ns >= ready_ns - LEFT_EARLY_NS)
    is_matched = until_ready[event[sent]]
    waits = sent[is_matched & waiting[sent]]
    transfers = sent[is_matched & ~waiting[sent]]
    alone = sent[~is_matched]
    ideal = _transfer_ideal(states, links, joined, ready_ns, transfers)
    known = ~np.isnan(ideal)
    at_peak = np.minimum(np.floor(ideal[known]), share[transfers[known]]).astype(np.int64)
    below_peak = share[transfers[known]] - at_peak
    return stacked(
        [
            (copies, copy_direction(events)[event[copies]], share[copies]),
            (waits, CODES["communication.wait"], share[waits]),
            (alone, CODES["communication.unseparated"], share[alone]),
            (transfers[~known], CODES["communication.transfer.no_peak"], share[transfers[~known]]),
            (transfers[known], CODES["communication.transfer.at_peak"], at_peak),
            (transfers[known], CODES["communication.transfer.below_peak"], below_peak),
        ]
    )


def _transfer_ideal(
    states: States, links: Links, joined: JoinedRank, ready_ns: np.ndarray, transfers: np.ndarray
) -> np.ndarray:
    """Time at link peak of each transfer's exposed part, NaN where unknown."""
    events, communication = links.events, joined.communication
    peaks = link_peaks(communication.kinds, joined.link)
    peak = np.array([*(p or np.nan for p in peaks), np.nan])[communication.kind]
    at_peak_s = np.full(len(events), np.nan)
    at_peak_s[communication.event_row] = communication.bus_bytes / peak
    event, share = states.event_row[transfers], states.share_ns[transfers]
    event_share = np.zeros(len(events), dtype=np.int64)
    np.add.at(event_share, event, share)
    # A transfer that is hidden in part needs the link for its exposed part only.
    end = events.end_ns[event]
    begin = np.clip(ready_ns[event], events.start_ns[event], end)
    exposed = np.minimum(event_share[event] / np.maximum(end - begin, 1), 1.0)
    return at_peak_s[event] * 1e9 * exposed * (share / np.maximum(event_share[event], 1))


def copy_direction(events: DeviceEvents) -> np.ndarray:
    """Return the leaf of each event as a copy, by its name, as a code."""
    leaf = np.full(len(events), CODES["copy.other"], dtype=np.int64)
    for cause, search in _DIRECTIONS.items():
        leaf[events.named(search)] = CODES[cause]
    leaf[events.of("memset")] = CODES["copy.memset"]
    return leaf


def communication_table(
    joined: JoinedRank, events: DeviceEvents, matched: Matched | None
) -> pa.Table:
    """The communication events of one rank, with what they were matched to. -> COMMUNICATION."""
    communication = joined.communication
    rows, kinds = communication.event_row, communication.kinds
    offset = 0
    instance = ready = np.full(len(rows), -1, dtype=np.int64)
    if matched is not None:
        offset, instance = matched.offset_ns, matched.instance[rows]
        ready = np.where(instance >= 0, matched.ready_ns[rows] - offset, -1)

    def of_kinds(values: Sequence[str | float | None], kind: pa.DataType) -> pa.Array:
        return to_arrow(values, kind).take(pa.array(communication.kind))

    text = pa.dictionary(pa.int32(), pa.string())
    peaks = [joined.link.of_group(kind.size, kind.members) for kind in kinds]
    return TABLES["communication"].of(
        {
            "rank": np.full(len(rows), joined.inputs.rank),
            "event_row": rows,
            "collective": of_kinds([k.what for k in kinds], text),
            "group": of_kinds([k.group for k in kinds], text),
            "ranks": of_kinds([ranges(k.members) if k.members else None for k in kinds], text),
            "rank_count": of_kinds([k.size for k in kinds], pa.int64()),
            "sequence_id": nullable(communication.sequence),
            "instance_id": nullable(instance),
            "arrival_ns": events.start_ns[rows] - offset,
            "left_ns": events.end_ns[rows] - offset,
            "ready_ns": nullable(ready),
            "message_bytes": of_kinds([k.message_bytes for k in kinds], pa.int64()),
            "bus_factor": of_kinds([k.bus_ratio for k in kinds], pa.float64()),
            "link_bytes_per_s": of_kinds([rate for rate, _ in peaks], pa.float64()),
            "link_source": of_kinds([source for _, source in peaks], text),
        }
    )
