"""Values read back from the device, for which the host waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.causes.idle import blocking_copies
from chopper.analyzers.detectors import Detector, Sighting
from chopper.analyzers.trace import names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chopper.analyzers.attributed import Attributed
    from chopper.analyzers.events.device import Events
    from chopper.analyzers.trace.join import Links

DETECTOR = Detector(
    title="{op} waits for the device",
    condition="An operator that reads values on the host (item, nonzero, a copy to the host, …) "
    "holds a call that returned only when the device had done what came before it.",
    evidence="{calls} calls waited {waited_ns:ns} in all",
    remedy="Read values every so many steps, or after the step; keep them on the device "
    "(tensor operations in place of Python's), copy with non_blocking=True into pinned memory.",
    view="operations",
)
_READERS = (
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique",
    "aten::to",
    "aten::_to_copy",
    "aten::copy_",
)


def blocking_reads(run: Attributed, events: Events) -> Iterator[Sighting]:
    """HOST_SPAN, DEVICE_EVENT -> a sighting for each reading operator, most waiting first.

    Without the pattern, the host goes on without waiting at those calls.
    """
    calm: dict[str, dict[int, np.ndarray]] = {}
    waited: dict[str, int] = {}
    about: dict[str, dict[int, np.ndarray]] = {}
    for rank, joined in run.joined.items():
        links = joined.links()
        if joined.host_only or not len(links.host):
            continue
        for op, rows, time_ns, copies in _waits(links, events.row[events.rank == rank]):
            calm.setdefault(op, {})[rank] = rows
            about.setdefault(op, {})[rank] = copies
            waited[op] = waited.get(op, 0) + time_ns
    for op in sorted(calm, key=lambda op: -waited[op])[:3]:
        evidence = {"op": op, "calls": sum(map(len, calm[op].values())), "waited_ns": waited[op]}
        yield Sighting(
            detector="blocking_reads",
            events=about[op],
            calls=calm[op],
            calm=calm[op],
            evidence=evidence,
        )


def _waits(links: Links, rows: np.ndarray) -> Iterator[tuple[str, np.ndarray, int, np.ndarray]]:
    """Return operator, waiting calls, time in them, and copies launched in its calls."""
    host, nesting = links.host, links.host.nesting
    waiting = host.of("runtime", "driver") & host.named(names.is_synchronizing_call)
    waiting[links.launch_row[blocking_copies(links)]] = True
    reading = host.where(lambda category, name: category == "cpu_op" and name in _READERS)
    reader = nesting.topmost(reading)
    calls = np.flatnonzero(waiting & (reader >= 0))
    codes, values = host.names
    launched = rows[links.launch_row[rows] >= 0]
    for code in np.unique(codes[reader[calls]]).tolist():
        mine = calls[codes[reader[calls]] == code]
        inside = reader[links.launch_row[launched]]
        copies = launched[(inside >= 0) & (codes[inside] == code)]
        yield values[code], mine, int(host.dur_ns[mine].sum()), copies
