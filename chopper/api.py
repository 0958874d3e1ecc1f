"""The public verbs: load a run, attribute it, report it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from chopper import _findings
from chopper.hardware.ceilings import ceilings_of, device_of, no_peak_remedy, world_size_of
from chopper.ingest import read
from chopper.storage.run import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.analyzers.causes.attribute import RankResult
    from chopper.analyzers.compare.result import Comparison
    from chopper.analyzers.trace.joined import JoinedRank
    from chopper.analyzers.trace.match import Matched
    from chopper.attribution import Attribution, Basis, RankSummary
    from chopper.hardware.ceilings import Ceilings
    from chopper.replaying import WhatIf
    from chopper.storage.manifest import RankManifest

    Source = str | Path | Sequence[str | Path]


def load(source: Source) -> Run:
    """Open a run directory, or read traces as a run in memory.

    Args:
        source: a run directory; or a trace file, a glob, a directory of traces, or several.

    Raises:
        InputError: there is nothing there, or not what it should be.
    """
    return read([source] if isinstance(source, str | Path) else list(source))


def attribute(run: Run | Source) -> Attribution:
    """Attribute every nanosecond of the run's step windows to exactly one cause.

    Where steps of several kinds were traced (with an evaluation, say, or slow first ones), it is of
    those that the step time is of; :attr:`Attribution.whole` is of all of them.

    Args:
        run: a run, or anything that :func:`load` takes.

    Raises:
        InputError: there is nothing there, or not what it should be.
    """
    run = run if isinstance(run, Run) else load(run)
    joined, ceilings = _join(run)
    return _attribute(run, joined, _match(run, joined), ceilings)


def _join(run: Run) -> tuple[list[JoinedRank], dict[int, Ceilings]]:
    """The ranks of a run, their events joined to the host; what their devices can do."""
    from chopper.analyzers.trace.host_device import is_host_timeline
    from chopper.analyzers.trace.joined import RankInput, join_rank
    from chopper.analyzers.trace.samples import of_rank
    from chopper.tables import TABLES

    joined: list[JoinedRank] = []
    world_size = world_size_of(run.manifest)
    ceilings: dict[int, Ceilings] = {}
    for rank in run.ranks:
        part = run.part(rank)
        tables = {
            name: run.table(rank, name)
            for name in ("host_span", "device_event", "step", "collective")
        }
        if is_host_timeline(tables["device_event"]):
            # Made of host spans by an attribution before this one.
            tables["device_event"] = TABLES["device_event"].empty()
        device = device_of(part)
        on_host = tables["device_event"].num_rows == 0
        ceilings[rank] = ceilings_of(run.manifest, part, device, on_host=on_host)
        ceiling = ceilings[rank].achievable if on_host else ceilings[rank].theoretical
        joined.append(
            join_rank(
                RankInput(
                    rank=rank,
                    **tables,
                    ceiling=ceiling,
                    no_peak_remedy=no_peak_remedy(run.manifest, part, device),
                    devices_listed=bool(part.devices),
                    world_size=world_size,
                    process_groups=_process_groups(part, world_size),
                    device_clock=of_rank(run, rank, "device_clock"),
                    device_limit=of_rank(run, rank, "device_limit"),
                    kernel_counter=run.table(rank, "kernel_counter"),
                    core_wait=run.table(rank, "core_wait"),
                    synchronization=run.table(rank, "synchronization"),
                    recorded=part.status != "imported",
                )
            )
        )
        run.put(rank, "step", joined[-1].given.step)
    return joined, ceilings


def _match(run: Run, joined: list[JoinedRank]) -> dict[int, Matched]:
    """The collectives of joined ranks, matched over ranks."""
    from chopper.analyzers.trace.match import match

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

    from chopper.analyzers.causes.attribute import attribute_rank
    from chopper.attribution import Attribution, RankSummary
    from chopper.findings import withheld

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
        device = device_of(part)
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
    findings += _findings.of_clocks(offsets_ns)
    findings += _findings.of_numbers(matched)
    coverage = _coverage(results)
    findings = _findings.of_matching(findings, coverage.get("collectives_matched_ratio"))
    findings += _findings.of_samplers(run)
    findings += _findings.of_cores(run, results)

    def stacked(tables: list[pa.Table]) -> pa.Table:
        return pa.concat_tables(tables).unify_dictionaries().combine_chunks()

    attribution = Attribution(
        run=run,
        pieces=stacked([r.piece for r in results]),
        windows=stacked([r.window for r in results]),
        gaps=stacked([r.gap for r in results]),
        links={r.rank: r.event_link for r in results},
        ranks=summaries,
        findings=findings,
        coverage=coverage,
        bases=_bases(summaries, results),
        work={r.rank: r.work for r in results if r.work is not None},
        ceilings=ceilings,
        factors={r.rank: r.factors for r in results if r.factors is not None},
        withheld=withheld(findings),
        communication=stacked([r.communication for r in results]),
    )
    shown = attribution.of_kind()
    findings += [*_findings.of_steps(shown), *_findings.of_utilization(shown)]
    attribution.findings = shown.findings = _findings.gathered(findings)
    return shown


def compare(
    a: Run | Attribution | Source,
    b: Run | Attribution | Source,
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
    from chopper.analyzers.compare.runs import compare as compared
    from chopper.attribution import Attribution

    first, second = (r if isinstance(r, Attribution) else attribute(r) for r in (a, b))
    return compared(first, second, allow_different=allow_different, all_steps=all_steps)


def whatif(
    run: Run | Attribution | Source,
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
    run: Run | Attribution | Source, output: str | Path = "report.html", *, force: bool = True
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
    from chopper.attribution import Attribution
    from chopper.errors import OutputError
    from chopper.ingest import check_page
    from chopper.reports import format_of, render
    from chopper.storage.files import write_atomic

    output = Path(output)
    kind = format_of(output)
    if output.exists() and not force:
        raise OutputError(f"{output}: exists already; pass force=True to replace it")
    if not isinstance(run, Attribution | Run):
        check_page(output, [run] if isinstance(run, str | Path) else run)
        run = load(run)
    of = run.run if isinstance(run, Attribution) else run
    imported = of.manifest.ranks if of.path is None else []
    check_page(output, [file for part in imported for file in part.traces])
    attribution = run if isinstance(run, Attribution) else attribute(run)
    write_atomic(output, render(attribution, kind).encode())
    return output


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
