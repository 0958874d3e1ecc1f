"""Memory-bound kernels that follow each other and could be one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Sighting, detector, pieces_in
from chopper.analyzers.events.device import Events, arguments
from chopper.analyzers.trace.columns import ints, matching
from chopper.wording import percent

LEAST_RATIO = 0.1
_ALONE = re.compile(
    r"aten::(_foreach_|_fused_|_amp_foreach|(fill_|zero_|copy_)$)"
    r"|Torch-Compiled|CompiledFunction|## Call"
)
_SHAPE = re.compile(r"\[([\d,\s]+)\]")
_CAUSES = ("compute.vector.roofline", "compute.vector.excess", "compute.vector.no_bytes")
DETECTOR = detector("fusible_kernels", least=percent(LEAST_RATIO, ".0f"))


def fusible_kernels(run: Attributed, events: Events) -> Iterator[Sighting]:
    """PIECE, DEVICE_EVENT -> at most one sighting."""
    yield from fused("fusible_kernels", run, events, _CAUSES, _ALONE)


def fused(
    name: str, run: Attributed, events: Events, causes: tuple[str, ...], alone: re.Pattern[str]
) -> Iterator[Sighting]:
    """See the kernels of some causes that follow each other on tensors of one shape.

    Args:
        name: of the detector.
        run: the attributed run.
        events: its device events.
        causes: leaf causes of the kernels' time.
        alone: operators that end a sequence.
    """
    pieces = pieces_in(run, causes)
    rank_of, row_of = ints(pieces, "rank"), ints(pieces, "event_row")
    run_ns: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    kernels = chains = time_ns = 0
    for rank in np.unique(rank_of).tolist():
        mine = np.flatnonzero(events.rank == rank)
        keys = (events.device_id[mine], events.stream_id[mine])
        mine = mine[np.lexsort((events.start_ns[mine], *keys))]
        moves = np.isin(events.row[mine], row_of[rank_of == rank])
        moves &= ~matching(*events.op, lambda op: bool(alone.match(op)))[mine]
        shape, tensors = _shapes(run, events, mine)
        moves &= shape > -2
        linked = moves[1:] & moves[:-1]
        linked &= (shape[1:] == shape[:-1]) | (shape[1:] < 0) | (shape[:-1] < 0)
        for key in (events.device_id, events.stream_id, events.phase[0], events.step):
            linked &= key[mine][1:] == key[mine][:-1]
        # What one kernel writes and the next one reads stays in registers.
        tensors_left = tensors - np.append(False, linked) - np.append(linked, False)
        inside = tensors_left < tensors
        if inside.any():
            left_ns = events.dur_ns[mine] * tensors_left // tensors
            order = np.flatnonzero(inside)[np.argsort(events.row[mine[inside]])]
            run_ns[rank] = (events.row[mine[order]], left_ns[order])
        kernels += int(inside.sum())
        chains += int((inside & ~np.append(False, linked)).sum())
        chained = (rank_of == rank) & np.isin(row_of, events.row[mine[inside]])
        time_ns += int(ints(pieces, "time_ns")[chained].sum())
    if run_ns and time_ns >= LEAST_RATIO * run.observed_ns:
        yield Sighting(
            detector=name,
            events={rank: rows for rank, (rows, _) in run_ns.items()},
            run_ns=run_ns,
            evidence={
                "kernels": kernels,
                "chains": chains,
                "share_ratio": time_ns / run.observed_ns,
            },
        )


def _shapes(run: Attributed, events: Events, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what each event's operator reads and writes.

    Returns:
        A number for the shape of its largest tensor, -1 where none was recorded, -2 for numbers
        alone; how many tensors of that shape it reads and writes, three if none was recorded.
    """
    codes, values = arguments(run, events, rows, "input_dims")
    parsed = [[tuple(map(int, shape.split(","))) for shape in _SHAPE.findall(v)] for v in values]
    largest = [max(tensors, key=math.prod, default=()) for tensors in parsed]
    number = {shape: i for i, shape in enumerate(dict.fromkeys(filter(None, largest)))}
    shapes = [
        number.get(one, -2 if value else -1) for one, value in zip(largest, values, strict=True)
    ]
    counts = [ts.count(one) + 1 if ts else 3 for ts, one in zip(parsed, largest, strict=True)]
    return np.array([*shapes, -1])[codes], np.array([*counts, 3])[codes]
