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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa

from chopper.analyzers.causes.core_wait import wait_of_steps
from chopper.analyzers.trace.columns import first_with, innermost, ints, union
from chopper.statistics import MIN_STEPS, excess

TRAINING = "training"
FIRST = "first steps"
LONG = "long steps"
SLOWED_RATIO = 0.1
_SLOW_NEARBY = 1.3
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
_DRAINED_STEPS = 3
"""It takes a host more than one step to fill the launch queue, unless the device is busy for long:
the first one may be slow because writing the trace took the caches."""
_WARM_UP_RATIO = 1.2
_WARM_UP_DEVIATIONS = 5 * 1.4826
"""Median absolute deviations to standard deviations of normal noise, five of them."""
_LEAST_KEPT = 3


@dataclass(frozen=True, slots=True)
class Spread:
    """Times of several steps.

    Attributes:
        quartile_low_ns, quartile_high_ns: half of the steps lie between.
        lengths_ns: each of them, in the order of their numbers.
        statistic: which of the two is the step time. The median, which hiccups do not move; the
            mean where it is a fifth longer: steps that come in flights (a batch from each loader's
            worker, then a wait) have a median that no throughput belongs to. Steps that waited for
            a core, which other programs took, make no flights.
    """

    median_ns: int
    mean_ns: int
    quartile_low_ns: int
    quartile_high_ns: int
    steps_count: int
    lengths_ns: tuple[int, ...]
    statistic: Literal["median", "mean"]

    @property
    def value_ns(self) -> int:
        """The step time."""
        return self.mean_ns if self.statistic == "mean" else self.median_ns


@dataclass(frozen=True, slots=True)
class StepKind:
    """Steps in which the same phases ran.

    Attributes:
        name: ``training``, ``training + evaluation``, ``first steps``, ``long steps`` …
        steps, traced_steps: their numbers, and of those that the attribution has windows of.
        untraced: times of those that ran without a trace; None when there are none.
        traced_mean_ns: mean window of the traced ones; None when there are none.
        time_ns: all of them together, mean over ranks.
        share_ratio: of the time of all recorded steps.
        causes_ns: leaf cause → time in the windows of the traced ones, summed over ranks.
    """

    name: str
    steps: tuple[int, ...]
    traced_steps: tuple[int, ...]
    untraced: Spread | None
    traced_mean_ns: int | None
    time_ns: int
    share_ratio: float
    causes_ns: dict[str, int]


@dataclass(frozen=True, slots=True)
class Outside:
    """Time of a recording that belongs to no step, mean over ranks.

    Attributes:
        after_ns: after the last step, without what chopper took to end the recording.
        profiler_ns: chopper's own: before the first step, between steps (a trace begins, ends, is
            written), and to end the recording.
        recording_ns: the whole recording.
        phases_ns: program phase → its part of ``after_ns``; each nanosecond belongs to the
            innermost phase.
    """

    after_ns: int
    profiler_ns: int
    recording_ns: int
    phases_ns: dict[str, int]


@dataclass(frozen=True, slots=True)
class StepTime:
    """The step time of a run, with and without tracing.

    Attributes:
        kind: which steps it is of.
        untraced: steps of that kind that ran without a trace; None with ``untraced_reason``.
        traced_mean_ns: mean window of the ``traced_count`` traced ones; None when there are none.
        tracing_ns: what tracing itself added to a step: the median difference between traced and
            untraced steps, which one long step does not move; the difference of the means where
            steps are uneven or fewer than three were traced.
        tracing_ci95_ns: its 95 % interval; None with fewer than three traced steps.
        nearby_ns: median of the untraced steps next to the traced ones, up to five on each side;
            None with fewer than three. Where it is long as well, tracing is not the reason.
        drained_ns: length, for the host, of the shortest of the three untraced steps right after a
            trace, when the device had nothing left to do (mean over traces); None without any.
        kinds: all kinds, the most time first.
        outside: time of the recording in no step; None where its bounds are not known.
        phases_ns: program phase → its time in the recorded steps of all kinds, mean over ranks;
            each nanosecond belongs to the innermost phase.
    """

    kind: str
    untraced: Spread | None
    untraced_reason: str | None
    traced_mean_ns: int | None
    traced_count: int
    tracing_ns: int | None
    tracing_ci95_ns: tuple[int, int] | None
    nearby_ns: int | None
    drained_ns: int | None
    kinds: tuple[StepKind, ...]
    outside: Outside | None
    phases_ns: dict[str, int]

    @property
    def steps_count(self) -> int:
        """Number of recorded steps of all kinds."""
        return sum(len(kind.steps) for kind in self.kinds)

    @property
    def loop_ns(self) -> int:
        """Time of all recorded steps and of what follows the last one, mean over ranks."""
        return sum(k.time_ns for k in self.kinds) + (self.outside.after_ns if self.outside else 0)

    @property
    def loop_phases_ns(self) -> dict[str, int]:
        """Program phase → its time in the loop, mean over ranks."""
        return dict(
            Counter(self.phases_ns) + Counter(self.outside.phases_ns if self.outside else {})
        )

    @property
    def headline_ns(self) -> int | None:
        """The step time: of the untraced steps, else the mean of the traced ones."""
        return self.traced_mean_ns if self.untraced is None else self.untraced.value_ns

    @property
    def tracing_ratio(self) -> float | None:
        """Time that tracing added, as a share of the untraced step."""
        if self.tracing_ns is None or self.untraced is None or not self.untraced.value_ns:
            return None
        return self.tracing_ns / self.untraced.value_ns

    @property
    def is_slow_nearby(self) -> bool:
        """Tell whether the untraced steps next to the traced ones took much longer than others."""
        return (
            self.untraced is not None
            and self.nearby_ns is not None
            and self.nearby_ns > _SLOW_NEARBY * self.untraced.value_ns
        )

    @property
    def is_tracing_certain(self) -> bool:
        """Tell whether tracing made steps longer, beyond noise and what slowed others nearby."""
        low_ns = self.tracing_ci95_ns[0] if self.tracing_ci95_ns else self.tracing_ns
        return low_ns is not None and low_ns > 0 and not self.is_slow_nearby

    @property
    def is_slowed_by_tracing(self) -> bool:
        """Tell whether tracing added more than a tenth to a step, beyond noise."""
        if not self.is_tracing_certain or self.untraced is None:
            return False
        low_ns = self.tracing_ci95_ns[0] if self.tracing_ci95_ns else self.tracing_ns or 0
        return low_ns > SLOWED_RATIO * self.untraced.value_ns

    @property
    def scale(self) -> float:
        """Untraced over traced time: what turns a time of traced steps into one at full speed."""
        if self.untraced is None or not self.traced_mean_ns:
            return 1.0
        return self.untraced.value_ns / self.traced_mean_ns

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON form."""
        document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        for kind in document["kinds"]:
            kind["steps_count"] = len(kind["steps"])
        for part in (document, *document["kinds"]):
            if part["untraced"] is not None:
                del part["untraced"]["lengths_ns"], part["untraced"]["statistic"]
        headline = {"headline_ns": self.headline_ns, "tracing_ratio": self.tracing_ratio}
        return document | headline


@dataclass(frozen=True)
class RecordedSteps:
    """Steps of one rank as recorded.

    Attributes:
        step, program_phase, core_wait: its tables; None in place of empty ones.
        recording_ns: start and end of its recording; None where they are not known.
        close_ns: time that chopper took to end it.
    """

    step: pa.Table
    program_phase: pa.Table | None
    core_wait: pa.Table | None
    recording_ns: tuple[int, int] | None
    close_ns: int


@dataclass(frozen=True)
class _Recorded:
    """Recorded steps over all ranks, by number.

    Attributes:
        numbers: (steps,) ascending.
        length_ns: (steps,) mean over the ranks that have it.
        own_ns: (steps,) the same without waiting for a core, which other programs decide.
        untraced: (steps,) no rank was taking a trace, as far as that was recorded.
        phases: (steps,) names of the program phases that ran in it, "training" first.
        optimizers: (steps,) "", or which optimizer it began with where that is not the first kind.
    """

    numbers: np.ndarray
    length_ns: np.ndarray
    own_ns: np.ndarray
    untraced: np.ndarray
    phases: list[str]
    optimizers: list[str]


def step_time(
    ranks: Sequence[RecordedSteps],
    windows: pa.Table,
    causes_by_step: Mapping[str | int | None, dict[str, int]],
) -> StepTime:
    """Find the step time with and without tracing, and the kinds of steps.

    STEP, PROGRAM_PHASE, CORE_WAIT, WINDOW -> StepTime.

    Args:
        ranks: what each rank recorded.
        windows: of all ranks.
        causes_by_step: step number → leaf cause → nanoseconds, summed over ranks.
    """
    window_ns = ints(windows, "end_ns") - ints(windows, "start_ns")
    recorded = _recorded(ranks)
    if not recorded.untraced.any():
        recorded = _by_window(ints(windows, "number"), window_ns, recorded)
    names = np.array(_kinds_of(recorded), object)
    kind_of = dict(zip(recorded.numbers.tolist(), names, strict=True))
    # A whole trace beside numbered steps is of no kind: it holds any number of them.
    unnumbered = "" if windows["number"].null_count < windows.num_rows else TRAINING
    window_kind = np.array(
        [
            unnumbered if n is None else kind_of.get(n, TRAINING)
            for n in windows["number"].to_pylist()
        ],
        object,
    )
    kinds = _kinds(windows, causes_by_step, recorded, names, window_kind, window_ns)
    kind = _headline_kind(kinds)
    mine = next((k for k in kinds if k.name == kind), None)
    lengths = window_ns[window_kind == kind] if mine is not None else window_ns
    traced_ns = round(float(lengths.mean())) if len(lengths) else None
    untraced = mine.untraced if mine is not None else None
    reason = None
    if untraced is None or untraced.steps_count < MIN_STEPS:
        reason = (
            "the recording does not say which steps were traced"
            if not recorded.untraced.any()
            else f"fewer than {MIN_STEPS} {kind} steps ran without a trace"
        )
        untraced = None
    tracing = interval = nearby = drained = None
    if mine is not None and untraced is not None and traced_ns is not None:
        tracing = traced_ns - untraced.value_ns
        chosen = (names == kind) & recorded.untraced
        nearby = _nearby(recorded, chosen, mine.traced_steps)
        drained = _drained(recorded, chosen)
        # Ranks wait for each other: a step counts once.
        numbers, of = np.unique(ints(windows, "number")[window_kind == kind], return_inverse=True)
        of_steps = np.bincount(of, lengths) / np.bincount(of) if len(numbers) > 1 else lengths
        added = excess(of_steps, recorded.length_ns[chosen], untraced.statistic)
        if added is not None:
            tracing, *low_high = (round(value) for value in added)
            interval = (low_high[0], low_high[1])
    return StepTime(
        kind=kind,
        untraced=untraced,
        untraced_reason=reason,
        traced_mean_ns=traced_ns,
        # Else the windows of the rank that has most of them.
        traced_count=len(mine.traced_steps)
        if mine is not None
        else int(np.bincount(ints(windows, "rank")).max(initial=0)),
        tracing_ns=tracing,
        tracing_ci95_ns=interval,
        nearby_ns=nearby,
        drained_ns=drained,
        kinds=kinds,
        outside=_outside(ranks),
        phases_ns=_in_phases(ranks),
    )


def _recorded(ranks: Sequence[RecordedSteps]) -> _Recorded:
    parts = [np.zeros((4, 0), np.int64)]
    phases: dict[int, set[str]] = defaultdict(set)
    optimizers: dict[int, str] = {}
    for rank in ranks:
        start, end, number = (ints(rank.step, n) for n in ("start_ns", "end_ns", "number"))
        wait, _ = wait_of_steps(rank.core_wait, number)
        traced = rank.step["profiled"].fill_null(True).to_numpy()
        parts.append(np.stack([number, end - start, np.maximum(end - start - wait, 0), traced]))
        sources = rank.step["source"].to_pylist()
        during = _phases(rank, start, end)
        for n, source, names in zip(number.tolist(), sources, during, strict=True):
            phases[n] |= names
            if source.startswith(_OPTIMIZER):
                optimizers[n] = source
    number, length, own_ns, traced = np.concatenate(parts, axis=1)
    numbers, of = np.unique(number, return_inverse=True)
    count = np.bincount(of)
    return _Recorded(
        numbers,
        np.bincount(of, length) / count,
        np.bincount(of, own_ns) / count,
        np.bincount(of, traced) == 0,
        [" + ".join(sorted(phases[n], key=lambda p: (p != TRAINING, p))) for n in numbers.tolist()],
        [optimizers.get(n, "") for n in numbers.tolist()],
    )


def _by_window(number: np.ndarray, window_ns: np.ndarray, recorded: _Recorded) -> _Recorded:
    """Steps as long as their windows, where all that is known is a trace.

    A host that runs ahead of its device takes another time for a step than the step takes.
    """
    at = first_with(recorded.numbers, number)
    hit, size = at >= 0, len(recorded.numbers)
    count = np.bincount(at[hit], minlength=size)
    mean_ns = np.bincount(at[hit], window_ns[hit], size) / np.maximum(count, 1)
    length = np.where(count > 0, mean_ns, recorded.length_ns)
    own_ns = np.maximum(length - (recorded.length_ns - recorded.own_ns), 0)
    return replace(recorded, length_ns=length, own_ns=np.where(count > 0, own_ns, recorded.own_ns))


def _phases(rank: RecordedSteps, start_ns: np.ndarray, end_ns: np.ndarray) -> list[set[str]]:
    """Return, for each step, ``training`` and the names of the program phases that ran in it."""
    length = np.maximum(end_ns - start_ns, 1)
    shares: list[dict[str, float]] = [defaultdict(float) for _ in start_ns]
    for name, a, b in _phase_pieces(rank.program_phase):
        first = int(np.searchsorted(end_ns, a, side="right"))
        for i in range(first, int(np.searchsorted(start_ns, b))):
            shares[i][name] += float((min(b, end_ns[i]) - max(a, start_ns[i])) / length[i])
    return [
        {n for n, part in share.items() if part >= _LEAST_OVERLAP} | {TRAINING} for share in shares
    ]


def _phase_pieces(table: pa.Table | None) -> Iterator[tuple[str, int, int]]:
    """Phase, start and end of each piece of a rank's time in which the phase is the innermost."""
    if table is None:
        return
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
    first = warm_up_steps(lengths[training])
    for i in training[:first]:
        names[i] = FIRST
    training = training[first:]
    untraced = recorded.untraced[training]
    quick, traced = training[untraced], training[~untraced]
    if len(quick) < MIN_STEPS:
        return
    limit = _LONG_FACTOR * float(np.median(lengths[quick]))
    # What is traced takes longer for that alone: it is held against its like as well.
    slow = max(limit, _LONG_FACTOR * float(np.median(lengths[traced]))) if len(traced) else limit
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
    names: np.ndarray,
    window_kind: np.ndarray,
    window_ns: np.ndarray,
) -> tuple[StepKind, ...]:
    numbers = ints(windows, "number")
    total_ns = max(float(recorded.length_ns.sum()), 1.0)
    kinds = []
    for name in dict.fromkeys(names):
        mine = names == name
        untraced = mine & recorded.untraced
        traced = sorted({*numbers[window_kind == name].tolist()})
        causes: Counter[str] = Counter()
        for number in traced:
            causes.update(causes_by_step.get(number, {}))
        mine_ns = float(recorded.length_ns[mine].sum())
        kinds.append(
            StepKind(
                name=name,
                steps=tuple(recorded.numbers[mine].tolist()),
                traced_steps=tuple(traced),
                untraced=_spread(recorded.length_ns[untraced], recorded.own_ns[untraced]),
                traced_mean_ns=round(float(window_ns[window_kind == name].mean()))
                if traced
                else None,
                time_ns=round(mine_ns),
                share_ratio=mine_ns / total_ns,
                causes_ns=dict(causes),
            )
        )
    return tuple(sorted(kinds, key=lambda k: (-k.time_ns, k.name)))


def _spread(lengths: np.ndarray, own_ns: np.ndarray) -> Spread | None:
    if not len(lengths):
        return None
    low, median, high = (round(float(v)) for v in np.percentile(lengths, [25, 50, 75]))
    uneven = all(float(v.mean()) > _UNEVEN * float(np.median(v)) for v in (lengths, own_ns))
    return Spread(
        median_ns=median,
        mean_ns=round(float(lengths.mean())),
        quartile_low_ns=low,
        quartile_high_ns=high,
        steps_count=len(lengths),
        lengths_ns=tuple(np.rint(lengths).astype(int).tolist()),
        statistic="mean" if uneven else "median",
    )


def _headline_kind(kinds: tuple[StepKind, ...]) -> str:
    """Training steps where they were traced, else the traced kind with the most steps."""
    traced = [k for k in kinds if k.traced_steps]
    if not traced or any(k.name == TRAINING for k in traced):
        return TRAINING
    return max(traced, key=lambda k: (k.name.startswith(TRAINING), len(k.steps))).name


def _nearby(recorded: _Recorded, chosen: np.ndarray, traced: tuple[int, ...]) -> int | None:
    """Median length of the chosen steps next to the traced ones; None with too few."""
    if not traced:
        return None
    numbers, lengths = recorded.numbers[chosen], recorded.length_ns[chosen]
    near = np.append(
        lengths[numbers < traced[0]][-_NEARBY_STEPS:], lengths[numbers > traced[-1]][:_NEARBY_STEPS]
    )
    return round(float(np.median(near))) if len(near) >= MIN_STEPS else None


def _drained(recorded: _Recorded, chosen: np.ndarray) -> int | None:
    """Shortest of the chosen steps right after a trace, mean over traces; None without any."""
    numbers, lengths = recorded.numbers, recorded.length_ns
    ends = np.flatnonzero(~recorded.untraced[:-1] & recorded.untraced[1:])
    shortest = []
    for end in ends:
        ahead = numbers[end + 1 :][:_DRAINED_STEPS] - numbers[end] <= _DRAINED_STEPS
        near = slice(end + 1, end + 1 + len(ahead))
        quick = lengths[near][ahead & chosen[near]]
        if len(quick):
            shortest.append(float(quick.min()))
    return round(float(np.mean(shortest))) if shortest else None


def _in_phases(ranks: Sequence[RecordedSteps]) -> dict[str, int]:
    """Return the time of each program phase within the recorded steps, mean over ranks."""
    times: Counter[str] = Counter()
    for rank in ranks:
        if rank.step.num_rows:
            steps = union(ints(rank.step, "start_ns"), ints(rank.step, "end_ns"))
            for name, a, b in _phase_pieces(rank.program_phase):
                times[name] += int(steps.within(np.array([a]), np.array([b]))[0])
    return {name: t // len(ranks) for name, t in sorted(times.items()) if t}


def _outside(ranks: Sequence[RecordedSteps]) -> Outside | None:
    """Time of the recording that no step holds; None where its bounds are not known.

    A step begins where the one before it ended, and the first one when the recording is set up:
    chopper alone works before the first step and between steps.
    """
    times: list[tuple[int, int, int]] = []
    phases: Counter[str] = Counter()
    for rank in ranks:
        if rank.recording_ns is None or not rank.step.num_rows:
            return None
        begin_ns, finish_ns = rank.recording_ns
        start, end = ints(rank.step, "start_ns"), ints(rank.step, "end_ns")
        last_ns = int(end[-1])
        after = max(finish_ns - last_ns - rank.close_ns, 0)
        between = int(np.maximum(start[1:] - end[:-1], 0).sum())
        inside_ns = max(int(start[0]) - begin_ns, 0) + between + max(finish_ns - last_ns - after, 0)
        times.append((after, inside_ns, finish_ns - begin_ns))
        for name, a, b in _phase_pieces(rank.program_phase):
            late = min(b, finish_ns) - max(a, last_ns)
            if late > 0:
                phases[name] += late
    if not times:
        return None
    after, inside_ns, total_ns = (round(float(v)) for v in np.mean(times, axis=0))
    return Outside(
        after, inside_ns, total_ns, {n: t // len(times) for n, t in sorted(phases.items())}
    )
