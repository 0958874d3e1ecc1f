"""A clock that power or heat holds down."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Detector, Sighting
from chopper.analyzers.replay.whatif_options import Changes
from chopper.analyzers.trace.columns import ints, strings
from chopper.causes import CAUSES

_WHY = {
    "compute.clock.power_cap": "Raise the power limit (nvidia-smi -pl, amd-smi set --power-cap) "
    "where it may be raised; lower precision and fewer bytes draw less power.",
    "compute.clock.thermal": "See to the cooling of the device: its fans, its place in the rack, "
    "the temperature of the room.",
}
DETECTOR = Detector(
    title="{cause} holds the clock down",
    condition="Clock samples below the reference clock carry the reason of a power limit, or of "
    "heat, while kernels ran whose time follows the clock.",
    evidence="{kernels} kernels ran below the reference clock for that reason, {time_ns:ns} longer "
    "than at it",
    remedy="{how}",
    view="clock_by_phase",
)


def reduced_clock(run: Attributed) -> Iterator[Sighting]:
    """PIECE -> a sighting for each reason. Without it, kernels run at the reference clock."""
    cause, causes = strings(run.pieces, "cause")
    for name, how in _WHY.items():
        if name not in causes or run.withholds(name):
            continue
        pieces = run.pieces.filter(cause == causes.index(name))
        if not pieces.num_rows:
            continue
        rank, row = ints(pieces, "rank"), ints(pieces, "event_row")
        rows = {int(r): np.unique(row[(rank == r) & (row >= 0)]) for r in np.unique(rank)}
        yield Sighting(
            detector="reduced_clock",
            events=rows,
            changes=Changes(fix=(name,)),
            evidence={
                "cause": CAUSES[name].label,
                "kernels": sum(map(len, rows.values())),
                "time_ns": int(ints(pieces, "time_ns").sum()),
                "how": how,
            },
        )
