"""CPU cores in use: active, minimum and each rank's own, per phase and step.

As defined in "Chopper" (arXiv 2512.08242), *active cores* were busy at all during a sample, and
*minimum cores* would suffice for the same work (Σ busy share). Both are means over time. A sample
covers the time since the previous one, so shorter spans are not evaluated. Time until a launch
belongs to the phase of that launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.groups import reals
from chopper.analyzers.events.meter import Counter
from chopper.analyzers.events.steps import windows_of
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.samples import table_beside
from chopper.analyzers.views import View, column, optional

Span = tuple[int | None, str | None, np.ndarray, np.ndarray]
"""Step, phase, starts, ends."""

_COVERED_RATIO = 0.5
"""Least share of a span that samples must cover before they speak for it."""
_SHARES = {
    "active_cores": "active_ratio",
    "minimum_cores": "busy_ratio",
    "system_cores": "system_ratio",
    "stolen_cores": "steal_ratio",
}

VIEW = View(
    "cpu_use",
    __doc__,
    (
        column("rank", "Rank whose steps and phases the row is about.", "int32"),
        optional("step", "Step number; null for all steps together.", "int64"),
        optional("phase", "Phase of the host; null for all phases."),
        column("time_ns", "Time of the step or phase."),
        optional(
            "active_cores", "Mean number of cores that were busy at all during a sample.", "float64"
        ),
        optional(
            "minimum_cores", "Mean number of cores that would suffice for the work.", "float64"
        ),
        optional("rank_cores", "Cores that the rank and its child processes used.", "float64"),
        optional("children_cores", "Cores that the rank's child processes used.", "float64"),
        optional("system_cores", "Cores busy in the operating system kernel.", "float64"),
        optional("stolen_cores", "Cores taken by the hypervisor.", "float64"),
        optional("reason", "Reason why values are null.", "text"),
    ),
    title="CPU use",
    section="Steps and host",
    needs="the host's cores were not sampled (the collector `host` does in recorded runs)",
)


@dataclass(frozen=True)
class Sampled:
    """A quantity that holds from each sample back to the one before, integrated over time."""

    integral: Counter
    covered: Counter
    period_ns: float

    def mean(self, start_ns: np.ndarray, end_ns: np.ndarray) -> float | None:
        """Return the mean over disjoint spans; None where samples cover less than half."""
        known = float(self.covered.growth(start_ns, end_ns).sum())
        if known < _COVERED_RATIO * float((end_ns - start_ns).sum()) or known <= 0:
            return None
        return float(self.integral.growth(start_ns, end_ns).sum()) / known


def _sampled(time_ns: np.ndarray, value: np.ndarray) -> Sampled | None:
    """Samples in order of time, NaN for unknown; None with fewer than two."""
    known = np.isfinite(value[1:])
    if not known.any():
        return None
    span = np.diff(time_ns).astype(np.float64)

    def integrated(values: np.ndarray) -> Counter:
        total = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0) * span)])
        return Counter(time_ns, total, ~known)

    return Sampled(integrated(value[1:]), integrated(known), float(np.median(span)))


def cpu_use(run: Attribution) -> pa.Table:
    """CPU_CORE, PROCESS, EVENT_LINK, WINDOW -> CPU_USE: by rank the run, its phases, its steps."""
    rows: list[dict[str, object]] = []
    for rank in run.recording.ranks:
        known = sampled(run, rank)
        if not known:
            continue
        period = max(s.period_ns for s in known.values())
        for step, phase, start, end in _spans(run, rank):
            row: dict[str, object] = {"rank": rank, "step": step, "phase": phase}
            row["time_ns"] = int((end - start).sum())
            long = (end - start) >= period
            resolved = float((end - start)[long].sum())
            if resolved < _COVERED_RATIO * float((end - start).sum()):
                row["reason"] = f"shorter than the {period / 1e6:.0f} ms between samples"
            else:
                means = {name: s.mean(start[long], end[long]) for name, s in known.items()}
                row |= means
                if all(value is None for value in means.values()):
                    row["reason"] = "samples cover less than half of it"
            rows.append(row)
    return VIEW.of_rows(rows)


def sampled(run: Attribution, rank: int) -> dict[str, Sampled]:
    """Return the view's quantities that were sampled on a rank's host, by column."""
    both = {**_cores(run, rank), **_process(run, rank)}
    return {name: s for name, s in both.items() if s is not None}


def _cores(run: Attribution, rank: int) -> dict[str, Sampled | None]:
    """Samples of the cores of a rank's host, taken by whichever of its ranks sampled them."""
    table = table_beside(run.recording, rank, "cpu_core")
    active = pc.greater(table["busy_ratio"], 0).cast(pa.float64())
    table = table.append_column("active_ratio", active)
    by_time = table.group_by("time_ns").aggregate([(n, "sum") for n in _SHARES.values()])
    by_time = by_time.sort_by("time_ns")
    time_ns = ints(by_time, "time_ns")
    shares = {name: reals(by_time, f"{share}_sum") for name, share in _SHARES.items()}
    return {name: _sampled(time_ns, share) for name, share in shares.items()}


def _process(run: Attribution, rank: int) -> dict[str, Sampled | None]:
    """Samples of the rank's own processes, taken by whichever rank watched them."""
    watchers = run.recording.watchers.get(rank)
    if not watchers:
        return {}
    host = run.recording.part(rank).host
    beside = (other for other in watchers if run.recording.part(other).host == host)
    table = run.recording.table(rank if rank in watchers else next(beside, watchers[0]), "process")
    mine = table.filter(pa.array(ints(table, "rank") == rank))
    mine = mine.take(np.argsort(ints(mine, "time_ns"), kind="stable"))
    time = ints(mine, "time_ns")
    return {
        "rank_cores": _sampled(time, reals(mine, "cpu_ratio")),
        "children_cores": _sampled(time, reals(mine, "child_cpu_ratio")),
    }


def _spans(run: Attribution, rank: int) -> Iterator[Span]:
    """The run, phases by time, steps in order."""
    windows = windows_of(run, rank)
    if not windows.num_rows:
        return
    start, end = ints(windows, "start_ns"), ints(windows, "end_ns")
    yield None, None, start, end
    phases = _phases(run, rank, int(start.min()), int(end.max()))
    yield from sorted(phases, key=lambda span: -int((span[3] - span[2]).sum()))
    numbers = windows["number"].to_pylist()
    if len(numbers) > 1:
        for i, number in enumerate(numbers):
            yield number, None, start[i : i + 1], end[i : i + 1]


def _phases(run: Attribution, rank: int, start_ns: int, end_ns: int) -> list[Span]:
    """Spans of the host's phases: the time until a launch is of the phase of that launch."""
    links = run.links.get(rank)
    if links is None or not links.num_rows:
        return []
    launch = ints(links, "launch_row")
    known = launch >= 0
    if not known.any():
        return []
    time = ints(run.joined[rank].host_span, "start_ns")[launch[known]]
    phase, phases = strings(links, "phase")
    order = np.argsort(time, kind="stable")
    time, phase = np.clip(time[order], start_ns, end_ns), phase[known][order]
    last = np.concatenate([phase[1:] != phase[:-1], [True]])
    ends = time[last]
    starts = np.concatenate([[start_ns], ends[:-1]])
    of = phase[last]
    found: list[Span] = []
    for code in np.unique(of).tolist():
        mine = (of == code) & (ends > starts)
        if mine.any():
            found.append((None, phases[code], starts[mine], ends[mine]))
    return found
