"""Step time at the program's own speed, the time that tracing added, and the kinds of steps.

The untraced steps are those during which no trace was being taken (column `profiled` of table
`step` is false). Their median (their mean where steps are uneven) is the step time of a run; the
traced steps are its decomposition. Where fewer than three are known, as in imported traces, the
traced steps are both.

Steps are told apart by what else ran in them: by the rows of `program_phase` that overlap them
("training + evaluation"), by coming first and taking longer than all later ones ("first steps"),
or, where no phase says why, by taking three times the median and 20 % of the time while they are at
most a tenth of the steps ("long steps"). Where a program trains several models in turn, the steps
of each are kinds of their own ("training (optimizer 2)").
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from chopper.analyzers.causes.core_wait import wait_of_steps
from chopper.analyzers.trace.columns import ints
from chopper.analyzers.trace.intervals import innermost
from chopper.attribution import FIRST, TRAINING, Outside, Spread, StepKind, StepTime
from chopper.statistics import MIN_STEPS, t_975

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa

    from chopper.storage.run import Run

LONG = "long steps"
_OPTIMIZER = "optimizer "
"""Column ``source`` of table ``step``, where another number than 1 follows."""
_LEAST_OVERLAP = 0.01
"""A phase that takes less of a step does not make it another kind."""
_LONG_FACTOR = 3.0
_LONG_SHARE = 0.2
_LONG_MOST = 0.1
"""Where more of the steps are long, they recur within what a step is: they are no kind."""
_UNEVEN = 1.2
_NEARBY_STEPS = 5
_WARM_UP_RATIO = 1.2
_WARM_UP_DEVIATIONS = 5 * 1.4826
"""Median absolute deviations to standard deviations of normal noise, five of them."""
_LEAST_KEPT = 3
_MAD_TO_MEDIAN_ERROR = 1.4826 * 1.2533
"""Median absolute deviation to the standard error of a median, times √n, for normal noise."""


@dataclass(frozen=True)
class _Recorded:
    """Recorded steps over all ranks, by number.

    Attributes:
        numbers: (steps,) ascending.
        length_ns: (steps,) mean over the ranks that have it.
        untraced: (steps,) no rank was taking a trace; None where that was not recorded.
        own_ns: (steps,) the same without waiting for a core, which other programs decide.
        phases: (steps,) names of the program phases that ran in it, "training" first.
        optimizers: (steps,) "", or which optimizer it began with where that is not the first kind.
    """

    numbers: np.ndarray
    length_ns: np.ndarray
    untraced: np.ndarray
    own_ns: np.ndarray
    phases: list[str]
    optimizers: list[str]


def step_time(
    recording: Run,
    windows: pa.Table,
    causes_by_step: Mapping[str | int | None, dict[str, int]],
) -> StepTime:
    """Find the step time with and without tracing, and the kinds of steps.

    STEP, PROGRAM_PHASE, CORE_WAIT, WINDOW -> StepTime.

    Args:
        recording: the recorded steps and phases.
        windows: of all ranks.
        causes_by_step: step number → leaf cause → nanoseconds, summed over ranks.
    """
    recorded = _host_steps(recording)
    if not recorded.untraced.any():
        recorded = _by_window(windows, recorded)
    names = _kinds_of(recorded)
    kind_of = dict(zip(recorded.numbers.tolist(), names, strict=True))
    window_kind = np.array(
        [kind_of.get(n, TRAINING) for n in windows["number"].to_pylist()], object
    )
    window_ns = ints(windows, "end_ns") - ints(windows, "start_ns")
    kinds = _kinds(windows, causes_by_step, recorded, names, window_kind, window_ns)
    kind = _headline_kind(kinds)
    mine = next((k for k in kinds if k.name == kind), None)
    lengths = window_ns[window_kind == kind] if mine is not None else window_ns
    traced_ns = round(float(lengths.mean())) if len(lengths) else None
    untraced = mine.untraced if mine is not None else None
    reason = None
    if untraced is None or untraced.count < MIN_STEPS:
        reason = (
            "the recording does not say during which steps a trace was being taken"
            if not recorded.untraced.any()
            else f"fewer than {MIN_STEPS} {kind} steps ran without a trace"
        )
        untraced = None
    tracing = interval = nearby = None
    if untraced is not None and traced_ns is not None:
        tracing = traced_ns - untraced.value_ns
        chosen = np.array([n == kind for n in names], dtype=bool) & recorded.untraced
        nearby = _nearby(recorded, chosen, mine.traced if mine is not None else ())
        interval = _interval(tracing, recorded.length_ns[chosen], lengths, untraced.statistic)
    return StepTime(
        kind=kind,
        untraced=untraced,
        reason=reason,
        traced_ns=traced_ns,
        # Else the windows of the rank that has most of them.
        traced_count=len(mine.traced)
        if mine is not None
        else int(np.bincount(ints(windows, "rank")).max(initial=0)),
        tracing_ns=tracing,
        tracing_ci95_ns=interval,
        nearby_ns=nearby,
        kinds=kinds,
        outside=_outside(recording),
    )


def _by_window(window_table: pa.Table, recorded: _Recorded) -> _Recorded:
    """Steps as long as their windows, where all that is known is a trace.

    A host that runs ahead of its device takes another time for a step than the step takes.
    """
    window_ns = ints(window_table, "end_ns") - ints(window_table, "start_ns")
    lengths_ns = defaultdict(list)
    for number, time_ns in zip(ints(window_table, "number").tolist(), window_ns, strict=True):
        lengths_ns[number].append(time_ns)
    length, own = recorded.length_ns.copy(), recorded.own_ns.copy()
    for i, number in enumerate(recorded.numbers.tolist()):
        if number in lengths_ns:
            waited = length[i] - own[i]
            length[i] = np.mean(lengths_ns[number])
            own[i] = max(length[i] - waited, 0)
    return replace(recorded, length_ns=length, own_ns=own)


def _host_steps(recording: Run) -> _Recorded:
    rows: dict[int, list[tuple[int, bool, int]]] = defaultdict(list)
    phases: dict[int, set[str]] = defaultdict(set)
    optimizers: dict[int, str] = {}
    for rank in recording.ranks:
        table = recording.table(rank, "step")
        start, length = ints(table, "start_ns"), ints(table, "end_ns") - ints(table, "start_ns")
        during = _phases(recording, rank, start, start + length)
        numbers = ints(table, "number")
        wait, _ = wait_of_steps(recording.table(rank, "core_wait"), numbers)
        own = np.maximum(length - wait, 0)
        for i, step in enumerate(table.select(["profiled", "source"]).to_pylist()):
            number = int(numbers[i])
            rows[number].append((int(length[i]), step["profiled"] is False, int(own[i])))
            phases[number] |= during[i]
            if step["source"].startswith(_OPTIMIZER):
                optimizers[number] = step["source"]
    ordered = sorted(rows)
    return _Recorded(
        np.array(ordered, dtype=np.int64),
        np.array([np.mean([length for length, _, _ in rows[n]]) for n in ordered]),
        np.array([all(untraced for _, untraced, _ in rows[n]) for n in ordered], dtype=bool),
        np.array([np.mean([own for _, _, own in rows[n]]) for n in ordered]),
        [" + ".join(sorted(phases[n], key=lambda p: (p != TRAINING, p))) for n in ordered],
        [optimizers.get(n, "") for n in ordered],
    )


def _phases(recording: Run, rank: int, start_ns: np.ndarray, end_ns: np.ndarray) -> list[set[str]]:
    """Return, for each step, ``training`` and the names of the program phases that ran in it."""
    length = np.maximum(end_ns - start_ns, 1)
    shares: list[dict[str, float]] = [defaultdict(float) for _ in start_ns]
    for name, a, b in _phase_pieces(recording, rank):
        first = int(np.searchsorted(end_ns, a, side="right"))
        for i in range(first, int(np.searchsorted(start_ns, b))):
            shares[i][name] += float((min(b, end_ns[i]) - max(a, start_ns[i])) / length[i])
    return [
        {n for n, part in share.items() if part >= _LEAST_OVERLAP} | {TRAINING} for share in shares
    ]


def _phase_pieces(recording: Run, rank: int) -> Iterator[tuple[str, int, int]]:
    """Phase, start and end of each piece of a rank's time in which the phase is the innermost."""
    table = recording.table(rank, "program_phase")
    names = table["name"].to_pylist()
    for row, *span in zip(*innermost(ints(table, "start_ns"), ints(table, "end_ns")), strict=True):
        yield names[row], int(span[0]), int(span[1])


def _kinds_of(recorded: _Recorded) -> list[str]:
    """The kind of each recorded step."""
    names = [*recorded.phases]
    for optimizer in dict.fromkeys(recorded.optimizers):
        mine = [i for i, other in enumerate(recorded.optimizers) if other == optimizer]
        _tell_lengths(names, np.array([i for i in mine if names[i] == TRAINING], int), recorded)
        for i in mine:
            names[i] += f" ({optimizer})" if optimizer else ""
    return names


def _tell_lengths(names: list[str], training: np.ndarray, recorded: _Recorded) -> None:
    """Rename the first and the long ones among training steps of one optimizer."""
    lengths = recorded.own_ns
    if len(training):
        first = warm_up_steps(lengths[training])
        for i in training[:first]:
            names[i] = FIRST
        training = training[first:]
    quick = training[recorded.untraced[training]]
    if len(quick) >= MIN_STEPS:
        limit = _LONG_FACTOR * float(np.median(lengths[quick]))
        traced = np.setdiff1d(training, quick)
        # What is traced takes longer for that alone: it is held against its like as well.
        slow = (
            max(limit, _LONG_FACTOR * float(np.median(lengths[traced]))) if len(traced) else limit
        )
        long = np.concatenate([quick[lengths[quick] >= limit], traced[lengths[traced] >= slow]])
        share = lengths[long].sum() / max(lengths.sum(), 1)
        if share >= _LONG_SHARE and len(long) <= _LONG_MOST * len(training):
            for i in long:
                names[i] = LONG


def warm_up_steps(step_ns: np.ndarray) -> int:
    """Count the leading steps that are not like the others.

    A leading step is left out when it took longer than each later one, 20 % longer than their
    median and five of their standard deviations (by the median absolute deviation) longer; three
    always stay.
    """
    out = 0
    while len(step_ns) - out > _LEAST_KEPT:
        first, later = step_ns[out], step_ns[out + 1 :]
        middle = float(np.median(later))
        spread = float(np.median(np.abs(later - middle)))
        limit = max(_WARM_UP_RATIO * middle, middle + _WARM_UP_DEVIATIONS * spread, later.max())
        if first <= limit:
            break
        out += 1
    return out


def _kinds(
    windows: pa.Table,
    causes_by_step: Mapping[str | int | None, dict[str, int]],
    recorded: _Recorded,
    names: list[str],
    window_kind: np.ndarray,
    window_ns: np.ndarray,
) -> tuple[StepKind, ...]:
    numbers = ints(windows, "number")
    whole = max(float(recorded.length_ns.sum()), 1.0)
    kinds = []
    for name in dict.fromkeys(names):
        mine = np.array([n == name for n in names], dtype=bool)
        quick = mine & recorded.untraced
        traced = sorted({int(n) for n in numbers[window_kind == name]})
        causes: Counter[str] = Counter()
        for number in traced:
            causes.update(causes_by_step.get(number, {}))
        mine_ns = float(recorded.length_ns[mine].sum())
        kinds.append(
            StepKind(
                name=name,
                numbers=tuple(recorded.numbers[mine].tolist()),
                traced=tuple(traced),
                untraced=_spread(recorded.length_ns[quick], recorded.own_ns[quick]),
                traced_ns=round(float(window_ns[window_kind == name].mean())) if traced else None,
                time_ns=round(mine_ns),
                share_ratio=mine_ns / whole,
                causes_ns=dict(causes),
            )
        )
    return tuple(sorted(kinds, key=lambda k: (-k.time_ns, k.name)))


def _spread(lengths: np.ndarray, own: np.ndarray) -> Spread | None:
    if not len(lengths):
        return None
    low, median, high = (round(float(v)) for v in np.percentile(lengths, [25, 50, 75]))
    mean = round(float(lengths.mean()))
    uneven = all(float(v.mean()) > _UNEVEN * float(np.median(v)) for v in (lengths, own))
    each = tuple(np.rint(lengths).astype(int).tolist())
    statistic: Literal["median", "mean"] = "mean" if uneven else "median"
    return Spread(median, mean, low, high, len(lengths), each, statistic)


def _headline_kind(kinds: tuple[StepKind, ...]) -> str:
    """Training steps where they were traced, else the traced kind with the most steps."""
    traced = [k for k in kinds if k.traced]
    if not traced or any(k.name == TRAINING for k in traced):
        return TRAINING
    return max(traced, key=lambda k: (k.name.startswith(TRAINING), len(k.numbers))).name


def _interval(
    tracing_ns: int, untraced: np.ndarray, traced: np.ndarray, statistic: str
) -> tuple[int, int] | None:
    """95 % interval of a mean of traced steps less the median, or the mean, of untraced ones."""
    if min(len(untraced), len(traced)) < MIN_STEPS:
        return None
    if statistic == "mean":
        spread = float(np.std(untraced, ddof=1))
    else:
        spread = _MAD_TO_MEDIAN_ERROR * float(np.median(np.abs(untraced - np.median(untraced))))
    of_untraced = spread / np.sqrt(len(untraced))
    of_traced = float(np.std(traced, ddof=1)) / np.sqrt(len(traced))
    half = float(t_975(np.array(len(traced) - 1))) * float(np.hypot(of_untraced, of_traced))
    return round(tracing_ns - half), round(tracing_ns + half)


def _nearby(recorded: _Recorded, chosen: np.ndarray, traced: tuple[int, ...]) -> int | None:
    """Median length of the chosen steps next to the traced ones; None with too few."""
    if not traced:
        return None
    numbers, lengths = recorded.numbers[chosen], recorded.length_ns[chosen]
    near = np.append(
        lengths[numbers < traced[0]][-_NEARBY_STEPS:], lengths[numbers > traced[-1]][:_NEARBY_STEPS]
    )
    return round(float(np.median(near))) if len(near) >= MIN_STEPS else None


def _outside(recording: Run) -> Outside | None:
    """Time of the recording that no step holds; None where its bounds are not known.

    A step begins where the one before it ended, and the first one when the recording is set up:
    chopper alone works before the first step and between steps.
    """
    times: list[tuple[int, int, int]] = []
    phases: Counter[str] = Counter()
    for part in recording.manifest.ranks:
        table = recording.table(part.rank, "step")
        begin_ns, finish_ns = part.start_ns, part.end_ns
        if begin_ns is None or finish_ns is None or finish_ns <= begin_ns:
            return None
        if part.status == "imported" or not table.num_rows:
            return None
        start, end = ints(table, "start_ns"), ints(table, "end_ns")
        last_ns = int(end[-1])
        close_ns = (part.overhead.close_ns if part.overhead else None) or 0
        after = max(finish_ns - last_ns - close_ns, 0)
        between = int(np.maximum(start[1:] - end[:-1], 0).sum())
        own = max(int(start[0]) - begin_ns, 0) + between + max(finish_ns - last_ns - after, 0)
        times.append((after, own, finish_ns - begin_ns))
        for name, a, b in _phase_pieces(recording, part.rank):
            late = min(b, finish_ns) - max(a, last_ns)
            if late > 0:
                phases[name] += late
    if not times:
        return None
    after, own, whole = (round(float(v)) for v in np.mean(times, axis=0))
    return Outside(after, own, whole, {n: t // len(times) for n, t in sorted(phases.items())})
