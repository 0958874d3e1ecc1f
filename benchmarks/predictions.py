"""Predictions of the replay against truths: what a fix was said to give, and what it gave.

On the model: it runs with an injection, its recording is replayed with the injection's cause taken
away, and the predicted step time is compared with that of the model run again without it. On this
machine: one thing is injected into every second step of a real training and taken away in a replay,
and the predicted times are compared with those of the neighbouring steps that were without it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from chopper.statistics import bootstrap
from tests.known_causes.injections.plan import ARRIVAL, MEETING
from tests.known_causes.injections.plan import Plan as RealPlan
from tests.known_causes.model.injections import INJECTIONS, MIXES
from tests.known_causes.model.machine import FLAVOURS
from tests.known_causes.model.plan import Dose
from tests.known_causes.real import trimmed_mean
from tests.known_causes.recordings import LINKED, record
from tests.known_causes.results import MAGNITUDES
from tests.known_causes.synthetic import refusals, run_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from chopper.analyzers.attribution import Attribution
    from chopper.analyzers.replay.answers import WhatIf
    from tests.known_causes.injections.plan import Truth
    from tests.known_causes.model.plan import Plan

SYNTHETIC_BAR, REAL_BAR = 0.02, 0.05
_KNOBS = {
    "data": "idle.preparation.data",
    "data_collection": "idle.preparation.gc",
    "before_boundary": "idle.preparation.python",
    "python": "idle.preparation.python",
    "collection": "idle.preparation.gc",
    "allocator": "idle.preparation.allocator",
    "dispatch": "idle.preparation.dispatch",
    "synchronization": "idle.preparation.synchronization",
}
"""Knob of the model → the cause that takes its time; the others' injections name their own."""
_MIX = "mixed_host"
_NO_EXCESS = 1 / 1.18 - 1
"""Takes back what memory-bound work of the model needs beyond its bytes."""


class Prediction(msgspec.Struct, kw_only=True, frozen=True):
    """One prediction and what became of it."""

    suite: str
    name: str
    magnitude: str
    flavour: str
    change: str
    observed_ns: float
    predicted_ns: float
    truth_ns: float
    bar_ratio: float
    refused: str | None = None
    """Why the change could not be predicted: the attribution did not measure its factor."""
    ci95_ratio: tuple[float, float] | None = None
    """Interval of ``error_ratio``, where the truth is a measurement."""
    pairs_count: int | None = None
    """Pairs of steps that were measured."""

    @property
    def error_ratio(self) -> float:
        """Error of the predicted step time, with its sign."""
        return self.predicted_ns / self.truth_ns - 1 if self.truth_ns else 0.0

    @property
    def ok(self) -> bool:
        """Within the bar, or refused with the reason."""
        return self.refused is not None or abs(self.error_ratio) <= self.bar_ratio

    @property
    def verdict(self) -> str:
        """In words: an error beyond the bar may be chance while its interval reaches the bar."""
        if self.refused is not None:
            return f"not measured: {self.refused}"
        if self.ok:
            return "within the bar"
        low, high = self.ci95_ratio or (self.error_ratio, self.error_ratio)
        reaches = low <= self.bar_ratio and high >= -self.bar_ratio
        return "not shown: the interval reaches the bar" if reaches else "outside the bar"


def synthetic_cases(
    *, magnitudes: Sequence[str] = MAGNITUDES, names: Sequence[str] | None = None, seed: int = 0
) -> Iterator[Prediction]:
    """All injections of the model, each taken away again, and a mix of five."""
    for name in (*INJECTIONS, _MIX):
        if names is not None and name not in names:
            continue
        for flavour in FLAVOURS:
            for magnitude in magnitudes:
                yield _synthetic_case(name, magnitude, flavour, seed)


def _synthetic_case(name: str, magnitude: str, flavour: str, seed: int) -> Prediction:
    from chopper.api import whatif

    injection = MIXES[name] if name == _MIX else INJECTIONS[name]
    without, injected = injection.plans(magnitude, flavour=flavour, seed=seed)
    change, repaired = _change(name, magnitude, without)
    before = _attributed(injected)
    predicted = whatif(before, **change)
    step_ns = _attributed(repaired).step_time_ns()
    return Prediction(
        suite="synthetic",
        name=name,
        magnitude=magnitude,
        flavour=flavour,
        change=described(change),
        observed_ns=predicted.observed_step_ns,
        predicted_ns=predicted.predicted_step_ns,
        truth_ns=sum(step_ns) / len(step_ns),
        bar_ratio=SYNTHETIC_BAR,
        refused=refusals(before).get(injection.factor) if injection.factor else None,
    )


def _change(name: str, magnitude: str, without: Plan) -> tuple[dict[str, Any], Plan]:
    """The change that takes an injection away, and the plan that has it away.

    Where the job has some of the cause without the injection too, and the change takes all of it,
    the plan is without that as well; or the change is just as large as the injection.
    """
    if name == _MIX:
        return {"fix": [part.cause for part in MIXES[name].parts]}, without
    cause, knobs = INJECTIONS[name].cause, INJECTIONS[name].turns(magnitude)
    if name == "slow_link":
        return {"link": f"x{1 + knobs['link'].amount:g}"}, without
    if name == "exposed_communication":
        return {"fix": "communication"}, replace(without, link=Dose(-1.0))
    if name == "inefficiency":
        times = f"{1 + knobs['slow'].amount:g}x"
        return {"faster": [f"gemm={times}", f"sdpa={times}"]}, without
    if name == "vector_excess":
        return {"fix": cause}, replace(without, vector=Dose(_NO_EXCESS))
    fix = {_KNOBS[knob] for knob in knobs if knob in _KNOBS}
    return {"fix": sorted(fix) if fix and cause in _KNOBS.values() else cause}, without


@lru_cache(maxsize=128)
def _attributed(plan: Plan) -> Attribution:
    return run_model(plan)[1]


def described(change: dict[str, Any]) -> str:
    """A change as on the command line."""
    parts = []
    for option, value in change.items():
        values = value if isinstance(value, list) else [value]
        parts += [f"--{option}" if v is True else f"--{option} {v}" for v in values]
    return " ".join(parts)


@dataclass(frozen=True, slots=True)
class _Real:
    """One injection into real training.

    Attributes:
        amounts: the level that is taken away; and, where that is not nothing, what is left.
        magnitude: the same in words.
        change: what takes it away.
        scale: how many times longer the sequences are than those of the injector.
        pairs_count: steps with and without it in each recording.
    """

    amounts: tuple[float, ...]
    magnitude: str
    change: dict[str, Any]
    scale: int = 4
    pairs_count: int = 40


_REAL: dict[str, _Real] = {
    "slow_dataset": _Real((0.03,), "30 ms", {"fix": "data"}),
    "slow_rank": _Real((0.05,), "50 ms", {"fix": "straggler"}),
    "item": _Real((10_000,), "10 000 times", {"without": "item"}),
    # Half the rate against twice as much.
    LINKED: _Real((5e7, 1e8), "50 to 100 Mbit/s", {"link": "x2"}, scale=1, pairs_count=16),
}


def real_cases(*, rounds: int = 3, seed: int = 0) -> list[Prediction]:
    """Injections into real training of two ranks on this machine, each taken away again.

    Args:
        rounds: recordings of each, in turn.
        seed: of their order.

    Raises:
        CaptureError: the training failed.
    """
    from chopper.api import whatif

    times: dict[str, list[np.ndarray]] = {name: [] for name in _REAL}
    refused: dict[str, str] = {}
    for number in range(rounds):
        plans = [
            RealPlan(
                injection=name,
                amounts=real.amounts,
                pairs_count=real.pairs_count,
                seed=seed + number,
                scale=real.scale,
            )
            for name, real in _REAL.items()
            if name not in refused
        ]
        for recorded in record(plans):
            name = recorded.plan.injection
            if recorded.attribution is None:
                refused[name] = str(recorded.skipped)
                continue
            predicted = whatif(recorded.attribution, **_REAL[name].change)
            times[name].append(_pairs(recorded.plan, predicted, recorded.truths))
    return [_real_case(name, real, times[name], refused.get(name)) for name, real in _REAL.items()]


def _pairs(plan: RealPlan, predicted: WhatIf, truths: Sequence[Truth]) -> np.ndarray:
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
    waited = waiting(truths, predicted.reference_rank)
    return np.array(
        [
            (*predicted.steps[step], predicted.steps[without][0] - waited.get(without, 0))
            for step, without in zip(injected, left, strict=True)
        ],
        dtype=np.float64,
    )


def waiting(truths: Sequence[Truth], rank: int | None) -> dict[int, int]:
    """Step → nanoseconds a rank waited for the others by the ranks' own clocks."""
    waited_ns: dict[int, int] = {}
    if rank is None:
        return waited_ns
    for name in (MEETING, ARRIVAL):
        arrivals_ns = [t.injected_ns.get(name, []) for t in truths]
        for step, times_ns in enumerate(zip(*arrivals_ns, strict=True)):
            waited_ns[step] = waited_ns.get(step, 0) + max(times_ns) - times_ns[rank]
    return waited_ns


def _real_case(name: str, real: _Real, rounds: list[np.ndarray], refused: str | None) -> Prediction:
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
