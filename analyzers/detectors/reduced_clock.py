"""A clock that power or heat holds down."""

from __future__ import annotations

from collections.abc import Iterator

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Sighting, detector, spent_in
from chopper.analyzers.replay.whatif_options import Changes
from chopper.analyzers.views.allocator_replay import determinism_advice
from chopper.causes import CAUSES

REMEDIES = {
    "compute.clock.power_cap": "Raise the power limit (nvidia-smi -pl, amd-smi set --power-cap) "
    "if permitted; lower precision and less memory traffic draw less power.",
    "compute.clock.thermal": "Check the cooling of the device: its fans, its position in the "
    "rack, the room temperature.",
}
DETECTOR = detector("reduced_clock")


def reduced_clock(run: Attributed) -> Iterator[Sighting]:
    """PIECE -> a sighting for each reason."""
    for name, how in REMEDIES.items():
        time_ns, rows = spent_in(run, (name,))
        if not time_ns or run.withholds(name):
            continue
        if name == "compute.clock.power_cap" and (advice := determinism_advice(run)) is not None:
            how = f"{how} {advice}"
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
