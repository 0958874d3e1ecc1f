"""Launch overhead as the Chopper paper defines it (arXiv 2512.08242).

Compute kernels are taken in order of their start, per device and step. With ``prev_end`` the end
of what ran before and ``t_rt`` the start of the call that launched the kernel:

    overhead = max(0, start − prev_end)
    preparation = max(0, t_rt − prev_end), no more than the overhead
    call = min(start − t_rt, overhead)

``prev_end`` is the latest end of the compute kernels before, which is that of the previous kernel
unless kernels overlap. The first kernel of a step has none before it and no overhead: what lies
between steps is idle time with causes of its own. Communication under the gap does not shorten it,
which is why the attribution's idle causes are smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.columns import dictionary, ints
from chopper.analyzers.views.events import Events, group_of, of_run, running_max
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.attribution import Attribution


@dataclass(frozen=True)
class LaunchOverhead:
    """Per event of `Events`, in its order; 0 where there is none.

    Attributes:
        counted: compute kernels, which alone are looked at.
        preparation_ns, call_ns: the two parts of the overhead.
        unsplit_ns: overhead of kernels whose launch was not recorded.
    """

    counted: np.ndarray
    preparation_ns: np.ndarray
    call_ns: np.ndarray
    unsplit_ns: np.ndarray


def launches(attribution: Attribution) -> pa.Table:
    """Launch overhead per operator and phase, most first. DEVICE_EVENT, HOST_SPAN -> LAUNCHES."""
    events = of_run(attribution)
    overhead = overhead_of(events, _launch_ns(attribution, events))
    rows = np.flatnonzero(overhead.counted)
    if not len(rows):
        return TABLES["launches"].empty()
    op, phase = events.op[0][rows], events.phase[0][rows]
    group, first = group_of([op, phase])

    def total(values: np.ndarray) -> np.ndarray:
        out = np.zeros(len(first), dtype=np.int64)
        np.add.at(out, group, values[rows])
        return out

    preparation = total(overhead.preparation_ns)
    call = total(overhead.call_ns)
    unsplit = total(overhead.unsplit_ns)
    whole = preparation + call + unsplit
    running = total(events.dur_ns)
    count = np.bincount(group, minlength=len(first))
    order = np.argsort(-whole, kind="stable")
    observed = attribution.observed_ns
    columns = {
        "op": dictionary(op[first][order], events.op[1]),
        "phase": dictionary(phase[first][order], events.phase[1]),
        "kernel_count": pa.array(count[order]),
        "overhead_ns": pa.array(whole[order]),
        "share_ratio": pa.array(whole[order] / max(observed, 1)),
        "preparation_ns": pa.array(preparation[order]),
        "call_ns": pa.array(call[order]),
        "unsplit_ns": pa.array(unsplit[order]),
        "mean_ns": pa.array(np.rint(whole / count).astype(np.int64)[order]),
        "running_ns": pa.array(running[order]),
    }
    declared = TABLES["launches"]
    return pa.table([columns[f.name] for f in declared.arrow], schema=declared.arrow)


def _launch_ns(attribution: Attribution, events: Events) -> np.ndarray:
    """Start of the call that launched each event, -1 where it was not recorded."""
    found = np.full(len(events), -1, dtype=np.int64)
    for rank in attribution.run.ranks:
        mine = np.flatnonzero((events.rank == rank) & (events.launch_row >= 0))
        if len(mine):
            start = ints(attribution.run.table(rank, "host_span"), "start_ns")
            found[mine] = start[events.launch_row[mine]]
    return found


def overhead_of(events: Events, launch_ns: np.ndarray) -> LaunchOverhead:
    """Launch overhead of each event.

    Args:
        events: the run's events.
        launch_ns: start of the launching call, -1 where unknown.
    """
    codes, values = events.work_class
    counted = codes == (values.index("compute") if "compute" in values else -2)
    rows = np.flatnonzero(counted)
    order = rows[
        np.lexsort(
            (events.start_ns[rows], events.step[rows], events.device_id[rows], events.rank[rows])
        )
    ]
    gap = np.zeros(len(events), dtype=np.int64)
    previous_end = np.zeros(len(events), dtype=np.int64)
    if len(order):
        start, end = events.start_ns[order], (events.start_ns + events.dur_ns)[order]
        sequence, _ = group_of([events.rank[order], events.device_id[order], events.step[order]])
        begins = np.concatenate([[True], sequence[1:] != sequence[:-1]])
        latest = running_max(end, begins)
        before = np.concatenate([[0], latest[:-1]])
        previous_end[order] = np.where(begins, start, before)
        gap[order] = np.maximum(start - previous_end[order], 0)
    known = launch_ns >= 0
    call = np.where(known, np.clip(events.start_ns - launch_ns, 0, gap), 0)
    return LaunchOverhead(
        counted,
        np.where(known, gap - call, 0),
        call,
        np.where(known, 0, gap),
    )
