"""A run beside the earlier runs of the same job: slower than these runs vary, or not?

Runs differ more than the steps within one: another node, warmer devices, another layout of memory.
So the spread is that of whole runs. The step times of one level, as logarithms, are taken as
independent with a common mean and spread; a run is a regression where it lies above the prediction
interval of Student's t for one further run, which noise alone exceeds once in `1 / ERROR_RATE` runs
if it is normal, and at most once in a hundred if its tails are heavy (``tests/analyzers/compare/
test_history.py`` simulates both). A level ends where a user accepted another one, and where three
runs in a row lie beyond the interval on one side. Runs that each are a little slower than the last
never lie above it: the latest are also compared with the best level that was held.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.compare import same_work
from chopper.analyzers.compare.result import Check, percent, signed
from chopper.analyzers.compare.same_work import Work, cut
from chopper.analyzers.events.steps import steps_of
from chopper.analyzers.trace.columns import ints
from chopper.analyzers.views.host import sampled
from chopper.causes import CAUSES, CODES
from chopper.errors import InputError
from chopper.experiments.judgement import tolerated_cores
from chopper.quantities import digits
from chopper.statistics import Prediction, drift_of, median_error, predict_run
from chopper.tables.ranges import (
    MOST_RANKS,
    TOTAL_MOST_NS,
    Count,
    Duration,
    Ranks,
    Ratio,
    Share,
    Time,
)

SCHEMA = "chopper.history/1"
JUDGEMENT_SCHEMA = "chopper.judgement/1"
ERROR_RATE = 0.0007
"""How often a run without a change would be a regression, if noise were normal."""
MIN_RUNS = 5
"""Fewest earlier runs for a verdict."""
_MOST_RUNS = 30
"""Latest runs that count: older ones say little about today's machine."""
_CONFIRMED = 3
"""So many runs in a row beyond the interval are a new level."""
_LEAST_SPREAD = 0.001
"""Spread between runs to assume at least, as a ratio: identical times are luck or one trace."""
_POWER = 0.9
_LESS_CERTAIN = 2.0
"""A standard error over steps that is larger than the usual one by this factor counts."""
_CLOCK_SHARE = 0.5
"""A device's clock that fell by this share of the slow-down makes the machine noisy."""
_NAMED = 3

Verdict = Literal[
    "same", "regression", "improvement", "changed work", "noisy machine", "too few runs"
]


_MOST_LOG = math.log(TOTAL_MOST_NS)
_Duration = Annotated[int, msgspec.Meta(gt=0, le=TOTAL_MOST_NS)]


class PastRun(msgspec.Struct, kw_only=True, frozen=True):
    """What a history keeps of a run: one JSON file, schema ``chopper.history/1``."""

    schema: str = SCHEMA
    id: str
    """Digest of its step times: one recording counts once, whatever its directory is called."""
    name: str
    time_ns: Time
    """Unix time of its first traced step."""
    steps: Count
    """Steps that its step time is of."""
    untraced: bool
    """They ran without a trace."""
    median_ns: _Duration
    mean_ns: _Duration
    uneven: bool
    """Steps come in flights, so that the mean is the step time, not the median."""
    error_ratio: Share | None
    """Standard error of the median over steps, at most 1; None with fewer than three."""
    causes_ns: dict[str, Duration]
    """Leaf cause → time per traced step and rank."""
    work: Work
    cores: Ranks | None
    """Cores of the host."""
    other_cores: Ratio | None
    """Cores that other programs, and the hypervisor, used during the run: of the busiest host."""
    clock_hz: Annotated[int, msgspec.Meta(gt=0, le=10**12)] | None
    """Median clock of the devices during the run."""
    accepted: bool = False
    """A user said that this is a level of its own."""


def past_run(run: Attribution) -> PastRun:
    """Return what a history keeps of a run.

    Raises:
        InputError: no step of it is known.
    """
    detailed, run = run.detail.of_kind(), run.of_kind()
    time = run.step_time()
    lengths = run.step_time_ns() if time.untraced is None else [*time.untraced.lengths_ns]
    if not lengths or min(lengths) <= 0:
        raise InputError(
            f"{run.source}: has no steps with a duration; a history compares step times"
        )
    error_ns = median_error(np.array(lengths, dtype=np.float64))
    mean_ns = statistics.fmean(lengths)
    windows = max(sum(rank.steps for rank in run.ranks), 1)
    starts = ints(run.windows, "start_ns")
    parts = run.recording.manifest.ranks
    cores = [digits(part.environment.get("cores_allowed", "")) for part in parts]
    return PastRun(
        id=hashlib.sha256(repr((int(starts.min()), lengths)).encode()).hexdigest()[:16],
        name=run.recording.manifest.name,
        time_ns=int(starts.min()),
        steps=len(lengths),
        untraced=time.untraced is not None,
        median_ns=round(statistics.median(lengths)),
        mean_ns=round(mean_ns),
        uneven=time.untraced is not None and time.untraced.statistic == "mean",
        error_ratio=None if error_ns is None else min(error_ns / statistics.median(lengths), 1.0),
        causes_ns={row.id: row.time_ns // windows for row in run.leaves()},
        work=same_work.work_of(detailed, cut(detailed)),
        cores=max((count for count in cores if count and count <= MOST_RANKS), default=None),
        other_cores=_other_cores(run),
        clock_hz=_clock_hz(run),
    )


def _other_cores(run: Attribution) -> float | None:
    """Return busy cores less those of the ranks, of the busiest host; None where unknown."""
    hosts: dict[str | None, list[int]] = {}
    for part in run.recording.manifest.ranks:
        hosts.setdefault(part.host, []).append(part.rank)
    other_cores = []
    for ranks in hosts.values():
        steps = [steps_of(run, rank) for rank in ranks]
        bounds = [
            (int(ints(s, "start_ns").min()), int(ints(s, "end_ns").max()))
            for s in steps
            if s.num_rows
        ]
        if not bounds:
            return None
        start, end = np.array([min(b[0] for b in bounds)]), np.array([max(b[1] for b in bounds)])
        other = 0.0
        for at, rank in enumerate(ranks):
            of_rank = {name: of.mean(start, end) for name, of in sampled(run, rank).items()}
            busy, rank_cores = of_rank.get("minimum_cores"), of_rank.get("rank_cores")
            if rank_cores is None or (at == 0 and busy is None):
                return None  # without asking all ranks of a large run
            if at == 0:
                other = (busy or 0.0) + (of_rank.get("stolen_cores") or 0.0)
            other -= rank_cores
        other_cores.append(max(other, 0.0))
    return max(other_cores, default=None)


def _clock_hz(run: Attribution) -> int | None:
    """Return the median clock of all devices while any step ran; None where it was not sampled."""
    clocks = []
    for rank in run.recording.ranks:
        samples, steps = run.recording.table(rank, "device_clock"), steps_of(run, rank)
        if samples.num_rows and steps.num_rows:
            time_ns, clock = ints(samples, "time_ns"), ints(samples, "sm_clock_hz", null=-1)
            inside = time_ns >= ints(steps, "start_ns").min()
            inside &= (time_ns <= ints(steps, "end_ns").max()) & (clock > 0)
            clocks.append(clock[inside])
    every = np.concatenate(clocks) if clocks else np.zeros(0)
    return round(float(np.median(every))) if len(every) else None


@dataclass(frozen=True, slots=True)
class Growth:
    """One leaf cause of a run beside its mean in the reference; ns per traced step and rank."""

    id: str
    reference_ns: int
    run_ns: int
    limit_ns: int
    """A larger growth is told from this cause's own noise."""

    @property
    def difference_ns(self) -> int:
        """How much longer the run spent there."""
        return self.run_ns - self.reference_ns

    @property
    def told(self) -> bool:
        """Tell whether it grew beyond its own noise."""
        return self.difference_ns > self.limit_ns


@dataclass(frozen=True, slots=True)
class Judgement:
    """A run beside its history.

    Attributes:
        run: the run.
        verdict: what it is.
        reason: why, as a sentence.
        reference: the earlier runs of the current level, oldest first.
        statistic: the step time is the mean or the median of the steps.
        reference_ns: their mean step time; None without any.
        spread_ratio: standard deviation between runs; this and what follows: None with too few.
        limit_ratio: a larger change is a regression.
        detectable_ratio: a slow-down that is found in 90 % of cases.
        find_ratio: the slow-down that must be found.
        held_ns: the best level that several runs in a row held since a user accepted one; None with
            fewer than ten runs since.
        drift_ratio: by how much each of the latest runs, this one included, is slower at least.
        drifted: that is no noise, and a slow-down that must be found.
        causes: leaf causes, those that grew most first.
        checks: what differs from the latest earlier run; what makes it other work first.
        notes: earlier runs that did not count.
    """

    run: PastRun
    verdict: Verdict
    reason: str
    reference: tuple[PastRun, ...] = ()
    statistic: Literal["mean", "median"] = "median"
    reference_ns: int | None = None
    spread_ratio: float | None = None
    limit_ratio: float | None = None
    detectable_ratio: float | None = None
    find_ratio: float = 0.0
    held_ns: int | None = None
    drift_ratio: float | None = None
    drifted: bool = False
    causes: tuple[Growth, ...] = ()
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def step_ns(self) -> int:
        """Step time of the run."""
        return _step_ns(self.run, self.statistic)

    @property
    def change_ratio(self) -> float | None:
        """Change of the step time."""
        return None if self.reference_ns is None else self.step_ns / self.reference_ns - 1

    @property
    def failed(self) -> bool:
        """Tell whether a gate fails."""
        return self.verdict in ("regression", "changed work")

    @property
    def undecided(self) -> bool:
        """Tell whether nothing could be decided."""
        return self.verdict in ("noisy machine", "too few runs")

    @property
    def sentence(self) -> str:
        """Verdict and reason."""
        return f"{self.verdict.capitalize()}: {self.reason}."

    def to_dict(self) -> dict[str, Any]:
        """The documented JSON form, schema ``chopper.judgement/1``."""
        values = {
            name: getattr(self, name)
            for name in (
                *("verdict", "reason", "failed", "undecided", "statistic", "step_ns"),
                *("reference_ns", "change_ratio", "spread_ratio", "limit_ratio"),
                *("detectable_ratio", "find_ratio", "held_ns", "drift_ratio", "drifted"),
            )
        }
        return {
            "schema": JUDGEMENT_SCHEMA,
            **values,
            "run": msgspec.to_builtins(self.run),
            "reference": [{"id": run.id, "name": run.name} for run in self.reference],
            "causes": [
                asdict(c) | {"difference_ns": c.difference_ns, "told": c.told} for c in self.causes
            ],
            "checks": [asdict(c) for c in self.checks],
            "notes": [*self.notes],
        }


def judge(run: PastRun, history: Sequence[PastRun], *, find_ratio: float) -> Judgement:
    """Judge a run by the earlier runs of its job.

    Args:
        run: the run; an entry of the history with the same id is left out.
        history: earlier runs, in any order.
        find_ratio: slow-down that must be found; where the noise hides it, the machine is noisy.
    """
    once = {h.id: h for h in history if h.id != run.id}
    earlier = sorted(once.values(), key=lambda h: h.time_ns)
    alike = [h for h in earlier if _machine(h) == _machine(run)]
    checked = {h.id: same_work.in_order(same_work.check_work(h.work, run.work)) for h in alike}
    same = [h for h in alike if not any(map(_is_other_work, checked[h.id]))]
    notes = []
    if len(alike) < len(earlier):
        left_out = fmt.plural(len(earlier) - len(alike), "earlier run")
        notes.append(f"{left_out} not counted: on other machines, or timed with a trace")
    if same and len(same) < len(alike):
        left_out = fmt.plural(len(alike) - len(same), "earlier run")
        notes.append(f"{left_out} not counted: other work")
    latest = checked[(same or alike)[-1].id] if alike else ()
    base = Judgement(
        run,
        "too few runs",
        "",
        find_ratio=find_ratio,
        checks=tuple(check for check in latest if check.status == "differs"),
        notes=tuple(notes),
    )
    if alike and not same:
        differences = "; ".join(
            f"{c.label}: {c.shown('a')} there, {c.shown('b')} here"
            for c in latest
            if _is_other_work(c)
        )
        count = fmt.plural(len(alike), "earlier run")
        return replace(
            base, verdict="changed work", reason=f"none of {count} did it ({differences})"
        )
    return _judged(base, same)


def _machine(run: PastRun) -> tuple[object, ...]:
    return run.work.device, run.cores, run.untraced


def _is_other_work(check: Check) -> bool:
    """Tell whether a difference changes the step time by itself: 3 % more FLOP do."""
    return check.status == "differs" and (check.withholds or check.id == "flop")


def _step_ns(run: PastRun, statistic: str) -> int:
    return run.mean_ns if statistic == "mean" else run.median_ns


def _judged(base: Judgement, same: list[PastRun]) -> Judgement:
    """Judge by earlier runs of the same work on the same machine, oldest first."""
    run = base.run
    uneven = sum(h.uneven for h in (*same, run))
    statistic: Literal["mean", "median"] = "mean" if 2 * uneven > len(same) + 1 else "median"
    base = _with_drift(replace(base, statistic=statistic), same)
    levels = _levels(same[-_MOST_RUNS:], statistic)
    prediction = _predicted(levels, statistic)
    if prediction is None:
        count = fmt.plural(len(same), "earlier run")
        return replace(
            base,
            reason=f"{count} of this work on this machine; {MIN_RUNS} are needed",
            statistic=statistic,
            reference=tuple(levels[-1]) if levels else (),
        )
    error = float(prediction.error)
    spread = error / math.sqrt(1 + 1 / len(levels[-1]))
    typical = [h.error_ratio for h in levels[-1] if h.error_ratio is not None]
    if run.error_ratio is not None and typical:
        usual = statistics.median(typical)
        if run.error_ratio > _LESS_CERTAIN * usual:  # a run of fewer steps, say
            error = math.sqrt(error**2 + run.error_ratio**2 - usual**2)
    prediction = replace(prediction, error=np.array(error))
    limit = float(prediction.limit(ERROR_RATE))
    judged = replace(
        base,
        statistic=statistic,
        reference=tuple(levels[-1]),
        reference_ns=round(math.exp(prediction.level)),
        spread_ratio=spread,
        limit_ratio=_change(limit),
        detectable_ratio=_change(float(prediction.detectable(ERROR_RATE, _POWER))),
        causes=_growths(run, levels),
    )
    return _with_verdict(judged)


def _with_drift(base: Judgement, same: list[PastRun]) -> Judgement:
    """Compare the latest runs with the best level held since a user accepted one."""
    accepted = max((i for i, h in enumerate(same) if h.accepted), default=0)
    times = [float(_step_ns(h, base.statistic)) for h in (*same[accepted:], base.run)]
    drift = drift_of(np.log(times), _LEAST_SPREAD)
    if drift is None:
        return base
    ratio = _change(drift.rise)
    drifted = drift.rise > drift.limit and ratio > base.find_ratio
    return replace(base, held_ns=round(math.exp(drift.held)), drift_ratio=ratio, drifted=drifted)


def _change(log: float) -> float:
    """Return the change that a difference of logarithms is; none of durations is larger."""
    return math.expm1(min(log, _MOST_LOG))


def _with_verdict(judged: Judgement) -> Judgement:
    """Name the verdict of a run that lies above, below or within the interval."""
    side = _side(judged)
    assert judged.reference_ns is not None
    assert judged.detectable_ratio is not None
    assert judged.limit_ratio is not None
    times = f"{fmt.duration(judged.reference_ns)} to {fmt.duration(judged.step_ns)} per step"
    times += f" ({signed(judged.change_ratio)})"
    of = fmt.plural(len(judged.reference), "run")
    power = f"a slow-down of {percent(judged.detectable_ratio)} would be found in 90 % of cases"
    verdict: Verdict
    if judged.drifted and side <= 0:
        noise = _disturbances(judged)
        verdict = "noisy machine" if noise else "regression"
        more = percent(judged.drift_ratio or 0.0)
        reason = (
            f"the job has become slower little by little: {fmt.duration(judged.held_ns or 0)} per "
            f"step were held, and each of the latest runs takes {more} longer or more "
            f"({fmt.duration(judged.step_ns)} now)"
        )
        reason += f"; {' and '.join(noise)}: repeat the run" if noise else ""
    elif side > 0:
        noise = _disturbances(judged)
        verdict = "noisy machine" if noise else "regression"
        reason = f"{times}, more than the {percent(judged.limit_ratio)} that runs vary by; "
        reason += f"{' and '.join(noise)}: repeat the run" if noise else _because(judged)
    elif side < 0:
        verdict, reason = "improvement", f"{times}, more than runs vary by"
    elif judged.detectable_ratio > judged.find_ratio:
        verdict = "noisy machine"
        reason = (
            f"{times} is within the noise of {of}, which is too large: {power}, "
            f"one of {percent(judged.find_ratio)} might not"
        )
    else:
        verdict, reason = "same", f"{times} is within the noise of {of}; {power}"
    return replace(judged, verdict=verdict, reason=reason)


def _disturbances(judged: Judgement) -> list[str]:
    """Return what happened on the machine during the run that did not in the earlier ones."""
    run, disturbances = judged.run, []
    usual_cores = [h.other_cores for h in judged.reference if h.other_cores is not None]
    if run.other_cores is not None and usual_cores and run.cores:
        usual = statistics.median(usual_cores)
        if run.other_cores - usual >= tolerated_cores(run.cores):
            disturbances.append(
                f"other programs used {run.other_cores:.1f} of {run.cores} cores, {usual:.1f} in "
                "earlier runs"
            )
    clocks = [h.clock_hz for h in judged.reference if h.clock_hz is not None]
    if run.clock_hz is not None and clocks:
        usual_hz = statistics.median(clocks)
        change = judged.change_ratio or 0.0
        if judged.drifted:
            change = max(change, judged.drift_ratio or 0.0)
        if 1 - run.clock_hz / usual_hz >= _CLOCK_SHARE * change:
            disturbances.append(
                f"the device's clock was {fmt.cell('clock_hz', run.clock_hz)}, "
                f"{fmt.cell('clock_hz', usual_hz)} in earlier runs"
            )
    return disturbances


def _because(judged: Judgement) -> str:
    """Return the causes that grew."""
    grew = [c for c in judged.causes if c.told][:_NAMED]
    causes = ", ".join(
        f"{fmt.inside(CAUSES[c.id].label)} by {fmt.duration(c.difference_ns)}" for c in grew
    )
    return f"{causes} longer in traced steps" if grew else "no cause grew beyond its own noise"


def _levels(runs: list[PastRun], statistic: str) -> list[list[PastRun]]:
    """Cut runs, oldest first, into levels; the last one is current."""
    levels: list[list[PastRun]] = []
    for run in runs:
        if run.accepted or not levels:
            levels.append([run])
            continue
        levels[-1].append(run)
        *before, last = levels
        latest = last[-_CONFIRMED:]
        prediction = (
            _predicted([*before, last[:-_CONFIRMED]], statistic) if last[:-_CONFIRMED] else None
        )
        if prediction is not None:
            limit = float(prediction.limit(ERROR_RATE))
            off = [math.log(_step_ns(h, statistic)) - float(prediction.level) for h in latest]
            if min(off) > limit or max(off) < -limit:
                levels[-1:] = [last[:-_CONFIRMED], latest]
    return levels


def _predicted(levels: list[list[PastRun]], statistic: str) -> Prediction | None:
    """Predict the logarithm of a further run's step time; None with too few runs."""
    if sum(map(len, levels)) - len(levels) < MIN_RUNS - 1:
        return None
    times = [np.log([float(_step_ns(run, statistic)) for run in level]) for level in levels]
    return predict_run(times, _LEAST_SPREAD)


def _growths(run: PastRun, levels: list[list[PastRun]]) -> tuple[Growth, ...]:
    """Return each leaf cause beside its noise, the largest growth first."""
    reference = levels[-1]
    known = {*run.causes_ns, *(id for h in reference for id in h.causes_ns)}
    ids = sorted(known & CODES.keys())  # another version may have others
    if not ids:
        return ()
    values = [
        np.array([[float(h.causes_ns.get(id, 0)) for h in level] for id in ids]) for level in levels
    ]
    prediction = predict_run(values, _LEAST_SPREAD * sum(run.causes_ns.values()))
    rows = zip(ids, prediction.level.tolist(), prediction.limit(ERROR_RATE).tolist(), strict=True)
    growths = [
        Growth(id, round(level), run.causes_ns.get(id, 0), round(limit))
        for id, level, limit in rows
    ]
    return tuple(sorted(growths, key=lambda g: -g.difference_ns))


def adds(judgement: Judgement) -> bool:
    """Tell whether a run may join the history unasked: its time belongs to the job's noise."""
    return not judgement.failed and _side(judgement) <= 0


def is_new_level(judgement: Judgement) -> bool:
    """Tell whether a run that is accepted begins a level."""
    return judgement.verdict == "changed work" or judgement.drifted or _side(judgement) != 0


def _side(judgement: Judgement) -> int:
    """Return 1 above the interval, −1 below it, 0 within it and where there is none."""
    limit, change = judgement.limit_ratio, judgement.change_ratio
    if limit is None or change is None or abs(math.log1p(change)) <= math.log1p(limit):
        return 0
    return 1 if change > 0 else -1
