"""Trace quality: what a reader must know before believing a number."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pyarrow.compute as pc

from chopper.analyzers.trace.columns import ints, pick
from chopper.analyzers.trace.join import Links, kernel_launches
from chopper.analyzers.trace.rank_join import JoinedRank
from chopper.analyzers.trace.windows import UNRECORDED
from chopper.claims import finding
from chopper.hardware.ceilings import MOST_OF_A_PEAK
from chopper.storage.manifest import Finding
from chopper.storage.store import Span
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
            yield finding(
                code,
                count=count,
                severity="warning" if share > _LOST_RATIO else None,
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
        message = (
            f"the products ran at {of_peak_ratio:.3g} times the peak "
            f"({ceiling.source if ceiling else 'unknown'}): the peak, data types, shapes or "
            "times are wrong, so the ideal time is unknown"
        )
        yield finding("compute.above_peak", count=too_fast, message=message)
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
        message = (
            f"{before_ms:.3f} ms of {steps} before step {windows.numbers[0]} are not attributed: "
            "the recorder traces them so that the ranks settle"
        )
        late = f"; nor are {after_ms:.3f} ms after the last step" if after_ms else ""
        yield finding("trace.outside_steps", message=message + late)
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
    if jumps > 0:
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
