"""Clocks by phase, operator and step: at which clock the attributed computing time was spent.

Time is the exclusive computing time of level 1, the same nanoseconds as everywhere. Means and
percentiles are weighted by it, over the kernels whose clock is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.causes.clock import CLOCK_LABELS
from chopper.analyzers.trace.columns import dictionary, ints, nullable, strings
from chopper.analyzers.views.events import group_of, of_run
from chopper.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from chopper.analyzers.views.events import Events
    from chopper.attribution import Attribution

_KEY = "analyzers.clock_views"
_ROUNDING = 1e-9
_QUANTILES = {"clock_p5_hz": 0.05, "clock_median_hz": 0.5, "clock_p95_hz": 0.95}


def clock_by_phase(attribution: Attribution) -> pa.Table:
    """Clocks of each rank's phases, most time first. PIECE, DEVICE_CLOCK -> CLOCK_BY_PHASE."""
    made_of = clocked(attribution)
    if made_of is None:
        return TABLES["clock_by_phase"].empty()
    codes, phases = made_of.events.phase
    return made_of.table(
        "clock_by_phase", {"rank": made_of.events.rank, "phase": (codes, phases)}, by_time=True
    )


def clock_by_operator(attribution: Attribution) -> pa.Table:
    """Clocks of each operator's kernels over all ranks. PIECE, DEVICE_CLOCK -> CLOCK_BY_OPERATOR."""
    made_of = clocked(attribution)
    if made_of is None:
        return TABLES["clock_by_operator"].empty()
    return made_of.table("clock_by_operator", {"op": made_of.events.op}, by_time=True)


def clock_by_kernel(attribution: Attribution) -> pa.Table:
    """Clocks of each work, by operator, shapes and kernel. PIECE, DEVICE_CLOCK -> CLOCK_BY_KERNEL."""
    from chopper.analyzers.views.overlap import input_dims

    made_of = clocked(attribution)
    if made_of is None:
        return TABLES["clock_by_kernel"].empty()
    events = made_of.events
    dims = np.full(len(events), -1, dtype=np.int64)
    dims[made_of.rows], texts = input_dims(attribution, events, made_of.rows)
    keys = {"op": events.op, "input_dims": (dims, texts), "kernel": events.kernel}
    return made_of.table("clock_by_kernel", keys, by_time=True)


def clock_by_step(attribution: Attribution) -> pa.Table:
    """Clocks of each rank's steps, of all kinds. PIECE, WINDOW, DEVICE_CLOCK -> CLOCK_BY_STEP."""
    attribution = attribution.whole
    made_of = clocked(attribution)
    if made_of is None:
        return TABLES["clock_by_step"].empty()
    events = made_of.events
    made = made_of.table("clock_by_step", {"rank": events.rank, "step_index": events.step})
    windows = attribution.windows
    width = int(ints(windows, "step_index").max(initial=0)) + 1
    place = ints(windows, "rank") * width + ints(windows, "step_index")
    order = np.argsort(place)
    at = order[np.searchsorted(place[order], ints(made, "rank") * width + ints(made, "step_index"))]
    observed = (ints(windows, "end_ns") - ints(windows, "start_ns"))[at]
    reference = made["at_reference_ns"].combine_chunks()
    saved = ints(made, "time_ns") - ints(made, "at_reference_ns")
    made = made.drop_columns(["step_index", "at_reference_ns"])
    for name, values in (
        ("number", nullable(ints(windows, "number")[at])),
        ("observed_ns", pa.array(observed)),
        ("at_reference_ns", pa.array(observed - saved, mask=~reference.is_valid().to_numpy(False))),
    ):
        made = made.append_column(name, values)
    declared = TABLES["clock_by_step"]
    return made.select(declared.arrow.names).cast(declared.arrow)


@dataclass(frozen=True)
class Clocked:
    """Computing events with exclusive time on devices that were sampled.

    Attributes:
        events: all events; ``rows`` picks those.
        time_ns: exclusive time of each.
        loss_ns, error_ns: attributed clock loss, and how far it may be off.
        at_reference_ns: the time at the reference clock; as it is where that is not known.
        judged: mask of the rows whose clock and reference are both known.
        clock_hz, clock_error_hz, power_w, sensitivity: NaN where not known.
        labels: (rows, labels) share of the time under each, of what is ``told``.
        told: share of the time whose reason the readings name.
    """

    events: Events
    rows: np.ndarray
    time_ns: np.ndarray
    loss_ns: np.ndarray
    error_ns: np.ndarray
    at_reference_ns: np.ndarray
    judged: np.ndarray
    clock_hz: np.ndarray
    clock_error_hz: np.ndarray
    power_w: np.ndarray
    sensitivity: np.ndarray
    labels: np.ndarray
    told: np.ndarray

    def table(
        self,
        name: str,
        keys: Mapping[str, np.ndarray | tuple[np.ndarray, list[str]]],
        *,
        by_time: bool = False,
    ) -> pa.Table:
        """One row per distinct key."""
        codes = [(k[0] if isinstance(k, tuple) else k)[self.rows] for k in keys.values()]
        group, first = group_of(codes)
        count = len(first)
        time = np.bincount(group, weights=self.time_ns, minlength=count)
        order = np.argsort(-time, kind="stable") if by_time else np.arange(count)
        known = ~np.isnan(self.clock_hz)

        judged = np.bincount(group[self.judged], minlength=count) > 0

        def total(values: np.ndarray, *, of_judged: bool = True) -> pa.Array:
            summed = np.zeros(count, dtype=np.int64)
            np.add.at(summed, group, np.rint(values).astype(np.int64))
            return pa.array(summed[order], mask=~judged[order] if of_judged else None)

        def mean(values: np.ndarray, weights: np.ndarray = self.time_ns) -> np.ndarray:
            some = ~np.isnan(values)
            weight = weights[some].astype(np.float64)
            whole = np.bincount(group[some], weights=weight, minlength=count)
            summed = np.bincount(group[some], weights=weight * values[some], minlength=count)
            means: np.ndarray = np.full(count, np.nan)
            np.divide(summed, whole, out=means, where=whole > 0)
            return means[order]

        clocked = np.bincount(group[known], weights=self.time_ns[known], minlength=count)
        columns: dict[str, pa.Array] = {
            "time_ns": total(self.time_ns, of_judged=False),
            "known_ratio": pa.array((clocked / np.maximum(time, 1))[order]),
            "clock_mean_hz": _hertz(mean(self.clock_hz)),
            "clock_error_hz": _hertz(mean(self.clock_error_hz)),
            "power_mean_w": _real(mean(self.power_w)),
            "sensitivity_ratio": _real(mean(self.sensitivity)),
            "loss_ns": total(self.loss_ns),
            "loss_error_ns": total(self.error_ns),
            "at_reference_ns": total(self.at_reference_ns),
        }
        at = _quantiles(
            self.clock_hz[known], self.time_ns[known], group[known], count, _QUANTILES.values()
        )
        columns |= {q: _hertz(values[order]) for q, values in zip(_QUANTILES, at, strict=True)}
        named = np.where(known, self.told, 0.0)
        for label, share in zip(CLOCK_LABELS[:-1], self.labels.T, strict=False):
            with np.errstate(invalid="ignore"):
                of_named = np.where(named > 0, share / named, np.nan)
            columns[f"{label}_ratio"] = _real(mean(of_named, self.time_ns * named))
        columns[f"{CLOCK_LABELS[-1]}_ratio"] = _real(mean(np.where(known, 1 - named, np.nan)))
        for key, values in keys.items():
            if isinstance(values, tuple):
                columns[key] = dictionary(values[0][self.rows][first][order], values[1])
            else:
                columns[key] = pa.array(values[self.rows][first][order])
        declared = TABLES[name].arrow
        if "step_index" in keys:
            return pa.table(columns)
        return pa.Table.from_arrays(
            [columns[f.name].cast(f.type) for f in declared], schema=declared
        )


def clocked(attribution: Attribution) -> Clocked | None:
    """The sampled computing events of a run; None without samples. Joined once, then kept."""
    cache = attribution._cache
    if _KEY not in cache:
        cache[_KEY] = _join(attribution)
    found: Clocked | None = cache[_KEY]
    return found


def _join(attribution: Attribution) -> Clocked | None:
    """All ranks with clock samples; None when there is none."""
    events = of_run(attribution)
    sampled = [r for r, f in attribution.factors.items() if f.clocks.readers]
    if not sampled:
        return None
    time, loss = _pieces(attribution, events)
    rows = np.flatnonzero(np.isin(events.rank, sampled) & (time > 0))
    clock = np.full(len(events), np.nan)
    error, power, sensitivity = clock.copy(), clock.copy(), clock.copy()
    slower, unsure = np.zeros(len(events)), np.zeros(len(events))
    labels, told = np.zeros((len(events), len(CLOCK_LABELS))), np.zeros(len(events))
    judged = np.zeros(len(events), dtype=bool)
    for rank in sampled:
        mine = rows[events.rank[rows] == rank]
        factors, of = attribution.factors[rank], events.row[mine]
        clock[mine] = factors.clocks.clock_hz[of]
        error[mine] = factors.clocks.error_hz[of]
        sensitivity[mine] = factors.sensitivity[of]
        ln = np.log(factors.reference_hz[of] / clock[mine])
        judged[mine] = np.isfinite(ln)
        slower[mine] = np.nan_to_num(sensitivity[mine] * ln)
        relative = error[mine] / clock[mine]
        with np.errstate(divide="ignore", invalid="ignore"):
            share = factors.sensitivity_error[of] / sensitivity[mine] + relative / ln
        unsure[mine] = np.where(np.isfinite(share), share, 0.0)
        for device, series in factors.clocks.readers.items():
            some = mine[(events.device_id[mine] == device) & ~np.isnan(clock[mine])]
            at = series.place(events.start_ns[some], (events.start_ns + events.dur_ns)[some])
            power[some] = series.mean_power(at)
            labels[some], read = series.label_time(at)
            told[some] = _share(read - labels[some, -1])
    return Clocked(
        events,
        rows,
        time[rows],
        loss[rows],
        loss[rows] * unsure[rows],
        time[rows] * np.exp(-slower[rows]),
        judged[rows],
        clock[rows],
        error[rows],
        power[rows],
        sensitivity[rows],
        labels[rows],
        told[rows],
    )


def _pieces(attribution: Attribution, events: Events) -> tuple[np.ndarray, np.ndarray]:
    """Exclusive computing time of each event, and its attributed clock loss."""
    pieces = attribution.pieces
    codes, causes = strings(pieces, "cause")
    rank, row, time_ns = ints(pieces, "rank"), ints(pieces, "event_row"), ints(pieces, "time_ns")
    width = int(row.max(initial=0)) + 1
    place = events.rank * width + events.row
    order = np.argsort(place, kind="stable")
    found = []
    for prefix in ("compute.", "compute.clock."):
        wanted = np.array([cause.startswith(prefix) for cause in causes])[codes] & (row >= 0)
        asked = rank[wanted] * width + row[wanted]
        at = np.minimum(np.searchsorted(place[order], asked), max(len(order) - 1, 0))
        hit = place[order[at]] == asked if len(order) else np.zeros(len(asked), dtype=bool)
        summed = np.zeros(len(events), dtype=np.int64)
        np.add.at(summed, order[at[hit]], time_ns[wanted][hit])
        found.append(summed)
    return found[0], found[1]


def _quantiles(
    values: np.ndarray,
    weights: np.ndarray,
    group: np.ndarray,
    count: int,
    quantiles: Iterable[float],
) -> list[np.ndarray]:
    """Weighted quantiles of each group: the first value at which so much of the weight is reached."""
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


def _share(values: np.ndarray) -> np.ndarray:
    """Shares without what rounding left of none and of all."""
    found: np.ndarray = np.where(
        values < _ROUNDING, 0.0, np.where(values > 1 - _ROUNDING, 1.0, values)
    )
    return found


def _hertz(values: np.ndarray) -> pa.Array:
    unknown = np.isnan(values)
    return pa.array(np.rint(np.where(unknown, 0, values)).astype(np.int64), mask=unknown)


def _real(values: np.ndarray) -> pa.Array:
    return pa.array(values, mask=np.isnan(values))
