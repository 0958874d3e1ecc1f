"""Memory of the device that is allocated and freed within steps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Sighting, detector
from chopper.analyzers.events.steps import spans_in_steps
from chopper.analyzers.trace.join import Links

DETECTOR = detector("allocator_retries")
_CALLS = re.compile(r"(?:cuda|hip)(Malloc|Free)$")


def allocator_retries(run: Attributed, links: Mapping[int, Links]) -> Iterator[Sighting]:
    """HOST_SPAN -> at most one sighting."""
    calls, gone, about = {}, {}, {}
    counts = {"Malloc": 0, "Free": 0}
    host_ns = 0
    for rank, link in links.items():
        host, windows = link.host, run.joined[rank].windows
        if not len(host):
            continue
        named = host.where(lambda c, name: c in ("runtime", "driver") and _CALLS.match(name))
        inside = named & spans_in_steps(run, rank)[0]
        if windows.numbers[0] < 0:
            bounds = windows.bounds_ns
            inside &= (host.start_ns >= bounds[0]) & (host.end_ns <= bounds[-1])
        rows = np.flatnonzero(inside)
        if not len(rows):
            continue
        calls[rank], gone[rank], about[rank] = rows, inside, np.zeros(0, np.int64)
        host_ns += int(host.dur_ns[rows].sum())
        codes, values = host.names
        for code in codes[rows].tolist():
            kind = _CALLS.match(values[code])
            counts[kind[1] if kind else "Free"] += 1
    if calls:
        yield Sighting(
            detector="allocator_retries",
            events=about,
            calls=calls,
            calm=calls,
            host_gone=gone,
            evidence={
                "allocations": counts["Malloc"],
                "frees": counts["Free"],
                "host_ns": host_ns,
            },
        )
