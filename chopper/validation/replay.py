"""Predictions of the replay against truths: what a fix was said to give, and what it gave.

Each case runs the model with an injection, replays the recording with the injection's cause taken
away, and compares the predicted step time with that of the model run again without it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from chopper.storage.replacing import scratch
from chopper.validation.model.injections import INJECTIONS, MIXES
from chopper.validation.model.job import simulate
from chopper.validation.model.plan import Dose
from chopper.validation.model.writer import write
from chopper.validation.results import MAGNITUDES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from chopper.attribution import Attribution
    from chopper.validation.model.plan import Plan

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
_NO_EXCESS = 1 / 1.18 - 1
"""What memory-bound work of the model takes beyond its bytes, taken back."""
_NOT_MEASURED = re.compile(r"; ([^;(]+) not measured \(([^;]*)\)(?=;|$)")


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
    """How often it was measured."""

    @property
    def error_ratio(self) -> float:
        """Of the predicted step time, with its sign."""
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
    """All injections of the model, each taken away again, and three mixes of five."""
    for name, injection in INJECTIONS.items():
        if names is not None and name not in names:
            continue
        for flavour in ("cuda", "rocm"):
            for magnitude in magnitudes:
                without, injected = injection.plans(magnitude, flavour=flavour, seed=seed)
                turned = injection.turns[magnitude]
                change, truth = _change(name, injection.cause, turned, without)
                yield _case(name, magnitude, flavour, injected, truth, change, injection.factor)
    for name in ("mixed_host",):
        if names is not None and name not in names:
            continue
        for flavour in ("cuda", "rocm"):
            for magnitude in magnitudes:
                without, injected = MIXES[name].plans(magnitude, flavour=flavour, seed=seed)
                fix = [INJECTIONS[p].cause for p in MIXES[name].parts]
                yield _case(name, magnitude, flavour, injected, without, {"fix": fix}, None)


def _change(name: str, cause: str, turned: Any, without: Plan) -> tuple[dict[str, Any], Plan]:
    """The change that takes an injection away, and the plan that has it away.

    Where the job has some of the cause without the injection too, and the change takes all of it,
    the plan is without that as well; or the change is just as large as the injection.
    """
    if name == "slow_link":
        return {"link": f"x{1 + turned['link'].amount:g}"}, without
    if name == "exposed_communication":
        return {"fix": "communication"}, replace(without, link=Dose(-1.0))
    if name == "inefficiency":
        times = f"{1 + turned['slow'].amount:g}x"
        return {"faster": [f"gemm={times}", f"sdpa={times}"]}, without
    if name == "vector_excess":
        return {"fix": cause}, replace(without, vector=Dose(_NO_EXCESS))
    fix = {_KNOBS[knob] for knob in turned if knob in _KNOBS}
    return {"fix": sorted(fix) if fix and cause in _KNOBS.values() else cause}, without


def _case(
    name: str,
    magnitude: str,
    flavour: str,
    injected: Plan,
    without: Plan,
    change: dict[str, Any],
    factor: str | None,
) -> Prediction:
    from chopper.api import whatif

    before, after = _attributed(injected), _attributed(without)
    found = whatif(before, **change)
    said = before.bases["compute.efficiency.rest"].text
    refusals = {match[1]: match[2] for match in _NOT_MEASURED.finditer(said)}
    return Prediction(
        suite="synthetic",
        name=name,
        magnitude=magnitude,
        flavour=flavour,
        change=described(change),
        observed_ns=found.observed_step_ns,
        predicted_ns=found.predicted_step_ns,
        truth_ns=mean(after.step_time_ns()),
        bar_ratio=SYNTHETIC_BAR,
        refused=refusals.get(factor) if factor else None,
    )


def described(change: dict[str, Any]) -> str:
    """A change as on the command line."""
    parts = []
    for option, value in change.items():
        values = value if isinstance(value, list) else [value]
        parts += [f"--{option}" if v is True else f"--{option} {v}" for v in values]
    return " ".join(parts)


def mean(values: Sequence[float]) -> float:
    """Mean; 0 of none."""
    return sum(values) / max(len(values), 1)


@lru_cache(maxsize=128)
def _attributed(plan: Plan) -> Attribution:
    from chopper.api import attribute
    from chopper.replaying import replay_of

    with scratch("validate") as folder:
        write(simulate(plan), folder)
        attribution = attribute(folder).whole
        # Tables are read while the folder is there.
        replay_of(attribution)
    return attribution


def table(cases: Sequence[Prediction]) -> str:
    """The cases as a table in Markdown."""
    lines = [
        "| removed | how | observed | predicted | truth | error |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for case in cases:
        error = f"{case.error_ratio:+.1%}" if case.refused is None else "refused"
        mark = "" if case.ok else " ✗"
        lines.append(
            f"| {case.name.replace('_', ' ')}, {case.magnitude}, {case.flavour} | `{case.change}` | "
            f"{case.observed_ns / 1e6:.2f} ms | {case.predicted_ns / 1e6:.2f} ms | "
            f"{case.truth_ns / 1e6:.2f} ms | {error}{mark} |"
        )
    return "\n".join(lines) + "\n"


def measured(cases: Sequence[Prediction]) -> str:
    """Cases whose truth was measured, with the interval of the error and the verdict, in Markdown."""
    lines = [
        "| removed | how | pairs | observed | predicted | measured | error | 95 % interval | verdict |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for case in cases:
        times = [case.observed_ns, case.predicted_ns, case.truth_ns]
        shown = ["–" if case.refused else f"{time / 1e6:.1f} ms" for time in times]
        error = "–" if case.refused else f"{case.error_ratio:+.1%}"
        interval = (
            f"{case.ci95_ratio[0]:+.1%} … {case.ci95_ratio[1]:+.1%}" if case.ci95_ratio else "–"
        )
        lines.append(
            f"| {case.name.replace('_', ' ')}, {case.magnitude} | `{case.change}` | "
            f"{case.pairs_count or '–'} | {' | '.join(shown)} | {error} | {interval} | "
            f"{case.verdict} |"
        )
    return "\n".join(lines) + "\n"


def summary(cases: Sequence[Prediction]) -> str:
    """One row for each injection: its last case, and the worst error of all of them, in Markdown."""
    lines = [
        "| removed | how | cases | observed | predicted | truth | worst error |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for name in dict.fromkeys(case.name for case in cases):
        mine = [case for case in cases if case.name == name]
        scored = [case for case in mine if case.refused is None]
        shown = (scored or mine)[-1]
        worst = max((case.error_ratio for case in scored), key=abs, default=None)
        error = "refused" if worst is None else f"{worst:+.1%}"
        mark = "" if all(case.ok for case in mine) else " ✗"
        lines.append(
            f"| {name.replace('_', ' ')} | `{shown.change}` | {len(mine)} | "
            f"{shown.observed_ns / 1e6:.2f} ms | {shown.predicted_ns / 1e6:.2f} ms | "
            f"{shown.truth_ns / 1e6:.2f} ms | {error}{mark} |"
        )
    return "\n".join(lines) + "\n"


__all__ = ["Prediction", "described", "mean", "measured", "summary", "synthetic_cases", "table"]
