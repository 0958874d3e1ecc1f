"""Injections into real two-rank training on this machine.

What was injected is what the injector measured with its own clock, in the program, step by step;
the attribution knows nothing of it. Every step with an injection has a neighbour without one in the
same recording: recovered is what the cause has more of in the one than in the other.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from chopper.causes import CODES, LEAVES
from chopper.experiments.judgement import BUSY_CORES
from chopper.statistics import bootstrap, t_quantile
from tests.known_causes.injections.plan import ARRIVAL, Plan
from tests.known_causes.recordings import RANKS, record
from tests.known_causes.results import MAGNITUDES, REAL, Case, judged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from chopper.analyzers.attribution import Attribution
    from tests.known_causes.injections.plan import Truth
    from tests.known_causes.recordings import Recorded

_FALSE_LEAKS = 0.05
"""Probability that noise alone makes any cause of a case seem to leak."""
_PAIRS, _QUICK_PAIRS = 12, 8
_QUICK = ("slow_dataset", "slow_rank", "garbage_collection", "extra_copies", "busy_neighbour")
_EACH = {0: 0, 1: 1}
_RECOMPUTE = "compute.recompute"


class Expected(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time that an injection adds to a cause and those that share it, as an injector measured it.

    ``truth_of``: rank whose attribution is looked at → rank whose injector measured it.
    Of arrivals, the truth is by how much the other rank came later.
    """

    cause: str
    truth_of: dict[int, int] = msgspec.field(default_factory=lambda: dict(_EACH))
    measured: str = "own"
    shared_with: tuple[str, ...] = ()

    def holds(self, leaf: str) -> bool:
        """Tell whether time of this leaf counts."""
        return any(leaf == c or leaf.startswith(c + ".") for c in (self.cause, *self.shared_with))


class Injection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of injection: where its time belongs, and what else it adds.

    ``amounts`` are for small, medium and large; the collectives' table has to name ``straggler``.
    """

    own: Expected
    amounts: tuple[float, float, float]
    also: tuple[Expected, ...] = ()
    straggler: int | None = None


_INJECTIONS = msgspec.json.decode(
    Path(__file__).with_suffix(".json").read_bytes(),
    type=dict[str, Injection],
)
"""Recorded in this order: what others free would be handed out again to the first."""


def injections() -> dict[str, str]:
    """Name of each injection → id of the cause that it belongs to."""
    return {name: found.own.cause for name, found in _INJECTIONS.items()}


def run_cases(
    *,
    injections: Sequence[str],
    magnitudes: Sequence[str],
    seed: int = 0,
    quick: bool = False,
) -> Iterator[Case]:
    """Inject amounts by magnitude and attribute; yield each case as it is done.

    Raises:
        CaptureError: the training failed.
    """
    levels = [m for m in MAGNITUDES if m in magnitudes]
    plans = [
        Plan(
            injection=name,
            amounts=tuple(injection.amounts[MAGNITUDES.index(m)] for m in levels),
            pairs_count=_QUICK_PAIRS if quick else _PAIRS,
            seed=seed,
        )
        for name, injection in _INJECTIONS.items()
        if name in injections and (not quick or name in _QUICK)
    ]
    for recorded in record(plans):
        yield from _cases(recorded, levels)


def _cases(recorded: Recorded, levels: Sequence[str]) -> list[Case]:
    plan, attribution = recorded.plan, recorded.attribution
    injection = _INJECTIONS[plan.injection]
    if attribution is None:
        skipped = _case(plan.injection, injection, status="skipped", reason=recorded.skipped)
        return [msgspec.structs.replace(skipped, magnitude=level) for level in levels]
    named = named_stragglers(attribution) if injection.straggler is not None else {}
    cases = score(plan, injection, per_step(attribution), recorded.truths, levels)
    return [
        _excused(
            _named_right(
                case,
                injection.straggler,
                [named.get(step) for at, step, _ in plan.pairs() if at == level],
            ),
            recorded.other_cores,
        )
        for level, case in enumerate(cases)
    ]


def _case(name: str, injection: Injection, **fields: Any) -> Case:
    described: dict[str, Any] = {"magnitude": "", "flavour": "cpu", "bar": REAL} | fields
    return Case(suite="real", injection=name, cause=injection.own.cause, **described)


def _excused(case: Case, other_cores: float) -> Case:
    """On a busy machine a miss shows nothing: what took the time may be another program."""
    if case.status != "missed" or other_cores < BUSY_CORES:
        return case
    return msgspec.structs.replace(
        case,
        status="refused",
        reason=f"{case.reason}; other programs used {other_cores:.1f} cores meanwhile, so this "
        "shows nothing: run it on a quiet machine",
    )


def per_step(attribution: Attribution) -> np.ndarray:
    """Attribution time by rank, step number and leaf: (ranks, steps, LEAVES) nanoseconds.

    All of the phase ``recompute`` counts as recomputation: without a device, what is between the
    operators that are run again is idle time of that phase.
    """
    number = {
        (rank, index): step
        for rank, index, step in zip(
            *(attribution.windows[c].to_pylist() for c in ("rank", "step_index", "number")),
            strict=True,
        )
    }
    found = np.zeros((RANKS, max(number.values()) + 1, len(LEAVES)), dtype=np.int64)
    keys = ("rank", "step_index", "cause", "phase")
    sums = attribution.pieces.group_by([*keys]).aggregate([("time_ns", "sum")])
    for rank, index, cause, phase, time_ns in zip(
        *(sums[c].to_pylist() for c in (*keys, "time_ns_sum")), strict=True
    ):
        leaf = _RECOMPUTE if phase == "recompute" else cause
        found[rank, number[rank, index], CODES[leaf]] += time_ns
    return found


def named_stragglers(attribution: Attribution) -> dict[int, int]:
    """Step number → rank that came last at the collective that was waited for longest."""
    from chopper.views import view

    rows = view(attribution, "collectives").select(["step", "exposed_waiting_ns", "straggler_rank"])
    longest: dict[int, tuple[int, int]] = {}
    for step, waited_ns, rank in zip(*(c.to_pylist() for c in rows.columns), strict=True):
        if step is not None:
            longest[step] = max(longest.get(step, (0, -1)), (waited_ns, rank))
    return {step: rank for step, (_, rank) in longest.items()}


def _named_right(case: Case, straggler: int | None, named: Sequence[int | None]) -> Case:
    right = sum(rank == straggler for rank in named)
    if straggler is None or case.status in ("skipped", "refused") or right >= 0.9 * len(named):
        return case
    wrong = f"rank {straggler} was late, and named in {right} of {len(named)} steps"
    return msgspec.structs.replace(
        case, status="missed", reason="; ".join(r for r in (case.reason, wrong) if r)
    )


def score(
    plan: Plan,
    injection: Injection,
    attributed: np.ndarray,
    truths: Sequence[Truth],
    levels: Sequence[str],
) -> list[Case]:
    """Compare what was attributed with what was injected, pair by pair, level by level.

    Errors are summed trimmed: a hiccup of the machine in one step is as long as all that was
    injected. Their interval is the 95 % percentile one.
    """
    cases = []
    for level, magnitude in enumerate(levels):
        pairs = np.array([(a, b) for at, a, b in plan.pairs() if at == level])
        more = attributed[:, pairs[:, 0]] - attributed[:, pairs[:, 1]]
        left = more.copy()
        errors: dict[str, np.ndarray] = {}
        recovered = injected = np.zeros(len(pairs), dtype=np.int64)
        for expected in (injection.own, *injection.also):
            found, truth = _compare(expected, more, left, pairs, truths)
            if expected is injection.own:
                recovered, injected = found, truth
            else:
                errors[expected.cause] = found - truth
        if injection.own.truth_of == _EACH and not injection.own.cause.startswith("communication"):
            # By how much longer one rank was held up than the other, which waited for it.
            nothing = [0] * (int(pairs.max()) + 1)
            own = [np.array(t.injected_ns.get(injection.own.measured, nothing)) for t in truths]
            apart = np.abs(own[0] - own[1])
            errors["communication.wait"] = apart[pairs[:, 1]] - apart[pairs[:, 0]]
        for leaf, code in CODES.items():
            change = left[:, :, code].sum(axis=0)
            errors[leaf] = errors[leaf] + change if leaf in errors else change
        total = int(injected.sum())
        totals = len(pairs) * bootstrap(recovered - injected, trimmed_mean)
        low, high = (total + round(float(v)) for v in np.percentile(totals, [2.5, 97.5]))
        case = _case(
            plan.injection,
            injection,
            magnitude=magnitude,
            injected_ns=total,
            recovered_ns=total + _trimmed_total(recovered - injected),
            ci95_ns=(low, high),
            leaked_ns=_leaks(errors),
        )
        cases.append(judged(case))
    return cases


def _compare(
    expected: Expected,
    more: np.ndarray,
    left: np.ndarray,
    pairs: np.ndarray,
    truths: Sequence[Truth],
) -> tuple[np.ndarray, np.ndarray]:
    """(attributed, true) difference of each pair; what is compared is taken out of ``left``."""
    codes = [code for leaf, code in CODES.items() if expected.holds(leaf)]
    found = np.zeros(len(pairs), dtype=np.int64)
    true = np.zeros(len(pairs), dtype=np.int64)
    for rank, measured_by in expected.truth_of.items():
        found += more[rank][:, codes].sum(axis=1)
        left[np.ix_([rank], range(len(pairs)), codes)] = 0
        measured = truths[measured_by].injected_ns.get(expected.measured)
        if measured is not None:
            at = np.array(measured, dtype=np.int64)
            if expected.measured == ARRIVAL:
                at = np.maximum(at - np.array(truths[rank].injected_ns[ARRIVAL]), 0)
            true += at[pairs[:, 0]] - at[pairs[:, 1]]
    return found, true


def _trimmed_total(error_ns: np.ndarray) -> int:
    return round(float(trimmed_mean(error_ns)) * len(error_ns))


def _leaks(errors_ns: dict[str, np.ndarray]) -> dict[str, int]:
    """Sum each cause's errors by pair where they are more than noise (Bonferroni over causes)."""
    errors = {cause: error_ns for cause, error_ns in errors_ns.items() if error_ns.any()}
    return {
        cause: total
        for cause, error_ns in errors.items()
        if (total := _trimmed_total(error_ns))
        and abs(trimmed_mean(error_ns)) > trimmed_limit(error_ns, _FALSE_LEAKS / len(errors))
    }


_TRIMMED = 5
"""A trimmed mean leaves out one in so many values at each end."""


def trimmed_mean(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Mean along an axis without the fifth at either end."""
    n = values.shape[axis]
    cut = n // _TRIMMED
    middle = np.take(np.sort(values, axis=axis), range(cut, n - cut), axis=axis)
    return np.asarray(middle.mean(axis=axis))


def trimmed_limit(values: np.ndarray, error_rate: float) -> float:
    """Distance from 0 that noise alone takes a trimmed mean to so often; inf where unknown.

    Student's t on as many degrees of freedom as values left, less one, with the winsorized spread
    (Tukey and McLaughlin 1963).
    """
    n = len(values)
    cut = n // _TRIMMED
    freedom = n - 2 * cut - 1
    if freedom < 1:
        return math.inf
    ordered = np.sort(values)
    spread = np.clip(values, ordered[cut], ordered[n - cut - 1]).std(ddof=1)
    standard_error = float(spread) / n**0.5 / (1 - 2 * cut / n)
    return float(t_quantile(error_rate / 2, freedom) * standard_error)
