"""Replays of CUDA and HIP graphs: the captured call that each of their kernels comes from.

While a graph is captured, launches start nothing; each becomes a node, in order. A replay runs the
nodes under one launch, so that nothing in its events tells their operators: the captured calls do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from chopper.analyzers.trace import names
from chopper.analyzers.trace.columns import ints, pick, run_starts
from chopper.analyzers.trace.tables import DeviceEvents, HostSpans

_KERNEL, _COPY, _FILL = range(3)


@dataclass(frozen=True, slots=True)
class GraphEvents:
    """Events that graphs ran, those of them whose captured call is known, and graphs captured."""

    events_count: int = 0
    found_count: int = 0
    captures_count: int = 0


class Replays(NamedTuple):
    """The events of replayed graphs.

    Attributes:
        call: per device event the host's row of the call that was captured, -1 where that is not
            known, or where no graph ran it.
        counts: of these events.
    """

    call: np.ndarray
    counts: GraphEvents


def replays_of(host: HostSpans, events: DeviceEvents, launch_row: np.ndarray) -> Replays:
    """Find the captured call of each event that a graph ran.

    A replay has the calls of a capture if these are as many, kernels, copies and fills in the same
    order, and no other capture of other calls is like that.
    """
    call = np.full(len(events), -1, dtype=np.int64)
    replayed = pick(host.named(names.is_graph_launch), launch_row, otherwise=False)
    rows = np.flatnonzero(replayed)
    if not len(rows):
        return Replays(call, GraphEvents())
    captures = _captures(host, np.isin(np.arange(len(host)), launch_row))
    known = {kinds: calls for kinds, calls in captures.items() if calls is not None}
    node = ints(events.table, "graph_node_id")[rows]
    stream = ints(events.table, "stream_id")[rows]
    # Nodes are numbered as they are captured; without numbers, one stream keeps their order.
    order = rows[np.lexsort((events.start_ns[rows], node, launch_row[rows]))]
    kind = np.full(len(events), _KERNEL)
    kind[events.of("memcpy")] = _COPY
    kind[events.of("memset")] = _FILL
    bounds = np.append(np.flatnonzero(run_starts(launch_row[order])), len(order))
    ordered = _ordered(launch_row[rows], node, stream)
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        mine = order[low:high]
        calls = known.get(tuple(kind[mine].tolist()))
        if calls is not None and launch_row[mine[0]] in ordered:
            call[mine] = calls
    found_count = int((call >= 0).sum())
    return Replays(call, GraphEvents(len(rows), found_count, len(captures)))


def _ordered(launch: np.ndarray, node: np.ndarray, stream: np.ndarray) -> set[int]:
    """Return the launches of graphs whose events have an order: by node, or on one stream."""
    order = np.argsort(launch, kind="stable")
    first = np.flatnonzero(run_starts(launch[order]))
    least, low, high = (
        of.reduceat(values[order], first)
        for of, values in ((np.minimum, node), (np.minimum, stream), (np.maximum, stream))
    )
    return {*launch[order][first][(least >= 0) | (low == high)].tolist()}


def _captures(host: HostSpans, started: np.ndarray) -> dict[tuple[int, ...], np.ndarray | None]:
    """Return the calls of each captured graph by their kinds; None where two graphs are alike.

    Graphs of the same operators, captured twice, are one.

    Args:
        host: spans of the host.
        started: mask of the calls that started something themselves: another thread's.
    """
    begins, ends = (
        host.start_ns[host.named(name) & host.of("runtime", "driver")]
        for name in (names.is_capture_begin, names.is_capture_end)
    )
    is_call = np.zeros(len(host), dtype=bool)
    kind = np.full(len(host), _KERNEL)
    for number, name in enumerate((names.is_kernel_launch, names.is_copy_call, names.is_fill_call)):
        mine = host.named(name) & host.of("runtime", "driver")
        is_call |= mine
        kind[mine] = number
    calls = np.flatnonzero(is_call & ~started)
    # The runtime's call and the driver's within it are one.
    calls = calls[host.nesting.topmost(is_call)[calls] == calls]
    nested = host.named(names.is_graph_launch)
    found: dict[tuple[int, ...], np.ndarray | None] = {}
    for begin_ns in np.unique(begins).tolist():
        after = ends[ends >= begin_ns]
        if not len(after):
            continue
        low, high = np.searchsorted(host.start_ns[calls], [begin_ns, after.min()])
        mine = calls[low:high]
        if not len(mine) or nested[mine].any():
            continue
        kinds = tuple(kind[mine].tolist())
        same = kinds in found and _alike(host, found[kinds], mine)
        found[kinds] = mine if kinds not in found or same else None
    return found


def _alike(host: HostSpans, calls: np.ndarray | None, others: np.ndarray) -> bool:
    """Tell whether calls stand in operators of the same names and shapes."""
    if calls is None:
        return False
    nearest = host.nesting.nearest(host.of("cpu_op"))
    return all(
        bool((pick(codes, nearest[calls]) == pick(codes, nearest[others])).all())
        for codes, _ in (host.names, host.input_dims)
    )
