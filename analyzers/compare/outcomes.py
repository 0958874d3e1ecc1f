"""Time, throughput, energy and training loss of a step, in both runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.compare.result import Outcome, Total
from chopper.analyzers.compare.same_work import Steps
from chopper.analyzers.events.groups import reals
from chopper.analyzers.events.steps import steps_of, tokens_of_steps
from chopper.analyzers.trace.columns import ints
from chopper.analyzers.views.energy import energy
from chopper.statistics import Sample, compare_means, mean_intervals

_NO_TOKENS = "the tokens of its steps were not counted (prof.step(tokens=…) does)"
_NO_LOSS = "no loss was recorded (prof.measure('loss', value, step=…) does)"
_NO_ENERGY = "neither energy nor power was sampled"
_STEP = "step time, without a trace where both runs have such steps"
_LABEL = "step"
"""Label of a measure that names the step that it is of."""

Pair = tuple[Attribution, Attribution]
_Known = tuple[float | None, str]
"""A value, or None and why."""


class _Energy(NamedTuple):
    """Energy of a run by column, its groups of steps where one source gave it, and whose it is."""

    values: dict[str, _Known]
    groups: Sample | None
    meter: str | None = None
    why: str = _NO_ENERGY


def outcomes(runs: Pair, sides: tuple[Steps, Steps], step: Total) -> tuple[Outcome, ...]:
    """Return step time, throughput, energy per step and token, and loss, in that order.

    Args:
        runs: restricted to the compared steps.
        sides: these steps.
        step: the step time that is compared, without a trace where both runs have that.
    """
    of_energy = [_energy(run, side) for run, side in zip(runs, sides, strict=True)]
    meters = [of.meter for of in of_energy]
    if all(meters) and meters[0] != meters[1]:
        of_energy = [
            _Energy({}, None, why=f"not alike, of {meters[0]} in A and of {meters[1]} in B")
        ] * 2
    names = {"energy_per_step_j": "Energy per step", "energy_per_token_j": "Energy per token"}
    return (
        Outcome("step_ns", "Step", step.a_ns, step.b_ns, step.ci95_ratio, None, _STEP),
        _throughput(runs, step),
        *(
            _outcome(
                column,
                label,
                [of.values.get(column, (None, of.why)) for of in of_energy],
                _energy_interval([of.groups for of in of_energy]) if "step" in column else None,
                f"of {meters[0] or meters[1] or 'devices'}, over all recorded steps",
            )
            for column, label in names.items()
        ),
        _loss(runs),
    )


def _outcome(
    id: str,
    label: str,
    values: Sequence[_Known],
    ci95_ratio: tuple[float, float] | None,
    note: str,
) -> Outcome:
    (a, why_a), (b, why_b) = values
    reasons = [
        f"{name}: {why}" for name, of, why in (("A", a, why_a), ("B", b, why_b)) if of is None
    ]
    if why_a == why_b and len(reasons) > 1:
        reasons = [f"A and B: {why_a}"]
    return Outcome(
        id, label, a, b, None if reasons else ci95_ratio, "; ".join(reasons) or None, note
    )


def _throughput(runs: Pair, step: Total) -> Outcome:
    """Tokens of a mean step of all recorded ranks, over the step time."""
    tokens = [_tokens_per_step(run) for run in runs]
    values: list[_Known] = [
        (None, _NO_TOKENS) if count is None or not time_ns else (count / time_ns * 1e9, "")
        for count, time_ns in zip(tokens, (step.a_ns, step.b_ns), strict=True)
    ]
    ci95_ratio = None
    if tokens[0] and tokens[1] and step.ci95_ratio is not None and step.ci95_ratio[0] > -1:
        more, (low, high) = tokens[1] / tokens[0], step.ci95_ratio
        ci95_ratio = more / (1 + high) - 1, more / (1 + low) - 1
    note = "tokens of a mean step, over the step time; of all recorded ranks"
    return _outcome("tokens_per_s", "Tokens per second", values, ci95_ratio, note)


def _tokens_per_step(run: Attribution) -> float | None:
    """Tokens of a mean step, over all ranks; None where they are not known."""
    ranks = tuple(run.recording.ranks)
    numbers = ints(steps_of(run, ranks[0]), "number") if ranks else np.zeros(0, np.int64)
    tokens, _ = tokens_of_steps(run, ranks, numbers)
    known = tokens[np.isfinite(tokens)]
    return float(known.mean()) if known.size and known.mean() > 0 else None


def _energy(run: Attribution, side: Steps) -> _Energy:
    """Energy per step and token of all devices, else of all processors."""
    table = energy(run.detail, side.events)
    run_rows = table.filter(pc.equal(table["scope"], "run")).to_pylist()
    devices = [row for row in run_rows if "device" in row["source"]]
    sockets = [
        row for row in run_rows if row["source"].startswith("package") and "/" not in row["source"]
    ]
    rows = devices[:1] or sockets
    if not rows:
        return _Energy({}, None)
    meter = "devices" if devices else "the hosts' processors"
    why = next((row["reason"] for row in rows if row["reason"]), _NO_ENERGY)
    per_step = [row["energy_per_step_j"] for row in rows]
    # Processors of a host work on the same tokens; others may know the energy of fewer steps.
    tokens = {
        row["ranks"]: row["tokens_count"] and row["tokens_count"] / row["step_count"]
        for row in rows
    }
    values: dict[str, _Known] = {}
    if None not in per_step:
        energy_j = sum(per_step)
        values["energy_per_step_j"] = energy_j, ""
        if None not in tokens.values():
            values["energy_per_token_j"] = energy_j / sum(tokens.values()), ""
    parts = table.filter(
        pc.and_(
            pc.equal(table["scope"], "steps"),
            pc.equal(table["source"], rows[0]["source"]),
        )
    )
    known = parts.filter(parts["energy_j"].is_valid())
    if len(rows) > 1 or not known.num_rows:
        return _Energy(values, None, meter, why)
    groups = Sample(reals(known, "energy_j")[:, None], reals(known, "step_count"))
    return _Energy(values, groups, meter, why)


def _energy_interval(groups: Sequence[Sample | None]) -> tuple[float, float] | None:
    """Interval of the change, over groups of steps of one source; None with fewer than three."""
    a, b = groups
    intervals = None if a is None or b is None else compare_means(a, b)
    if intervals is None or np.isnan(intervals.ratio).any():
        return None
    low, high = intervals.ratio[:, 0].tolist()
    return low, high


def _loss(runs: Pair) -> Outcome:
    """Mean training loss of the later half of the steps that both runs recorded it of."""
    of_runs = [_loss_by_step(run) for run in runs]
    steps = sorted(of_runs[0].keys() & of_runs[1].keys())
    later = steps[len(steps) // 2 :]
    values: list[_Known] = [
        (float(np.mean([of[step] for step in later])), "")
        if later
        else (None, "no loss of a step that the other has" if of else _NO_LOSS)
        for of in of_runs
    ]
    ci95_ratio = None
    mean_a = values[0][0]
    if mean_a:
        apart = np.array([of_runs[1][s] - of_runs[0][s] for s in later])
        interval = mean_intervals(apart[:, None])
        if interval is not None:
            ends = sorted(float(end) / abs(mean_a) for end in interval[0])
            ci95_ratio = ends[0], ends[1]
    note = "mean over the later half of the steps with a loss in both runs, compared step by step"
    return _outcome("loss", "Loss", values, ci95_ratio, note)


def _loss_by_step(run: Attribution) -> dict[int, float]:
    """Return a run's loss by step, its mean over ranks, of the measure that is called so."""
    by_name: dict[str, dict[int, list[float]]] = {}
    for part in run.recording.manifest.ranks:
        for measure in part.measures:
            step = measure.labels.get(_LABEL)
            if measure.name.endswith("loss") and isinstance(step, int):
                by_name.setdefault(measure.name, {}).setdefault(step, []).append(measure.value)
    # Of several, the one that is named so: others are parts of it, or of an evaluation.
    name = "loss" if "loss" in by_name or len(by_name) != 1 else next(iter(by_name))
    return {step: float(np.mean(values)) for step, values in by_name.get(name, {}).items()}
