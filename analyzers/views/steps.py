"""Observed and ideal time, exclusive states and outliers of each step.

The four states sum to the observed time. An outlier is further from its rank's median than 3.5
times 1.4826 × the median absolute deviation (Iglewicz and Hoaglin's modified z-score), and further
than 2 %; with fewer than five steps there are none.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.groups import rows_of, sum_by
from chopper.analyzers.trace.columns import ints, nullable, strings
from chopper.analyzers.views import View, column, optional

_STATES = ("compute", "communication", "copy", "idle")
_SCORE = 3.5
_LEAST_RATIO = 0.02
"""A step within 2 % of the median is no outlier, however steady the others are."""
_LEAST_STEPS = 5

VIEW = View(
    "steps",
    __doc__,
    (
        optional("step", "Step number; null for a whole trace.", "int64"),
        column("rank", "Global rank that the row is about.", "int32"),
        column("observed_ns", "Observed time: length of the step's window."),
        optional("ideal_ns", "Time that the model's math needs at the device's peak."),
        column("compute_ns", "Time in which a compute kernel was running."),
        column(
            "communication_ns", "Exposed communication: no compute kernel ran at the same time."
        ),
        column(
            "copy_ns", "Exposed copies: neither compute nor communication ran at the same time."
        ),
        column("idle_ns", "Time in which nothing ran on the device."),
        optional("outlier", "True for an outlier; null with fewer than five steps.", "bool"),
        optional(
            "micro_steps",
            "Micro-steps of gradient accumulation; null where no trainer tells.",
            "int64",
        ),
        optional(
            "deviation_ratio", "Difference from the rank's median step, relative to that median."
        ),
    ),
    title="Steps",
    section="Steps and host",
)


def steps(run: Attribution) -> pa.Table:
    """PIECE, WINDOW -> STEPS, of all ranks and kinds, by step, then rank."""
    run = run.all_steps
    windows, pieces = run.windows, run.pieces
    size = windows.num_rows
    key = ("rank", "step_index")
    at = rows_of([ints(windows, k) for k in key], [ints(pieces, k) for k in key])
    cause, causes = strings(pieces, "cause")
    state = np.array([_STATES.index(c.partition(".")[0]) for c in causes], dtype=np.int64)[cause]
    time = ints(pieces, "time_ns")
    ideal = cause == (causes.index("compute.ideal") if "compute.ideal" in causes else -2)
    rank, number = ints(windows, "rank"), ints(windows, "number")
    observed = ints(windows, "end_ns") - ints(windows, "start_ns")
    with_peak = [r.rank for r in run.ranks if r.peak_source is not None]
    deviation, outlier = _outliers(observed, rank)
    columns = {
        "step": nullable(number),
        "rank": rank,
        "observed_ns": observed,
        "ideal_ns": pa.array(sum_by(at[ideal], time[ideal], size), mask=~np.isin(rank, with_peak)),
        **{
            f"{name}_ns": sum_by(at[state == i], time[state == i], size)
            for i, name in enumerate(_STATES)
        },
        "outlier": pa.array(outlier, mask=np.isnan(deviation)),
        "deviation_ratio": pa.array(deviation, from_pandas=True),
        "micro_steps": _micro_steps(run, rank, number),
    }
    return VIEW.of(columns).take(np.lexsort((rank, number)))


def _micro_steps(run: Attribution, rank: np.ndarray, number: np.ndarray) -> pa.Array:
    counts = np.full(len(rank), -1)
    for one in np.unique(rank).tolist():
        step, mine = run.recording.table(one, "step"), rank == one
        at = rows_of([ints(step, "number")], [number[mine]])
        counts[mine] = np.append(ints(step, "micro_steps"), -1)[at]
    return nullable(counts)


def _outliers(observed: np.ndarray, rank: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(difference to the rank's median step as a ratio, whether it stands out) per window."""
    deviation = np.full(len(observed), np.nan)
    outlier = np.zeros(len(observed), dtype=bool)
    for one in np.unique(rank):
        mine = np.flatnonzero(rank == one)
        if len(mine) < _LEAST_STEPS:
            continue
        time = observed[mine].astype(np.float64)
        median = np.median(time)
        away = time - median
        spread = 1.4826 * np.median(np.abs(away))
        deviation[mine] = away / median
        outlier[mine] = (np.abs(away) > _SCORE * spread) & (np.abs(away) > _LEAST_RATIO * median)
    return deviation, outlier
