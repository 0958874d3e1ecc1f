"""Episodes of a reduced clock: reason, cost and kernels.

A sample covers the time half-way to its neighbours, but not gaps in sampling. Of several reasons
at once, the first of power, heat and a set clock counts. Episodes include untraced time.

If a driver reports no reasons, its counters of throttled time mark the episodes, with the
resolution of their sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from chopper import wording as fmt
from chopper.analyzers.attributed import Attributed
from chopper.analyzers.causes.clock import CLOCK_LABELS, HOLE_FACTOR, ClockSeries
from chopper.analyzers.causes.factors import set_clock_hz
from chopper.analyzers.events.clocked import Clocked
from chopper.analyzers.events.groups import Groups, real_or_null, reals, sum_by, whole_or_null
from chopper.analyzers.events.meter import Counter
from chopper.analyzers.trace.columns import dictionary, ints, nullable
from chopper.analyzers.trace.samples import of_rank, per_device
from chopper.analyzers.views import View, column, optional
from chopper.tables import TABLES

_HELD = ["power_cap", "thermal", "application"]
_COLUMNS = [CLOCK_LABELS.index(label) for label in _HELD]
# What the driver counts itself of each reason: totals of time, several of which may run at once.
_COUNTED = (
    ("power_throttle_ns", "board_limit_throttle_ns", "power_brake_ns"),
    ("thermal_throttle_ns", "software_thermal_ns", "hardware_thermal_ns"),
    ("application_clock_ns", "sync_boost_throttle_ns"),
)
_KERNELS_NAMED = 3

VIEW = View(
    "throttle_episodes",
    __doc__,
    (
        column("rank", "Global rank that the row is about.", "int32"),
        optional("device_id", "Ordinal of the rank's device; null where not recorded.", "int32"),
        column("reason", "Reason for the reduced clock: power_cap, thermal or application."),
        column("dur_ns", "Duration of the episode."),
        optional("loss_ns", "Time that kernels in the episode lost to the clock."),
        optional("clock_mean_hz", "Mean SM clock in the episode; null where not sampled."),
        optional("clock_low_hz", "Lowest sample of the SM clock; null where not sampled."),
        optional("power_mean_w", "Mean board power; null where not sampled."),
        optional("held_ns", "Throttled time of the episode by the driver's own counter."),
        column("kernel_count", "Number of compute kernels in the episode."),
        column("time_ns", "Exclusive time of these kernels."),
        optional("op", "Operator that lost most time; without a loss, the one that ran longest."),
        optional("kernels", "The three kernels that lost most time, with their shares.", "text"),
        optional("step", "Index of the step in which the episode's first kernel ran.", "int32"),
        column("source", "Source: reasons of samples, or counters of throttled time."),
        column("start_ns", "Start of the episode, Unix time."),
    ),
    version=2,
    title="Throttle episodes",
    section="Clocks",
    needs="no sample with a throttle reason was recorded, or no reason is power, heat or a set "
    "clock",
)


@dataclass(frozen=True)
class _Episodes:
    """Times with one reason, in order and disjoint. Means are NaN where not known."""

    reason: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    clock_hz: np.ndarray
    low_hz: np.ndarray
    power_w: np.ndarray
    source: str


def throttle_episodes(run: Attributed, clocked: Clocked | None) -> pa.Table:
    """DEVICE_CLOCK, DEVICE_COUNTER, DEVICE_EVENT, PIECE -> THROTTLE_EPISODES, most loss first."""
    parts = []
    for rank in run.recording.ranks:
        clocks = dict(per_device(run.recording, rank, "device_clock"))
        counters = dict(per_device(run.recording, rank, "device_counter"))
        factors = run.factors.get(rank)
        set_hz = set_clock_hz(
            of_rank(run.recording, rank, "device_limit"),
            np.zeros(0) if factors is None else factors.reference_hz,
        )
        for number in dict.fromkeys([*clocks, *counters]):
            samples = clocks.get(number, TABLES["device_clock"].empty())
            counted = counters.get(number, TABLES["device_counter"].empty())
            time_ns, grown = ints(counted, "time_ns"), _grown(counted)
            series = ClockSeries.of(samples, set_hz=set_hz) if samples.num_rows else None
            episodes = _of_counters(time_ns, grown, series)
            if series is not None and (series.reasons >= 0).any():
                episodes = _of_reasons(series)
            if episodes is not None and len(episodes.reason):
                size = len(episodes.reason)
                device = run.recording.part(rank).device_id if number is None else number
                columns = {
                    "rank": np.full(size, rank),
                    "device_id": [device] * size,
                    "reason": dictionary(episodes.reason, _HELD),
                    "start_ns": episodes.start_ns,
                    "dur_ns": episodes.end_ns - episodes.start_ns,
                    "clock_mean_hz": whole_or_null(episodes.clock_hz),
                    "clock_low_hz": whole_or_null(episodes.low_hz),
                    "power_mean_w": real_or_null(episodes.power_w),
                    "held_ns": whole_or_null(_counted(time_ns, grown, episodes)),
                    "source": dictionary(np.zeros(size, np.int64), [episodes.source]),
                    **_hit(clocked, rank, episodes),
                }
                parts.append(VIEW.of(columns))
    table = VIEW.joined(parts)
    return table.sort_by([("loss_ns", "descending"), ("dur_ns", "descending")])


def _of_reasons(series: ClockSeries) -> _Episodes:
    """Episodes from what the readings say; one without reasons interrupts nothing."""
    told = series.reasons >= 0
    held = series.labels[told][:, _COLUMNS]
    reason = np.where(held.any(axis=1), held.argmax(axis=1), -1)
    time, clock, power = series.time_ns[told], series.clock_hz[told], series.power_w[told]
    from_ns, until_ns, hole = _stands_for(time)
    begins = np.flatnonzero(np.concatenate([[True], (reason[1:] != reason[:-1]) | hole]))
    length = np.maximum(until_ns - from_ns, 1).astype(np.float64)
    whole = np.add.reduceat(length, begins)
    kept = np.flatnonzero(reason[begins] >= 0)
    return _Episodes(
        reason[begins][kept],
        from_ns[begins][kept],
        until_ns[np.append(begins[1:], len(time)) - 1][kept],
        (np.add.reduceat(clock * length, begins) / whole)[kept],
        np.minimum.reduceat(clock, begins)[kept],
        (np.add.reduceat(power * length, begins) / whole)[kept],
        "reasons",
    )


def _stands_for(time_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(start and end of the time that each reading stands for; mask of gaps that are holes)."""
    gap = np.diff(time_ns)
    usual = int(np.median(gap)) if len(gap) else 0
    hole = gap > HOLE_FACTOR * usual
    middle = (time_ns[:-1] + time_ns[1:]) // 2
    until = np.where(hole, time_ns[:-1] + usual // 2, middle)
    begin = np.where(hole, time_ns[1:] - usual // 2, middle)
    return np.append(time_ns[:1], begin), np.append(until, time_ns[-1:]), hole


def _of_counters(
    time: np.ndarray, grown: np.ndarray, series: ClockSeries | None
) -> _Episodes | None:
    """Episodes from totals of throttled time: the readings between which one of them grew."""
    if not np.isfinite(grown).any():
        return None
    held = np.nan_to_num(grown) > 0
    reason = np.where(held.any(axis=1), held.argmax(axis=1), -1)
    begins = np.flatnonzero(np.concatenate([[True], reason[1:] != reason[:-1]]))
    start, end = time[begins], time[np.append(begins[1:], len(time) - 1)]
    kept = np.flatnonzero(reason[begins] >= 0)
    start, end = start[kept], end[kept]
    clock, low, power = (np.full(len(kept), np.nan) for _ in range(3))
    if series is not None and len(series.time_ns) > 1:
        at = series.place(start, end)
        clock = np.where(at.inside, series.mean(series.clock_hz, at), np.nan)
        power = np.where(at.inside, series.mean_power(at), np.nan)
    return _Episodes(reason[begins][kept], start, end, clock, low, power, "counters")


def _grown(counters: pa.Table) -> np.ndarray:
    """(readings − 1, reasons): growth of the throttled time, the longest of several counts.

    NaN where nothing counts it.
    """
    grown = np.full((max(counters.num_rows - 1, 0), len(_HELD)), np.nan)
    for i, names in enumerate(_COUNTED):
        for name in names:
            change = np.diff(reals(counters, name))
            # A total that went backwards was reset: nothing is known of that gap.
            grown[:, i] = np.fmax(grown[:, i], np.where(change >= 0, change, np.nan))
    return grown


def _counted(time: np.ndarray, grown: np.ndarray, episodes: _Episodes) -> np.ndarray:
    """Throttled time within each episode by the driver's own count, NaN where it counts none."""
    found = np.full(len(episodes.reason), np.nan)
    for i in np.flatnonzero(np.isfinite(grown).any(axis=0)).tolist():
        total = np.concatenate([[0.0], np.cumsum(np.nan_to_num(grown[:, i]))])
        start, end = episodes.start_ns, episodes.end_ns
        within = Counter(time, total, np.isnan(grown[:, i])).growth(start, end)
        mine = (episodes.reason == i) & (end > time[0]) & (start < time[-1])
        found[mine] = within[mine]
    return found


def _hit(found: Clocked | None, rank: int, episodes: _Episodes) -> dict[str, object]:
    """Cost of the episodes: of the kernels whose middle lies in them."""
    size = len(episodes.reason)
    if found is None:
        none, zero = pa.nulls(size, pa.int64()), np.zeros(size, dtype=np.int64)
        texts = {"op": dictionary(zero - 1, []), "kernels": [None] * size}
        return {"loss_ns": none, "time_ns": zero, "kernel_count": zero, "step": none, **texts}
    events = found.events
    mine = np.flatnonzero(events.rank[found.rows] == rank)
    rows = found.rows[mine]
    middle = events.start_ns[rows] + events.dur_ns[rows] // 2
    at = np.searchsorted(episodes.start_ns, middle, side="right") - 1
    inside = (at >= 0) & (middle < episodes.end_ns[np.maximum(at, 0)])
    at, mine, rows = at[inside], mine[inside], rows[inside]
    loss = sum_by(at, found.loss_ns[mine], size)
    kernel_count = np.bincount(at, minlength=size)
    # Where nothing was lost, what ran longest stands for what was hit.
    weight = np.where(loss[at] > 0, found.loss_ns[mine], found.time_ns[mine])
    names = events.kernel[1]
    ops = _largest(at, events.op[0][rows], weight, size)
    kernels = [
        [f"{fmt.kernel_name(names[code])} {fmt.ratio(of[code])}" for code in [*of][:_KERNELS_NAMED]]
        for of in _largest(at, events.kernel[0][rows], weight, size)
    ]
    step = np.full(size, -1, dtype=np.int64)
    step[at[::-1]] = events.step[rows][::-1]
    return {
        "loss_ns": pa.array(loss, mask=kernel_count == 0),
        "time_ns": sum_by(at, found.time_ns[mine], size),
        "kernel_count": kernel_count,
        "op": dictionary(np.array([next(iter(of), -1) for of in ops]), events.op[1]),
        "kernels": ["; ".join(named) or None for named in kernels],
        "step": nullable(step),
    }


def _largest(
    episode: np.ndarray, code: np.ndarray, weight: np.ndarray, size: int
) -> list[dict[int, float]]:
    """Return the codes of each episode with their shares of its weight, the largest first."""
    some = np.flatnonzero(weight > 0)
    groups = Groups([episode[some], code[some]])
    total = np.bincount(groups.of_row, weights=weight[some], minlength=len(groups))
    of, codes = episode[some][groups.first], code[some][groups.first]
    whole = np.bincount(of, weights=total, minlength=size)
    found: list[dict[int, float]] = [{} for _ in range(size)]
    for i in np.argsort(-total, kind="stable").tolist():
        found[of[i]][int(codes[i])] = total[i] / whole[of[i]]
    return found
