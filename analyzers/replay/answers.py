"""Answers of a replay: a changed run beside the observed one, and what each cause gives back."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from chopper.notebook import as_cell

if TYPE_CHECKING:
    from collections.abc import Iterable

    from chopper.analyzers.attributed import Attributed
    from chopper.attribution import CauseRow

SCHEMA = "chopper.whatif/1"
_CAUSE_FIELDS = ("id", "parent", "label", "time_ns", "share_ratio")


@dataclass(frozen=True, kw_only=True)
class StepEnergy:
    """Energy and cost of a step over all devices, observed and predicted; unknown is None.

    Attributes:
        reason: why the prediction is withheld; None where it is not.
        observed_j, predicted_j: energy of a step.
        predicted_ci95_j: from the variation of steps, the errors of sensitivities and of the power.
        observed_power_w, predicted_power_w: mean over time, of all devices together.
        observed_clock_hz, predicted_clock_hz: mean over the kernels' time.
        power_source: what shows how power depends on the clock.
        power_clock_hz: lowest and highest clock at which that was measured.
        power_exponent_ratio, power_exponent_ci95: b in P ∝ clock^b between the two clocks.
        observed_cost, predicted_cost: of the devices' hours, in ``currency``.
        price_source: of the price per device and hour.
        frontier: (clock in Hz, predicted step in ns, predicted energy in J) over that range.
    """

    reason: str | None = None
    observed_j: float | None = None
    predicted_j: float | None = None
    predicted_ci95_j: tuple[float, float] | None = None
    observed_power_w: float | None = None
    predicted_power_w: float | None = None
    observed_clock_hz: float | None = None
    predicted_clock_hz: float | None = None
    power_source: str | None = None
    power_clock_hz: tuple[float, float] | None = None
    power_exponent_ratio: float | None = None
    power_exponent_ci95: tuple[float, float] | None = None
    observed_cost: float | None = None
    predicted_cost: float | None = None
    currency: str | None = None
    price_source: str | None = None
    frontier: tuple[tuple[float, float, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields, as in the JSON form of a prediction."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


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
        untraced_ratio: predicted over observed step at the host's pace, where that is known and the
            answer is of traced steps; else None.
        reference_rank: rank that all others are assumed to equal, where stragglers are removed.
        path: nanoseconds of the critical path by (leaf cause, what it was), largest first.
        energy: energy and cost of a step, where the clock changes; else None.
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
    attribution: Attributed
    observed: Attributed
    unchanged: Attributed
    pace: float = 1.0
    untraced_ratio: float | None = None
    reference_rank: int | None = None
    path: list[tuple[str, str, float]] = field(default_factory=list)
    energy: StepEnergy | None = None

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
        ratio = self.untraced_ratio
        if ratio is None:
            ratio = self.predicted_step_ns / self.observed_step_ns
        return untraced.value_ns * ratio

    @property
    def next_bottleneck(self) -> CauseRow | None:
        """The largest cause of the changed run that can be removed."""
        from chopper.analyzers.replay.changes import NOT_FIXABLE

        return next((c for c in self.attribution.leaves() if c.id not in NOT_FIXABLE), None)

    def _repr_html_(self) -> str:
        return as_cell(self, "chopper.reports.whatif:notebook_page")

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON form, schema ``chopper.whatif/1``."""
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
            "energy": None if self.energy is None else self.energy.to_dict(),
            "unmodified_error_ratio": self.error_ratio,
            "reference_rank": self.reference_rank,
            "notes": self.notes,
            "next_bottleneck": None
            if following is None
            else {"id": following.id, "label": following.label, "time_ns": following.time_ns},
            "causes": [
                {name: getattr(cause, name) for name in _CAUSE_FIELDS}
                for cause in self.attribution.causes()
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
