"""The program of one rank on its host: the moments that others wait for, and the work between.

With a device these are launches, steps and synchronizations, of all threads that launch, in the
order of time: a program hands over from one thread to another (main to autograd and back), and
where threads really run beside each other, they are taken to go on together. Without a device they
are the starts and ends of the operators, and the calls that issue collectives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.causes.idle import Parts, blocking_copies, host_parts
from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import row_set
from chopper.analyzers.trace.join import Links
from chopper.analyzers.trace.tables import DeviceEvents
from chopper.arrow import with_column
from chopper.causes import CODES

if TYPE_CHECKING:
    from collections.abc import Callable

    from chopper.analyzers.replay.waits import Recorded

STEP, SYNC_END, LAUNCH, SYNC_BEGIN, ISSUE, OP_START, OP_END = range(7)
"""Kinds of moments of a program."""
CALL = CODES["idle.call"]
SYNCHRONIZATION = CODES["idle.preparation.synchronization"]
_UNTOLD = -2
_WAKE_NS = 500_000
"""A host that goes on so soon after a collective has ended had waited for it,"""
_WAKE_PART = 4
"""or in such a part of the time in which it had done nothing until then."""
_QUEUED = 256
"""A launch waits for room in the queue only if so many are in it; CUDA's hold about 1000."""
_BLOCKED_NS = 50_000
"""A launch that took longer waited, where the queue was half as long as it ever was."""
_FULL_NS = 20_000
_FULL_RATIO = 0.9
"""Where it was nearly as long as ever, one that took longer than this waited, or than two short
ones."""


@dataclass(frozen=True)
class Program:
    """Moments of a program in order, and the intervals between them.

    Attributes:
        time_ns: of each moment, ascending, in the rank's clock.
        kind: STEP, LAUNCH …
        row: step, host row of the call, or device event (of an operator), by kind.
        inside: whether the interval that ends with each moment is an operator's own work.
        work_ns: what the host does itself in that interval; the rest of it, it waits.
        waits_for: device event whose end each moment waited for last, -1 for none.
        waits_for_all: mask of the moments that wait for all streams.
        parts: host work of the intervals (``owner``) by cause, waiting left out.
    """

    time_ns: np.ndarray
    kind: np.ndarray
    row: np.ndarray
    inside: np.ndarray
    work_ns: np.ndarray
    waits_for: np.ndarray
    waits_for_all: np.ndarray
    parts: Parts

    def __len__(self) -> int:
        return len(self.time_ns)


def program(links: Links, recorded: Recorded) -> Program:
    """The program of one rank; of a wait that was recorded it is known what for."""
    on_host = bool(links.events.of("host_op", "host_collective").any())
    main = links.main_thread
    time, kind, row, thread = _on_host(links, main) if on_host else _beside_device(links, main)
    inside = np.zeros(len(time), dtype=bool)
    if on_host and len(time):
        inside[1:] = (kind[1:] == OP_END) & (kind[:-1] == OP_START) & (row[1:] == row[:-1])
    span = np.diff(time, prepend=time[:1])
    begin = time - span
    # What is waited in an interval lies between these two moments.
    wait_begin, wait_end = time.copy(), time.copy()
    waits_for = np.full(len(time), -1, dtype=np.int64)
    waits_for_all = np.zeros(len(time), dtype=bool)
    if on_host:
        at, awaited, from_ns, to_ns = _collective_waits(links, main, kind, time, inside)
    else:
        at, awaited, from_ns, to_ns, whole = _synchronizations(links, recorded, kind, row)
        waits_for_all[at] = whole
    # Of several that end in one interval the last one decided.
    waits_for[at], wait_begin[at], wait_end[at] = awaited, from_ns, to_ns
    wait_begin = np.clip(wait_begin, begin, time)
    wait_end = np.clip(wait_end, wait_begin, time)
    work = (wait_begin - begin) + (time - wait_end)
    parts = _parts(links, thread, inside, begin, wait_begin, wait_end, time)
    return Program(time, kind, row, inside, work, waits_for, waits_for_all, parts)


def _beside_device(
    links: Links, main: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, launches and synchronizations: (time, kind, row, thread), in order."""
    host = links.host
    steps = _begins(links)
    launching = row_set(links.launch_row, len(host))
    launches = np.flatnonzero(launching)
    threads = np.flatnonzero(np.bincount(host.nesting.thread[launches]))
    syncs = _synchronizing(links)
    syncs = syncs[np.isin(host.nesting.thread[syncs], np.append(threads, main))]
    begins = syncs[~launching[syncs]]
    times = [steps, host.end_ns[syncs], host.start_ns[launches], host.start_ns[begins]]
    time = np.concatenate(times)
    kind = np.repeat([STEP, SYNC_END, LAUNCH, SYNC_BEGIN], [len(t) for t in times])
    row = np.concatenate([np.arange(len(steps)), syncs, launches, begins])
    if not len(host):
        return time, kind, row, np.full(len(time), -1, dtype=np.int64)
    thread = np.where(kind == STEP, main, host.nesting.thread[np.minimum(row, len(host) - 1)])
    order = np.lexsort((kind, time))
    return time[order], kind[order], row[order], thread[order]


def _begins(links: Links) -> np.ndarray:
    """Return the starts of the steps; without any, that of the trace."""
    timed = [table.start_ns[:1] for table in (links.host, links.events)]
    return links.steps.start_ns if len(links.steps) else np.sort(np.concatenate(timed))[:1]


def _synchronizing(links: Links) -> np.ndarray:
    """Rows of the calls that return when the device has done something, in time order."""
    host = links.host
    calls = host.of("runtime", "driver")
    waits = calls & host.named(names.is_synchronizing_call)
    waits[links.launch_row[blocking_copies(links)]] = True
    waits[blocked_launches(links)] = True
    return np.flatnonzero(waits & (host.dur_ns > 0))


def blocked_launches(links: Links) -> np.ndarray:
    """Return rows of the calls that launched once the device had taken others from its queue."""
    events, host = links.events, links.host
    rows = np.unique(links.launch_row[links.has_launch])
    begin, end = host.start_ns[rows], host.ends(rows)
    launched, ended = np.sort(links.launch_ns[links.has_launch]), np.sort(events.end_ns)
    done = np.searchsorted(ended, begin, side="right")
    queued = np.searchsorted(launched, begin) - done
    most = max(_QUEUED, queued.max(initial=0))
    short_ns = float(np.quantile(end - begin, 0.1)) if len(rows) else 0.0
    blocked = (queued >= most // 2) & (end - begin > _BLOCKED_NS)
    blocked |= (queued >= _FULL_RATIO * most) & (end - begin > min(2 * short_ns, _FULL_NS))
    return rows[blocked & (queued >= _QUEUED) & (np.searchsorted(ended, end, side="right") > done)]


def _synchronizations(
    links: Links, recorded: Recorded, kind: np.ndarray, row: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Moments that synchronize: (moment, event awaited, from, to, whether for all streams).

    A blocking copy waits for itself. A device is waited for as a whole. A stream, or an event, is
    what the trace says, else the one whose work, launched before, was last to end before the call
    returned; where the call did not wait, it is the last launch that had ended.
    """
    host, events = links.host, links.events
    at = np.flatnonzero(kind == SYNC_END)
    calls = row[at]
    begin, end = host.start_ns[calls], host.end_ns[calls]
    copy_of_call = np.full(len(host), -1, dtype=np.int64)
    copies = blocking_copies(links)
    copy_of_call[links.launch_row[copies]] = copies
    target = copy_of_call[calls]
    device_waits = host.named(lambda n: "DeviceSynchronize" in n or "CtxSynchronize" in n)[calls]
    by_end = np.argsort(events.end_ns, kind="stable")
    ends = events.end_ns[by_end]
    last = np.searchsorted(ends, end, side="right") - 1
    ended = np.where(last >= 0, by_end[np.maximum(last, 0)], -1)
    # Later work of the same moment, launched after the call began, is not what it waited for.
    waited = (ended >= 0) & (events.end_ns[ended] > begin) & (links.launch_ns[ended] <= begin)
    launched = np.flatnonzero(links.has_launch)
    launched = launched[np.argsort(links.launch_ns[launched], kind="stable")]
    position = np.searchsorted(links.launch_ns[launched], begin, side="right") - 1
    latest = np.where(position >= 0, launched[np.maximum(position, 0)], -1) if len(launched) else -1
    idle = (latest >= 0) & (events.end_ns[latest] <= begin)
    is_event = host.named(lambda n: "EventSynchronize" in n)[calls]
    awaited = np.where(waited, ended, np.where(idle & ~is_event, latest, -1))
    recorded_event = np.full(len(host), _UNTOLD)
    recorded_event[recorded.call] = recorded.awaited
    known = recorded_event[calls]
    if len(events):
        in_time = events.end_ns[np.maximum(known, 0)] <= end
        known = np.where((known < 0) | in_time, known, _UNTOLD)
    awaited = np.where(known == _UNTOLD, awaited, known)
    awaited = np.where(target >= 0, target, awaited)
    known = awaited >= 0
    until = end.copy()
    until[known] = np.maximum(events.end_ns[awaited[known]], begin[known])
    return at, awaited, np.where(known, begin, end), until, device_waits & (target < 0)


def _on_host(links: Links, main: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, operators and issuing calls: (time, kind, row, thread), in order."""
    events = links.events
    steps = _begins(links)
    of_program = np.isin(links.thread, [main, links.backward_thread])
    rows = np.flatnonzero(events.of("host_op") & of_program)
    issues = issuing_calls(links)
    bounds = np.stack([events.start_ns[rows], events.end_ns[rows]], axis=1).reshape(-1)
    time = np.concatenate([steps, links.host.start_ns[issues], bounds])
    kind = np.repeat([STEP, ISSUE, OP_START], [len(steps), len(issues), 2 * len(rows)])
    kind[len(steps) + len(issues) + 1 :: 2] = OP_END
    row = np.concatenate([np.arange(len(steps)), issues, np.repeat(rows, 2)])
    threads = links.host.nesting.thread[issues], np.repeat(links.thread[rows], 2)
    thread = np.concatenate([np.full(len(steps), main), *threads])
    # Operators of a thread follow each other, so the order given is that of the ties.
    order = np.argsort(time, kind="stable")
    return time[order], kind[order], row[order], thread[order]


def issuing_calls(links: Links) -> np.ndarray:
    """Rows of the host calls that issue collectives, outermost, in time order."""
    host = links.host
    calls = host.named(_issues)
    above = host.nesting.nearest(calls)[host.nesting.parent]
    return np.flatnonzero(calls & ((host.nesting.parent < 0) | (above < 0)))


def _collective_waits(
    links: Links, main: int, kind: np.ndarray, time: np.ndarray, inside: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Moments after which the host had waited for a collective: (moment, event, from, to).

    Without a device no trace says when it waits. It waited where a collective ended while it did
    nothing that was recorded, if it had run nothing since it issued that collective, or else went
    on soon after.
    """
    events = links.events
    rows = np.flatnonzero(events.of("host_collective"))
    if not len(rows) or not len(time):
        return rows[:0], rows[:0], rows[:0], rows[:0]
    rows = rows[np.argsort(events.end_ns[rows], kind="stable")]
    end = events.end_ns[rows]
    at = np.searchsorted(time, end, side="left")
    ok = (at > 0) & (at < len(time))
    at = np.minimum(at, len(time) - 1)
    times, computes = _segments(links, main, lambda name: not _is_region(name))
    segment = np.searchsorted(times, end, side="left") - 1
    began = np.where(segment >= 0, times[np.maximum(segment, 0)], time[0])
    after = np.where(segment + 1 < len(times), times[np.minimum(segment + 1, len(times) - 1)], end)
    soon = after - end <= np.maximum(_WAKE_NS, (end - began) // _WAKE_PART)
    soon |= _at_once(links, main, time[kind == OP_START], rows, end)
    ok &= ~inside[at] & soon & ~((segment >= 0) & computes[segment])
    return at[ok], rows[ok], began[ok], end[ok]


def _segments(
    links: Links, main: int, of_work: Callable[[str], bool]
) -> tuple[np.ndarray, np.ndarray]:
    """Starts of the program's segments, one innermost span each; mask of those in operators."""
    acts, host = links.host.activity, links.host
    mine = slice(acts.first[main], acts.first[main + 1])
    computing = np.append(host.of("cpu_op") & host.named(of_work), False)
    return acts.start_ns[mine], computing[acts.span[mine]]


def without_late_stamps(links: Links, ready_ns: np.ndarray) -> Links:
    """Return the links with each collective of a CPU backend done when the host went on from it.

    A thread of the backend stamps the end, once it has a core again: the host may be long awake.
    It was: where the last rank came (``ready_ns``, -1 for unknown) while the host did nothing, or
    had run no operator since, and it went on before the stamp.
    """
    events, main = links.events, links.main_thread
    rows = np.flatnonzero(events.of("host_collective") & (ready_ns >= 0))
    times, runs = _segments(links, main, lambda name: not _is_region(name) or _issues(name))
    pauses = np.flatnonzero(~runs[:-1] & (np.diff(times) >= _WAKE_NS))
    if not len(rows) or not len(pauses):
        return links
    begin, end = times[pauses], times[pauses + 1]
    ready = np.maximum(ready_ns[rows], events.start_ns[rows])
    at = np.searchsorted(end, ready, side="right")
    rows, ready, at = (column[at < len(end)] for column in (rows, ready, at))
    begin, end = begin[at], end[at]
    started = np.sort(events.start_ns[events.of("host_op") & (links.thread == main)])
    ran = np.searchsorted(started, begin) > np.searchsorted(started, ready)
    soon = end - ready <= np.maximum(_WAKE_NS, (ready - begin) // _WAKE_PART)
    late = ~ran & (soon | _at_once(links, main, started, rows, end)) & (end < events.end_ns[rows])
    dur_ns = events.dur_ns.copy()
    dur_ns[rows[late]] = (end - events.start_ns[rows])[late]
    stamped = with_column(events.table, "dur_ns", pa.array(dur_ns))
    return replace(links, events=DeviceEvents(stamped)) if late.any() else links


def _at_once(
    links: Links, main: int, started: np.ndarray, rows: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """Mask of the collectives (rows) from whose issue to ``end`` no operator was ``started``."""
    host = links.host
    issued = host.start_ns[host.named(_issues) & (host.nesting.thread == main)]
    last = np.searchsorted(issued, links.events.start_ns[rows], side="right") - 1
    since = np.searchsorted(started, issued[np.maximum(last, 0)] if len(issued) else 0)
    return np.asarray((last >= 0) & (since == np.searchsorted(started, end)))


def _issues(name: str) -> bool:
    return name.startswith(("c10d::", "_c10d_functional::"))


def _is_region(name: str) -> bool:
    return names.is_wrapper(name) or names.is_host_communication(name)


def _parts(links: Links, thread: np.ndarray, inside: np.ndarray, *bounds: np.ndarray) -> Parts:
    """Host work before and after each interval's waiting, by cause; calls that launch apart."""
    begin, wait_begin, wait_end, end = bounds
    before = np.flatnonzero((wait_begin > begin) & ~inside)
    after = np.flatnonzero((end > wait_end) & ~inside)
    owner = np.concatenate([before, after])
    start = np.concatenate([begin[before], wait_end[after]])
    stop = np.concatenate([wait_begin[before], end[after]])
    order = np.argsort(owner, kind="stable")
    owner, start, stop = owner[order], start[order], stop[order]
    known = np.where(thread[owner] < 0, links.main_thread, thread[owner])
    parts = host_parts(links, known, start, stop)
    cause = parts.cause
    launching = np.zeros(len(links.host) + 1, dtype=bool)
    if not links.events.of("host_op", "host_collective").any():
        launching[links.launch_row[links.has_launch]] = True
        # A blocking copy is a synchronization first.
        launching[_synchronizing(links)] = False
    cause[launching[parts.span]] = CALL
    return Parts(owner[parts.owner], parts.start_ns, parts.end_ns, cause, parts.span)
