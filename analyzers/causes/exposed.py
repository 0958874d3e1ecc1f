"""Level 2 exposed communication and copies: what the device did that no compute hid.

A matched collective waits until its last rank has come; what follows is transfer, at link peak as
far as its bytes need that long, below peak for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace import names
from chopper.analyzers.trace.collectives import LEFT_EARLY_NS, link_peaks
from chopper.analyzers.trace.columns import dictionary, nullable
from chopper.analyzers.trace.join import COMMUNICATION, COPY
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.analyzers.causes.states import States
    from chopper.analyzers.trace.collectives import Communication
    from chopper.analyzers.trace.join import Links
    from chopper.analyzers.trace.joined import JoinedRank
    from chopper.analyzers.trace.match import Matched
    from chopper.analyzers.trace.tables import DeviceEvents

_COPY_CAUSES = [
    "copy.host_to_device",
    "copy.device_to_host",
    "copy.device_to_device",
    "copy.memset",
    "copy.other",
]
_H2D, _D2H, _D2D, _MEMSET, _OTHER_COPY = range(len(_COPY_CAUSES))
EXPOSED_CAUSES = [
    *_COPY_CAUSES,
    "communication.wait",
    "communication.unseparated",
    "communication.transfer.no_peak",
    "communication.transfer.at_peak",
    "communication.transfer.below_peak",
]
_WAIT, _UNSEPARATED, _NO_LINK_PEAK, _AT_LINK_PEAK, _BELOW_LINK_PEAK = range(
    len(_COPY_CAUSES), len(EXPOSED_CAUSES)
)


@dataclass(frozen=True, slots=True)
class Exposed:
    """Rows of (fragment, cause, time); the times of a fragment sum to its share.

    Attributes:
        fragment: index into the fragments of `States`.
        cause: code into EXPOSED_CAUSES.
        time_ns: time, more than 0.
    """

    fragment: np.ndarray
    cause: np.ndarray
    time_ns: np.ndarray


def split_exposed(
    states: States,
    links: Links,
    joined: JoinedRank,
    matched: Matched | None,
    waiting: np.ndarray,
) -> Exposed:
    """Exposed communication and copies by cause."""
    klass = links.work_class[states.event_row]
    copies = np.flatnonzero((klass == COPY) & (states.share_ns > 0))
    sent = np.flatnonzero((klass == COMMUNICATION) & (states.share_ns > 0))
    copy_cause = copy_direction(links.events)[states.event_row[copies]]
    if matched is None:
        is_matched = np.zeros(len(sent), dtype=bool)
    else:
        event = states.event_row[sent]
        ready = matched.ready_ns[event]
        # The root of a broadcast need not stay until all have come; nor do ranks of other clocks.
        stayed = links.events.end_ns[event] >= ready - LEFT_EARLY_NS
        is_matched = (ready >= 0) & stayed
    waits = sent[is_matched & waiting[sent]]
    transfers = sent[is_matched & ~waiting[sent]]
    alone = sent[~is_matched]
    ideal = _transfer_ideal(states, links, joined, matched, transfers)
    known = ~np.isnan(ideal)
    share = states.share_ns[transfers]
    at_peak = np.minimum(np.floor(np.where(known, ideal, 0)), share).astype(np.int64)
    parts = [
        (copies, copy_cause, states.share_ns[copies]),
        (waits, _WAIT, states.share_ns[waits]),
        (alone, _UNSEPARATED, states.share_ns[alone]),
        (transfers[~known], _NO_LINK_PEAK, share[~known]),
        (transfers[known], _AT_LINK_PEAK, at_peak[known]),
        (transfers[known], _BELOW_LINK_PEAK, (share - at_peak)[known]),
    ]
    fragment = np.concatenate([f for f, _, _ in parts])
    cause = np.concatenate([np.broadcast_to(c, len(f)) for f, c, _ in parts])
    time_ns = np.concatenate([t for _, _, t in parts])
    keep = time_ns > 0
    return Exposed(fragment[keep], cause[keep], time_ns[keep])


def _transfer_ideal(
    states: States,
    links: Links,
    joined: JoinedRank,
    matched: Matched | None,
    transfers: np.ndarray,
) -> np.ndarray:
    """Time at link peak of each transfer's exposed part, NaN where unknown."""
    peaks = link_peaks(joined.communication.kinds, joined.ceiling)
    if matched is None or not any(peaks):
        return np.full(len(transfers), np.nan)
    at_peak_s = np.full(len(links.events), np.nan)
    peak = np.array([*(p or np.nan for p in peaks), np.nan])[joined.communication.kind]
    at_peak_s[joined.communication.event_row] = joined.communication.bus_bytes / peak
    event = states.event_row[transfers]
    whole = np.zeros(len(links.events), dtype=np.int64)
    np.add.at(whole, event, states.share_ns[transfers])
    # A transfer that is hidden in part needs the link for its exposed part only.
    end = links.events.end_ns[event]
    begin = np.clip(matched.ready_ns[event], links.events.start_ns[event], end)
    length = np.maximum(end - begin, 1)
    exposed = np.minimum(whole[event] / length, 1.0)
    part = states.share_ns[transfers] / np.maximum(whole[event], 1)
    ideal: np.ndarray = at_peak_s[event] * 1e9 * exposed * part
    return ideal


def matched_share(communication: Communication, matched: Matched | None) -> tuple[float, float]:
    """(collectives matched on all their ranks, all collectives) of one rank."""
    rows = communication.event_row
    hit = 0 if matched is None else int((matched.ready_ns[rows] >= 0).sum())
    return float(hit), float(len(rows))


def copy_direction(events: DeviceEvents) -> np.ndarray:
    """Direction of each event as a copy, by its name."""
    name_codes, values = events.names

    def direction(name: str) -> int:
        if names.is_fill(name):
            return _MEMSET
        if "HtoD" in name or "HostToDevice" in name:
            return _H2D
        if "DtoH" in name or "DeviceToHost" in name:
            return _D2H
        if "DtoD" in name or "PtoP" in name or "DeviceToDevice" in name:
            return _D2D
        return _OTHER_COPY

    table = np.array([direction(v) for v in values] + [_OTHER_COPY], dtype=np.int64)
    return np.where(events.of("memset"), _MEMSET, table[name_codes])


def communication_table(
    rank: int,
    events: DeviceEvents,
    communication: Communication,
    matched: Matched | None,
    link_bytes_per_s: list[float | None],
) -> pa.Table:
    """The communication events of one rank, with what they were matched to. -> COMMUNICATION.

    Args:
        link_bytes_per_s: link peak of each of the ``kinds``.
    """
    rows = communication.event_row
    count = len(rows)
    kinds = communication.kinds
    none = np.full(count, -1, dtype=np.int64)
    offset = 0 if matched is None else matched.offset_ns
    instance = none if matched is None else matched.instance[rows]
    ready = none if matched is None else matched.ready_ns[rows]
    ready = np.where(instance >= 0, ready - offset, -1)

    def texts(values: list[str | None]) -> pa.Array:
        distinct = sorted({v for v in values if v is not None})
        number = {v: i for i, v in enumerate(distinct)}
        codes = np.array([-1 if v is None else number[v] for v in values] + [-1])
        return dictionary(codes[communication.kind], distinct)

    def floats(values: list[float | None]) -> pa.Array:
        table = np.array([np.nan if v is None else v for v in values] + [np.nan], dtype=np.float64)
        found = table[communication.kind]
        return pa.array(found, mask=np.isnan(found))

    def counts(values: list[int | None]) -> pa.Array:
        table = np.array([-1 if v is None else v for v in values] + [-1], dtype=np.int64)
        return nullable(table[communication.kind])

    return pa.Table.from_arrays(
        [
            pa.array(np.full(count, rank, dtype=np.int32)),
            pa.array(rows),
            texts([k.what for k in kinds]),
            texts([k.group for k in kinds]),
            texts([_ranges(k.members) if k.members else None for k in kinds]),
            counts([k.size for k in kinds]),
            nullable(communication.sequence),
            nullable(instance),
            pa.array(events.start_ns[rows] - offset),
            pa.array(events.end_ns[rows] - offset),
            nullable(ready),
            counts([k.message_bytes for k in kinds]),
            floats([k.bus_ratio for k in kinds]),
            floats(link_bytes_per_s),
        ],
        schema=TABLES["communication"].arrow,
    )


def _ranges(members: tuple[int, ...]) -> str:
    """``(0, 1, 2, 3, 8)`` → ``0-3,8``."""
    parts: list[list[int]] = []
    for member in members:
        if parts and member == parts[-1][1] + 1:
            parts[-1][1] = member
        else:
            parts.append([member, member])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
