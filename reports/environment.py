"""Section of a page on the command, its machines, and what chopper could record there."""

from __future__ import annotations

import datetime as dt
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution
from chopper.reports.page import BROWSER, Block, Cell, Column, Fact, Facts, Mark, Section, Table
from chopper.storage.manifest import CollectorReport, RunManifest

_LABELS = {
    "affinity": "Allowed cores",
    "cores_by_numa_node": "Cores by NUMA node",
    "cpu": "CPU",
    "cuda": "CUDA",
    "hip": "HIP",
    "nccl": "NCCL",
    "platform": "Platform",
    "python": "Python",
    "torch": "PyTorch",
    "torch_threads": "PyTorch's threads",
}
_MARKS: dict[str, Mark] = {"obtained": "ok", "refused": "warning", "failed": "error"}
_MAX_RANKS = 16
"""Ranks whose overhead is listed."""


def section(run: Attribution) -> Section:
    """Return the environment of a run, its collectors, and what recording it cost."""
    manifest = run.recording.manifest
    blocks: list[Block] = [Facts(facts=_facts(manifest))]
    blocks += [t for t in (_collectors(manifest), _overhead(run)) if t.rows]
    return Section(
        title="Environment",
        id="environment",
        intro="What was run, where, and what chopper could record.",
        blocks=blocks,
        formats=BROWSER,
    )


def _facts(run: RunManifest) -> list[Fact]:
    ranks = run.ranks
    moment = dt.datetime.fromtimestamp((run.created_ns or 0) / 1e9, tz=dt.UTC)
    keys = dict.fromkeys(key for part in ranks for key in part.environment)
    traces = [Path(t).name for p in ranks for t in p.traces] if run.kind == "imported" else []
    texts = [
        ("Run", run.name),
        ("Command", shlex.join(run.command or ())),
        ("Workload", run.workload),
        ("Recorded", moment.strftime("%Y-%m-%d %H:%M:%S UTC") if run.created_ns else ""),
        ("Exit code", "" if run.exit_code is None else str(run.exit_code)),
        ("World size", ", ".join(map(str, sorted({p.world_size for p in ranks if p.world_size})))),
        ("Hosts", _few([p.hostname for p in ranks])),
        ("Backend", _few([p.backend for p in ranks])),
        ("Steps detected by", _few([p.steps_source for p in ranks])),
        ("Recorded by chopper", _few([p.chopper_version for p in ranks])),
        *(("Device", text if n == 1 else f"{n} × {text}") for text, n in _devices(run).items()),
        *((_LABELS.get(k, k), _few([p.environment.get(k) for p in ranks])) for k in keys),
        ("Traces", _few(traces)),
    ]
    return [Fact(label=label, value=text, code=label == "Command") for label, text in texts if text]


def _few(values: Sequence[str | None]) -> str:
    """Return the distinct values, in order of first use; how many there are beyond a few."""
    distinct = list(dict.fromkeys(v for v in values if v))
    more = f" and {len(distinct) - 4} more" if len(distinct) > 4 else ""
    return ", ".join(distinct[:4]) + more


def _devices(run: RunManifest) -> Counter[str]:
    return Counter(
        ", ".join(
            [
                device.name or "unknown device",
                *([fmt.bytes_(device.memory_bytes)] if device.memory_bytes else []),
                *(
                    [fmt.plural(device.multiprocessor_count, "multiprocessor")]
                    if device.multiprocessor_count
                    else []
                ),
            ]
        )
        for part in run.ranks
        for device in part.devices
        if part.device_id in (None, device.device_id)
    )


def _collectors(run: RunManifest) -> Table:
    """Show a row per collector and outcome, ranks that agree together."""
    rows: dict[tuple[object, ...], tuple[CollectorReport, list[int]]] = {}
    for part in run.ranks:
        for report in part.collectors:
            # What was sampled differs by rank; a refusal is the same everywhere.
            alone = part.rank if report.samples_count is not None else None
            key = (report.name, report.status, report.reason, alone)
            first, ranks = rows.setdefault(key, (report, []))
            ranks.append(part.rank)
            worst = max(first.clock_alignment_error_ns or 0, report.clock_alignment_error_ns or 0)
            if worst:
                rows[key] = msgspec.structs.replace(first, clock_alignment_error_ns=worst), ranks
    clock = "Clock offset from the run's other recordings, as measured"
    return Table(
        title="Collectors",
        columns=(
            *("Collector", "Ranks", Column("Status", kind="prose")),
            *("Rate", "Samples", "Dropped", "Jitter p50 / p99", "Call p50 / p99", "CPU"),
            Column("Clock", hint=clock),
        ),
        words=2,
        rows=[
            _collector_cells(*row) for row in sorted(rows.values(), key=lambda r: (r[0].name, r[1]))
        ],
    )


def _collector_cells(report: CollectorReport, ranks: list[int]) -> list[str | Cell]:
    why = [report.reason or "", f"Remedy: {report.remedy}" if report.remedy else ""]
    if report.absent:
        absent = "; ".join(f"{name}: {reason}" for name, reason in sorted(report.absent.items()))
        why.append(f"{len(report.absent)} not read: {absent}")
    rate = fmt.hertz(report.achieved_hz)
    if report.achieved_hz is not None and report.requested_hz is not None:
        rate += f" of {fmt.hertz(report.requested_hz)}"
    error_ns = report.clock_alignment_error_ns
    return [
        Cell(text=report.name, strong=True),
        fmt.ranges(ranks),
        Cell(text=report.status, mark=_MARKS[report.status], below=". ".join(filter(None, why))),
        rate,
        fmt.count(report.samples_count),
        fmt.count(report.dropped_count),
        _pair(report.jitter_p50_ns, report.jitter_p99_ns),
        _pair(report.call_p50_ns, report.call_p99_ns),
        fmt.ratio(report.cpu_ratio),
        fmt.UNKNOWN if error_ns is None else f"± {fmt.duration(error_ns)}",
    ]


def _pair(low: int | None, high: int | None) -> str:
    if low is None and high is None:
        return fmt.UNKNOWN
    return f"{fmt.duration(low)} / {fmt.duration(high)}"


def _overhead(run: Attribution) -> Table:
    rows = []
    step = run.step_time()
    for part in run.recording.manifest.ranks[:_MAX_RANKS]:
        cost = part.overhead
        if cost is None:
            continue
        traced_ns, untraced_ns = step.traced_mean_ns, step.headline_ns
        if step.untraced is None:
            # What the recording itself counted, as older ones did not say of each step.
            traced_ns, untraced_ns = cost.traced_step_ns, cost.untraced_step_ns
        change = fmt.UNKNOWN
        if traced_ns and untraced_ns:
            change = fmt.percent(traced_ns / untraced_ns - 1, "+.1f")
        times = (cost.setup_ns, cost.per_step_ns, cost.export_ns, traced_ns, untraced_ns)
        rows.append((str(part.rank), *map(fmt.duration, times), change))
    columns = ("Rank", "Set-up", "In each step", "Writing the trace")
    steps = ("Traced step", "Untraced step", "Tracing costs")
    return Table(title="Chopper's own overhead", columns=(*columns, *steps), rows=rows)
