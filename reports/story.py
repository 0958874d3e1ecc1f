"""Story of a run in words: its kind, and where its time went."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chopper import wording as fmt
from chopper.attribution import FIRST, TRAINING
from chopper.causes import CAUSES, parents
from chopper.reports.labels import advice, by_severity, full_label, sentence
from chopper.views import views

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from chopper.analyzers.attributed import Attributed
    from chopper.attribution import CauseRow, Group, StepKind, StepTime
    from chopper.causes import Level
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


@dataclass(frozen=True, slots=True)
class Evidence:
    """The operator, kernel, phase or rank that holds most of a cause."""

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
    """One of the largest causes, with what to do about it."""

    row: CauseRow
    per_window_ns: float
    ci95_per_window_ns: tuple[float, float] | None
    advice: str
    evidence: tuple[Evidence, ...]

    @property
    def title(self) -> str:
        """The label with its context where it needs one: ``Transfer: at link peak``."""
        return full_label(self.row.id)

    @property
    def path(self) -> str:
        """The labels of its parents: ``Compute › Memory-bound kernels``."""
        return " › ".join(CAUSES[p].label for p in reversed(parents(self.row.id)))

    @property
    def meaning(self) -> str:
        """Return what the cause means, in words."""
        return CAUSES[self.row.id].doc


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
    """Which steps the step time is of, and the tracing overhead; empty where all are traced."""
    ideal_per_window_ns: float | None
    """None when unknown, for ``ideal_reason``."""
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
    """Withheld claims, one line; empty when nothing is withheld."""

    @property
    def traced_unit(self) -> str:
        """``traced step`` where untraced ones are the step time, else the unit."""
        return f"traced {self.unit}" if self.tracing else self.unit


class Groupings:
    """A run's times by level and its views, each made once."""

    def __init__(self, run: Attributed, tables: Mapping[str, pa.Table] | None = None) -> None:
        self.run = run
        self._by: dict[str, list[Group]] = {}
        self._tables = dict(tables or {})

    def table(self, view: str) -> pa.Table:
        """Return a view of the run."""
        if view not in self._tables:
            self._tables |= views(self.run, [view])
        return self._tables[view]

    def by(self, level: Level) -> list[Group]:
        """Return the groups of one level, as ``Attribution.by``."""
        if level not in self._by:
            self._by[level] = self.run.by(level)
        return self._by[level]

    @property
    def windows(self) -> int:
        """Step windows over all ranks, at least 1."""
        return max(int(self.run.windows.num_rows), 1)


def tell(groupings: Groupings) -> Story:
    """Put an attribution into words."""
    run, windows = groupings.run, groupings.windows
    unit = _unit(run)
    observed = run.observed_ns / windows
    ideal = run.ideal_ns / windows if run.ideal_ns else None
    reason = None if ideal is not None else _why_no_ideal(run)
    step = run.step_time()
    headline = observed if step.untraced is None else float(step.untraced.value_ns)
    verdict, detail = _verdict(run, unit, headline, ideal, reason, step)
    ceilings, used = _ceilings(groupings)
    return Story(
        title=run.recording.manifest.name,
        facts=_facts(run, unit),
        unit=unit,
        windows=windows,
        observed_per_window_ns=observed,
        step=step,
        tracing=tracing(step),
        ideal_per_window_ns=ideal,
        ideal_reason=reason,
        ceiling=tuple(ceilings),
        utilization=used,
        verdict=verdict,
        detail=detail,
        top=tuple(_top(groupings, row) for row in _largest(run, 3)),
        findings=tuple(by_severity(run.findings)),
        withheld=_withheld(run),
    )


def _withheld(run: Attributed) -> str:
    titles = []
    for held in run.withheld:
        title = held.claim.title[:1].lower() + held.claim.title[1:]
        some = held.ranks is not None and len(held.ranks) < len(run.ranks)
        titles.append(f"{title} (ranks {fmt.some(held.ranks)})" if some and held.ranks else title)
    return f"Withheld (see findings): {', '.join(titles)}." if titles else ""


def _unit(run: Attributed) -> str:
    numbers = run.windows["number"]
    return "window" if numbers.null_count == len(numbers) else "step"


def _facts(run: Attributed, unit: str) -> tuple[str, ...]:
    manifest = run.recording.manifest
    facts = ["recorded run" if manifest.kind == "recorded" else "imported trace"]
    if manifest.workload:
        facts.append(manifest.workload)
    ranks = len(run.ranks)
    world = {p.world_size for p in manifest.ranks if p.world_size}
    facts.append(
        f"{ranks} of {fmt.plural(max(world), 'rank')}"
        if world and max(world) > ranks
        else fmt.plural(ranks, "rank")
    )
    facts += devices(run)
    backends = sorted({p.backend for p in manifest.ranks if p.backend})
    if backends:
        facts.append(", ".join(backends))
    if unit == "step":
        kinds = run.step_time().kinds
        recorded = sum(len(k.numbers) for k in kinds)
        some = recorded > sum(len(k.traced) for k in kinds) > 0
        facts.append(
            f"{fmt.plural(recorded, 'step')}, {run.steps} traced"
            if some
            else fmt.plural(run.steps, "step")
        )
    if manifest.created_ns:
        moment = dt.datetime.fromtimestamp(manifest.created_ns / 1e9, tz=dt.UTC)
        facts.append(moment.strftime("%Y-%m-%d %H:%M UTC"))
    return tuple(facts)


def devices(run: Attributed) -> list[str]:
    """Return the names of the devices that ranks compute on; of several alike, how many."""
    names: dict[str, int] = {}
    for rank in run.ranks:
        name = rank.device or ("CPU" if on_host(run, rank.rank) else "unknown device")
        names[name] = names.get(name, 0) + 1
    return [name if n == 1 else f"{n} × {name}" for name, n in names.items()]


def on_host(run: Attributed, rank: int) -> bool:
    """Return whether a rank computed on the CPU: its device events are those of the host."""
    trace = run.joined.get(rank)
    devices = [] if trace is None else trace.device_event["device_id"]
    return len(devices) > 0 and bool(devices[0].as_py() < 0)


_CEILINGS = {"theoretical": "Theoretical ceiling", "achievable": "Achievable ceiling"}


def _ceilings(groupings: Groupings) -> tuple[list[str], str]:
    """Return both ceilings in words, and how much of them was used."""
    if not groupings.run.ceilings:
        return [], ""
    rows = [r for r in groupings.table("utilization").to_pylist() if r["rank"] is None]
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
        if groupings.run.step_time().untraced is not None:
            used[-1] += ", by the steps without a trace"
        return lines, "; ".join(used) + (f" ({reasons[0]})" if reasons else "")
    return lines, f"MFU and HFU: not known: {reasons[0]}" if reasons else ""


def _mix(by_type: list[dict[str, Any]]) -> str:
    """Return the data types of the FLOP: ``bf16``, or ``bf16 98.0 %, fp32 2.0 %``."""
    total = sum(r["hardware_flop"] for r in by_type)
    shares = [(r["dtype"], r["hardware_flop"] / total) for r in by_type if r["hardware_flop"]]
    main = [(name, share) for name, share in shares if share >= 0.0005]
    if len(main) < 2:
        return "".join(name for name, _ in main)
    return ", ".join(f"{name} {fmt.ratio(share)}" for name, share in main)


def _why_no_ideal(run: Attributed) -> str:
    for finding in run.findings:
        if any(claim.startswith(_IDEAL) or claim == "compute" for claim in finding.withholds):
            return finding.message
    without = [r for r in run.ranks if r.peak_source is None]
    if without:
        names = sorted({r.device for r in without if r.device})
        if names:
            return f"no peak is known for {', '.join(names)}"
        if all(on_host(run, r.rank) for r in without):
            return (
                "the CPU of this run was not calibrated (chopper calibrate measures what it "
                "achieves)"
            )
        return "the trace does not say which device it was recorded on"
    times = {row.id: row.time_ns for row in run.causes()}
    if not times.get("compute"):
        return "nothing was computed on the device"
    if times.get("compute.no_peak"):
        return "the shapes or the data types of the model's products were not recorded"
    return "no matrix product, convolution or attention was recognised"


def _verdict(
    run: Attributed,
    unit: str,
    observed: float,
    ideal: float | None,
    reason: str | None,
    step: StepTime,
) -> tuple[str, str]:
    if not run.observed_ns:
        if any(f.code == "run.no_trace" for f in run.findings):
            return "Readings without a kernel trace: there is nothing to attribute.", ""
        return "Nothing ran on the device in this trace.", ""
    noun = "A step" if unit == "step" else "The recorded window"
    mean = " on average" if run.windows.num_rows > 1 else ""
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
    times = {row.id: row.time_ns for row in run.causes()}
    missing = times.get("compute.no_peak", 0) + times.get("compute.unmodelled", 0)
    if missing > 0.01 * run.observed_ns:
        share = missing / run.observed_ns
        detail += (
            f" The ideal is a lower bound: {fmt.ratio(share)} of the time is computing "
            "that no model covers."
        )
    return verdict, detail


def tracing(step: StepTime) -> str:
    """Return which steps the step time is the statistic of, and the tracing overhead."""
    untraced = step.untraced
    if untraced is None or step.traced_ns is None or step.tracing_ns is None:
        return ""
    said = (
        f"The step time is the {untraced.statistic} of {fmt.plural(untraced.count, 'step')} "
        "without a trace" + (", which are uneven" if untraced.statistic == "mean" else "") + "; "
        f"half of them took {fmt.duration(untraced.low_ns)} to {fmt.duration(untraced.high_ns)}. "
        f"The causes are those of {fmt.plural(step.traced_count, 'traced step')} of "
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
            + f"the untraced steps next to them took {fmt.duration(step.nearby_ns)}, so most of "
            "the difference is not tracing; --steps records other ones."
        )
    verb = "added" if step.tracing_ns >= 0 else "took off"
    share = fmt.ratio(abs(step.tracing_ratio or 0.0))
    return f"{said}{verb} {fmt.duration(abs(step.tracing_ns))} ({share}{interval})."


def tracing_rows(story: Story) -> list[tuple[str, str, str, str]]:
    """Return the rows below the sum of the causes: (label, time, share, 95 % interval)."""
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
    """Return the rows of the table of step kinds.

    Each is (kind, steps, untraced median, share, traced). Empty where all steps are of one kind,
    leading ones that were slow aside.
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


def _largest(run: Attributed, number: int) -> list[CauseRow]:
    rows = [r for r in run.leaves() if r.id != _IDEAL and r.time_ns > 0]
    known = [r for r in rows if r.id not in _UNKNOWN]
    unknown = [r for r in rows if r.id in _UNKNOWN]
    return (known + unknown)[:number]


def _top(groupings: Groupings, row: CauseRow) -> TopCause:
    windows = groupings.windows
    low_high = row.ci95_ns
    return TopCause(
        row=row,
        per_window_ns=row.time_ns / windows,
        ci95_per_window_ns=low_high and (low_high[0] / windows, low_high[1] / windows),
        advice=advice(row.id),
        evidence=tuple(evidence(groupings, row.id)),
    )


def evidence(groupings: Groupings, cause: str) -> list[Evidence]:
    """Return the operator, kernel, phase and rank that hold most of a cause."""
    found: list[Evidence] = []
    for level, word in (_WORDS_IDLE if cause.startswith("idle") else _WORDS).items():
        most = _dominant(groupings.by(level), cause)
        if most is not None:
            name, share = str(most[0]), most[1]
            shown = fmt.kernel_name(name) if level == "kernel" else name
            # On CPU-only runs an event's name is its operator's: once is enough.
            if all(e.name != name for e in found):
                found.append(Evidence(word, name, shown, fmt.ratio(share)))
    if cause == "communication.wait":
        found += _straggler(groupings)
    ranks = groupings.by("rank")
    if len(ranks) > 1:
        times = {str(g.key): g.causes.get(cause, 0) for g in ranks}
        mean = sum(times.values()) / len(times)
        worst, time_ns = max(times.items(), key=lambda kv: kv[1])
        if mean and time_ns > 1.25 * mean:
            found.append(Evidence("rank", worst, worst, f"{fmt.factor(time_ns / mean)} the mean"))
    return found


def _straggler(groupings: Groupings) -> list[Evidence]:
    """Return the rank that came last, and what it spent longer on than the others."""
    from chopper.analyzers.views.stragglers import worst

    found = worst(groupings.table("stragglers"))
    if found is None:
        return []
    value = (
        f"came last in {fmt.ratio(found.late_ratio)} of the collectives, "
        f"caused {fmt.ratio(found.share_ratio)} of the waiting"
    )
    if found.cause is not None and found.excess_ns:
        per_step = found.excess_ns / max(groupings.run.steps, 1)
        unit = _unit(groupings.run)
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
    """Return the name of a coverage ratio for people."""
    label = name.removesuffix("_ratio").replace("_", " ").replace(".", " ")
    return label[:1].upper() + label[1:]
