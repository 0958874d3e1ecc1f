"""SM clock by step, and the step's time at the reference clock.

The step would be shorter by the time that kernels lost below the reference clock (longer if they
ran above it), with idle time and communication unchanged.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.clocked import clocked_of
from chopper.analyzers.events.device import events_of
from chopper.analyzers.events.groups import Groups, rows_of
from chopper.analyzers.trace.columns import ints, nullable
from chopper.analyzers.views import View, column, optional
from chopper.analyzers.views._clocks import COLUMNS, NO_CLOCKS, clock_columns

VIEW = View(
    "clock_by_step",
    __doc__,
    (
        column("rank", "Global rank that the row is about.", "int32"),
        optional("number", "Step number; null for a whole trace.", "int64"),
        column("observed_ns", "Observed time: length of the step's window."),
        optional(
            "at_reference_ns",
            "Length of the step at the reference clock; null where the lost time is.",
        ),
        *COLUMNS,
    ),
    title="Clocks by step",
    section="Clocks",
    needs=NO_CLOCKS,
)


def clock_by_step(run: Attributed) -> pa.Table:
    """PIECE, WINDOW, DEVICE_CLOCK -> CLOCK_BY_STEP, steps of all kinds, in order."""
    run = run.whole
    found = clocked_of(run, events_of(run))
    if found is None:
        return VIEW.empty()
    rank, step = found.events.rank[found.rows], found.events.step[found.rows]
    groups = Groups([rank, step])
    columns = clock_columns(found, groups)
    windows = run.windows
    keys = [ints(windows, name) for name in ("rank", "step_index")]
    at = rows_of(keys, [rank[groups.first], step[groups.first]])
    observed = (ints(windows, "end_ns") - ints(windows, "start_ns"))[at]
    reference = pa.array(columns["at_reference_ns"])
    known = np.asarray(reference.is_valid())
    saved = np.asarray(columns["time_ns"]) - np.asarray(reference.fill_null(0))
    columns |= {
        "rank": rank[groups.first],
        "number": nullable(ints(windows, "number")[at]),
        "observed_ns": observed,
        "at_reference_ns": pa.array(observed - saved, mask=~known),
    }
    return VIEW.of(columns)
