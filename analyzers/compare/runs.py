"""Two attributed runs beside each other: the difference of a step, cause by cause.

All times are per step: Σ over rank windows / number of rank windows. Each side's leaf causes are
cut into whole nanoseconds by the largest remainder, so that they sum to ``total // windows`` and
their differences to the difference of the step, exactly.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.causes.step_time import FIRST
from chopper.analyzers.compare import same_work
from chopper.analyzers.compare.outcomes import outcomes
from chopper.analyzers.compare.result import Change, Comparison, Item, Side, Total
from chopper.analyzers.compare.same_work import Steps, cut
from chopper.analyzers.events.groups import sum_by
from chopper.analyzers.trace.columns import distinct_rows
from chopper.causes import CAUSES, LEAVES, parent, parents
from chopper.statistics import (
    MIN_STEPS,
    Intervals,
    Sample,
    compare_means,
    compare_medians,
    discoveries,
    inflation,
    welch,
)
from chopper.wording import duration, plural, ranges

_SLOW_STEP = 2.0
"""A step this many times the median is mentioned."""


def compare(
    a: Attribution, b: Attribution, *, allow_different: bool = False, all_steps: bool = False
) -> Comparison:
    """Compare two runs: what B's step does with its time that A's does not.

    Args:
        a: the run to compare with.
        b: the run that is judged.
        allow_different: give a verdict although the runs do not do the same work.
        all_steps: compare all traced steps, not only those that the step time is of. Two runs
            seldom trace as many evaluations, and a mean over both kinds tells how many.
    """
    some = _some_ranks(a, b)
    a, b = (run.of_numbered() if all_steps else run.of_kind() for run in (a.detail, b.detail))
    sides = (cut(a), cut(b))
    leaves = sorted({*sides[0].causes, *sides[1].causes}, key=LEAVES.index)
    exact = [apportion(_aligned(s, leaves).sum(axis=0), int(s.windows.sum())) for s in sides]
    changes, step = _changes(sides, leaves, exact)
    untraced = _untraced((a, b))
    return Comparison(
        a=_side(a, sides[0]),
        b=_side(b, sides[1]),
        runs=(a, b),
        checks=same_work.check((a, b), sides),
        step=step,
        median=_median(sides),
        untraced=untraced,
        outcomes=outcomes((a, b), sides, untraced or step),
        changes=changes,
        kernels=_items(sides, "kernel"),
        operations=_items(sides, "op"),
        notes=(*some, *_notes((a, b), sides)),
        allow_different=allow_different,
    )


def apportion(total_ns: np.ndarray, windows: int) -> np.ndarray:
    """Totals per window in whole ns that sum to ``Σ total // windows`` (largest remainder)."""
    if windows <= 0:
        return np.zeros(len(total_ns), dtype=np.int64)
    share, rest = np.divmod(total_ns.astype(np.int64), windows)
    short = int(total_ns.sum()) // windows - int(share.sum())
    share[np.argsort(-rest, kind="stable")[:short]] += 1
    return share


def _aligned(steps: Steps, leaves: list[str]) -> np.ndarray:
    """(steps, leaves) times with the columns of both runs."""
    aligned = np.zeros((len(steps.numbers), len(leaves)), dtype=np.int64)
    aligned[:, [leaves.index(c) for c in steps.causes]] = steps.time_ns
    return aligned


def _changes(
    sides: tuple[Steps, Steps], leaves: list[str], exact: list[np.ndarray]
) -> tuple[tuple[Change, ...], Total]:
    present = {*leaves, *(p for leaf in leaves for p in parents(leaf))}
    nodes = [c for c in CAUSES if c in present]
    # (leaves, nodes): which leaves a cause sums, the whole step last.
    below = np.array(
        [[leaf == n or leaf.startswith(n + ".") for n in nodes] + [True] for leaf in leaves],
        dtype=np.int64,
    ).reshape(len(leaves), len(nodes) + 1)
    times = [e @ below for e in exact]
    samples = [Sample(_aligned(s, leaves) @ below, s.windows.astype(np.float64)) for s in sides]
    intervals = compare_means(samples[0], samples[1])
    changes = tuple(
        Change(
            id=node,
            parent=parent(node),
            label=CAUSES[node].label,
            **_total(times[0][i], times[1][i], intervals, i),
        )
        for i, node in enumerate(nodes)
        if times[0][i] or times[1][i]
    )
    return changes, Total(**_total(times[0][-1], times[1][-1], intervals, len(nodes)))


def _total(a_ns: int, b_ns: int, intervals: Intervals | None, at: int) -> dict[str, Any]:
    """Return the fields of :class:`Total`."""
    times: dict[str, Any] = {"a_ns": int(a_ns), "b_ns": int(b_ns)}
    if intervals is None:
        return times | {"ci95_ns": None, "ci95_ratio": None}
    low, high = intervals.difference[:, at].tolist()
    ratios = intervals.ratio[:, at].tolist()
    times["ci95_ns"] = round(low), round(high)
    return times | {"ci95_ratio": None if np.isnan(ratios[0]) else tuple(ratios)}


def _median(sides: tuple[Steps, Steps]) -> Total:
    a, b = (s.step_ns for s in sides)
    a_ns, b_ns = (round(float(np.median(v))) if len(v) else 0 for v in (a, b))
    return Total(**_total(a_ns, b_ns, compare_medians(a, b), 0))


def _side(run: Attribution, steps: Steps) -> Side:
    named = [same_work.device_of(run, r.rank) or "unknown device" for r in run.ranks]
    return Side(
        source=run.recording.source,
        name=run.recording.manifest.name,
        devices=tuple(dict.fromkeys(named)),
        ranks=len(run.ranks),
        steps=len(steps.numbers),
        windows=int(steps.windows.sum()),
        left_out=_warm_up(run),
        findings=tuple(run.findings),
    )


def _warm_up(run: Attribution) -> tuple[int, ...]:
    """Return the traced leading steps that are not compared."""
    kinds = run.step_time().kinds if run.all_steps is not run else ()
    return next((k.traced_steps for k in kinds if k.name == FIRST), ())


def _untraced(runs: tuple[Attribution, Attribution]) -> Total | None:
    """Return the step time without a trace; None where a run has none of the other's kind."""
    times = [run.step_time() for run in runs]
    a, b = (time.untraced for time in times)
    if a is None or b is None or times[0].kind != times[1].kind:
        return None
    lengths = [np.array(s.lengths_ns, dtype=np.float64) for s in (a, b)]
    if "mean" not in (a.statistic, b.statistic):
        return Total(**_total(a.median_ns, b.median_ns, compare_medians(*lengths), 0))
    # A mean less a median is no change of either.
    samples = [Sample(of_side[:, None], np.ones(len(of_side))) for of_side in lengths]
    return Total(**_total(a.mean_ns, b.mean_ns, compare_means(*samples), 0))


def _some_ranks(*runs: Attribution) -> list[str]:
    """Say which ranks and steps are compared, where these are not all."""
    (of_a, *option), (of_b, *other) = (run.covered() for run in runs)
    options = " or ".join(filter(None, dict.fromkeys(option + other)))
    if not options:
        return []
    return [f"compared are {of_a} in A, {of_b} in B; {options} chooses others"]


def _notes(runs: tuple[Attribution, Attribution], sides: tuple[Steps, Steps]) -> list[str]:
    """Say which steps and ranks were left out, and what the mean holds."""
    kinds = [run.step_time().kind for run in runs]
    notes = []
    if kinds[0] != kinds[1]:
        notes.append(f"the compared steps are of {kinds[0]} in A and of {kinds[1]} in B")
    untraced = [run.step_time().untraced for run in runs]
    if {spread and spread.statistic for spread in untraced} == {"mean", "median"}:
        for name, spread, other in zip("AB", untraced, "BA", strict=True):
            if spread is not None and spread.statistic == "median":
                notes.append(
                    f"{name}: its untraced steps are compared by their mean, as {other}'s, which "
                    f"are uneven; its step time is their median, {duration(spread.median_ns)}"
                )
    for name, run, side, of in zip("AB", runs, sides, kinds, strict=True):
        for kind in run.step_time().kinds if run.all_steps is not run else ():
            if kind.traced_steps and kind.name not in (of, FIRST):
                notes.append(
                    f"{name}: {plural(len(kind.traced_steps), 'traced step')} ({kind.name}: "
                    f"{ranges(kind.traced_steps)}) excluded: the compared steps are of {of}"
                )
        if warm_up := _warm_up(run):
            steps = "steps" if len(warm_up) > 1 else "step"
            notes.append(
                f"{name}: {steps} {', '.join(map(str, warm_up))} excluded as warm-up: much "
                "longer than all later ones"
            )
        traced = {rank.rank for rank in run.all_steps.ranks if rank.steps}
        if left_out := sorted(traced - {rank.rank for rank in run.ranks if rank.steps}):
            notes.append(
                f"{name}: {'ranks' if len(left_out) > 1 else 'rank'} {ranges(left_out)} excluded: "
                "none of the compared steps was traced there"
            )
        each = side.step_ns
        median_ns = float(np.median(each)) if len(each) >= MIN_STEPS else 0.0
        slow = np.flatnonzero(each > _SLOW_STEP * median_ns)
        if len(slow) and median_ns:
            worst = int(slow[each[slow].argmax()])
            notes.append(
                f"{name}: step {side.numbers[worst]} took {each[worst] / median_ns:.1f} times "
                f"the median ({len(slow)} of {len(each)} steps took more than twice the median): "
                "it is included, and affects the mean and its interval"
            )
    return notes


def _calls(side: Steps, level: Literal["kernel", "op"]) -> tuple[list[str], np.ndarray]:
    """Kernels or operators of the compared steps, summed over ranks.

    (Names; count and time per rank window, mean and variance over steps of a step's time.)
    """
    events, step = side.events, side.step_of_event
    codes, names = events.kernel if level == "kernel" else events.op
    inside = (step >= 0) & (codes >= 0)
    step, dur_ns = step[inside], events.dur_ns[inside]
    used, codes = np.unique(codes[inside], return_inverse=True)
    size, steps = len(used), max(len(side.numbers), 1)
    calls = codes
    if level == "op":
        # An operator runs once, however many kernels it launches.
        first, _ = distinct_rows([codes, events.rank[inside], events.op_row[inside]])
        calls = codes[first]
    # Most kernels run in every step, but a table of all kernels by all steps could be huge.
    cells, cell = np.unique(codes * steps + step, return_inverse=True)
    owner = cells // steps
    each = np.bincount(cell, weights=dur_ns, minlength=len(cells))
    each = each / np.maximum(side.windows, 1)[cells % steps]
    mean = np.bincount(owner, weights=each, minlength=size) / steps
    # Steps without the kernel deviate by the whole mean.
    absent = steps - np.bincount(owner, minlength=size)
    squares = np.bincount(owner, weights=(each - mean[owner]) ** 2, minlength=size)
    variance = (squares + absent * mean**2) / max(steps - 1, 1) * inflation(side.step_ns)
    count = np.bincount(calls, minlength=size) / side.window_count
    time_ns = sum_by(codes, dur_ns, size) / side.window_count
    return [names[i] for i in used], np.stack([count, time_ns, mean, variance])


def _items(sides: tuple[Steps, Steps], level: Literal["kernel", "op"]) -> tuple[Item, ...]:
    """Kernels or operators of both runs, largest difference first."""
    calls = [_calls(side, level) for side in sides]
    names = list(dict.fromkeys([*calls[0][0], *calls[1][0]]))
    column_of = {name: i for i, name in enumerate(names)}
    rows = np.zeros((2, 4, len(names)))
    for side, (side_names, columns) in enumerate(calls):
        rows[side][:, [column_of[name] for name in side_names]] = columns
    (count_a, time_a, mean_a, var_a), (count_b, time_b, mean_b, var_b) = rows
    a_ns, b_ns = time_a.round().astype(np.int64), time_b.round().astype(np.int64)
    difference = b_ns - a_ns
    # n·m of both sides: Δ(n·m) = Δn·(m_a + m_b)/2 + (n_a + n_b)/2·Δm. What runs on one side only
    # differs by its count alone.
    both = (count_a > 0) & (count_b > 0)
    each_a, each_b = (
        np.divide(time, count, out=np.zeros_like(time), where=both)
        for time, count in ((time_a, count_a), (time_b, count_b))
    )
    part = np.rint((count_b - count_a) * (each_a + each_b) / 2).astype(np.int64)
    by_count = np.where(both, part, difference)
    steps = [len(s.numbers) for s in sides]
    intervals: list[tuple[int, int] | None] = [None] * len(names)
    significant: list[bool | None] = [None] * len(names)
    if min(steps) >= MIN_STEPS:
        half, p = welch(mean_a, var_a, steps[0], mean_b, var_b, steps[1])
        low, high = (np.rint(mean_b - mean_a + way * half).astype(np.int64) for way in (-1, 1))
        intervals = list(zip(low.tolist(), high.tolist(), strict=True))
        significant = discoveries(p).tolist()
    order = np.lexsort((-np.maximum(a_ns, b_ns), -np.abs(difference)))
    return tuple(
        Item(
            name=names[i],
            status="both" if both[i] else "vanished" if count_a[i] else "appeared",
            a_count=float(count_a[i]),
            b_count=float(count_b[i]),
            a_ns=int(a_ns[i]),
            b_ns=int(b_ns[i]),
            difference_ns=int(difference[i]),
            by_count_ns=int(by_count[i]),
            by_duration_ns=int(difference[i] - by_count[i]),
            ci95_ns=intervals[i],
            told=significant[i],
        )
        for i in order.tolist()
    )
