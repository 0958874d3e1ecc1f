"""Costs of readings and of the calls of a driver, measured."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from chopper.collectors.sampler._source import Sink
from chopper.storage.manifest import CallCost

if TYPE_CHECKING:
    from chopper.collectors.sampler._clocks import Clock
    from chopper.collectors.sampler._source import Source

_READINGS = 30
_CALIBRATION_CALLS = 50
_CALIBRATION_NS = 10_000_000
"""For each call, at the start."""


def call_costs(source: Source, clock: Clock) -> dict[str, CallCost]:
    """Return the cost of each call of the driver that a source makes, measured now, by name.

    Calls that fail are left out.
    """
    offered = getattr(source, "calls", None)
    costs_by_call: dict[str, CallCost] = {}
    for name, call in (offered() if offered is not None else {}).items():
        costs: list[int] = []
        begun_ns = clock.monotonic_ns()
        try:
            while len(costs) < _CALIBRATION_CALLS:
                before_ns = clock.monotonic_ns()
                call()
                after_ns = clock.monotonic_ns()
                costs.append(after_ns - before_ns)
                if after_ns - begun_ns > _CALIBRATION_NS and len(costs) >= 3:
                    break
        except Exception:  # noqa: BLE001 - whatever a driver refuses now, its source names
            continue
        costs.sort()
        costs_by_call[name] = CallCost(
            p50_ns=costs[len(costs) // 2],
            p99_ns=costs[min(len(costs) * 99 // 100, len(costs) - 1)],
            count=len(costs),
        )
    return costs_by_call


def reading_cost_ns(source: Source) -> int:
    """Open a source and return the median cost of one reading in this process.

    Raises:
        CollectorUnavailable: it cannot be read here.
    """
    sink = Sink()
    costs_ns = []
    try:
        source.open()
        for _ in range(_READINGS):
            before_ns = time.monotonic_ns()
            source.sample(sink, before_ns)
            costs_ns.append(time.monotonic_ns() - before_ns)
            sink.take()
    finally:
        source.close()
    return sorted(costs_ns)[len(costs_ns) // 2]
