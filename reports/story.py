"""What a run was and where its time went, in words: shared by every report."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from chopper import wording as fmt
from chopper.attribution import FIRST, TRAINING
from chopper.causes import CAUSES, parents
from chopper.errors import printable
from chopper.reports.advice import advice
from chopper.reports.labels import full_label, sentence
from chopper.views import view

if TYPE_CHECKING:
    from chopper.analyzers.attributed import Attributed
    from chopper.attribution import CauseRow, Group, Level, StepKind, StepTime
    from chopper.storage.manifest import Finding

_IDEAL = "compute.ideal"
# Time that a model could not split: shown as what is not known, not as what to mend first.
_UNKNOWN = frozenset(
    {"compute.no_peak", "compute.unmodelled", "compute.vector.no_bytes", "idle.no_step"}
)
_WORDS: dict[Level, str] = {"op": "operator", "kernel": "kernel", "phase": "phase"}
_WORDS_IDLE: dict[Level, str] = {"op": "host in operator", "phase": "phase"}
_SHOWN_FIRST_RATIO = 0.2
"""Leading steps that were slow are shown from this share of the time on."""
_SEVERITY = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True)
class Evidence:
    """Where a part of a cause lies."""

    label: str
    """``operator``, ``kernel``, ``phase``, ``rank``, ``host in operator``."""
    name: str
    """As recorded."""
    shown: str
    """For people: kernels are shortened."""
    value: str
    """Its share of the cause, or how it compares."""

    def __str__(self) -> str:
        return f"{self.label} {self.shown}: {self.value}"


@dataclass(frozen=True, slots=True)
class TopCause:
    """One of the largest causes, told so that one can act on it."""

    id: str
    label: str
    title: str
    """The label with its context where it needs one: ``Transfer: at link peak``."""
    path: str
    """Its parents: ``Compute › Memory-bound kernels``."""
    per_window_ns: float
    share_ratio: float
    ci95_per_window_ns: tuple[float, float] | None
    measured: bool
    meaning: str
    advice: str
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class Story:
    """The first screen of a report."""

    title: str
    facts: tuple[str, ...]
    """What the run was: kind, workload, ranks, devices, steps, date."""
    unit: str
    """``step``, or ``window`` for traces without steps."""
    windows: int
    """Windows over all ranks: the divisor of every per-step figure."""
    observed_per_window_ns: float
    step: StepTime
    """The step time with and without tracing."""
    tracing: str
    """What the step time is of, and what tracing added to the steps below; empty where all are
    traced."""
    ideal_per_window_ns: float | None
    """None when unknown; ``ideal_reason`` says why."""
    ideal_reason: str | None
    ceiling: tuple[str, ...]
    """The theoretical and the achievable ceiling, a line each."""
    utilization: str
    """MFU and HFU against both, one line; empty when nothing is known of either."""
    verdict: str
    detail: str
    top: tuple[TopCause, ...]
    findings: tuple[Finding, ...]
    """Most severe first."""
    withheld: str
    """What is not claimed, one line; empty when nothing is withheld."""

    @property
    def traced_unit(self) -> str:
        """``traced step`` where untraced ones are the step time, else the unit."""
        return f"traced {self.unit}" if self.tracing else self.unit


class Views:
    """An attribution's groupings, each computed once."""

    def __init__(self, attribution: Attributed) -> None:
        self.attribution = attribution
        self._by: dict[str, list[Group]] = {}

    def by(self, level: Level) -> list[Group]:
        """Groups of one level, as ``Attribution.by``."""
        if level not in self._by:
            self._by[level] = self.attribution.by(level)
        return self._by[level]

    @property
    def windows(self) -> int:
        """Step windows over all ranks, at least 1."""
        return max(int(self.attribution.windows.num_rows), 1)


def tell(views: Views) -> Story:
    """Put an attribution into words; names from data cannot steer a terminal."""
    attribution = views.attribution
    windows = views.windows
    unit = _unit(attribution)
    observed = attribution.observed_ns / windows
    ideal = attribution.ideal_ns / windows if attribution.ideal_ns else None
    reason = None if ideal is not None else printable(_why_no_ideal(attribution))
    top = tuple(_top(views, row) for row in _largest(attribution, 3))
    step = attribution.step_time()
    headline = observed if step.untraced is None else float(step.untraced.value_ns)
    verdict, detail = _verdict(attribution, unit, headline, ideal, reason, step)
    ceilings, used = _ceilings(attribution)
    return Story(
        title=printable(attribution.run.manifest.name),
        facts=tuple(printable(fact) for fact in _facts(attribution, unit)),
        unit=unit,
        windows=windows,
        observed_per_window_ns=observed,
        step=step,
        tracing=tracing(step),
        ideal_per_window_ns=ideal,
        ideal_reason=reason,
        ceiling=tuple(printable(line) for line in ceilings),
        utilization=printable(used),
        verdict=verdict,
        detail=detail,
        top=top,
        findings=tuple(
            msgspec.structs.replace(f, message=printable(f.message))
            for f in sorted(attribution.findings, key=lambda f: _SEVERITY[f.severity])
        ),
        withheld=printable(_withheld(attribution)),
    )


def _withheld(attribution: Attributed) -> str:
    titles = [
        held.claim.title[:1].lower()
        + held.claim.title[1:]
        + (
            ""
            if held.ranks is None or len(held.ranks) == len(attribution.ranks)
            else f" (ranks {', '.join(map(str, held.ranks[:6]))})"
        )
        for held in attribution.withheld
    ]
    return f"Not claimed, for reasons among the findings: {', '.join(titles)}." if titles else ""


def _unit(attribution: Attributed) -> str:
    numbers = attribution.windows["number"]
    return "window" if numbers.null_count == len(numbers) else "step"


def _facts(attribution: Attributed, unit: str) -> tuple[str, ...]:
    run = attribution.run.manifest
    facts = ["recorded run" if run.kind == "recorded" else "imported trace"]
    if run.workload:
        facts.append(run.workload)
    ranks = len(attribution.ranks)
    world = {p.world_size for p in run.ranks if p.world_size}
    facts.append(
        f"{ranks} of {fmt.plural(max(world), 'rank')}"
        if world and max(world) > ranks
        else fmt.plural(ranks, "rank")
    )
    facts += devices(attribution)
    backends = sorted({p.backend for p in run.ranks if p.backend})
    if backends:
        facts.append(", ".join(backends))
    if unit == "step":
        kinds = attribution.step_time().kinds
        recorded = sum(len(k.numbers) for k in kinds)
        some = recorded > sum(len(k.traced) for k in kinds) > 0
        facts.append(
            f"{fmt.plural(recorded, 'step')}, {attribution.steps} traced"
            if some
            else fmt.plural(attribution.steps, "step")
        )
    if run.created_ns:
        moment = dt.datetime.fromtimestamp(run.created_ns / 1e9, tz=dt.UTC)
        facts.append(moment.strftime("%Y-%m-%d %H:%M UTC"))
    return tuple(facts)


def devices(attribution: Attributed) -> list[str]:
    """Names of the devices that ranks compute on, with their number where it is not one."""
    names: dict[str, int] = {}
    for rank in attribution.ranks:
        name = rank.device or ("CPU" if on_host(attribution, rank.rank) else "unknown device")
        names[name] = names.get(name, 0) + 1
    return [name if n == 1 else f"{n} × {name}" for name, n in names.items()]


def on_host(attribution: Attributed, rank: int) -> bool:
    """Whether a rank computed on the CPU: its device events are those of the host."""
    devices = attribution.run.table(rank, "device_event")["device_id"]
    return len(devices) > 0 and bool(devices[0].as_py() < 0)


_CEILINGS = {"theoretical": "Theoretical ceiling", "achievable": "Achievable ceiling"}


def _ceilings(attribution: Attributed) -> tuple[list[str], str]:
    """Both ceilings in words, and how much of them was used."""
    if not attribution.ceilings:
        return [], ""
    rows = [r for r in view(attribution, "utilization").to_pylist() if r["rank"] is None]
    lines, used, reasons = [], [], []
    for name, label in _CEILINGS.items():
        whole, *by_type = [r for r in rows if r["ceiling"] == name]
        rate, source, reason = whole["peak_flop_per_s"], whole["source"], whole["reason"]
        if source is None:
            lines.append(f"{label}: not known: {reason}")
            continue
        lines.append(f"{label}: {f'{fmt.flops(rate)} {_mix(by_type)}, ' if rate else ''}{source}")
        if whole["mfu_ratio"] is not None:
            share = f"MFU {fmt.ratio(whole['mfu_ratio'])}, HFU {fmt.ratio(whole['hfu_ratio'])}"
            used.append(f"{share} of the {name} ceiling")
        if reason:
            reasons.append(reason)
    if used:
        if attribution.step_time().untraced is not None:
            used[-1] += ", by the steps without a trace"
        return lines, "; ".join(used) + (f" ({reasons[0]})" if reasons else "")
    return lines, f"MFU and HFU: not known: {reasons[0]}" if reasons else ""


def _mix(by_type: list[dict[str, Any]]) -> str:
    """Data types of the FLOP: ``bf16``, or ``bf16 98.0 %, fp32 2.0 %``."""
    total = sum(r["hardware_flop"] for r in by_type)
    shares = [(r["dtype"], r["hardware_flop"] / total) for r in by_type if r["hardware_flop"]]
    main = [(name, share) for name, share in shares if share >= 0.0005]
    if len(main) < 2:
        return "".join(name for name, _ in main)
    return ", ".join(f"{name} {fmt.ratio(share)}" for name, share in main)


def _why_no_ideal(attribution: Attributed) -> str:
    for finding in attribution.findings:
        if any(claim.startswith(_IDEAL) or claim == "compute" for claim in finding.withholds):
            return finding.message
    without = [r for r in attribution.ranks if r.peak_source is None]
    if without:
        names = sorted({r.device for r in without if r.device})
        if names:
            return f"no peak is known for {', '.join(names)}"
        if all(on_host(attribution, r.rank) for r in without):
            return "the CPU of this run was not calibrated (chopper calibrate measures what it achieves)"
        return "the trace does not say which device it was recorded on"
    times = {row.id: row.time_ns for row in attribution.causes()}
    if not times.get("compute"):
        return "nothing was computed on the device"
    if times.get("compute.no_peak"):
        return "the shapes or the data types of the model's products were not recorded"
    return "no matrix product, convolution or attention was recognised"


def _verdict(
    attribution: Attributed,
    unit: str,
    observed: float,
    ideal: float | None,
    reason: str | None,
    step: StepTime,
) -> tuple[str, str]:
    if not attribution.observed_ns:
        if any(f.code == "run.no_trace" for f in attribution.findings):
            return "Readings without a kernel trace: there is nothing to attribute.", ""
        return "Nothing ran on the device in this trace.", ""
    noun = "A step" if unit == "step" else "The recorded window"
    mean = " on average" if attribution.windows.num_rows > 1 else ""
    if step.untraced is not None:
        mean = ""
        if len(step.kinds) > 1 and step.kind != TRAINING:
            noun = f"A step of {step.kind}"
    if ideal is None:
        return (
            f"{noun} takes {fmt.duration(observed)}{mean}; how fast it could be is not known.",
            sentence(reason or ""),
        )
    verdict = (
        f"{noun} takes {fmt.duration(observed)}{mean}; "
        f"at peak, its math would take {fmt.duration(ideal)}."
    )
    detail = (
        f"That is {fmt.factor(observed / ideal)} the ideal: {fmt.ratio(ideal / observed)} of the "
        f"time is model math at the device's peak, {fmt.duration(observed - ideal)} is the gap."
    )
    times = {row.id: row.time_ns for row in attribution.causes()}
    missing = times.get("compute.no_peak", 0) + times.get("compute.unmodelled", 0)
    if missing > 0.01 * attribution.observed_ns:
        share = missing / attribution.observed_ns
        detail += (
            f" The ideal is a lower bound: {fmt.ratio(share)} of the time is computing "
            "that no model covers."
        )
    return verdict, detail


def tracing(step: StepTime) -> str:
    """What the step time is of, and what tracing added to the steps that show its causes."""
    untraced = step.untraced
    if untraced is None or step.traced_ns is None or step.tracing_ns is None:
        return ""
    said = (
        f"The step time is the {untraced.statistic} of {fmt.plural(untraced.count, 'step')} without a "
        "trace" + (", which are uneven" if untraced.statistic == "mean" else "") + "; half "
        f"of them took {fmt.duration(untraced.low_ns)} to {fmt.duration(untraced.high_ns)}. The "
        f"causes are those of {fmt.plural(step.traced_count, 'traced step')} of "
        f"{fmt.duration(step.traced_ns)} on average: tracing itself "
    )
    interval = ""
    if step.tracing_ci95_ns is not None:
        low, high = step.tracing_ci95_ns
        if low <= 0 <= high:
            return said + "made no difference that can be told from noise."
        interval = f", 95 % interval {fmt.duration(low)} to {fmt.duration(high)}"
    if step.is_slow_nearby:
        return (
            said.removesuffix("tracing itself ")
            + f"the untraced steps next to them took {fmt.duration(step.nearby_ns)}, so most of the "
            "difference is not tracing; --steps records other ones."
        )
    verb = "added" if step.tracing_ns >= 0 else "took off"
    share = fmt.ratio(abs(step.tracing_ratio or 0.0))
    return f"{said}{verb} {fmt.duration(abs(step.tracing_ns))} ({share}{interval})."


def tracing_rows(story: Story) -> list[tuple[str, str, str, str]]:
    """Rows below the sum of the causes: (label, time, share, 95 % interval)."""
    step = story.step
    if not story.tracing or step.untraced is None or step.tracing_ns is None:
        return []
    observed = max(story.observed_per_window_ns, 1)
    interval = fmt.UNKNOWN
    if step.tracing_ci95_ns is not None:
        interval = " – ".join(fmt.duration(v) for v in step.tracing_ci95_ns)
    return [
        (
            "tracing, at slower steps" if step.is_slow_nearby else "tracing itself (profiler)",
            fmt.duration(step.tracing_ns),
            fmt.ratio(step.tracing_ns / observed),
            interval,
        ),
        (
            f"{story.unit} without a trace",
            fmt.duration(step.untraced.value_ns),
            fmt.ratio(step.untraced.value_ns / observed),
            f"{fmt.duration(step.untraced.low_ns)} – {fmt.duration(step.untraced.high_ns)}",
        ),
    ]


def kind_rows(step: StepTime) -> list[tuple[str, str, str, str, str]]:
    """Rows of the table of step kinds: (kind, steps, untraced median, share, traced).

    Empty where all steps are of one kind, leading ones that were slow aside.
    """
    shown = [k for k in step.kinds if k.name != FIRST or k.share_ratio >= _SHOWN_FIRST_RATIO]
    if len(shown) < 2:
        return []
    return [
        (
            k.name,
            str(len(k.numbers)),
            fmt.UNKNOWN if k.untraced is None else fmt.duration(k.untraced.value_ns),
            fmt.ratio(k.share_ratio),
            "none"
            if not k.traced
            else f"{len(k.traced)}, {fmt.duration(k.traced_ns)}, mostly {_mostly(k)}",
        )
        for k in shown
    ]


KIND_HEADER = ("kind of step", "steps", "untraced", "of time", "traced")
"""``untraced``: the step time of those without a trace."""


def _mostly(kind: StepKind) -> str:
    cause, time_ns = max(kind.causes_ns.items(), key=lambda kv: kv[1])
    return f"{full_label(cause)} ({fmt.ratio(time_ns / sum(kind.causes_ns.values()))})"


def _largest(attribution: Attributed, number: int) -> list[CauseRow]:
    rows = [r for r in attribution.leaves() if r.id != _IDEAL and r.time_ns > 0]
    known = [r for r in rows if r.id not in _UNKNOWN]
    unknown = [r for r in rows if r.id in _UNKNOWN]
    return (known + unknown)[:number]


def _top(views: Views, row: CauseRow) -> TopCause:
    windows = views.windows
    return TopCause(
        id=row.id,
        label=row.label,
        title=full_label(row.id),
        path=" › ".join(CAUSES[p].label for p in reversed(parents(row.id))),
        per_window_ns=row.time_ns / windows,
        share_ratio=row.share_ratio or 0.0,
        ci95_per_window_ns=None
        if row.ci95_ns is None
        else (row.ci95_ns[0] / windows, row.ci95_ns[1] / windows),
        measured=row.measured,
        meaning=CAUSES[row.id].doc,
        advice=advice(row.id),
        evidence=tuple(evidence(views, row.id)),
    )


def evidence(views: Views, cause: str) -> list[Evidence]:
    """Where most of a cause's time lies: operator, kernel, phase, rank."""
    found: list[Evidence] = []
    for level, word in (_WORDS_IDLE if cause.startswith("idle") else _WORDS).items():
        most = _dominant(views.by(level), cause)
        if most is not None:
            name, share = str(most[0]), most[1]
            shown = fmt.kernel_name(name) if level == "kernel" else name
            # On CPU-only runs an event's name is its operator's: once is enough.
            if all(e.name != name for e in found):
                found.append(Evidence(word, name, printable(shown), fmt.ratio(share)))
    if cause == "communication.wait":
        found += _straggler(views.attribution)
    ranks = views.by("rank")
    if len(ranks) > 1:
        times = {str(g.key): g.causes.get(cause, 0) for g in ranks}
        mean = sum(times.values()) / len(times)
        worst, time_ns = max(times.items(), key=lambda kv: kv[1])
        if mean and time_ns > 1.25 * mean:
            found.append(
                Evidence("rank", worst, printable(worst), f"{fmt.factor(time_ns / mean)} the mean")
            )
    return found


def _straggler(attribution: Attributed) -> list[Evidence]:
    """Who came last, and what that rank spent longer on than the others."""
    from chopper.analyzers.views.stragglers import worst

    found = worst(view(attribution, "stragglers"))
    if found is None:
        return []
    value = (
        f"came last in {fmt.ratio(found.late_ratio)} of the collectives, "
        f"caused {fmt.ratio(found.share_ratio)} of the waiting"
    )
    if found.cause is not None and found.excess_ns:
        per_step = found.excess_ns / max(attribution.steps, 1)
        unit = _unit(attribution)
        value += f"; {fmt.duration(per_step)} more per {unit} in {full_label(found.cause).lower()}"
    return [Evidence("straggler rank", str(found.rank), str(found.rank), value)]


def _dominant(groups: list[Group], cause: str) -> tuple[str | int, float] | None:
    total = sum(g.causes.get(cause, 0) for g in groups)
    named = [g for g in groups if g.key is not None]
    if not total or not named:
        return None
    best = max(named, key=lambda g: g.causes.get(cause, 0))
    time_ns = best.causes.get(cause, 0)
    if time_ns < 0.05 * total or best.key is None:
        return None
    return best.key, time_ns / total


def coverage_label(name: str) -> str:
    """The name of a coverage ratio for people."""
    label = name.removesuffix("_ratio").replace("_", " ").replace(".", " ")
    return label[:1].upper() + label[1:]
