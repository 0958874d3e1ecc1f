"""The sampler: a small process of its own that reads sources at fixed rates and writes tables.

It is spawned with a fresh interpreter, never forked, loads no torch, runs at low priority, and ends
with its parent: on request, when its pipe closes, when the kernel says that the parent died, or
when it finds itself with another parent.

It writes its rows itself, as Arrow streams, batch by batch: no other process reads them while the
run goes on, so nothing has to cross a process border. A kill loses at most the rows since the last
flush.

To add a source, write a class like :class:`Source` and pass a :class:`SourceSpec` that names it to
a :class:`SamplerProcess`; it does without numpy and pandas. A source with a ``plan`` is read in C,
by a thread that fills a ring for each device (:mod:`chopper.collectors._plan`).

A driver call that hangs takes no other collector with it, since each has a process of its own, and
no other device: what blocks is left to the thread that is in it, and another one goes on with the
rest.
"""

from __future__ import annotations

from chopper.collectors.sampler._loop import Sampler
from chopper.collectors.sampler._parent import SamplerProcess
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
    "COMM",
    "ClockSource",
    "Gone",
    "Part",
    "Quantiles",
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
