"""The dependency graph of an attributed run, run again with changes."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from chopper import api
from chopper import wording as fmt
from chopper.analyzers.replay.changes import RankFacts, not_fixable, remove_causes
from chopper.analyzers.replay.graph import build
from chopper.analyzers.replay.path import LAG, causes_of, path_of
from chopper.analyzers.replay.scenario import Base, Scenario
from chopper.analyzers.trace.columns import ints
from chopper.attribution import Recoverable
from chopper.causes import LEAVES
from chopper.errors import InputError
from chopper.replaying import traces
from chopper.replaying.answers import WhatIf, summary
from chopper.replaying.applying import apply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.analyzers.replay.path import Path as CriticalPath
    from chopper.analyzers.replay.scenario import Outcome
    from chopper.attribution import Attribution
    from chopper.replaying.asked import Changes
    from chopper.storage.run import Run

ERROR_RATIO = 0.01
"""An unmodified replay that is further from the observed time says nothing about changes."""
_SAID_LAUNCHED_RATIO = 0.99
_LAG_RATIO = 0.1
_COUPLED_RATIO = 0.5
_FREE_RATIO = 0.01
_CONTRADICTED_RATIO = 0.1


class Replay:
    """The dependency graph of an attributed run, to be run again with changes.

    Raises:
        InputError: the run cannot be replayed: what it lacks.
    """

    def __init__(self, attribution: Attribution) -> None:
        whole = attribution.whole
        # Steps depend on those before them: all kinds are replayed, and one is counted.
        other = None if whole is attribution else replay_of(whole)
        self.attribution = attribution
        self.base: Base = other.base if other else _base_of(attribution.run)
        self.unmodified: Outcome = self.base.outcome
        self.facts: list[RankFacts] = other.facts if other else _facts_of(attribution, self.base)
        ranks = ints(attribution.windows, "rank")
        numbers = ints(attribution.windows, "number")
        self.counted: list[np.ndarray] = [
            np.isin(node.joined.windows.numbers, numbers[ranks == node.rank])
            for node in self.base.graph.ranks
        ]
        """Mask of the windows of each rank that the attribution is of."""
        self.error_ratio: float = other.error_ratio if other else self._error()
        if self.error_ratio > ERROR_RATIO:
            raise InputError(
                f"{attribution.run.source}: cannot be replayed: unchanged, the replay is "
                f"{self.error_ratio:.1%} off (bar {ERROR_RATIO:.0%}); the order of its events "
                "contradicts what they depend on"
            )

    def scenario(self) -> Scenario:
        """A scenario without changes."""
        return Scenario(self.base)

    def _error(self) -> float:
        """How far the unmodified replay is from the observed time, window by window."""
        observed = off = 0
        for place, node in enumerate(self.base.graph.ranks):
            length = np.diff(node.joined.windows.bounds_ns)
            observed += int(length.sum())
            off += int(np.abs(np.diff(self.unmodified.windows(place)) - length).sum())
        return off / max(observed, 1)

    @cached_property
    def coupled_ratio(self) -> float | None:
        """Share of the communication events that are matched on all ranks; None without any."""
        sent = coupled = 0
        for node in self.base.graph.ranks:
            rows = node.joined.communication.event_row
            sent += len(rows)
            coupled += int(node.coupled[rows].sum())
        return coupled / sent if sent else None

    @cached_property
    def notes(self) -> list[str]:
        """What limits every prediction for this run."""
        graph = self.base.graph
        notes = []
        if self.attribution.whole is not self.attribution:
            step = self.attribution.step_time()
            others = ", ".join(
                f"{len(k.traced)} of {k.name}"
                for k in step.kinds
                if k.traced and k.name != step.kind
            )
            notes.append(
                f"the times are of {fmt.plural(step.traced_count, 'traced step')} of {step.kind}; the "
                f"others ({others}) are replayed with them and not counted"
            )
        events = self.base.events
        if graph.free > _FREE_RATIO * events:
            notes.append(
                f"{graph.free / events:.1%} of the device events wait for nothing that was recorded: "
                "they stay where they were"
            )
        edges = len(graph.source) + graph.contradicted
        if graph.contradicted > _CONTRADICTED_RATIO * edges:
            notes.append(
                f"{graph.contradicted / edges:.1%} of the dependencies were observed in another order "
                "and are left out"
            )
        beside = [n.joined.links for n in graph.ranks if not n.joined.host_only]
        count = sum(len(links.events) for links in beside)
        launched = sum(int(links.has_launch.sum()) for links in beside)
        if launched < _SAID_LAUNCHED_RATIO * count:
            notes.append(
                f"{1 - launched / count:.0%} of the device events have no recorded launch: they follow "
                "what ran before them, or what the host did last"
            )
        lag_ratio = self._lag_ratio()
        if lag_ratio > _LAG_RATIO:
            notes.append(
                f"{lag_ratio:.0%} of the critical path is waiting that no recorded dependency explains: "
                "it is taken to last as long whatever changes"
            )
        if self.coupled_ratio is not None and self.coupled_ratio < _COUPLED_RATIO:
            notes.append(
                "collectives are not matched on all their ranks: each takes as long as observed, "
                "whenever it begins"
            )
        return notes

    def _lag_ratio(self) -> float:
        """Share of the critical path on which nothing recorded was waited for."""
        path = self.critical_path()
        length = path.length_ns
        return float(length[path.kind == LAG].sum() / max(length.sum(), 1))

    def totals(self, outcome: Outcome) -> list[int]:
        """Time of the windows of each rank that are counted."""
        return [
            int(np.diff(outcome.windows(place))[counted].sum())
            for place, counted in enumerate(self.counted)
        ]

    def reference(self, outcome: Outcome) -> int | None:
        """Place of the rank that all are taken to be like; None unless ranks are uncoupled.

        Without stragglers every rank takes as long as the middle one does on its own: of two, the
        quicker.
        """
        if not outcome.scenario.uncoupled:
            return None
        totals = self.totals(outcome)
        order = sorted(range(len(totals)), key=totals.__getitem__)
        return order[(len(order) - 1) // 2]

    def step_times(self, outcome: Outcome) -> dict[int | None, int]:
        """Number of each step → the longest window of all ranks."""
        alike = self.reference(outcome)
        longest: dict[int | None, int] = {}
        for place, node in enumerate(self.base.graph.ranks):
            if alike is not None and place != alike:
                continue
            counted = self.counted[place]
            lengths = np.diff(outcome.windows(place))[counted].tolist()
            numbers = node.joined.windows.numbers[counted].tolist()
            for number, length in zip(numbers, lengths, strict=True):
                key = None if number < 0 else int(number)
                longest[key] = max(longest.get(key, 0), int(length))
        return dict(sorted(longest.items(), key=lambda item: -1 if item[0] is None else item[0]))

    def gives_back(self, causes: Sequence[str]) -> int:
        """What removing causes gives back, summed over ranks and steps."""
        scenario = self.scenario()
        remove_causes(scenario, self.facts, causes)
        outcome = scenario.solve()
        before = self.totals(self.unmodified)
        after = self.totals(outcome)
        alike = self.reference(outcome)
        if alike is not None:
            after = [after[alike]] * len(after)
        return max(sum(before) - sum(after), 0)

    def recoverable(self) -> dict[str, Recoverable]:
        """What each cause with time in it would give back if it were gone."""
        found: dict[str, Recoverable] = {}
        # A parent whose only leaf with time is its child gives back the same.
        by_leaves: dict[frozenset[str], int] = {}
        rows = self.attribution.causes()
        spent = {row.id for row in rows if row.time_ns}
        for row in rows:
            why = row.withheld or not_fixable(row.id) or self._needs_all_ranks(row.id)
            if why:
                found[row.id] = Recoverable(None, why)
                continue
            whole = row.id in ("communication", "communication.transfer")
            leaves = frozenset(
                [c for c in LEAVES if c in spent and (c == row.id or c.startswith(row.id + "."))]
                + ([row.id] if whole else [])
            )
            if leaves not in by_leaves:
                by_leaves[leaves] = self.gives_back([row.id] if whole else sorted(leaves))
            found[row.id] = Recoverable(by_leaves[leaves])
        return found

    def _needs_all_ranks(self, cause: str) -> str | None:
        if cause == "communication.wait" and not self.coupled_ratio:
            return "no collective was seen on all ranks of its group"
        return None

    def whatif(self, changes: Changes) -> WhatIf:
        """The run with changes, beside what was observed."""
        applied = apply(changes, self)
        outcome = applied.scenario.solve()
        observed = self.step_times(self.unmodified)
        predicted = self.step_times(outcome)
        pairs = {n: (observed[n], predicted.get(n, 0)) for n in observed}
        mean_observed, mean_predicted, interval, saved = summary(list(pairs.values()))
        alike = self.reference(outcome)
        run = self.attribution.run
        replayed = api.attribute(traces.replayed(self, outcome, alike)).of_steps(
            [-1 if number is None else number for number in pairs]
        )
        closed = sum(replayed.step_time_ns()) / max(len(pairs), 1)
        if abs(closed - mean_predicted) > ERROR_RATIO * max(mean_predicted, 1.0):
            off = (closed - mean_predicted) / max(mean_predicted, 1.0)
            applied.notes.append(
                f"the causes of the changed run are of steps {abs(off):.1%} {'longer' if off > 0 else 'shorter'} "
                "than predicted: events without a launch are placed by their time, which cuts the steps elsewhere"
            )
        if warmed := list(outcome.scenario.warmed.values()):
            waits = sum(w.waits_count for w in warmed)
            each = fmt.duration(sum(w.saved_ns for w in warmed) / waits)
            applied.notes.append(
                f"the host's work after {fmt.plural(waits, 'wait')} that are gone "
                f"is taken to be as quick as later in the same steps, when caches are warm: {each} less after each"
            )
        path = causes_of(outcome, self.critical_path(outcome), self.facts)
        rows = sorted(((c, n, t) for (c, n), t in path.items()), key=lambda row: -row[2])
        return WhatIf(
            source=run.source,
            changes=applied.said,
            observed_step_ns=mean_observed,
            predicted_step_ns=mean_predicted,
            predicted_ci95_ns=interval,
            saved_ci95_ns=saved,
            steps=pairs,
            error_ratio=self.error_ratio,
            notes=[*self.notes, *applied.notes],
            attribution=replayed,
            observed=self.attribution,
            reference_rank=None if alike is None else self.base.graph.ranks[alike].rank,
            path=rows,
        )

    def critical_path(self, outcome: Outcome | None = None) -> CriticalPath:
        """The critical path of the counted windows: of the run as it was, or of an outcome."""
        outcome = outcome or self.unmodified
        path = path_of(outcome, self.reference(outcome))
        if all(counted.all() for counted in self.counted):
            return path
        windows = []
        for place, counted in enumerate(self.counted):
            bounds = outcome.windows(place)
            windows.append(np.stack([bounds[:-1], bounds[1:]], axis=1)[counted])
        return path.within(windows)


def _base_of(run: Run) -> Base:
    """The dependency graph of a run.

    Raises:
        InputError: the run cannot be replayed: what it lacks.
    """
    joined, _ = api._join(run)
    matched = api._match(run, joined)
    usable = [j for j in joined if len(j.windows)]
    if not usable:
        raise InputError(
            f"{run.source}: cannot be replayed: no device event and no operator was recorded"
        )
    if not all(j.windows.recorded.all() for j in usable):
        raise InputError(
            f"{run.source}: cannot be replayed: it was traced in several windows, and what ran "
            "between them is not known; name the trace of one of them"
        )
    traces.check_launches(run.source, usable)
    return Base(build([(j, matched.get(j.given.rank)) for j in usable]))


def _facts_of(attribution: Attribution, base: Base) -> list[RankFacts]:
    ranks = attribution.pieces["rank"].to_numpy()
    alone = len(attribution.ranks) == 1
    return [
        RankFacts(
            node,
            attribution.pieces if alone else attribution.pieces.filter(ranks == node.rank),
            attribution.factors.get(node.rank),
        )
        for node in base.graph.ranks
    ]


def replay_of(attribution: Attribution) -> Replay:
    """The replay of an attribution, made once.

    Raises:
        InputError: the run cannot be replayed.
    """
    cache = attribution._cache
    if "replay" not in cache:
        cache["replay"] = Replay(attribution)
    found: Replay = cache["replay"]
    return found


def recoverable(attribution: Attribution) -> dict[str, Recoverable]:
    """What each cause would give back if it were gone; null with the reason where not known."""
    cache = attribution._cache
    if "recoverable" not in cache:
        try:
            cache["recoverable"] = replay_of(attribution).recoverable()
        except InputError as exc:
            reason = str(exc).partition(": ")[2]
            cache["recoverable"] = {
                row.id: Recoverable(None, reason) for row in attribution.causes()
            }
    found: dict[str, Recoverable] = cache["recoverable"]
    return found


__all__ = ["ERROR_RATIO", "Replay", "recoverable", "replay_of"]
