"""The verdict: what bounds a run, in one sentence, and its largest causes.

Terminal, HTML, Markdown, JSON and Python show the result of :func:`verdict`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution, CauseRow
from chopper.analyzers.causes.step_time import FIRST, LONG, StepKind, StepTime
from chopper.analyzers.detectors.host import Initialization, initialization_of
from chopper.analyzers.detectors.remedies import remedy
from chopper.analyzers.events.collectives import members_of
from chopper.analyzers.events.device import events_of
from chopper.analyzers.events.places import Where, line_in_steps, links_of, place_of
from chopper.analyzers.replay.replay import Replay
from chopper.analyzers.trace.join import Links
from chopper.analyzers.views.ranks import uneven
from chopper.reports.labels import full_label
from chopper.reports.labels import sentence as as_sentence
from chopper.reports.story import Evidence, Story, evidence
from chopper.storage.findings import checks

_COMPUTE_BOUND, _LEAST_BOUND = 2 / 3, 0.2
_LEAST_SECOND = 0.1
"""Another class is named from this share of the step on."""
_DOMINANT = 0.6
"""Below this part of its group's time, the largest class is named together with the next one."""
_LEAST_HIDDEN_RATIO = 0.01
_MUCH_LONGER, _LONGER = 0.5, 1.1
_PHASES = ("forward", "recompute", "backward", "optimizer")
_LONG_STEPS = "long_steps"
_ALL = 0.999
_ALIKE = 2.0
"""A traced long step stands for all if their means differ by less than this factor."""
_LISTED = 3
_STARTUP, _OPTIMIZER, _STRAGGLER = "startup", "optimizer", "straggler"
_LEAST_WAIT_RATIO = 0.05
_WAITING = (_STRAGGLER, "expert_imbalance", "context_imbalance")
"""Classes of waiting for other ranks."""
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
    dominant_ratio: float = _DOMINANT
    phases: tuple[str, ...] = ()


class Largest(msgspec.Struct, frozen=True, kw_only=True):
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


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
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
        sentence = _nothing(story) + ("" if story.held else _memory(run))
        return Verdict(name=name, sentence=sentence, share_ratio=None, unit="step", largest=())
    links = links_of(run) if isinstance(replay, str) else replay.links
    started = initialization_of(run, links)
    step = _Step(story, links, _step_shares(story, started))
    name, share, sentence = _bound_of_step(step, started)
    loop, unit = _loop_shares(story), story.unit
    rest = 1 - sum(loop.values())
    most = _ranked({**{g: rest * part for g, part in step.groups.items()}, **loop})[0]
    if most in loop and (most != _STARTUP or loop[most] >= rest * step.groups.get(_STARTUP, 0.0)):
        name, share, unit = most, loop[most], "loop"
        if most == _LONG_STEPS:
            name, sentence = _of_long_steps(story, links, share, sentence)
        else:
            sentence = _of_loop(story, most, share, sentence)
    return Verdict(
        name=name,
        sentence=_damaged(run, sentence) + _memory(run),
        share_ratio=share,
        unit=unit,
        largest=tuple(
            _largest(story, row, place_of(run, links, (row.id,))) for row in _top(story)[:_LISTED]
        ),
    )


class _Step(msgspec.Struct, frozen=True):
    """The shares of the classes in a step, and what a sentence about them needs."""

    story: Story
    links: Mapping[int, Links]
    shares: dict[str, float]
    unit: str = ""

    @property
    def groups(self) -> dict[str, float]:
        """Group → share, in the order of :func:`_ranked`."""
        groups: dict[str, float] = defaultdict(float)
        for name, share in self.shares.items():
            groups[classes()[name].group] += share
        return {group: groups[group] for group in _ranked(groups)}

    def inside(self, group: str) -> list[tuple[str, float]]:
        """Return the classes of a group with their shares, the largest first."""
        mine = [(n, share) for n, share in self.shares.items() if classes()[n].group == group]
        return sorted(mine, key=lambda pair: -pair[1])

    def chosen(self, group: str) -> tuple[str, float]:
        """Return the class that speaks for a group: the largest, or the group if that is mixed."""
        name, share = self.inside(group)[0]
        rivals = [part for g, part in self.groups.items() if g not in ("compute", group)]
        least = max(
            classes().get(group, classes()[name]).dominant_ratio * self.groups[group],
            min(max(rivals, default=0.0), self.groups[group]),
        )
        if group in classes() and (name == group or share < least):
            return group, self.groups[group]
        return name, share


def _step_shares(story: Story, started: Initialization | None) -> dict[str, float]:
    """Return the share of each class in the time of a step; initialization is one of its own."""
    during = {} if started is None else started.idle_ns
    shares: dict[str, float] = defaultdict(float)
    for row in story.run.leaves():
        share = story.figure(row)[1] or 0.0
        part = share * during.get(row.id, 0) / row.time_ns if row.time_ns else 0.0
        shares[class_of(row.id)] += share - part
        if part:
            shares[_STARTUP] += part
    return dict(shares)


def _bound_of_step(step: _Step, started: Initialization | None) -> tuple[str, float, str]:
    """Return the class that bounds a step, its share, and the sentence that says so."""
    story, run = step.story, step.story.run
    if (bound := _of_ranks(step)) is not None:
        return bound
    group = next(iter(step.groups))
    name, share = step.chosen(group)
    if name == _STARTUP and started is not None:
        return name, share, _of_startup(step, share, started)
    optimizer = next((g for g in story.by("phase") if g.key == _OPTIMIZER), None)
    if optimizer is not None and optimizer.time_ns > _HALF * run.observed_ns:
        share = optimizer.time_ns / run.observed_ns
        cause, time_ns = max(optimizer.causes.items(), key=lambda item: item[1])
        known = classes()[_OPTIMIZER]
        text = known.sentence.format(share=fmt.ratio(share), unit=_unit(story))
        most = known.part if class_of(cause) == _OPTIMIZER else fmt.inside(full_label(cause))
        return _OPTIMIZER, share, f"{text} ({fmt.ratio(time_ns / run.observed_ns)} {most})."
    return name, share, _of_step(step)


def _ranked(groups: Mapping[str, float]) -> list[str]:
    """Return the groups, the one that bounds the step first.

    Compute bounds it if it takes most of it; else the largest of the other groups does, even if
    compute takes longer: that time is what a reader can get back. What was not recorded comes
    first if it is the largest.
    """
    unknown, compute = groups.get("unknown", 0.0), groups.get("compute", 0.0)
    waste = max((s for g, s in groups.items() if g not in ("compute", "unknown")), default=0.0)
    is_bound = compute >= _COMPUTE_BOUND or waste < _LEAST_BOUND
    later = {"compute": not is_bound, "unknown": unknown < max(waste, compute)}
    return sorted(groups, key=lambda g: (later.get(g, False), -groups[g]))


def _loop_shares(story: Story) -> dict[str, float]:
    """Return the shares of the recorded loop that are not in ordinary steps, by class.

    They are the program's phases, and what first and long steps take beyond an ordinary one.
    """
    step = story.step
    if not step.loop_ns or story.unit == "window":
        return {}
    times = _phase_times(step)
    extras: Counter[str] = Counter()
    for kind in step.kinds:
        name, extra_ns = _extra(story, kind, times)
        extras[name] += extra_ns
    shares = times | extras
    return {name: time_ns / step.loop_ns for name, time_ns in shares.items() if name in classes()}


def _phase_times(step: StepTime) -> Counter[str]:
    """Return the time of the program's phases in the recorded loop, by class."""
    of_phase = _of_phases()
    times: Counter[str] = Counter()
    for phase, time_ns in step.loop_phases_ns.items():
        if phase in of_phase:
            times[of_phase[phase]] += time_ns
    return times


def _extra(story: Story, kind: StepKind, times: Mapping[str, int]) -> tuple[str, int]:
    """Return what steps of a kind take beyond ordinary ones, and its class; "" if it has none."""
    extra_ns = kind.time_ns - len(kind.steps) * (story.step.headline_ns or 0)
    _, *phases = kind.name.split(" + ")
    if len(phases) == 1 and (name := _of_phases().get(phases[0])):
        # A phase may have work beside it: a checkpoint's state is copied before it is saved.
        explained = times[name] >= _HALF * extra_ns
        return (name, extra_ns) if explained else (_LONG_STEPS, extra_ns - times[name])
    if kind.name.startswith(FIRST) and _starts_up(story, kind):
        return _STARTUP, extra_ns
    return (_LONG_STEPS, extra_ns) if kind.name.startswith(LONG) else ("", 0)


@cache
def _of_phases() -> dict[str, str]:
    return {phase: name for name, one in classes().items() for phase in one.phases}


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
        remedy=remedy(story.run, row.id),
        where=where,
        evidence=tuple(evidence(story, row.id)),
    )


def _of_step(step: _Step) -> str:
    """Return the sentence about a step."""
    known, story = classes(), step.story
    group, *other_groups = step.groups
    name, share = step.chosen(group)
    text = (story.is_on_host and known[name].on_host) or known[name].sentence
    text = text.format(share=fmt.ratio(share), unit=step.unit or _unit(story))
    parts = [
        f"{fmt.ratio(part)} {known[n].part or known[n].short}"
        for n, part in step.inside(group)[:3]
        if part >= _LEAST_SECOND and (name == group or n != name)
    ]
    if len(parts) > 1 or (parts and step.inside(group)[0][0] != name):
        text += f" ({', '.join(parts)})"
    if group != "unknown":
        text += _place(step, group if name == group else name)
    if group == "compute":
        text += _efficiency(story)
    if group == "communication":
        text += _ranks(story)
    second = max(other_groups, key=step.groups.__getitem__, default=group)
    if second != group and step.groups[second] >= _LEAST_SECOND:
        main, part = step.chosen(second)
        text += f"; {fmt.ratio(part)} is {known[main].short}"
    return f"{text}."


def _of_ranks(step: _Step) -> tuple[str, float, str] | None:
    """Return class, share and sentence if ranks wait for each other; None if that bounds no step.

    The shares are those of the ranks that wait: what the late one does instead is why they do.
    """
    run = step.story.run
    waited = sum(r.share_ratio or 0.0 for r in run.leaves() if class_of(r.id) in _WAITING)
    if waited < _LEAST_WAIT_RATIO:
        return None
    near = run.detail
    ranks = uneven(near, members_of(near), events_of(near))
    if ranks is None:
        return None
    all_wait = ranks.kind in ("pipeline", "taking_turns")
    times: dict[str, float] = defaultdict(float)
    for group in step.story.by("rank"):
        if all_wait or group.key != ranks.worst.rank:
            for cause, time_ns in group.causes.items():
                times[class_of(cause)] += time_ns
    whole_ns = max(sum(times.values()), 1)
    waiting = replace(step, shares={n: time_ns / whole_ns for n, time_ns in times.items()})
    first = next(iter(waiting.groups))
    if first != "communication" or waiting.inside(first)[0][0] not in _WAITING:
        return None
    share = waiting.inside(first)[0][1]
    name = _SAID.get(ranks.kind, ranks.kind)
    text = classes()[name].sentence.format(
        share=fmt.ratio(share),
        unit=_unit(step.story),
        rank=run.recording.part(ranks.worst.rank).name,
    )
    if ranks.work_ratio is not None and name in ("uneven_work", "experts", "ring"):
        text += f", which has {fmt.factor(ranks.work_ratio)} the work of the others"
    elif ranks.peers_ratio is not None:
        text += (
            f", which computes {fmt.factor(ranks.peers_ratio)} as long as the others of its stage"
        )
    elif ranks.kind == "late_rank" and ranks.worst.cause is not None:
        text += f", which spends more time on {fmt.inside(full_label(ranks.worst.cause))}"
    elif ranks.kind == "late_entry":
        text += ", which enters late though its own step takes no longer"
    return _STRAGGLER if name == "late_rank" else name, share, f"{text}."


def _unit(story: Story) -> str:
    """Return what shares are of; the traced step where an untraced one is much shorter."""
    if story.unit != "step":
        return "recorded window"
    step = story.step
    is_longer = (step.tracing_ratio or 0) > _MUCH_LONGER and story.idle_scale is None
    return "traced step" if is_longer else "step"


def _place(step: _Step, name: str) -> str:
    """Return the place that holds most of a class, or of a group: ``, most of it in …``."""
    run = step.story.run
    causes = [
        r.id for r in run.leaves() if name in (class_of(r.id), classes()[class_of(r.id)].group)
    ]
    where = place_of(run, step.links, causes)
    layer = where.layer and f"layer {where.layer}"
    phase = where.phase in _PHASES and where.phase
    location = where.line or layer or where.op or phase
    return f", most of it in {location}" if location else ""


def _efficiency(story: Story) -> str:
    """Return how near the peak a run computes, and how much of its communication is hidden."""
    run, text = story.run, ""
    ideal, observed = story.ideal_per_window_ns, story.step.headline_ns
    if ideal is not None and observed and story.is_ideal_whole:
        text += f"; at peak, model math would take {fmt.ratio(ideal / observed)} of it"
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
    each_ns = step.loop_ns / step.steps_count
    if each_ns <= _LONGER * (step.headline_ns or 0):
        return f"{text}. {of_step}"
    each = fmt.duration(each_ns)
    return f"{text}, which needs {each} per step; a step alone takes {ordinary}. {of_step}"


def _of_long_steps(
    story: Story, links: Mapping[int, Links], share: float, of_step: str
) -> tuple[str, str]:
    """Return the class of what makes single steps long, and the sentence about them."""
    step = story.step
    ordinary = f"An ordinary step takes {fmt.duration(step.headline_ns)}. {of_step}"
    times = _phase_times(step)
    extras = [(*_extra(story, kind, times), kind) for kind in step.kinds]
    *_, kind = max((e for e in extras if e[0] == _LONG_STEPS), key=lambda e: e[1])
    each_ns = kind.untraced.value_ns if kind.untraced else kind.time_ns / len(kind.steps)
    if not each_ns / _ALIKE < (kind.traced_mean_ns or 0) < each_ns * _ALIKE:
        text = classes()["long_untraced"].sentence
        text = text.format(share=fmt.ratio(share), unit="recorded loop")
        return _LONG_STEPS, f"{text}. {ordinary}"
    cause, time_ns = max(kind.causes_ns.items(), key=lambda item: item[1])
    text = classes()[_LONG_STEPS].sentence.format(share=fmt.ratio(share), unit="recorded loop")
    line = line_in_steps(story.run, links, kind.traced_steps, cause)
    text += (
        f": {fmt.count(len(kind.steps))} of {fmt.count(step.steps_count)}, "
        f"{fmt.duration(round(each_ns))} each, "
        f"{fmt.ratio(time_ns / sum(kind.causes_ns.values()))} of it {fmt.inside(full_label(cause))}"
    )
    most = f", most of it in {line}" if line else ""
    return class_of(cause), f"{text}{most}. {ordinary}"


def _of_startup(step: _Step, share: float, started: Initialization) -> str:
    """Return the sentence about initialization in the recorded time, and about the rest."""
    text = classes()[_STARTUP].sentence.format(share=fmt.ratio(share), unit=_unit(step.story))
    text += f": {started.description}"
    if share > _ALL:
        return f"{text}."
    other_shares = {n: s / (1 - share) for n, s in step.shares.items() if n != _STARTUP}
    rest = _of_step(replace(step, shares=other_shares, unit="rest"))
    return f"{text}. {rest}"


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


def _damaged(run: Attribution, sentence: str) -> str:
    """Prefix a sentence with the defect of the trace that it describes."""
    found = (checks()[f.code].damage for f in run.findings if f.code in checks())
    damages = [*dict.fromkeys(text for text in found if text)]
    if not damages:
        return sentence
    what = " and ".join(damages)
    return f"The trace {what}; what follows is of what was read. {sentence}"


def _memory(run: Attribution) -> str:
    """Return what memory does that ends or will end the run; empty where it does nothing."""
    memory_findings = (
        f for f in run.findings if f.code in ("memory.out_of_memory", "memory.growth")
    )
    return "".join(f" {as_sentence(f.message.partition(';')[0])}" for f in memory_findings)


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
    absent = next((f.message for f in run.findings if f.code == "trace.absent"), None)
    if absent is not None:
        return f"Cannot be told: {absent}. Record again to know where the time went."
    return "Cannot be told: nothing ran on a device in this trace; record a training step to know."
