"""Level 2 idle: why the device had nothing to do.

Each gap ends with an event k that a host call [l, r] launched. Before l the host was late: that is
preparation, split by what the launching thread was doing. Inside [l, r] it is the launch call.
After r the device had been told and waited on itself: for microseconds, or for something that was
not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from chopper.analyzers.causes.states import States
from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import pick, row_set, run_starts
from chopper.analyzers.trace.join import Links
from chopper.analyzers.trace.nesting import Activity, activity, cut
from chopper.analyzers.trace.phases import PHASES
from chopper.analyzers.trace.tables import HostSpans
from chopper.causes import CODES

_DEPENDENCY = CODES["idle.dependency"]
_LATENCY = CODES["idle.launch_latency"]
_CALL = CODES["idle.call"]
_UNLAUNCHED = CODES["idle.unlaunched"]
_NO_STEP = CODES["idle.no_step"]
_UNKNOWN = CODES["idle.device_unknown"]
_UNOBSERVED = CODES["idle.preparation.unobserved"]
_PYTHON = CODES["idle.preparation.python"]
_DISPATCH = CODES["idle.preparation.dispatch"]
_RUNTIME = CODES["idle.preparation.runtime"]
_PROFILER = CODES["idle.preparation.profiler"]
_DATA = CODES["idle.preparation.data"]
_SYNC = CODES["idle.preparation.synchronization"]
_ALLOCATOR = CODES["idle.preparation.allocator"]
_COLLECTIVE = CODES["idle.preparation.collective_wait"]
_GC = CODES["idle.preparation.gc"]
_COMPILE = CODES["idle.preparation.compile"]
_CALLS = ("runtime", "driver")
_LATENCY_LEAST_NS, _LATENCY_MOST_NS = 100_000, 1_000_000
"""Bounds of what a trace can teach of launch latency: 2 to 24 µs on GPUs of ten kinds."""
_LEAST_LAUNCHES = 8


@dataclass(frozen=True, slots=True)
class Gaps:
    """Idle time cut by cause, in time order; the parts of a gap tile it.

    Attributes:
        start_ns, end_ns: the parts.
        window: window of each part.
        cause: code of the leaf.
        event_row: device event that ended the gap, -1 for none.
        of_event: mask of the parts that its launch, or what held it up, explains.
        phase, layer, op: codes of that event's, where it explains the part; elsewhere of what the
            host was in.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    window: np.ndarray
    cause: np.ndarray
    event_row: np.ndarray
    of_event: np.ndarray
    phase: np.ndarray
    layer: np.ndarray
    op: np.ndarray


def split_idle(states: States, links: Links) -> Gaps:
    """Attribute every idle interval of one rank."""
    start, end, window = states.gap_start_ns, states.gap_end_ns, states.gap_window
    events = links.events
    # The event that ended the gap; of one that ends with its window, the next one.
    at = np.searchsorted(events.start_ns, end, side="left")
    event = np.where(at < len(events), at, -1)
    ended = pick(events.start_ns, event) == end
    launched = pick(links.has_launch, event, 0)
    called = np.where(launched, np.clip(pick(links.launch_ns, event), start, end), start)
    returned = np.clip(pick(links.returned_ns, event), called, end)
    returned = np.where(launched, returned, called)
    # Where the call returned within the gap, what the device had to wait for had ended before.
    in_order = (returned > start) | _previous_on_same_stream(links, event, start)
    depends = ~in_order & launched
    depends[depends] = _may_wait_for_stream(links, event[depends])
    cause = np.where(
        launched,
        np.where(depends, _DEPENDENCY, _LATENCY),
        np.where(event < 0, _NO_STEP, _UNLAUNCHED),
    )
    cause[launched & (end - returned > _latency_bound(start, end, returned, launched))] = _UNKNOWN
    lost_ns = _lost_from(links, event, end)
    lost = lost_ns < end
    called[lost] = returned[lost] = np.clip(lost_ns, start, end)[lost]
    cause[lost] = _UNKNOWN
    late = np.flatnonzero(called > start)
    preparation = _preparation(links, event[late], start[late], called[late])
    preparation, of_host = _joined(preparation, _of_host(links, preparation))
    # The parts: what the device waited for by itself, preparation, the call.
    waited, call = np.flatnonzero(returned < end), np.flatnonzero(returned > called)
    gap = np.concatenate([waited, late[preparation.owner], call])
    parts_start = np.concatenate([returned[waited], preparation.start_ns, called[call]])
    parts_end = np.concatenate([end[waited], preparation.end_ns, returned[call]])
    parts_cause = np.concatenate([cause[waited], preparation.cause, np.full(len(call), _CALL)])
    of_event = np.repeat([True, False, True], [len(waited), len(preparation.owner), len(call)])
    grouping = grouping_of(links, event[gap])
    for column, codes in zip(grouping, of_host, strict=True):
        column[~of_event] = codes
    event = np.where(ended, event, -1)
    order = np.lexsort((parts_end, parts_start))
    columns = (parts_start, parts_end, window[gap], parts_cause, event[gap], of_event, *grouping)
    return Gaps(*(column[order] for column in columns))


def _latency_bound(
    start: np.ndarray, end: np.ndarray, returned: np.ndarray, launched: np.ndarray
) -> int:
    """Return how long after a launch the device may take to begin, in ns, from the gaps of a trace.

    Ten times the median of launches into an idle device. What takes longer waited for something
    that was not recorded: the stream was blocked, or busy.
    """
    latency_ns = (end - returned)[launched & (returned > start) & (end > returned)]
    if len(latency_ns) < _LEAST_LAUNCHES:
        return _LATENCY_MOST_NS
    return int(np.clip(10 * np.median(latency_ns), _LATENCY_LEAST_NS, _LATENCY_MOST_NS))


def _lost_from(links: Links, event: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return when the state of the device became unknown before the end of each gap; end if never.

    That is when a call returned that launched a kernel without a record, after the launch of what
    ran before the gap and before that of what ended it.
    """
    rows = links.lost_launches
    if not len(rows):
        return end
    call_ns, ends_ns = links.host.start_ns[rows], links.host.ends(rows)
    known_ns = np.where(links.has_launch, links.launch_ns, np.iinfo(np.int64).min)
    before_ns = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(known_ns))
    at = np.where(event < 0, len(links.events), event)
    low = np.searchsorted(call_ns, before_ns[at], side="right")
    launch_ns = np.where(pick(links.has_launch, event, 0), pick(links.launch_ns, event), end)
    high = np.searchsorted(call_ns, launch_ns)
    ends_ns = np.append(ends_ns, 0)
    return np.where(high > low, np.minimum(ends_ns[low], end), end)


class Grouping(NamedTuple):
    """Phase, layer and operator, as codes; -1 for no layer and no operator."""

    phase: np.ndarray
    layer: np.ndarray
    op: np.ndarray


def grouping_of(links: Links, event: np.ndarray) -> Grouping:
    """Phase, layer and operator of device events; of row -1, no event, the phase is other."""
    phase = pick(links.phase, event, PHASES.index("other"))
    return Grouping(phase, pick(links.layers[0], event), pick(links.op_names[0], event))


def _joined(parts: Parts, grouping: Grouping) -> tuple[Parts, Grouping]:
    """Make neighbouring parts of one gap one, where cause, phase, layer and operator are equal."""
    if not len(parts.owner):
        return parts, grouping
    first = np.flatnonzero(run_starts(parts.owner, parts.cause, *grouping))
    last = np.append(first[1:], len(parts.owner)) - 1
    joined = Parts(*(column[first] for column in parts))
    return joined._replace(end_ns=parts.end_ns[last]), Grouping(*(c[first] for c in grouping))


def _of_host(links: Links, parts: Parts) -> Grouping:
    """Phase, layer and operator that the host was in during each part."""
    host, span = links.host, parts.span
    operators = host.of("cpu_op") & ~host.named(names.is_wrapper)
    operator = pick(host.nesting.topmost(operators), span)
    operator[np.isin(parts.cause, (_DATA, _COMPILE, _GC))] = -1
    phase = links.program.idle(span, operator, parts.start_ns)
    return Grouping(phase, pick(links.span_layer, span), host.names_of(operator)[0])


def _previous_on_same_stream(links: Links, event: np.ndarray, gap_start: np.ndarray) -> np.ndarray:
    """Mask of the gaps whose preceding event ran on the stream of the event after them."""
    events = links.events
    stream = events.stream_key
    order = np.argsort(events.end_ns, kind="stable")
    ends = events.end_ns[order]
    low = np.searchsorted(ends, gap_start, side="left")
    # Usually one event ends where the gap begins; look at all that do.
    count = np.searchsorted(ends, gap_start, side="right") - low
    gap = np.repeat(np.arange(len(event)), count)
    at = low[gap] + np.arange(len(gap)) - np.repeat(np.cumsum(count) - count, count)
    same = count == 0
    same[gap[stream[order[at]] == stream[event[gap]]]] = True
    return same


def _may_wait_for_stream(links: Links, event: np.ndarray) -> np.ndarray:
    """Mask of the launched events that may have waited for another stream than their own.

    A stream waits for another one after a call for an event (cudaStreamWaitEvent), or inside a
    graph. Where a trace has such calls, but none between the launch of what ran before on the
    stream and this launch, there was nothing to wait for.
    """
    host, events = links.host, links.events
    waits = host.of("runtime", "driver") & host.named(names.is_event_wait)
    if not waits.any() or not len(event):
        return np.ones(len(event), dtype=bool)
    order = np.argsort(events.stream_key, kind="stable")
    again = np.flatnonzero(~run_starts(events.stream_key[order]))
    previous = np.full(len(events), -1, dtype=np.int64)
    previous[order[again]] = order[again - 1]
    before = previous[event]
    known = (before >= 0) & links.has_launch[before]
    known &= links.launch_row[before] != links.launch_row[event]
    wait_ns = host.start_ns[waits]
    low = np.searchsorted(wait_ns, links.launch_ns[before])
    high = np.searchsorted(wait_ns, links.launch_ns[event])
    return ~known | (high > low)


class Parts(NamedTuple):
    """Intervals of host time cut by cause; the parts of an interval tile it, in time order.

    Attributes:
        owner: index of the interval.
        start_ns, end_ns: the part.
        cause: code of the leaf.
        span: innermost host span, -1 where none is open.
    """

    owner: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    cause: np.ndarray
    span: np.ndarray


def _preparation(links: Links, event: np.ndarray, start: np.ndarray, end: np.ndarray) -> Parts:
    """Split [start, end] of each late launch by what the host was doing."""
    thread = pick(links.thread, event)
    on_communication = pick(links.events.of("host_collective"), event, 0)
    thread = np.where((thread < 0) | on_communication, links.main_thread, thread)
    return host_parts(links, thread, start, end)


def host_parts(links: Links, thread: np.ndarray, start: np.ndarray, end: np.ndarray) -> Parts:
    """Split intervals of host time by what the host was doing.

    The thread of the interval speaks first. Where it was idle, or in plain Python (as the main
    thread is while backward runs), the other of the main and the autograd thread is asked.
    """
    host = links.host
    span_cause = _span_causes(host, on_host=bool(links.events.of("host_op").any()))
    span_cause[links.launch_row[blocking_copies(links)]] = _SYNC
    main, engine = links.main_thread, links.backward_thread
    acts = activity(host.nesting)
    owner, part_start, part_end, span = cut(acts, thread, start, end)
    cause = pick(span_cause, span, _UNOBSERVED)
    parts = _solid(Parts(owner, part_start, part_end, cause, span))
    rows = np.flatnonzero((parts.cause == _UNOBSERVED) | (parts.cause == _PYTHON))
    other = np.where(thread[parts.owner[rows]] == main, engine, main)
    rows, other = rows[other >= 0], other[other >= 0]

    def of_other(of: np.ndarray, span: np.ndarray) -> np.ndarray:
        # Python on the other thread says no more than what the launching thread said, unless
        # that said nothing.
        answer = np.where(span >= 0, span_cause[span], _UNOBSERVED)
        silent = parts.cause[of] == _UNOBSERVED
        return (answer != _UNOBSERVED) & ((answer != _PYTHON) | silent)

    parts = _refined(parts, rows, acts, other, span_cause, of_other)
    # The thread's own work that stands beside recorded overhead is of that overhead. CUPTI does not
    # tell the thread: PyTorch writes all of its overhead under process -1. Requests for a buffer
    # and loading of code happen inside the call that needs them; flushing is left out, which may
    # have a thread of its own.
    overhead = host.of("overhead") & ~host.named(names.is_flush)
    for number in np.flatnonzero(host.nesting.thread_keys[:, 0] < 0) if overhead.any() else ():
        rows = np.flatnonzero(np.isin(parts.cause, (_UNOBSERVED, _PYTHON, _DISPATCH, _RUNTIME)))
        new_owner = np.full(len(rows), number)
        parts = _refined(
            parts, rows, acts, new_owner, span_cause, lambda _, span: (span >= 0) & overhead[span]
        )
    return parts


def _refined(
    parts: Parts,
    rows: np.ndarray,
    acts: Activity,
    thread: np.ndarray,
    span_cause: np.ndarray,
    counts: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> Parts:
    """Cut some parts along another thread, and give the pieces to its spans where these count.

    Args:
        counts: mask, from the part that each piece is of and the other thread's span in it.
    """
    if not len(rows):
        return parts
    sub, start, end, span = cut(acts, thread, parts.start_ns[rows], parts.end_ns[rows])
    of = rows[sub]
    has_pieces = counts(of, span)
    pieces = Parts(
        parts.owner[of],
        start,
        end,
        np.where(has_pieces, span_cause[span], parts.cause[of]),
        np.where(has_pieces, span, parts.span[of]),
    )
    rest = np.ones(len(parts.owner), dtype=bool)
    rest[rows] = False
    columns = [np.concatenate([old[rest], new]) for old, new in zip(parts, pieces, strict=True)]
    order = np.lexsort((columns[1], columns[0]))
    return Parts(*(column[order] for column in columns))


def _solid(parts: Parts) -> Parts:
    """The parts that last."""
    solid = parts.end_ns > parts.start_ns
    return parts if solid.all() else Parts(*(column[solid] for column in parts))


def blocking_copies(links: Links) -> np.ndarray:
    """Return the copies whose call waited until they were done, as indices of device events.

    The call returned no earlier, and it is one that waits, or the copy one for which every call
    does: an asynchronous call from pinned memory that took longer than its copy was only slow.
    """
    host, events = links.host, links.events
    copies = np.flatnonzero(events.of("memcpy") & links.has_launch)
    rows = links.launch_row[copies]
    waits: np.ndarray = host.named(names.is_synchronizing_call)[rows]
    waits |= events.named(names.is_waiting_copy)[copies]
    returned_later = host.ends(rows) >= events.end_ns[copies]
    return np.asarray(copies[waits & returned_later & host.of("runtime", "driver")[rows]])


def _span_causes(host: HostSpans, *, on_host: bool = False) -> np.ndarray:
    """Return the cause of the time inside each span, outside its children.

    Without a device (``on_host``) memory comes from the host's allocator, which is called inside
    ``aten::empty`` and its kin and records nothing of its own.
    """
    # The innermost region decides what everything inside it is spent on.
    region = host.nesting.inherited(host.classified(_region_cause))
    span_cause = host.classified(partial(_own_cause, on_host=on_host))
    if host.named(names.is_numbered_node).any():
        span_cause[host.of("cpu_op") & host.named(names.is_python_function)] = _PYTHON
    decides = host.where(
        lambda category, name: (
            category == "overhead"
            or (category in _CALLS and _own_cause(category, name, on_host=False) == _ALLOCATOR)
        )
    )
    return np.where((region >= 0) & ~decides, region, span_cause)


def _own_cause(category: str, name: str, *, on_host: bool) -> int:
    """Cause that a span's own category and name tell."""
    if category in _CALLS:
        if names.is_synchronizing_call(name):
            return _SYNC
        return _ALLOCATOR if names.is_allocator_call(name) else _RUNTIME
    if category == "overhead":
        return _RUNTIME if names.is_driver_overhead(name) else _PROFILER
    if names.is_backend_span(name):
        return _DISPATCH
    if category != "cpu_op" or name.startswith("chopper::"):
        return _PYTHON
    return _ALLOCATOR if on_host and names.is_host_allocation(name) else _DISPATCH


def _region_cause(category: str, name: str) -> int:
    """Cause that a span gives to everything inside it, -1 for none."""
    if category == "gc" or names.is_garbage_collection(name):
        return _GC
    if names.is_compilation(name):
        return _COMPILE
    frame = category == "python" and "torch/distributed" not in name
    if names.is_collective_span(name) or (
        names.is_barrier(name) and category not in _CALLS and not frame
    ):
        return _COLLECTIVE
    if names.is_synchronizing_operator(name):
        return _SYNC
    return _DATA if names.is_data_loading(name) else -1


@dataclass(frozen=True)
class Waiting:
    """Waiting calls of one rank.

    Attributes:
        rows: of `host_span`.
        operator: outermost operator around each.
        to_device: mask of the calls in an operator that copies to the device.
    """

    rows: np.ndarray
    operator: np.ndarray
    to_device: np.ndarray


def waiting_calls(links: Links, inside: np.ndarray) -> Waiting:
    """Return the calls of a rank's operators that waited for the device.

    Args:
        links: the rank's joined events.
        inside: mask of the host spans that are looked at.
    """
    host, nesting = links.host, links.host.nesting
    waiting = host.of("runtime", "driver") & host.named(names.is_synchronizing_call)
    waiting[links.launch_row[blocking_copies(links)]] = True
    operator = nesting.topmost(host.where(lambda c, n: c == "cpu_op" and n.startswith("aten::")))
    rows = np.flatnonzero(waiting & (operator >= 0) & inside)
    copies = links.events.named(names.is_copy_to_device) & links.has_launch
    copying = row_set(operator[links.launch_row[copies]], len(host))
    return Waiting(rows, operator[rows], copying[operator[rows]])
