"""The host's pace without tracing: the part of its traced time that the same work takes.

Recording each operator and each call of the driver slows the host, which then leads the device by
less, or not at all; kernels and copies take no longer. So steps at full speed are replayed with the
host's work shortened by one factor, the largest that two observations allow:

- the replayed steps are no longer than those that ran without a trace;
- where the device decides how long those take, work of the host alone is no longer than the
  shortest step right after a trace: writing it drained the device, so the host waited for nothing.

Where the device decides, the host may be faster still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.replay.program import CALL
from chopper.causes import CODES

if TYPE_CHECKING:
    from chopper.analyzers.replay.scenario import Scenario

SLOWED = tuple(
    f"idle.preparation.{c}" for c in ("dispatch", "runtime", "profiler", "python", "unobserved")
)
"""Work that tracing slows, besides calls that launch. Data, collections of garbage and compilation
take the time they take."""
_RECORDED = [CALL, *(CODES[cause] for cause in SLOWED)]
_LEAST = 0.1
"""No recording slows a host more than tenfold."""
_PRECISION = 0.005
_FLAT = 1.02
"""A step that changes by less does not depend on the host."""


def set_pace(scenario: Scenario, ratio: float) -> None:
    """Work of the host that tracing slowed takes so much of its traced time."""
    for rank_index, node in enumerate(scenario.ranks):
        if not node.joined.host_only:
            slowed = np.isin(node.program.parts.cause, _RECORDED)
            scenario.part_scale[rank_index] = np.where(slowed, ratio, 1.0)


def without_device(scenario: Scenario) -> None:
    """The device takes no time, and ranks do not wait for each other: the host's work is left."""
    scenario.latency = scenario.dependency = scenario.uncoupled = scenario.synchronization = True
    for rank_index, node in enumerate(scenario.ranks):
        scenario.scale(rank_index, np.zeros(len(node.start)))


def host_pace(
    step_ns: Callable[[float, bool], float], untraced_ns: float | None, drained_ns: float | None
) -> float:
    """Return the pace, as a share of the traced time; 1 where nothing shows a faster host.

    Args:
        step_ns: mean step at a pace: with the device, or (True) of the host alone.
        untraced_ns: step that ran without a trace; None where other things made it shorter.
        drained_ns: step of the host that began with an idle device; None where there was none.
    """
    pace = 1.0
    # A step that the quickest host does not explain has other reasons.
    if untraced_ns is not None and step_ns(_LEAST, False) <= _FLAT * untraced_ns:
        pace = _largest(lambda ratio: step_ns(ratio, False) <= _FLAT * untraced_ns, pace)
    if drained_ns is not None:
        least_ns = step_ns(pace, False) / _FLAT
        quicker = _largest(
            lambda ratio: step_ns(ratio, True) <= drained_ns or step_ns(ratio, False) < least_ns,
            pace,
        )
        # Nor does one that the host decides, or that had its data ready, tell its pace.
        pace = quicker if step_ns(quicker, True) <= drained_ns else pace
    return pace


def _largest(fits: Callable[[float], bool], high: float) -> float:
    """Return the largest ratio up to ``high`` that fits, by bisection."""
    if fits(high):
        return high
    low = _LEAST
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
