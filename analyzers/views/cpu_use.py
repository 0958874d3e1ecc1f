"""What the host's cores did in each step and phase, from samples.

As the Chopper paper counts: *active cores* were busy at all in a sample, *minimum cores* are the
cores that the same work would fill (Σ busy share). Both are means over time. A sample tells the
time since the one before it, so a span is only looked into when it is as long as that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.columns import ints, strings
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.attribution import Attribution

_COVERED_RATIO = 0.5
"""Least share of a span that samples must cover before they speak for it."""


@dataclass(frozen=True)
class _Sampled:
    """A quantity that holds from each sample back to the one before, integrated over time."""

    zero_ns: int
    time_ns: np.ndarray
    integral: np.ndarray
    covered: np.ndarray
    period_ns: float

    def mean(self, start_ns: np.ndarray, end_ns: np.ndarray) -> float | None:
        """Mean over the union of disjoint spans; None where samples cover less than half."""
        known = self._over(self.covered, start_ns, end_ns)
        if known < _COVERED_RATIO * float((end_ns - start_ns).sum()) or known <= 0:
            return None
        return self._over(self.integral, start_ns, end_ns) / known

    def _over(self, total: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray) -> float:
        low = np.interp(start_ns - self.zero_ns, self.time_ns, total)
        high = np.interp(end_ns - self.zero_ns, self.time_ns, total)
        return float((high - low).sum())


def _sampled(time_ns: np.ndarray, value: np.ndarray) -> _Sampled | None:
    """Samples in order of time, NaN for unknown; None with fewer than two."""
    if len(time_ns) < 2:
        return None
    zero = int(time_ns[0])
    span = np.diff(time_ns).astype(np.float64)
    known = np.isfinite(value[1:])
    if not known.any():
        return None
    return _Sampled(
        zero,
        (time_ns - zero).astype(np.float64),
        np.concatenate([[0.0], np.cumsum(np.where(known, value[1:], 0.0) * span)]),
        np.concatenate([[0.0], np.cumsum(np.where(known, span, 0.0))]),
        float(np.median(span)),
    )


def cpu_use(attribution: Attribution) -> pa.Table:
    """Cores used per step and phase. CPU_CORE, PROCESS, EVENT_LINK, WINDOW -> CPU_USE.

    Per rank: the whole run, each phase over all steps, each step. Phases are those of the host:
    time until a launch belongs to the phase of that launch.
    """
    rows: list[dict[str, object]] = []
    for rank in attribution.run.ranks:
        cores = _cores(attribution, rank)
        process = _process(attribution, rank)
        known = [s for s in (*cores.values(), *process.values()) if s is not None]
        if not known:
            continue
        period = max(s.period_ns for s in known)
        for step, phase, start, end in _spans(attribution, rank):
            row: dict[str, object] = {"rank": rank, "step": step, "phase": phase}
            row["time_ns"] = int((end - start).sum())
            long = (end - start) >= period
            resolved = float((end - start)[long].sum())
            if resolved < _COVERED_RATIO * float((end - start).sum()):
                row["reason"] = f"spans are shorter than the {period / 1e6:.0f} ms between samples"
            else:
                found = {
                    name: None if s is None else s.mean(start[long], end[long])
                    for name, s in {**cores, **process}.items()
                }
                row |= found
                if all(value is None for value in found.values()):
                    row["reason"] = "samples cover less than half of it"
            rows.append(row)
    return pa.Table.from_pylist(rows, schema=TABLES["cpu_use"].arrow)


def _cores(attribution: Attribution, rank: int) -> dict[str, _Sampled | None]:
    """Samples of the cores of a rank's host, taken by whichever of its ranks sampled them."""
    run = attribution.run
    host = run.part(rank).hostname
    table = None
    for other in (rank, *run.ranks):
        if other == rank or (host is not None and run.part(other).hostname == host):
            table = run.table(other, "cpu_core")
            if table.num_rows:
                break
    if table is None or not table.num_rows:
        return dict.fromkeys(("active_cores", "minimum_cores", "system_cores", "stolen_cores"))
    instants, at = np.unique(ints(table, "time_ns"), return_inverse=True)

    def summed(values: np.ndarray) -> np.ndarray:
        known = np.isfinite(values)
        some = np.bincount(at[known], minlength=len(instants)) > 0
        total = np.bincount(at[known], weights=values[known], minlength=len(instants))
        return np.where(some, total, np.nan)

    def ratios(name: str) -> np.ndarray:
        values: np.ndarray = table[name].to_numpy().astype(np.float64)
        return values

    busy = ratios("busy_ratio")
    active = np.where(np.isfinite(busy), (busy > 0).astype(np.float64), np.nan)
    return {
        "active_cores": _sampled(instants, summed(active)),
        "minimum_cores": _sampled(instants, summed(busy)),
        "system_cores": _sampled(instants, summed(ratios("system_ratio"))),
        "stolen_cores": _sampled(instants, summed(ratios("steal_ratio"))),
    }


def _process(attribution: Attribution, rank: int) -> dict[str, _Sampled | None]:
    """Samples of the rank's own processes, taken by whichever rank watched them."""
    for other in (rank, *attribution.run.ranks):
        table = attribution.run.table(other, "process")
        mine = table.filter(pa.array(table["rank"].to_numpy() == rank))
        if mine.num_rows:
            order = np.argsort(ints(mine, "time_ns"), kind="stable")
            time = ints(mine, "time_ns")[order]
            return {
                name: _sampled(time, mine[column].to_numpy().astype(np.float64)[order])
                for name, column in (
                    ("rank_cores", "cpu_ratio"),
                    ("children_cores", "child_cpu_ratio"),
                )
            }
    return {"rank_cores": None, "children_cores": None}


def _spans(
    attribution: Attribution, rank: int
) -> list[tuple[int | None, str | None, np.ndarray, np.ndarray]]:
    """(step, phase, starts, ends): the run, phases by time, steps in order."""
    windows = attribution.windows.filter(pa.array(attribution.windows["rank"].to_numpy() == rank))
    if not windows.num_rows:
        return []
    start, end = ints(windows, "start_ns"), ints(windows, "end_ns")
    found: list[tuple[int | None, str | None, np.ndarray, np.ndarray]] = [(None, None, start, end)]
    found += sorted(
        _phases(attribution, rank, int(start.min()), int(end.max())),
        key=lambda entry: -int((entry[3] - entry[2]).sum()),
    )
    numbers = windows["number"].to_pylist()
    if len(numbers) > 1:
        found += [(n, None, start[i : i + 1], end[i : i + 1]) for i, n in enumerate(numbers)]
    return found


def _phases(
    attribution: Attribution, rank: int, start_ns: int, end_ns: int
) -> list[tuple[int | None, str | None, np.ndarray, np.ndarray]]:
    """Spans of the host's phases: the time until a launch is of the phase of that launch."""
    links = attribution.links.get(rank)
    if links is None or not links.num_rows:
        return []
    launch = ints(links, "launch_row")
    known = launch >= 0
    if not known.any():
        return []
    time = ints(attribution.run.table(rank, "host_span"), "start_ns")[launch[known]]
    phase, phases = strings(links, "phase")
    order = np.argsort(time, kind="stable")
    time, phase = np.clip(time[order], start_ns, end_ns), phase[known][order]
    begins = np.concatenate([[True], phase[1:] != phase[:-1]])
    last = np.concatenate([begins[1:], [True]])
    ends = time[last]
    starts = np.concatenate([[start_ns], ends[:-1]])
    of = phase[last]
    found: list[tuple[int | None, str | None, np.ndarray, np.ndarray]] = []
    for code in np.unique(of).tolist():
        mine = (of == code) & (ends > starts)
        if mine.any():
            found.append((None, phases[code], starts[mine], ends[mine]))
    return found
