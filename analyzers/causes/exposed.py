"""Level 2 exposed communication and copies: what the device did that no compute hid.

A matched collective waits until its last rank has come; what follows is transfer, at link peak as
far as its bytes need that long, below peak for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from chopper.analyzers.causes.states import Shares, States, stacked
from chopper.analyzers.trace import names
from chopper.analyzers.trace.collectives import LEFT_EARLY_NS, link_peaks
from chopper.analyzers.trace.columns import nullable
from chopper.analyzers.trace.join import COMMUNICATION, COPY, Links
from chopper.analyzers.trace.match import Matched
from chopper.analyzers.trace.rank_join import JoinedRank
from chopper.analyzers.trace.tables import DeviceEvents
from chopper.analyzers.work.kernels import NameSearch
from chopper.arrow import to_arrow
from chopper.causes import CODES
from chopper.tables import TABLES
from chopper.wording import ranges

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
    peaks = link_peaks(communication.kinds, joined.ceiling)
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
            "link_bytes_per_s": of_kinds(link_peaks(kinds, joined.ceiling), pa.float64()),
        }
    )
