"""Collectives so small that their latency is most of their time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Detector, Sighting
from chopper.analyzers.events.groups import reals
from chopper.analyzers.trace.columns import ints, strings

_FEWEST = 8
_BUCKET_BYTES = 25_000_000
DETECTOR = Detector(
    title="Many small collectives",
    condition=f"At least {_FEWEST} collectives of one kind and group in a step, all of whose bytes "
    "would fit into half as many buckets of 25 MB (DistributedDataParallel's default).",
    evidence="{count} {collective} calls a step of {bytes:bytes} on average",
    remedy="Raise bucket_cap_mb, wrap larger units in FSDP, or flatten tensors before the call.",
    view="collectives",
)


def small_collectives(run: Attributed) -> Iterator[Sighting]:
    """COMMUNICATION -> a sighting for each kind of collective.

    Without the pattern, all but one call for each bucket lose the time of the quickest call of
    that kind, which is its latency.
    """
    table = run.communication
    if not table.num_rows:
        return
    rank, row = ints(table, "rank"), ints(table, "event_row")
    kind, kinds = strings(table, "collective")
    group, _ = strings(table, "group")
    size = reals(table, "message_bytes")
    for code, name in enumerate(kinds):
        rows, run_ns, steps, count, sent = {}, {}, 0, 0, 0.0
        for one in np.unique(rank).tolist():
            chosen = np.flatnonzero((rank == one) & (kind == code) & ~np.isnan(size))
            events_of = row[chosen]
            step = ints(run.links[one], "step_index")[events_of]
            inside = run.links[one]["step_index"].is_valid().to_numpy()[events_of]
            dur = ints(run.joined[one].device_event, "dur_ns")
            merged, lengths = [], []
            for at in np.unique(np.stack([step, group[chosen]])[:, inside], axis=1).T.tolist():
                mine = inside & (step == at[0]) & (group[chosen] == at[1])
                buckets = int(np.ceil(size[chosen][mine].sum() / _BUCKET_BYTES)) or 1
                calls = int(mine.sum())
                if calls < _FEWEST or buckets > calls / 2:
                    continue
                now = dur[events_of[mine]]
                left = now - now.min() * (1 - buckets / calls)
                merged.append(events_of[mine])
                lengths.append(np.maximum(np.rint(left), 1).astype(np.int64))
                count, steps = count + calls, steps + 1
                sent += float(size[chosen][mine].sum())
            if merged:
                rows[one] = np.concatenate(merged)
                run_ns[one] = (rows[one], np.concatenate(lengths))
        if rows:
            yield Sighting(
                detector="small_collectives",
                events=rows,
                run_ns=run_ns,
                evidence={"count": round(count / steps), "collective": name, "bytes": sent / count},
            )
