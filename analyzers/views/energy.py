"""Energy of the run, its steps, phases and tokens, from differences of the devices' counters.

A counter of energy moves in steps of up to 100 ms and boards differ by 5 % (arXiv:2312.02741): what
it says of a kernel or of a short step is noise. Differences are taken over at least 5 s: of whole
steps one after the other, or of a phase that lasts so long without a break. What is shorter is
refused, with the reason. Where a device has no counter, its power is integrated over the same spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.samples import per_device, socket_of, table_beside
from chopper.analyzers.views.events import of_run
from chopper.analyzers.views.utilization import tokens_of
from chopper.tables import TABLES
from chopper.wording import ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.attribution import Attribution

MIN_SPAN_NS = 5_000_000_000
"""Over less than this a difference of energy counters says nothing."""
MAX_ERROR_RATIO = 0.1
"""With edges known worse than this share of the energy, nothing is claimed."""
_JUMP_RATIO = 2.0
"""Of its power limit a board draws no more, however short the time."""
_MOST_W = 10_000.0
"""No device or socket draws more; what holds where no limit was recorded."""
_COUNTER_STEP_NS = 100_000_000
"""A counter's own step: the energy of so much time may come at once."""
_NAMED = 4
"""Devices that a reason names."""
_MAX_POWER_GAP_NS = 1_500_000_000
"""Between power readings further apart the power is not known."""
_GROUPS = 200
"""Rows of groups of steps of one device at most: longer runs have longer groups."""
_NO_TOKENS = "none per token: nobody counted the tokens of these steps (prof.step(tokens=…) does)"
_BREAK_RATIO = 0.01
"""Steps further apart than this share of a step do not follow each other."""


@dataclass(frozen=True)
class Meter:
    """Energy since some moment, at the readings of one device or domain.

    Attributes:
        time_ns: of the readings, ascending.
        total_j: energy until then.
        broken: (readings − 1,) gaps over which nothing is known: the counter went backwards or
            jumped, or
            power was not read for too long.
        lag_ns: how long the counter stands still between its own updates.
        basis: ``counter`` or ``power``.
    """

    time_ns: np.ndarray
    total_j: np.ndarray
    broken: np.ndarray
    lag_ns: float
    basis: str

    def at(self, time_ns: np.ndarray) -> np.ndarray:
        """Energy until each moment, linear between readings."""
        zero = self.time_ns[0]
        found: np.ndarray = np.interp(time_ns - zero, self.time_ns - zero, self.total_j)
        return found

    def usable(self, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """Mask of the spans that lie within the readings and touch no broken gap."""
        last = len(self.time_ns) - 2
        first = np.clip(np.searchsorted(self.time_ns, start_ns, side="right") - 1, 0, last)
        final = np.clip(np.searchsorted(self.time_ns, end_ns, side="left") - 1, first, last)
        bad = np.concatenate([[0], np.cumsum(self.broken)])
        inside = (start_ns >= self.time_ns[0]) & (end_ns <= self.time_ns[-1])
        mask: np.ndarray = inside & (bad[final + 1] == bad[first])
        return mask

    def edge_ns(self, time_ns: int) -> float:
        """How far from a moment the readings around it lie, or the counter's own step."""
        last = len(self.time_ns) - 2
        at = int(np.clip(np.searchsorted(self.time_ns, time_ns, side="right") - 1, 0, last))
        gap = self.time_ns[at + 1] - self.time_ns[at]
        if self.time_ns[at] == time_ns and at > 0:
            # A reading itself, the last one before a break it may be: the shorter gap beside it.
            gap = min(gap, self.time_ns[at] - self.time_ns[at - 1])
        return max(float(gap), self.lag_ns)


def meter_of(
    time_ns: np.ndarray, total_j: np.ndarray, limit_w: float | None = None
) -> Meter | None:
    """A counter's readings, NaN for absent; None with fewer than two or when it never moved.

    A step up that would take more than twice the power limit is a jump, not energy: the counter was
    reset or spoilt there, as where it steps down.

    Args:
        time_ns: of the readings.
        total_j: what the counter said.
        limit_w: power limit of what it counts; None where it is not known.
    """
    good = np.isfinite(total_j)
    time, total = _in_order(time_ns[good], total_j[good])
    if len(time) < 2 or not (np.diff(total) > 0).any():
        return None
    change = np.diff(total)
    moved = time[1:][change != 0]
    lag = float(np.median(np.diff(moved))) if len(moved) > 1 else 0.0
    most_w = _JUMP_RATIO * limit_w if limit_w else _MOST_W
    jumped = change > most_w * (np.diff(time) + lag + _COUNTER_STEP_NS) / 1e9
    return Meter(time, total, (change < 0) | jumped, lag, "counter")


def meter_of_power(time_ns: np.ndarray, power_w: np.ndarray) -> Meter | None:
    """Readings of power, integrated by the trapezoid rule; None with fewer than two."""
    good = np.isfinite(power_w)
    time, power = _in_order(time_ns[good], power_w[good])
    if len(time) < 2:
        return None
    span = np.diff(time)
    area = (power[:-1] + power[1:]) / 2 * span / 1e9
    return Meter(
        time, np.concatenate([[0.0], np.cumsum(area)]), span > _MAX_POWER_GAP_NS, 0.0, "power"
    )


def _in_order(time_ns: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    time, first = np.unique(time_ns, return_index=True)
    return time, values[first]


def energy(attribution: Attribution) -> pa.Table:
    """Energy per step, token and phase. DEVICE_COUNTER, HOST_ENERGY, ENERGY_WINDOW, STEP -> ENERGY.

    One row for all devices together, then per device and host domain the whole of its steps,
    groups of steps of at least 5 s each, and phases; then the spans that another tool measured.
    """
    units = [*_devices(attribution), *_hosts(attribution)]
    rows: list[dict[str, Any]] = []
    whole: list[tuple[_Unit, dict[str, Any]]] = []
    for unit in units:
        told = _of_steps(unit)
        whole.append((unit, told[0]))
        rows += told
        if unit.device:
            rows += _of_phases(attribution, unit)
    together = _together([(u, r) for u, r in whole if u.device])
    if together is not None:
        rows.insert(0, together)
    for row in rows:
        if row["step_count"] and "energy_j" in row and "tokens_count" not in row:
            row["reason"] = _NO_TOKENS
    rows += _of_windows(attribution)
    order = {"run": 0, "phase": 1, "window": 2, "steps": 3}
    rows.sort(key=lambda row: order[str(row["scope"])])
    return pa.Table.from_pylist(rows, schema=TABLES["energy"].arrow)


@dataclass(frozen=True)
class _Unit:
    """What has one counter: a device (a socket), or a domain of a host's processors.

    Attributes:
        name: ``device 3`` or ``package-0``.
        host: name of the host, where known.
        ranks: ranks that compute on it.
        meter: its readings; None with the reason.
        steps: (number, start_ns, end_ns) of its first rank, in order.
        tokens: step number → tokens of all its ranks; None where not known, with the source.
    """

    name: str
    host: str | None
    ranks: tuple[int, ...]
    device: bool
    meter: Meter | None
    reason: str | None
    steps: np.ndarray
    tokens: dict[int, int] | float | None
    tokens_from: str | None

    def row(self, scope: str) -> dict[str, Any]:
        """What is the same in each row."""
        return {
            "scope": scope,
            "source": self.name,
            "host": self.host,
            "ranks": ranges(self.ranks),
            "step_count": 0,
            "basis": None if self.meter is None else self.meter.basis,
        }


def _devices(attribution: Attribution) -> list[_Unit]:
    """Devices of the run's ranks; ranks on parts of one socket share its counter."""
    run = attribution.run
    shared: dict[Any, list[int]] = {}
    for rank in run.ranks:
        shared.setdefault(socket_of(run, rank), []).append(rank)
    found = []
    for ranks in shared.values():
        counters = dict(per_device(run, ranks[0], "device_counter"))
        clocks = dict(per_device(run, ranks[0], "device_clock"))
        limits = dict(per_device(run, ranks[0], "device_limit"))
        for number in dict.fromkeys([*counters, *clocks]):
            counter, clock = counters.get(number), clocks.get(number)
            meter = _device_meter(counter, clock, _limit_w(limits.get(number)))
            device = run.part(ranks[0]).device_id if number is None else number
            found.append(
                _unit(
                    attribution,
                    f"device {ranks[0] if device is None else device}",
                    tuple(ranks),
                    meter,
                    _why_no_meter(counter, clock),
                    device=True,
                )
            )
    return found


def _limit_w(limits: pa.Table | None) -> float | None:
    """The largest power limit that could be set, or that was in force."""
    if limits is None:
        return None
    known = np.concatenate([_real(limits, n) for n in ("power_limit_max_w", "power_limit_w")])
    known = known[known > 0]
    return float(known.max()) if len(known) else None


def _device_meter(
    counter: pa.Table | None, clock: pa.Table | None, limit_w: float | None
) -> Meter | None:
    """A device's counter; where it has none, its power: as it was read, else as the driver averaged."""
    meter = None
    if counter is not None:
        meter = meter_of(ints(counter, "time_ns"), _real(counter, "energy_j"), limit_w)
    if meter is None and clock is not None:
        meter = meter_of_power(ints(clock, "time_ns"), _real(clock, "power_w"))
    if meter is None and counter is not None:
        meter = meter_of_power(ints(counter, "time_ns"), _real(counter, "power_average_w"))
    return meter


def _why_no_meter(counter: pa.Table | None, clock: pa.Table | None) -> str:
    read = {
        "its energy counter": (counter, "energy_j"),
        "its power": (clock, "power_w"),
        "its average power": (counter, "power_average_w"),
    }
    counts = {
        what: int(np.isfinite(_real(table, name)).sum())
        for what, (table, name) in read.items()
        if table is not None
    }
    if not any(counts.values()):
        return "neither energy nor power of the device was recorded"
    if counts.get("its energy counter", 0) > 1:
        return "its energy counter did not move, and its power was not recorded"
    return f"{' and '.join(w for w, n in counts.items() if n)} was read once only"


def _hosts(attribution: Attribution) -> list[_Unit]:
    """RAPL domains of each host, as they are: a package's cores are within it, its memory is not."""
    run = attribution.run
    found = []
    hosts: dict[Any, list[int]] = {}
    for rank in run.ranks:
        name = run.part(rank).hostname
        hosts.setdefault(rank if name is None else name, []).append(rank)
    for ranks in hosts.values():
        table = table_beside(run, ranks[0], "host_energy")
        codes, domains = strings(table, "domain")
        for code, domain in sorted(enumerate(domains), key=lambda d: d[1]):
            mine = codes == code
            meter = meter_of(ints(table, "time_ns")[mine], _real(table, "energy_j")[mine])
            reason = "the counter did not move" if mine.sum() > 1 else "fewer than two readings"
            found.append(_unit(attribution, domain, tuple(ranks), meter, reason, device=False))
    return found


def _unit(
    attribution: Attribution,
    name: str,
    ranks: tuple[int, ...],
    meter: Meter | None,
    reason: str,
    *,
    device: bool,
) -> _Unit:
    run = attribution.run
    return _Unit(
        name,
        run.part(ranks[0]).hostname,
        ranks,
        device,
        meter,
        None if meter is not None else reason,
        _steps(attribution, ranks[0]),
        *_tokens(attribution, ranks),
    )


def _steps(attribution: Attribution, rank: int) -> np.ndarray:
    """(steps, 3): number, start and end of all steps of a rank, traced or not, in order."""
    table = attribution.run.table(rank, "step")
    if not table.num_rows:
        mine = attribution.windows.filter(pa.array(attribution.windows["rank"].to_numpy() == rank))
        table = mine
    columns = [ints(table, name) for name in ("number", "start_ns", "end_ns")]
    steps = np.stack(columns, axis=1)
    found: np.ndarray = steps[np.argsort(steps[:, 1], kind="stable")]
    return found


def _tokens(
    attribution: Attribution, ranks: tuple[int, ...]
) -> tuple[dict[int, int] | float | None, str | None]:
    """Tokens of each step, as the program counted them, or of a mean step, from what was looked up."""
    run = attribution.run
    told: dict[int, int] = {}
    per_step = 0.0
    given = [run.table(rank, "step_work") for rank in ranks]
    if all(table.num_rows for table in given):
        for table in given:
            for step, tokens in zip(
                ints(table, "step").tolist(), ints(table, "tokens_count").tolist(), strict=True
            ):
                told[step] = told.get(step, 0) + tokens
        return told, "program"
    for rank in ranks:
        tokens = tokens_of(attribution, rank)
        steps = run.table(rank, "step")
        traced = int(steps["traced"].to_numpy(zero_copy_only=False).sum()) if steps.num_rows else 1
        if not tokens or not traced:
            return None, None
        per_step += tokens / traced
    return per_step, "embeddings of traced steps"


def _of_steps(unit: _Unit) -> list[dict[str, Any]]:
    """The whole of a unit's steps, then groups of them."""
    whole = unit.row("run")
    if unit.meter is None:
        return [whole | {"reason": unit.reason}]
    if not len(unit.steps):
        return [whole | _of_readings(unit.meter)]
    groups = _groups(unit.meter, unit.steps)
    if not groups:
        return [whole | {"reason": _why_none(unit.meter, unit.steps)}]
    rows = []
    for first, last in groups:
        start, end = int(unit.steps[first, 1]), int(unit.steps[last, 2])
        row = unit.row("steps") | _difference(unit.meter, start, end)
        _per_step(row, unit, np.arange(first, last + 1))
        row |= {
            "first_step": int(unit.steps[first, 0]),
            "last_step": int(unit.steps[last, 0]),
        }
        rows.append(row)
    known = [(g, r) for g, r in zip(groups, rows, strict=True) if r.get("reason") is None]
    if not known:
        return [whole | {"reason": rows[0]["reason"]}, *rows]
    whole |= _summed([row for _, row in known])
    _per_step(whole, unit, np.concatenate([np.arange(a, b + 1) for (a, b), _ in known]))
    whole |= {"first_step": known[0][1]["first_step"], "last_step": known[-1][1]["last_step"]}
    return [whole, *rows] if len(rows) > 1 else [whole]


def _of_readings(meter: Meter) -> dict[str, Any]:
    """Energy of all that was read, where nothing tells steps: of stretches without a break."""
    time = meter.time_ns
    begins = np.concatenate([[0], np.flatnonzero(meter.broken) + 1])
    ends = np.append(begins[1:] - 1, len(time) - 1)
    long = time[ends] - time[begins] >= MIN_SPAN_NS
    if not long.any():
        return {"reason": _why_no_readings(meter, int((time[ends] - time[begins]).max()))}
    parts = [
        _difference(meter, int(time[a]), int(time[b]))
        for a, b in zip(begins[long].tolist(), ends[long].tolist(), strict=True)
    ]
    return _summed(parts)


def _why_no_readings(meter: Meter, longest_ns: int) -> str:
    if not meter.broken.any():
        return (
            f"readings span {longest_ns / 1e9:.2g} s; an energy counter says nothing below "
            f"{MIN_SPAN_NS / 1e9:.0f} s"
        )
    return f"{_why_broken(meter)}: no {MIN_SPAN_NS / 1e9:.0f} s are known without a break"


def _why_broken(meter: Meter) -> str:
    if meter.basis == "counter":
        if (np.diff(meter.total_j)[meter.broken] < 0).any():
            return "the counter went backwards"
        return "the counter jumped by more than the device can draw"
    every_s = float(np.median(np.diff(meter.time_ns))) / 1e9
    return (
        f"power was read every {every_s:.2g} s; between readings more than "
        f"{_MAX_POWER_GAP_NS / 1e9:.1f} s apart it is not known"
    )


def _summed(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Differences of several spans as one; the first reason where none has an energy."""
    good = [part for part in parts if "reason" not in part]
    if not good:
        return parts[0]
    row: dict[str, Any] = {
        name: sum(part[name] for part in good) for name in ("span_ns", "energy_j", "energy_error_j")
    }
    row["power_mean_w"] = row["energy_j"] / (row["span_ns"] / 1e9)
    row["start_ns"] = good[0]["start_ns"]
    return row


def _groups(meter: Meter, steps: np.ndarray) -> list[tuple[int, int]]:
    """(first, last) of steps that follow each other, were read, and last 5 s or more together."""
    if not len(steps):
        return []
    start, end = steps[:, 1], steps[:, 2]
    length = np.maximum(np.median(end - start), 1)
    apart = start[1:] - end[:-1] > _BREAK_RATIO * length
    usable = meter.usable(start, end)
    begins = np.flatnonzero(np.concatenate([[True], apart | (usable[1:] != usable[:-1])]))
    ends = np.append(begins[1:], len(steps)) - 1
    least = max(MIN_SPAN_NS, int(end[-1] - start[0]) // _GROUPS)
    found: list[tuple[int, int]] = []
    for first, last in zip(begins.tolist(), ends.tolist(), strict=True):
        if not usable[first] or end[last] - start[first] < MIN_SPAN_NS:
            continue
        at = first
        mine = []
        while at <= last:
            stop = at + int(np.searchsorted(end[at : last + 1], start[at] + least))
            if stop > last:
                break
            mine.append((at, stop))
            at = stop + 1
        if not mine:
            mine = [(first, last)]
        # What is left at the end is too short alone.
        found += [*mine[:-1], (mine[-1][0], last)]
    return found


def _why_none(meter: Meter, steps: np.ndarray) -> str:
    usable = meter.usable(steps[:, 1], steps[:, 2])
    if not usable.any():
        within = (steps[:, 1] >= meter.time_ns[0]) & (steps[:, 2] <= meter.time_ns[-1])
        if within.any():
            return f"{_why_broken(meter)}: in no step is the energy known throughout"
        return "no step lies within the readings"
    length = int(steps[usable, 2].max() - steps[usable, 1].min())
    return (
        f"{length / 1e9:.2g} s of steps in a row were read; an energy counter says nothing below "
        f"{MIN_SPAN_NS / 1e9:.0f} s"
    )


def _difference(meter: Meter, start_ns: int, end_ns: int) -> dict[str, Any]:
    """Energy of one span, and how far it may be off for where its edges lie among the readings."""
    first, last = meter.at(np.array([start_ns, end_ns])).tolist()
    span = (end_ns - start_ns) / 1e9
    power = (last - first) / span
    error = power * (meter.edge_ns(start_ns) + meter.edge_ns(end_ns)) / 1e9
    row: dict[str, Any] = {"start_ns": start_ns, "span_ns": end_ns - start_ns}
    if last <= first:
        return row | {"reason": "the counter did not move"}
    if error > MAX_ERROR_RATIO * (last - first):
        return row | {
            "reason": f"readings around its edges are too far apart: {last - first:.3g} J would be "
            f"known to {error:.2g} J only"
        }
    return row | {"energy_j": last - first, "energy_error_j": error, "power_mean_w": power}


def _per_step(row: dict[str, Any], unit: _Unit, at: np.ndarray) -> None:
    """Add the number of steps and tokens, and what one of them took."""
    row["step_count"] = len(at)
    energy_j = row.get("energy_j")
    if energy_j is not None:
        row["energy_per_step_j"] = energy_j / len(at)
    tokens: int | None = None
    if isinstance(unit.tokens, dict):
        told = [unit.tokens.get(int(n)) for n in unit.steps[at, 0]]
        tokens = None if None in told else sum(t for t in told if t is not None)
    elif unit.tokens is not None:
        tokens = round(unit.tokens * len(at))
    if tokens:
        row |= {"tokens_count": tokens, "tokens_from": unit.tokens_from}
        if energy_j is not None:
            row["energy_per_token_j"] = energy_j / tokens


def _of_phases(attribution: Attribution, unit: _Unit) -> list[dict[str, Any]]:
    """Phases of a device's first rank: stretches without a break that last 5 s or more."""
    if unit.meter is None:
        return []
    rows = []
    for phase, whole_start, whole_end in _stretches(attribution, unit.ranks[0]):
        # What of a stretch lies within the readings; less than nothing where it does not.
        start = np.maximum(whole_start, unit.meter.time_ns[0])
        end = np.minimum(whole_end, unit.meter.time_ns[-1])
        long = (end - start >= MIN_SPAN_NS) & unit.meter.usable(start, end)
        row = unit.row("phase") | {"phase": phase}
        if not long.any():
            longest = int((whole_end - whole_start).max())
            row["reason"] = (
                f"lasts {longest / 1e9:.2g} s at most without a break; an energy counter says "
                f"nothing below {MIN_SPAN_NS / 1e9:.0f} s"
                if longest < MIN_SPAN_NS
                else "readings cover no 5 s of it without a break"
            )
            rows.append(row)
            continue
        parts = [
            _difference(unit.meter, a, b)
            for a, b in zip(start[long].tolist(), end[long].tolist(), strict=True)
        ]
        rows.append(row | _summed(parts))
    return rows


_SINCE_1970_NS = 10**17
"""Later than 1973: what counts from the start of a host never gets there."""


def _of_windows(attribution: Attribution) -> list[dict[str, Any]]:
    """Spans that another tool measured and named, by device and over all of them."""
    run = attribution.run
    rows = []
    for rank in run.ranks:
        table = run.table(rank, "energy_window")
        windows: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
        for one in table.to_pylist():
            row = _window_row(rank, run.part(rank).hostname, one)
            windows.setdefault((one["time_ns"], one["span_ns"], one["window"]), []).append(row)
        for same in windows.values():
            if len(same) > 1:
                rows.append(_of_all(same))
            rows += same
    return rows


def _window_row(rank: int, host: str | None, one: dict[str, Any]) -> dict[str, Any]:
    span_ns = one["span_ns"]
    start_ns = one["time_ns"] - span_ns // 2
    row = {
        "scope": "window",
        "source": f"device {one['device_id']}",
        "host": host,
        "ranks": ranges([rank]),
        "step_count": 0,
        "window": one["window"],
        "span_ns": span_ns,
        "start_ns": start_ns if start_ns > _SINCE_1970_NS else None,
        "basis": "counter",
    }
    if span_ns < MIN_SPAN_NS:
        return row | {
            "reason": f"lasts {span_ns / 1e9:.2g} s; an energy counter says nothing below "
            f"{MIN_SPAN_NS / 1e9:.0f} s"
        }
    if not one["energy_j"]:
        return row | {"reason": "the counter did not move"}
    return row | {
        "energy_j": one["energy_j"],
        "power_mean_w": one["energy_j"] / (span_ns / 1e9),
    }


def _of_all(same: list[dict[str, Any]]) -> dict[str, Any]:
    row = same[0] | {"source": "all devices"}
    refused = next((one["reason"] for one in same if "reason" in one), None)
    if refused is not None:
        return {k: v for k, v in row.items() if k not in ("energy_j", "power_mean_w")} | {
            "reason": refused
        }
    return row | {name: sum(one[name] for one in same) for name in ("energy_j", "power_mean_w")}


def _stretches(attribution: Attribution, rank: int) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Each phase's stretches of device time: from its first event to that of the next phase."""
    events = of_run(attribution)
    rows = np.flatnonzero((events.rank == rank) & (events.phase[0] >= 0))
    if not len(rows):
        return []
    rows = rows[np.argsort(events.start_ns[rows], kind="stable")]
    phase = events.phase[0][rows]
    begins = np.flatnonzero(np.concatenate([[True], phase[1:] != phase[:-1]]))
    start = events.start_ns[rows][begins]
    last = int((events.start_ns[rows] + events.dur_ns[rows]).max())
    end = np.append(start[1:], last)
    of = phase[begins]
    return [
        (events.phase[1][code], start[of == code], end[of == code])
        for code in np.unique(of).tolist()
    ]


def _together(units: Sequence[tuple[_Unit, dict[str, Any]]]) -> dict[str, Any] | None:
    """All devices as one; None with fewer than two, or where one of them is not known."""
    if len(units) < 2:
        return None
    rows = [row for _, row in units]
    ranks = sorted({rank for unit, _ in units for rank in unit.ranks})
    row: dict[str, Any] = {
        "scope": "run",
        "source": "all devices",
        "ranks": ranges(ranks),
        "step_count": min(r["step_count"] for r in rows),
    }
    refused: dict[str, list[str]] = {}
    for unit, r in units:
        if r.get("reason"):
            refused.setdefault(r["reason"], []).append(unit.name)
    if refused:
        told = (f"{_few(names)}: {reason}" for reason, names in refused.items())
        return row | {"reason": "; ".join(told)}
    per_step = sum(r.get("energy_per_step_j", 0.0) for r in rows)
    row |= {
        "energy_per_step_j": per_step or None,
        "energy_j": sum(r["energy_j"] for r in rows),
        "energy_error_j": sum(r["energy_error_j"] for r in rows),
        "power_mean_w": sum(r["power_mean_w"] for r in rows),
        "span_ns": max(r["span_ns"] for r in rows),
        "start_ns": min(r["start_ns"] for r in rows),
        "first_step": max((r["first_step"] for r in rows if "first_step" in r), default=None),
        "last_step": min((r["last_step"] for r in rows if "last_step" in r), default=None),
        "basis": " and ".join(sorted({r["basis"] for r in rows})),
    }
    if all(r.get("tokens_count") for r in rows):
        per_step_tokens = sum(r["tokens_count"] / r["step_count"] for r in rows)
        row |= {
            "tokens_count": sum(r["tokens_count"] for r in rows),
            "tokens_from": rows[0]["tokens_from"],
            "energy_per_token_j": per_step / per_step_tokens,
        }
    return row


def _few(names: list[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - _NAMED} more" if len(distinct) > _NAMED else ""
    return ", ".join(distinct[:_NAMED]) + more


def _real(table: pa.Table, name: str) -> np.ndarray:
    values: np.ndarray = table[name].to_numpy(zero_copy_only=False).astype(np.float64)
    return values
