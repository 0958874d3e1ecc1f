"""Time in which the thread of the steps waited for a core, taken out of what it was doing then.

On a run without a device, what a rank computes and what its host prepares is one thread's work. The
kernel counts how long that thread could run and had no core; it does not say when. So a step's wait
is taken evenly out of all that the thread did in the step and that no peak explains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.columns import ints

if TYPE_CHECKING:
    import pyarrow as pa


def wait_of_steps(core_wait: pa.Table | None, numbers: np.ndarray) -> np.ndarray:
    """Wait of each step, 0 where it is not known. CORE_WAIT -> nanoseconds.

    A step's wait is known where the readings at its end and at the end of the step before are of
    one thread. Where a number occurs twice, the steps were counted anew: the last one counts.

    Args:
        numbers: steps as the program counts.
    """
    found = np.zeros(len(numbers), dtype=np.int64)
    if core_wait is None or core_wait.num_rows < 2:
        return found
    step, tid, total = (ints(core_wait, c) for c in ("step", "tid", "run_delay_ns"))
    grown = np.diff(total)
    follows = (step[1:] >= 0) & ((step[1:] == step[:-1] + 1) | ((step[1:] == 0) & (step[:-1] < 0)))
    known = follows & (tid[1:] == tid[:-1]) & (grown >= 0)
    of_step = dict(zip(step[1:][known].tolist(), grown[known].tolist(), strict=True))
    return np.array([of_step.get(n, 0) for n in numbers.tolist()], dtype=np.int64)


def taken(
    window: np.ndarray, time_ns: np.ndarray, may_hold: np.ndarray, wait_ns: np.ndarray
) -> np.ndarray:
    """How much of each piece was waiting, in whole nanoseconds.

    Args:
        window, time_ns: window and time of each piece.
        may_hold: mask of the pieces that waiting may have lengthened.
        wait_ns: per window; what its pieces cannot hold is left out.

    Returns:
        At most ``time_ns`` each; the sum over a window is its wait.
    """
    held = np.where(may_hold, time_ns, 0)
    order = np.argsort(window, kind="stable")
    until = np.cumsum(held[order])
    before = until - held[order]
    of = window[order]
    first = np.searchsorted(of, np.arange(len(wait_ns)), side="left")
    last = np.searchsorted(of, np.arange(len(wait_ns)), side="right")
    sums = np.append(0, until)
    start, total = sums[first], sums[last] - sums[first]
    ratio = np.minimum(wait_ns, total) / np.maximum(total, 1)

    def share(at: np.ndarray) -> np.ndarray:
        return np.rint((at - start[of]) * ratio[of]).astype(np.int64)

    out = np.empty(len(time_ns), dtype=np.int64)
    out[order] = np.minimum(share(until) - share(before), held[order])
    return out
