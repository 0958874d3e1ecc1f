"""A clock that power or heat holds down."""

from __future__ import annotations

from collections.abc import Iterator

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Detector, Sighting, spent_in
from chopper.analyzers.replay.whatif_options import Changes
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
    without="kernels run at the reference clock",
    evidence="{kernels} kernels ran below the reference clock for that reason, {time_ns:ns} longer "
    "than at it",
    remedy="{how}",
    view="clock_by_phase",
)


def reduced_clock(run: Attributed) -> Iterator[Sighting]:
    """PIECE -> a sighting for each reason."""
    for name, how in _WHY.items():
        time_ns, rows = spent_in(run, (name,))
        if not time_ns or run.withholds(name):
            continue
        yield Sighting(
            detector="reduced_clock",
            events=rows,
            changes=Changes(fix=(name,)),
            evidence={
                "cause": CAUSES[name].label,
                "kernels": sum(map(len, rows.values())),
                "time_ns": time_ns,
                "how": how,
            },
        )
