"""Waits for a core in a replayed schedule.

The kernel counts for how long a thread of a step waited for a core, not when. A step that gets
shorter is assumed to lose its sleep first; beyond that, waiting and running shrink alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.causes.core_wait import COMPUTING, wait_of_steps
from chopper.analyzers.trace.columns import nullable
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.analyzers.replay.graph import RankNodes
    from chopper.analyzers.replay.scenario import Outcome


def core_waits(outcome: Outcome, rank_index: int) -> pa.Table | None:
    """Return the CORE_WAIT of a rank without a device; None if it has none."""
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
    return _table(windows.numbers, after, waiting, asleep, computing)


def _scaled(time_ns: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.asarray(np.rint(time_ns * scale).astype(np.int64))


def without_core_wait(node: RankNodes, waited_ns: np.ndarray) -> np.ndarray:
    """Return the factor by which each host part's time changes without these waits of its window.

    All parts of a window lose the same share, because when the thread waited is unknown.
    """
    parts, bounds = node.program.parts, node.joined.windows.bounds_ns
    window = np.searchsorted(bounds, parts.start_ns, side="right") - 1
    window = np.where((window >= 0) & (window < len(waited_ns)), window, len(waited_ns))
    host_ns = np.bincount(window, parts.end_ns - parts.start_ns, len(waited_ns) + 1)
    share = np.append(waited_ns, 0) / np.maximum(host_ns, 1)
    return np.asarray(1 - np.minimum(share, 1.0)[window])


def _table(
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
