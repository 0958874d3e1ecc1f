"""Injections into a discrete-event model of a training job.

Each case runs the model without and with an injection, writes both as recorded runs, attributes
them through the public path, and compares the two differences: in the model's books, and in the
attribution.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from chopper.causes import LEAVES
from chopper.storage.caches import scratch
from tests.known_causes.model.injections import INJECTIONS, MIXES
from tests.known_causes.model.job import simulate
from tests.known_causes.model.ledger import ledger
from tests.known_causes.model.machine import FLAVOURS
from tests.known_causes.model.writer import write
from tests.known_causes.results import ALONE, MIXED, Case, judged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from chopper.analyzers.attribution import Attribution
    from tests.known_causes.model.plan import Plan
    from tests.known_causes.model.records import Recording

_QUICK = (
    "data_stall",
    "straggler",
    "slow_link",
    "clock_power_cap",
    "contention",
    "recomputation",
    "stall_behind_queue",
    "mixed_host",
)
_INJECTIONS = INJECTIONS | MIXES
_NOT_CLAIMED = "compute.efficiency.rest"
"""Cause that holds the time of a factor that is refused."""
_NOT_MEASURED = re.compile(r"; ([^;(]+) not measured \(([^;]*)\)(?=;|$)")


def injections() -> dict[str, str]:
    """Name of each injection → id of the cause that it belongs to; of mixes, of all of them."""
    return {
        name: ",".join(part.cause for part in injection.parts or (injection,))
        for name, injection in _INJECTIONS.items()
    }


def run_cases(
    *,
    injections: Sequence[str],
    magnitudes: Sequence[str],
    seed: int = 0,
    quick: bool = False,
) -> Iterator[Case]:
    """Inject and attribute; yield each case as it is done.

    ``quick`` takes one magnitude and flavour in turn of the most telling injections.
    """
    every = [(flavour, magnitude) for flavour in FLAVOURS for magnitude in magnitudes]
    chosen = [n for n in injections if not quick or n in _QUICK]
    for number, name in enumerate(chosen):
        in_turn = [every[number % len(every)]] if quick and every else every
        for flavour, magnitude in in_turn:
            yield from _cases(name, magnitude, flavour, seed)


def _cases(name: str, magnitude: str, flavour: str, seed: int) -> Iterator[Case]:
    whole, mixed = _INJECTIONS[name], name in MIXES
    without, injected = (_run(p) for p in whole.plans(magnitude, flavour=flavour, seed=seed))
    truth = _difference(injected.truth, without.truth)
    attributed = _difference(injected.attributed, without.attributed)
    for injection in whole.parts or (whole,):
        cause = injection.cause
        own = [c for c in LEAVES if c == cause or c.startswith(cause + ".")]
        total = sum(truth.get(c, 0) for c in own)
        leaked = {
            c: attributed.get(c, 0) - truth.get(c, 0)
            for c in sorted(truth.keys() | attributed.keys())
            if c not in own and attributed.get(c, 0) != truth.get(c, 0)
        }
        refusal = injected.refusals.get(injection.factor) if injection.factor else None
        if refusal is not None:
            leaked.pop(_NOT_CLAIMED, None)
        case = Case(
            suite="synthetic",
            injection=name,
            cause=cause,
            magnitude=magnitude,
            flavour=flavour,
            injected_ns=total,
            recovered_ns=sum(attributed.get(c, 0) for c in own),
            leaked_ns=leaked,
            scale_ns=None if mixed else injection.scale_ns(magnitude),
            leak_scale_ns=sum(truth.values()) if mixed else None,
            mixed=mixed,
            bar=MIXED if mixed else ALONE,
        )
        yield judged(case) if refusal is None else _refused(case, refusal)


def _refused(case: Case, reason: str) -> Case:
    """Nothing may be claimed for it, and nothing of it elsewhere."""
    claimed = judged(msgspec.structs.replace(case, injected_ns=0, scale_ns=case.injected_ns))
    if claimed.status == "missed":
        return msgspec.structs.replace(
            case, status="missed", reason=f"refused, but {claimed.reason}"
        )
    return msgspec.structs.replace(case, status="refused", reason=reason)


def _difference(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {c: a.get(c, 0) - b.get(c, 0) for c in a.keys() | b.keys()}


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One run of the model: nanoseconds of causes in its books and by the attribution; refusals."""

    truth: dict[str, int]
    attributed: dict[str, int]
    refusals: dict[str, str]


@lru_cache(maxsize=128)
def _run(plan: Plan) -> _Outcome:
    recording, attribution = run_model(plan)
    pieces = attribution.pieces.group_by("cause").aggregate([("time_ns", "sum")])
    time_ns = dict(zip(pieces["cause"].to_pylist(), pieces["time_ns_sum"].to_pylist(), strict=True))
    return _Outcome(ledger(recording), time_ns, refusals(attribution))


def run_model(plan: Plan) -> tuple[Recording, Attribution]:
    """Run the model, write what it did as a recorded run, and attribute that."""
    from chopper.pipeline import attribute, read

    recording = simulate(plan)
    with scratch("validate") as folder:
        write(recording, folder)
        return recording, attribute(read(folder)).all_steps


def refusals(attribution: Attribution) -> dict[str, str]:
    """Factor of compute → why the attribution did not measure it."""
    basis = attribution.bases[_NOT_CLAIMED].text
    return {match[1]: match[2] for match in _NOT_MEASURED.finditer(basis)}
