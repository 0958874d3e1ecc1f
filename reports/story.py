"""Story of a run in words: its kind, its step, and where its time went."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import pyarrow as pa

from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution, CauseRow, Group
from chopper.analyzers.causes.step_time import SLOWED_RATIO, TRAINING, StepTime
from chopper.analyzers.events.held_memory import HeldMemory, held_memory
from chopper.analyzers.replay.changes import SLOWED
from chopper.causes import LEAVES, Level
from chopper.hardware.ceilings import UNNAMED
from chopper.reports.labels import full_label, sentence
from chopper.views import views

_IDEAL = "compute.ideal"
_HALF = 0.5
_NO_MODEL = ("compute.no_peak", "compute.unmodelled")
_STEADY = frozenset(c for c in LEAVES if c.startswith("idle.preparation.") and c not in SLOWED)
_WORDS: dict[Level, str] = {"op": "operator", "kernel": "kernel", "phase": "phase"}
_WORDS_IDLE: dict[Level, str] = {"op": "host in operator", "phase": "phase"}
_COVERED_RATIO = 0.8
"""With less of the math known, an ideal is a bound and no ratio to it is told."""
_CEILINGS = {"theoretical": "Theoretical ceiling", "achievable": "Achievable ceiling"}


class Evidence(NamedTuple):
    """The operator, kernel, phase or rank that holds most of a cause."""

    label: str
    """``operator``, ``kernel``, ``phase``, ``rank``, ``host in operator``."""
    name: str
    """As recorded."""
    value: str
    """Its share of the cause, or how it compares."""

    @property
    def shown(self) -> str:
        """The name for people: kernels are shortened."""
        return fmt.kernel_name(self.name) if self.label == "kernel" else self.name


class Story:
    """Content of a report of a run; its times by level and its views are each made once.

    Attributes:
        unit: ``step``, or ``window`` for traces without steps.
        windows: step windows over all ranks, at least 1: the divisor of every per-step figure.
        step: the step time with and without tracing.
        tracing: which steps the step time is of, and the tracing overhead; empty where all are
            traced.
        scale: untraced over traced time, where tracing made the steps much longer; else None.
        steady: causes of idle time that tracing does not slow, such as waiting for data; none where
            that is more than an untraced step has left.
        idle_scale: untraced over traced time of the device's other idle time, where the device's
            own work fits into an untraced step; None where the host computes, or it does not.
        traced_unit: ``traced step`` where untraced ones are the step time, else the unit.
        ideal_per_window_ns: None when unknown, for ``ideal_reason``.
    """

    def __init__(self, run: Attribution, tables: Mapping[str, pa.Table] | None = None) -> None:
        self.run = run
        self._by: dict[str, list[Group]] = {}
        self._tables = dict(tables or {})
        numbers = run.windows["number"]
        self.unit = "window" if numbers.null_count == len(numbers) else "step"
        self.windows = max(len(numbers), 1)
        self.step = run.step_time()
        self.tracing = tracing(self.step)
        self.scale = self.step.scale if self.step.is_slowed_by_tracing else None
        self.steady, self.idle_scale = self._idle_scale()
        self.traced_unit = f"traced {self.unit}" if self.tracing else self.unit
        self.observed_per_window_ns = run.observed_ns / self.windows
        is_known = run.ideal_ns > 0 and run.withholds(_IDEAL) is None
        self.ideal_per_window_ns = run.ideal_ns / self.windows if is_known else None
        self.ideal_reason = "" if is_known else _why_no_ideal(run)

    def untraced_ns(self, cause: CauseRow) -> float:
        """Return the time of a cause in steps without a trace, where that is another one."""
        if self.idle_scale is None:
            return cause.time_ns * (self.scale or 1.0)
        if cause.id.split(".")[0] != "idle":
            return cause.time_ns
        kept_ns = self._steady_ns(self.steady, cause.id)
        return kept_ns + (cause.time_ns - kept_ns) * self.idle_scale

    def figure(self, cause: CauseRow) -> tuple[float, float | None, str]:
        """Return a cause's time and share of a step, and of which: as causes are ranked."""
        if self.idle_scale is None:
            return cause.time_ns / self.windows, cause.share_ratio, self.traced_unit
        time_ns = self.untraced_ns(cause) / self.windows
        whole_ns = self.observed_per_window_ns * (self.scale or 1.0)
        return time_ns, time_ns / whole_ns if whole_ns else None, f"untraced {self.unit}"

    def _steady_ns(self, steady: frozenset[str], within: str = "idle") -> int:
        leaves = [r for r in self.run.leaves() if r.id in steady]
        return sum(r.time_ns for r in leaves if f"{r.id}.".startswith(f"{within}."))

    def _idle_scale(self) -> tuple[frozenset[str], float | None]:
        idle_ns = sum(r.time_ns for r in self.run.causes() if r.id == "idle")
        if self.scale is None or self.is_on_host:
            return frozenset(), None
        left_ns = idle_ns - self.run.observed_ns * (1 - self.scale)
        for steady in (_STEADY, frozenset[str]()):
            kept_ns = self._steady_ns(steady)
            if kept_ns < min(left_ns, idle_ns):
                return steady, (left_ns - kept_ns) / (idle_ns - kept_ns)
        return frozenset(), None

    def table(self, view: str) -> pa.Table:
        """Return a view of the run."""
        if view not in self._tables:
            self._tables |= views(self.run, [view])
        return self._tables[view]

    def by(self, level: Level) -> list[Group]:
        """Return the groups of one level, as ``Attribution.by``; ranks by their coordinates."""
        if level not in self._by:
            self._by[level] = self.run.by(level)
            if level == "rank":
                places = {rank.rank: self.run.order_of(rank.rank) for rank in self.run.ranks}
                self._by[level].sort(key=lambda group: places[int(group.key or 0)])
        return self._by[level]

    @cached_property
    def is_on_host(self) -> bool:
        """Whether all ranks computed on the CPU."""
        return all(_on_host(self.run, rank.rank) for rank in self.run.ranks)

    @cached_property
    def held(self) -> HeldMemory | None:
        """Memory of a snapshot without a trace, unless step times say more than it."""
        each = [] if self.run.observed_ns else held_memory(self.run.recording)
        known = (h for h in each if h.asked_bytes is not None or self.step.untraced is None)
        return next(known, None)

    @property
    def is_ideal_whole(self) -> bool:
        """Whether the ideal time is known of nearly all model math and is a measure of a step."""
        covered = self.run.coverage.get("math_with_peak_ratio")
        ideal = self.ideal_per_window_ns or 0.0
        enough = covered is None or covered >= _COVERED_RATIO
        return enough and ideal >= _MATH_RATIO * (
            self.step.headline_ns or self.observed_per_window_ns
        )

    @cached_property
    def ceilings(self) -> tuple[list[str], str]:
        """Both ceilings, a line each, and the share of them that was used; empty if unknown."""
        if not self.run.ceilings or not self.run.observed_ns:
            return [], ""
        rows = [r for r in self.table("utilization").to_pylist() if r["rank"] is None]
        lines: list[str] = []
        used: list[str] = []
        reasons: list[str] = []
        for name, label in _CEILINGS.items():
            whole_row, *by_type = [r for r in rows if r["ceiling"] == name]
            rate, source = whole_row["peak_flop_per_s"], whole_row["source"]
            if source is None:
                lines.append(f"{label}: unknown: {whole_row['reason']}")
                continue
            lines.append(
                f"{label}: {f'{fmt.flops(rate)} {_mix(by_type)}, ' if rate else ''}{source}"
            )
            if whole_row["mfu_ratio"] is not None:
                mfu, hfu = (fmt.ratio(whole_row[name]) for name in ("mfu_ratio", "hfu_ratio"))
                share = f"MFU at least {mfu}" if whole_row["reason"] else f"MFU {mfu}, HFU {hfu}"
                used.append(f"{share} of the {name} ceiling")
            reasons += filter(None, [whole_row["reason"]])
        if not used:
            return lines, f"MFU and HFU: unknown: {reasons[0]}" if reasons else ""
        why = f" ({reasons[0]})" if reasons else ""
        of = ", from untraced steps" if self.step.untraced is not None else ""
        return lines, "; ".join(used) + of + why


def _mix(by_type: list[dict[str, Any]]) -> str:
    """Return the data types of the FLOP: ``bf16``, or ``bf16 98.0 %, fp32 2.0 %``."""
    total = sum(r["hardware_flop"] for r in by_type)
    shares = {r["dtype"]: r["hardware_flop"] / total for r in by_type if r["hardware_flop"]}
    main = {name: share for name, share in shares.items() if share >= 0.0005}
    if len(main) < 2:
        return "".join(main)
    return ", ".join(f"{name} {fmt.ratio(share)}" for name, share in main.items())


def withheld(run: Attribution) -> str:
    """Return the withheld claims in one line; empty when nothing is withheld."""
    titles = []
    for held in run.withheld:
        title = held.claim.title[:1].lower() + held.claim.title[1:]
        some = held.ranks and len(held.ranks) < len(run.ranks)
        titles.append(f"{title} (ranks {fmt.some(held.ranks)})" if held.ranks and some else title)
    return f"Withheld (see findings): {', '.join(titles)}." if titles else ""


def facts(story: Story) -> list[str]:
    """Return what the run was: kind, workload, ranks, devices, steps, date."""
    run = story.run
    manifest = run.recording.manifest
    ranks = fmt.plural(len(run.ranks), "rank")
    world = max((p.world_size or 0 for p in manifest.ranks), default=0)
    if world > len(run.ranks):
        ranks = f"{len(run.ranks)} of {fmt.plural(world, 'rank')}"
    names: dict[str, int] = {}
    for rank in run.ranks:
        name = rank.device or ("CPU" if _on_host(run, rank.rank) else "unknown device")
        name += " (named by the user)" if rank.device_reason else ""
        names[name] = names.get(name, 0) + 1
    steps = fmt.plural(run.steps, "step")
    recorded = sum(len(k.steps) for k in story.step.kinds)
    if recorded > sum(len(k.traced_steps) for k in story.step.kinds) > 0:
        steps = f"{fmt.plural(recorded, 'step')}, {run.steps} traced"
    moment = dt.datetime.fromtimestamp((manifest.created_ns or 0) / 1e9, tz=dt.UTC)
    texts = (
        "recorded run" if manifest.kind == "recorded" else "imported trace",
        manifest.workload or "",
        ranks,
        *(name if n == 1 else f"{n} × {name}" for name, n in names.items()),
        ", ".join(sorted({p.backend for p in manifest.ranks if p.backend})),
        steps if story.unit == "step" else "",
        moment.strftime("%Y-%m-%d %H:%M UTC") if manifest.created_ns else "",
    )
    return [text for text in texts if text]


def _on_host(run: Attribution, rank: int) -> bool:
    """Return whether a rank computed on the CPU: its device events are those of the host."""
    trace = run.joined.get(rank)
    devices = [] if trace is None else trace.device_event["device_id"]
    return len(devices) > 0 and bool(devices[0].as_py() < 0)


def _why_no_ideal(run: Attribution) -> str:
    for finding in run.findings:
        if any(claim.startswith(_IDEAL) or claim == "compute" for claim in finding.withholds):
            return finding.message
    without = [r for r in run.ranks if r.peak_source is None]
    if without:
        names = sorted({r.device for r in without if r.device})
        if names:
            return f"the peak of {', '.join(names)} is unknown"
        if all(_on_host(run, r.rank) for r in without):
            return "the CPU of this run was not calibrated (chopper calibrate measures its ceiling)"
        return UNNAMED
    times = {row.id: row.time_ns for row in run.causes()}
    if not times.get("compute"):
        return "nothing was computed on the device"
    if times.get("compute.no_peak"):
        if (run.coverage.get("work_known_ratio") or 0.0) > _HALF:
            return "the device's peak in the data type of the products is unknown"
        return "shapes or data types of the matrix products were not recorded"
    return "no matrix product, convolution or attention was recognized"


def step_sentences(story: Story) -> tuple[str, str]:
    """Return how long a step takes beside its ideal time, and what stands behind it."""
    run, step = story.run, story.step
    if not run.observed_ns:
        return story.held.detail if story.held else "", ""
    noun = "A step" if story.unit == "step" else "The recorded window"
    mean = " on average" if run.windows.num_rows > 1 else ""
    observed = story.observed_per_window_ns
    if step.untraced is not None:
        mean, observed = "", float(step.untraced.value_ns)
        if len(step.kinds) > 1 and step.kind != TRAINING:
            noun = f"A step of {step.kind}"
    takes = f"{noun} takes {fmt.duration(observed)}{mean};"
    ideal = story.ideal_per_window_ns
    if ideal is None:
        return f"{takes} the ideal time is unknown.", sentence(story.ideal_reason)
    covered = run.coverage.get("math_with_peak_ratio")
    if covered is not None and covered < _COVERED_RATIO:
        return (
            f"{takes} the ideal time is known for {fmt.ratio(covered)} of its math.",
            f"That part would take {fmt.duration(ideal)} at peak; the whole ideal time is "
            "longer, and no ratio to it is shown.",
        )
    share = fmt.ratio(ideal / observed)
    if ideal < _MATH_RATIO * observed:
        return (
            f"{takes} at peak, its math would take {fmt.duration(ideal)}.",
            f"Model math at the device's peak is only {share} of the time: other causes determine "
            f"the {story.unit}, and no ratio to the ideal is shown.",
        )
    detail = (
        f"That is {fmt.factor(observed / ideal)} the ideal: {share} of the time is model math at "
        f"the device's peak, the gap is {fmt.duration(observed - ideal)}."
    )
    missing = sum(r.time_ns for r in run.causes() if r.id in _NO_MODEL)
    if missing > 0.01 * run.observed_ns:
        detail += (
            f" The ideal time is a lower bound: {fmt.ratio(missing / run.observed_ns)} of the "
            "time is compute that no model covers."
        )
    return f"{takes} at peak, its math would take {fmt.duration(ideal)}.", detail


def tracing(step: StepTime) -> str:
    """Return which steps the step time is the statistic of, and the tracing overhead."""
    untraced = step.untraced
    if untraced is None or step.traced_mean_ns is None or step.tracing_ns is None:
        return ""
    uneven = ", which are uneven" if untraced.statistic == "mean" else ""
    basis = (
        f"The step time is the {untraced.statistic} of "
        f"{fmt.plural(untraced.steps_count, 'step')} without a trace{uneven}; half of them took "
        f"{fmt.duration(untraced.quartile_low_ns)} to {fmt.duration(untraced.quartile_high_ns)}. "
        f"The causes are those of {fmt.plural(step.traced_count, 'traced step')} of "
        f"{fmt.duration(step.traced_mean_ns)} on average:"
    )
    low, high = step.tracing_ci95_ns or (None, None)
    if low is not None and high is not None and low <= 0 <= high:
        if high <= SLOWED_RATIO * untraced.value_ns:
            return f"{basis} tracing itself made no significant difference."
        return (
            f"{basis} the steps differ too much to tell what tracing added (95 % interval "
            f"{fmt.interval((low, high))})."
        )
    if not step.is_tracing_certain:
        why = "they were shorter than the others, so"
        if step.is_slow_nearby:
            nearby = fmt.duration(step.nearby_ns)
            why = f"the adjacent untraced steps took {nearby}, so most of"
        return f"{basis} {why} the difference is not due to tracing; --steps records other steps."
    share = fmt.ratio(step.tracing_ratio)
    if low is not None:
        share += f", 95 % interval {fmt.duration(low)} to {fmt.duration(high)}"
    exceptions = ""
    if abs(step.traced_mean_ns - untraced.value_ns - step.tracing_ns) > 0.1 * untraced.value_ns:
        exceptions = "; the rest of the difference is due to single long steps"
    return f"{basis} tracing itself added {fmt.duration(step.tracing_ns)} ({share}){exceptions}."


def evidence(story: Story, cause: str) -> list[Evidence]:
    """Return the operator, kernel, phase and rank that hold most of a cause."""
    evidence_by_cause: dict[str, Evidence] = {}
    for level, word in (_WORDS_IDLE if cause.startswith("idle") else _WORDS).items():
        times = {g.key: g.causes.get(cause, 0) for g in story.by(level)}
        total = sum(times.values())
        times.pop(None, None)
        key, time_ns = max(times.items(), key=lambda kv: kv[1], default=(None, 0))
        if time_ns and time_ns >= 0.05 * total:
            # On CPU-only runs an event's name is its operator's: once is enough.
            name = str(key)
            evidence_by_cause.setdefault(name, Evidence(word, name, fmt.ratio(time_ns / total)))
    out = [*evidence_by_cause.values()]
    if cause == "communication.wait":
        out += _straggler(story)
    ranks = {str(g.key): g.causes.get(cause, 0) for g in story.by("rank")}
    mean = sum(ranks.values()) / max(len(ranks), 1)
    worst, time_ns = max(ranks.items(), key=lambda kv: kv[1], default=("", 0))
    if time_ns > 1.25 * mean:
        out.append(Evidence("rank", worst, f"{fmt.factor(time_ns / mean)} the mean"))
    return out


def _straggler(story: Story) -> list[Evidence]:
    """Return the rank that came last, and the cause on which it spent longer than the others."""
    from chopper.analyzers.views.ranks import slow_at_its_stage, worst

    slow = slow_at_its_stage(story.run)
    if slow is not None:
        value = f"computes {fmt.factor(slow.peers_ratio)} as long as the others of its stage"
        return [Evidence("straggler rank", str(slow.rank), value)]
    last = worst(story.table("stragglers"))
    if last is None:
        return []
    value = (
        f"arrived last in {fmt.ratio(last.late_ratio)} of the collectives, caused "
        f"{fmt.ratio(last.share_ratio)} of the waiting"
    )
    if last.cause is not None and last.excess_ns:
        per_step = fmt.duration(last.excess_ns / max(story.run.steps, 1))
        value += f"; {per_step} more per {story.unit} in {fmt.inside(full_label(last.cause))}"
    name = story.run.recording.part(last.rank).name
    return [Evidence("straggler rank", name, value)]


_MATH_RATIO = 0.01
"""Less model math than this share of a step is no measure of it."""
