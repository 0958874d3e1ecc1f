"""Memory-bound kernels that follow each other and could be one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Sighting, detector, spent_in
from chopper.analyzers.events.device import Events
from chopper.wording import percent

_LEAST_RATIO = 0.1
_CAUSES = ("compute.vector.roofline", "compute.vector.excess", "compute.vector.no_bytes")
DETECTOR = detector("fusible_kernels", least=percent(_LEAST_RATIO, ".0f"))


def fusible_kernels(run: Attributed, events: Events) -> Iterator[Sighting]:
    """PIECE, DEVICE_EVENT -> at most one sighting."""
    _, rows = spent_in(run, _CAUSES)
    run_ns: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    kernels = chains = time_ns = 0
    for rank, of_cause in rows.items():
        mine = np.flatnonzero(events.rank == rank)
        keys = (events.device_id[mine], events.stream_id[mine])
        mine = mine[np.lexsort((events.start_ns[mine], *keys))]
        moves = np.isin(events.row[mine], of_cause)
        same = moves[1:] & moves[:-1]
        for key in (events.device_id, events.stream_id, events.phase[0], events.step):
            same &= key[mine][1:] == key[mine][:-1]
        begins = np.append(True, ~same)
        chain = np.cumsum(begins) - 1
        size = np.bincount(chain)
        inside = size[chain] > 1
        dur = events.dur_ns[mine]
        longest = np.maximum.reduceat(dur, np.flatnonzero(begins)) if len(dur) else dur
        stays = dur == longest[chain]
        # Of equally long kernels the first one stays.
        first = np.unique(chain[stays], return_index=True)[1]
        kept = np.zeros(len(mine), dtype=bool)
        kept[np.flatnonzero(stays)[first]] = True
        gone = inside & ~kept
        if gone.any():
            run_ns[rank] = (events.row[mine[gone]], np.zeros(int(gone.sum()), dtype=np.int64))
        kernels += int(inside.sum())
        chains += int((size > 1).sum())
        time_ns += int(dur[inside].sum())
    if run_ns and time_ns >= _LEAST_RATIO * run.observed_ns:
        yield Sighting(
            detector="fusible_kernels",
            events={rank: np.sort(gone) for rank, (gone, _) in run_ns.items()},
            run_ns=run_ns,
            evidence={
                "kernels": kernels,
                "chains": chains,
                "share_ratio": time_ns / run.observed_ns,
            },
        )
