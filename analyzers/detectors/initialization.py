"""Single calls of the driver that set up the device or load code within the recorded time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Sighting, detector
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.intervals import union
from chopper.analyzers.trace.join import Links
from chopper.analyzers.trace.names import is_synchronizing_call
from chopper.wording import duration, percent

_LEAST_RATIO = 0.05
_FACTOR = 50
_FEWEST = 3
_ALIKE_RATIO = 0.25
_ENOUGH_STEPS = 5
_DRIVER = re.compile(r"cuda|cu[A-Z]|hip|hsa_|ze[A-Z]")
DETECTOR = detector(
    "initialization",
    least=percent(_LEAST_RATIO, ".0f"),
    factor=_FACTOR,
    alike=percent(_ALIKE_RATIO, ".0f"),
    enough=_ENOUGH_STEPS,
)


@dataclass(frozen=True)
class Initialization:
    """Calls that initialize, of all ranks.

    Attributes:
        rows: rank → rows of `host_span`.
        idle_ns: leaf cause → time of the device's gaps during the calls.
        name: of the longest call.
        longest_ns, host_ns: its duration; that of all.
    """

    rows: dict[int, np.ndarray]
    idle_ns: dict[str, int]
    name: str
    longest_ns: int
    host_ns: int

    @property
    def description(self) -> str:
        """The calls in words: ``one cudaFree call of 6.01 s``."""
        count, longest = sum(map(len, self.rows.values())), duration(self.longest_ns)
        if count == 1:
            return f"one {self.name} call of {longest}"
        return f"{count} calls, the longest {self.name} of {longest}"


def initialization_of(run: Attributed, links: Mapping[int, Links]) -> Initialization | None:
    """Find the calls that initialize; None if there are none. HOST_SPAN, GAP -> Initialization."""
    run = run.detailed
    rows_of: dict[int, np.ndarray] = {}
    idle_ns: dict[str, int] = {}
    name, longest_ns, host_ns = "", 0, 0
    for rank, link in links.items():
        host = link.host
        mine = run.windows.filter(ints(run.windows, "rank") == rank)
        start, end = ints(mine, "start_ns"), ints(mine, "end_ns")
        calls = host.of("runtime", "driver") & host.named(_sets_up)
        candidates = np.flatnonzero(calls & (host.dur_ns > _LEAST_RATIO * (end - start).sum()))
        candidates = candidates[
            union(start, end).within(host.start_ns[candidates], host.ends(candidates)) > 0
        ]
        codes, names = host.names
        alike = [calls & (codes == codes[row]) for row in candidates]
        usual = (np.median(host.dur_ns[a if a.sum() >= _FEWEST else calls]) for a in alike)
        is_long = host.dur_ns[candidates] > _FACTOR * np.array([*usual])
        once = [
            not _recurs(link, row, same)
            for row, same in zip(candidates.tolist(), alike, strict=True)
        ]
        rows = candidates[is_long & np.array(once, dtype=bool)]
        if not len(rows):
            continue
        rows_of[rank] = rows
        host_ns += int(host.dur_ns[rows].sum())
        at = rows[host.dur_ns[rows].argmax()]
        if host.dur_ns[at] > longest_ns:
            name, longest_ns = names[codes[at]], int(host.dur_ns[at])
        gaps = run.gaps.filter(ints(run.gaps, "rank") == rank)
        during = union(host.start_ns[rows], host.ends(rows)).within(
            ints(gaps, "start_ns"), ints(gaps, "end_ns")
        )
        cause, causes = strings(gaps, "cause")
        for code in np.unique(cause[during > 0]).tolist():
            time_ns = int(during[cause == code].sum())
            idle_ns[causes[code]] = idle_ns.get(causes[code], 0) + time_ns
    return Initialization(rows_of, idle_ns, name, longest_ns, host_ns) if rows_of else None


def _sets_up(name: str) -> bool:
    """Return whether a span is a call of the driver that does not wait for the device."""
    return _DRIVER.match(name) is not None and not is_synchronizing_call(name)


def _recurs(links: Links, row: int, alike: np.ndarray) -> bool:
    """Return whether calls of this length recur after the first two steps."""
    host, start_ns = links.host, links.steps.start_ns
    long = host.start_ns[alike & (host.dur_ns >= _ALIKE_RATIO * host.dur_ns[row])]
    step = np.maximum(np.searchsorted(start_ns, long, side="right") - 1, 0)
    return bool(step.max() > step.min() and (len(start_ns) < _ENOUGH_STEPS or step.max() > 1))


def initialization(run: Attributed, links: Mapping[int, Links]) -> Iterator[Sighting]:
    """HOST_SPAN, GAP -> at most one sighting."""
    slow_start = initialization_of(run, links)
    if slow_start is None:
        return
    yield Sighting(
        detector="initialization",
        events={rank: np.zeros(0, np.int64) for rank in slow_start.rows},
        calls=slow_start.rows,
        saved_ns=sum(slow_start.idle_ns.values()) // len(run.joined),
        evidence={
            "what": slow_start.description,
            "name": slow_start.name,
            "longest_ns": slow_start.longest_ns,
            "calls": sum(map(len, slow_start.rows.values())),
            "host_ns": slow_start.host_ns,
        },
    )
