"""Kernels that ran beside others, compared with the same work alone, clocks made equal."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.groups import real_or_null, whole_or_null
from chopper.analyzers.views import View
from chopper.analyzers.views._works import COLUMNS, works_of
from chopper.tables import column, optional

VIEW = View(
    "contention",
    __doc__,
    (
        *COLUMNS,
        optional("slowdown_ratio", "Mean duration beside others over the baseline."),
        column("loss_ns", "Time attributed to contention; 0 where the slowdown is within noise."),
        optional(
            "alone_ns", "Baseline: median duration of three instances or more that ran alone."
        ),
        optional("overlapped_ns", "Median duration of instances that ran beside others."),
        column("alone_count", "Number of instances that ran alone."),
        column("overlapped_count", "Number of instances that ran beside others."),
        optional(
            "bound_ns",
            "Without a baseline: lower bound of the time lost, against the instance that "
            "overlapped least.",
        ),
        column("count", "Number of instances."),
        column("time_ns", "Device time of all instances."),
    ),
    title="Contention",
    section="Clocks",
    needs="no kernel whose ideal time is known ran beside another one",
)


def contention(run: Attributed) -> pa.Table:
    """DEVICE_EVENT, PIECE -> CONTENTION: works that ran beside others, most loss first."""
    parts = []
    for rank, factors in run.factors.items():
        works = works_of(run, rank, factors)
        of = factors.contention
        rows = np.flatnonzero(of.overlapped_count > 0)
        bound = np.where(np.isnan(of.baseline_ns), of.bound_ns, np.nan)
        columns = {
            "alone_count": of.alone_count[rows],
            "alone_ns": whole_or_null(of.baseline_ns[rows]),
            "overlapped_count": of.overlapped_count[rows],
            "overlapped_ns": whole_or_null(of.overlapped_ns[rows]),
            "slowdown_ratio": real_or_null(of.ratio[rows]),
            "loss_ns": works.time_in(run.pieces, "compute.contention")[rows],
            "bound_ns": whole_or_null(bound[rows]),
        }
        parts.append(works.table(VIEW, rows, columns))
    table = VIEW.joined(parts)
    return table.sort_by([("loss_ns", "descending"), ("bound_ns", "descending")])
