"""Runs cut into steps, the unit in which they are compared, and whether they do the same work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.compare.result import Check
from chopper.analyzers.events.device import Events, events_of, of_class
from chopper.analyzers.events.groups import rows_of, sum_by
from chopper.analyzers.events.steps import lookups, spans_in_steps
from chopper.analyzers.trace.columns import ints, strings
from chopper.tables.ranges import NUMBER_MOST, Count, Ranks

_WHOLE = -1
"""Number of the only step of a rank without steps."""


@dataclass(frozen=True)
class Steps:
    """Time by leaf cause of each step that is compared, summed over ranks.

    Attributes:
        numbers: (steps,) numbers, ascending; -1 for a trace without steps.
        windows: (steps,) rank windows of each.
        causes: names of the columns.
        time_ns: (steps, causes) int64.
        events: device events of the run.
        step_of_event: index of the compared step of each event, -1 for none.
    """

    numbers: np.ndarray
    windows: np.ndarray
    causes: list[str]
    time_ns: np.ndarray
    events: Events
    step_of_event: np.ndarray

    @property
    def step_ns(self) -> np.ndarray:
        """(steps,) mean over ranks of the observed time."""
        return self.time_ns.sum(axis=1) / np.maximum(self.windows, 1)

    @property
    def window_count(self) -> int:
        """Rank windows of all steps, at least 1."""
        return max(int(self.windows.sum()), 1)


def cut(run: Attribution) -> Steps:
    """PIECE, WINDOW -> time by step and cause."""
    pieces, windows = run.pieces, run.windows
    numbers, step_of_window = np.unique(ints(windows, "number", null=_WHOLE), return_inverse=True)
    counts = np.bincount(step_of_window, minlength=len(numbers))
    codes, causes = strings(pieces, "cause")
    windows_by = [ints(windows, name) for name in ("rank", "step_index")]
    window = rows_of(windows_by, [ints(pieces, name) for name in ("rank", "step_index")])
    cell = step_of_window[window] * len(causes) + codes
    time_ns = sum_by(cell, ints(pieces, "time_ns"), len(numbers) * len(causes))
    time_ns = time_ns.reshape(len(numbers), len(causes))
    events = events_of(run)
    step_of_event = step_of_window[rows_of(windows_by, [events.rank, events.step])]
    return Steps(
        numbers,
        counts,
        causes,
        time_ns,
        events,
        step_of_event,
    )


Pair = tuple[Attribution, Attribution]
Sides = tuple[Steps, Steps]
Value = float | int | str | None


class Work(msgspec.Struct, kw_only=True, frozen=True):
    """What a run did in a step, and on what; None where it is unknown."""

    world_size: Ranks | None
    flop: Annotated[int, msgspec.Meta(gt=0, le=(1 << 63) - 1)] | None
    """Model math per step and rank, without recomputation."""
    flop_unknown: str = ""
    """Why ``flop`` is None."""
    tokens: Count | None
    """Indices looked up in the largest embedding, per step and rank."""
    operators: dict[str, Annotated[float, msgspec.Meta(gt=0, le=NUMBER_MOST)]]
    """Calls per traced step of one rank; empty where they are unknown."""
    device: str | None
    dtype: str | None
    torch: str | None


_FLOP_PASS_RATIO = 0.02
"""FLOP per step that differ by less count as the same."""
_FLOP_WITHHOLD_RATIO = 0.1
"""FLOP per step that differ by more are another workload."""
_FLOP_KNOWN_RATIO = 0.95
"""Least share of the products' time whose FLOP must be known."""
_OPERATORS_PASS_RATIO = 0.98
_OPERATORS_WITHHOLD_RATIO = 0.5
_DTYPE_SHARE = 0.01
_SPEED_PASS_RATIO = 0.05
_SPEED_KNOWN_RATIO = 0.5
"""Least share of the computing time that kernels of the same name make up."""

_PLAIN = {
    "world_size": ("World size", "a rank's share of the work depends on it", "count"),
    "device": ("Devices", "different hardware may explain the whole difference", ""),
    "dtype": ("Data types", "arithmetic of the products, ≥ 1 % of FLOP", ""),
    "peak": ("Peaks known", "compute is split further only where peaks are known", ""),
    "torch": ("PyTorch", "as recorded by the run", ""),
    "recording": ("Recorded", "recording more costs host time", ""),
    "ranks": ("Ranks in the run", "times are means over the recorded ranks", "count"),
    "steps": ("Steps compared", "times are per step; fewer steps widen the intervals", "count"),
}
"""Checks that pass where both values are equal: label, meaning and unit."""
_WITHHOLD = ("world_size", "tokens")
"""Checks without a verdict where they differ."""


def work_of(run: Attribution, side: Steps) -> Work:
    """Return what a run did in the steps of ``side``."""
    flop, why = _flop_per_step(side)
    return Work(
        world_size=_world_size(run),
        flop=flop,
        flop_unknown=why,
        tokens=_tokens_per_step(run),
        operators=_operator_counts(run),
        device=_all(device_of(run, r.rank) for r in run.ranks),
        dtype=_dtypes(run),
        torch=_all(p.environment.get("torch") for p in run.recording.manifest.ranks),
    )


def check(runs: Pair, sides: Sides) -> tuple[Check, ...]:
    """All checks, what withholds the verdict first, then what differs, then the rest."""
    peaks = ["yes" if all(r.peak_source for r in run.ranks) else "no" for run in runs]
    a, b = (work_of(run, side) for run, side in zip(runs, sides, strict=True))
    work = check_work(a, b)
    values: dict[str, list[Value]] = {
        "peak": [peak if run.ranks else None for run, peak in zip(runs, peaks, strict=True)],
        "recording": [_recorded(run) for run in runs],
        "ranks": [len(run.ranks) for run in runs],
        "steps": [len(side.numbers) for side in sides],
    }
    return in_order(
        [*work[:4], _speed(sides), *work[4:], *(_plain(i, *v) for i, v in values.items())]
    )


def check_work(a: Work, b: Work) -> tuple[Check, ...]:
    """Return the checks that need no more of a run than its work."""
    flop = _flop(a, b)
    return (
        _plain("world_size", a.world_size, b.world_size),
        flop,
        _tokens(a.tokens, b.tokens),
        _operators(a.operators, b.operators, flop),
        *(_plain(id, getattr(a, id), getattr(b, id)) for id in ("device", "dtype", "torch")),
    )


def in_order(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Sort: what withholds the verdict first, then what differs, then the rest."""
    order = {"differs": 0, "unknown": 1, "pass": 2}
    return tuple(sorted(checks, key=lambda c: (not c.withholds, order[c.status])))


def _plain(id: str, a: Value, b: Value) -> Check:
    label, note, unit = _PLAIN[id]
    return _check(id, label, a, b, note=note, unit=unit)


def _check(
    id: str,
    label: str,
    a: Value,
    b: Value,
    *,
    note: str,
    unit: str = "",
    same: bool | None = None,
    withholds: bool | None = None,
    explains: bool = False,
) -> Check:
    """Return a check; where it differs, it may withhold the verdict or explain the difference."""
    if a is None or b is None:
        return Check(id, label, "unknown", a, b, unit, False, note)
    if a == b if same is None else same:
        return Check(id, label, "pass", a, b, unit, False, note)
    withholds = id in _WITHHOLD if withholds is None else withholds
    return Check(id, label, "differs", a, b, unit, withholds, note, explains or id == "device")


def device_of(run: Attribution, rank: int) -> str | None:
    """Return the name of a rank's device, or of the host's CPU; None for unknown."""
    summary = next(r for r in run.ranks if r.rank == rank)
    trace = run.joined.get(rank)
    if summary.device is not None or trace is None or not trace.device_event.num_rows:
        return summary.device
    if trace.device_event["device_id"][0].as_py() < 0:
        return run.recording.part(rank).environment.get("cpu", "CPU")
    return None


def _all(names: Iterable[str | None]) -> str | None:
    """The names in words; None where one of them is not known."""
    distinct = set(names)
    return ", ".join(sorted(filter(None, distinct))) if None not in distinct else None


def _world_size(run: Attribution) -> int | None:
    sizes = [part.world_size for part in run.recording.manifest.ranks if part.world_size]
    return max(sizes, default=len(run.ranks) if len(run.ranks) > 1 else None)


def _dtypes(run: Attribution) -> str | None:
    flop: dict[str, float] = {}
    for work in run.work.values():
        rows = np.flatnonzero(work.math & (work.dtype >= 0) & ~np.isnan(work.work_flop))
        sums = np.bincount(work.dtype[rows], work.work_flop[rows], minlength=len(work.dtypes))
        for name, value in zip(work.dtypes, sums.tolist(), strict=True):
            flop[name] = flop.get(name, 0.0) + value
    total = sum(flop.values())
    return ", ".join(sorted(n for n, v in flop.items() if v >= _DTYPE_SHARE * total > 0)) or None


def _recorded(run: Attribution) -> str | None:
    words: dict[str, None] = {}
    for rank, trace in run.joined.items():
        host = trace.host_span
        if not host.num_rows:
            continue
        words["operators"] = None
        if host["input_dims"].null_count < host.num_rows:
            words["shapes"] = None
        codes, categories = strings(host, "category")
        sampled = run.recording.rows_count(rank, "python_sample")
        if "python" in categories and not sampled and (codes == categories.index("python")).any():
            words["Python stacks"] = None
        if run.recording.table(rank, "memory_event").num_rows:
            words["allocations"] = None
    return ", ".join(words) or None


def _flop(work_a: Work, work_b: Work) -> Check:
    a, b = work_a.flop, work_b.flop
    note = "model math per step and rank, without recomputation"
    ratio = 0.0
    if a is None or b is None:
        note += "".join(
            f"; {n}: {why}" for n, w in (("A", work_a), ("B", work_b)) if (why := w.flop_unknown)
        )
    else:
        ratio = b / a - 1
        note += f"; B does {b / a:.3g} times A's" if abs(ratio) > _FLOP_PASS_RATIO else ""
    same, withholds = abs(ratio) <= _FLOP_PASS_RATIO, abs(ratio) > _FLOP_WITHHOLD_RATIO
    return _check(
        "flop", "FLOP per step", a, b, unit="flop", note=note, same=same, withholds=withholds
    )


def _flop_per_step(side: Steps) -> tuple[int | None, str]:
    """(FLOP of model math per rank window, or None; why not)."""
    events = side.events
    phase, phases = events.phase
    recompute = phases.index("recompute") if "recompute" in phases else -2
    rows = np.flatnonzero((side.step_of_event >= 0) & events.math & (phase != recompute))
    flop, dur = events.work_flop[rows], events.dur_ns[rows]
    known = ~np.isnan(flop)
    share = float(dur[known].sum() / max(dur.sum(), 1))
    if not len(rows):
        return None, "no matrix product, convolution or attention was recognized"
    if share < _FLOP_KNOWN_RATIO:
        return None, f"the shapes of {fmt.ratio(1 - share)} of the products' time are unknown"
    return round(float(flop[known].sum()) / side.window_count) or None, ""


def _tokens(a: int | None, b: int | None) -> Check:
    return _check(
        "tokens",
        "Tokens per step",
        a,
        b,
        unit="count",
        note="indices looked up in the largest embedding, per step and rank",
        same=a is not None and b is not None and abs(b - a) <= _FLOP_PASS_RATIO * a,
    )


def _tokens_per_step(run: Attribution) -> int | None:
    """Indices that a traced step of one rank looks up in its largest table; None without one."""
    counts: dict[tuple[int, ...], int] = {}
    steps = 0
    for rank in run.joined:
        steps += spans_in_steps(run, rank)[1]
        for table, count in lookups(run, rank).items():
            counts[table] = counts.get(table, 0) + count
    return round(counts[max(counts)] / max(steps, 1)) if counts else None


def _operators(a: dict[str, float], b: dict[str, float], flop: Check) -> Check:
    note = "operators by name and calls per step: calls in common over all calls"
    similarity = 1.0
    if a and b:
        pairs = {name: (a.get(name, 0.0), b.get(name, 0.0)) for name in {*a, *b}}
        similarity = sum(map(min, pairs.values())) / sum(map(max, pairs.values()))
        if similarity < _OPERATORS_PASS_RATIO:
            apart = sorted(pairs, key=lambda n: (-abs(pairs[n][0] - pairs[n][1]), n))[:3]
            differences = (f"{n} {pairs[n][0]:.4g} and {pairs[n][1]:.4g}" for n in apart)
            note += f" ({fmt.ratio(similarity)}); {', '.join(differences)}"
    return _check(
        "operators",
        "Operator calls per step",
        *(round(sum(counts.values())) if counts else None for counts in (a, b)),
        unit="count",
        note=note,
        same=similarity >= _OPERATORS_PASS_RATIO,
        withholds=similarity < _OPERATORS_WITHHOLD_RATIO and flop.status == "unknown",
    )


def _operator_counts(run: Attribution) -> dict[str, float]:
    """Calls of each operator per traced step of one rank, by the host's own steps."""
    calls: dict[str, float] = {}
    total_steps = 0
    for rank in run.joined:
        host = run.joined[rank].host_span
        codes, names = strings(host, "name")
        kinds, categories = strings(host, "category")
        if "cpu_op" not in categories:
            continue
        inside, steps = spans_in_steps(run, rank)
        total_steps += steps
        operators = codes[inside & (kinds == categories.index("cpu_op"))]
        counts = np.bincount(operators, minlength=len(names)).tolist()
        for name, count in zip(names, counts, strict=True):
            if count and not name.startswith("chopper::"):
                calls[name] = calls.get(name, 0.0) + count
    return {name: count / total_steps for name, count in calls.items()}


def _speed(sides: Sides) -> Check:
    """Compare the times of the same kernels: if all differ, the machine was another."""
    a, b = (_durations(side) for side in sides)
    shared = [n for n in a if n in b]
    weight = np.array([min(a[n][0], b[n][0]) for n in shared], dtype=np.float64)
    known = [sum(time for time, _ in of.values()) for of in (a, b)]
    note = "mean duration of compute kernels by name, B over A, weighted by time"
    label = "Time of the same kernels"
    if not shared or weight.sum() < _SPEED_KNOWN_RATIO * min(known):
        return _check("speed", label, None, None, unit="ratio", note=note)
    ratio = np.array([b[n][1] / max(a[n][1], 1e-9) for n in shared])
    order = np.argsort(ratio)
    reached = np.cumsum(weight[order]) / weight.sum()
    at = np.minimum(np.searchsorted(reached, [0.25, 0.5, 0.75]), len(order) - 1)
    low, middle, high = ratio[order][at].tolist()
    same = abs(middle - 1) <= _SPEED_PASS_RATIO
    # Three quarters of the time at least half as far from A's as the median.
    nearest = low if middle > 1 else high
    alike = (nearest - 1) * (middle - 1) >= 0.5 * (middle - 1) ** 2
    if not same:
        note += f" (median {middle:.3g}, quartiles {low:.3g} and {high:.3g})"
        note += (
            "; most changed by the same factor: clocks, power or neighbouring jobs rather "
            "than the program" * alike
        )
    return _check("speed", label, 1.0, middle, unit="ratio", note=note, same=same, explains=alike)


def _durations(side: Steps) -> dict[str, tuple[float, float]]:
    """Computing kernels by name: (total time, mean duration)."""
    events = side.events
    codes, kernels = events.kernel
    mine = (side.step_of_event >= 0) & (codes >= 0) & of_class(events, "compute")
    time = np.bincount(codes[mine], weights=events.dur_ns[mine], minlength=len(kernels))
    count = np.bincount(codes[mine], minlength=len(kernels))
    return {
        kernels[i]: (float(time[i]), float(time[i] / count[i]))
        for i in np.flatnonzero(time > 0).tolist()
    }
