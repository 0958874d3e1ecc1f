"""From a recording to what is shown of it: the stages, in order.

    read        files → recording
    join        each rank: device events to calls, operators, layers, phases and steps of the host
    match       all ranks: the collectives that they took part in together
    attribute   each rank: every nanosecond to one cause
    aggregate   all ranks: tables, causes with intervals, step time, findings
    present     views, replay, comparison and reports, which are functions of the result

Each stage is a pure function of immutable values, which ``storage.values`` writes and reads back:
the stages of different ranks can run in different processes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from chopper import ingest
from chopper.analyzers import findings as found
from chopper.analyzers.attributed import Attributed
from chopper.analyzers.causes.attribute import RankResult, attribute_rank
from chopper.analyzers.causes.bases import bases_of
from chopper.analyzers.causes.step_time import RankSteps, step_time
from chopper.analyzers.trace.joined import JoinedRank, join_rank
from chopper.analyzers.trace.match import Matched, match
from chopper.analyzers.trace.samples import of_rank
from chopper.analyzers.trace.tables import RankInput
from chopper.analyzers.trace.totals import totals_of
from chopper.attribution import RankSummary, cause_rows_of, groups_of, with_times
from chopper.claims import withheld
from chopper.hardware.ceilings import ceilings_of, device_of, no_peak_remedy, world_size_of
from chopper.storage.run import Run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from chopper.analyzers.replay.answers import WhatIf
    from chopper.analyzers.replay.replay import Replay
    from chopper.analyzers.replay.whatif_options import Changes
    from chopper.storage.manifest import Device, Finding, RankManifest, RunManifest
    from chopper.storage.run import Run

    Source = str | Path | Sequence[str | Path]


def read(source: Source) -> Run:
    """Open a run directory, or read traces as a run in memory.

    Raises:
        InputError: there is nothing there, or not what it should be.
    """
    return ingest.read([source] if isinstance(source, str | Path) else list(source))


def rank_input(recording: Run, rank: int) -> RankInput:
    """Gather what is recorded of one rank, and known of its device."""
    manifest, part = recording.manifest, recording.part(rank)
    tables = {
        name: recording.table(rank, name)
        for name in ("host_span", "device_event", "step", "collective")
    }
    device = device_of(part)
    on_host = tables["device_event"].num_rows == 0
    ceilings = ceilings_of(manifest, part, device, on_host=on_host)
    world_size = world_size_of(manifest)
    return RankInput(
        rank=rank,
        **tables,
        ceiling=ceilings.achievable if on_host else ceilings.theoretical,
        ceilings=ceilings,
        no_peak_remedy=no_peak_remedy(manifest, part, device),
        devices_listed=bool(part.devices),
        world_size=world_size,
        process_groups=_process_groups(part, world_size),
        device_clock=of_rank(recording, rank, "device_clock"),
        device_limit=of_rank(recording, rank, "device_limit"),
        kernel_counter=recording.table(rank, "kernel_counter"),
        core_wait=recording.table(rank, "core_wait"),
        synchronization=recording.table(rank, "synchronization"),
        recorded=part.status != "imported",
    )


def rank_steps(recording: Run) -> list[RankSteps]:
    """Gather what each rank recorded of its steps."""
    ranks = []
    for part in map(recording.part, recording.ranks):
        bounds = None
        if part.start_ns is not None and part.end_ns is not None and part.status != "imported":
            bounds = (part.start_ns, part.end_ns) if part.end_ns > part.start_ns else None
        step, phase, wait = (
            recording.table(part.rank, name) for name in ("step", "program_phase", "core_wait")
        )
        close_ns = (part.overhead.close_ns if part.overhead else None) or 0
        ranks.append(RankSteps(step, phase, wait, bounds, close_ns))
    return ranks


def match_ranks(manifest: RunManifest, joined: Mapping[int, JoinedRank]) -> dict[int, Matched]:
    """Match the collectives of all ranks."""
    communication = {rank: j.communication for rank, j in joined.items()}
    return match(communication, one_clock=share_a_clock(manifest))


def aggregate(
    recording: Run,
    joined: dict[int, JoinedRank],
    matched: dict[int, Matched],
    results: Mapping[int, RankResult],
) -> Attributed:
    """Put the results of all ranks together: of the kind of steps that the step time is of."""
    findings = _findings(recording, matched, results)
    pieces = _stacked([r.piece for r in results.values()])
    windows = _stacked([r.window for r in results.values()])
    events = {r: (joined[r].device_event, result.event_link) for r, result in results.items()}
    totals = totals_of(pieces, windows, events)
    summaries = with_times(
        [_summary(recording.part(rank), joined[rank]) for rank in results], totals, windows
    )
    bases = bases_of(summaries, list(results.values()))
    claims = withheld(findings)
    by_step = {g.key: g.causes for g in groups_of(totals, "step")}
    run = Attributed(
        source=recording.source,
        pieces=pieces,
        windows=windows,
        totals=totals,
        gaps=_stacked([r.gap for r in results.values()]),
        communication=_stacked([r.communication for r in results.values()]),
        links={rank: r.event_link for rank, r in results.items()},
        ranks=summaries,
        cause_rows=cause_rows_of(totals, bases, claims),
        step=step_time(rank_steps(recording), windows, by_step),
        findings=findings,
        withheld=claims,
        coverage=_coverage(list(results.values())),
        bases=bases,
        ceilings={r: j.inputs.ceilings for r, j in joined.items() if j.inputs.ceilings is not None},
        recording=recording,
        joined=joined,
        matched=matched,
        work={rank: r.work for rank, r in results.items() if r.work is not None},
        factors={rank: r.factors for rank, r in results.items() if r.factors is not None},
    ).of_kind()
    findings += [*found.of_steps(run.step_time(), findings)]
    findings = found.gathered([*findings, *found.of_utilization(run)])
    if run.all_kinds is not None:
        run = replace(run, all_kinds=replace(run.all_kinds, findings=findings))
    return replace(run, findings=findings)


def attribute(recording: Run) -> Attributed:
    """Join, match, attribute and aggregate all ranks of a recording, one after another."""
    joined = {rank: join_rank(rank_input(recording, rank)) for rank in recording.ranks}
    matched = match_ranks(recording.manifest, joined)
    results = {rank: attribute_rank(j, matched.get(rank)) for rank, j in joined.items()}
    return aggregate(recording, joined, matched, results)


def whatif(run: Attributed, changes: Changes, replay: Replay | None = None) -> WhatIf:
    """Predict what a run would take with something changed.

    The replayed schedule is joined, matched and attributed like a recording.

    Args:
        run: the attributed run.
        changes: what is changed.
        replay: of the run, where it was made already.

    Raises:
        UsageError: a change that this run has no data for, or that names nothing in it.
        InputError: the run cannot be replayed.
    """
    from chopper.analyzers.replay.replay import Replay

    prediction = (replay or Replay(run)).predict(changes)
    return prediction.answer(attribute(_replayed(run.recording, prediction.tables())))


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
        label=part.label or f"rank {part.rank}",
        device=device.name if device else None,
        peak_source=joined.ceiling.source if joined.ceiling else None,
    )


def _findings(
    recording: Run, matched: dict[int, Matched], results: Mapping[int, RankResult]
) -> list[Finding]:
    """Gather what was found of the run, of each rank and of all together."""
    findings = [*recording.manifest.findings]
    for rank, result in results.items():
        findings += [*recording.part(rank).findings, *result.findings]
    findings += found.of_clocks({r: (m.offset_ns, m.offset_rank) for r, m in matched.items()})
    findings += found.of_numbers(matched)
    matched_ratio = _coverage(list(results.values())).get("collectives_matched_ratio")
    findings = found.of_matching(findings, matched_ratio)
    findings += found.of_samplers(recording.manifest)
    return [*findings, *found.of_cores(recording, results.values())]


def _stacked(tables: list[pa.Table]) -> pa.Table:
    """Return one table of the rows of all."""
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def share_a_clock(manifest: RunManifest) -> bool:
    """Return whether the ranks share a host, and so a clock.

    Where traces name no host, they are of one when each lists the devices of all and the ranks are
    placed on them one after another, as launchers do on each host.
    """
    parts = manifest.ranks
    hosts = {part.hostname for part in parts}
    if hosts != {None}:
        return len(hosts) == 1
    if any(f.code == "run.no_common_time" for f in manifest.findings):
        return False
    used = [part.device_id for part in parts if part.device_id is not None]
    begins = {part.rank - device for part, device in zip(parts, used, strict=False)}
    return (
        len(used) == len(parts)
        and len(begins) == 1
        and all({*used} <= {device.device_id for device in part.devices} for part in parts)
    )


def _process_groups(part: RankManifest, world_size: int | None) -> dict[str, tuple[int, ...]]:
    """Return the process groups of a rank by name, as far as their ranks are known."""
    groups: dict[str, tuple[int, ...]] = {}
    for entry in part.process_groups:
        name = str(entry.get("pg_name", ""))
        ranks, size = entry.get("ranks"), entry.get("pg_size", entry.get("group_size"))
        if isinstance(ranks, list) and ranks and all(type(r) is int for r in ranks):
            groups[name] = tuple(sorted(ranks))
        elif size is not None and size == world_size:
            groups[name] = tuple(range(size))
    return groups


def _coverage(results: list[RankResult]) -> dict[str, float | None]:
    """Return the shares that models and joins reached over all ranks."""
    sums: dict[str, tuple[float, float]] = {}
    for result in results:
        for name, (part, whole) in result.coverage.items():
            a, b = sums.get(name, (0.0, 0.0))
            sums[name] = (a + part, b + whole)
    ratios: dict[str, float | None] = {n: (a / b if b else None) for n, (a, b) in sums.items()}
    ratios.setdefault("clock_ratio", None)
    return ratios
