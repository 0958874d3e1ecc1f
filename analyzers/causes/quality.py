"""Trace quality: what a reader must know before believing a number.

Each check is named by its code, which ``docs/checks.toml`` describes with the claims that it can
withhold.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import ints
from chopper.hardware.ceilings import MOST_OF_A_PEAK
from chopper.storage.manifest import Finding
from chopper.wording import plural

if TYPE_CHECKING:
    from collections.abc import Callable

    from chopper.analyzers.trace.join import Links
    from chopper.analyzers.trace.joined import JoinedRank
    from chopper.analyzers.trace.windows import Windows
    from chopper.storage.manifest import Severity

_FEW_LAUNCHES_RATIO = 0.2
"""From this share of events without launch on, gaps cannot be explained."""
_WHOLE_US_SLACK_NS = 1000
"""Times cut to whole microseconds may overlap by one."""


def check_rank(
    joined: JoinedRank, links: Links, too_fast: int = 0, of_peak_ratio: float = 0.0
) -> list[Finding]:
    """Check one rank's trace; ``too_fast`` and ``of_peak_ratio`` are as of `ComputeSplit`."""
    findings: list[Finding] = []
    add = partial(_add, findings, joined.inputs.rank)
    if not len(links.events):
        add("trace.no_events", "error", "nothing ran that could be attributed", "attribution")
        return findings
    _check_steps(add, joined)
    _check_launches(add, joined, links)
    _check_events(add, joined, links)
    _check_peaks(add, joined, too_fast, of_peak_ratio)
    _check_windows(add, joined, links)
    return findings


def _add(
    findings: list[Finding],
    rank: int,
    code: str,
    severity: Severity,
    message: str,
    *withholds: str,
    count: int | None = None,
) -> None:
    """Append a finding of a rank."""
    findings.append(
        Finding(
            code=code,
            severity=severity,
            message=message,
            rank=rank,
            count=count,
            withholds=withholds,
        )
    )


def _check_steps(add: Callable[..., None], joined: JoinedRank) -> None:
    """Check that there is a device, and steps."""
    windows = joined.windows
    if joined.host_only and joined.inputs.devices_listed:
        add(
            "trace.no_device_events",
            "warning",
            "the trace lists devices but has no device events: the host's operators are "
            "attributed instead, and no ideal is claimed",
            "compute.ideal",
        )
    if windows.numbers[0] < 0:
        add(
            "trace.no_steps",
            "info",
            "no steps in the trace: it is one window from the first event to the last, without "
            "confidence intervals",
            "confidence",
        )
    elif windows.recorded.sum() == 1:
        add(
            "trace.single_step",
            "info",
            "a single step: no confidence intervals",
            "confidence",
        )


def _check_launches(add: Callable[..., None], joined: JoinedRank, links: Links) -> None:
    """Check the joins of device events to their launches."""
    events = links.events
    double = joined.double_backward_count
    if double:
        add(
            "trace.double_backward",
            "info",
            f"{double} operators within backward record a graph of their own (create_graph=True): "
            "counted as backward, not as recomputation",
            count=double,
        )
    missing = int((~links.has_launch).sum()) if not joined.host_only else 0
    if missing:
        share = missing / len(events)
        add(
            "event.without_launch",
            "warning" if share > 0.01 else "info",
            f"{missing} of {len(events)} device events ({share:.1%}) have no launch in the trace: "
            "gaps before them have no cause",
            *(("idle.causes",) if share > _FEW_LAUNCHES_RATIO else ()),
            count=missing,
        )
    lost, launches = (0, 0) if joined.host_only else _lost_kernels(links)
    if lost:
        share = lost / launches
        add(
            "launch.without_kernel",
            "warning" if share > 0.01 else "info",
            f"{lost} of {launches} kernel launches ({share:.1%}) have no kernel in the trace, "
            "while others before and after them have: records were lost, and the time of those "
            "kernels counts as idle",
            *(("idle.causes",) if share > _FEW_LAUNCHES_RATIO else ()),
            count=lost,
        )


def _check_events(add: Callable[..., None], joined: JoinedRank, links: Links) -> None:
    """Check streams, and that shapes were recorded."""
    overlapping, longest = _stream_overlaps(links)
    if overlapping:
        add(
            "event.stream_overlap",
            "info",
            f"{overlapping} device events overlap another on their stream (by at most "
            f"{longest / 1000:.1f} µs): they share that time",
            count=overlapping,
        )
    dims = joined.host_span["input_dims"]
    if len(dims) and dims.null_count == len(dims):
        add(
            "trace.no_shapes",
            "warning",
            "no shapes were recorded, so FLOP and bytes are unknown: "
            + (
                "record without --no-shapes (chopper.profile: without shapes=False)"
                if joined.inputs.recorded
                else "torch.profiler records them with record_shapes=True"
            ),
            "compute.ideal",
        )


def _check_peaks(
    add: Callable[..., None], joined: JoinedRank, too_fast: int, of_peak_ratio: float
) -> None:
    """Check that peaks are known, and that nothing exceeds them."""
    ceiling = joined.ceiling
    if ceiling is None and not (joined.host_only and joined.inputs.devices_listed):
        add(
            "device.no_peak",
            "warning",
            f"the peak is not known, so no ideal time is: {joined.inputs.no_peak_remedy}",
            "compute.ideal",
        )
    if of_peak_ratio > MOST_OF_A_PEAK:
        add(
            "compute.above_peak",
            "warning",
            f"the products ran {of_peak_ratio:.3g} times as fast as the peak allows "
            f"({ceiling.source if ceiling else 'unknown'}): the peak, the data types, the shapes "
            "or the times are wrong, and how fast a step could be is not known",
            "compute.ideal",
            count=too_fast,
        )
    elif too_fast:
        add(
            "compute.above_peak",
            "warning",
            f"{too_fast} kernels ran faster than the peak allows: the peak, the data type or the "
            "FLOP count does not fit them; their ideal is capped at their time",
            count=too_fast,
        )


def _check_windows(add: Callable[..., None], joined: JoinedRank, links: Links) -> None:
    """Check that the windows hold what was traced, and are alike."""
    windows = joined.windows
    if windows.after_ns or windows.before_ns:
        add("trace.outside_steps", "info", _outside(windows, _settling_count(joined, links)))
    if windows.empty_steps:
        add(
            "steps.empty",
            "warning",
            "steps that ran nothing on the device that ended after the steps before them have no "
            f"window of their own: {windows.empty_steps}",
            count=windows.empty_steps,
        )
    stretches = int((~windows.recorded).sum())
    if stretches:
        add(
            "trace.several_windows",
            "info",
            f"the trace was taken in {stretches + 1} stretches: what ran between them was not "
            "recorded and is not attributed",
            count=stretches + 1,
        )
    numbers = windows.numbers[windows.recorded]
    jumps = int((np.diff(numbers) > 1).sum()) - windows.empty_steps - stretches
    if jumps > 0:
        add(
            "steps.not_consecutive",
            "warning",
            f"step numbers jump {plural(jumps, 'time')} without a hole in the trace: whatever ran "
            "between two numbered steps counts to the later one",
            count=jumps,
        )
    lengths = np.diff(windows.bounds_ns)[windows.recorded]
    if len(lengths) > 2 and np.median(lengths) > 0 and lengths.max() > 3 * np.median(lengths):
        add(
            "steps.uneven",
            "info",
            f"steps differ in length (median {np.median(lengths) / 1e6:.1f} ms, longest "
            f"{lengths.max() / 1e6:.1f} ms): look at --by step",
        )


def _settling_count(joined: JoinedRank, links: Links) -> int:
    """Count the steps that the trace covers, at least in part, and that do not count."""
    if not joined.step.num_rows:
        return 0
    uncounted = joined.step.filter(pc.invert(joined.step["traced"]))
    first_ns = int(links.events.start_ns.min())
    begin_ns = int(joined.windows.bounds_ns[0])
    ends = ints(uncounted, "end_ns")
    return int(((ends > first_ns) & (ints(uncounted, "start_ns") < begin_ns)).sum())


def _outside(windows: Windows, settling_count: int) -> str:
    """Say what was traced beside the steps that count."""
    before, after = windows.before_ns / 1e6, windows.after_ns / 1e6
    if not settling_count or not windows.before_ns:
        return (
            f"{before:.3f} ms of device time before the first step and {after:.3f} ms after the "
            "last are not attributed"
        )
    steps = "the step" if settling_count == 1 else f"the {settling_count} steps"
    settling = (
        f"{before:.3f} ms of {steps} before step {windows.numbers[0]} are not attributed: "
        "recording traces them so that the ranks settle"
    )
    late = f"; nor are {after:.3f} ms after the last step" if windows.after_ns else ""
    return settling + late


def _lost_kernels(links: Links) -> tuple[int, int]:
    """Count the launches without a kernel, and all between the first and the last that has one.

    Launches at the edges may have run outside of what was recorded, and what is captured into a
    graph runs when that is launched.
    """
    host = links.host
    correlation = ints(host.table, "correlation_id")
    calls = np.flatnonzero(host.named(names.is_kernel_launch) & (correlation > 0))
    begun, ended = (
        np.searchsorted(host.start_ns[host.named(name)], host.start_ns[calls], side="right")
        for name in (names.is_capture_begin, names.is_capture_end)
    )
    calls = calls[begun <= ended]
    has_kernel = np.isin(correlation[calls], ints(links.events.table, "correlation_id"))
    ran = np.flatnonzero(has_kernel)
    if len(ran) == len(calls) or not len(ran):
        return 0, 0
    between = slice(int(ran[0]), int(ran[-1]) + 1)
    # A call of the runtime and that of the driver within it share an id.
    ids, first = np.unique(correlation[calls[between]], return_index=True)
    return int((~has_kernel[between][first]).sum()), len(ids)


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
