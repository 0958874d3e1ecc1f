"""Each step at a glance: observed, ideal, the exclusive states, and whether it stands out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.columns import ints, strings
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.attribution import Attribution

_STATES = ("compute", "communication", "copy", "idle")
_SCORE = 3.5
_LEAST_RATIO = 0.02
"""A step within 2 % of the median is no outlier, however steady the others are."""
_LEAST_STEPS = 5


def steps(attribution: Attribution) -> pa.Table:
    """Step windows of all ranks and kinds, by step, then rank. PIECE, WINDOW -> STEPS.

    The four states sum to the observed time. An outlier is further from its rank's median than 3.5
    times 1.4826 × the median absolute deviation (Iglewicz and Hoaglin's modified z-score), and
    further than 2 %; with fewer than five steps none is told.
    """
    attribution = attribution.whole
    windows, pieces = attribution.windows, attribution.pieces
    count = windows.num_rows
    if not count:
        return TABLES["steps"].empty()
    rank, step = ints(windows, "rank"), ints(windows, "step_index")
    width = int(step.max()) + 1
    place = rank * width + step
    order = np.argsort(place)
    at = order[
        np.searchsorted(place[order], ints(pieces, "rank") * width + ints(pieces, "step_index"))
    ]
    cause, causes = strings(pieces, "cause")
    state = np.array([_STATES.index(c.partition(".")[0]) for c in causes], dtype=np.int64)[cause]
    time = ints(pieces, "time_ns")
    by_state = np.zeros((count, len(_STATES)), dtype=np.int64)
    np.add.at(by_state, (at, state), time)
    ideal = np.zeros(count, dtype=np.int64)
    if "compute.ideal" in causes:
        mine = cause == causes.index("compute.ideal")
        np.add.at(ideal, at[mine], time[mine])
    observed = ints(windows, "end_ns") - ints(windows, "start_ns")
    peaks = {r.rank: r.peak_source is not None for r in attribution.ranks}
    has_peak = np.array([peaks.get(int(r), False) for r in rank])
    deviation, outlier = _outliers(observed, rank)
    number = ints(windows, "number")
    order = np.lexsort((rank, number))
    columns = {
        "step": pa.array(number, mask=number == -1),
        "rank": pa.array(rank.astype(np.int32)),
        "observed_ns": pa.array(observed),
        "ideal_ns": pa.array(ideal, mask=~has_peak),
        **{f"{name}_ns": pa.array(by_state[:, i]) for i, name in enumerate(_STATES)},
        "outlier": pa.array(outlier, mask=np.isnan(deviation)),
        "deviation_ratio": pa.array(deviation, from_pandas=True),
    }
    declared = TABLES["steps"]
    table = pa.table([columns[f.name] for f in declared.arrow], schema=declared.arrow)
    return table.take(pa.array(order))


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
