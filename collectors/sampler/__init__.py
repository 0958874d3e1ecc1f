"""The sampler: a small process of its own that reads sources at fixed rates and writes tables.

It is spawned with a fresh interpreter, loads no torch, runs at low priority, and ends with its
parent, however that ends. It writes Arrow streams, batch by batch: a kill loses at most the rows
since the last flush. To add a source, write a class like :class:`Source`, without numpy and pandas,
and a :class:`SampledCollector` whose ``specs`` name it. A driver call that hangs takes no other
collector with it, and no other device: it is left to the thread that is in it, and another one goes
on.
"""

from __future__ import annotations

from chopper.collectors.sampler._loop import Sampler
from chopper.collectors.sampler._process import (
    CLOCKS,
    ONCE_HZ,
    SampledCollector,
    SamplerProcess,
)
from chopper.collectors.sampler._source import (
    ClockSource,
    Gone,
    Part,
    Sink,
    Source,
    SourceSpec,
    SystemClock,
    call_costs,
    reading_cost_ns,
)
from chopper.collectors.sampler._status import (
    COMM,
    Quantiles,
    SamplerStatus,
    SourceStatus,
    to_report,
)

__all__ = [
    "CLOCKS",
    "COMM",
    "ONCE_HZ",
    "ClockSource",
    "Gone",
    "Part",
    "Quantiles",
    "SampledCollector",
    "Sampler",
    "SamplerProcess",
    "SamplerStatus",
    "Sink",
    "Source",
    "SourceSpec",
    "SourceStatus",
    "SystemClock",
    "call_costs",
    "reading_cost_ns",
    "to_report",
]
