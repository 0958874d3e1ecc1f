"""Rank what to fix first: patterns of a run, by the time that fixing each would save."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.idle import Waiting, waiting_calls
from chopper.analyzers.detectors import Sighting, declared, detector, function_of
from chopper.analyzers.events.collectives import members_of
from chopper.analyzers.events.device import Events, events_of
from chopper.analyzers.events.places import Where, largest
from chopper.analyzers.events.steps import spans_in_steps
from chopper.analyzers.replay.answers import summary
from chopper.analyzers.replay.changes import Applied
from chopper.analyzers.replay.job import ERROR_RATIO
from chopper.analyzers.replay.program import SYNC_END
from chopper.analyzers.replay.replay import Replay
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.names import is_program_frame
from chopper.analyzers.views.ranks import Uneven, uneven
from chopper.errors import ChopperError
from chopper.statistics import MIN_STEPS
from chopper.wording import ratio

_DEFECTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

_REPEATS = 0.9
"""Share of the later half's operators that the first half has, too."""
_GOES_ON = 0.25
"""Share of a pattern's time in the later half from which on it does not end."""
_RECURS_RATIO = 0.5
"""An untraced step that is at least this part of a traced one as long may hold the same."""
_WARM = 3
"""Number of the first step that surely allocates and compiles nothing for the first time."""


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """Something to try, and what a replay says that it gives back.

    Attributes:
        detector: its name; the declaration says what was seen and how to try.
        saved_ns: recoverable time of a step, mean over ranks and steps.
        ci95_ns: its 95 % interval over steps; None with fewer than three steps.
        saved_ratio: saved over observed time, each summed over the steps.
        of: of what that is the ratio: ``step``, or ``loop`` for what lies between the steps.
        step_ratios: lowest and highest of the single steps' ratios.
        where: the place.
        evidence: names and numbers.
        events_count: device events that it is about, over ranks and steps.
        rank_ns: what it is ranked by: ``saved_ns``, or the time of the causes it removes if less.
        longest: rank and start of the longest of them; None where there are none.
    """

    detector: str
    saved_ns: int
    ci95_ns: tuple[int, int] | None
    saved_ratio: float
    step_ratios: tuple[float, float]
    where: Where
    evidence: dict[str, Any]
    events_count: int
    rank_ns: int
    longest: tuple[int, int] | None = None
    of: Literal["step", "loop"] = "step"


class Actions(msgspec.Struct, frozen=True):
    """Actions that are worth trying, the most recoverable time first.

    Attributes:
        ranked: all actions.
        failed: detector → the error that ended it.
        dropped: patterns that were seen but are no actions, each with the reason.
        pace: host time of an untraced step as a share of the traced time; savings are of the
            untraced step.
    """

    ranked: list[Action]
    failed: dict[str, str]
    dropped: list[tuple[Action, str]] = []
    pace: float = 1.0


class Material:
    """Material of detectors, by the names of their parameters; each is made once."""

    def __init__(self, run: Attribution, replay: Replay) -> None:
        self.run = run
        self.links = replay.links
        """Rank → its joined events, of the ranks that the replay has."""

    @cached_property
    def events(self) -> Events:
        """Device events of all ranks in the steps."""
        return events_of(self.run)

    @cached_property
    def uneven(self) -> Uneven | None:
        """Why ranks wait for each other."""
        if len(self.run.joined) < 2:
            return None
        return uneven(self.run, members_of(self.run), self.events)

    @cached_property
    def waiting(self) -> dict[int, Waiting]:
        """Rank with a device → calls in its steps that waited for that."""
        return {
            rank: waiting_calls(links, spans_in_steps(self.run, rank)[0])
            for rank, links in self.links.items()
            if len(links.host) and not self.run.joined[rank].host_only
        }


def sightings(name: str, material: Material) -> Iterator[Sighting]:
    """Yield the places at which one detector sees its pattern."""
    find = function_of(name)
    yield from find(**{p: getattr(material, p) for p in inspect.signature(find).parameters})


def actions(run: Attribution, replay: Replay) -> Actions:
    """Rank the actions by the share of the step time that they save.

    Of a saving that exceeds the time of the causes it removes, no more than that time counts: the
    rest is waiting that other causes explain.

    A pattern is dropped, with the reason, if its saving is within the replay's own error, if one
    step alone shows it and no untraced step is as long, or if fewer than three steps were traced
    and a first iteration would show it too. A detector that fails takes nothing else with it.
    """
    run = run.detail
    material = Material(run, replay)
    ranked: list[tuple[Action, str]] = []
    failed: dict[str, str] = {}
    for name in sorted(declared()):
        try:
            ranked += [
                _action(material, replay, name, sighting) for sighting in sightings(name, material)
            ]
        except ChopperError as exc:
            failed[name] = str(exc)
        except _DEFECTS as exc:
            failed[name] = f"{type(exc).__name__}: {exc}"
    ranked.sort(key=lambda pair: -pair[0].rank_ns)
    return Actions(
        [action for action, doubt in ranked if not doubt],
        failed,
        [(action, doubt) for action, doubt in ranked if doubt],
        replay.pace,
    )


def _action(
    material: Material, replay: Replay, name: str, sighting: Sighting
) -> tuple[Action, str]:
    """Return the action of removing a pattern, and why it is withheld, "" if it is not."""
    if sighting.saved_ns is not None:
        action = _without_replay(material, name, sighting, sighting.saved_ns)
        return action, _within_error(action)
    steps = _steps(replay, sighting)
    observed, predicted, _, ci95 = summary(steps.values())
    saved = observed - predicted
    each = [(before - after) / before for before, after, _ in steps.values() if before]
    action = Action(
        detector=name,
        saved_ns=round(saved),
        ci95_ns=None if ci95 is None else (round(ci95[0]), round(ci95[1])),
        saved_ratio=saved / observed if observed else 0.0,
        step_ratios=(min(each, default=0.0), max(each, default=0.0)),
        where=where(material, sighting),
        evidence={**sighting.evidence},
        events_count=sum(map(len, sighting.events.values())),
        rank_ns=round(min(saved, _own_ns(material.run, sighting))),
        longest=_longest(material.run, sighting),
    )
    return action, _doubt(material, sighting, action, steps)


def _own_ns(run: Attribution, sighting: Sighting) -> float:
    """Return the time per step of the causes that a pattern removes; infinite if it names none."""
    fixed = sighting.changes.fix if sighting.changes is not None else ()
    if not fixed:
        return math.inf
    time_ns: int = sum(row.time_ns for row in run.leaves() if row.id.startswith(fixed))
    return time_ns / max(int(run.windows.num_rows), 1)


def _without_replay(material: Material, name: str, sighting: Sighting, saved_ns: int) -> Action:
    """Return the action of a pattern whose whole time would be gone."""
    run, step = material.run, material.run.step_time()
    whole_ns, steps = run.observed_ns / len(run.ranks), run.windows.num_rows / len(run.ranks)
    if sighting.of == "loop":
        whole_ns, steps = step.loop_ns, step.steps_count
    share = saved_ns / whole_ns
    return Action(
        detector=name,
        saved_ns=round(saved_ns / steps),
        ci95_ns=None,
        saved_ratio=share,
        step_ratios=(share, share),
        where=where(material, sighting),
        evidence={**sighting.evidence},
        events_count=0,
        rank_ns=round(saved_ns / steps),
        of=sighting.of,
    )


def _within_error(action: Action) -> str:
    if action.saved_ratio > ERROR_RATIO:
        return ""
    return f"saves {ratio(max(action.saved_ratio, 0.0))}, within the replay's error"


def _doubt(
    material: Material,
    sighting: Sighting,
    action: Action,
    steps: Mapping[int, tuple[int, float, int]],
) -> str:
    """Return why the saving of an action is not certain; "" where it is."""
    if doubt := _within_error(action):
        return doubt
    run = material.run
    numbers = run.windows["number"].to_pylist()
    if len(steps) < MIN_STEPS:
        is_warm = bool(numbers) and all(n is not None and n >= _WARM for n in numbers)
        if is_warm or detector(action.detector).in_every_step or _goes_on(material, sighting):
            return ""
        return f"fewer than {MIN_STEPS} steps were traced, and a first iteration shows it as well"
    by_saving = sorted(steps.values(), key=lambda step: step[0] - step[1])
    *shorter, (longest_ns, _, windows) = by_saving
    if sum(b - a for b, a, _ in shorter) > ERROR_RATIO * sum(b for b, _, _ in shorter):
        return ""
    untraced = [kind.untraced for kind in run.step_time().kinds if kind.untraced is not None]
    if any(t >= _RECURS_RATIO * longest_ns / windows for u in untraced for t in u.lengths_ns):
        return ""
    return f"shortens one of {len(steps)} traced steps alone, and no untraced step is as long"


def _goes_on(material: Material, sighting: Sighting) -> bool:
    """Return whether the second half of the recording repeats the first, pattern included.

    A first iteration is then not what shows it.
    """
    run, fixed = material.run, sighting.changes.fix if sighting.changes is not None else ()
    if not fixed or not run.windows.num_rows:
        return False
    start_ns, end_ns = ints(run.windows, "start_ns"), ints(run.windows, "end_ns")
    middle_ns = int(start_ns.min() + (end_ns.max() - start_ns.min()) // 2)
    for links in material.links.values():
        host = links.host
        operators = host.of("cpu_op")
        later = host.start_ns >= middle_ns
        codes, values = host.names
        known = np.zeros(len(values), dtype=bool)
        known[codes[operators & ~later]] = True
        if not (operators & later).any() or known[codes[operators & later]].mean() < _REPEATS:
            return False
    causes, names = strings(run.gaps, "cause")
    mine = np.isin(causes, [i for i, name in enumerate(names) if name.startswith(tuple(fixed))])
    begin_ns, until_ns = ints(run.gaps, "start_ns")[mine], ints(run.gaps, "end_ns")[mine]
    later_ns = np.maximum(until_ns - np.maximum(begin_ns, middle_ns), 0).sum()
    return bool(later_ns >= _GOES_ON * (until_ns - begin_ns).sum() > 0)


def _longest(run: Attribution, sighting: Sighting) -> tuple[int, int] | None:
    """Return rank and start of the longest device event that a pattern is about."""
    longest = (-1, 0, 0)
    for rank, rows in sighting.events.items():
        events = run.joined[rank].device_event
        dur_ns = ints(events, "dur_ns")[rows]
        if len(rows):
            at = int(dur_ns.argmax())
            start_ns = int(ints(events, "start_ns")[rows[at]])
            longest = max(longest, (int(dur_ns[at]), rank, start_ns))
    return longest[1:] if longest[0] >= 0 else None


def _steps(replay: Replay, sighting: Sighting) -> dict[int, tuple[int, float, int]]:
    """Return the observed and the predicted time of each step without the pattern."""
    of_rows = sighting.gone, sighting.run_ns, sighting.host_gone, sighting.calm
    if replay.job is not None and sighting.changes is not None and not any(of_rows):
        of_all_ranks = replay.job.steps_of(sighting.changes)
        if of_all_ranks is not None:
            return of_all_ranks
    scenario = replay.scenario()
    if sighting.changes is not None:
        spent = {row.id for row in replay.run.causes() if row.time_ns}
        applied = Applied(scenario, replay.facts, replay.coupled_ratio, spent)
        applied.apply(sighting.changes)
    for position, node in enumerate(scenario.ranks):
        count = len(node.start)
        if node.rank in sighting.gone:
            gone = np.zeros(count, dtype=bool)
            gone[sighting.gone[node.rank]] = True
            scenario.without_events(position, gone)
        if node.rank in sighting.run_ns:
            rows, run_ns = sighting.run_ns[node.rank]
            dur_ns = node.links.events.dur_ns
            # Of a collective, the waiting for other ranks is the schedule's, not its own.
            transfer_ns = np.where(node.coupled, node.transfer_ns, dur_ns)[rows]
            changed = scenario.run_ns.setdefault(position, np.full(count, -1, dtype=np.int64))
            changed[rows] = np.maximum(transfer_ns - (dur_ns[rows] - run_ns), 0)
        if node.rank in sighting.host_gone:
            spans = np.append(sighting.host_gone[node.rank], False)
            scenario.without_host(position, spans[node.program.parts.span])
        if node.rank in sighting.calm:
            at_call = np.isin(node.program.row, sighting.calm[node.rank])
            scenario.calm[position] = at_call & (node.program.kind == SYNC_END)
    return replay.compared(scenario.solve())


def where(material: Material, sighting: Sighting) -> Where:
    """Return the place of a pattern: of the time in its causes, where it has some.

    Events that would run for a shorter time count by their time, others by their number; time in
    causes is that of its operator.
    """
    events = material.events
    if sighting.changes is not None and sighting.changes.fix and sighting.phase is None:
        fixed = tuple(sighting.changes.fix)
        spent = [row.id for row in material.run.leaves() if row.id.startswith(fixed)]
        sighting = replace(sighting, phase=largest(material.run, "phase", spent))
    chosen = np.zeros(len(events), dtype=bool)
    for rank, rows in sighting.events.items():
        mine = np.flatnonzero(events.rank == rank)
        chosen[mine[np.isin(events.row[mine], rows)]] = True
    weight = events.dur_ns if sighting.gone or sighting.run_ns else np.ones_like(events.dur_ns)
    layer = None
    for rank, rows in [*sighting.events.items()][:1]:
        codes, values = material.links[rank].layers
        layer = _most((codes[rows], values), np.ones(len(rows)))
    op = sighting.op
    if op is None:
        op = _most((events.op[0][chosen], events.op[1]), weight[chosen])
    return Where(
        phase=sighting.phase or _most((events.phase[0][chosen], events.phase[1]), weight[chosen]),
        layer=layer,
        op=op or None,
        line=sighting.line or _line(material, sighting),
    )


def _most(texts: tuple[np.ndarray, list[str]], weight: np.ndarray) -> str | None:
    """Return the text that holds more than half of the weight."""
    codes, values = texts
    if not len(codes) or not values:
        return None
    held = np.bincount(codes + 1, weights=weight, minlength=len(values) + 1)
    best = int(held[1:].argmax())
    return values[best] if held[best + 1] > 0.5 * held.sum() else None


def _line(material: Material, sighting: Sighting) -> str | None:
    """Return the program's frame around most of the calls; libraries are passed over."""
    line_counts: Counter[str] = Counter()
    for rank, calls in sighting.calls.items():
        host = material.links[rank].host
        frame = host.nesting.nearest(host.of("python") & host.named(is_program_frame))[calls]
        codes, values = host.names
        line_counts.update(values[code] for code in codes[frame[frame >= 0]].tolist())
    return max(line_counts, key=line_counts.__getitem__, default=None)
