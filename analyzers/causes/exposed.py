"""Level 2 exposed communication and copies: what the device did that no compute hid.

A matched collective waits until its last rank has come; what follows is transfer, at link peak as
far as its bytes need that long, below peak for the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace import names
from chopper.analyzers.trace.collectives import LEFT_EARLY_NS, link_peaks
from chopper.analyzers.trace.columns import nullable
from chopper.analyzers.trace.join import COMMUNICATION, COPY
from chopper.analyzers.work.name_search import NameSearch
from chopper.arrow import to_arrow
from chopper.causes import CODES
from chopper.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.analyzers.causes.states import States
    from chopper.analyzers.trace.collectives import Communication
    from chopper.analyzers.trace.join import Links
    from chopper.analyzers.trace.joined import JoinedRank
    from chopper.analyzers.trace.match import Matched
    from chopper.analyzers.trace.tables import DeviceEvents

_DIRECTIONS = {
    "copy.device_to_device": NameSearch(re.compile("DtoD|PtoP|DeviceToDevice")),
    "copy.device_to_host": NameSearch(re.compile("DtoH|DeviceToHost")),
    "copy.host_to_device": NameSearch(re.compile("HtoD|HostToDevice")),
    "copy.memset": names.is_fill,
}
"""Names of copies; the last one that fits counts."""


@dataclass(frozen=True, slots=True)
class Exposed:
    """Rows of (fragment, cause, time); the times of a fragment sum to its share.

    Attributes:
        fragment: index into the fragments of `States`.
        cause: code of the leaf.
        time_ns: more than 0.
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
        (waits, CODES["communication.wait"], states.share_ns[waits]),
        (alone, CODES["communication.unseparated"], states.share_ns[alone]),
        (transfers[~known], CODES["communication.transfer.no_peak"], share[~known]),
        (transfers[known], CODES["communication.transfer.at_peak"], at_peak[known]),
        (transfers[known], CODES["communication.transfer.below_peak"], (share - at_peak)[known]),
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
    return at_peak_s[event] * 1e9 * exposed * part


def matched_share(communication: Communication, matched: Matched | None) -> tuple[float, float]:
    """(collectives matched on all their ranks, all collectives) of one rank."""
    rows = communication.event_row
    hit = 0 if matched is None else int((matched.ready_ns[rows] >= 0).sum())
    return float(hit), float(len(rows))


def copy_direction(events: DeviceEvents) -> np.ndarray:
    """Return the leaf of each event as a copy, by its name, as a code."""
    leaf = np.full(len(events), CODES["copy.other"], dtype=np.int64)
    for cause, search in _DIRECTIONS.items():
        leaf[events.named(search)] = CODES[cause]
    leaf[events.of("memset")] = CODES["copy.memset"]
    return leaf


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
    kinds = communication.kinds
    offset, instance = 0, np.full(len(rows), -1, dtype=np.int64)
    ready = instance
    if matched is not None:
        offset, instance = matched.offset_ns, matched.instance[rows]
        ready = np.where(instance >= 0, matched.ready_ns[rows] - offset, -1)

    def of_kinds(values: Sequence[str | float | None], kind: pa.DataType) -> pa.Array:
        return to_arrow(values, kind).take(pa.array(communication.kind))

    text = pa.dictionary(pa.int32(), pa.string())
    return pa.Table.from_arrays(
        [
            pa.array(np.full(len(rows), rank, dtype=np.int32)),
            pa.array(rows),
            of_kinds([k.what for k in kinds], text),
            of_kinds([k.group for k in kinds], text),
            of_kinds([_ranges(k.members) if k.members else None for k in kinds], text),
            of_kinds([k.size for k in kinds], pa.int64()),
            nullable(communication.sequence),
            nullable(instance),
            pa.array(events.start_ns[rows] - offset),
            pa.array(events.end_ns[rows] - offset),
            nullable(ready),
            of_kinds([k.message_bytes for k in kinds], pa.int64()),
            of_kinds([k.bus_ratio for k in kinds], pa.float64()),
            of_kinds(link_bytes_per_s, pa.float64()),
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
