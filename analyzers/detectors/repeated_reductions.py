"""Gradients that are reduced in each micro-step of gradient accumulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.detectors import Sighting, detector
from chopper.analyzers.events.device import Events
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.join import Links

_FORWARD = "DistributedDataParallel.forward"
_UPDATE = "Optimizer.step#"
_REDUCTIONS = ("allreduce", "reducescatter")
DETECTOR = detector("repeated_reductions")


def repeated_reductions(
    run: Attributed, events: Events, links: Mapping[int, Links]
) -> Iterator[Sighting]:
    """HOST_SPAN, COMMUNICATION -> at most one sighting."""
    if run.windows["number"].null_count:
        return  # A window without steps holds any number of whole iterations.
    gone: dict[int, np.ndarray] = {}
    passes = reductions = needed = 0
    for rank, link in links.items():
        forward = link.host.named(_FORWARD.__eq__)
        forward &= link.host.nesting.topmost(forward) == np.arange(len(link.host))
        start_ns = link.host.start_ns[forward]
        table = run.communication.filter(ints(run.communication, "rank") == rank)
        codes, names = strings(table, "collective")
        reduces = np.isin(codes, [i for i, name in enumerate(names) if name in _REDUCTIONS])
        row = ints(table, "event_row")[reduces]
        size = ints(table, "message_bytes")[reduces]
        begin_ns = link.launch_ns[row]
        order = np.argsort(begin_ns, kind="stable")
        row, size, begin_ns = row[order], size[order], begin_ns[order]
        inside = np.isin(row, events.row[events.rank == rank])
        row, size, begin_ns = row[inside], size[inside], begin_ns[inside]
        step, of_pass = link.step[row], np.searchsorted(start_ns, begin_ns, side="right")
        updates_ns = _updates_ns(link)
        removable = [np.zeros(0, np.int64)]
        steps = np.unique(step).tolist()
        if len(steps) == 1 and not len(updates_ns):
            return
        for one in steps:
            mine = np.flatnonzero(step == one)
            each = np.split(size[mine], np.flatnonzero(np.diff(of_pass[mine])) + 1)
            if len(each) < 2 or any(not np.array_equal(each[0], part) for part in each[1:]):
                return
            first, last = start_ns[np.maximum(of_pass[mine[[0, -1]]] - 1, 0)]
            if ((updates_ns >= first) & (updates_ns < last)).any():
                return  # Each pass has an optimizer of its own: several models, or iterations.
            removable.append(row[mine[: -len(each[0])]])
            passes, needed, reductions = len(each), len(each[0]), len(mine)
        gone[rank] = np.sort(np.concatenate(removable))
    if any(len(rows) for rows in gone.values()):
        yield Sighting(
            detector="repeated_reductions",
            events=gone,
            gone=gone,
            phase="backward",
            evidence={"passes": passes, "reductions": reductions, "needed": needed},
        )


def _updates_ns(links: Links) -> np.ndarray:
    """Return when the optimizer ran: starts of its spans, and launches of its device events."""
    spans = links.host.start_ns[links.host.named(lambda name: name.startswith(_UPDATE))]
    rows = links.phase == links.phases.index("optimizer")
    return np.concatenate([spans, links.launch_ns[rows]])
