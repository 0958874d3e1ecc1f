"""Waits for a core in a replayed schedule: what a thread still does keeps its share of them.

The kernel counts for how long a thread of a step waited for a core, not when, so the attribution
takes it evenly out of what the thread did. Where the thread does less, it waits so much less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.causes.core_wait import COMPUTING, awake, wait_of_steps
from chopper.analyzers.replay.program import OP_START, STEP
from chopper.analyzers.trace.columns import ints, nullable
from chopper.causes import CODES
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.analyzers.replay.graph import RankNodes
    from chopper.analyzers.replay.scenario import Outcome

_ASLEEP = [CODES[f"idle.preparation.{c}"] for c in ("data", "collective_wait")]
"""Work of the host that may be sleep."""


def core_waits(outcome: Outcome, place: int) -> pa.Table | None:
    """The CORE_WAIT of a rank without a device; None where nothing is known of it."""
    node = outcome.scenario.ranks[place]
    given, windows = node.joined.inputs, node.joined.windows
    wait, sleep = wait_of_steps(given.core_wait, windows.numbers)
    if not node.joined.host_only or not wait.any():
        return None
    before, after = _work(outcome, place)
    length = np.diff(windows.bounds_ns), np.diff(outcome.windows(place))
    freed = outcome.scenario.freed.get(place)
    # Waiting that a change takes away is gone; the rest goes with the work that it lengthened.
    if freed is None:
        computing = None
        left = _kept(wait, before.sum(axis=0), after.sum(axis=0))
    else:
        gone_ns, stays_ns = freed
        computing, preparing = _kept(stays_ns, before - gone_ns, after)
        left = computing + preparing
    # What is gone of a step and was no work was sleep.
    gone = length[0] - length[1] - np.rint((before - after).sum(axis=0)).astype(np.int64)
    slept = np.where(sleep < 0, -1, np.clip(sleep - gone, 0, np.maximum(length[1] - left, 0)))
    return _table(windows.numbers, length[1], left, slept, computing)


def _kept(wait_ns: np.ndarray, before_ns: np.ndarray, after_ns: np.ndarray) -> np.ndarray:
    kept = np.minimum(after_ns / np.maximum(before_ns, 1), 1.0)
    return np.asarray(np.rint(wait_ns * kept).astype(np.int64))


def without_core_wait(node: RankNodes, waited_ns: np.ndarray) -> np.ndarray:
    """Return the factor by which each host part's time changes without these waits of its window.

    Where in a window the thread waited is not known: what was no sleep shares it alike, as it does
    in the attribution.
    """
    parts = node.program.parts
    window, held = _window_of_moments(node)[parts.owner], _held(node)
    count = len(node.joined.windows) + 1
    share = np.append(waited_ns, 0) / np.maximum(np.bincount(window, held, count), 1)
    return 1 - np.minimum(share, 1.0)[window] * held / np.maximum(parts.end_ns - parts.start_ns, 1)


def _held(node: RankNodes) -> np.ndarray:
    """Return the nanoseconds of each host part in which its thread ran, or waited for a core.

    Loading data is no sleep where the thread did it itself.
    """
    parts, windows = node.program.parts, node.joined.windows
    moments = _window_of_moments(node)
    window, length = moments[parts.owner], parts.end_ns - parts.start_ns
    _, sleep = wait_of_steps(node.joined.inputs.core_wait, windows.numbers)
    ran = np.flatnonzero(node.program.kind == OP_START)
    run_ns = node.links.events.dur_ns[node.program.row[ran]]
    count = len(windows) + 1
    spent = np.bincount(window, length, count) + np.bincount(moments[ran], run_ns, count)
    elsewhere = np.maximum(np.append(np.diff(windows.bounds_ns), 0) - spent, 0)
    may_sleep = np.isin(parts.cause, _ASLEEP)
    return awake(window, length, may_sleep, elsewhere, np.append(sleep, -1))


def _window_of_moments(node: RankNodes) -> np.ndarray:
    """Window of each moment of a program, by the step that had begun; beyond the last for none."""
    program, windows = node.program, node.joined.windows
    step = node.joined.inputs.step
    steps = ints(step.filter(step["traced"]), "number")
    if not len(steps):
        return np.zeros(len(program), dtype=np.int64)
    began = np.cumsum(program.kind == STEP) - 1
    number = np.where(began >= 0, steps[np.minimum(np.maximum(began, 0), len(steps) - 1)], -1)
    order = np.argsort(windows.numbers, kind="stable")
    at = np.searchsorted(windows.numbers[order], number)
    at = order[np.minimum(at, len(order) - 1)]
    return np.where(windows.numbers[at] == number, at, len(windows))


def _work(outcome: Outcome, place: int) -> tuple[np.ndarray, np.ndarray]:
    """Work of the steps' thread, ns, observed and replayed: (computing and preparing, windows)."""
    scenario = outcome.scenario
    node = scenario.ranks[place]
    program, windows = node.program, node.joined.windows
    window = _window_of_moments(node)
    parts = program.parts
    held = _held(node)
    ran = np.flatnonzero(program.kind == OP_START)
    event = program.row[ran]
    run = node.links.events.dur_ns[event], scenario.durations(place)[event]
    part = scenario.part_ns(place) * (held / np.maximum(parts.end_ns - parts.start_ns, 1))

    def total(of_parts: np.ndarray, of_events: np.ndarray) -> np.ndarray:
        count = len(windows)
        computing = np.bincount(window[ran], of_events, count + 1)[:count]
        return np.stack([computing, np.bincount(window[parts.owner], of_parts, count + 1)[:count]])

    return total(held, run[0]), total(part, run[1])


def _table(
    numbers: np.ndarray,
    length_ns: np.ndarray,
    wait_ns: np.ndarray,
    sleep_ns: np.ndarray,
    computing_ns: np.ndarray | None,
) -> pa.Table:
    """Readings that give these waits and sleeps back; steps with gaps between them stand apart."""
    told = np.zeros_like(wait_ns) if computing_ns is None else computing_ns
    running = length_ns - wait_ns - np.maximum(sleep_ns, 0)
    each = np.stack([length_ns, wait_ns, running, told])
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
    found = pa.table({f.name: pa.array(values[f.name]).cast(f.type) for f in declared.arrow})
    if computing_ns is None:
        return found
    return found.append_column(COMPUTING, pa.array(computed))
