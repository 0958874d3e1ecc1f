"""Memory-bound kernels that follow each other and could be one."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Sighting, detector, pieces_in
from chopper.analyzers.events.device import Events, arguments
from chopper.analyzers.trace.columns import ints, matching
from chopper.wording import percent

_LEAST_RATIO = 0.1
_ALONE = re.compile(r"aten::(_foreach_|_fused_|_amp_foreach|(fill_|zero_|copy_)$)")
_SHAPE = re.compile(r"\[[\d, ]+\]")
_CAUSES = ("compute.vector.roofline", "compute.vector.excess", "compute.vector.no_bytes")
DETECTOR = detector("fusible_kernels", least=percent(_LEAST_RATIO, ".0f"))


def fusible_kernels(run: Attributed, events: Events) -> Iterator[Sighting]:
    """PIECE, DEVICE_EVENT -> at most one sighting."""
    pieces = pieces_in(run, _CAUSES)
    rank_of, row_of = ints(pieces, "rank"), ints(pieces, "event_row")
    run_ns: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    kernels = chains = time_ns = 0
    for rank in np.unique(rank_of).tolist():
        mine = np.flatnonzero(events.rank == rank)
        keys = (events.device_id[mine], events.stream_id[mine])
        mine = mine[np.lexsort((events.start_ns[mine], *keys))]
        moves = np.isin(events.row[mine], row_of[rank_of == rank])
        moves &= ~matching(*events.op, lambda op: bool(_ALONE.match(op)))[mine]
        shape = _shapes(run, events, mine)
        same = moves[1:] & moves[:-1]
        same &= (shape[1:] == shape[:-1]) | (shape[1:] < 0) | (shape[:-1] < 0)
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
        chained = (rank_of == rank) & np.isin(row_of, events.row[mine[inside]])
        time_ns += int(ints(pieces, "time_ns")[chained].sum())
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


def _shapes(run: Attributed, events: Events, rows: np.ndarray) -> np.ndarray:
    """Return a number for the shape of the first tensor of each event's operator, -1 for none."""
    codes, values = arguments(run, events, rows, "input_dims")
    shapes = [found[0] if (found := _SHAPE.search(value)) else "" for value in values]
    number = {shape: i for i, shape in enumerate(dict.fromkeys(filter(None, shapes)))}
    return np.array([*(number.get(shape, -1) for shape in shapes), -1])[codes]
