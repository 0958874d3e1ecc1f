"""Lead of each rank over the last one, by step.

The lead of an event is the latest start over the ranks minus its own start, in one clock (arXiv
2512.08242). Collectives are matched across ranks; compute kernels by step, name and order, if all
ranks ran the same number of that name in that step.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.collectives import Members, details_of
from chopper.analyzers.events.device import Events, of_class
from chopper.analyzers.events.groups import Groups
from chopper.analyzers.events.steps import step_numbers
from chopper.analyzers.trace.columns import distinct_rows, ints
from chopper.analyzers.views import View, column, optional

VIEW = View(
    "lead",
    __doc__,
    (
        column("rank", "Global rank that the row is about.", "int32"),
        optional("step", "Step number; null where no step holds it.", "int64"),
        column("kind", "Kind of the compared events: collective or kernel."),
        column("median_ns", "Median lead: how long before the last rank this rank starts."),
        column("p95_ns", "95th percentile of the lead."),
        column("last_ratio", "Share of the events at which this rank started last."),
        column("event_count", "Number of compared events."),
    ),
    title="Lead of ranks",
    section="Communication",
    needs="there is only one rank, or the ranks ran nothing in common",
)


def lead(run: Attributed, events: Events, members: Members) -> pa.Table:
    """COMMUNICATION, DEVICE_EVENT -> LEAD, by rank and step, the greatest first."""
    rows = _of_kernels(run, events)
    if len(members):
        step = ints(details_of(run, members.rank, members.row), "step")
        ahead = members.ready_ns - members.arrival_ns
        rows = [*_by_rank_and_step("collective", members.rank, step, ahead), *rows]
    return VIEW.of_rows(rows).sort_by([("median_ns", "descending"), ("rank", "ascending")])


def _of_kernels(run: Attributed, events: Events) -> list[dict[str, object]]:
    rows = np.flatnonzero(of_class(events, "compute"))
    if len(run.recording.ranks) < 2 or not len(rows):
        return []
    rank = events.rank[rows]
    start = events.start_ns[rows] - _offsets_ns(run)[rank]
    step = step_numbers(run.whole, rank, events.step[rows])
    order = np.lexsort((start, rank, events.kernel[0][rows], step))
    rank, start, step = rank[order], start[order], step[order]
    _, name = distinct_rows([step, events.kernel[0][rows][order]])
    # Kernels of one name, step and rank follow each other.
    runs = Groups([name, rank])
    each, named = runs.count, name[runs.first]
    occurrence = np.arange(len(name)) - runs.first[runs.of_row]
    names = int(name.max()) + 1
    low = np.full(names, len(name) + 1, dtype=np.int64)
    high = np.zeros(names, dtype=np.int64)
    np.minimum.at(low, named, each)
    np.maximum.at(high, named, each)
    on_all = np.bincount(named, minlength=names) == len(run.recording.ranks)
    keep = np.flatnonzero(((low == high) & on_all)[name])
    if not len(keep):
        return []
    _, instance = distinct_rows([name[keep], occurrence[keep]])
    latest = np.full(int(instance.max()) + 1, np.iinfo(np.int64).min, dtype=np.int64)
    np.maximum.at(latest, instance, start[keep])
    return _by_rank_and_step("kernel", rank[keep], step[keep], latest[instance] - start[keep])


def _offsets_ns(run: Attributed) -> np.ndarray:
    """Lead of each rank's clock over the others', by number of the rank."""
    found = np.zeros(max(run.recording.ranks, default=0) + 1, dtype=np.int64)
    table = run.communication
    rank, row, arrival = (ints(table, name) for name in ("rank", "event_row", "arrival_ns"))
    for one, at in zip(*np.unique(rank, return_index=True), strict=True):
        start = run.joined[int(one)].device_event["start_ns"][int(row[at])].as_py()
        found[one] = start - arrival[at]
    return found


def _by_rank_and_step(
    kind: str, rank: np.ndarray, step: np.ndarray, ahead: np.ndarray
) -> list[dict[str, object]]:
    groups = Groups([rank, step])
    order = np.argsort(groups.of_row, kind="stable")
    members = np.split(ahead[order], np.cumsum(groups.count)[:-1])
    return [
        {
            "rank": int(rank[at]),
            "step": None if step[at] < 0 else int(step[at]),
            "kind": kind,
            "event_count": len(of),
            "median_ns": int(np.median(of)),
            "p95_ns": int(np.quantile(of, 0.95)),
            "last_ratio": float((of <= 0).mean()),
        }
        for at, of in zip(groups.first, members, strict=True)
    ]
