"""Predictions for a job from its operations, beside its slowdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from chopper import wording as fmt
from chopper.analyzers.jobs.derivation import operations_of
from chopper.analyzers.jobs.model import Job, job_of
from chopper.analyzers.jobs.rescheduled import Rescheduled, Shape
from chopper.analyzers.jobs.whatif import JobSlowdown, fixed_ns, slowdown_of
from chopper.analyzers.replay.answers import WhatIf, summary
from chopper.errors import InputError, UsageError

if TYPE_CHECKING:
    from chopper.analyzers.attribution import Attribution
    from chopper.analyzers.replay.whatif_options import Changes

_TOLD_APART = 3
"""From so many stages on, sequences are told from a slow rank."""
STRAGGLER = "communication.wait"
"""Cause that ``--fix straggler`` removes; of a pipeline, by evening out every operation."""


class OperationReplay:
    """The dependency model of an attributed job, with its slowdown.

    Raises:
        InputError: the job cannot be modelled: why.
    """

    def __init__(self, run: Attribution) -> None:
        self.run = run
        self.job, self.slowdown = _modelled(run)

    @property
    def has_pipeline(self) -> bool:
        """Whether the job has more than one pipeline stage."""
        return self.job.nodes.stages_count > 1

    def takes(self, changes: Changes) -> bool:
        """Return whether changes are made to the job's operations.

        Raises:
            UsageError: some are, and others need the launches.
        """
        straggler = self.has_pipeline and STRAGGLER in changes.fix
        if not (changes.of_job or straggler):
            return False
        if changes.without_job(STRAGGLER if straggler else None):
            what = "--fix straggler of a pipeline, " if straggler else ""
            raise UsageError(
                f"{what}--fix of parts, --schedule, --virtual-stages and --micro-batches change "
                "the operations of the job, other options its launches; they combine with each "
                "other only"
            )
        return True

    def unchanged(self) -> WhatIf:
        """Return the job replayed as it was, launch delays kept."""
        return self._answer([], self.job.replayed_ns, [])

    def predict(self, changes: Changes) -> WhatIf:
        """Predict the steps of the job with parts fixed, or in another shape.

        A step scales as its simulation without launch delays does.

        Raises:
            UsageError: the job has no such part, or cannot take that shape.
        """
        described, notes = [], []
        parts = [*changes.parts]
        if STRAGGLER in changes.fix:
            parts.append(("all", ""))
        times = fixed_ns(self.job, parts)
        for what, which in parts:
            described.append(_described(what, which))
            if what == "sequence-lengths" and self.job.nodes.stages_count < _TOLD_APART:
                notes.append(
                    "with fewer than three stages, each rank's micro-batches take their own mean: "
                    "long sequences and a slow rank cannot be separated"
                )
        before, after = self.job.simulated_ns([self.job.own_ns, times])
        if changes.of_shape:
            pipeline = Rescheduled(self.job, times)
            shape = _shape(changes, pipeline.shape)
            after = after / pipeline.step_ns(pipeline.shape) * pipeline.step_ns(shape)
            described += _shape_words(pipeline.shape, shape)
            notes += pipeline.notes(shape)
        return self._answer(described, self.job.recorded_ns * after / before, notes)

    def _answer(self, described: list[str], predicted_ns: np.ndarray, notes: list[str]) -> WhatIf:
        job = self.job
        observed, predicted, interval, saved = summary(
            (before, float(after), 1)
            for before, after in zip(job.recorded_ns.tolist(), predicted_ns, strict=True)
        )
        rows = zip(job.steps.tolist(), job.recorded_ns, predicted_ns, strict=True)
        return WhatIf(
            source=self.run.source,
            changes=described,
            observed_step_ns=observed,
            predicted_step_ns=predicted,
            predicted_ci95_ns=interval,
            saved_ci95_ns=saved,
            steps={
                None if number < 0 else number: (round(before), round(after))
                for number, before, after in rows
            },
            error_ratio=job.error_ratio,
            notes=notes,
            attribution=self.run,
            observed=self.run,
            unchanged=self.run,
            model="operations",
            job=self.slowdown,
        )


def operations_or_reason(run: Attribution) -> OperationReplay | str:
    """Return the model of a job, or why it cannot be modelled."""
    try:
        return OperationReplay(run)
    except InputError as exc:
        return str(exc)


def _modelled(run: Attribution) -> tuple[Job, JobSlowdown]:
    """Return the model of a run's job and its slowdown.

    Raises:
        InputError: what was recorded does not support it.
    """
    operations = operations_of(run)
    if isinstance(operations, str):
        raise InputError(operations)
    job = job_of(operations)
    slowdown = slowdown_of(job)
    if isinstance(slowdown, str):
        raise InputError(slowdown)
    return job, slowdown


def _described(what: str, which: str | int) -> str:
    return {
        "stage": f"Stage {which}: every operation as long as the mean of its type",
        "rank": f"Rank {which}: every operation as long as the mean of its type",
        "replica": f"Replica {which}: every operation as long as the mean of its type",
        "op": f"Operation {which}: each as long as the mean of its type",
        "stages": "Every stage as long as the mean of all",
        "sequence-lengths": "Every micro-batch as long as the mean of its step",
        "all": "Every operation as long as the mean of its type, the schedule kept",
    }[what]


def _shape(changes: Changes, recorded: Shape) -> Shape:
    """Return the shape asked for.

    Raises:
        UsageError: virtual stages and schedule contradict each other.
    """
    virtual = changes.virtual_stages
    schedule = changes.schedule or recorded.schedule
    if virtual is None:
        virtual = recorded.virtual_stages
        if changes.schedule == "interleaved" and virtual == 1:
            virtual = 2
        elif changes.schedule in ("1f1b", "dualpipe"):
            virtual = 1
    elif changes.schedule is None and virtual > 1 and schedule == "1f1b":
        schedule = "interleaved"
    elif changes.schedule is None and virtual == 1 and schedule == "interleaved":
        schedule = "1f1b"
    batches = recorded.micro_batches
    if changes.micro_batches is not None:
        batches = changes.micro_batches
    elif changes.micro_batches_ratio is not None:
        exact = batches * changes.micro_batches_ratio
        if exact != round(exact) or exact < 1:
            raise UsageError(
                f"--micro-batches: {fmt.factor(changes.micro_batches_ratio)} of {batches} "
                "micro-batches is no whole number"
            )
        batches = round(exact)
    return Shape(schedule, virtual, batches)


def _shape_words(recorded: Shape, shape: Shape) -> list[str]:
    words = []
    if shape.schedule != recorded.schedule:
        words.append(f"Schedule {shape.schedule} instead of {recorded.schedule}")
    if shape.virtual_stages != recorded.virtual_stages:
        words.append(
            f"{fmt.plural(shape.virtual_stages, 'virtual stage')} per rank instead of "
            f"{recorded.virtual_stages}"
        )
    if shape.micro_batches != recorded.micro_batches:
        words.append(
            f"{fmt.plural(shape.micro_batches, 'micro-batch')} per step instead of "
            f"{recorded.micro_batches}"
        )
    return words or [f"Schedule {shape.schedule}, as recorded"]
