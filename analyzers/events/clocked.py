"""Computing events with the clock, power and limits of the device while they ran."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.clock import CLOCK_LABELS
from chopper.analyzers.events.device import Events
from chopper.analyzers.events.groups import Texts, time_in

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
