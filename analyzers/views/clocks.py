"""The view of clocks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.clock import CLOCK_LABELS
from chopper.analyzers.events.device import Clocked, arguments, clocked_of, events_of
from chopper.analyzers.events.groups import (
    Groups,
    Texts,
    real_or_null,
    rows_of,
    text_rows,
    whole_or_null,
)
from chopper.analyzers.trace.columns import ints, nullable, strings
from chopper.analyzers.views import Rows, view
from chopper.tables import TABLES

_QUANTILES = {"clock_p5_hz": 0.05, "clock_median_hz": 0.5, "clock_p95_hz": 0.95}


@view
def clocks(run: Attribution, clocked: Clocked | None) -> Rows:
    """SM clock, power and throttle reasons by rank, phase, layer, operator, step and kernel.

    Each level covers the same compute time: the exclusive time of level 1. Means and percentiles
    are weighted by it, over the kernels whose clock is known. Power is the board's while the
    kernels ran, not the kernels' own: the sensor averages over many of them.

    A step at the reference clock would be shorter by the time that its kernels lost below it
    (longer if they ran above it), with idle time and communication unchanged.

    title: Clocks
    section: Clocks
    needs: no clock of a computing device was sampled (the collectors `nvml` and `amdsmi` do), or
        only at another time
    columns:
      level: What the row is about: rank, phase, layer, op, step or kernel.
      rank, int32, null: Global rank; null for a row about all ranks.
      number, int64, null: Step number; null for other levels and for a whole trace.
      name, null: Phase, layer, operator or kernel as recorded; null where there is none.
      time_ns: Compute time that these kernels alone account for (level 1).
      clock_mean_hz, null: Mean SM clock, weighted by time; null where unknown.
      loss_ns, null: Time lost to a clock below the reference; null if a clock is unknown.
      loss_error_ns, null: Error bound of the lost time, from sensitivity and sampling.
      observed_ns, null: Length of the step's window; null for other levels.
      at_reference_ns, null: Length of the step, or compute time of other levels, at the reference
        clock; null where the lost time is.
      clock_p5_hz, null: 5th percentile of the SM clock, weighted by time.
      clock_median_hz, null: Median SM clock, weighted by time; null where none is known.
      clock_p95_hz, null: 95th percentile of the SM clock, weighted by time.
      power_mean_w, null: Mean board power in that time; null where not sampled.
      power_cap_ratio, null: Share of the time under a power limit, where the reason is known.
      thermal_ratio, null: Share of the time under a thermal limit.
      application_ratio, null: Share of the time at a fixed clock.
      idle_ramp_ratio, null: Share of the time in which the clock ramped up from idle.
      host_limited_ratio, null: Share of the time without an active throttle reason.
      internal_limit_ratio, null: Share of the time in which power or temperature contradicted the
        driver's reason.
      unlabelled_ratio, null: Share of the time whose reason was not recorded.
      known_ratio: Share of the time with a known clock.
      clock_error_hz, null: Mean error bound of a kernel's clock, from sampling.
      sensitivity_ratio, null: Mean sensitivity to the clock: 0 none, 1 inversely proportional.
      sensitivity_error_ratio, null: Mean standard error of a kernel's sensitivity.
      op, null: Operator of a kernel; null for other levels and without one.
      input_dims, null: Shapes of that operator's inputs, JSON as recorded.
    """
    if clocked is None:
        return clocks.view.empty()
    whole = run.all_steps
    of_steps = clocked if whole is run else clocked_of(whole, events_of(whole))
    dims = arguments(run, clocked.events, clocked.rows, "input_dims")
    op, kernel = clocked.texts("op"), clocked.texts("kernel")
    return clocks.view.joined(
        [
            _level("rank", clocked, by_rank=True),
            _level("phase", clocked, clocked.texts("phase"), by_rank=True),
            _level("layer", clocked, _layers(run, clocked)),
            _level("op", clocked, op),
            _steps(whole, of_steps) if of_steps is not None else clocks.view.empty(),
            _level("kernel", clocked, kernel, op=op, input_dims=dims),
        ]
    )


def _level(
    level: str, clocked: Clocked, name: Texts | None = None, *, by_rank: bool = False, **also: Texts
) -> pa.Table:
    """Return the rows of one level, most time first."""
    texts = also if name is None else {**also, "name": name}
    ranks = clocked.events.rank[clocked.rows]
    groups = Groups([*([ranks] if by_rank else []), *(codes for codes, _ in texts.values())])
    columns = {name: text_rows(of, groups.first) for name, of in texts.items()}
    if by_rank:
        columns["rank"] = ranks[groups.first]
    table = _table(level, columns | _columns(clocked, groups))
    return table.take(np.argsort(-table["time_ns"].to_numpy(), kind="stable"))


def _steps(run: Attribution, clocked: Clocked) -> pa.Table:
    rank, step = (of[clocked.rows] for of in (clocked.events.rank, clocked.events.step))
    groups = Groups([rank, step])
    columns = _columns(clocked, groups)
    windows = run.windows
    keys = [ints(windows, name) for name in ("rank", "step_index")]
    window = rows_of(keys, [rank[groups.first], step[groups.first]])
    observed = (ints(windows, "end_ns") - ints(windows, "start_ns"))[window]
    reference = pa.array(columns["at_reference_ns"])
    saved = np.asarray(columns["time_ns"]) - np.asarray(reference.fill_null(0))
    columns |= {
        "rank": rank[groups.first],
        "number": nullable(ints(windows, "number")[window]),
        "observed_ns": observed,
        "at_reference_ns": pa.array(observed - saved, mask=~np.asarray(reference.is_valid())),
    }
    return _table("step", columns)


def _table(level: str, columns: dict[str, pa.Array | np.ndarray]) -> pa.Table:
    size = len(columns["time_ns"])
    absent = {c.name: pa.nulls(size) for c in clocks.view.columns if c.nullable}
    return clocks.view.of(absent | {"level": [level] * size} | columns)


def _layers(run: Attribution, clocked: Clocked) -> Texts:
    """Return the layer of each sampled event; code -1 is null."""
    events, rows = clocked.events, clocked.rows
    none = TABLES["event_link"].empty().select(["layer"])
    parts = [
        run.links[rank].select(["layer"]).take(events.row[rows[events.rank[rows] == rank]])
        for rank in np.unique(events.rank[rows]).tolist()
    ]
    return strings(pa.concat_tables([none, *parts]), "layer")


def _columns(clocked: Clocked, groups: Groups) -> dict[str, pa.Array | np.ndarray]:
    """Return time, clock, loss, power and reasons of each group of the sampled events."""
    time, group, size = clocked.time_ns, groups.of_row, len(groups)
    known = ~np.isnan(clocked.clock_hz)
    judged = np.bincount(group[clocked.judged], minlength=size) > 0

    def total(values: np.ndarray) -> pa.Array:
        return pa.array(groups.sum(np.rint(values).astype(np.int64)), mask=~judged)

    known_ns = np.bincount(group[known], weights=time[known], minlength=size)
    columns: dict[str, pa.Array | np.ndarray] = {
        "time_ns": groups.sum(time),
        "known_ratio": known_ns / np.maximum(groups.sum(time), 1),
        "clock_mean_hz": whole_or_null(groups.mean(clocked.clock_hz, time)),
        "clock_error_hz": whole_or_null(groups.mean(clocked.clock_error_hz, time)),
        "power_mean_w": real_or_null(groups.mean(clocked.power_w, time)),
        "sensitivity_ratio": real_or_null(groups.mean(clocked.sensitivity, time)),
        "sensitivity_error_ratio": real_or_null(groups.mean(clocked.sensitivity_error, time)),
        "loss_ns": total(clocked.loss_ns),
        "loss_error_ns": total(clocked.error_ns),
        "at_reference_ns": total(clocked.at_reference_ns),
    }
    at = _quantiles(clocked.clock_hz[known], time[known], group[known], size, _QUANTILES.values())
    columns |= {name: whole_or_null(values) for name, values in zip(_QUANTILES, at, strict=True)}
    named = np.where(known, clocked.told, 0.0)
    for label, share in zip(CLOCK_LABELS[:-1], clocked.labels.T, strict=False):
        with np.errstate(invalid="ignore"):
            of_named = np.where(named > 0, share / named, np.nan)
        columns[f"{label}_ratio"] = real_or_null(groups.mean(of_named, time * named))
    unlabelled = groups.mean(np.where(known, 1 - named, np.nan), time)
    return columns | {f"{CLOCK_LABELS[-1]}_ratio": real_or_null(unlabelled)}


def _quantiles(
    values: np.ndarray,
    weights: np.ndarray,
    group: np.ndarray,
    count: int,
    quantiles: Iterable[float],
) -> list[np.ndarray]:
    """Return weighted quantiles of each group: the first values that reach so much weight."""
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
