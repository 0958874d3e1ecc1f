"""Launch overhead by operator and phase: time before the launching call, and in it.

Launch overhead as defined in "Chopper" (arXiv 2512.08242). Compute kernels are taken in order of
their start, per device and step. With `prev_end` the end of the kernels before and `t_rt` the start
of the call that launched the kernel:

    overhead = max(0, start − prev_end),
    preparation = max(0, t_rt − prev_end), no more than the overhead,
    call = min(start − t_rt, overhead)

`prev_end` is the latest end of the compute kernels before, which is that of the previous kernel
unless kernels overlap. The first kernel of a step has no kernel before it and no overhead: time
between steps is idle time with its own causes. Communication during the gap does not shorten it, so
the run's idle causes can be smaller.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.device import Events, of_class
from chopper.analyzers.events.groups import Groups, running_max, text_rows
from chopper.analyzers.trace.columns import ints
from chopper.analyzers.views import View, column, optional

VIEW = View(
    "launches",
    __doc__,
    (
        optional("op", "Operator that launched the kernels; null where none was recorded."),
        column("phase", "Phase: forward, backward, optimizer, evaluation or another one."),
        column("kernel_count", "Number of compute kernels."),
        column("overhead_ns", "Launch overhead: preparation, call and what could not be split."),
        column("share_ratio", "Launch overhead as a share of the observed time of all ranks."),
        column("preparation_ns", "Part of the overhead before the launching call."),
        column("call_ns", "Part of the overhead from the launching call to the kernel's start."),
        column("unsplit_ns", "Overhead of kernels whose launch was not recorded."),
        column("mean_ns", "Mean overhead per kernel."),
        column("running_ns", "Time in which the kernels themselves ran."),
    ),
    title="Launch overhead",
    section="Steps and host",
)


def launches(run: Attributed, events: Events) -> pa.Table:
    """DEVICE_EVENT, HOST_SPAN -> LAUNCHES, most overhead first."""
    rows = np.flatnonzero(of_class(events, "compute"))
    groups = Groups([events.op[0][rows], events.phase[0][rows]])
    overhead = overhead_of(events, _launch_ns(run, events))
    parts = {name: groups.sum(values[rows]) for name, values in overhead.items()}
    whole = sum(parts.values(), np.zeros(len(groups), dtype=np.int64))
    columns = {
        "op": text_rows(events.op, rows[groups.first]),
        "phase": text_rows(events.phase, rows[groups.first]),
        "kernel_count": groups.count,
        "overhead_ns": whole,
        "share_ratio": whole / max(run.observed_ns, 1),
        **parts,
        "mean_ns": np.rint(whole / groups.count).astype(np.int64),
        "running_ns": groups.sum(events.dur_ns[rows]),
    }
    return VIEW.of(columns).take(np.argsort(-whole, kind="stable"))


def _launch_ns(run: Attributed, events: Events) -> np.ndarray:
    """Start of the call that launched each event, -1 where it was not recorded."""
    found = np.full(len(events), -1, dtype=np.int64)
    for rank in run.recording.ranks:
        mine = np.flatnonzero((events.rank == rank) & (events.launch_row >= 0))
        if len(mine):
            start = ints(run.joined[rank].host_span, "start_ns")
            found[mine] = start[events.launch_row[mine]]
    return found


def overhead_of(events: Events, launch_ns: np.ndarray) -> dict[str, np.ndarray]:
    """Return the parts of the launch overhead of each event; ``launch_ns`` is -1 where unknown."""
    rows = np.flatnonzero(of_class(events, "compute"))
    keys = (events.rank, events.device_id, events.step)
    order = rows[np.lexsort([events.start_ns[rows], *(key[rows] for key in reversed(keys))])]
    gap = np.zeros(len(events), dtype=np.int64)
    if len(order):
        start, end = events.start_ns[order], (events.start_ns + events.dur_ns)[order]
        begins = np.zeros(len(order), dtype=bool)
        begins[Groups([key[order] for key in keys]).first] = True
        latest = np.concatenate([[0], running_max(end, begins)[:-1]])
        gap[order] = np.maximum(start - np.where(begins, start, latest), 0)
    known = launch_ns >= 0
    call = np.where(known, np.clip(events.start_ns - launch_ns, 0, gap), 0)
    return {
        "preparation_ns": np.where(known, gap - call, 0),
        "call_ns": call,
        "unsplit_ns": np.where(known, 0, gap),
    }
