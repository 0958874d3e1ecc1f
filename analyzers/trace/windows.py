"""Step windows: device time cut so that the windows tile it exactly.

Let c_s be the latest end of the events of steps ≤ s. Step s owns (c_{s-1}, c_s]; the first step
starts at its host start, or at the end of what ran before it. In steady state that is the step's
period, however far the host runs ahead. A step between others that ran nothing on the device ends
where it did on the host. Where a file tells when a step ended on the devices of all ranks, no
window of it ends before that.

Where step numbers jump and the host's steps leave a hole, the trace was not being taken in between:
that stretch, up to the host start of the step after it, is a window of no step (``UNRECORDED``). It
keeps the windows tiling while they are attributed, and is left out of what is attributed. So is a
step whose kernels were launched and not recorded (``LOST``): what the device did is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.columns import first_with, ints, pick, run_starts, strings
from chopper.analyzers.trace.tables import DeviceEvents
from chopper.storage.run import Span

UNRECORDED = -2
"""Number of a window in which the trace was not being taken."""
ELSEWHERE = -3
"""Number of a window that another stretch of the trace attributes."""
LOST = -4
"""Number of a window of steps whose kernels were lost."""
_HOLE_RATIO = 0.05
_LOST_RATIO = 0.5
"""From this share of its launches without kernel on, a step is lost."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one rank that its trace covers, on the host, ascending.

    ``number`` is as the program counts; ``on_device`` says that the times are of the devices, the
    same for all ranks.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    number: np.ndarray
    on_device: bool = False

    def __len__(self) -> int:
        return len(self.start_ns)

    def index_at(self, time_ns: np.ndarray) -> np.ndarray:
        """Return the index of the step at each time, -1 for none; 0 where there are no steps."""
        if not len(self):
            return np.zeros(len(time_ns), dtype=np.int64)
        step = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        inside = (step >= 0) & (time_ns < self.end_ns[np.maximum(step, 0)])
        return np.where(inside, step, -1)


def traced_steps(step: pa.Table) -> Steps:
    """Return the steps that the trace covers. STEP -> Steps."""
    traced = step.filter(step["traced"]) if step.num_rows else step
    start_ns, end_ns, number = (ints(traced, name) for name in ("start_ns", "end_ns", "number"))
    return Steps(start_ns, end_ns, number, on_device="span" in strings(traced, "source")[1])


def common_steps(ranks: Mapping[int, Steps], *, share_a_clock: bool) -> frozenset[int] | None:
    """Return the numbers of the steps that all ranks traced; None if they traced the same.

    Also if their numbers do not compare: on one clock, a step is at one time on all ranks.
    """
    traced = [steps for steps in ranks.values() if len(steps)]
    numbers = [frozenset(steps.number.tolist()) for steps in traced]
    if len({*numbers}) < 2:
        return None
    common = frozenset.intersection(*numbers)
    if not share_a_clock:
        return common
    rows = [np.isin(steps.number, [*(common or numbers[i])]) for i, steps in enumerate(traced)]
    begin_ns = max(steps.start_ns[of].min() for steps, of in zip(traced, rows, strict=True))
    end_ns = min(steps.end_ns[of].max() for steps, of in zip(traced, rows, strict=True))
    return common if bool(common) == bool(begin_ns < end_ns) else None


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of one rank.

    Attributes:
        bounds_ns: shape (windows + 1,), ascending; window i is [bounds[i], bounds[i + 1]).
        numbers: step number of each window, -1 for the single window of a trace without steps.
        after_ns: device time recorded after the last window, shown apart.
        before_ns: device time recorded before the first window.
        empty_steps: steps that ran nothing of their own and so have no window.
        lost_steps: numbers of the steps whose kernels were lost, and which have no window.
    """

    bounds_ns: np.ndarray
    numbers: np.ndarray
    after_ns: int
    before_ns: int
    empty_steps: int = 0
    lost_steps: tuple[int, ...] = ()
    steps: np.ndarray | None = None
    """Step of each window, an index; below zero where it is not attributed. None without steps."""

    def __len__(self) -> int:
        return max(len(self.bounds_ns) - 1, 0)

    @property
    def recorded(self) -> np.ndarray:
        """Return a mask of the windows that are attributed: of numbered steps, or of none."""
        return self.numbers > UNRECORDED

    def of_span(self, steps: Steps, span: Span) -> Windows:
        """Return the windows, those that are not of a stretch's own steps marked ``ELSEWHERE``."""
        if self.steps is None:
            return self
        begin, end = span.own_ns
        in_span = np.append((steps.start_ns >= begin) & (steps.start_ns < end), False)
        outside = (self.steps >= 0) & ~in_span[self.steps]
        return replace(
            self,
            numbers=np.where(outside, ELSEWHERE, self.numbers),
            steps=np.where(outside, ELSEWHERE, self.steps),
            before_ns=self.before_ns if span.is_first else 0,
            after_ns=self.after_ns if span.is_last else 0,
        )

    def of_steps(self, step: np.ndarray) -> np.ndarray:
        """Return, for each index of a step, that of its attributed window; -1 for none."""
        if self.steps is None:
            return np.where(step < 0, -1, 0 if len(self) else -1)
        return first_with(self.steps[self.recorded], step)


def holes(numbers: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """Return the indices of the steps before which the trace was not being taken.

    A program may count by more than one: between such steps it does little else.
    """
    apart = start_ns[1:] - end_ns[:-1] > _HOLE_RATIO * (end_ns - start_ns)[1:]
    return np.flatnonzero((np.diff(numbers) > 1) & apart) + 1


def step_of_events(
    events: DeviceEvents, steps: Steps, launch_ns: np.ndarray, has_launch: np.ndarray
) -> np.ndarray:
    """Return the index of the step that holds the launch of each event.

    Without a launch it is that of the event before on the stream. -1 is before the first step,
    ``len(steps)`` after the last.
    """
    if not len(steps):
        return np.zeros(len(events), dtype=np.int64)
    by_launch = np.searchsorted(steps.start_ns, launch_ns, side="right") - 1
    after = launch_ns >= steps.end_ns[-1]
    for i in holes(steps.number, steps.start_ns, steps.end_ns).tolist():
        # Launched when the trace was ending or beginning again, within no step.
        end_ns, start_ns = steps.end_ns[i - 1], steps.start_ns[i]
        after |= (launch_ns >= end_ns) & (launch_ns < start_ns)
    by_launch[after] = len(steps)
    if has_launch.all() or not has_launch.any():
        return by_launch
    return _filled_by_stream(events, by_launch, has_launch)


def _filled_by_stream(
    events: DeviceEvents, by_launch: np.ndarray, has_launch: np.ndarray
) -> np.ndarray:
    """Give events without a launch the step of the event before them on their stream."""
    # Before anything that was launched inside the trace, it was launched before that began.
    # Later, with no launch before it on its stream, only its own time can tell.
    early = ~has_launch & (events.start_ns < events.start_ns[has_launch].min())
    step = np.where(early, -1, by_launch)
    order = np.argsort(events.stream_key, kind="stable")
    row = np.arange(len(order))
    stream_start = np.maximum.accumulate(np.where(run_starts(events.stream_key[order]), row, 0))
    previous = np.maximum.accumulate(np.where(has_launch[order], row, -1))
    step[order] = step[order[np.where(previous >= stream_start, previous, row)]]
    return step


def lost_steps(steps: Steps, launch_ns: np.ndarray, has_kernel: np.ndarray) -> np.ndarray:
    """Return a mask of the steps at least half of whose launches have no kernel.

    If there is no other step with launches, of none.

    Args:
        steps: that the trace covers.
        launch_ns: starts of the calls that launch kernels.
        has_kernel: mask of those with a kernel in the trace.
    """
    step = np.searchsorted(steps.start_ns, launch_ns, side="right") - 1
    step[launch_ns >= pick(steps.end_ns, step)] = -1
    launches, lost = (
        np.bincount(step[rows] + 1, minlength=len(steps) + 1)[1:]
        for rows in (slice(None), ~has_kernel)
    )
    mask: np.ndarray = (launches > 0) & (lost >= _LOST_RATIO * launches)
    return mask & (mask < (launches > 0)).any()


def cut_windows(
    events: DeviceEvents,
    steps: Steps,
    step: np.ndarray,
    begin_ns: int | None = None,
    lost: np.ndarray | None = None,
    recorded_ns: tuple[int, int] | None = None,
) -> Windows:
    """Cut device time into windows by the step of each event, from :func:`step_of_events`.

    Args:
        events: of one rank; without any, steps are cut where they end on the host.
        steps: that its trace covers.
        step: of each event.
        begin_ns: when the device was done with what is not among the events; None at the beginning.
        lost: mask of the steps whose kernels were lost; None for none.
        recorded_ns: start of the first event of host or device, and end of the last; None for none.
    """
    if recorded_ns is None:
        return Windows(np.zeros(0, np.int64), np.zeros(0, np.int64), 0, 0)
    start, end = events.start_ns, events.end_ns
    one_window = Windows(np.array(recorded_ns), np.array([-1]), 0, 0)
    inside = (step >= 0) & (step < len(steps))
    if not len(steps) or (len(events) and not inside.any()):
        return one_window
    begin = int(steps.start_ns[0]) if begin_ns is None else begin_ns
    before = step < 0
    if before.any():
        begin = max(begin, int(end[before].max()))
    elif begin_ns is None and len(events):
        # A device event cannot precede the step that launched it, but clocks may disagree a little.
        begin = min(begin, int(start[inside].min()))
    lost = np.zeros(len(steps), dtype=bool) if lost is None else lost
    latest, works = _ends(events, steps, step, lost)
    after_hole = holes(steps.number, steps.start_ns, steps.end_ns)
    latest = np.insert(latest, after_hole, steps.start_ns[after_hole])
    works = np.insert(works, after_hole, False)
    numbers = np.insert(np.where(lost, LOST, steps.number), after_hole, UNRECORDED)
    step_row = np.insert(np.where(lost, LOST, np.arange(len(steps))), after_hole, UNRECORDED)
    bounds = np.maximum.accumulate(np.concatenate([[begin], latest]))
    # A step that ran nothing of its own, and ended on the host before the device was done with the
    # one before it, owns no time.
    lasting = np.diff(bounds) > 0
    empty_steps = int((~lasting & (step_row >= 0)).sum())
    # Nothing is recorded before the first step that holds work, nor after the last one.
    steps_with_work = np.flatnonzero(lasting & works)
    if not len(steps_with_work):
        return one_window
    first, last = steps_with_work[0], steps_with_work[-1] + 1
    empty_steps += int(
        (lasting & (step_row >= 0)).sum() - (lasting & (step_row >= 0))[first:last].sum()
    )
    bounds, numbers, lasting = bounds[first : last + 1], numbers[first:last], lasting[first:last]
    return Windows(
        np.concatenate([bounds[:1], bounds[1:][lasting]]),
        numbers[lasting],
        after_ns=max(int(end.max(initial=0)) - int(bounds[-1]), 0),
        before_ns=max(int(bounds[0]) - int(start[0]), 0) if len(events) else 0,
        empty_steps=empty_steps,
        lost_steps=tuple(steps.number[lost].tolist()),
        steps=step_row[first:last][lasting],
    )


def _ends(
    events: DeviceEvents, steps: Steps, step: np.ndarray, lost: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return when each step ended, and a mask of those that did work.

    That is on the host where nothing of it ran on the device. What the device did of a lost step
    lies before the next one: before its first event where the host was ahead, else before its start
    on the host.
    """
    inside = (step >= 0) & (step < len(steps))
    ends, begins = np.full(len(steps), -1, dtype=np.int64), np.append(steps.start_ns, 0)
    np.maximum.at(ends, step[inside], events.end_ns[inside])
    works = (ends >= 0) & ~lost if len(events) else np.ones(len(steps), dtype=bool)
    ends = np.where(ends >= 0, ends, steps.end_ns)
    if steps.on_device:
        ends = np.maximum(ends, steps.end_ns)
    for i in np.flatnonzero(lost[:-1]).tolist():
        follows = events.start_ns[step == i + 1]
        if begins[i + 1] <= ends[:i].max(initial=0) and len(follows):
            begins[i + 1] = follows[0]
        ends[i] = max(int(ends[i]), int(begins[i + 1]))
    return ends, works
