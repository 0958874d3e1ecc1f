"""The trace of a replayed schedule: the tables of a rank with the times that a scenario gives them.

Device events take their new times. Host spans are moved with the program: between two moments of
it, what takes no time is left out and the rest is stretched to the new length; what runs on threads
of its own moves with the events that it became.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.causes.core_wait import COMPUTING, wait_of_steps
from chopper.analyzers.replay.program import OP_START, STEP
from chopper.analyzers.trace.columns import first_with, ints, nullable, row_set, strings
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.analyzers.replay.graph import RankNodes
    from chopper.analyzers.replay.scenario import Outcome


class _Warp:
    """Old times to new ones, linear between knots and of the same slope beyond them."""

    def __init__(self, old_ns: np.ndarray, new_ns: np.ndarray) -> None:
        order = np.argsort(old_ns, kind="stable")
        old, new = old_ns[order], np.maximum.accumulate(new_ns[order])
        # Of several knots at one time the last one counts from there on.
        last = np.ones(len(old), dtype=bool)
        last[:-1] = old[1:] > old[:-1]
        self.old, self.new = old[last], new[last]

    def __call__(self, time_ns: np.ndarray) -> np.ndarray:
        """New times, as integers."""
        if not len(self.old):
            return time_ns.copy()
        at = np.clip(np.searchsorted(self.old, time_ns, side="right") - 1, 0, len(self.old) - 1)
        following = np.minimum(at + 1, len(self.old) - 1)
        span = self.old[following] - self.old[at]
        inside = (time_ns >= self.old[0]) & (span > 0)
        # In integers: float64 would round times since 1970.
        gone = np.where(inside, time_ns - self.old[at], 0)
        length = self.new[following] - self.new[at]
        share = gone / np.maximum(span, 1)
        moved = self.new[at] + np.rint(share * length).astype(np.int64)
        beyond = np.where(time_ns < self.old[0], time_ns - self.old[0] + self.new[0], moved)
        after = time_ns > self.old[-1]
        return np.asarray(np.where(after, time_ns - self.old[-1] + self.new[-1], beyond))


def tables(outcome: Outcome, rank_index: int) -> dict[str, pa.Table]:
    """The trace tables of a rank as the scenario would have them recorded.

    Returns:
        ``host_span``, ``device_event`` (empty without a device), ``step``, ``collective`` and,
        where they were recorded, ``pipeline_action``, ``device_clock`` (of a clock that was not
        changed) and ``core_wait``, without the samples that it replaces.
    """
    node = outcome.scenario.ranks[rank_index]
    inputs = node.joined.inputs
    warp = _apart(_program_warp(outcome, rank_index), node)
    host, host_order = _host(outcome, rank_index, warp)
    step = _shifted(inputs.step, warp)
    if node.joined.host_only:
        events, event_order = TABLES["device_event"].empty(), np.zeros(0, np.int64)
    else:
        events, event_order = _events(outcome, rank_index)
    by_name = {
        "host_span": host,
        "device_event": events,
        "step": step,
        "collective": _collectives(inputs.collective, host_order, event_order),
    }
    if inputs.pipeline_action is not None and inputs.pipeline_action.num_rows:
        by_name["pipeline_action"] = _actions(inputs.pipeline_action, event_order)
    sampled = inputs.device_clock is not None and inputs.device_clock.num_rows > 0
    if sampled and not outcome.scenario.new_clock:
        ran = node.links.events
        moved = _Warp(
            np.concatenate([ran.start_ns, ran.end_ns]),
            _new(outcome, node, np.concatenate([node.start, node.end])),
        )
        sampled_ns = moved(ints(inputs.device_clock, "time_ns"))
        by_name["device_clock"] = _replaced(inputs.device_clock, time_ns=sampled_ns)
    waits = _core_waits(outcome, rank_index)
    if waits is not None:
        by_name["core_wait"] = waits
        by_name["python_sample"] = TABLES["python_sample"].empty()
    return by_name


def _apart(warp: _Warp, node: RankNodes) -> _Warp:
    """Keep the order of all that launches: a nanosecond at least between its begins and ends.

    Which operator launched an event is told by what lies inside what; where operators take no time
    any more, nothing would. Without a device, operators that take none would be none, and a step
    may end with one.
    """
    links = node.links
    host, steps = links.host, node.joined.inputs.step
    if not len(host):
        return warp
    rows = links.launch_row
    if node.joined.host_only:
        rows = rows[_run_by_program(node)]
    launching = host.nesting.containing(row_set(rows, len(host)))
    launching |= row_set(rows, len(host))
    apart = np.unique(
        np.concatenate([host.start_ns[launching], host.end_ns[launching], ints(steps, "start_ns")])
    )
    old = np.union1d(warp.old, apart)
    least = np.cumsum(np.isin(old, apart, assume_unique=True))
    return _Warp(old, np.maximum.accumulate(warp(old) - least) + least)


def _new(outcome: Outcome, node: RankNodes, moments: np.ndarray) -> np.ndarray:
    return np.asarray(outcome.time_ns[moments] + node.offset_ns)


def _program_warp(outcome: Outcome, rank_index: int) -> _Warp:
    node = outcome.scenario.ranks[rank_index]
    program = node.program
    old, new = program.time_ns, _new(outcome, node, node.moment)
    # A launch belongs to the step that had begun: where nothing lies between it and the next step
    # any more, that begins a nanosecond later.
    at_once = program.kind == STEP
    at_once[:1] = False
    at_once[1:] &= new[1:] == new[:-1]
    new = new + np.cumsum(at_once)
    parts = program.parts
    removed = outcome.scenario.removed_parts(rank_index)
    if not removed.any() or not len(old):
        return _Warp(old, new)
    # Inside intervals that lose something: what stays before a wait keeps its place behind the
    # interval's begin, what comes after it before the interval's end.
    changed = np.zeros(len(program), dtype=bool)
    changed[parts.owner[removed]] = True
    rows = np.flatnonzero(changed[parts.owner])
    owner = parts.owner[rows]
    observed_length = parts.end_ns[rows] - parts.start_ns[rows]
    length = np.where(removed[rows], 0, observed_length)
    first = np.ones(len(rows), dtype=bool)
    first[1:] = owner[1:] != owner[:-1]
    head = np.maximum.accumulate(np.where(first, np.arange(len(rows)), 0))
    total, all_ = np.cumsum(length), np.cumsum(observed_length)
    before = total - length - (total - length)[head]
    old_begin = np.append(old[:1], old[:-1])[owner]
    begin, end = np.append(new[:1], new[:-1])[owner], new[owner]
    waited = (
        parts.start_ns[rows] - old_begin > (all_ - observed_length) - (all_ - observed_length)[head]
    )
    remaining = np.bincount(owner, weights=length, minlength=len(program)).astype(np.int64)[owner]
    low = np.where(waited, end - (remaining - before), begin + before)
    high = low + length
    return _Warp(
        np.concatenate([old, parts.start_ns[rows], parts.end_ns[rows]]),
        np.concatenate([new, np.clip(low, begin, end), np.clip(high, begin, end)]),
    )


def _host(outcome: Outcome, rank_index: int, warp: _Warp) -> tuple[pa.Table, np.ndarray]:
    """Host spans with new times, and the old row of each."""
    node = outcome.scenario.ranks[rank_index]
    host = node.links.host
    if not len(host):
        return node.joined.inputs.host_span, np.zeros(0, np.int64)
    # The nesting's times: children lie inside their parents, as the program's moments do.
    start, end = host.start_ns, host.end_ns
    new_start, new_end = warp(start), warp(end)
    if node.joined.host_only:
        events = node.links.events
        threaded = np.flatnonzero(~np.isin(np.arange(len(events)), _run_by_program(node)))
        thread = host.nesting.thread
        rows = node.links.launch_row[threaded]
        for number in np.unique(thread[rows]):
            mine = threaded[thread[rows] == number]
            thread_warp = _Warp(
                np.concatenate([events.start_ns[mine], events.end_ns[mine]]),
                _new(outcome, node, np.concatenate([node.start[mine], node.end[mine]])),
            )
            spans = thread == number
            new_start[spans], new_end[spans] = thread_warp(start[spans]), thread_warp(end[spans])
    duration = np.maximum(new_end - new_start, 0)
    # Parents come before their children, also where nothing of them is left.
    order = np.lexsort((np.arange(len(host)), -duration, new_start))
    table = node.joined.inputs.host_span.take(pa.array(order))
    # What launched only events that do not happen launches nothing: its kernel is not lost.
    happens, launching = outcome.scenario.happens(rank_index), node.links.launch_row
    idle = row_set(launching[~happens], len(host)) & ~row_set(launching[happens], len(host))
    calls = ints(table, "correlation_id")
    table = _replaced(table, correlation_id=nullable(np.where(idle[order], -1, calls)))
    return _replaced(table, start_ns=new_start[order], dur_ns=duration[order]), order


def _run_by_program(node: RankNodes) -> np.ndarray:
    return np.asarray(node.program.row[node.program.kind == OP_START])


def _events(outcome: Outcome, rank_index: int) -> tuple[pa.Table, np.ndarray]:
    """Device events with new times, without those that do not happen, and the old row of each."""
    node = outcome.scenario.ranks[rank_index]
    start = _new(outcome, node, node.start)
    end = _new(outcome, node, node.end)
    links = node.links
    earlier = ~links.has_launch & (links.step < 0)
    if earlier.any() and links.has_launch.any():
        # What began before all that was launched in the trace was launched before it, and still is.
        first = int(start[links.has_launch].min())
        start = np.where(earlier, np.minimum(start, first - 1), start)
    duration = end - start
    happening = np.flatnonzero(outcome.scenario.happens(rank_index))
    order = happening[np.lexsort((happening, -duration[happening], start[happening]))]
    table = node.joined.inputs.device_event.take(pa.array(order))
    return _replaced(table, start_ns=start[order], dur_ns=duration[order]), order


def _replaced(table: pa.Table, **columns: np.ndarray | pa.Array) -> pa.Table:
    for name, values in columns.items():
        at = table.schema.get_field_index(name)
        table = table.set_column(at, table.schema.field(name), pa.array(values))
    return table


def _shifted(step: pa.Table, warp: _Warp) -> pa.Table:
    start, end = warp(ints(step, "start_ns")), warp(ints(step, "end_ns"))
    # What is launched at the very end of a step, or in one of no length, is still of it.
    return _replaced(step, start_ns=start, end_ns=np.maximum(end, start) + 1)


def _collectives(table: pa.Table, host_order: np.ndarray, event_order: np.ndarray) -> pa.Table:
    """Return the metadata of the remaining events and spans, with their new rows."""
    source, values = strings(table, "source")
    of_device = np.array([v == "device_event" for v in values] + [False])[source]
    row = ints(table, "row")
    new = np.full(len(row), -1, dtype=np.int64)
    for mine, order in ((~of_device, host_order), (of_device, event_order)):
        if mine.any() and len(order):
            new_row = np.full(int(max(order.max(), row[mine].max())) + 1, -1, dtype=np.int64)
            new_row[order] = np.arange(len(order))
            new[mine] = new_row[row[mine]]
    remaining = np.flatnonzero(new >= 0)
    return _replaced(table.take(pa.array(remaining)), row=new[remaining])


def _actions(table: pa.Table, event_order: np.ndarray) -> pa.Table:
    """Return the pipeline's actions of the remaining events, with their new rows."""
    new = first_with(event_order, ints(table, "event_row"))
    remaining = np.flatnonzero(new >= 0)
    return _replaced(table.take(pa.array(remaining)), event_row=new[remaining])


def _core_waits(outcome: Outcome, rank_index: int) -> pa.Table | None:
    """Return the CORE_WAIT of a rank without a device; None if it has none.

    The kernel counts for how long a thread of a step waited for a core, not when. A step that gets
    shorter is assumed to lose its sleep first; beyond that, waiting and running shrink alike.
    """
    node = outcome.scenario.ranks[rank_index]
    windows = node.joined.windows
    wait, sleep = wait_of_steps(node.joined.inputs.core_wait, windows.numbers)
    if not node.joined.host_only or not wait.any():
        return None
    before, after = np.diff(windows.bounds_ns), np.diff(outcome.windows(rank_index))
    removed, remaining = outcome.scenario.freed.get(rank_index, (np.zeros((2, 1)), None))
    awake = before - np.maximum(sleep, 0) - removed.sum(axis=0)
    scale = np.minimum(after / np.maximum(awake, 1), 1.0)
    computing = None
    if remaining is None:
        waiting = _scaled(wait, scale)
    else:
        computing, preparing = _scaled(remaining[0], scale), _scaled(remaining[1], scale)
        waiting = computing + preparing
    asleep = np.where(sleep < 0, -1, np.maximum(after - _scaled(awake, scale), 0))
    return _core_wait_table(windows.numbers, after, waiting, asleep, computing)


def _scaled(time_ns: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.asarray(np.rint(time_ns * scale).astype(np.int64))


def _core_wait_table(
    numbers: np.ndarray,
    length_ns: np.ndarray,
    wait_ns: np.ndarray,
    sleep_ns: np.ndarray,
    computing_ns: np.ndarray | None,
) -> pa.Table:
    """Return readings that give these waits and sleeps back, as CORE_WAIT."""
    computing = np.zeros_like(wait_ns) if computing_ns is None else computing_ns
    running = length_ns - wait_ns - np.maximum(sleep_ns, 0)
    each = np.stack([length_ns, wait_ns, running, computing])
    totals = np.cumsum(each, axis=1)
    # A reading before each step whose predecessor has none.
    first = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 2) != 1)
    step = np.insert(numbers, first, numbers[first] - 1)
    time, delay, ran, computed = np.insert(totals, first, (totals - each)[:, first], axis=1)
    declared = TABLES["core_wait"]
    known = (sleep_ns >= 0).all()
    values = {
        "time_ns": time,
        "span_ns": np.zeros_like(time),
        "tid": np.zeros_like(time),
        "step": nullable(step),
        "run_delay_ns": delay,
        "run_ns": ran if known else nullable(np.full(len(time), -1)),
    }
    table = pa.table({f.name: pa.array(values[f.name]).cast(f.type) for f in declared.arrow})
    if computing_ns is None:
        return table
    return table.append_column(COMPUTING, pa.array(computed))
