"""Evaluation, checkpoints and other phases between the training steps."""

from __future__ import annotations

from collections.abc import Iterator

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Detector, Sighting
from chopper.wording import percent

_LEAST_RATIO = 0.1
_REMEDIES = {
    "evaluation": "Evaluate less often or on fewer samples, in larger batches under "
    "torch.inference_mode(), or in a job of its own.",
    "checkpoint": "Save less often, or while the training goes on "
    "(torch.distributed.checkpoint.async_save, a copy to the host and a thread that writes it).",
}
_OTHER = "Run it less often, or beside the training."
DETECTOR = Detector(
    title="{phase} takes {share_ratio:ratio} of the loop",
    condition="A phase that the program names, or that its trainer is known to be in, takes more "
    f"than {percent(_LEAST_RATIO, '.0f')} of the recorded loop.",
    without="the phase takes no time: an upper bound",
    evidence="{total_ns:ns} of {loop_ns:ns} that were recorded",
    remedy="{remedy}",
    view="steps",
    in_every_step=True,
)


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
