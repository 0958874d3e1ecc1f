"""Findings on a whole run while it is attributed: clocks, numbers, matching, samples, cores."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.attribute import RankResult
from chopper.analyzers.causes.step_time import FIRST, StepTime
from chopper.analyzers.events.held_memory import held_memory
from chopper.analyzers.trace.match import Matched
from chopper.analyzers.trace.samples import (
    LEAST_THREAD_SPAN_NS,
    core_wait_ratio,
    thread_growth,
    working_tids,
)
from chopper.analyzers.views.memory import memory_growth
from chopper.storage.findings import finding
from chopper.storage.manifest import Finding, RunManifest
from chopper.storage.run import Run
from chopper.views import view
from chopper.wording import bytes_, duration, plural, ranges, some

_CLOCK_OFFSET_SAID_NS = 50_000
"""Smaller differences are how long ranks take to leave a collective, not their clocks."""
_MATCHED_RATIO = 0.5
"""Below it, most of the collectives' time says nothing of who waited for whom."""
_DROPPED_RATIO = 0.01
_APART_NS = 5_000_000
"""Half of a period of the samplers: clocks further apart move readings to other kernels."""
_CORE_WAIT_RATIO = 0.1
"""From so much on, host causes tell of the machine more than of the program."""
_KIND_RATIO = 0.2
"""Steps of a kind that was not traced are worth a window from this share of the time on."""
_OUTSIDE_RATIO = 0.2
"""From so much of the program's time after the last step on, the steps are not its whole story."""
_SEVERITY = {"error": 0, "warning": 1, "info": 2}


def of_clocks(offsets_ns: dict[int, tuple[int, int | None]]) -> Iterator[Finding]:
    """Findings on the clock offsets that were taken out of the ranks' times.

    Args:
        offsets_ns: rank → how far its clock is ahead, and of whose.
    """
    for rank, (offset, other) in offsets_ns.items():
        if abs(offset) >= _CLOCK_OFFSET_SAID_NS:
            side = "ahead of" if offset > 0 else "behind"
            us = abs(offset) / 1e3
            yield finding("run.clock_offset", rank=rank, offset_us=us, side=side, other=other)


def of_lost(rank: int, reason: str) -> Finding:
    """Name a rank that could not be attributed."""
    return finding("run.rank_lost", rank=rank, reason=reason)


def of_detail(run: Attribution) -> Iterator[Finding]:
    """Say which ranks and steps were looked at closely, where these are not all."""
    if run.part is not None:
        cover, option = run.covered()
        if option:
            yield finding(
                "run.some_closely",
                count=len(run.detail.ranks),
                cover=cover,
                option=option,
                predictions=", predictions" if run.predicted is None else ", actions",
                rest="" if run.predicted is None else f"; {run.predicted.rests_on}",
            )


def of_stretches(each: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the findings of the stretches of a rank's trace, each kind of finding once.

    Where they differ in figures, the one that counts most stands for all.
    """
    alike: dict[str, list[Finding]] = {}
    for findings in each:
        for one in findings:
            alike.setdefault(one.code, []).append(one)
    merged = []
    for same in alike.values():
        most = max(same, key=lambda one: one.count or 0)
        if len({one.message for one in same}) > 1:
            more = f"{most.message} (the most in one of {len(each)} stretches of steps)"
            most = msgspec.structs.replace(most, message=more)
        merged.append(most)
    return merged


def of_numbers(matched: dict[int, Matched]) -> Iterator[Finding]:
    """Groups whose sequence numbers were not used, because their ranks do not count alike."""
    for group in next((m.misnumbered for m in matched.values()), ()):
        yield finding(
            "communication.numbers_differ",
            count=group.differing_count,
            group=group.group or "(unnamed)",
            size=group.size,
            ranks=group.ranks,
            whole=group.compared_count,
        )


def of_common_steps(numbers: Mapping[int, Sequence[int]], common: Collection[int]) -> Finding:
    """Say which steps the ranks traced, and which of them all did."""
    each = dict(
        sorted((ranges(steps), rank) for rank, steps in reversed([*numbers.items()]) if steps)
    )
    ranks = [f"rank {rank}: {steps}" for steps, rank in sorted(each.items(), key=lambda e: e[1])]
    note = f"collectives are matched in those that all traced: {ranges(sorted(common))}"
    return finding(
        "run.steps_differ",
        count=len(common),
        steps=some(ranks),
        common=note if common else "none was traced by all, so collectives are not matched by time",
    )


def of_matching(findings: list[Finding], matched_ratio: float | None) -> list[Finding]:
    """Say that waiting is not told from transfer where most collectives had no counterpart."""
    if matched_ratio is None:
        return findings
    if matched_ratio >= _MATCHED_RATIO:
        # Traces that share no moment matched all the same: it was their clocks.
        return [
            finding("run.no_common_time", "corrected", severity="info", withholds=False)
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
    return [*findings, finding("communication.unmatched", share=1 - matched_ratio)]


def of_samplers(manifest: RunManifest) -> Iterator[Finding]:
    """Holes that samplers left because they could not write as fast, and clocks that differ."""
    for part in manifest.ranks:
        for report in part.collectors:
            dropped, read = report.dropped_count or 0, report.samples_count or 0
            if dropped:
                share = dropped / (dropped + read)
                yield finding(
                    "telemetry.dropped",
                    rank=part.rank,
                    count=dropped,
                    severity="warning" if share > _DROPPED_RATIO else None,
                    name=report.name,
                    whole=dropped + read,
                    share=share,
                )
            apart_ns = report.clock_alignment_error_ns or 0
            if apart_ns > _APART_NS:
                yield finding(
                    "telemetry.clock_apart",
                    rank=part.rank,
                    name=report.name,
                    apart=duration(apart_ns),
                )


def of_cores(recording: Run, results: Iterable[RankResult]) -> Iterator[Finding]:
    """Ranks that waited for a core: what else ran there lengthens everything that the host does."""
    for result in results:
        rank, windows = result.rank, result.window
        if not windows.num_rows:
            continue
        bounds = windows["start_ns"][0].as_py(), windows["end_ns"][windows.num_rows - 1].as_py()
        ratio, which = core_wait_ratio(recording, rank, *bounds) or 0.0, "its main thread"
        if bounds[1] - bounds[0] >= LEAST_THREAD_SPAN_NS:
            working = working_tids(recording.table(rank, "host_span"))
            for thread in thread_growth(recording, rank, *bounds):
                waited = min(thread.wait_ns / (bounds[1] - bounds[0]), 1.0)
                if thread.tid in working and waited > ratio:
                    which, ratio = f"its thread {thread.name}", waited
        if ratio >= _CORE_WAIT_RATIO:
            yield finding("host.cores_taken", rank=rank, thread=which, share=ratio)


def of_steps(step: StepTime, known: Iterable[Finding]) -> Iterator[Finding]:
    """Findings on what tracing added, kinds of steps not traced, and time after the last step."""
    if step.is_slowed_by_tracing and step.untraced is not None:
        remedy = "--no-shapes, or a longer window (--steps), to reduce it"
        if any(f.code == "trace.no_shapes" for f in known):
            remedy = "a longer window (--steps) to see how much of it is noise"
        yield finding(
            "steps.slowed_by_tracing",
            share=step.tracing_ratio,
            traced=duration(step.untraced.value_ns + (step.tracing_ns or 0)),
            untraced=duration(step.untraced.value_ns),
            remedy=remedy,
        )
    for kind in step.kinds if step.traced_mean_ns else ():
        if kind.traced_steps or kind.name == FIRST or kind.share_ratio < _KIND_RATIO:
            continue
        numbers = kind.steps
        last = numbers[-1] if len(numbers) < 3 else numbers[len(numbers) // 2]
        yield finding(
            "steps.not_traced",
            count=len(numbers),
            steps=plural(len(numbers), "step"),
            kind=f"{kind.name}: {ranges(numbers[:20])}{' …' if len(numbers) > 20 else ''}",
            share=kind.share_ratio,
            window=f"{last}:{last + 1}",
        )
    outside = step.outside
    own_ns = outside.recording_ns - outside.profiler_ns if outside is not None else 0
    if outside is not None and outside.after_ns >= _OUTSIDE_RATIO * own_ns > 0:
        phases = [f"{name} {duration(time_ns)}" for name, time_ns in outside.phases_ns.items()]
        yield finding(
            "run.outside_steps",
            after=duration(outside.after_ns),
            whole=duration(own_ns),
            share=outside.after_ns / own_ns,
            phases=f" (of them {', '.join(phases)})" if phases else "",
            own=duration(outside.profiler_ns),
        )


def of_unnumbered(windows: pa.Table) -> Iterator[Finding]:
    """Name the ranks whose whole trace is one window beside the numbered steps of others."""
    without = windows["number"].is_null()
    if windows["number"].null_count < windows.num_rows:
        for rank in windows["rank"].filter(without).unique().to_pylist():
            yield finding("steps.unnumbered", rank=rank)


def of_utilization(run: Attribution) -> Iterator[Finding]:
    """Ceilings that a rank's products exceed: its MFU and HFU are null."""
    run = run.detail
    rows = view(run, "utilization").to_pylist() if run.ceilings else []
    for row in [r for r in rows if r["rank"] is not None] or rows:
        if row["reason"] and row["reason"].startswith("withheld"):
            yield finding(
                "utilization.above_one",
                rank=run.ranks[0].rank if row["rank"] is None else row["rank"],
                ceiling=row["ceiling"],
                reason=row["reason"],
            )


def of_memory(run: Attribution) -> Iterator[Finding]:
    """Allocations that failed, and memory that grows from step to step."""
    for held in held_memory(run.recording):
        # Without a trace the verdict says the rest.
        text = f"{held.headline} {held.detail}" if run.observed_ns else held.headline
        if held.asked_bytes is not None:
            yield finding("memory.out_of_memory", rank=held.rank, what=text)
    for grown in memory_growth(run):
        remaining = (
            "" if grown.steps_left is None else f", about {plural(grown.steps_left, 'step')}"
        )
        yield finding(
            "memory.growth",
            rank=grown.rank,
            count=grown.steps_count,
            what=grown.what,
            each=bytes_(grown.bytes_per_step),
            first=bytes_(grown.first_bytes),
            last=bytes_(grown.last_bytes),
            left=remaining and f"{remaining} before it is used up",
        )


def gathered(findings: list[Finding]) -> list[Finding]:
    """Findings once each, most severe first; the same finding of many ranks becomes one."""
    grouped: dict[tuple[str, str], list[Finding]] = {}
    for one in findings:
        grouped.setdefault((one.code, one.message), []).append(one)
    merged = []
    for (_, text), same in grouped.items():
        first = same[0]
        ranks = sorted({f.rank for f in same if f.rank is not None})
        if len(same) > 1 and first.rank is not None:
            message = f"ranks {ranges(ranks)}: {text}"
            first = msgspec.structs.replace(first, rank=None, message=message)
        merged.append(first)
    return sorted(merged, key=lambda f: _SEVERITY[f.severity])
