"""Device events of all ranks inside their step windows, as arrays that views group by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.clock import CLOCK_LABELS
from chopper.analyzers.events.groups import Texts, real_or_null, reals, time_in
from chopper.analyzers.trace.columns import dictionary, ints, strings
from chopper.tables import TABLES

_INTEGERS = (
    *("rank", "row", "start_ns", "dur_ns", "device_id", "stream_id", "launch_row", "op_row"),
)
_TEXTS = ("kernel", "op", "phase", "work_class", "dtype")
_REALS = ("work_flop", "work_bytes", "ideal_ns", "roofline_ns")
_FLAGS = ("math", "modelled")
_TABLE = TABLES["step_event"]


@dataclass(frozen=True)
class Events:
    """Device events of all ranks that lie in a step window, rank after rank, each in its order.

    Attributes:
        row, step: row in that rank's `device_event`, and index of its window.
        launch_row, op_row: rows of that rank's `host_span`, -1 where there is none.
        kernel, op, phase, work_class: codes and values; code -1 is null.
        work_flop, work_bytes, ideal_ns, roofline_ns: of the work model, NaN where unknown.
        math, modelled: model math (a product, convolution or attention); it or memory-bound work.
        dtype: codes and values of the arithmetic, values in alphabetical order; -1 is unknown.
        table: the same as the table `step_event`.
    """

    rank: np.ndarray
    row: np.ndarray
    step: np.ndarray
    start_ns: np.ndarray
    dur_ns: np.ndarray
    device_id: np.ndarray
    stream_id: np.ndarray
    launch_row: np.ndarray
    op_row: np.ndarray
    kernel: Texts
    op: Texts
    phase: Texts
    work_class: Texts
    work_flop: np.ndarray
    work_bytes: np.ndarray
    ideal_ns: np.ndarray
    roofline_ns: np.ndarray
    math: np.ndarray
    modelled: np.ndarray
    dtype: Texts
    table: pa.Table

    def __len__(self) -> int:
        return len(self.row)


def of_class(events: Events, work_class: str) -> np.ndarray:
    """Return the mask of the events of a work class: compute, communication or copy."""
    codes, names = events.work_class
    return codes == (names.index(work_class) if work_class in names else -2)


def events_of(run: Attribution) -> Events:
    """Return the device events of an attributed run inside its windows."""
    table = _TABLE.joined([_of_rank(run, rank) for rank in run.recording.ranks])
    columns: dict[str, Any] = {name: ints(table, name) for name in _INTEGERS}
    columns |= {"step": ints(table, "step_index"), "table": table}
    columns |= {name: strings(table, name) for name in _TEXTS}
    columns |= {name: reals(table, name) for name in _REALS}
    columns |= {name: table[name].to_numpy() for name in _FLAGS}
    codes, names = columns["dtype"]
    number = np.append(np.argsort(np.argsort(names)), -1).astype(np.int64)
    return Events(**columns | {"dtype": (number[codes], sorted(names))})


def _of_rank(run: Attribution, rank: int) -> pa.Table:
    """One row per event of the rank inside a step window. -> STEP_EVENT."""
    links = run.links.get(rank)
    if links is None or not links.num_rows:
        return _TABLE.empty()
    events = run.joined[rank].device_event
    work = run.work.get(rank)
    row = np.flatnonzero(links["step_index"].is_valid().to_numpy())
    linked = (
        *("step_index", "launch_row", "op_row", "op", "phase", "layer", "work_class"),
        *("stage_index", "micro_batch_index", "action"),
    )
    recorded = ("start_ns", "dur_ns", "device_id", "stream_id")
    columns = {
        "rank": np.full(len(row), rank),
        "row": row,
        "kernel": events["name"].take(row),
        **{name: links[name].take(row) for name in linked},
        **{name: events[name].take(row) for name in recorded},
    }
    if work is None:
        no = np.zeros(len(row), dtype=np.bool_)
        columns |= {"math": no, "modelled": no, "dtype": dictionary(np.full(len(row), -1), [])}
        columns |= {name: pa.nulls(len(row), pa.float64()) for name in _REALS}
    else:
        columns |= {
            "math": work.math[row],
            "modelled": (work.math | work.vector)[row],
            "dtype": dictionary(work.dtype[row], work.dtypes),
            **{name: real_or_null(getattr(work, name)[row]) for name in _REALS},
        }
    return _TABLE.of(columns)


def arguments(run: Attribution, events: Events, rows: np.ndarray, name: str) -> Texts:
    """Return a column of `host_span` of the operators of events, -1 for none."""
    found = np.full(len(rows), -1, dtype=np.int64)
    number: dict[str, int] = {}
    for rank in np.unique(events.rank[rows]).tolist():
        codes, values = strings(run.joined[rank].host_span, name)
        at = np.flatnonzero((events.rank[rows] == rank) & (events.op_row[rows] >= 0))
        if len(at) and values:
            common = np.array([number.setdefault(v, len(number)) for v in values] + [-1])
            found[at] = common[codes[events.op_row[rows[at]]]]
    return found, list(number)


_ROUNDING = 1e-9


@dataclass(frozen=True)
class Clocked:
    """Computing events with exclusive time on devices that were sampled.

    Attributes:
        events: all events; ``rows`` picks those.
        time_ns: exclusive time of each.
        loss_ns, error_ns: attributed clock loss, and how far it may be off.
        at_reference_ns: the time at the reference clock; as it is where that is not known.
        judged: mask of the rows whose clock and reference are both known.
        clock_hz, clock_error_hz, power_w, sensitivity, sensitivity_error: NaN where not known.
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
    sensitivity_error: np.ndarray
    labels: np.ndarray
    told: np.ndarray

    def texts(self, name: str) -> Texts:
        """Return a column of texts of the events in ``rows``."""
        codes, values = getattr(self.events, name)
        return codes[self.rows], values


def clocked_of(run: Attribution, events: Events) -> Clocked | None:
    """Return the sampled computing events of a run, None without samples."""
    sampled = [r for r, f in run.factors.items() if f.clocks.readers]
    if not sampled:
        return None
    time = time_in(run.pieces, events.rank, events.row, "compute.")
    loss = time_in(run.pieces, events.rank, events.row, "compute.clock.")
    rows = np.flatnonzero(np.isin(events.rank, sampled) & (time > 0))
    clock = np.full(len(events), np.nan)
    error, power = clock.copy(), clock.copy()
    sensitivity, sensitivity_error = clock.copy(), clock.copy()
    slower, unsure = np.zeros(len(events)), np.zeros(len(events))
    labels, told = np.zeros((len(events), len(CLOCK_LABELS))), np.zeros(len(events))
    judged = np.zeros(len(events), dtype=bool)
    for rank in sampled:
        mine = rows[events.rank[rows] == rank]
        factors, of = run.factors[rank], events.row[mine]
        clock[mine] = factors.clocks.clock_hz[of]
        error[mine] = factors.clocks.error_hz[of]
        sensitivity[mine] = factors.sensitivity[of]
        sensitivity_error[mine] = factors.sensitivity_error[of]
        ln = np.log(factors.reference_hz[of] / clock[mine])
        judged[mine] = np.isfinite(ln)
        slower[mine] = np.nan_to_num(sensitivity[mine] * ln)
        relative = error[mine] / clock[mine]
        with np.errstate(divide="ignore", invalid="ignore"):
            share = sensitivity_error[mine] / sensitivity[mine] + relative / ln
        unsure[mine] = np.where(np.isfinite(share), share, 0.0)
        for device, series in factors.clocks.readers.items():
            some = mine[(events.device_id[mine] == device) & ~np.isnan(clock[mine])]
            at = series.locate(events.start_ns[some], (events.start_ns + events.dur_ns)[some])
            power[some] = series.mean_power(at)
            labels[some], read = series.label_time(at)
            share = read - labels[some, -1]
            # Without what rounding left of none and of all.
            share[share > 1 - _ROUNDING] = 1.0
            told[some] = np.where(share < _ROUNDING, 0.0, share)
    return Clocked(
        events=events,
        rows=rows,
        time_ns=time[rows],
        loss_ns=loss[rows],
        error_ns=loss[rows] * unsure[rows],
        at_reference_ns=time[rows] * np.exp(-slower[rows]),
        judged=judged[rows],
        clock_hz=clock[rows],
        clock_error_hz=error[rows],
        power_w=power[rows],
        sensitivity=sensitivity[rows],
        sensitivity_error=sensitivity_error[rows],
        labels=labels[rows],
        told=told[rows],
    )
