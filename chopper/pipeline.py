"""From a recording to what is shown of it: the stages, in order.

    read        files → recording
    join        each rank: device events to calls, operators, layers, phases and steps of the host
    match       all ranks: the collectives that they took part in together
    attribute   each rank: every nanosecond to one cause
    aggregate   all ranks: tables, causes with intervals, step time, findings
    present     views, replay, comparison and reports, which are functions of the result

Each stage is a pure function of immutable values, which ``storage.results`` writes and reads back.
An engine runs the stages of each rank: in this process, in several, or on a Ray cluster. What comes
back of a rank is small: its collectives, then its share of the result. Tables come back of the
ranks that are looked at closely: all of them, or some of a run that is large.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper import ingest
from chopper.analyzers import findings as found
from chopper.analyzers.attribution import (
    Attribution,
    RankSummary,
    bases_of,
    cause_rows_of,
    groups_of,
    with_times,
)
from chopper.analyzers.causes.attribute import RankResult, attribute_rank
from chopper.analyzers.causes.pipeline import Actions, actions_of, places_of, stage_waits
from chopper.analyzers.causes.step_time import RecordedSteps, step_time
from chopper.analyzers.causes.uneven import Exchanges, exchanges_of, uneven_waits
from chopper.analyzers.coordinates import group_dimensions, with_coordinates
from chopper.analyzers.trace.columns import ints, pick
from chopper.analyzers.trace.match import (
    Events,
    Matched,
    Part,
    match,
    of_stretches,
    participation,
    within,
)
from chopper.analyzers.trace.rank_join import JoinedRank, join_rank
from chopper.analyzers.trace.samples import of_rank, ranks_beside
from chopper.analyzers.trace.tables import RankTables
from chopper.analyzers.trace.totals import Totals, counted_on, detail_ranks, merged, totals_of
from chopper.analyzers.trace.windows import Steps, common_steps, traced_steps
from chopper.claims import withheld
from chopper.engines import Lost, Serial
from chopper.engines.choice import engine_of
from chopper.engines.choice import trace_bytes as file_bytes
from chopper.errors import ChopperError, InputError, UsageError
from chopper.hardware.ceilings import ceilings_of, device_of, no_peak_remedy, with_devices
from chopper.limits import ROW_BYTES, return_freed_memory
from chopper.storage.remote import files_of
from chopper.storage.results import Result, leave
from chopper.storage.run import Run, Span
from chopper.tables import TABLES
from chopper.tables.ranges import MOST_RANKS
from chopper.wording import ranges

if TYPE_CHECKING:
    from chopper.analyzers.replay.answers import WhatIf
    from chopper.analyzers.replay.contraction import Case
    from chopper.analyzers.replay.job import Group, JobReplay, Predicted
    from chopper.analyzers.replay.replay import Prediction, Replay
    from chopper.analyzers.replay.whatif_options import Changes
    from chopper.engines import Engine
    from chopper.hardware.ceilings import Stated
    from chopper.storage.manifest import Device, Finding, RankManifest, RunManifest
    from chopper.storage.run import Stretch

    Source = str | Path | Sequence[str | Path]


def read(
    source: Source,
    engine: Engine | None = None,
    *,
    device: Stated | None = None,
    columns: Mapping[str, str] | None = None,
    layout: str | None = None,
) -> Run:
    """Open a run directory, or read traces as a run.

    Args:
        source: a run directory; or a trace file, a glob, a directory of traces, or several.
        engine: reads the files and holds their tables; by default this process where they are
            small, else one process per core.
        device: the device that it was recorded on, by any usual name (``"h100-sxm"``), or rank →
            device; for recordings that name none. It counts whatever they say.
        columns: which column of a table of spans is what (``{"rank": "worker", "unit": "ms"}``),
            where their names do not say so.
        layout: how the job was divided over its ranks: ``"tp=4,pp=4,dp=4"``, the first dimension
            varying fastest. It counts whatever the recording says.

    Raises:
        InputError: nothing is there, or it is neither a run nor traces.
        UsageError: the device is not in the table, a rank not in the run, or the layout of another
            number of ranks.
    """
    if engine is None:
        with engine_of(sizes_of(source)) as chosen:
            return read(source, chosen, device=device, columns=columns, layout=layout)
    named = [source] if isinstance(source, str | Path) else list(source)
    run = ingest.read(named, engine, columns)
    run = replace(run, manifest=with_coordinates(run.manifest, layout))
    return run if device is None else with_devices(run, device)


def sizes_of(run: Run | Source) -> list[int]:
    """Return the bytes of trace of each file, or of each rank whose tables are held elsewhere."""
    if isinstance(run, Run):
        return [trace_bytes(run, rank) for rank in run.ranks if run.tables.is_held(rank)]
    return file_bytes(files_of([run] if isinstance(run, str | Path) else run))


def trace_bytes(recording: Run, rank: int) -> int:
    """Return about how many bytes of trace a rank's host spans and device events would take."""
    rows_count = sum(recording.rows_count(rank, name) for name in ("host_span", "device_event"))
    return rows_count * ROW_BYTES


def rank_facts(recording: Run, rank: int) -> RankTables:
    """Gather what is known of a rank's device and its job, without its tables."""
    part = recording.part(rank)
    device = device_of(part)
    on_host = recording.rows_count(rank, "device_event") == 0
    ceilings = ceilings_of(recording, part, device, on_host=on_host)
    return RankTables(
        rank=rank,
        **dict.fromkeys(_JOINED),  # sent with each task: empty tables take a millisecond
        ceiling=ceilings.achievable if on_host else ceilings.theoretical,
        ceilings=ceilings,
        no_peak_remedy=no_peak_remedy(recording, part, device),
        devices_listed=bool(part.devices),
        world_size=recording.world_size,
        process_groups=_process_groups(part, recording.world_size),
        staged=any(one.dimension == "pipeline" and one.size > 1 for one in part.coordinates),
        recorded=part.status != "imported",
    )


def rank_input(recording: Run, rank: int, facts: RankTables | None = None) -> RankTables:
    """Gather what is recorded of one rank, and known of its device."""
    return replace(
        facts or rank_facts(recording, rank),
        **{name: recording.table(rank, name) for name in (*_JOINED, *_OWN)},
        **{name: of_rank(recording, rank, name) for name in _OF_DEVICE},
    )


_JOINED = ("host_span", "device_event", "step", "collective")
_OWN = ("kernel_counter", "core_wait", "synchronization", "python_sample", "pipeline_action")
_OF_DEVICE = ("device_clock", "device_counter", "device_limit")
_OF_HOST = (*_OF_DEVICE, "process", "process_thread")
"""Tables that one rank samples for all ranks of its host."""


def rank_steps(recording: Run, rank: int) -> RecordedSteps:
    """Gather what a rank recorded of its steps."""
    part = recording.part(rank)
    bounds = None
    if part.start_ns is not None and part.end_ns is not None and part.status != "imported":
        bounds = (part.start_ns, part.end_ns) if part.end_ns > part.start_ns else None
    # An empty table of each rank of a thousand takes 6 kB all the same.
    phase, wait = (
        recording.table(rank, name) if recording.rows_count(rank, name) else None
        for name in ("program_phase", "core_wait")
    )
    close_ns = (part.overhead.close_ns if part.overhead else None) or 0
    return RecordedSteps(recording.table(rank, "step"), phase, wait, bounds, close_ns)


@dataclass(frozen=True)
class JoinSummary:
    """The part of a joined rank that other ranks need: its collectives, and how large it is.

    Attributes:
        others: collectives in a stretch of its trace that are of another stretch.
        actions: its passes through a pipeline; None without any.
        exchanges: its work before exchanges along experts and context; None without any.
    """

    part: Part
    rows_count: int
    others: Events | None = None
    actions: Actions | None = None
    exchanges: Exchanges | None = None


@dataclass(frozen=True)
class RankShare:
    """The share of a rank in the attribution of a run: small, however many events it has.

    Attributes:
        core_findings: of waiting for a core, which come after all others.
        coverage: name → (covered, of how much), to be added up over ranks.
        is_clocked: clocks of its device were measured.
        unmeasured: factor → why it was not measured; None without windows.
    """

    summary: RankSummary
    window: pa.Table
    steps: RecordedSteps
    findings: list[Finding]
    core_findings: list[Finding]
    coverage: dict[str, tuple[float, float]]
    is_clocked: bool
    unmeasured: dict[str, str] | None

    def after(self, windows_count: int) -> RankShare:
        """Return the share of a stretch that comes after so many windows."""
        if not windows_count:
            return self
        return replace(self, window=counted_on(self.window, windows_count))


def join_task(
    recording: Run, facts: RankTables, folder: Path | None = None
) -> tuple[JoinSummary, Result]:
    """Join one rank: return what others must know of it, and leave the rest in a folder."""
    joined = join_rank(rank_input(recording, facts.rank, facts))
    rows_count = joined.host_span.num_rows + joined.device_event.num_rows
    common = None
    if facts.common_steps is not None:
        numbers = traced_steps(joined.step).number
        # What was launched after the last step is of none.
        within = np.where(joined.event_step < len(numbers), joined.event_step, -1)
        number = pick(numbers, within)
        common = np.isin(number, [*facts.common_steps])
    part = participation(facts.rank, joined.communication, common=common)
    others = None
    if facts.span is not None:
        window = joined.windows.of_steps(joined.event_step)
        own = window[part.waiting.event] >= 0
        others = part.waiting[~own]
        part = replace(part, waiting=part.waiting[own])
    summary = JoinSummary(part, rows_count, others, actions_of(joined), exchanges_of(joined))
    return summary, leave(joined.stored(), folder)


def attribute_task(
    recording: Run,
    facts: RankTables,
    stored: Result | None,
    matched: Matched | None,
    closely: bool,
    folder: Path | None = None,
) -> tuple[RankShare, Totals, Result | None]:
    """Attribute one rank: return its share of the result and its totals.

    Where it is looked at closely, its tables are left in a folder; where not, its causes and
    factors, unless that would take memory. Where it is not joined yet, that is done first, and
    without ``matched`` it is matched alone.
    """
    rank = facts.rank
    inputs = rank_input(recording, rank, facts)
    joined = join_rank(inputs) if stored is None else stored.get().restored(inputs)
    if stored is None and matched is None:
        alone = participation(rank, joined.communication)
        matched = match_ranks(recording.manifest, [alone]).get(rank)
    result = attribute_rank(joined, matched)
    factors = result.factors
    share = RankShare(
        summary=_summary(recording.part(rank), joined),
        window=result.window,
        steps=rank_steps(recording, rank),
        findings=result.findings,
        core_findings=[*found.of_cores(recording, [result])],
        coverage=result.coverage,
        is_clocked=factors is not None and bool(factors.clocks.known.any()),
        unmeasured=None if factors is None else factors.unmeasured,
    )
    events = {rank: (joined.device_event, result.event_link)}
    totals = totals_of(result.piece, result.window, events)
    if closely:
        return share, totals, leave((joined, result, matched), folder)
    left = None if folder is None else leave((result.piece, result.factors), folder)
    return share, totals, left


def contract_task(
    recording: Run,
    facts: RankTables,
    stored: Result,
    causes: Result | None,
    matched: Matched | None,
    cases: Sequence[Case],
    folder: Path | None = None,
) -> tuple[np.ndarray, Result]:
    """Contract a joined rank's graph under each case: return what each takes, leave the rest.

    Without its ``causes``, it is attributed first.

    Raises:
        InputError: the rank cannot be replayed: what it lacks.
    """
    from chopper.analyzers.replay.contraction import contract
    from chopper.analyzers.replay.replay import check_replayable

    joined = stored.get().restored(rank_input(recording, facts.rank, facts))
    check_replayable(recording.source, [joined])
    if causes is None:
        result = attribute_rank(joined, matched)
        attributed = result.piece, result.factors
    else:
        attributed = causes.get()
    contracted = contract(joined, matched, *attributed, cases)
    return contracted.case_bytes, leave(contracted, folder)


def match_ranks(manifest: RunManifest, parts: Iterable[Part]) -> dict[int, Matched]:
    """Match the collectives of all ranks, whose parts are taken as they come."""
    matched = match(parts, clocks=clocks_of(manifest))
    return_freed_memory()
    return matched


def _with_stage_waits(
    recording: Run, matched: dict[int, Matched], actions: Mapping[int, Actions]
) -> dict[int, Matched]:
    """Return the collectives of all ranks, with what each waits for in its pipeline."""
    if len(actions) < 2:
        return matched
    offsets_ns = {rank: matched[rank].offset_ns if rank in matched else 0 for rank in actions}
    waits = stage_waits(actions, places_of(recording.manifest, actions), offsets_ns)
    return {
        rank: replace(one, stage_waits=waits.get(rank)) if waits else one
        for rank, one in matched.items()
    }


MOST_ROWS = 2_000_000
"""Of host spans and device events: a run with more is looked at closely in some ranks only."""
_LEAST_ROWS = 2_000
"""A rank's tables take the memory of so many rows, however few they have."""


def attribute(
    run: Run | Source,
    engine: Engine | None = None,
    ranks: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    *,
    device: Stated | None = None,
    columns: Mapping[str, str] | None = None,
    layout: str | None = None,
    begins_ns: Mapping[int, int] | None = None,
) -> Attribution:
    """Join, match, attribute and aggregate all ranks of a recording.

    Args:
        run: a recording, wherever the tables of its ranks are; or what :func:`read` takes.
        engine: runs the stages of each rank; by default this process where the run is small or in
            its memory, else one process per core.
        ranks: those to look at closely; by default all, or of a large run those that matter.
        steps: numbers of those to attribute; by default all.
        device, columns, layout: as :func:`read` takes them.
        begins_ns: rank → when its device was done with what is not recorded of it.

    Raises:
        InputError: nothing is there, or no rank could be attributed.
        UsageError: a rank to look at is not in the run, none of the steps was traced, the device
            is not in the table, or the layout of another number of ranks.
    """
    if engine is None:
        more: dict[str, Any] = {"device": device, "columns": columns, "layout": layout}
        more["begins_ns"] = begins_ns
        with engine_of(sizes_of(run)) as chosen:
            return attribute(run, chosen, ranks, steps, **more)
    recording = run if isinstance(run, Run) else read(run, engine, columns=columns)
    if layout is not None:
        recording = replace(recording, manifest=with_coordinates(recording.manifest, layout))
    if device is not None:
        recording = with_devices(recording, device)
    missing = sorted({*(ranks or ())} - {*recording.ranks})
    if missing:
        raise UsageError(
            f"{recording.source}: no rank {ranges(missing)}: it has {ranges(recording.ranks)}"
        )
    if steps is not None:
        recording = _of_steps(recording, steps)
    attributed = _attributed(recording, engine, ranks, begins_ns)
    return_freed_memory()
    return attributed


def _attributed(
    recording: Run,
    engine: Engine,
    ranks: Sequence[int] | None,
    begins_ns: Mapping[int, int] | None,
) -> Attribution:
    """Run the stages of a recording; for the arguments, see :func:`attribute`."""
    stages = _Stages(recording, engine, begins_ns)
    in_stretches = any(map(recording.tables.stretches, recording.ranks))
    matched: dict[int, Matched] = {}
    if in_stretches and len(recording.ranks) == 1:
        stages.alone(*recording.ranks)
    else:
        matched = match_ranks(recording.manifest, stages.joined(recording.ranks))
        matched = _with_stage_waits(recording, matched, stages.actions)
        uneven = uneven_waits(stages.exchanges, matched)
        matched = {rank: replace(one, uneven=uneven.get(rank)) for rank, one in matched.items()}
    rows_count = sum(max(count, _LEAST_ROWS) for count in stages.rows_count.values())
    all_closely = not ranks and rows_count <= MOST_ROWS and not in_stretches
    totals = stages.attributed([*stages.rows_count], matched, closely=all_closely)
    detail = job = None
    if not all_closely:
        near = {*(ranks or detail_ranks(totals.causes, stages.rows_count))}
        if not in_stretches and not near.issuperset(stages.shares):
            # Before tables are here: its workers take memory, too.
            job = stages.job(totals, matched)
        some = stages.attributed([r for r in stages.shares if r in near], matched, closely=True)
        if len(stages.closely) < len(stages.shares) or stages.partly:
            detail = stages.of_closely(some, matched)
    parts = totals, matched, stages.closely, stages.lost, detail
    run = aggregate(recording, stages.shares, *parts, job)
    if run.predicted is None or (pace := _pace(run)) == 1:
        return run
    job = stages.job(totals, matched, pace)
    return replace(run, predicted=None if job is None else job.predicted(run.windows))


def _pace(run: Attribution) -> float:
    """Return the host's pace without tracing, as the ranks that are looked at closely show it."""
    from chopper.analyzers.replay.replay import replay_or_reason

    if run.step_time().untraced is None:
        return 1.0
    replay = replay_or_reason(run)
    return 1.0 if isinstance(replay, str) else replay.pace


def _of_steps(recording: Run, steps: Sequence[int]) -> Run:
    """Return a recording of which only some steps are attributed."""
    numbers: set[int] = set()
    for rank in recording.ranks:
        step = recording.table(rank, "step")
        numbers |= {*ints(step.filter(step["traced"]), "number").tolist()}
    if not numbers & {*steps}:
        has = f"it has {ranges(sorted(numbers))}" if numbers else "its steps have no numbers"
        raise UsageError(f"{recording.source}: no step {ranges(sorted(steps))} was traced: {has}")
    return recording.of_steps(steps)


def closer(run: Attribution, ranks: Collection[int]) -> Attribution:
    """Look closely at other ranks of an attributed run: return the attribution of these alone."""
    stages, matched = _Stages(run.recording, Serial()), run.all_steps.matched
    windows = run.all_steps.windows
    stages.windows = {rank: windows.filter(pc.equal(windows["rank"], rank)) for rank in ranks}
    together = [part.clocks for part in stages.joined(ranks)]
    totals = stages.attributed([rank for one in together for rank in one], matched, closely=True)
    return stages.of_closely(totals, matched)


def beside(a: Attribution, b: Attribution) -> tuple[Attribution, Attribution]:
    """Return two runs of which the same ranks are looked at closely, as far as both have them.

    They are those of both where a run is too large to look at all of its ranks.
    """
    near = [{*run.joined} for run in (a, b)]
    chosen = set().union(*(of for run, of in zip((a, b), near, strict=True) if run.part))
    chosen &= {rank.rank for rank in a.all_steps.ranks} & {rank.rank for rank in b.all_steps.ranks}
    first, second = (
        run if of == chosen or not chosen else replace(run, part=closer(run, sorted(chosen)))
        for run, of in zip((a, b), near, strict=True)
    )
    return first, second


@dataclass(frozen=True)
class _Unit:
    """The work of one task: a rank, or one of several stretches of its steps.

    Attributes:
        joined: left by its join; None before that.
        own, others: its collectives, and those that it holds of other stretches.
        first_event: its first device event among those of all stretches.
    """

    rank: int
    facts: RankTables
    stretch: Stretch | None
    joined: Result | None = None
    own: Events | None = None
    others: Events | None = None
    first_event: int = 0
    events_count: int = 0

    def numbers(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield start and end of each of its own collectives, and the number of its event."""
        if self.own is not None:
            bounds = zip(self.own.start.tolist(), self.own.end.tolist(), strict=True)
            yield from zip(bounds, (self.own.event + self.first_event).tolist(), strict=True)


class _Stages:
    """The stages that an engine runs of each rank, and what came of them.

    Attributes:
        rows_count: rank → host spans and device events of those that were joined.
        shares: rank → its share, of those that were attributed.
        closely: rank → its tables, of those that were looked at closely.
        partly: rank → the stretch of it that was looked at closely, where that is not all of it.
        windows: rank → all its windows.
        lost: ranks that are left out.
        actions: rank → its passes through a pipeline, of those that were joined whole.
        exchanges: rank → its work before exchanges along experts and context, likewise.
    """

    def __init__(
        self, recording: Run, engine: Engine, begins_ns: Mapping[int, int] | None = None
    ) -> None:
        self.rows_count: dict[int, int] = {}
        self.shares: dict[int, RankShare] = {}
        self.closely: dict[int, tuple[JoinedRank, RankResult]] = {}
        self.partly: dict[int, _Unit] = {}
        self.windows: dict[int, pa.Table] = {}
        self.lost: list[Finding] = []
        self.actions: dict[int, Actions] = {}
        self.exchanges: dict[int, Exchanges] = {}
        self._near_shares: dict[int, RankShare] = {}
        self._near_matched: dict[int, Matched] = {}
        self._recording, self._engine = recording, engine
        self._begins_ns = begins_ns or {}
        self._common_steps = common_steps(
            _numbered_steps(recording, {}), share_a_clock=share_a_clock(recording.manifest)
        )
        self._dimensions = group_dimensions(recording.manifest)
        self._joined: dict[int, list[_Unit]] = {}
        self._entered: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._causes: dict[int, Result] = {}

    def alone(self, rank: int) -> None:
        """Leave the one rank of a run to be joined when it is attributed: it has no others."""
        self._joined[rank] = self._units(rank)
        self.rows_count[rank] = sum(
            self._recording.rows_count(rank, name) for name in ("host_span", "device_event")
        )

    def joined(self, ranks: Iterable[int]) -> Iterator[Part]:
        """Join ranks; yield the collectives of each."""
        units = [unit for rank in ranks for unit in self._units(rank)]
        calls = ((self._alone(unit), unit.facts, self._engine.folder) for unit in units)
        parts: list[Part] = []
        for unit, done in self._done(units, join_task, calls, label="join"):
            (joint, joined), rank = done, unit.rank
            if rank not in self._joined:
                if parts:
                    yield of_stretches(parts)
                parts = []
                self.rows_count[rank], self._joined[rank] = 0, []
            if joint.actions is not None and unit.stretch is None:
                self.actions[rank] = joint.actions
            if joint.exchanges is not None and unit.stretch is None:
                self.exchanges[rank] = joint.exchanges
            before = sum(one.events_count for one in self._joined[rank])
            count = joint.part.device_event_counts[rank]
            self.rows_count[rank] += joint.rows_count
            self._joined[rank].append(
                replace(
                    unit,
                    joined=joined,
                    own=joint.part.waiting if unit.stretch is not None else None,
                    others=joint.others,
                    first_event=before,
                    events_count=count,
                )
            )
            parts.append(joint.part)
            if unit.stretch is None:
                waiting = joint.part.waiting
                self._entered[rank] = waiting.event, waiting.start
        if parts:
            yield of_stretches(parts)

    def attributed(
        self, ranks: Sequence[int], matched: Mapping[int, Matched], *, closely: bool
    ) -> Totals:
        """Attribute joined ranks; return their totals."""
        units = [u for rank in ranks for u in (self._near(rank) if closely else self._joined[rank])]
        calls = (
            (
                self._alone(unit),
                unit.facts,
                unit.joined,
                self._matched(unit, matched),
                closely,
                self._engine.folder,
            )
            for unit in units
        )
        windows_count: dict[int, int] = defaultdict(int)
        shares: dict[int, list[RankShare]] = defaultdict(list)
        left: dict[int, Result] = {}

        def each() -> Iterator[Totals]:
            for unit, done in self._done(units, attribute_task, calls, label="attribute"):
                share, totals, tables = done
                rank = unit.rank
                if closely and unit.stretch is not None:
                    windows_count[rank] = _first_window(self.windows[rank], share.window)
                before = windows_count[rank]
                shares[rank].append(share.after(before))
                windows_count[rank] += share.window.num_rows
                if tables is not None and not closely:
                    self._causes[rank] = tables
                elif tables is not None:
                    left[rank] = tables
                    if unit.stretch is not None:
                        self.partly[rank] = unit
                yield totals.after(before)
            if not shares:
                first = self.lost[0]
                raise InputError(
                    f"{self._recording.source}: no rank can be attributed (rank {first.rank} "
                    f"{first.message})"
                )

        totals = merged(each())
        return_freed_memory()
        if closely:
            # Before the tables are here: workers take memory, too.
            self._engine.rest()
        for rank in [*left]:
            *tables, self._near_matched[rank] = left.pop(rank).get()
            first = windows_count[rank] - shares[rank][0].window.num_rows
            self.closely[rank] = tables[0], tables[1].after(first) if first else tables[1]
        for rank, parts in shares.items():
            if closely and rank in self.partly:
                self._near_shares[rank] = parts[0]
            else:
                self.shares[rank] = self._whole(rank, parts)
                self.windows[rank] = self.shares[rank].window
        return totals

    def job(
        self, totals: Totals, matched: Mapping[int, Matched], pace: float = 1.0
    ) -> JobReplay | None:
        """Replay the whole job without each of its causes; None where that cannot be.

        Args:
            totals: of all ranks.
            matched: rank → its matched collectives.
            pace: share of its traced time that the host's work takes.
        """
        from chopper.analyzers.replay.job import alike, cases_of, times_of

        windows = _stacked([share.window for share in self.shares.values()])
        groups = alike(times_of(windows, totals, matched, self._entered))
        sent = sum(len(event) for event, _ in self._entered.values())
        coupled = sum(len(own.event_row) for own in matched.values())
        coupled_ratio = coupled / sent if sent else None
        return self.replayed(cases_of(totals, pace), windows, groups, matched, coupled_ratio)

    def replayed(
        self,
        cases: list[Case],
        windows: pa.Table,
        groups: list[Group],
        matched: Mapping[int, Matched],
        coupled_ratio: float | None,
    ) -> JobReplay | None:
        """Replay a job under several cases; None where that cannot be.

        Args:
            cases: as in :class:`~chopper.analyzers.replay.job.JobReplay`.
            windows: the `window` table of all ranks.
            groups: of its ranks; those that represent others are joined.
            matched: rank → its matched collectives.
            coupled_ratio: share of the communication events that are matched; None without any.
        """
        from chopper.analyzers.replay.contraction import COMPILED
        from chopper.analyzers.replay.job import replayed

        if not COMPILED or any(self._is_host_only(group.leader) for group in groups):
            return None
        units = [unit for group in groups for unit in self._joined[group.leader]]
        calls = (
            (
                self._alone(unit),
                unit.facts,
                unit.joined,
                self._causes.get(unit.rank),
                matched.get(unit.rank),
                cases,
                self._engine.folder,
            )
            for unit in units
        )
        left: list[Result] = []
        case_bytes = np.zeros(len(cases), dtype=np.int64)
        for done in self._engine.map(contract_task, calls, label="replay"):
            if isinstance(done, Lost):
                return None
            taken, result = done
            case_bytes += taken
            left.append(result)
        parts = (lambda: (result.get() for result in left)), case_bytes
        return replayed(cases, windows, groups, coupled_ratio, *parts)

    def _is_host_only(self, rank: int) -> bool:
        return not self._recording.rows_count(rank, "device_event")

    def of_closely(self, totals: Totals, matched: Mapping[int, Matched]) -> Attribution:
        """Aggregate the ranks that were looked at closely, as a run of their own."""
        shares = {rank: self._near_shares.get(rank) or self.shares[rank] for rank in self.closely}
        some = self._recording.of_ranks([*shares])
        near = within(matched, shares)
        for rank, unit in self.partly.items():
            assert unit.stretch is not None
            some = some.of_stretch(rank, unit.stretch)
            whole = self._matched(unit, near) if near else self._near_matched[rank]
            if whole is not None:
                near[rank] = whole
        return aggregate(some, shares, totals, near, self.closely, self.lost)

    def _units(self, rank: int) -> list[_Unit]:
        """Return what of a rank is joined by itself."""
        facts = replace(
            rank_facts(self._recording, rank),
            common_steps=self._common_steps,
            dimensions=self._dimensions.get(rank),
        )
        stretches = self._recording.tables.stretches(rank)
        if not stretches:
            if rank in self._begins_ns:
                facts = replace(facts, span=Span(device_begin_ns=self._begins_ns[rank]))
            return [_Unit(rank, facts, None)]
        units = [_Unit(rank, replace(facts, span=s.span), s) for s in stretches]
        step = self._recording.table(rank, "step")
        traced_ns = ints(step.filter(step["traced"]), "start_ns")
        return [unit for unit, s in zip(units, stretches, strict=True) if s.span.owns(traced_ns)]

    def _near(self, rank: int) -> list[_Unit]:
        """Return what of a rank is looked at closely: all, or the stretch of the median step.

        The steps beside those of a stretch are then its own.
        """
        units = self._joined[rank]
        if units[0].stretch is None:
            return units
        step = self._recording.table(rank, "step")
        step = step.filter(step["traced"])
        dur = ints(step, "end_ns") - ints(step, "start_ns")
        median_ns = ints(step, "start_ns")[np.argsort(dur, kind="stable")[len(dur) // 2]]
        spans = [unit.stretch.span for unit in units if unit.stretch is not None]
        at = sum(span.own_ns[0] <= median_ns for span in spans) - 1
        whole = replace(spans[at], own_ns=spans[at].read_ns)
        return [replace(units[at], facts=replace(units[at].facts, span=whole), joined=None)]

    def _matched(self, unit: _Unit, matched: Mapping[int, Matched]) -> Matched | None:
        """Return the matched collectives of a rank, or of a stretch of it, by its own rows."""
        whole = matched.get(unit.rank)
        if whole is None or unit.own is None or unit.others is None:
            return whole
        number = dict(pair for one in self._joined[unit.rank] for pair in one.numbers())
        bounds = zip(unit.others.start.tolist(), unit.others.end.tolist(), strict=True)
        elsewhere = np.array([number.get(pair, -1) for pair in bounds], dtype=np.int64)
        return whole.of_rows(
            np.concatenate([unit.own.event, unit.others.event]),
            np.concatenate([unit.own.event + unit.first_event, elsewhere]),
            unit.events_count,
        )

    def _whole(self, rank: int, parts: Sequence[RankShare]) -> RankShare:
        """Return the share of a rank from those of its stretches."""
        if len(parts) == 1:
            return parts[0]
        return replace(
            parts[0],
            window=_stacked([part.window for part in parts]),
            steps=rank_steps(self._recording, rank),
            findings=found.of_stretches([part.findings for part in parts]),
            core_findings=found.of_stretches([part.core_findings for part in parts]),
            coverage=_sums(parts),
            is_clocked=any(part.is_clocked for part in parts),
        )

    def _alone(self, unit: _Unit) -> Run:
        """Return what a task reads: the tables of a rank, and what others of its host sampled."""
        beside = ranks_beside(self._recording, unit.rank)
        sampled = [(other, name) for other in beside[1:] for name in _OF_HOST]
        own = ((unit.rank, name) for name in TABLES)
        alone = self._recording.of_ranks(beside, [*own, *sampled])
        return alone if unit.stretch is None else alone.of_stretch(unit.rank, unit.stretch)

    def _done(
        self,
        units: Iterable[_Unit],
        task: Callable[..., Any],
        calls: Iterable[Sequence[Any]],
        *,
        label: str,
    ) -> Iterator[tuple[_Unit, Any]]:
        """Yield each unit with its task's result; those that were lost become findings."""
        results = self._engine.map(task, calls, label=label)
        for unit, result in zip(units, results, strict=True):
            if not isinstance(result, Lost):
                yield unit, result
            elif isinstance(result.error, ChopperError):
                raise result.error
            else:
                self.lost.append(found.of_lost(unit.rank, result.reason))


def aggregate(
    recording: Run,
    shares: Mapping[int, RankShare],
    totals: Totals,
    matched: dict[int, Matched],
    closely: Mapping[int, tuple[JoinedRank, RankResult]],
    lost: Sequence[Finding] = (),
    detail: Attribution | None = None,
    job: JobReplay | None = None,
) -> Attribution:
    """Put the results of all ranks together: of the kind of steps that the step time is of.

    Args:
        recording: the run.
        shares: rank → its share.
        totals: of them together.
        matched: rank → its collectives.
        closely: rank → its tables, of those that are looked at closely.
        lost: ranks that are left out.
        detail: the same of the ranks that are looked at closely, where these are not all.
        job: the replay of all ranks, where not all are looked at closely.
    """
    every = [*shares.values()]
    joined = {rank: pair[0] for rank, pair in closely.items()}
    results = {rank: pair[1] for rank, pair in closely.items()}
    coverage = _coverage(every)
    findings = [*lost, *_findings(recording, matched, shares, coverage)]
    windows = _stacked([share.window for share in every])
    summaries = with_times([share.summary for share in every], totals, windows)
    bases = bases_of(
        summaries,
        is_clocked=any(share.is_clocked for share in every),
        unmeasured=[share.unmeasured for share in every if share.unmeasured is not None],
        links=[one.link for one in joined.values()],
    )
    claims = withheld(findings)
    by_step = {g.key: g.causes for g in groups_of(totals, "step")}
    run = Attribution(
        source=recording.source,
        pieces=_stacked([r.piece for r in results.values()]),
        windows=windows,
        totals=totals,
        gaps=_stacked([r.gap for r in results.values()]),
        communication=_stacked([r.communication for r in results.values()]),
        links={rank: r.event_link for rank, r in results.items()},
        ranks=summaries,
        cause_rows=cause_rows_of(totals, bases, claims),
        step=step_time([share.steps for share in every], windows, by_step),
        findings=findings,
        withheld=claims,
        coverage=coverage,
        bases=bases,
        ceilings={r: j.inputs.ceilings for r, j in joined.items() if j.inputs.ceilings is not None},
        recording=recording,
        joined=joined,
        matched=matched,
        work={rank: r.work for rank, r in results.items() if r.work is not None},
        factors={rank: r.factors for rank, r in results.items() if r.factors is not None},
        part=detail,
    ).of_kind()
    if job is not None and job.is_right:
        run = replace(run, predicted=job.predicted(run.windows))
    findings += [*found.of_steps(run.step_time(), findings), *found.of_unnumbered(windows)]
    findings += [*found.of_utilization(run), *found.of_detail(run), *found.of_memory(run)]
    findings = found.gathered(findings)
    if run.superset is not None:
        run = replace(run, superset=replace(run.superset, findings=findings))
    return replace(run, findings=findings)


def whatif(
    run: Attribution, changes: Changes, replayed: Callable[[], Replay] | None = None
) -> WhatIf:
    """Predict what a run would take with something changed.

    The replayed schedule is joined, matched and attributed like a recording. Changes of a job's
    operations are made to its dependency model, and so are all others of a recording without
    launches.

    Args:
        run: the attributed run.
        changes: what is changed.
        replayed: returns the replay of its launches; makes it by default.

    Raises:
        UsageError: a change that this run has no data for, or that names nothing in it.
        InputError: the run cannot be replayed.
    """
    from chopper.analyzers.jobs.prediction import STRAGGLER, operations_or_reason
    from chopper.analyzers.replay.replay import Replay

    replayed = replayed or (lambda: Replay(run))
    job = operations_or_reason(run)
    if isinstance(job, str):
        # The replay of launches takes all waiting away, that of the schedule too.
        if changes.of_job or (STRAGGLER in changes.fix and "pipeline" in run.dimensions):
            raise UsageError(f"{run.source}: the job cannot be modelled: {job}")
        try:
            return replace(_whatif(run, changes, replayed()), job_reason=job)
        except InputError as exc:
            raise InputError(f"{exc}; nor can its operations: {job}") from exc
    if job.takes(changes):
        return job.predict(changes)
    try:
        replay = replayed()
    except InputError:
        if changes:
            raise
        return job.unchanged()
    return replace(_whatif(run, changes, replay), job=job.slowdown)


def _whatif(run: Attribution, changes: Changes, replay: Replay) -> WhatIf:
    from chopper.analyzers.views.snapshots import determinism_advice

    prediction = replay.predict(changes)
    prediction = replace(prediction, job=_of_job(run, changes, prediction))
    found = _answer(run.recording, prediction)
    if not changes.of_clock:
        return found
    found = found.widened(prediction.clock_range_ns(changes))
    advice = determinism_advice(run)
    return found if advice is None else replace(found, notes=[*found.notes, advice])


def _of_job(run: Attribution, changes: Changes, prediction: Prediction) -> Predicted | None:
    """Predict the steps of a job whose ranks are not all replayed closely; None for others."""
    from chopper.analyzers.replay.contraction import Case
    from chopper.analyzers.replay.replay import CI95_DEVIATIONS

    job = prediction.replay.job
    if job is None:
        return None
    pace, link = job.pace, prediction.link_change
    deviations = (0.0, -CI95_DEVIATIONS, CI95_DEVIATIONS) if changes.of_clock else (0.0,)
    cases = [Case(), Case(pace=pace), *(Case(changes, pace, link, off) for off in deviations)]
    recording, leaders = run.recording, [group.leader for group in job.groups]
    with engine_of([trace_bytes(recording, rank) for rank in leaders]) as engine:
        stages = _Stages(recording, engine)
        matched = run.all_steps.matched
        for _ in stages.joined(leaders):
            pass
        windows = run.all_steps.windows
        found = stages.replayed(cases, windows, job.groups, matched, job.coupled_ratio)
    return None if found is None else found.predicted(run.windows)


def _answer(recording: Run, prediction: Prediction) -> WhatIf:
    """Attribute a predicted run, and put it beside the observed one."""
    from chopper.analyzers.replay.whatif_options import Changes

    spans = {node.rank: node.joined.inputs.span for node in prediction.replay.base.graph.ranks}
    begins_ns = {
        rank: span.device_begin_ns
        for rank, span in spans.items()
        if span is not None and span.device_begin_ns is not None
    }

    def attributed(outcome: Prediction) -> Attribution:
        return attribute(_replayed(recording, outcome.tables()), begins_ns=begins_ns)

    replay = prediction.replay
    changed = attributed(prediction)
    if replay.pace == 1:
        return prediction.answer(changed)
    unchanged = attributed(replay.predict(Changes())) if prediction.described else changed
    return prediction.answer(changed, unchanged)


def _replayed(recording: Run, changed: Mapping[int, Mapping[str, pa.Table]]) -> Run:
    """Return the replayed schedule as a run in memory."""
    tables = {(rank, name): t for rank, named in changed.items() for name, t in named.items()}
    for rank in changed:
        counters = recording.table(rank, "kernel_counter")
        if counters.num_rows:
            tables[rank, "kernel_counter"] = counters
    manifest = msgspec.structs.replace(
        recording.manifest,
        ranks=[msgspec.structs.replace(recording.part(rank), findings=[]) for rank in changed],
        findings=[],
    )
    return Run(manifest, None, tables, source=f"{recording.source} (replayed)")


def _summary(part: RankManifest, joined: JoinedRank) -> RankSummary:
    """Name a rank and its device."""
    device: Device | None = None if joined.host_only else device_of(part)
    return RankSummary(
        rank=part.rank,
        label=part.label or f"rank {part.name}",
        device=device.name if device else None,
        peak_source=joined.ceiling.source if joined.ceiling else None,
        device_reason=part.stated_device.reason if device and part.stated_device else None,
    )


def _findings(
    recording: Run,
    matched: dict[int, Matched],
    shares: Mapping[int, RankShare],
    coverage: dict[str, float | None],
) -> list[Finding]:
    """Gather what was found of the run, of each rank and of all together."""
    findings = [*recording.manifest.findings]
    for rank, share in shares.items():
        findings += [*recording.part(rank).findings, *share.findings]
    findings += found.of_clocks({r: (m.offset_ns, m.offset_rank) for r, m in matched.items()})
    findings += found.of_numbers(matched)
    steps = _numbered_steps(recording, shares)
    common = common_steps(steps, share_a_clock=share_a_clock(recording.manifest))
    if common is not None:
        findings.append(
            found.of_common_steps({r: s.number.tolist() for r, s in steps.items()}, common)
        )
    findings = found.of_matching(findings, coverage.get("collectives_matched_ratio"))
    findings += found.of_samplers(recording.manifest)
    return findings + [one for share in shares.values() for one in share.core_findings]


def _first_window(every: pa.Table, some: pa.Table) -> int:
    """Return the index of the first of some windows of a rank among all of them."""
    return int(np.flatnonzero(np.isin(ints(every, "number"), ints(some, "number")))[0])


def _stacked(tables: list[pa.Table]) -> pa.Table:
    """Return one table of the rows of all."""
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def _numbered_steps(recording: Run, shares: Mapping[int, RankShare]) -> dict[int, Steps]:
    """Return the traced steps of each rank of a run of several that are numbered by the program."""
    if len(recording.ranks) < 2:
        return {}
    numbered: dict[int, Steps] = {}
    for rank in recording.ranks:
        step = shares[rank].steps.step if rank in shares else recording.table(rank, "step")
        counted = {"range", "profiler_step", "span"} >= {*step["source"].unique().to_pylist()}
        if counted or recording.part(rank).status != "imported":
            numbered[rank] = traced_steps(step)
    return numbered


def clocks_of(manifest: RunManifest) -> dict[int, int]:
    """Return the clock of each rank: the lowest rank of its host."""
    one = share_a_clock(manifest)
    lowest: dict[str | int, int] = {}
    return {
        part.rank: lowest.setdefault("" if one else part.host or part.rank, part.rank)
        for part in sorted(manifest.ranks, key=lambda part: part.rank)
    }


def share_a_clock(manifest: RunManifest) -> bool:
    """Return whether the ranks share a host, and so a clock, or one file has times of all.

    Where traces name no host, they are of one when each lists the devices of all and the ranks are
    placed on them one after another, as launchers do on each host.
    """
    parts = manifest.ranks
    hosts = {part.host for part in parts}
    if hosts != {None}:
        return len(hosts) == 1
    if any(f.code == "run.no_common_time" for f in manifest.findings):
        return False
    if all(part.environment.get("trace_clock") == "job" for part in parts):
        return True
    used = [part.device_id for part in parts if part.device_id is not None]
    begins = {part.rank - device for part, device in zip(parts, used, strict=False)}
    return (
        len(used) == len(parts)
        and len(begins) == 1
        and all({*used} <= {device.device_id for device in part.devices} for part in parts)
    )


@lru_cache(maxsize=1)
def _whole_job(size: int) -> tuple[int, ...]:
    """Return all ranks of a job, always the same tuple: each rank would have its own."""
    return tuple(range(size))


@lru_cache(maxsize=1024)
def _shared(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return equal ranks as one tuple: each rank of a group would have its own."""
    return ranks


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 <= value < MOST_RANKS


def _process_groups(part: RankManifest, world_size: int | None) -> dict[str, tuple[int, ...]]:
    """Return the process groups of a rank by name, as far as their ranks are known."""
    groups: dict[str, tuple[int, ...]] = {}
    for entry in part.process_groups:
        name = str(entry.get("pg_name", ""))
        ranks, size = entry.get("ranks"), entry.get("pg_size", entry.get("group_size"))
        if isinstance(ranks, list) and ranks and all(map(_is_rank, ranks)):
            groups[name] = _shared(tuple(sorted(ranks)))
        elif world_size is not None and size == world_size:
            groups[name] = _whole_job(world_size)
    return groups


def _coverage(shares: Iterable[RankShare]) -> dict[str, float | None]:
    """Return the shares that models and joins reached over all ranks."""
    ratios: dict[str, float | None] = {
        n: (a / b if b else None) for n, (a, b) in _sums(shares).items()
    }
    ratios.setdefault("clock_ratio", None)
    return ratios


def _sums(shares: Iterable[RankShare]) -> dict[str, tuple[float, float]]:
    """Add up what is covered, by name, and of how much."""
    sums: dict[str, tuple[float, float]] = {}
    for share in shares:
        for name, (part, whole) in share.coverage.items():
            a, b = sums.get(name, (0.0, 0.0))
            sums[name] = (a + part, b + whole)
    return sums
