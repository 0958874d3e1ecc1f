"""Matched collectives: straggler wait, transfer time and bandwidths.

With arrivals a_r and ends e_r of the ranks r of a collective, in one clock:

    ready = max a_r                      the last rank, the straggler, is there
    waiting = Σ_r (min(ready, e_r) − a_r)     rank-time
    transfer = max e_r − ready
    algbw = S / transfer,  busbw = algbw · bus factor    (nccl-tests, PERFORMANCE.md)

A rank with e_r well before ready (the root of a broadcast) did not wait. S is the whole array: the
input of one rank for all-reduce and reduce-scatter, the output for all-gather. The bus factor is
2(n−1)/n for all-reduce, (n−1)/n for reduce-scatter, all-gather, all-to-all, gather and scatter, 1
for broadcast, reduce and send/receive.

One row per collective that was matched on all ranks of its group.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.collectives import WAIT, Members, details_of
from chopper.analyzers.events.groups import real_or_null, reals, time_in
from chopper.analyzers.views import View, column, optional
from chopper.hardware.ceilings import MOST_OF_A_PEAK

_ABOVE_LINK = "withheld: exceeds the link's peak; the peak, the size or the times are wrong"

VIEW = View(
    "collectives",
    __doc__,
    (
        column("collective", "Normalized name of the collective, as allreduce."),
        optional("ranks", "Global ranks that took part; null where not recorded."),
        optional("step", "Step number at the start of the straggler's event.", "int64"),
        column(
            "waiting_ns", "Straggler wait: from each rank's arrival to the last arrival, summed."
        ),
        column("straggler_rank", "Global rank that arrived last.", "int32"),
        column("exposed_waiting_ns", "Exposed part of the straggler wait, summed."),
        column("transfer_ns", "Transfer time: from the last arrival to the last rank's end."),
        optional("message_bytes", "Size of the whole array that the collective operates on."),
        optional("bus_bytes_per_s", "Bus bandwidth, as nccl-tests defines it."),
        optional("at_peak_ratio", "Bus bandwidth as a share of the link's peak."),
        column("exposed_ns", "Exposed part of wait and transfer, summed over ranks."),
        optional("algorithm_bytes_per_s", "Algorithm bandwidth: message size over transfer time."),
        column("phase", "Phase of the straggler's event."),
        optional("layer", "Module path of the layer of the straggler's event."),
        optional("op", "Operator that launched the straggler's event; null where not recorded."),
        optional("group", "Name of the process group; null where not recorded."),
        optional("sequence_id", "Number of the collective within its group.", "int64"),
        column("rank_count", "Number of ranks that took part."),
        column("first_arrival_ns", "Arrival of the first rank, Unix time."),
        column("last_arrival_ns", "Arrival of the last rank, Unix time."),
        column("last_end_ns", "End of the last rank, Unix time."),
        optional("reason", "Reason why the share of the link's peak is null.", "text"),
    ),
    title="Collectives",
    section="Communication",
    needs="no collective was seen on all ranks of its group (pass the traces of all ranks)",
)


def collectives(run: Attributed, members: Members) -> pa.Table:
    """COMMUNICATION, PIECE, EVENT_LINK -> COLLECTIVES, the most exposed first."""
    found = members
    if not len(found):
        return VIEW.empty()
    exposed_ns = found.total(time_in(run.pieces, found.rank, found.row, "communication"))
    ready = found.ready_ns[found.first]
    left = np.maximum.reduceat(found.left_ns, found.first)
    transfer = np.maximum(left - ready, 0)
    one = found.table.take(found.first)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(transfer > 0, reals(one, "message_bytes") / transfer * 1e9, np.nan)
    bus = rate * reals(one, "bus_factor")
    at_peak = bus / reals(one, "link_bytes_per_s")
    beyond = at_peak > MOST_OF_A_PEAK
    at_peak[beyond] = np.nan
    last = found.straggler
    details = details_of(run, found.rank[last], found.row[last])
    copied = ("collective", "ranks", "group", "sequence_id", "message_bytes")
    columns = {
        **{name: one[name] for name in copied},
        **{name: details[name] for name in ("step", "phase", "layer", "op")},
        "waiting_ns": found.total(found.wait_ns),
        "straggler_rank": found.rank[last],
        "exposed_waiting_ns": found.total(time_in(run.pieces, found.rank, found.row, WAIT)),
        "exposed_ns": exposed_ns,
        "transfer_ns": transfer,
        "algorithm_bytes_per_s": real_or_null(rate),
        "bus_bytes_per_s": real_or_null(bus),
        "at_peak_ratio": real_or_null(at_peak),
        "rank_count": found.rank_count,
        "first_arrival_ns": np.minimum.reduceat(found.arrival_ns, found.first),
        "last_arrival_ns": ready,
        "last_end_ns": left,
        "reason": [_ABOVE_LINK if b else None for b in beyond.tolist()],
    }
    order = np.lexsort((ready, -transfer, -exposed_ns))
    return VIEW.of(columns).take(order).combine_chunks()
