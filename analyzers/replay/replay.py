"""The dependency graph of an attributed run, run again with changes."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from chopper import wording as fmt
from chopper.analyzers.attribution import Recoverable, is_staged
from chopper.analyzers.replay.answers import WhatIf, summary
from chopper.analyzers.replay.changes import Applied, CauseTimes, remove_causes, set_pace
from chopper.analyzers.replay.graph import RankNodes, build
from chopper.analyzers.replay.job import ERROR_RATIO, predicted_of
from chopper.analyzers.replay.path import LAG, Lane, causes_of, lane_of, path_of
from chopper.analyzers.replay.scenario import Base, Scenario
from chopper.analyzers.replay.schedule import tables
from chopper.analyzers.replay.whatif_options import UNCOUPLING, not_fixable
from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import ints, row_set
from chopper.analyzers.trace.join import Links
from chopper.analyzers.trace.tables import HostSpans
from chopper.errors import InputError
from chopper.wording import ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa

    from chopper.analyzers.attribution import Attribution
    from chopper.analyzers.replay.changes import LinkChange
    from chopper.analyzers.replay.job import Predicted
    from chopper.analyzers.replay.path import Path as CriticalPath
    from chopper.analyzers.replay.scenario import Outcome
    from chopper.analyzers.replay.whatif_options import Changes
    from chopper.analyzers.trace.rank_join import JoinedRank

CI95_DEVIATIONS = 1.96
"""Standard errors to either end of an interval of 95 %."""
_LAUNCHED_RATIO = 0.5
_SAID_LAUNCHED_RATIO = 0.99
_LAG_RATIO = 0.1
_COUPLED_RATIO = 0.5
_FREE_RATIO = 0.01
_CONTRADICTED_RATIO = 0.1
_LEAST_PACE = 0.1
"""No recording slows a host more than tenfold."""
_PACE_PRECISION = 0.005
_FLAT = 1.02
"""A step that changes by less does not depend on the host."""


class Replay:
    """The dependency graph of an attributed run, to be run again with changes.

    Raises:
        InputError: the run cannot be replayed: what it lacks.
    """

    def __init__(self, run: Attribution) -> None:
        self.whole = run
        """The attribution that the replay is of; of a large run, predictions rest on all of it."""
        run = self.run = run.detail
        # Steps depend on those before them: all kinds are replayed, and one is counted.
        self.base: Base = _base_of(run)
        self.unmodified: Outcome = self.base.outcome
        self.lanes: list[tuple[CriticalPath, dict[int, Lane]]] = []
        """Lanes of paths, as :func:`lanes_of` returned them."""
        self._paths: dict[tuple[int, ...], CriticalPath] = {}
        """Critical paths of the run as it was, by the ranks at whose end they end."""
        self.facts: list[CauseTimes] = _facts_of(run.all_steps, self.base)
        self.counted: list[np.ndarray] = _counted(run, self.base)
        """Mask of the windows of each rank that the attribution is of."""
        self.error_ratio: float = self._error()
        if self.error_ratio > ERROR_RATIO:
            raise InputError(
                f"{run.source}: cannot be replayed: without changes, the replay is off by "
                f"{fmt.ratio(self.error_ratio)} (limit {fmt.percent(ERROR_RATIO, '.0f')}); "
                "the order of its events contradicts their dependencies"
            )

    @property
    def links(self) -> dict[int, Links]:
        """The joined events of each rank."""
        return {node.rank: node.links for node in self.base.graph.ranks}

    def counting(self, run: Attribution) -> Replay:
        """Return the same replay, with the windows of another part of the run counted."""
        other = copy(self)
        for name in ("coupled_ratio", "notes", "_observed"):
            other.__dict__.pop(name, None)
        other.whole = other.run = run
        other.counted = _counted(run, self.base)
        return other

    def scenario(self) -> Scenario:
        """A scenario without changes, at the host's pace without tracing."""
        scenario = Scenario(self.base)
        if self.pace < 1:
            set_pace(scenario, self.pace)
        return scenario

    @cached_property
    def pace(self) -> float:
        """Share of its traced time that the host's work takes without tracing; 1 if not known."""
        step = self.run.step_time()
        host_only = all(node.joined.host_only for node in self.base.graph.ranks)
        if host_only or step.untraced is None or not any(c.any() for c in self.counted):
            return 1.0
        slowed = step.untraced.value_ns if step.is_tracing_certain else None
        return host_pace(self._step_at, slowed, step.drained_ns)

    def _step_at(self, pace: float, is_host_alone: bool) -> float:
        """Return the mean window at a pace of the host, with the device or without."""
        scenario = Scenario(self.base)
        set_pace(scenario, pace)
        if is_host_alone:
            without_device(scenario)
        return sum(self.totals(scenario.solve())) / sum(int(c.sum()) for c in self.counted)

    @cached_property
    def untraced(self) -> Outcome:
        """The run without changes at the host's pace without tracing."""
        return self.unmodified if self.pace == 1 else self.scenario().solve()

    def _error(self) -> float:
        """Relative distance of the unmodified replay from the observed time, over windows."""
        observed = off = 0
        for rank_index, node in enumerate(self.base.graph.ranks):
            length = np.diff(node.joined.windows.bounds_ns)
            observed += int(length.sum())
            off += int(np.abs(np.diff(self.unmodified.windows(rank_index)) - length).sum())
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
        """Sentences on what limits every prediction for this run."""
        graph = self.base.graph
        notes = []
        if self.run.all_steps is not self.run:
            step = self.run.step_time()
            uncounted = [
                f"{len(k.traced_steps)} of {k.name}"
                for k in step.kinds
                if k.traced_steps and k.name != step.kind
            ]
            if self.run.all_steps.windows["number"].null_count:
                uncounted.append("ranks without numbered steps")
            notes.append(
                f"the times are of {fmt.plural(step.traced_count, 'traced step')} of "
                f"{step.kind}; the others ({', '.join(uncounted)}) are replayed too, "
                "but not counted"
            )
        events = self.base.events_count
        if graph.free > _FREE_RATIO * events:
            notes.append(
                f"{fmt.ratio(graph.free / events)} of the device events depend on nothing that was "
                "recorded: they stay where they were"
            )
        edges = len(graph.source) + graph.contradicted
        if graph.contradicted > _CONTRADICTED_RATIO * edges:
            notes.append(
                f"{fmt.ratio(graph.contradicted / edges)} of the dependencies contradict the "
                "observed order and are ignored"
            )
        device_links = [n.links for n in graph.ranks if not n.joined.host_only]
        count = sum(len(links.events) for links in device_links)
        launched = sum(int(links.has_launch.sum()) for links in device_links)
        if launched < _SAID_LAUNCHED_RATIO * count:
            notes.append(
                f"{fmt.ratio(1 - launched / count)} of the device events have no recorded "
                "launch: they follow the work before them, or the last host work"
            )
        path = self.critical_path()
        lag_ratio = path.length_ns[path.kind == LAG].sum() / max(path.length_ns.sum(), 1)
        if lag_ratio > _LAG_RATIO:
            notes.append(
                f"{fmt.ratio(lag_ratio)} of the critical path is waiting that no recorded "
                "dependency explains: it is assumed not to change"
            )
        coupled_ratio = self.coupled_ratio if self.job is None else None
        if coupled_ratio is not None and coupled_ratio < _COUPLED_RATIO:
            notes.append(
                "collectives are not matched on all their ranks: each keeps its observed "
                "duration, whenever it starts"
            )
        return notes

    def totals(self, outcome: Outcome) -> list[int]:
        """Time of the windows of each rank that are counted."""
        return [
            int(np.diff(outcome.windows(rank_index))[counted].sum())
            for rank_index, counted in enumerate(self.counted)
        ]

    def reference(self, outcome: Outcome) -> int | None:
        """Place of the rank that all are taken to be like; None unless ranks are uncoupled.

        Without stragglers every rank takes as long as the middle one does on its own: of two, the
        quicker.
        """
        if not outcome.scenario.uncoupled:
            return None
        totals = self.totals(outcome)
        # Ranks without a counted window are no measure of the others.
        order = sorted(np.flatnonzero(totals).tolist(), key=totals.__getitem__)
        return order[(len(order) - 1) // 2]

    def _windows(self, outcome: Outcome) -> dict[int, tuple[int, int]]:
        """Return by step, -1 for windows without a number: time of its rank windows, their count.

        Where ranks are uncoupled, of the rank that all are taken to be like.
        """
        alike = self.reference(outcome)
        steps: dict[int, tuple[int, int]] = {}
        for rank_index, node in enumerate(self.base.graph.ranks):
            if alike is not None and rank_index != alike:
                continue
            counted = self.counted[rank_index]
            lengths = np.diff(outcome.windows(rank_index))[counted].tolist()
            numbers = node.joined.windows.numbers[counted].tolist()
            for number, length in zip(numbers, lengths, strict=True):
                total, windows = steps.get(number, (0, 0))
                steps[number] = total + length, windows + 1
        return dict(sorted(steps.items()))

    @cached_property
    def _observed(self) -> dict[int, tuple[int, int]]:
        return self._windows(self.untraced)

    def gives_back(self, causes: Sequence[str]) -> Recoverable:
        """Return what a step without these causes takes less."""
        scenario = self.scenario()
        remove_causes(scenario, self.facts, causes)
        observed, predicted, _, saved = summary(self.compared(scenario.solve()).values())
        low_high = None if saved is None else (round(saved[0]), round(saved[1]))
        return Recoverable(round(observed - predicted), low_high)

    def compared(self, outcome: Outcome) -> dict[int, tuple[int, float, int]]:
        """Return by step, -1 for windows without a number, its time before and after the changes.

        Both are at the host's pace without tracing, and summed over its rank windows, whose count
        stands beside them.
        """
        observed, predicted = self._observed, self._windows(outcome)
        steps: dict[int, tuple[int, float, int]] = {}
        for number in [n for n in observed if n in predicted]:
            (before, windows), (after, as_many) = observed[number], predicted[number]
            steps[number] = before, after * (windows / as_many), windows
        return steps

    @property
    def job(self) -> Predicted | None:
        """Predictions that rest on all ranks, where not all are replayed here."""
        return predicted_of(self.whole)

    def recoverable(self) -> dict[str, Recoverable]:
        """Return what each cause with time in it would give back if it were gone."""
        savings: dict[str, Recoverable] = {}
        job = self.job
        coupled_ratio = self.coupled_ratio if job is None else job.coupled_ratio
        rows = self.run.causes() if job is None else self.whole.causes()
        waits = {row.id: row.time_ns for row in rows if row.id in UNCOUPLING}
        for row in rows:
            why = row.withheld or not_fixable(row.id)
            if row.id in UNCOUPLING and not coupled_ratio:
                why = why or "no collective was seen on all ranks of its group"
            if row.id == "communication.wait" and is_staged(self.run):
                why = why or "without any waiting the bubble would be gone, too: --fix all keeps it"
            more = row.id in UNCOUPLING and max(waits, key=waits.__getitem__)
            if more and more != row.id:
                why = why or f"without any waiting {more} would be gone, too"
            if why:
                savings[row.id] = Recoverable(None, reason=why)
            else:
                known = None if job is None else job.saving(row.id)
                savings[row.id] = known or self.gives_back([row.id])
        return savings

    def predict(self, changes: Changes, deviations: float = 0.0) -> Prediction:
        """Replay the run with changes.

        Args:
            changes: what is changed.
            deviations: how many standard errors above their estimates sensitivities to the clock
                are taken.

        Raises:
            UsageError: a change that this run has no data for, or that names nothing in it.
        """
        job, run = self.job, self.run
        coupled_ratio = self.coupled_ratio
        if job is not None:
            run, coupled_ratio = self.whole, job.coupled_ratio
        spent = {row.id for row in run.causes() if row.time_ns}
        applied = Applied(self.scenario(), self.facts, coupled_ratio, spent, deviations)
        if job is not None and changes.of_link:
            applied.link_facts = self._link_facts()
        applied.apply(changes)
        outcome = applied.scenario.solve()
        return Prediction(
            self,
            outcome,
            self.reference(outcome),
            self.compared(outcome),
            applied.described,
            applied.notes,
            applied.link_change,
        )

    def _link_facts(self) -> list[CauseTimes]:
        """Return facts of these ranks, their collectives matched with those of all other ranks."""
        matched = self.whole.all_steps.matched
        return [
            CauseTimes(
                RankNodes(fact.node.joined, matched.get(fact.node.rank), (0, 0, 0)),
                fact.piece,
                fact.factors,
            )
            for fact in self.facts
        ]

    def critical_path(self, outcome: Outcome | None = None) -> CriticalPath:
        """The critical path of the counted windows: of the run as it was, or of an outcome."""
        outcome = outcome or self.unmodified
        alike = self.reference(outcome)
        ends_on = [rank_index for rank_index, windows in enumerate(self.counted) if windows.any()]
        ends = tuple(ends_on if alike is None else [alike])
        known = self._paths if outcome is self.unmodified else {}
        path = known[ends] if ends in known else known.setdefault(ends, path_of(outcome, ends))
        if all(counted.all() for counted in self.counted):
            return path
        windows = []
        for rank_index, counted in enumerate(self.counted):
            bounds = outcome.windows(rank_index)
            windows.append(np.stack([bounds[:-1], bounds[1:]], axis=1)[counted])
        return path.within(windows)


@dataclass(frozen=True)
class Prediction:
    """A replay with changes.

    Attributes:
        replay: of the run.
        outcome: when everything comes.
        reference: index of the rank that all are taken to be like; None unless ranks are uncoupled.
        steps: as :meth:`Replay.compared` returns them.
        described: the changes in words.
        notes: what limits the prediction.
        link_change: of the link; None where it stays.
        job: of all ranks, its first case with these changes; None where all are replayed here.
    """

    replay: Replay
    outcome: Outcome
    reference: int | None
    steps: dict[int, tuple[int, float, int]]
    described: list[str]
    notes: list[str]
    link_change: LinkChange | None = None
    job: Predicted | None = None

    def clock_range_ns(self, changes: Changes) -> tuple[float, float]:
        """Mean step with every sensitivity to the clock 1.96 standard errors too low, and too high.

        Raises:
            UsageError: see :meth:`Replay.predict`.
        """
        if self.job is not None:
            low, high = (summary(self.job.steps(case).values())[1] for case in (1, 2))
        else:
            low, high = (
                summary(self.replay.predict(changes, deviations).steps.values())[1]
                for deviations in (-CI95_DEVIATIONS, CI95_DEVIATIONS)
            )
        return low, high

    def tables(self) -> dict[int, dict[str, pa.Table]]:
        """Return the tables of the changed run by rank and name."""
        ranks = self.replay.base.graph.ranks
        if self.reference is not None:
            alike = tables(self.outcome, self.reference)
            return {node.rank: alike for node in ranks}
        return {
            node.rank: tables(self.outcome, rank_index) for rank_index, node in enumerate(ranks)
        }

    def answer(self, attribution: Attribution, unchanged: Attribution | None = None) -> WhatIf:
        """Put the changed run beside the observed one.

        Args:
            attribution: of :meth:`tables`, in any steps.
            unchanged: the same of the replay without changes; None where that is the run as it was.
        """
        replay, job = self.replay, self.job
        replayed = attribution.of_steps(self.steps)
        steps, reference = self.steps, None
        if self.reference is not None:
            reference = replay.base.graph.ranks[self.reference].rank
        if job is not None:
            steps, reference = job.steps(0), job.references[0]
        mean_observed, mean_predicted, interval, saved = summary(steps.values())
        path = causes_of(self.outcome, replay.critical_path(self.outcome), replay.facts)
        return WhatIf(
            source=replay.run.source,
            changes=self.described,
            observed_step_ns=mean_observed,
            predicted_step_ns=mean_predicted,
            predicted_ci95_ns=interval,
            saved_ci95_ns=saved,
            steps={
                None if number < 0 else number: (round(before / windows), round(after / windows))
                for number, (before, after, windows) in steps.items()
            },
            error_ratio=replay.error_ratio if job is None else job.error_ratio,
            notes=[*replay.notes, *self.notes, *self._limits(replayed), *self._rests_on()],
            attribution=replayed,
            observed=replay.run,
            unchanged=replay.run if unchanged is None else unchanged.of_steps(self.steps),
            pace=replay.pace,
            reference_rank=reference,
            ranks_count=len(replay.facts) if job is None else job.ranks_count,
            replayed_ranks_count=len(replay.facts) if job is None else len(job.groups),
            grouping_error_ratio=0.0 if job is None else job.grouping_error_ratio,
            path=sorted(((c, n, t) for (c, n), t in path.items()), key=lambda row: -row[2]),
        )

    def _rests_on(self) -> list[str]:
        """Say which ranks the prediction rests on, where not all are replayed here."""
        if self.job is None:
            return []
        covered, _ = self.replay.whole.covered()
        return [f"{self.job.rests_on}; its causes and its critical path cover {covered}"]

    def _limits(self, replayed: Attribution) -> list[str]:
        """Say how far the attributed steps are from the predicted ones."""
        notes = []
        # Each step counts once, whatever the number of ranks that have it.
        predicted = sum(after / windows for _, after, windows in self.steps.values())
        off = (sum(replayed.step_time_ns()) - predicted) / max(predicted, 1.0)
        if abs(off) > ERROR_RATIO:
            notes.append(
                f"the causes of the changed run are for steps {fmt.ratio(abs(off))} "
                f"{'longer' if off > 0 else 'shorter'} than predicted: events without a launch "
                "are placed by their time, which moves the step boundaries"
            )
        return notes


def _base_of(run: Attribution) -> Base:
    """Build the dependency graph of a run.

    Raises:
        InputError: the run cannot be replayed: what it lacks.
    """
    usable = [j for j in run.joined.values() if len(j.windows)]
    check_replayable(run.source, usable)
    return Base(build([(j, run.matched.get(j.inputs.rank)) for j in usable]))


def _counted(run: Attribution, base: Base) -> list[np.ndarray]:
    """Return a mask of the windows of each rank that the attribution is of."""
    ranks, numbers = ints(run.windows, "rank"), ints(run.windows, "number")
    return [
        np.isin(node.joined.windows.numbers, numbers[ranks == node.rank])
        for node in base.graph.ranks
    ]


def _facts_of(attribution: Attribution, base: Base) -> list[CauseTimes]:
    ranks = attribution.pieces["rank"].to_numpy()
    alone = len(attribution.ranks) == 1
    return [
        CauseTimes(
            node,
            attribution.pieces if alone else attribution.pieces.filter(ranks == node.rank),
            attribution.factors.get(node.rank),
        )
        for node in base.graph.ranks
    ]


def check_replayable(source: str, joined: Sequence[JoinedRank]) -> None:
    """Refuse ranks that cannot be replayed.

    Raises:
        InputError: nothing was recorded of them, or in several windows; most device events have no
            launch, or graphs have no kernels, or the kernels of whole steps were lost.
    """
    if not any(len(j.windows) for j in joined):
        raise InputError(
            f"{source}: cannot be replayed: no device event and no operator was recorded"
        )
    if not all(j.windows.recorded.all() for j in joined):
        raise InputError(
            f"{source}: cannot be replayed: it was traced in several windows, and the time "
            "between them is unknown; pass the trace of one window"
        )
    for j in joined:
        lost = ranges(j.windows.lost_steps)
        if lost or not (j.host_only or j.device_event.num_rows):
            raise InputError(
                f"{source}: cannot be replayed: kernel records of rank {j.inputs.rank} were lost"
                f"{lost and f' (step {lost})'}; record it again"
            )
    with_device = [j for j in joined if not j.host_only]
    events = sum(j.device_event.num_rows for j in with_device)
    launched = events - sum(j.event_link["launch_row"].null_count for j in with_device)
    if events and launched < _LAUNCHED_RATIO * events:
        raise InputError(
            f"{source}: cannot be replayed: {launched} of {events} device events have a recorded "
            "launch; record the host's runtime calls too (CPU activities)"
        )
    for j in with_device:
        host = HostSpans(j.host_span)
        graphs = host.named(names.is_graph_launch) if len(host) else np.zeros(0, bool)
        if not graphs.any():
            continue
        launching = row_set(ints(j.event_link, "launch_row"), len(host))
        empty = int((graphs & ~launching).sum())
        # The last launches of a trace may have run after it.
        if empty > 0.1 * int(graphs.sum()) and empty > 1:
            raise InputError(
                f"{source}: cannot be replayed: {empty} of {graphs.sum()} graph launches of rank "
                f"{j.inputs.rank} have no kernels in the trace; record graphs node by node"
            )


def replay_or_reason(run: Attribution) -> Replay | str:
    """Return the replay of a run, or why it cannot be replayed."""
    try:
        return Replay(run)
    except InputError as exc:
        return str(exc).partition(": ")[2]


def recoverable(run: Attribution, replay: Replay | str) -> dict[str, Recoverable]:
    """Predict what removing each cause alone would save; null with the reason where not known."""
    if isinstance(replay, str):
        return {row.id: Recoverable(None, reason=replay) for row in run.causes()}
    # A cause may have time in other ranks or steps than those that are replayed.
    reason = f"the replay covers {run.covered()[0]}, which have no time of it"
    return {
        **{row.id: Recoverable(None, reason=reason) for row in run.causes()},
        **replay.recoverable(),
    }


def lanes_of(replay: Replay) -> dict[int, Lane]:
    """Return, by rank, the part of the critical path that lies on it."""
    path = replay.critical_path()
    known = next((lanes for of, lanes in replay.lanes if of is path), None)
    if known is None:
        known = {
            fact.node.rank: lane_of(path, rank_index, replay.facts)
            for rank_index, fact in enumerate(replay.facts)
        }
        replay.lanes.append((path, known))
    return known


# The host's pace without tracing: the part of its traced time that the same work takes. Recording
# each operator and each call of the driver slows the host, which then leads the device by less, or
# not at all; kernels and copies take no longer. So steps at full speed are replayed with the host's
# work shortened by one factor, the largest that two observations allow: the replayed steps are no
# longer than those that ran without a trace; and where the device decides how long those take, work
# of the host alone is no longer than the shortest step right after a trace: writing it drained the
# device, so the host waited for nothing. Where the device decides, the host may be faster still.


def without_device(scenario: Scenario) -> None:
    """The device takes no time, and ranks do not wait for each other: the host's work is left."""
    scenario.latency = scenario.dependency = scenario.uncoupled = scenario.synchronization = True
    for rank_index, node in enumerate(scenario.ranks):
        scenario.scale(rank_index, np.zeros(len(node.start)))


def host_pace(
    step_ns: Callable[[float, bool], float], untraced_ns: float | None, drained_ns: float | None
) -> float:
    """Return the pace, as a share of the traced time; 1 where nothing shows a faster host.

    Args:
        step_ns: mean step at a pace: with the device, or (True) of the host alone.
        untraced_ns: step that ran without a trace; None where other things made it shorter.
        drained_ns: step of the host that began with an idle device; None where there was none.
    """
    pace = 1.0
    # A step that the quickest host does not explain has other reasons.
    if untraced_ns is not None and step_ns(_LEAST_PACE, False) <= _FLAT * untraced_ns:
        pace = _largest(lambda ratio: step_ns(ratio, False) <= _FLAT * untraced_ns, pace)
    if drained_ns is not None:
        least_ns = step_ns(pace, False) / _FLAT
        quicker = _largest(
            lambda ratio: step_ns(ratio, True) <= drained_ns or step_ns(ratio, False) < least_ns,
            pace,
        )
        # Nor does one that the host decides, or that had its data ready, tell its pace.
        pace = quicker if step_ns(quicker, True) <= drained_ns else pace
    return pace


def _largest(fits: Callable[[float], bool], high: float) -> float:
    """Return the largest ratio up to ``high`` that fits, by bisection."""
    if fits(high):
        return high
    low = _LEAST_PACE
    while high - low > _PACE_PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
