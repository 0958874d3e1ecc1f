"""Peak memory of each step: allocator, device and host.

With more steps than fit a page, and without steps, a row is one of equal spans of time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from chopper.analyzers.events.allocations import CPU
from chopper.analyzers.events.steps import step_table, traced_steps
from chopper.analyzers.trace.columns import ints
from chopper.analyzers.views import View
from chopper.tables import column, optional

if TYPE_CHECKING:
    import pyarrow as pa

    from chopper.analyzers.attributed import Attributed

_MOST_SPANS = 100

VIEW = View(
    "memory_over_time",
    1,
    "Most memory of each kind in each step (in each of equal spans, where there are no steps): "
    "what torch's allocator says, what the driver says, and the host's.",
    (
        column("rank", "Global rank that the row is about.", "int32"),
        optional("step", "Step number; null for spans of time.", "int64"),
        column("since_ns", "Start of the step or span, since that of the first row."),
        column("dur_ns", "Length of the step or span."),
        optional("allocated_bytes", "Peak of the bytes that tensors held."),
        optional("reserved_bytes", "Peak of the bytes reserved from the driver."),
        optional("device_used_bytes", "Peak of the bytes in use on the device, by all processes."),
        optional("host_process_bytes", "Peak of the resident bytes of the rank and its children."),
        optional("host_available_bytes", "Least bytes that the host had available."),
    ),
    module_doc=__doc__,
    title="Memory over time",
    section="Memory",
    needs="no memory was sampled (the collectors `device_memory` and `host` do) and no snapshot "
    "given",
)


def memory_over_time(run: Attributed) -> pa.Table:
    """ALLOCATOR_EVENT, MEMORY_EVENT, DEVICE_MEMORY, DEVICE_COUNTER, PROCESS, HOST, STEP
    -> MEMORY_OVER_TIME.
    """
    rows: list[dict[str, Any]] = []
    for rank in run.recording.ranks:
        series = _series(run, rank)
        if not series:
            continue
        spans = _spans(run, rank, series)
        for number, start, end in spans:
            row: dict[str, Any] = {"rank": rank, "step": number}
            row |= {"since_ns": start - spans[0][1], "dur_ns": end - start}
            for name, (time, values) in series.items():
                low, high = np.searchsorted(time, (start, end))
                if high > low:
                    extreme = np.min if name == "host_available_bytes" else np.max
                    row[name] = int(extreme(values[low:high]))
            if len(row) > 4:
                rows.append(row)
    return VIEW.of_rows(rows)


_Series = dict[str, tuple[np.ndarray, np.ndarray]]


def _series(run: Attributed, rank: int) -> _Series:
    """(times, ascending; values) of each column that there is."""
    tables = {
        name: run.recording.table(rank, name)
        for name in (
            *("device_memory", "allocator_event", "memory_event", "device_counter", "process"),
            "host",
        )
    }
    events, counters = tables["memory_event"], tables["device_counter"]
    tables["memory_event"] = events.filter(
        pc.not_equal(pc.fill_null(events["device_type"], 1), CPU)
    )
    device = run.recording.part(rank).device_id
    if device is not None:
        tables["device_counter"] = counters.filter(pc.equal(counters["device_id"], device))
    tables["process"] = tables["process"].filter(pc.equal(tables["process"]["rank"], rank))
    found: _Series = {}
    for name, table, recorded in (
        ("allocated_bytes", "device_memory", "allocated_bytes"),
        ("reserved_bytes", "device_memory", "reserved_bytes"),
        ("allocated_bytes", "allocator_event", "allocated_bytes"),
        ("reserved_bytes", "allocator_event", "reserved_bytes"),
        ("allocated_bytes", "memory_event", "allocated_bytes"),
        ("reserved_bytes", "memory_event", "reserved_bytes"),
        ("device_used_bytes", "device_counter", "memory_used_bytes"),
        ("host_process_bytes", "process", "rss_bytes"),
        ("host_available_bytes", "host", "memory_available_bytes"),
    ):
        known = tables[table].filter(pc.is_valid(tables[table][recorded]))
        values = ints(known, recorded)
        # A recorder that does not keep a total writes zeros.
        if (values > 0).any():
            time = ints(known, "time_ns")
            order = np.argsort(time, kind="stable")
            found[name] = time[order], values[order]
    return found


def _spans(run: Attributed, rank: int, series: _Series) -> list[tuple[int | None, int, int]]:
    """(step, start, end) of each row."""
    steps = traced_steps(run, rank)
    numbers, starts, ends = steps.number, steps.start_ns, steps.end_ns
    if not len(steps):
        step = step_table(run, rank)
        numbers, starts, ends = (ints(step, n) for n in ("number", "start_ns", "end_ns"))
    if 0 < len(numbers) <= _MOST_SPANS:
        return list(zip(numbers.tolist(), starts.tolist(), ends.tolist(), strict=True))
    first = min(int(time[0]) for time, _ in series.values())
    last = max(int(time[-1]) for time, _ in series.values())
    edges = np.linspace(0, last - first + 1, min(_MOST_SPANS, last - first + 1) + 1)
    cuts = (first + np.unique(edges.astype(np.int64))).tolist()
    return [(None, a, b) for a, b in pairwise(cuts)]
