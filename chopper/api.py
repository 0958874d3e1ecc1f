"""The public verbs: load a run, attribute it, report it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from chopper.ingest import load as _load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.analyzers.attribute import JoinedRank, RankResult
    from chopper.analyzers.compute import Ceiling
    from chopper.analyzers.matching import Matched
    from chopper.analyzers.waves import UnitLimits
    from chopper.attribution import Attribution, Basis, Ceilings, RankSummary
    from chopper.calibration import Calibration
    from chopper.comparison import Comparison
    from chopper.devices import DevicePeaks
    from chopper.manifest import Device, Finding, RankManifest
    from chopper.replaying import WhatIf
    from chopper.run import Run

_CLOCK_OFFSET_SAID_NS = 50_000
"""Smaller differences are how long ranks take to leave a collective, not their clocks."""
_MATCHED_RATIO = 0.5
"""Below it, most of the collectives' time says nothing of who waited for whom."""
_CLOCKS_DISAGREE = (
    "the ranks' traces share no moment in time as recorded: their clocks disagree, and are set right "
    "by when the ranks leave their collectives"
)
_DROPPED_RATIO = 0.01
_APART_NS = 5_000_000
"""Half of a period of the samplers: clocks that are further apart move readings to other kernels."""
_CORE_WAIT_RATIO = 0.1
"""From so much on, host causes tell of the machine more than of the program."""
_SEVERITY = {"error": 0, "warning": 1, "info": 2}


def load(source: str | Path | Sequence[str | Path]) -> Run:
    """Open a run directory, or read traces as a run in memory.

    Args:
        source: a run directory; or a trace file, a glob, a directory of traces, or several.

    Raises:
        InputError: there is nothing there, or not what it should be.
    """
    return _load([source] if isinstance(source, str | Path) else list(source))


def attribute(run: Run | str | Path) -> Attribution:
    """Attribute every nanosecond of the run's step windows to exactly one cause.

    Args:
        run: a run, or anything that :func:`load` takes.

    Raises:
        InputError: there is nothing there, or not what it should be.
    """
    run = load(run) if isinstance(run, str | Path) else run
    joined, ceilings = _join(run)
    return _attribute(run, joined, _match(run, joined), ceilings)


def _join(run: Run) -> tuple[list[JoinedRank], dict[int, Ceilings]]:
    """The ranks of a run, their events joined to the host; what their devices can do."""
    from chopper.analyzers.attribute import RankInput, join_rank
    from chopper.analyzers.host_device import HOST_DEVICE_ID
    from chopper.tables import TABLES
    from chopper.telemetry import of_rank

    joined: list[JoinedRank] = []
    world_size = _world_size(run)
    ceilings: dict[int, Ceilings] = {}
    for rank in run.ranks:
        part = run.part(rank)
        tables = {
            name: run.table(rank, name)
            for name in ("host_span", "device_event", "step", "collective")
        }
        events = tables["device_event"]
        if events.num_rows and events["device_id"][0].as_py() == HOST_DEVICE_ID:
            # Made of host spans by an attribution before this one.
            tables["device_event"] = TABLES["device_event"].empty()
        device = _device_of(part)
        on_host = tables["device_event"].num_rows == 0
        ceilings[rank] = _ceilings(run, part, device, on_host=on_host)
        ceiling = ceilings[rank].achievable if on_host else ceilings[rank].theoretical
        joined.append(
            join_rank(
                RankInput(
                    rank=rank,
                    **tables,
                    ceiling=ceiling,
                    no_peak_remedy=_no_peak_remedy(run, part, device),
                    devices_listed=bool(part.devices),
                    world_size=world_size,
                    process_groups=_process_groups(part, world_size),
                    device_clock=of_rank(run, rank, "device_clock"),
                    device_limit=of_rank(run, rank, "device_limit"),
                    kernel_counter=run.table(rank, "kernel_counter"),
                    core_wait=run.table(rank, "core_wait"),
                    synchronization=run.table(rank, "synchronization"),
                )
            )
        )
    return joined, ceilings


def _match(run: Run, joined: list[JoinedRank]) -> dict[int, Matched]:
    """The collectives of joined ranks, matched over ranks."""
    from chopper.analyzers.matching import match

    return match(
        [(j.given.rank, j.links, j.communication) for j in joined], one_clock=_on_one_host(run)
    )


def _on_one_host(run: Run) -> bool:
    """Whether the ranks share a host, and so a clock.

    Where traces name no host, they are of one when each lists the devices of all and the ranks are
    placed on them one after another, as launchers do on each host.
    """
    parts = run.manifest.ranks
    hosts = {part.hostname for part in parts}
    if hosts != {None}:
        return len(hosts) == 1
    if any(f.code == "run.no_common_time" for f in run.manifest.findings):
        return False
    used = [part.device_id for part in parts if part.device_id is not None]
    begins = {part.rank - device for part, device in zip(parts, used, strict=False)}
    return (
        len(used) == len(parts)
        and len(begins) == 1
        and all({*used} <= {device.device_id for device in part.devices} for part in parts)
    )


def _attribute(
    run: Run,
    joined: list[JoinedRank],
    matched: dict[int, Matched],
    ceilings: dict[int, Ceilings],
    *,
    keep: bool = False,
) -> Attribution:
    """Attribute joined ranks; unless ``keep``, what they were joined to is let go on the way."""
    import pyarrow as pa

    from chopper.analyzers.attribute import attribute_rank
    from chopper.attribution import Attribution, RankSummary
    from chopper.checks import withheld

    summaries: list[RankSummary] = []
    offsets_ns = {rank: (m.offset_ns, m.offset_rank) for rank, m in matched.items()}
    results: list[RankResult] = []
    waiting = [*joined][::-1]
    if not keep:
        joined.clear()
    while waiting:
        j = waiting.pop()
        result = attribute_rank(j, matched.get(j.given.rank))
        results.append(result)
        part = run.part(result.rank)
        device = _device_of(part)
        run.put(result.rank, "device_event", result.device_event)
        summaries.append(
            RankSummary(
                rank=result.rank,
                label=part.label or f"rank {result.rank}",
                device=None if j.host_only else device.name if device else None,
                peak_source=j.ceiling.source if j.ceiling else None,
                observed_ns=result.observed_ns,
                ideal_ns=result.ideal_ns,
                steps=result.steps,
            )
        )
        del j
    findings = [*run.manifest.findings]
    for result in results:
        findings += [*run.part(result.rank).findings, *result.findings]
    findings += _clock_findings(offsets_ns)
    findings += _numbering_findings(matched)
    coverage = _coverage(results)
    findings = _matching_findings(findings, coverage.get("collectives_matched_ratio"))
    findings += _sampler_findings(run)
    findings += _core_findings(run, results)

    def stacked(tables: list[pa.Table]) -> pa.Table:
        return pa.concat_tables(tables).unify_dictionaries().combine_chunks()

    return Attribution(
        run=run,
        pieces=stacked([r.piece for r in results]),
        windows=stacked([r.window for r in results]),
        gaps=stacked([r.gap for r in results]),
        links={r.rank: r.event_link for r in results},
        ranks=summaries,
        findings=_gathered(findings),
        coverage=coverage,
        bases=_bases(summaries, results),
        work={r.rank: r.work for r in results if r.work is not None},
        ceilings=ceilings,
        factors={r.rank: r.factors for r in results if r.factors is not None},
        withheld=withheld(findings),
        communication=stacked([r.communication for r in results]),
    )


def compare(
    a: Run | Attribution | str | Path,
    b: Run | Attribution | str | Path,
    *,
    allow_different: bool = False,
    all_steps: bool = False,
) -> Comparison:
    """Compare two runs: how B's step differs from A's, cause by cause, and how sure that is.

    Args:
        a: the run to compare with, or anything that :func:`load` takes.
        b: the run that is judged.
        allow_different: give a verdict although the runs do not do the same work.
        all_steps: keep leading steps that took much longer than those after them.

    Raises:
        InputError: one of them is neither a run nor traces.
    """
    from chopper.analyzers.compare import compare as compared
    from chopper.attribution import Attribution

    first, second = (r if isinstance(r, Attribution) else attribute(r) for r in (a, b))
    return compared(first, second, allow_different=allow_different, all_steps=all_steps)


def whatif(
    run: Run | Attribution | str | Path,
    *,
    fix: str | Sequence[str] = (),
    clock: str | None = None,
    link: str | None = None,
    latency: str | None = None,
    faster: str | Sequence[str] = (),
    without: str | Sequence[str] = (),
    graphs: bool = False,
    overlap: bool = False,
) -> WhatIf:
    """Predict what a run would take with something changed, by replaying its dependency graph.

    Without any change, the replay of the run as it was.

    Args:
        run: a run or its attribution, or anything that :func:`load` takes.
        fix: causes that take no time: ids, their last parts (``data``), or plain names
            (``straggler``, ``launch_gaps``).
        clock: of the device, ``1980MHz``; ``reference`` for the clock that its peak is quoted at.
        link: bandwidth between ranks, ``50GB/s`` or ``x2``.
        latency: of that link, ``5us`` or ``x0.5``.
        faster: ``gemm=2x``: kernels of a family, or found by a regular expression.
        without: operators that are not called.
        graphs: launch each step as one graph.
        overlap: nothing but communication waits for communication.

    Raises:
        UsageError: a change that is none, that contradicts another one, or that this run has no
            data for.
        InputError: the run cannot be replayed.
    """
    from chopper.attribution import Attribution
    from chopper.replaying import changes_of, replay_of

    changes = changes_of(
        fix=[fix] if isinstance(fix, str) else fix,
        clock=clock,
        link=link,
        latency=latency,
        faster=[faster] if isinstance(faster, str) else faster,
        without=[without] if isinstance(without, str) else without,
        graphs=graphs,
        overlap=overlap,
    )
    attribution = run if isinstance(run, Attribution) else attribute(run)
    return replay_of(attribution).whatif(changes)


def report(
    run: Run | Attribution | str | Path, output: str | Path = "report.html", *, force: bool = True
) -> Path:
    """Write a report; the format follows the extension: .html, .md, .json or .txt.

    Args:
        run: a run or its attribution, or anything that :func:`load` takes.
        output: the file to write.
        force: replace the file when it exists.

    Returns:
        ``output`` as a path.

    Raises:
        OutputError: it cannot be written, exists and ``force`` is False, lies inside a run, or is
            what the report is made from.
        UsageError: no such format.
        InputError: ``run`` is neither a run nor traces.
    """
    from chopper._pages import check_page
    from chopper.attribution import Attribution
    from chopper.errors import OutputError
    from chopper.reports import format_of, render
    from chopper.run import write_atomic

    output = Path(output)
    kind = format_of(output)
    if output.exists() and not force:
        raise OutputError(f"{output}: exists already; pass force=True to replace it")
    if isinstance(run, str | Path):
        check_page(output, [run])
        run = load(run)
    of = run.run if isinstance(run, Attribution) else run
    imported = of.manifest.ranks if of.path is None else []
    check_page(output, [file for part in imported for file in part.traces])
    attribution = run if isinstance(run, Attribution) else attribute(run)
    write_atomic(output, render(attribution, kind).encode())
    return output


def _device_of(part: RankManifest) -> Device | None:
    """The device that the rank computes on; when only one kind is listed, that kind."""
    for device in part.devices:
        if device.device_id == part.device_id:
            return device
    kinds = {(d.name, d.memory_bytes, d.multiprocessor_count) for d in part.devices}
    return part.devices[0] if len(kinds) == 1 else None


def _world_size(run: Run) -> int | None:
    """Ranks of the run as recorded, None when nothing says."""
    return max((p.world_size for p in run.manifest.ranks if p.world_size), default=None)


def _process_groups(part: RankManifest, world_size: int | None) -> dict[str, tuple[int, ...]]:
    """Process groups of a rank by name, as far as their ranks are known."""
    groups: dict[str, tuple[int, ...]] = {}
    for entry in part.process_groups:
        name = str(entry.get("pg_name", ""))
        ranks, size = entry.get("ranks"), entry.get("pg_size", entry.get("group_size"))
        if isinstance(ranks, list) and ranks and all(type(r) is int for r in ranks):
            groups[name] = tuple(sorted(ranks))
        elif size is not None and size == world_size:
            groups[name] = tuple(range(size))
    return groups


def device_ceiling(run: Run, part: RankManifest, device: Device | None) -> Ceiling | None:
    """Datasheet peaks of a device, None when it is not in the table.

    The link counts only where the run is the one node that the part lists, all of it: between
    nodes another link decides, and some of a node's devices share only some of its links (which
    holds for groups of ranks, too, where no switch joins the devices).
    """
    from chopper.analyzers.compute import Ceiling
    from chopper.devices import lookup

    if device is None or device.name is None:
        return None
    peaks = lookup(
        device.name,
        multi_processor_count=device.multiprocessor_count,
        memory_bytes=device.memory_bytes,
    )
    if peaks is None:
        return None
    bandwidth = peaks.memory_bandwidth_bytes_per_s.value
    together = peaks.least_group_count(len(part.devices))
    whole = (_world_size(run) or len(run.ranks)) == len(part.devices)
    return Ceiling(
        flop_per_s=peaks.flop_per_s,
        memory_bytes_per_s=float(bandwidth) if bandwidth else None,
        link_bytes_per_s=_link_per_direction(peaks.link_bytes_per_s.value)
        if whole and together is not None
        else None,
        link_group_count=together or 2,
        source=f"{peaks.label}, device table ({peaks.memory_bandwidth_bytes_per_s.source})",
        reference_clock_hz=peaks.clock_hz,
        units_count=None if peaks.units.value is None else int(peaks.units.value),
        unit_limits=_unit_limits(peaks),
        dies_count=None if peaks.dies.value is None else int(peaks.dies.value),
    )


def _unit_limits(peaks: DevicePeaks) -> UnitLimits | None:
    """What one unit holds, None when a part of it is not known."""
    from chopper.analyzers.waves import UnitLimits

    limits = [
        quantity.value
        for quantity in (
            peaks.threads_per_unit,
            peaks.blocks_per_unit,
            peaks.registers_per_unit,
            peaks.shared_memory_bytes_per_unit,
        )
    ]
    known = [int(value) for value in limits if value is not None]
    return UnitLimits(*known) if len(known) == len(limits) else None


def _calibration(run: Run, part: RankManifest, device: Device | None) -> Calibration | None:
    """What was measured of a rank's device, or of its host's cores with None.

    The result kept in the run counts first, else one stored on this machine for as many ranks.
    """
    from chopper import calibration

    kept = calibration.from_manifest(part.calibration) if part.calibration else None
    if kept is not None and (kept.device_type == "cpu") == (device is None):
        return kept
    if part.hostname is None or (device is not None and device.name is None):
        return None
    name = None if device is None else device.name
    found = calibration.load(name, part.hostname, ranks=_ranks_beside(run, part))
    if found is None and device is not None:
        # Devices do not share their units: what one reached alone holds beside others.
        found = calibration.load(name, part.hostname)
    return found


def _measured_ceiling(measured: Calibration | None) -> Ceiling | None:
    from chopper.analyzers.compute import Ceiling

    if measured is None:
        return None
    return Ceiling(
        flop_per_s=measured.flop_per_s,
        memory_bytes_per_s=measured.memory_bytes_per_s,
        source=measured.source,
        link_bytes_per_s=measured.link_bytes_per_s,
    )


def _ceilings(run: Run, part: RankManifest, device: Device | None, *, on_host: bool) -> Ceilings:
    """The theoretical and the measured ceiling of a rank, or why one is not known."""
    from chopper.attribution import Ceilings

    if on_host and part.devices:
        reason = "no event of the device was recorded, only the host's"
        return Ceilings(None, None, reason, reason)
    theoretical = None if on_host else device_ceiling(run, part, device)
    measurable = on_host or device is not None
    achievable = (
        _measured_ceiling(_calibration(run, part, None if on_host else device))
        if measurable
        else None
    )
    not_listed = (
        "the host's cores have no datasheet peak"
        if on_host
        else _not_listed(device)
        if device is not None and device.name
        else "the trace does not say which device it was recorded on"
    )
    not_measured = (
        "imported, and its machine was not calibrated"
        if part.status == "imported"
        else "`chopper calibrate` was not run there"
    )
    return Ceilings(
        theoretical,
        achievable,
        None if theoretical is not None else not_listed,
        None if achievable is not None else not_measured,
    )


def _link_per_direction(total: int | float | None) -> float | None:
    """Datasheets add up both directions of all links."""
    return float(total) / 2 if total else None


def _ranks_beside(run: Run, part: RankManifest) -> int:
    return sum(other.hostname == part.hostname for other in run.manifest.ranks)


def _not_listed(device: Device) -> str:
    """Why a device with a name has no peaks."""
    from chopper.devices import why_unknown

    return why_unknown(
        device.name or "",
        multi_processor_count=device.multiprocessor_count,
        memory_bytes=device.memory_bytes,
    )


def _no_peak_remedy(run: Run, part: RankManifest, device: Device | None) -> str:
    """What a user can do about unknown peaks."""
    if part.devices:
        why = (
            _not_listed(device)
            if device and device.name
            else "the device is not in the table of peaks"
        )
        return f"{why} (docs: device peaks)"
    if part.status == "imported":
        return "the machine that recorded it was not calibrated"
    return f"run `chopper calibrate --ranks {_ranks_beside(run, part)}` there, then analyze again"


def _clock_findings(offsets_ns: dict[int, tuple[int, int | None]]) -> list[Finding]:
    """What was taken out of the ranks' times before anybody was called late.

    Args:
        offsets_ns: rank → how far its clock is ahead, and of whose.
    """
    from chopper.manifest import Finding

    return [
        Finding(
            code="run.clock_offset",
            severity="info",
            rank=rank,
            message=f"its clock is {abs(offset) / 1e3:.0f} µs {'ahead of' if offset > 0 else 'behind'} "
            f"rank {other}'s, by when they leave collectives: corrected before waiting was counted",
        )
        for rank, (offset, other) in offsets_ns.items()
        if abs(offset) >= _CLOCK_OFFSET_SAID_NS
    ]


def _numbering_findings(matched: dict[int, Matched]) -> list[Finding]:
    """Groups whose sequence numbers were not used, because their ranks do not count alike."""
    from chopper.manifest import Finding

    return [
        Finding(
            code="communication.numbers_differ",
            severity="warning",
            count=group.differing_count,
            message=f"group {group.group or '(unnamed)'} of {group.size} ranks: ranks "
            f"{group.ranks[0]} and {group.ranks[1]} mean different collectives by "
            f"{group.differing_count} of {group.compared_count} sequence numbers: they do not count "
            "alike, or are of different runs; matched by time instead",
        )
        for group in next((m.misnumbered for m in matched.values()), ())
    ]


def _matching_findings(findings: list[Finding], matched_ratio: float | None) -> list[Finding]:
    """Say that waiting is not told from transfer where most collectives had no counterpart."""
    import msgspec

    from chopper.manifest import Finding

    if matched_ratio is None:
        return findings
    if matched_ratio >= _MATCHED_RATIO:
        # Traces that share no moment matched all the same: it was their clocks.
        return [
            msgspec.structs.replace(f, severity="info", message=_CLOCKS_DISAGREE)
            if f.code == "run.no_common_time"
            else f
            for f in findings
        ]
    claim = ("communication.wait",)
    reasons = ("run.ranks_missing", "run.no_common_time")
    if any(f.code in reasons for f in findings):
        return [
            msgspec.structs.replace(f, withholds=claim) if f.code in reasons else f
            for f in findings
        ]
    message = (
        f"{1 - matched_ratio:.0%} of the collectives' time could not be matched on all ranks of "
        "their group: waiting for a straggler is not told from transfer there"
    )
    return [
        *findings,
        Finding(code="communication.unmatched", severity="info", message=message, withholds=claim),
    ]


def _sampler_findings(run: Run) -> list[Finding]:
    """Holes that samplers left because they could not write as fast, and clocks that differ."""
    from chopper._format import duration
    from chopper.manifest import Finding

    found = []
    for part in run.manifest.ranks:
        for report in part.collectors:
            dropped, kept = report.dropped_count or 0, report.samples_count or 0
            if dropped:
                share = dropped / (dropped + kept)
                found.append(
                    Finding(
                        code="telemetry.dropped",
                        severity="warning" if share > _DROPPED_RATIO else "info",
                        rank=part.rank,
                        count=dropped,
                        message=f"{report.name}: {dropped} of {dropped + kept} samples "
                        f"({share:.1%}) were dropped: its telemetry has holes",
                    )
                )
            apart_ns = report.clock_alignment_error_ns or 0
            if apart_ns > _APART_NS:
                found.append(
                    Finding(
                        code="telemetry.clock_apart",
                        severity="warning",
                        rank=part.rank,
                        message=f"{report.name}: its clock may be {duration(apart_ns)} from that of "
                        "the run's other recordings: what is joined to them in time is off by as much",
                    )
                )
    return found


def _core_findings(run: Run, results: list[RankResult]) -> list[Finding]:
    """Ranks that waited for a core: what else ran there lengthens everything that the host does."""
    from chopper.manifest import Finding
    from chopper.telemetry import core_wait_ratio, thread_wait

    found = []
    for result in results:
        windows = result.window
        if not windows.num_rows:
            continue
        bounds = (windows["start_ns"][0].as_py(), windows["end_ns"][windows.num_rows - 1].as_py())
        ratio, which = core_wait_ratio(run, result.rank, *bounds), "its main thread"
        worst = thread_wait(run, result.rank, _launching_threads(run, result.rank), *bounds)
        if worst is not None and worst[1] > (ratio or 0.0):
            which, ratio = f"its thread {worst[0]}", worst[1]
        if ratio is not None and ratio >= _CORE_WAIT_RATIO:
            found.append(
                Finding(
                    code="host.cores_taken",
                    severity="warning",
                    rank=result.rank,
                    message=f"{which} waited for a core in {ratio:.0%} of the time: other "
                    "programs, or more threads than cores, make what the host does take longer",
                )
            )
    return found


def _launching_threads(run: Run, rank: int) -> set[int]:
    """Threads that the trace shows run operators or launch."""
    import numpy as np

    from chopper.analyzers.columns import ints, matching, strings

    spans = run.table(rank, "host_span")
    codes, names = strings(spans, "category", narrow=True)
    working = matching(codes, names, ("cpu_op", "runtime", "driver").__contains__)
    return {int(tid) for tid in np.unique(ints(spans, "tid")[working])}


def _gathered(findings: list[Finding]) -> list[Finding]:
    """Findings once each, most severe first; the same finding of many ranks becomes one."""
    import msgspec

    grouped: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        grouped.setdefault((finding.code, finding.message), []).append(finding)
    merged = []
    for (_, text), same in grouped.items():
        first = same[0]
        if len(same) > 1 and first.rank is not None:
            ranks = sorted({f.rank for f in same if f.rank is not None})
            shown = ", ".join(map(str, ranks[:6])) + (" …" if len(ranks) > 6 else "")
            first = msgspec.structs.replace(first, rank=None, message=f"ranks {shown}: {text}")
        merged.append(first)
    return sorted(merged, key=lambda f: _SEVERITY[f.severity])


def _coverage(results: list[RankResult]) -> dict[str, float | None]:
    sums: dict[str, tuple[float, float]] = {}
    for result in results:
        for name, (part, whole) in result.coverage.items():
            a, b = sums.get(name, (0.0, 0.0))
            sums[name] = (a + part, b + whole)
    found: dict[str, float | None] = {n: (a / b if b else None) for n, (a, b) in sums.items()}
    found.setdefault("clock_ratio", None)
    return found


def _unmeasured(results: list[RankResult], *only: str) -> str:
    """Which factors are in the rest because they were not measured, and why."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        for name, why in (result.factors.unmeasured if result.factors is not None else {}).items():
            if (not only or name in only) and why not in reasons.setdefault(name, []):
                reasons[name].append(why)
    said = "; ".join(f"{name} not measured ({', '.join(why)})" for name, why in reasons.items())
    return f"; {said}" if said else ""


def _bases(ranks: list[RankSummary], results: list[RankResult]) -> dict[str, Basis]:
    from chopper.attribution import Basis
    from chopper.causes import CAUSES

    sources = sorted({r.peak_source for r in ranks if r.peak_source})
    peak = "; ".join(sources) or "no peak known"
    clock = Basis(
        "clock samples joined in time, reference clock of the peak; weighted by how much the kernel "
        "depends on the clock, as its like show at other clocks, else by its roofline",
        False,
    )
    return {
        "compute.ideal": Basis(f"FLOP from recorded shapes, peak of {peak}", False),
        "compute.roofline": Basis(f"bytes from recorded shapes, bandwidth of {peak}", False),
        **{cause: clock for cause in CAUSES if cause.startswith("compute.clock.")},
        "compute.contention": Basis(
            "recorded times against the median of the same work that ran alone"
            + (
                ", brought to one clock"
                if any(r.factors is not None and r.factors.clocks.known.any() for r in results)
                else "; clocks were not measured and may differ"
            ),
            False,
        ),
        "compute.efficiency.wave_quantization": Basis(
            "recorded grids against the units of the device", False
        ),
        "compute.efficiency.instructions": Basis(
            "hardware counters of another run, matched by kernel name and order", False
        ),
        "compute.efficiency.tensor_core": Basis(
            "hardware counters of another run, matched by kernel name and order; less what the "
            "roofline and the last wave explain",
            False,
        ),
        "compute.efficiency.rest": Basis(
            f"recorded time less the factors above{_unmeasured(results)}", False
        ),
        "compute.vector.roofline": Basis(f"bytes from recorded shapes, bandwidth of {peak}", False),
        "compute.vector.excess": Basis(
            f"recorded time less the roofline{_unmeasured(results, 'clock', 'contention')}", False
        ),
        "compute.no_peak": Basis("recorded times; peak or shapes unknown", True),
        "communication.unseparated": Basis(
            "recorded times; not matched on all ranks, so waiting is not told from transfer", True
        ),
        "communication.wait": Basis(
            "recorded times; the same collective matched on all ranks of its group (of the world, "
            "where the trace names no group)",
            True,
        ),
        "communication.transfer.at_peak": Basis(
            f"bytes times nccl-tests' bus factor, link of {peak}", False
        ),
        "communication.transfer.below_peak": Basis(
            "recorded time after the last rank came, less the time at link peak", False
        ),
    }
