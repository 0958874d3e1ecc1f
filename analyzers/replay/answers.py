"""Answers of a replay: a changed run beside the observed one, and what each cause gives back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from chopper.notebook import as_cell

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from chopper.analyzers.attribution import Attribution, CauseRow
    from chopper.analyzers.jobs.whatif import JobSlowdown

SCHEMA = "chopper.whatif/3"
JOB_RATIOS = ("slowdown_ratio", "worst_workers_share_ratio", "last_stage_share_ratio")
_CAUSE_FIELDS = ("id", "parent", "label", "time_ns", "share_ratio")


@dataclass(frozen=True)
class WhatIf:
    """A changed run compared with the observed one.

    Attributes:
        changes: the changes, in words.
        observed_step_ns, predicted_step_ns: mean window over ranks and steps, without the changes
            and with them; both are replayed where the host's pace is not 1.
        predicted_ci95_ns, saved_ci95_ns: 95 % intervals of the predicted step time and of what is
            saved, from the variation of steps and, where the clock changes, the errors of the
            kernels' sensitivities to it; None with fewer than three steps.
        steps: number → (observed, predicted) nanoseconds, mean over ranks.
        error_ratio: relative error of the unmodified replay.
        notes: what limits the prediction.
        attribution: of the replayed schedule.
        observed: the run.
        unchanged: attribution of the replay without changes, where the host's pace is not 1; else
            that is the run's.
        pace: share of its traced time that the host's work is taken to last without tracing.
        reference_rank: rank that all others are assumed to equal, where stragglers are removed.
        path: nanoseconds of the critical path by (leaf cause, what it was), largest first.
        ranks_count, replayed_ranks_count: ranks that the step time is of, and how many of them were
            replayed for all.
        grouping_error_ratio: the most that another rank differs, in a step, from the replayed one
            that it is taken to change as.
        model: what was replayed: ``launches`` of the host and what they start, or the
            ``operations`` of a job. Operations have no causes: both attributions are the run's.
        job: how much slower the job is than its ideal; None with ``job_reason``.
    """

    source: str
    changes: list[str]
    observed_step_ns: float
    predicted_step_ns: float
    predicted_ci95_ns: tuple[float, float] | None
    saved_ci95_ns: tuple[float, float] | None
    steps: dict[int | None, tuple[int, int]]
    error_ratio: float
    notes: list[str]
    attribution: Attribution
    observed: Attribution
    unchanged: Attribution
    pace: float = 1.0
    reference_rank: int | None = None
    path: list[tuple[str, str, float]] = field(default_factory=list)
    ranks_count: int = 1
    replayed_ranks_count: int = 1
    grouping_error_ratio: float = 0.0
    model: Literal["launches", "operations"] = "launches"
    job: JobSlowdown | None = None
    job_reason: str | None = None

    @property
    def saved_ratio(self) -> float:
        """Share of the step that is saved."""
        return 1 - self.predicted_step_ns / self.observed_step_ns if self.observed_step_ns else 0.0

    @property
    def untraced_step_ns(self) -> float:
        """The prediction of untraced steps; that of the traced ones where all are traced."""
        untraced = self.observed.step_time().untraced
        if untraced is None or not self.observed_step_ns:
            return self.predicted_step_ns
        return untraced.value_ns * self.predicted_step_ns / self.observed_step_ns

    @property
    def next_bottleneck(self) -> CauseRow | None:
        """The largest cause of the changed run that can be removed."""
        from chopper.analyzers.replay.whatif_options import NOT_FIXABLE

        if self.model == "operations":
            return None
        return next((c for c in self.attribution.leaves() if c.id not in NOT_FIXABLE), None)

    def widened(self, step_ns: Sequence[float]) -> WhatIf:
        """Return this answer with intervals widened by an independent error.

        Args:
            step_ns: the predicted step, in ns, at either end of that error's 95 % interval.
        """
        if self.predicted_ci95_ns is None or self.saved_ci95_ns is None:
            return self
        predicted, saved = self.predicted_step_ns, self.observed_step_ns - self.predicted_step_ns
        low, high = _joined(predicted, self.predicted_ci95_ns, step_ns)
        return replace(
            self,
            predicted_ci95_ns=(max(low, 0.0), high),
            saved_ci95_ns=_joined(
                saved, self.saved_ci95_ns, [self.observed_step_ns - time for time in step_ns]
            ),
        )

    def _repr_html_(self) -> str:
        return as_cell(self, "chopper.reports.whatif:notebook_page")

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON form, schema ``chopper.whatif/3``."""
        following = self.next_bottleneck
        total = sum(time for _, _, time in self.path)
        return {
            "schema": SCHEMA,
            "run": self.source,
            "changes": self.changes,
            "observed_step_ns": round(self.observed_step_ns),
            "predicted_step_ns": round(self.predicted_step_ns),
            "predicted_untraced_step_ns": round(self.untraced_step_ns),
            "host_pace_ratio": self.pace,
            "predicted_ci95_ns": _rounded(self.predicted_ci95_ns),
            "saved_step_ns": round(self.observed_step_ns - self.predicted_step_ns),
            "saved_ratio": self.saved_ratio,
            "saved_ci95_ns": _rounded(self.saved_ci95_ns),
            "steps": [
                {"number": n, "observed_ns": a, "predicted_ns": b}
                for n, (a, b) in self.steps.items()
            ],
            "unmodified_error_ratio": self.error_ratio,
            "model": self.model,
            **{name: getattr(self.job, name, None) for name in JOB_RATIOS},
            "job": None if self.job is None else self.job.to_dict(),
            "job_reason": self.job_reason,
            "reference_rank": self.reference_rank,
            "ranks_count": self.ranks_count,
            "replayed_ranks_count": self.replayed_ranks_count,
            "grouping_error_ratio": self.grouping_error_ratio,
            "notes": self.notes,
            "next_bottleneck": None
            if following is None
            else {"id": following.id, "label": following.label, "time_ns": following.time_ns},
            "causes": [
                {name: getattr(cause, name) for name in _CAUSE_FIELDS}
                for cause in (self.attribution.causes() if self.model == "launches" else ())
            ],
            "critical_path": [
                {
                    "cause": cause,
                    "name": name,
                    "time_ns": round(time),
                    "share_ratio": time / total if total else None,
                }
                for cause, name, time in self.path
            ],
        }


def _joined(
    value: float, interval: tuple[float, float], further: Sequence[float]
) -> tuple[float, float]:
    """Return an interval that also covers other values, by the root of the sum of squares."""
    low, high = interval
    return (
        value - math.hypot(low - value, min(*further, value) - value),
        value + math.hypot(high - value, max(*further, value) - value),
    )


def _rounded(interval: tuple[float, float] | None) -> list[int] | None:
    return None if interval is None else [round(v) for v in interval]


def summary(
    steps: Iterable[tuple[int, float, int]],
) -> tuple[float, float, tuple[float, float] | None, tuple[float, float] | None]:
    """Return mean observed and predicted window; 95 % intervals of predicted mean and saving.

    Args:
        steps: observed and predicted nanoseconds of each step, summed over its rank windows, and
            their number.
    """
    import numpy as np

    from chopper.statistics import mean_intervals

    values = np.array([*steps], dtype=np.float64).reshape(-1, 3)
    if not len(values):
        return 0.0, 0.0, None, None
    observed, predicted, windows = values.T
    means = tuple(float(time.sum() / windows.sum()) for time in (observed, predicted))
    intervals = mean_intervals(np.stack([predicted, observed - predicted], axis=1), windows)
    if intervals is None:
        return means[0], means[1], None, None
    (low, high), (less, more) = intervals.tolist()
    return means[0], means[1], (max(low, 0.0), high), (less, more)
