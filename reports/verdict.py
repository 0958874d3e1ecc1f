"""The verdict: what bounds a run, in one sentence, and its largest causes.

Terminal, HTML, Markdown, JSON and Python show the result of :func:`verdict`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from chopper import wording as fmt
from chopper.analyzers.attributed import Attributed
from chopper.analyzers.causes.step_time import LONG
from chopper.analyzers.detectors.initialization import Initialization, initialization_of
from chopper.analyzers.events.collectives import members_of
from chopper.analyzers.events.device import events_of
from chopper.analyzers.events.places import Where, links_of, place_of
from chopper.analyzers.replay.replay import Replay
from chopper.analyzers.views.stragglers import Uneven, uneven
from chopper.attribution import FIRST, CauseRow, StepKind
from chopper.claims import checks
from chopper.reports.labels import advice, full_label
from chopper.reports.story import Evidence, Story, evidence

_COMPUTE_BOUND, _LEAST_BOUND = 2 / 3, 0.2
_LEAST_SECOND = 0.1
"""Another class is named from this share of the step on."""
_DOMINANT = 0.6
"""Below this part of its group's time, the largest class is named together with the next one."""
_LEAST_HIDDEN_RATIO = 0.01
_MUCH_LONGER = 0.5
_PHASES = ("forward", "recompute", "backward", "optimizer")
_LISTED = 3
_STARTUP, _OPTIMIZER, _STRAGGLER = "startup", "optimizer", "straggler"
_LEAST_WAIT_RATIO = 0.05
_SAID = {"late_entry": "late_rank", "taking_turns": "turns"}
"""Why ranks wait, and the entry of ``verdicts.toml``, where that has another name."""
_HALF = 0.5
_ENOUGH_STEPS = 10
"""With fewer recorded steps the first one takes a large part of any program's time."""


class _Class(msgspec.Struct, frozen=True):
    short: str
    sentence: str
    on_host: str = ""
    part: str = ""
    group: str = ""
    causes: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Largest:
    """One of the largest causes.

    Attributes:
        cause, label: its id and its name.
        time_ns: per ``unit``, mean over ranks.
        share_ratio: of the unit's time.
        unit: ``step``, ``traced step``, ``untraced step`` or ``window``.
        remedy: what to do about it.
        where: the place that holds most of it.
        evidence: operator, kernel, phase and rank with their shares.
    """

    cause: str
    label: str
    time_ns: float
    share_ratio: float | None
    unit: str
    remedy: str
    where: Where
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What bounds a run.

    Attributes:
        name: the class: ``compute``, ``memory``, ``data``, ``launches`` … (``verdicts.toml``);
            ``memory_held`` and ``out_of_memory`` of a snapshot of the allocator; ``unknown`` if
            the data does not allow one.
        sentence: the verdict in words.
        share_ratio: of the time of ``unit``; None if nothing was attributed.
        unit: ``step``, ``window`` (a trace without steps) or ``loop`` (all recorded steps and what
            follows them).
        largest: up to three leaf causes of the gap, the largest first.
    """

    name: str
    sentence: str
    share_ratio: float | None
    unit: str
    largest: tuple[Largest, ...]

    def __str__(self) -> str:
        return self.sentence

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form."""
        return {
            "class": self.name,
            "sentence": self.sentence,
            "share_ratio": self.share_ratio,
            "of": self.unit,
            "largest_causes": [
                {
                    "cause": one.cause,
                    "label": one.label,
                    "time_ns": round(one.time_ns),
                    "share_ratio": one.share_ratio,
                    "of": one.unit,
                    "remedy": one.remedy,
                    **asdict(one.where),
                }
                for one in self.largest
            ],
        }


@cache
def classes() -> dict[str, _Class]:
    """Return what can bound a run, by name."""
    text = Path(__file__).with_name("verdicts.toml")
    return msgspec.toml.decode(text.read_bytes(), type=dict[str, _Class])


@cache
def class_of(cause: str) -> str:
    """Return the class of a leaf cause: the one with the longest prefix of its id."""
    prefixes = {p: name for name, one in classes().items() for p in one.causes}
    return prefixes[max((p for p in prefixes if f"{cause}.".startswith(f"{p}.")), key=len)]


def verdict(story: Story, replay: Replay | str) -> Verdict:
    """Return what bounds a run: the largest class of the whole loop, else of a step.

    Args:
        story: of the run.
        replay: of the run, or why there is none.
    """
    run = story.run
    if not run.observed_ns:
        name = "unknown"
        if story.held:
            name = "memory_held" if story.held.asked_bytes is None else "out_of_memory"
        sentence = _nothing(story)
        return Verdict(name=name, sentence=sentence, share_ratio=None, unit="step", largest=())
    links = links_of(run) if isinstance(replay, str) else replay.links
    started = initialization_of(run, links)
    ranks = _uneven(run)
    shares = _step_shares(story, started, ranks)
    groups = _groups(shares)
    loop = _loop_shares(story)
    rest = 1 - sum(loop.values())
    largest = tuple(
        _largest(story, row, place_of(run, links, (row.id,))) for row in _top(story)[:_LISTED]
    )
    group = _ranked(groups)[0]
    most = _ranked({**{g: rest * share for g, share in groups.items()}, **loop})[0]
    if most in loop and (most != _STARTUP or loop[most] >= rest * groups.get(_STARTUP, 0.0)):
        name, share, unit = most, loop[most], "loop"
        sentence = _of_loop(story, most, share, _of_step(story, shares, groups, largest))
    else:
        name, share = _in_group(shares, group)[0]
        unit = story.unit
        share = groups[group] if name == group else share
        sentence = _of_step(story, shares, groups, largest)
        optimizer = next((g for g in story.by("phase") if g.key == _OPTIMIZER), None)
        if name == _STARTUP and started is not None:
            sentence = _of_startup(story, shares, share, started, largest)
        elif name == _STRAGGLER and ranks is not None:
            name, sentence = _of_ranks(story, ranks, share)
        elif optimizer is not None and optimizer.time_ns > _HALF * run.observed_ns:
            name, share = _OPTIMIZER, optimizer.time_ns / run.observed_ns
            cause = max(optimizer.causes, key=optimizer.causes.__getitem__)
            text = classes()[name].sentence.format(share=fmt.ratio(share), unit=_unit(story))
            sentence = f"{text}, most of it {fmt.inside(full_label(cause))}."
    return Verdict(
        name=name,
        sentence=_damaged(run, sentence),
        share_ratio=share,
        unit=unit,
        largest=largest,
    )


def _uneven(run: Attributed) -> Uneven | None:
    """Return why ranks wait for each other; None if they hardly do."""
    waited = next((r.share_ratio for r in run.leaves() if r.id == "communication.wait"), None)
    if (waited or 0.0) < _LEAST_WAIT_RATIO:
        return None
    near = run.detailed
    return uneven(near, members_of(near), events_of(near))


def _step_shares(
    story: Story, started: Initialization | None, ranks: Uneven | None
) -> dict[str, float]:
    """Return the share of each class in the time of a step; initialization is one of its own.

    Of ranks that wait for a late one, these are the shares: what the late one does instead is why.
    """
    during = {} if started is None else started.idle_ns
    shares: dict[str, float] = defaultdict(float)
    if ranks is not None and ranks.kind not in ("pipeline", "taking_turns"):
        waiting = [g for g in story.by("rank") if g.key != ranks.worst.rank]
        whole_ns = max(sum(group.time_ns for group in waiting), 1)
        for group in waiting:
            for cause, time_ns in group.causes.items():
                shares[class_of(cause)] += time_ns / whole_ns
        return dict(shares)
    for row in story.run.leaves():
        share = story.figure(row)[1] or 0.0
        part = share * during.get(row.id, 0) / row.time_ns if row.time_ns else 0.0
        shares[class_of(row.id)] += share - part
        if part:
            shares[_STARTUP] += part
    return dict(shares)


def _ranked(groups: dict[str, float]) -> list[str]:
    """Return the groups, the one that bounds the step first.

    Compute bounds it if it takes most of it; else the largest of the other groups does, even if
    compute takes longer: that time is what a reader can get back. What was not recorded comes
    first if it is more than half.
    """
    waste = max((s for g, s in groups.items() if g not in ("compute", "unknown")), default=0.0)
    is_bound = groups.get("compute", 0.0) >= _COMPUTE_BOUND or waste < _LEAST_BOUND
    later = {"compute": not is_bound, "unknown": groups.get("unknown", 0.0) <= _HALF}
    return sorted(groups, key=lambda g: (later.get(g, False), -groups[g]))


def _groups(shares: dict[str, float]) -> dict[str, float]:
    groups: dict[str, float] = defaultdict(float)
    for name, share in shares.items():
        groups[classes()[name].group] += share
    return dict(groups)


def _loop_shares(story: Story) -> dict[str, float]:
    """Return the shares of the recorded loop that are not in ordinary steps, by class.

    They are the program's phases, and what first and long steps take beyond an ordinary one.
    """
    step = story.step
    if not step.loop_ns or story.unit == "window":
        return {}
    of_phase = {phase: name for name, one in classes().items() for phase in one.phases}
    times: Counter[str] = Counter()
    for phase, time_ns in step.loop_phases_ns.items():
        if phase in of_phase:
            times[of_phase[phase]] += time_ns
    extras: Counter[str] = Counter()
    for kind in step.kinds:
        extra_ns = kind.time_ns - len(kind.steps) * (step.headline_ns or 0)
        _, *phases = kind.name.split(" + ")
        if len(phases) == 1 and phases[0] in of_phase:
            extras[of_phase[phases[0]]] += extra_ns
        elif kind.name.startswith(FIRST) and _starts_up(story, kind):
            times[_STARTUP] += extra_ns
        elif kind.name.startswith(LONG) and not kind.traced_steps:
            times["long_steps"] += extra_ns
    # A phase may have work beside it: a checkpoint's state is copied before it is saved.
    times |= extras
    return {name: time_ns / step.loop_ns for name, time_ns in times.items() if time_ns > 0}


def _starts_up(story: Story, kind: StepKind) -> bool:
    """Return whether first steps are long because the program starts, not by their work."""
    if story.step.steps_count < _ENOUGH_STEPS:
        return False
    work_ns = sum(t for c, t in kind.causes_ns.items() if not c.startswith("idle."))
    return work_ns <= _HALF * sum(kind.causes_ns.values())


def _top(story: Story) -> list[CauseRow]:
    """Return the leaf causes of the gap, the largest first."""
    rows = [r for r in story.run.leaves() if r.id != "compute.ideal" and r.time_ns > 0]
    return sorted(rows, key=lambda r: -story.untraced_ns(r))


def _largest(story: Story, row: CauseRow, where: Where) -> Largest:
    time_ns, share, unit = story.figure(row)
    return Largest(
        cause=row.id,
        label=full_label(row.id),
        time_ns=time_ns,
        share_ratio=share,
        unit=unit,
        remedy=advice(row.id),
        where=where,
        evidence=tuple(evidence(story, row.id)),
    )


def _in_group(shares: dict[str, float], group: str) -> list[tuple[str, float]]:
    """Return the classes of a group with their shares, the largest first."""
    mine = [(name, share) for name, share in shares.items() if classes()[name].group == group]
    return sorted(mine, key=lambda pair: -pair[1])


def _of_step(
    story: Story,
    shares: dict[str, float],
    groups: dict[str, float],
    largest: tuple[Largest, ...],
) -> str:
    """Return the sentence about a step."""
    known = classes()
    group, *others = _ranked(groups)
    inside = _in_group(shares, group)
    name, share = inside[0]
    rival = max((groups[other] for other in others if other != "compute"), default=0.0)
    least = max(_DOMINANT * groups[group], min(rival, groups[group]))
    if group in known and (name == group or share < least):
        name, share = group, groups[group]
    text = (story.is_on_host and known[name].on_host) or known[name].sentence
    text = text.format(share=fmt.ratio(share), unit=_unit(story))
    parts = [
        f"{fmt.ratio(part)} {known[n].part or known[n].short}"
        for n, part in inside[:3]
        if part >= _LEAST_SECOND and (name == group or n != name)
    ]
    if (parts and inside[0][0] != name) or len(parts) > 1:
        text += f" ({', '.join(parts)})"
    text += _place(largest, inside[0][0])
    if group == "compute":
        text += _efficiency(story)
    if group == "communication":
        text += _ranks(story)
    second = max(others, key=groups.__getitem__, default=group)
    if second != group and groups[second] >= _LEAST_SECOND:
        main, part = _in_group(shares, second)[0]
        if second in known and part < _DOMINANT * groups[second]:
            main = second
        text += f"; {fmt.ratio(groups[second])} is {known[main].short}"
    return f"{text}."


def _of_ranks(story: Story, ranks: Uneven, share: float) -> tuple[str, str]:
    """Return the class and the sentence about ranks that wait for each other."""
    name = _SAID.get(ranks.kind, ranks.kind)
    text = classes()[name].sentence.format(
        share=fmt.ratio(share), unit=_unit(story), rank=ranks.worst.rank
    )
    if ranks.work_ratio is not None and name in ("uneven_work", "experts", "ring"):
        text += f", which has {fmt.factor(ranks.work_ratio)} the work of the others"
    elif ranks.kind == "late_rank" and ranks.worst.cause is not None:
        text += f", which spends more time on {fmt.inside(full_label(ranks.worst.cause))}"
    elif ranks.kind == "late_entry":
        text += ", which is no slower, but enters late"
    return _STRAGGLER if name == "late_rank" else name, f"{text}."


def _unit(story: Story) -> str:
    """Return what shares are of; the traced step where an untraced one is much shorter."""
    if story.unit != "step":
        return "recorded window"
    step = story.step
    is_longer = (step.tracing_ratio or 0) > _MUCH_LONGER and story.idle_scale is None
    return "traced step" if is_longer else "step"


def _place(largest: tuple[Largest, ...], name: str) -> str:
    """Return the place of the largest cause of a class: ``, most of it in train.py(12): load``."""
    where = next((one.where for one in largest if class_of(one.cause) == name), None)
    if where is None:
        return ""
    layer = where.layer and f"layer {where.layer}"
    phase = where.phase in _PHASES and where.phase
    place = where.line or layer or where.op or phase
    return f", most of it in {place}" if place else ""


def _efficiency(story: Story) -> str:
    """Return how near the peak a run computes, and how much of its communication is hidden."""
    run, text = story.run, ""
    ideal, observed = story.ideal_per_window_ns, story.step.headline_ns
    if ideal is not None and observed and story.is_ideal_whole:
        text += f"; model math at peak is {fmt.ratio(ideal / observed)}"
    if run.communication.num_rows:
        rows = story.table("exposed_communication").to_pylist()
        elapsed = sum(row["elapsed_ns"] for row in rows)
        hidden = sum(row["hidden_ns"] for row in rows)
        if elapsed > _LEAST_HIDDEN_RATIO * run.observed_ns:
            text += f"; {fmt.ratio(hidden / elapsed)} of the communication is hidden"
    return text


def _ranks(story: Story) -> str:
    """Return why waiting and transfer are not separated."""
    run = story.run
    times = {row.id: row.time_ns for row in run.causes()}
    if times.get("communication.unseparated", 0) < _DOMINANT * times.get("communication", 0):
        return ""
    world = max((p.world_size or 0 for p in run.recording.manifest.ranks), default=0)
    of = f"{len(run.ranks)} of {world} ranks was recorded" if world > len(run.ranks) else ""
    return f", waiting and transfer not separated{of and f': {of}'}"


def _of_loop(story: Story, name: str, share: float, of_step: str) -> str:
    """Return the sentence about the whole loop, and after it the one about a step."""
    step = story.step
    text = classes()[name].sentence.format(share=fmt.ratio(share), unit="recorded loop")
    ordinary = fmt.duration(step.headline_ns)
    if name == _STARTUP:
        first = next(kind for kind in step.kinds if kind.name.startswith(FIRST))
        return f"{text}: {_first_steps(first)}. An ordinary step takes {ordinary}. {of_step}"
    if name == "long_steps":
        return f"{text}. An ordinary step takes {ordinary}. {of_step}"
    each = fmt.duration(step.loop_ns / step.steps_count)
    return f"{text}, which needs {each} per step; a step alone takes {ordinary}. {of_step}"


def _of_startup(
    story: Story,
    shares: dict[str, float],
    share: float,
    started: Initialization,
    largest: tuple[Largest, ...],
) -> str:
    """Return the sentence about initialization in the recorded time, and about the rest."""
    text = classes()[_STARTUP].sentence.format(share=fmt.ratio(share), unit=_unit(story))
    text += f": one {started.name} call of {fmt.duration(started.longest_ns)}"
    others = {n: s / (1 - share) for n, s in shares.items() if n != _STARTUP and share < 1}
    if sum(others.values()) <= 0:
        return f"{text}."
    rest = _of_step(story, others, _groups(others), largest)
    return f"{text}. Without it: {_inside(rest)}"


def _first_steps(kind: StepKind) -> str:
    """Return how long the first steps take, and what most of it is if they were traced."""
    count = len(kind.steps)
    first = "the first step takes" if count == 1 else f"the first {count} steps take"
    text = f"{first} {fmt.duration(kind.time_ns)}"
    if kind.causes_ns:
        cause, time_ns = max(kind.causes_ns.items(), key=lambda item: item[1])
        share = time_ns / max(sum(kind.causes_ns.values()), 1)
        text += f", {fmt.ratio(share)} of it {fmt.inside(full_label(cause))}"
    return text


def _damaged(run: Attributed, sentence: str) -> str:
    """Put before a sentence what is wrong with the trace that it is about."""
    found = (checks()[f.code].damage for f in run.findings if f.code in checks())
    damages = [*dict.fromkeys(text for text in found if text)]
    if not damages:
        return sentence
    what = " and ".join(damages)
    return f"The trace {what}; of what was read: {_inside(sentence)}"


def _inside(sentence: str) -> str:
    """Return a sentence as it stands after a colon."""
    return sentence if sentence[:3].isupper() else f"{sentence[:1].lower()}{sentence[1:]}"


def _nothing(story: Story) -> str:
    """Return what can be said of a run in which no time was attributed."""
    run, spread = story.run, story.step.untraced
    codes = {f.code for f in run.findings}
    if story.held:
        return story.held.headline
    if spread is not None:
        low, high = fmt.duration(spread.quartile_low_ns), fmt.duration(spread.quartile_high_ns)
        return (
            f"Cannot be told: no step was traced. A step takes {fmt.duration(spread.value_ns)}, "
            f"the {spread.statistic} of {fmt.plural(spread.steps_count, 'step')}; half of them "
            f"took {low} to {high}. Record with a trace (`chopper record`) to know its causes."
        )
    if "run.no_trace" in codes:
        return (
            "Cannot be told: there is telemetry but no kernel trace. Record both "
            "(`chopper record`) to know where the time went."
        )
    return "Cannot be told: nothing ran on a device in this trace; record a training step to know."
