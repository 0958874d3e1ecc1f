"""Kernels that overlapped others, compared with the same work alone, normalized to one clock.

Without a baseline, the lost time is a bound relative to the instance with the least overlap.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.groups import real_or_null, whole_or_null
from chopper.analyzers.views import View, column, optional
from chopper.analyzers.views._works import COLUMNS, Columns, Works, works_table

VIEW = View(
    "contention",
    __doc__,
    (
        *COLUMNS,
        optional("slowdown_ratio", "Mean duration with overlap over the baseline."),
        column("loss_ns", "Time attributed to contention; 0 where the slowdown is within noise."),
        optional(
            "alone_ns", "Baseline: median duration alone; null with fewer than three instances."
        ),
        optional("overlapped_ns", "Median duration of the instances with overlap."),
        column("alone_count", "Number of instances that ran alone."),
        column("overlapped_count", "Number of instances with overlap."),
        optional("bound_ns", "Lower bound of the lost time; null where there is a baseline."),
        column("count", "Number of instances."),
        column("time_ns", "Device time of all instances."),
    ),
    title="Contention",
    section="Clocks",
    needs="no kernel with a known ideal time overlapped another one",
)


def contention(run: Attribution) -> pa.Table:
    """DEVICE_EVENT, PIECE -> CONTENTION: works that ran beside others, most loss first."""
    table = works_table(VIEW, run, _columns)
    return table.sort_by([("loss_ns", "descending"), ("bound_ns", "descending")])


def _columns(works: Works) -> Columns:
    of = works.factors.contention
    return of.overlapped_count > 0, {
        "alone_count": of.alone_count,
        "alone_ns": whole_or_null(of.baseline_ns),
        "overlapped_count": of.overlapped_count,
        "overlapped_ns": whole_or_null(of.overlapped_ns),
        "slowdown_ratio": real_or_null(of.ratio),
        "loss_ns": works.time_in("compute.contention"),
        "bound_ns": whole_or_null(np.where(np.isnan(of.baseline_ns), of.bound_ns, np.nan)),
    }
