"""Predictions of the replay against training on this machine.

Each case injects one thing into every second step of a real training, takes it away in a replay, and
compares the predicted times with those of the neighbouring steps that were without it. Steps with
and without take turns, so drift of the machine weighs on both alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from chopper.statistics import bootstrap, trimmed_mean
from chopper.validation.replay import REAL_BAR, Prediction, described

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.replaying import WhatIf
    from chopper.validation.injections.plan import Plan, Truth

_START_LIMIT_S, _STEP_LIMIT_S = 120.0, 5.0


@dataclass(frozen=True, slots=True)
class _Real:
    """One injection into real training.

    Attributes:
        amounts: the level that is taken away; and, where that is not nothing, what is left.
        magnitude: the same in words.
        change: what takes it away.
        scale: how many times longer the sequences are than those of the injector.
        linked: the ranks are joined by a link that can be shaped.
        pairs_count: steps with and without it in each recording.
    """

    amounts: tuple[float, ...]
    magnitude: str
    change: dict[str, Any]
    scale: int = 4
    linked: bool = False
    pairs_count: int = 40


_REAL: dict[str, _Real] = {
    "slow_dataset": _Real((0.03,), "30 ms", {"fix": "data"}),
    "slow_rank": _Real((0.05,), "50 ms", {"fix": "straggler"}),
    "item": _Real((10_000,), "10 000 times", {"without": "item"}),
    # Half the rate against twice as much.
    "slow_link": _Real(
        (5e7, 1e8), "50 to 100 Mbit/s", {"link": "x2"}, 1, linked=True, pairs_count=16
    ),
}


def real_cases(
    *,
    names: Sequence[str] | None = None,
    rounds: int = 3,
    seed: int = 0,
) -> list[Prediction]:
    """Injections into real training of two ranks on this machine, each taken away again.

    Args:
        names: of the injections; all by default.
        rounds: recordings of each, in turn.
        seed: of their order.

    Raises:
        CaptureError: the training failed.
    """
    chosen = {name: real for name, real in _REAL.items() if names is None or name in names}
    times: dict[str, list[np.ndarray]] = {name: [] for name in chosen}
    refused: dict[str, str] = {}
    for number in range(rounds):
        for linked in (False, True):
            group = {n: r for n, r in chosen.items() if r.linked == linked and n not in refused}
            if group:
                found, reasons = _record(group, seed + number)
                refused |= reasons
                for name, pairs in found.items():
                    times[name].append(pairs)
    return [_case(name, real, times[name], refused.get(name)) for name, real in chosen.items()]


def _record(group: dict[str, _Real], seed: int) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """One recording of each injection; (observed, predicted, truth) of each pair, or why not."""
    from chopper import api
    from chopper.storage.replacing import scratch
    from chopper.storage.run import finalize
    from chopper.validation.injections import plan as planned
    from chopper.validation.injections import ranks
    from chopper.validation.real import read_truths
    from chopper.workloads import link

    linked = any(real.linked for real in group.values())
    if linked and (missing := link.unavailable()):
        return {}, dict.fromkeys(group, missing)
    plans = tuple(
        planned.Plan(
            injection=name,
            amounts=real.amounts,
            pairs_count=real.pairs_count,
            seed=seed,
            scale=real.scale,
        )
        for name, real in group.items()
    )
    found: dict[str, np.ndarray] = {}
    reasons: dict[str, str] = {}
    with (
        ranks.ended_by_signals(),
        scratch("validate") as directory,
    ):
        job = planned.Job(directory=str(directory), plans=plans, linked=linked)
        steps = sum(len(plan.levels()) for plan in plans)
        ranks.run(job, timeout_s=_START_LIMIT_S + steps * _STEP_LIMIT_S)
        for plan in plans:
            truths = read_truths(directory, plan.injection)
            skipped = next((t.skipped for t in truths if t.skipped), None)
            if skipped:
                reasons[plan.injection] = skipped
                continue
            path = directory / plan.injection
            finalize(path)
            predicted = api.whatif(api.attribute(path).whole, **group[plan.injection].change)
            found[plan.injection] = _pairs(plan, predicted, truths)
    return found, reasons


def _pairs(plan: Plan, found: WhatIf, truths: Sequence[Truth]) -> np.ndarray:
    """(observed, predicted, truth) nanoseconds of each step with what is taken away: (pairs, 3).

    Where ranks are said not to wait for each other, their neighbours' waiting is no part of the
    truth: it was measured with the ranks' own clocks.
    """
    injected = [step for level, step, _ in plan.pairs() if level == 0]
    left = [
        without if len(plan.amounts) == 1 else step
        for level, step, without in plan.pairs()
        if level == len(plan.amounts) - 1
    ]
    waited = waiting(truths, found.reference_rank)
    return np.array(
        [
            (*found.steps[step], found.steps[without][0] - waited.get(without, 0))
            for step, without in zip(injected, left, strict=True)
        ],
        dtype=np.float64,
    )


def waiting(truths: Sequence[Truth], rank: int | None) -> dict[int, int]:
    """Step → for how long a rank waited for the others by the ranks' own clocks."""
    from chopper.validation.injections.plan import ARRIVAL, MEETING

    found: dict[int, int] = {}
    if rank is None:
        return found
    for name in (MEETING, ARRIVAL):
        came = [t.injected_ns.get(name, []) for t in truths]
        for step, times in enumerate(zip(*came, strict=True)):
            found[step] = found.get(step, 0) + max(times) - times[rank]
    return found


def _case(name: str, real: _Real, rounds: list[np.ndarray], refused: str | None) -> Prediction:
    pairs = level(rounds)
    observed, predicted, truth = trimmed_mean(pairs) if len(pairs) else np.zeros(3)
    return Prediction(
        suite="real",
        name=name,
        magnitude=real.magnitude,
        flavour="cpu",
        change=described(real.change),
        observed_ns=float(observed),
        predicted_ns=float(predicted),
        truth_ns=float(truth),
        bar_ratio=REAL_BAR,
        refused=refused,
        ci95_ratio=error_interval(pairs) if len(pairs) else None,
        pairs_count=len(pairs),
    )


def level(rounds: list[np.ndarray]) -> np.ndarray:
    """The pairs of all recordings, each recording brought to the mean of their truths.

    A machine that was slower throughout one of them is no error of the prediction.
    """
    if not rounds:
        return np.zeros((0, 3))
    truths = [trimmed_mean(pairs)[2] for pairs in rounds]
    mean = sum(truths) / len(truths)
    return np.concatenate(
        [pairs * (mean / truth) for pairs, truth in zip(rounds, truths, strict=True)]
    )


def error_interval(pairs: np.ndarray) -> tuple[float, float]:
    """95 % percentile interval of predicted over truth less 1, resampling pairs.

    Args:
        pairs: (observed, predicted, truth) of each.
    """
    times = bootstrap(pairs, trimmed_mean)
    low, high = np.percentile(times[:, 1] / np.maximum(times[:, 2], 1.0) - 1, [2.5, 97.5])
    return float(low), float(high)


__all__ = ["error_interval", "level", "real_cases", "waiting"]
