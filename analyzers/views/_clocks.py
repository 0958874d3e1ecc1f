"""Columns of clocks: at which clock the attributed computing time was spent.

Time is the exclusive computing time of level 1, the same nanoseconds as everywhere. Means and
percentiles are weighted by it, over the kernels whose clock is known.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from chopper.analyzers.causes.clock import CLOCK_LABELS
from chopper.analyzers.events.clocked import Clocked
from chopper.analyzers.events.groups import Groups, Texts, real_or_null, text_rows, whole_or_null
from chopper.analyzers.views import View, column, optional

NO_CLOCKS = (
    "no clock of a computing device was sampled (the collectors `nvml` and `amdsmi` do), or "
    "only at another time"
)
_QUANTILES = {"clock_p5_hz": 0.05, "clock_median_hz": 0.5, "clock_p95_hz": 0.95}
COLUMNS = (
    column("time_ns", "Compute time that these kernels alone account for (level 1)."),
    optional("clock_mean_hz", "Mean SM clock, weighted by time; null where unknown."),
    optional("loss_ns", "Time lost to a clock below the reference; null where a clock is unknown."),
    optional(
        "loss_error_ns", "Error bound of the lost time, from sensitivity and sampling together."
    ),
    optional("clock_p5_hz", "5th percentile of the SM clock, weighted by time."),
    optional("clock_median_hz", "Median SM clock, weighted by time; null where none is known."),
    optional("clock_p95_hz", "95th percentile of the SM clock, weighted by time."),
    optional("power_mean_w", "Mean board power in that time; null where not sampled."),
    optional(
        "power_cap_ratio", "Share of the time under a power limit, where the reason is known."
    ),
    optional("thermal_ratio", "Share of the time under a thermal limit."),
    optional("application_ratio", "Share of the time at a fixed clock."),
    optional(
        "idle_ramp_ratio", "Share of the time in which the clock was still ramping up from idle."
    ),
    optional("host_limited_ratio", "Share of the time without an active throttle reason."),
    optional("unlabelled_ratio", "Share of the time whose reason was not recorded."),
    column("known_ratio", "Share of the time with a known clock."),
    optional("clock_error_hz", "Mean error bound of a kernel's clock, from sampling."),
    optional(
        "sensitivity_ratio", "Mean sensitivity to the clock: 0 none, 1 inversely proportional."
    ),
)
AT_REFERENCE = optional(
    "at_reference_ns", "Time at the reference clock; null where the lost time is."
)


def clock_columns(found: Clocked, groups: Groups) -> dict[str, pa.Array | np.ndarray]:
    """Return the columns of clocks of groups of the sampled events."""
    time, group, size = found.time_ns, groups.of_row, len(groups)
    known = ~np.isnan(found.clock_hz)
    judged = np.bincount(group[found.judged], minlength=size) > 0

    def total(values: np.ndarray) -> pa.Array:
        return pa.array(groups.sum(np.rint(values).astype(np.int64)), mask=~judged)

    clocked = np.bincount(group[known], weights=time[known], minlength=size)
    columns: dict[str, pa.Array | np.ndarray] = {
        "time_ns": groups.sum(time),
        "known_ratio": clocked / np.maximum(groups.sum(time), 1),
        "clock_mean_hz": whole_or_null(groups.mean(found.clock_hz, time)),
        "clock_error_hz": whole_or_null(groups.mean(found.clock_error_hz, time)),
        "power_mean_w": real_or_null(groups.mean(found.power_w, time)),
        "sensitivity_ratio": real_or_null(groups.mean(found.sensitivity, time)),
        "loss_ns": total(found.loss_ns),
        "loss_error_ns": total(found.error_ns),
        "at_reference_ns": total(found.at_reference_ns),
    }
    at = _quantiles(found.clock_hz[known], time[known], group[known], size, _QUANTILES.values())
    columns |= {name: whole_or_null(values) for name, values in zip(_QUANTILES, at, strict=True)}
    named = np.where(known, found.told, 0.0)
    for label, share in zip(CLOCK_LABELS[:-1], found.labels.T, strict=False):
        with np.errstate(invalid="ignore"):
            of_named = np.where(named > 0, share / named, np.nan)
        columns[f"{label}_ratio"] = real_or_null(groups.mean(of_named, time * named))
    unlabelled = groups.mean(np.where(known, 1 - named, np.nan), time)
    return columns | {f"{CLOCK_LABELS[-1]}_ratio": real_or_null(unlabelled)}


def clock_table(view: View, clocked: Clocked, rank: bool = False, **texts: Texts) -> pa.Table:
    """Return the columns of clocks by texts of the sampled events, most time first."""
    ranks = clocked.events.rank[clocked.rows]
    groups = Groups([*([ranks] if rank else []), *(codes for codes, _ in texts.values())])
    columns = {name: text_rows(of, groups.first) for name, of in texts.items()}
    table = view.of({"rank": ranks[groups.first], **columns, **clock_columns(clocked, groups)})
    return table.take(np.argsort(-table["time_ns"].to_numpy(), kind="stable"))


def _quantiles(
    values: np.ndarray,
    weights: np.ndarray,
    group: np.ndarray,
    count: int,
    quantiles: Iterable[float],
) -> list[np.ndarray]:
    """Weighted quantiles of each group: first values at which so much weight is reached."""
    order = np.lexsort((values, group))
    of, ordered = group[order], values[order]
    running = np.cumsum(weights[order].astype(np.float64))
    size = np.bincount(group, minlength=count)
    end = np.cumsum(size)
    begin = end - size
    before = np.concatenate([[0.0], running])[begin]
    whole = np.concatenate([[0.0], running])[end] - before
    found = []
    for quantile in quantiles:
        reached = running >= (before + quantile * whole)[of] * (1 - 1e-12)
        first = np.full(count, np.nan)
        hit = np.flatnonzero(reached)[::-1]
        first[of[hit]] = ordered[hit]
        found.append(first)
    return found
