"""Energy per step, token and phase, by device and host domain.

From differences of the devices' counters. A counter of energy moves in steps of up to 100 ms and
boards differ by 5 % (arXiv:2312.02741): what it says of a kernel or of a short step is noise.
Differences are taken over at least 5 s: of whole steps one after the other, or of a phase that
lasts so long without a break. What is shorter is refused, with the reason. Where a device has no
counter, its power is integrated over the same spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from chopper.analyzers.events.groups import reals
from chopper.analyzers.events.meter import MAX_POWER_GAP_NS, Meter, meter_of, meter_of_power
from chopper.analyzers.events.steps import step_table, steps_of
from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.samples import per_device, table_beside
from chopper.analyzers.views import View
from chopper.analyzers.views._sharing import ranks_by_host, ranks_by_socket
from chopper.analyzers.views._tokens import tokens_of
from chopper.tables import column, optional
from chopper.wording import ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from chopper.analyzers.attributed import Attributed
    from chopper.analyzers.events.device import Events

MIN_SPAN_NS = 5_000_000_000
"""Over less than this a difference of energy counters says nothing."""
MAX_ERROR_RATIO = 0.1
"""With edges known worse than this share of the energy, nothing is claimed."""
_NAMED = 4
"""Devices that a reason names."""
_GROUPS = 200
"""Rows of groups of steps of one device at most: longer runs have longer groups."""
_NO_TOKENS = "none per token: nobody counted the tokens of these steps (prof.step(tokens=…) does)"
_BREAK_RATIO = 0.01
"""Steps further apart than this share of a step do not follow each other."""
_SINCE_1970_NS = 10**17
"""Later than 1973: what counts from the start of a host never gets there."""
_SCOPES = ("run", "phase", "window", "steps")

VIEW = View(
    "energy",
    1,
    "Energy by device and by domain of the host's processors, from differences of counters over "
    "at least 5 s; nothing is said of less. Ranks on parts of one device share its counter. "
    "Boards are off by up to 5 % each, which no reading shows.",
    (
        column(
            "scope",
            "Scope of the row: run (all steps read), phase, steps (a group of at least 5 s) or "
            "window (a span that another tool measured).",
        ),
        column(
            "source",
            "Source of the energy: all devices, device N, or a domain such as package-0 or "
            "package-0/dram.",
        ),
        column("ranks", "Global ranks that compute on the source."),
        optional("energy_per_step_j", "Mean energy per step."),
        optional("energy_per_token_j", "Energy over the number of tokens of these steps."),
        optional("power_mean_w", "Mean power: energy over time."),
        optional("energy_j", "Total energy."),
        optional(
            "energy_error_j",
            "Bound of the energy's error, from readings around the edges and the counter's own "
            "steps.",
        ),
        optional("span_ns", "Time over which the energy was measured."),
        column("step_count", "Number of steps within the span."),
        optional("phase", "Phase, in rows of scope phase."),
        optional("window", "Name of the window, in rows of scope window."),
        optional("first_step", "Number of the first step within the span.", "int64"),
        optional("last_step", "Number of the last step within the span.", "int64"),
        optional("tokens_count", "Number of tokens of these steps, over all ranks of the source."),
        optional(
            "tokens_from",
            "Origin of the number of tokens: program (prof.step(tokens=…)), or embeddings of "
            "traced steps.",
        ),
        optional("basis", "Basis of the energy: counter, or power (readings integrated)."),
        optional("host", "Name of the host."),
        optional("start_ns", "Start of the span, Unix time."),
        optional("reason", "Reason why no energy is claimed, or none per token.", "text"),
    ),
    module_doc=__doc__,
    title="Energy",
    section="Clocks",
    needs="neither energy nor power of a device or of the host's processors was sampled",
)


def energy(run: Attributed, events: Events) -> pa.Table:
    """DEVICE_COUNTER, DEVICE_CLOCK, HOST_ENERGY, ENERGY_WINDOW, STEP, STEP_WORK -> ENERGY.

    One row for all devices together, then per device and host domain the whole of its steps,
    groups of steps of at least 5 s each, and phases; then the spans that another tool measured.
    """
    rows: list[dict[str, Any]] = []
    devices: list[tuple[_Unit, dict[str, Any]]] = []
    for unit in [*_devices(run), *_hosts(run)]:
        of_steps = _of_steps(unit)
        rows += of_steps
        if unit.device:
            devices.append((unit, of_steps[0]))
            rows += _of_phases(events, unit)
    together = _together(devices)
    if together is not None:
        rows.insert(0, together)
    for row in rows:
        if row["step_count"] and "energy_j" in row and "tokens_count" not in row:
            row["reason"] = _NO_TOKENS
    rows += _of_windows(run)
    rows.sort(key=lambda row: _SCOPES.index(row["scope"]))
    return VIEW.of_rows(rows)


@dataclass(frozen=True)
class _Unit:
    """A counter of energy: of a device (a socket), or of a domain of a host's processors.

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
        """Columns that are the same in each row."""
        return {
            "scope": scope,
            "source": self.name,
            "host": self.host,
            "ranks": ranges(self.ranks),
            "step_count": 0,
            "basis": None if self.meter is None else self.meter.basis,
        }


def _devices(run: Attributed) -> list[_Unit]:
    """Devices of the run's ranks; ranks on parts of one socket share its counter."""
    found = []
    for ranks in ranks_by_socket(run.recording):
        counters, clocks, limits = (
            dict(per_device(run.recording, ranks[0], name))
            for name in ("device_counter", "device_clock", "device_limit")
        )
        for number in dict.fromkeys([*counters, *clocks]):
            counter, clock = counters.get(number), clocks.get(number)
            meter = _device_meter(counter, clock, _limit_w(limits.get(number)))
            device = run.recording.part(ranks[0]).device_id if number is None else number
            name = f"device {ranks[0] if device is None else device}"
            reason = _why_no_meter(counter, clock)
            found.append(_unit(run, name, ranks, meter, reason, device=True))
    return found


def _limit_w(limits: pa.Table | None) -> float | None:
    """The largest power limit that could be set, or that was in force."""
    if limits is None:
        return None
    known = np.concatenate([reals(limits, n) for n in ("power_limit_max_w", "power_limit_w")])
    known = known[known > 0]
    return float(known.max()) if len(known) else None


def _device_meter(
    counter: pa.Table | None, clock: pa.Table | None, limit_w: float | None
) -> Meter | None:
    """Energy by a device's counter, else from its power as read, else as averaged by the driver."""
    meter = None
    if counter is not None:
        meter = meter_of(ints(counter, "time_ns"), reals(counter, "energy_j"), limit_w)
    if meter is None and clock is not None:
        meter = meter_of_power(ints(clock, "time_ns"), reals(clock, "power_w"))
    if meter is None and counter is not None:
        meter = meter_of_power(ints(counter, "time_ns"), reals(counter, "power_average_w"))
    return meter


def _why_no_meter(counter: pa.Table | None, clock: pa.Table | None) -> str:
    read = {
        "its energy counter": (counter, "energy_j"),
        "its power": (clock, "power_w"),
        "its average power": (counter, "power_average_w"),
    }
    counts = {
        what: int(np.isfinite(reals(table, name)).sum())
        for what, (table, name) in read.items()
        if table is not None
    }
    if not any(counts.values()):
        return "neither energy nor power of the device was recorded"
    if counts.get("its energy counter", 0) > 1:
        return "its energy counter did not move, and its power was not recorded"
    return f"{' and '.join(w for w, n in counts.items() if n)} was read once only"


def _hosts(run: Attributed) -> list[_Unit]:
    """RAPL domains of each host: a package includes its cores, not its memory."""
    found = []
    for ranks in ranks_by_host(run.recording):
        table = table_beside(run.recording, ranks[0], "host_energy")
        codes, domains = strings(table, "domain")
        for code, domain in sorted(enumerate(domains), key=lambda d: d[1]):
            mine = codes == code
            meter = meter_of(ints(table, "time_ns")[mine], reals(table, "energy_j")[mine])
            reason = "the counter did not move" if mine.sum() > 1 else "fewer than two readings"
            found.append(_unit(run, domain, ranks, meter, reason, device=False))
    return found


def _unit(
    run: Attributed,
    name: str,
    ranks: tuple[int, ...],
    meter: Meter | None,
    reason: str,
    *,
    device: bool,
) -> _Unit:
    return _Unit(
        name,
        run.recording.part(ranks[0]).hostname,
        ranks,
        device,
        meter,
        None if meter is not None else reason,
        _steps(run, ranks[0]),
        *_tokens(run, ranks),
    )


def _steps(run: Attributed, rank: int) -> np.ndarray:
    """(steps, 3): number, start and end of all steps of a rank, traced or not, in order."""
    table = steps_of(run, rank).select(["number", "start_ns", "end_ns"])
    steps = np.stack([ints(table, name) for name in table.column_names], axis=1)
    found: np.ndarray = steps[np.argsort(steps[:, 1], kind="stable")]
    return found


def _tokens(
    run: Attributed, ranks: tuple[int, ...]
) -> tuple[dict[int, int] | float | None, str | None]:
    """Tokens of each step by the program's count, or of a mean step by its embedding."""
    told: dict[int, int] = {}
    per_step = 0.0
    given = [run.recording.table(rank, "step_work") for rank in ranks]
    if all(table.num_rows for table in given):
        for table in given:
            for step, tokens in zip(
                ints(table, "step").tolist(), ints(table, "tokens_count").tolist(), strict=True
            ):
                told[step] = told.get(step, 0) + tokens
        return told, "program"
    for rank in ranks:
        tokens = tokens_of(run, rank)
        steps = step_table(run, rank)
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
        f"{MAX_POWER_GAP_NS / 1e9:.1f} s apart it is not known"
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


def _of_phases(events: Events, unit: _Unit) -> list[dict[str, Any]]:
    """Phases of a device's first rank: stretches without a break that last 5 s or more."""
    if unit.meter is None:
        return []
    rows = []
    for phase, whole_start, whole_end in _stretches(events, unit.ranks[0]):
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


def _of_windows(run: Attributed) -> list[dict[str, Any]]:
    """Spans that another tool measured and named, by device and over all of them."""
    rows = []
    for rank in run.recording.ranks:
        table = run.recording.table(rank, "energy_window")
        windows: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
        for one in table.to_pylist():
            row = _window_row(rank, run.recording.part(rank).hostname, one)
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


def _stretches(events: Events, rank: int) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Each phase's stretches of device time: from its first event to that of the next phase."""
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
