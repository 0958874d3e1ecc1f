"""CPU contention: time in which the step's thread was runnable but had no core.

On a run without a device, what a rank computes and what its host prepares is one thread's work. The
kernel counts how long that thread could run and had no core. Samples of the count tell when;
without them a step's wait is taken evenly out of all that the thread did in the step, that no peak
explains, and in which it did not sleep.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.columns import first_with, ints, pick
from chopper.arrow import with_column

COMPUTING = "computing_delay_ns"
"""Column of a replay's CORE_WAIT beside those that are declared: of the run delay, what lengthened
computing."""


def wait_of_steps(core_wait: pa.Table | None, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Wait and sleep of each step. CORE_WAIT -> nanoseconds, nanoseconds.

    For how long the thread could run and had no core, 0 where it is not known; for how long it
    asked for none, -1 where it is not known. A step's wait is known where the readings at its end
    and at the end of the step before are of one thread. Where a number occurs twice, the steps were
    counted anew: the last one counts.
    """
    if core_wait is None or core_wait.num_rows < 2:
        return np.zeros(len(numbers), dtype=np.int64), np.full(len(numbers), -1)
    step, tid, total, at = (ints(core_wait, c) for c in ("step", "tid", "run_delay_ns", "time_ns"))
    grown = np.diff(total)
    follows = (step[1:] >= 0) & ((step[1:] == step[:-1] + 1) | ((step[1:] == 0) & (step[:-1] < 0)))
    known = follows & (tid[1:] == tid[:-1]) & (grown >= 0)
    asleep = np.full(len(grown), -1, dtype=np.int64)
    if "run_ns" in core_wait.column_names and not core_wait["run_ns"].null_count:
        ran = np.diff(ints(core_wait, "run_ns"))
        asleep = np.where(ran >= 0, np.maximum(np.diff(at) - ran - grown, 0), -1)
    rows = np.flatnonzero(known)[::-1]
    row = pick(rows, first_with(step[1:][rows], numbers))
    return pick(grown, row, 0), pick(asleep, row)


def computing_of_steps(core_wait: pa.Table | None, numbers: np.ndarray) -> np.ndarray | None:
    """Return the part of each step's wait that lengthened computing. CORE_WAIT -> nanoseconds.

    Only a replay knows: None for what was recorded.
    """
    if core_wait is None or COMPUTING not in core_wait.column_names:
        return None
    return wait_of_steps(with_column(core_wait, "run_delay_ns", core_wait[COMPUTING]), numbers)[0]


def waits_within(samples: pa.Table | None, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """Return how long the sampled thread waited for a core within each interval, in ns.

    PYTHON_SAMPLE -> nanoseconds, at most those of the interval; -1 where no samples surround it.
    The kernel adds a wait to its count when the wait is over, so it is dated back from there.
    """
    known = np.full(len(start_ns), -1, dtype=np.int64)
    if samples is None or samples["run_delay_ns"].null_count == samples.num_rows:
        return known
    samples = samples.filter(samples["run_delay_ns"].is_valid())
    at, delay = ints(samples, "time_ns"), ints(samples, "run_delay_ns")
    waited = at + np.maximum.accumulate((delay - at)[::-1])[::-1]
    inside = (start_ns >= at[0]) & (end_ns <= at[-1])
    until, before = (np.interp(t[inside] - at[0], at - at[0], waited) for t in (end_ns, start_ns))
    known[inside] = np.clip(np.rint(until - before), 0, (end_ns - start_ns)[inside])
    return known


def awake(
    window: np.ndarray,
    time_ns: np.ndarray,
    may_sleep: np.ndarray,
    elsewhere_ns: np.ndarray,
    sleep_ns: np.ndarray,
    may_sleep_too: np.ndarray | None = None,
) -> np.ndarray:
    """Return the part of each piece, in ns, that the thread ran or wanted to; in the rest it slept.

    What may sleep (waiting for data, for a device, for another rank) slept in equal shares; what
    works did not.

    Args:
        window, time_ns: window and time of each piece.
        may_sleep: mask of the pieces in which the thread may have slept.
        elsewhere_ns: per window, time outside of the pieces in which it may have slept too.
        sleep_ns: per window, -1 where it is not known: nothing slept then.
        may_sleep_too: mask of the pieces that slept for what these cannot hold, such as Python.
    """
    owed, elsewhere, awake_ns = np.maximum(sleep_ns, 0), elsewhere_ns, time_ns
    for mask in (may_sleep, may_sleep_too):
        if mask is not None:
            held = np.bincount(window[mask], time_ns[mask], len(sleep_ns)) + elsewhere
            ratio = 1 - np.minimum(owed / np.maximum(held, 1), 1)
            awake_ns = np.where(mask, np.rint(time_ns * ratio[window]).astype(np.int64), awake_ns)
            owed, elsewhere = np.maximum(owed - held, 0), np.zeros(len(owed))
    return awake_ns


def taken(window: np.ndarray, held: np.ndarray, wait_ns: np.ndarray) -> np.ndarray:
    """Return the part of each piece that was waiting, in whole nanoseconds.

    At most what is ``held`` of it, the part that waiting may have lengthened; the sum over a window
    is its wait, except for what its pieces cannot hold.
    """
    order = np.argsort(window, kind="stable")
    of = window[order]
    sums = np.append(0, np.cumsum(held[order]))
    bounds = sums[np.searchsorted(of, np.arange(len(wait_ns) + 1))]
    ratio = np.minimum(wait_ns, np.diff(bounds)) / np.maximum(np.diff(bounds), 1)
    until, before = (
        np.rint((at - bounds[of]) * ratio[of]).astype(np.int64) for at in (sums[1:], sums[:-1])
    )
    out = np.empty(len(held), dtype=np.int64)
    out[order] = np.minimum(until - before, held[order])
    return out
