"""Trace quality: what a reader must know before believing a number."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pyarrow.compute as pc

from chopper import wording as fmt
from chopper.analyzers.causes.clock import (
    FALSE_CAP,
    FALSE_HEAT,
    MAX_GAP_NS,
    NO_OVERLAP,
    SPARSE,
    EventClocks,
)
from chopper.analyzers.causes.compute import ComputeSplit
from chopper.analyzers.causes.factors import Factors
from chopper.analyzers.trace.columns import ints, pick
from chopper.analyzers.trace.join import COMPUTE, Links, kernel_launches
from chopper.analyzers.trace.rank_join import JoinedRank
from chopper.analyzers.trace.windows import UNRECORDED
from chopper.hardware.ceilings import MOST_OF_A_PEAK
from chopper.storage.findings import finding
from chopper.storage.manifest import Finding
from chopper.storage.run import Span
from chopper.wording import duration, plural, ranges

_LOST_RATIO = 0.01
_FEW_LAUNCHES_RATIO = 0.2
"""From this share of events without launch on, gaps cannot be explained."""
_WHOLE_US_SLACK_NS = 1000
"""Times cut to whole microseconds may overlap by one."""


def check_rank(
    joined: JoinedRank, links: Links, too_fast: int = 0, of_peak_ratio: float = 0.0
) -> list[Finding]:
    """Check one rank's trace; ``too_fast`` and ``of_peak_ratio`` are as of `ComputeSplit`."""
    rank = joined.inputs.rank
    if not len(links.events):
        lost = len(links.lost_launches)
        code = "trace.no_kernels" if lost else "trace.no_events"
        return [finding(code, rank=rank, count=lost or None)]
    return [
        msgspec.structs.replace(one, rank=rank)
        for one in (
            *_of_steps(joined),
            *_of_launches(joined, links),
            *_of_events(joined, links),
            *_of_peaks(joined, too_fast, of_peak_ratio),
            *_of_windows(joined, links),
        )
    ]


def _of_steps(joined: JoinedRank) -> Iterator[Finding]:
    """Check that there is a device, and steps."""
    if joined.host_only and joined.inputs.devices_listed:
        yield finding("trace.no_device_events")
    if joined.windows.numbers[0] == -1:
        yield finding("trace.no_steps")
    elif joined.windows.recorded.sum() == 1 and joined.inputs.span is None:
        yield finding("trace.single_step")


def _of_launches(joined: JoinedRank, links: Links) -> Iterator[Finding]:
    """Check the joins of device events to their launches."""
    if joined.double_backward_count:
        yield finding("trace.double_backward", count=joined.double_backward_count)
    if joined.host_only:
        return
    graphs = joined.of_graphs
    if graphs is not None and graphs.events_count > graphs.found_count:
        yield finding(
            "graph.without_capture",
            count=graphs.events_count - graphs.found_count,
            total=graphs.events_count,
            why="captures in the trace are of other kernels, or several could be meant"
            if graphs.captures_count
            else "the trace has no capture",
        )
    lost = joined.windows.lost_steps
    if lost:
        steps = links.steps
        of = np.isin(steps.number, lost)
        at = np.searchsorted(steps.start_ns, links.host.start_ns[links.lost_launches], "right") - 1
        yield finding(
            "steps.lost",
            count=int(pick(of, at, 0).sum()),
            steps=f"step {ranges(lost)}" if len(lost) == 1 else f"steps {ranges(lost)}",
        )
    for code, count, total in (
        ("event.without_launch", int((~links.has_launch).sum()), len(links.events)),
        ("launch.without_kernel", *_lost_kernels(links, joined.inputs.span, lost)),
    ):
        if count:
            share = count / total
            # A format without a host is said to be one.
            is_known = code == "event.without_launch" and not len(links.host)
            yield finding(
                code,
                "of_all" if is_known else None,
                count=count,
                severity="warning" if share > _LOST_RATIO and not is_known else None,
                withholds=share > _FEW_LAUNCHES_RATIO,
                whole=total,
                share=share,
            )


def _of_events(joined: JoinedRank, links: Links) -> Iterator[Finding]:
    """Check streams, and that shapes were recorded."""
    overlapping, longest_ns = _stream_overlaps(links)
    if overlapping:
        yield finding(
            "event.stream_overlap",
            count=overlapping,
            share=overlapping / len(links.events),
            longest_us=longest_ns / 1e3,
        )
    dims = joined.host_span["input_dims"]
    if len(dims) and dims.null_count == len(dims):
        remedy = "torch.profiler records them with record_shapes=True"
        if joined.inputs.recorded:
            remedy = "record without --no-shapes (chopper.profile: without shapes=False)"
        yield finding("trace.no_shapes", remedy=remedy)


def _of_peaks(joined: JoinedRank, too_fast: int, of_peak_ratio: float) -> Iterator[Finding]:
    """Check that peaks are known, and that nothing exceeds them."""
    ceiling = joined.ceiling
    if ceiling is None and not (joined.host_only and joined.inputs.devices_listed):
        yield finding("device.no_peak", remedy=joined.inputs.no_peak_remedy)
    if of_peak_ratio > MOST_OF_A_PEAK:
        yield finding(
            "compute.above_peak",
            "all_products",
            count=too_fast,
            ratio=of_peak_ratio,
            source=ceiling.source if ceiling else "unknown",
        )
    elif too_fast:
        yield finding("compute.above_peak", count=too_fast, withholds=False)


def _of_windows(joined: JoinedRank, links: Links) -> Iterator[Finding]:
    """Check that the windows cover the trace and have similar lengths."""
    windows = joined.windows
    before_ms, after_ms = windows.before_ns / 1e6, windows.after_ns / 1e6
    outside_ns = windows.before_ns + windows.after_ns
    share = outside_ns / max(outside_ns + int(np.diff(windows.bounds_ns).sum()), 1)
    settling_count = _settling_count(joined, links)
    if before_ms and settling_count:
        steps = "the step" if settling_count == 1 else f"the {settling_count} steps"
        yield finding(
            "trace.outside_steps",
            "settling",
            before_ms=before_ms,
            steps=steps,
            step=windows.numbers[0],
            late=f"; nor are {after_ms:.3f} ms after the last step" if after_ms else "",
        )
    elif before_ms or after_ms:
        yield finding("trace.outside_steps", share=share, before_ms=before_ms, after_ms=after_ms)
    if windows.empty_steps:
        yield finding("steps.empty", count=windows.empty_steps)
    holes_ns = np.flatnonzero(windows.numbers == UNRECORDED)
    recorded = [_is_recorded(links, *windows.bounds_ns[i : i + 2]) for i in holes_ns]
    if not all(recorded):
        yield finding("trace.several_windows", count=recorded.count(False) + 1)
    if any(recorded):
        time_ns = int(np.diff(windows.bounds_ns)[holes_ns[recorded]].sum())
        yield finding("trace.between_steps", count=recorded.count(True), time=duration(time_ns))
    numbered = windows.numbers > UNRECORDED
    jumps = (
        int((np.diff(windows.numbers) > 1)[numbered[1:] & numbered[:-1]].sum())
        - windows.empty_steps
    )
    if jumps > 0 and not links.steps.on_device:
        yield finding("steps.not_consecutive", count=jumps, times=plural(jumps, "time"))
    lengths_ns = np.diff(windows.bounds_ns)[windows.recorded]
    if len(lengths_ns) > 2:
        median_ms, longest_ms = float(np.median(lengths_ns)) / 1e6, float(lengths_ns.max()) / 1e6
        if longest_ms > 3 * median_ms > 0:
            yield finding("steps.uneven", median_ms=median_ms, longest_ms=longest_ms)


def _is_recorded(links: Links, start_ns: int, end_ns: int) -> bool:
    """Return whether a host span or device event overlaps the middle half of an interval."""
    middle = start_ns + (end_ns - start_ns) // 4, end_ns - (end_ns - start_ns) // 4
    return any(
        bool(((timed.start_ns < middle[1]) & (timed.end_ns > middle[0])).any())
        for timed in (links.host, links.events)
    )


def _settling_count(joined: JoinedRank, links: Links) -> int:
    """Count the steps that the trace covers, at least in part, and that do not count."""
    if not joined.step.num_rows:
        return 0
    uncounted = joined.step.filter(pc.invert(joined.step["traced"]))
    first_ns = int(links.events.start_ns.min(initial=1 << 62))
    begin_ns = int(joined.windows.bounds_ns[0])
    ends = ints(uncounted, "end_ns")
    return int(((ends > first_ns) & (ints(uncounted, "start_ns") < begin_ns)).sum())


def _lost_kernels(links: Links, span: Span | None, lost_steps: tuple[int, ...]) -> tuple[int, int]:
    """Count the launches without a kernel, and all between the first and the last that has one.

    Launches at the edges may have run outside of what was recorded. Those of lost steps do not
    count; of a stretch of a trace, those of its own steps do.
    """
    calls, has_kernel = kernel_launches(links.host, links.events)
    start = links.host.start_ns[calls]
    inside = np.ones(len(calls), dtype=bool)
    if span is not None:
        inside = (start >= span.own_ns[0]) & (start < span.own_ns[1])
    lost = np.isin(links.steps.number, lost_steps)
    inside &= ~pick(lost, np.searchsorted(links.steps.start_ns, start, side="right") - 1, 0)
    has_kernel = has_kernel[inside]
    ran = np.flatnonzero(has_kernel)
    if not len(ran):
        return 0, 0
    between = has_kernel[ran[0] : ran[-1] + 1]
    return int((~between).sum()), len(between)


def _stream_overlaps(links: Links) -> tuple[int, int]:
    """Count events that begin before an earlier one of their stream ends; longest overlap in ns."""
    events = links.events
    whole_us = not (events.start_ns % 1000).any() and not (events.dur_ns % 1000).any()
    slack = _WHOLE_US_SLACK_NS if whole_us else 0
    count = longest = 0
    for stream in np.unique(events.stream_key):
        rows = np.flatnonzero(events.stream_key == stream)
        overlap = np.maximum.accumulate(events.end_ns[rows])[:-1] - events.start_ns[rows][1:]
        count += int((overlap > slack).sum())
        longest = max(longest, int(overlap.max(initial=0)))
    return count, longest


_SHARE_SAID = 0.01
"""Less of the time is not worth a line."""


def check_factors(rank: int, links: Links, factors: Factors, split: ComputeSplit) -> list[Finding]:
    """Checks of one rank's factors."""
    scaled, total_ns = split.split_ns
    notes = [
        *_clocks(links, factors),
        *_unsplit(links, factors),
        *factors.findings,
        *_contention(links, factors),
    ]
    if total_ns and scaled > _SHARE_SAID * total_ns:
        notes.append(finding("compute.factors_exceed", count=split.scaled, scaled_ms=scaled / 1e6))
    return [msgspec.structs.replace(one, rank=rank) for one in notes]


def _contention(links: Links, factors: Factors) -> Iterator[Finding]:
    """Kernels that ran beside others, and nothing like them alone: the bound."""
    contention, dur_ns = factors.contention, links.events.dur_ns
    never = np.isnan(contention.baseline_ns) & (contention.overlapped_count > 0)
    # The events that were compared and ran beside something.
    contended = factors.signature >= 0
    contended[contended] = ~contention.alone
    rows = contended.copy()
    rows[contended] = never[factors.signature[contended]]
    unknown_ns = float(dur_ns[rows].sum())
    if unknown_ns > _SHARE_SAID * float(dur_ns[factors.signature >= 0].sum()):
        yield finding(
            "compute.contention_unknown",
            count=int(rows.sum()),
            withholds=unknown_ns > 0.5 * dur_ns[contended].sum(),
            share=unknown_ns / float(dur_ns.sum()),
            unknown_ms=unknown_ns / 1e6,
            bound_ms=contention.bound_ns[never].sum() / 1e6,
        )


def _unsplit(links: Links, factors: Factors) -> Iterator[Finding]:
    """Clocks that are averages, and what a clock may have cost kernels of unknown work."""
    averaged = factors.averaged
    if averaged is not None:
        yield finding(
            "telemetry.clock_averaged",
            count=averaged.kinds_count,
            low=fmt.hertz(averaged.low_hz),
            high=fmt.hertz(averaged.high_hz),
            exponent=f"{0.0 - round(averaged.slope, 2):.2f}",
        )
        return
    ratio = factors.clocks.clock_hz / factors.reference_hz
    unsure = (factors.signature < 0) & np.isnan(factors.slope) & (links.work_class == COMPUTE)
    rows = np.flatnonzero(unsure & ~np.isnan(ratio))
    time = links.events.dur_ns[rows].astype(np.float64)
    bound_ns = float((time * np.maximum(1 - ratio[rows], 0.0)).sum())
    if bound_ns > _SHARE_SAID * float(time.sum()):
        yield finding(
            "compute.clock_bound",
            count=len(rows),
            clock=fmt.hertz(float(np.average(factors.clocks.clock_hz[rows], weights=time))),
            ratio=fmt.ratio(float(np.average(ratio[rows], weights=time))),
            bound=fmt.duration(bound_ns),
            time=fmt.duration(float(time.sum())),
        )


def clock_coverage(links: Links, factors: Factors, is_own: np.ndarray) -> tuple[float, float]:
    """Time of own kernels whose clock is known, of what a clock would explain; 0 of 0 without."""
    if not factors.clocks.readers:
        return 0.0, 0.0
    wanted = is_own & (factors.signature >= 0) & ~np.isnan(factors.reference_hz)
    time = links.events.dur_ns
    return float(time[wanted & factors.clocks.known].sum()), float(time[wanted].sum())


def _clocks(links: Links, factors: Factors) -> Iterator[Finding]:
    """Clock samples that are missing, elsewhere in time, or too far apart."""
    clocks = factors.clocks
    wanted = (factors.signature >= 0) & ~np.isnan(factors.reference_hz)
    if not wanted.any():
        return
    if not clocks.readers and not (clocks.state[wanted] == NO_OVERLAP).any():
        yield finding("telemetry.clock_missing")
        return
    yield from _contradicted(clocks)
    time = links.events.dur_ns
    total_ns = float(time[wanted].sum())
    for state, code in (
        (NO_OVERLAP, "telemetry.clock_elsewhere"),
        (SPARSE, "telemetry.clock_sparse"),
    ):
        rows = wanted & (clocks.state == state)
        refused = float(time[rows].sum())
        if refused and refused > _SHARE_SAID * total_ns:
            most = refused > 0.5 * total_ns
            yield finding(
                code,
                count=int(rows.sum()),
                severity="warning" if most else None,
                withholds=most,
                share=refused / total_ns,
                reason=_sparse(factors),
            )


def _contradicted(clocks: EventClocks) -> Iterator[Finding]:
    """Reasons that power or temperature contradicts."""
    for series in clocks.readers.values():
        bits, limit_w = np.maximum(series.reasons, 0), clocks.held.power_limit_w
        capped = (bits & FALSE_CAP) != 0
        if capped.any() and limit_w is not None:
            power_w = float(np.nanmean(series.power_w[capped]))
            reason = f"a power cap at {fmt.ratio(power_w / limit_w)} of the limit"
            reason += f" ({power_w:.0f} of {limit_w:.0f} W)"
            yield finding("telemetry.reason_contradicted", count=int(capped.sum()), reason=reason)
        if hot := int(((bits & FALSE_HEAT) != 0).sum()):
            reason = "heat while chip and memory are below their limits"
            yield finding("telemetry.reason_contradicted", count=hot, reason=reason)


def _sparse(factors: Factors) -> str:
    """Say how far apart samples are, and how far they may be."""
    gaps = [float(np.median(series.gap_ns)) for series in factors.clocks.readers.values()]
    bounds = [series.bound_ns for series in factors.clocks.readers.values()]
    if not gaps:
        return "samples are too far apart"
    bound = min(bounds)
    limit = "can be bridged" if bound >= MAX_GAP_NS else "would resolve how the clock changes"
    return (
        f"samples are {max(gaps) / 1e6:.0f} ms apart (median); at most {bound / 1e6:.0f} ms {limit}"
    )
