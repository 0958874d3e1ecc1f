"""Evaluation, checkpoints and other phases between the training steps."""

from __future__ import annotations

from collections.abc import Iterator

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Sighting, detector
from chopper.wording import percent

_LEAST_RATIO = 0.1
_REMEDIES = {
    "evaluation": "Evaluate less often or on fewer samples, in larger batches under "
    "torch.inference_mode(), or in a job of its own.",
    "checkpoint": "Save less often, or while the training goes on "
    "(torch.distributed.checkpoint.async_save, a copy to the host and a thread that writes it).",
}
_OTHER = "Run it less often, or beside the training."
DETECTOR = detector("loop_phases", least=percent(_LEAST_RATIO, ".0f"))


def loop_phases(run: Attributed) -> Iterator[Sighting]:
    """STEP, PROGRAM_PHASE -> a sighting for each phase."""
    step = run.step_time()
    for phase, time_ns in step.loop_phases_ns.items():
        if time_ns > _LEAST_RATIO * step.loop_ns:
            yield Sighting(
                detector="loop_phases",
                events={},
                phase=phase,
                saved_ns=time_ns,
                of="loop",
                evidence={
                    "phase": phase.capitalize(),
                    "share_ratio": time_ns / step.loop_ns,
                    "total_ns": time_ns,
                    "loop_ns": step.loop_ns,
                    "remedy": _REMEDIES.get(phase, _OTHER),
                },
            )
