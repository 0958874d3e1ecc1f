"""The truth: where each nanosecond of the model's windows went, from its own books.

It follows the meaning of the causes and knows what no trace shows: what the program was doing, why
a task had to wait, how long a kernel would have taken alone, and which factor made it longer.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING

from tests.known_causes.model.engine import Task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.known_causes.model.records import RankRecord, Recording

_LANES = ("compute", "communication", "copy")
# NVML's clocks event reasons: software power cap 4, power brake 128; thermal 32, 64.
_CLOCK_CAUSES = {4: "power_cap", 128: "power_cap", 32: "thermal", 64: "thermal", 2: "application"}


def ledger(recording: Recording) -> dict[str, int]:
    """Cause → nanoseconds, summed over ranks; they sum to the windows exactly."""
    total: dict[str, float] = defaultdict(float)
    for record in recording.ranks:
        for cause, spent in _rank(recording, record).items():
            total[cause] += spent
    return {cause: round(spent) for cause, spent in total.items() if round(spent)}


def window(record: RankRecord) -> tuple[int, int]:
    """Begin and end of a rank's windows together.

    From the first traced step's start on the host, or the end of what was launched before it, to
    the end of the last task.
    """
    first = record.steps[0][1]
    before = [t.end_ns for t in record.tasks if t.launch_ns < first and t.end_ns > first]
    return max([first, *before]), max(t.end_ns for t in record.tasks)


def _rank(recording: Recording, record: RankRecord) -> dict[str, float]:
    begin, end = window(record)
    spent: dict[str, float] = defaultdict(float)
    share: dict[Task, float] = defaultdict(float)
    waited: dict[Task, float] = defaultdict(float)
    books = _Program(record)
    for low, high, active in _sweep(record.tasks, begin, end):
        lane = next((name for name in _LANES if any(t.lane == name for t in active)), None)
        if lane is None:
            books.idle(low, high, spent)
            continue
        mine = [t for t in active if t.lane == lane]
        for task in mine:
            part = (high - low) / len(mine)
            if task.collective is not None:
                ready = task.collective.ready_ns
                waits = max(min(high, ready) - low, 0) / len(mine)
                waited[task] += waits
                part -= waits
            share[task] += part
    for task, time_ns in share.items():
        _book(recording, record.rank, task, time_ns, begin, end, spent)
    for time_ns in waited.values():
        spent["communication.wait"] += time_ns
    return spent


def _sweep(tasks: list[Task], begin: int, end: int) -> Iterator[tuple[int, int, list[Task]]]:
    """Moments between which nothing starts or ends, with who runs."""
    marks: list[tuple[int, int, int]] = []
    for i, task in enumerate(tasks):
        low, high = max(task.start_ns, begin), min(task.end_ns, end)
        if high > low:
            marks += [(low, 1, i), (high, 0, i)]
    marks.sort()
    active: dict[int, Task] = {}
    at = begin
    for time_ns, starts, i in marks:
        if time_ns > at:
            yield at, time_ns, list(active.values())
            at = time_ns
        if starts:
            active[i] = tasks[i]
        else:
            del active[i]
    if end > at:
        yield at, end, list(active.values())


class _Program:
    """Activities of the program while the device had nothing to do."""

    def __init__(self, record: RankRecord) -> None:
        self._recording_ns = record.recording_ns
        self._segments = record.segments
        self._starts = [s for s, _, _ in record.segments]
        first: dict[int, Task] = {}
        for task in record.tasks:
            held = first.get(task.start_ns)
            if held is None or task.end_ns > held.end_ns:
                first[task.start_ns] = task
        self._first = first

    def idle(self, low: int, high: int, spent: dict[str, float]) -> None:
        task = self._first.get(high)
        if task is None:
            spent["idle.no_step"] += high - low
            return
        if task.launch_ns < self._recording_ns:
            spent["idle.unlaunched"] += high - low
            return
        called = min(max(task.launch_ns, low), high)
        returned = min(max(task.returned_ns, called), high)
        self._preparation(low, called, spent)
        spent["idle.call"] += returned - called
        kind = "dependency" if task.held == "event" else "launch_latency"
        spent[f"idle.{kind}"] += high - returned

    def _preparation(self, low: int, high: int, spent: dict[str, float]) -> None:
        at = low
        i = max(bisect_right(self._starts, low) - 1, 0)
        while at < high and i < len(self._segments):
            start, end, what = self._segments[i]
            i += 1
            if end <= at:
                continue
            if start >= high:
                break
            if start > at:
                spent["idle.preparation.python"] += start - at
                at = start
            until = min(end, high)
            # A call that launched another task than the one that the device waits for.
            activity = "runtime" if isinstance(what, Task) else what
            spent[f"idle.preparation.{activity}"] += until - at
            at = until
        spent["idle.preparation.python"] += high - at


def _book(
    recording: Recording,
    rank: int,
    task: Task,
    time_ns: float,
    begin: int,
    end: int,
    spent: dict[str, float],
) -> None:
    length = max(task.end_ns - task.start_ns, 1)
    if task.collective is not None:
        ready = max(task.collective.ready_ns, task.start_ns)
        transfer = max(task.end_ns - ready, 1)
        together = recording.machine.peaks.least_group_count(len(recording.ranks))
        if together is None or len(task.collective.members) < together:
            # These ranks have only some of their links between them: nobody knows their peak.
            spent["communication.transfer.no_peak"] += time_ns
            return
        at_peak = min(task.collective.bus_ns * min(time_ns / transfer, 1.0), time_ns)
        spent["communication.transfer.at_peak"] += at_peak
        spent["communication.transfer.below_peak"] += time_ns - at_peak
        return
    inside = (min(task.end_ns, end) - max(task.start_ns, begin)) / length
    if task.account in ("math", "vector"):
        _factors(recording, rank, task, time_ns, inside, spent)
    else:
        spent[task.account] += time_ns


def _factors(
    recording: Recording,
    rank: int,
    task: Task,
    time_ns: float,
    inside: float,
    spent: dict[str, float],
) -> None:
    """T = base · Π f: each factor's additive share of t - base by the logarithmic mean.

    The base is the ideal of model math, and the roofline of memory-bound work.
    """
    is_math = task.account == "math"
    whole_base = task.ideal_ns if is_math else task.roofline_ns
    base = min(whole_base * inside, time_ns)
    rest = "compute.efficiency.rest" if is_math else "compute.vector.excess"
    spent["compute.ideal" if is_math else "compute.vector.roofline"] += base
    gap = time_ns - base
    if gap <= 0:
        return
    factors = {
        "compute.roofline": task.roofline_ns / whole_base,
        "compute.contention": task.contention_ratio,
        "compute.efficiency.wave_quantization": task.wave_ratio,
        rest: task.alone_ns / (task.roofline_ns * task.wave_ratio),
    }
    lowered = _clock_cause(recording, rank, task)
    if lowered is not None:
        factors[lowered] = task.clock_ratio
    # The kernel's end is rounded up to a nanosecond: all factors alike take part in that.
    whole = sum(math.log(factor) for factor in factors.values())
    for cause, factor in factors.items():
        spent[cause] += gap * math.log(factor) / whole


def _clock_cause(recording: Recording, rank: int, task: Task) -> str | None:
    """The reason that lowered the clock for most of a task's time; None where nothing did."""
    held: dict[int, float] = defaultdict(float)
    changes = recording.clocks[rank]
    for i, (start, hz, reason) in enumerate(changes):
        until = changes[i + 1][0] if i + 1 < len(changes) else recording.end_ns
        low, high = max(start, task.start_ns), min(until, task.end_ns)
        if high > low and hz < recording.machine.reference_hz:
            held[reason] += high - low
    if not held:
        return None
    reason = max(held, key=held.__getitem__)
    return f"compute.clock.{_CLOCK_CAUSES.get(reason, 'unlabelled')}"
