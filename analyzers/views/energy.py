"""The view of energy."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.device import Events
from chopper.analyzers.events.groups import reals
from chopper.analyzers.events.meter import (
    MAX_POWER_GAP_NS,
    Meter,
    meter_of,
    meter_of_power,
    ranks_by_host,
    ranks_by_socket,
)
from chopper.analyzers.events.steps import steps_of, tokens_of_steps, with_own_tokens
from chopper.analyzers.trace.columns import ints, run_starts, strings
from chopper.analyzers.trace.samples import per_device, table_beside
from chopper.analyzers.views import Rows, view
from chopper.tables import TABLES
from chopper.wording import ranges, some

Row = dict[str, Any]

MIN_SPAN_NS = 5_000_000_000
"""Over less than this a difference of energy counters says nothing."""
MAX_ERROR_RATIO = 0.1
"""With edges known worse than this share of the energy, nothing is claimed."""
_GROUPS = 200
"""Rows of groups of steps of one device at most: longer runs have longer groups."""
_TOO_SHORT = f"an energy counter resolves nothing below {MIN_SPAN_NS / 1e9:.0f} s"
_NO_METER = "neither a changing energy counter nor more than one power reading was recorded"
_NO_TOKENS = (
    "no energy per token: the tokens of these steps were not counted (prof.step(tokens=…) does)"
)
_BREAK_RATIO = 0.01
"""Steps further apart than this share of a step do not follow each other."""
_SINCE_1970_NS = 10**17
"""Later than 1973: what counts from the start of a host never gets there."""
_SCOPES = ("run", "phase", "window", "steps")


@view
def energy(run: Attribution, events: Events) -> Rows:
    """Energy per step, token and phase, by device and host domain.

    From differences of the device's energy counters. A counter is updated every 100 ms or so, and
    boards differ by 5 % (arXiv:2312.02741), so it resolves neither kernels nor short steps.
    Differences are taken over at least 5 s: over consecutive whole steps, or over a phase that
    lasts this long without interruption. Shorter spans are withheld, with the reason. Without a
    counter, power is integrated over the same spans. Ranks on parts of one device share its
    counter.

    title: Energy
    section: Clocks
    needs: neither energy nor power of a device or of the host's processors was sampled
    columns:
      scope: Scope: run, phase, steps (a group) or window (of another tool).
      source: Source: all devices, device N, or a domain such as package-0/dram.
      ranks: Global ranks that compute on the source.
      energy_per_step_j, null: Mean energy per step; null where withheld.
      energy_per_token_j, null: Energy per token of these steps.
      power_mean_w, null: Mean power: energy over time; null where withheld.
      energy_j, null: Total energy; null where withheld.
      energy_error_j, null: Error bound of the energy, from the samples around its edges.
      span_ns, null: Time over which the energy was measured; null where withheld.
      step_count: Number of steps within the span.
      phase, null: Phase, in rows of scope phase.
      window, null: Name of the window, in rows of scope window.
      first_step, int64, null: Number of the first step within the span.
      last_step, int64, null: Number of the last step within the span.
      tokens_count, null: Number of tokens of these steps, over all ranks of the source.
      tokens_from, null: Origin of the tokens: program, or embeddings of traced steps.
      basis, null: Basis of the energy: counter, or power (integrated samples).
      host, null: Name of the host; null where not recorded.
      start_ns, null: Start of the span, Unix time; null where the energy is withheld.
      reason, text, null: Reason why the energy, or the energy per token, is withheld.
    """
    rows: list[Row] = []
    devices: list[tuple[_Unit, Row]] = []
    for unit in [*_devices(run), *_hosts(run)]:
        of_steps = _of_steps(unit)
        rows += of_steps
        if unit.device:
            devices.append((unit, of_steps[0]))
            rows += _of_phases(events, unit)
    if len(devices) > 1:
        rows.insert(0, _all_devices(run, devices))
    rows += _of_windows(run)
    rows.sort(key=lambda row: _SCOPES.index(row["scope"]))
    return rows


class _Unit(msgspec.Struct, frozen=True):
    """A counter of energy: of a device (a socket), or of a domain of a host's processors.

    Attributes:
        row: columns that are the same in each row.
        ranks: ranks that compute on it.
        meter: its readings; None where they tell nothing.
        steps: (steps, 3) number, start and end of its first rank's steps, traced or not, in order.
        tokens: (steps,) tokens of all its ranks, NaN where not known.
        tokens_from: who counted them.
    """

    row: Row
    ranks: tuple[int, ...]
    device: bool
    meter: Meter | None
    steps: np.ndarray
    tokens: np.ndarray
    tokens_from: str

    def per_step(self, at: np.ndarray, energy_j: float | None) -> Row:
        """Return the number of some steps and their tokens, and what one of them took."""
        first, last = self.steps[at[[0, -1]], 0].tolist()
        row: Row = {"step_count": len(at), "first_step": first, "last_step": last}
        tokens = self.tokens[at].sum()
        if tokens > 0:
            row |= {"tokens_count": round(tokens), "tokens_from": self.tokens_from}
        if energy_j is not None:
            row["energy_per_step_j"] = energy_j / len(at)
            row |= (
                {"energy_per_token_j": energy_j / row["tokens_count"]}
                if tokens > 0
                else {"reason": _NO_TOKENS}
            )
        return row


def _unit(
    run: Attribution, name: str, ranks: tuple[int, ...], meter: Meter | None, *, device: bool
) -> _Unit:
    table = steps_of(run, ranks[0])
    steps = np.stack([ints(table, n) for n in ("number", "start_ns", "end_ns")], axis=1)
    steps = steps[np.argsort(steps[:, 1], kind="stable")]
    row = {
        "source": name,
        "host": run.recording.part(ranks[0]).hostname,
        "ranks": ranges(ranks),
        "step_count": 0,
        "basis": None if meter is None else meter.basis,
    }
    return _Unit(row, ranks, device, meter, steps, *tokens_of_steps(run, ranks, steps[:, 0]))


def _devices(run: Attribution) -> list[_Unit]:
    """Devices of the run's ranks; ranks on parts of one socket share its counter."""
    units = []
    for ranks in ranks_by_socket(run.recording):
        names = ("device_counter", "device_clock", "device_limit")
        tables = [dict(per_device(run.recording, ranks[0], name)) for name in names]
        for number in dict.fromkeys([*tables[0], *tables[1]]):
            counter, clock, limit = (
                found.get(number, TABLES[name].empty())
                for name, found in zip(names, tables, strict=True)
            )
            device = run.recording.part(ranks[0]).device_id if number is None else number
            name = f"device {ranks[0] if device is None else device}"
            units.append(_unit(run, name, ranks, _meter(counter, clock, limit), device=True))
    return units


def _meter(counter: pa.Table, clock: pa.Table, limit: pa.Table) -> Meter | None:
    """Energy by a device's counter, else from its power as read, else as averaged by the driver."""
    limits_w = np.concatenate([reals(limit, n) for n in ("power_limit_max_w", "power_limit_w")])
    limit_w = float(np.nanmax(limits_w, initial=0.0)) or None
    time_ns = ints(counter, "time_ns")
    return (
        meter_of(time_ns, reals(counter, "energy_j"), limit_w)
        or meter_of_power(ints(clock, "time_ns"), reals(clock, "power_w"))
        or meter_of_power(time_ns, reals(counter, "power_average_w"))
    )


def _hosts(run: Attribution) -> list[_Unit]:
    """RAPL domains of each host: a package includes its cores, not its memory."""
    units = []
    for ranks in ranks_by_host(run.recording):
        table = table_beside(run.recording, ranks[0], "host_energy")
        codes, domains = strings(table, "domain")
        time_ns, total_j = ints(table, "time_ns"), reals(table, "energy_j")
        for code, domain in sorted(enumerate(domains), key=lambda d: d[1]):
            mine = codes == code
            meter = meter_of(time_ns[mine], total_j[mine])
            units.append(_unit(run, domain, ranks, meter, device=False))
    return units


def _of_steps(unit: _Unit) -> list[Row]:
    """The whole of a unit's steps, then groups of them."""
    whole, meter = {**unit.row, "scope": "run"}, unit.meter
    if meter is None:
        return [whole | {"reason": _NO_METER}]
    if not len(unit.steps):
        return [whole | _of_readings(meter)]
    start, end = unit.steps[:, 1], unit.steps[:, 2]
    groups = _groups(meter, start, end)
    if not groups:
        return [whole | {"reason": _why_no_group(meter, start, end)}]
    rows = []
    for at in groups:
        span = _over(meter, start[at[:1]], end[at[-1:]])
        steps = unit.per_step(at, span.get("energy_j"))
        rows.append({**unit.row, "scope": "steps", **steps, **span})
    known = [at for at, row in zip(groups, rows, strict=True) if "energy_j" in row]
    firsts, lasts = ([at[i] for at in groups] for i in (0, -1))
    whole |= _over(meter, start[firsts], end[lasts])
    if known:
        whole |= unit.per_step(np.concatenate(known), whole["energy_j"])
    return [whole, *rows] if len(rows) > 1 else [whole]


def _of_readings(meter: Meter) -> Row:
    """Energy of all that was read, where nothing tells steps: of stretches without a break."""
    begins = np.concatenate([[0], np.flatnonzero(meter.broken) + 1])
    ends = np.append(begins[1:] - 1, len(meter.time_ns) - 1)
    start, end = meter.time_ns[begins], meter.time_ns[ends]
    long = end - start >= MIN_SPAN_NS
    if long.any():
        return _over(meter, start[long], end[long])
    if meter.broken.any():
        return {"reason": _why_broken(meter)}
    return {"reason": f"samples span {(end - start).max() / 1e9:.2g} s; {_TOO_SHORT}"}


def _why_broken(meter: Meter) -> str:
    if meter.basis == "counter":
        return "the counter went backwards, or jumped by more than the device can draw"
    every_s = float(np.median(np.diff(meter.time_ns))) / 1e9
    return (
        f"power was sampled every {every_s:.2g} s; it is unknown between samples more than "
        f"{MAX_POWER_GAP_NS / 1e9:.1f} s apart"
    )


def _why_no_group(meter: Meter, start: np.ndarray, end: np.ndarray) -> str:
    usable = meter.usable(start, end)
    if usable.any():
        length_s = int(end[usable].max() - start[usable].min()) / 1e9
        return f"{length_s:.2g} s of consecutive steps were sampled; {_TOO_SHORT}"
    if ((start >= meter.time_ns[0]) & (end <= meter.time_ns[-1])).any():
        return f"{_why_broken(meter)}: the energy is not known throughout any step"
    return "no step lies within the readings"


def _groups(meter: Meter, start: np.ndarray, end: np.ndarray) -> list[np.ndarray]:
    """Rows of steps that follow each other, were read, and last 5 s or more together."""
    length = np.maximum(np.median(end - start), 1)
    apart = start[1:] - end[:-1] > _BREAK_RATIO * length
    usable = meter.usable(start, end)
    least = max(MIN_SPAN_NS, int(end[-1] - start[0]) // _GROUPS)
    groups = []
    for row in np.split(
        np.arange(len(start)), np.flatnonzero(apart | (usable[1:] != usable[:-1])) + 1
    ):
        if not usable[row[0]] or end[row[-1]] - start[row[0]] < MIN_SPAN_NS:
            continue
        at, cuts = 0, []
        while at < len(row):
            at += int(np.searchsorted(end[row[at:]], start[row[at]] + least)) + 1
            cuts += [at] if at <= len(row) else []
        # What is left at the end is too short alone.
        groups += np.split(row, cuts[:-1])
    return groups


def _over(meter: Meter, start_ns: np.ndarray, end_ns: np.ndarray) -> Row:
    """Energy of several spans together; the first one's reason where none of them has any.

    Its error is how far it may be off for where the spans' edges lie among the readings.
    """
    span_ns, energy_j = end_ns - start_ns, meter.growth(start_ns, end_ns)
    edges_ns = meter.edge_ns(start_ns) + meter.edge_ns(end_ns)
    error_j = energy_j / (span_ns / 1e9) * edges_ns / 1e9
    known = (energy_j > 0) & (error_j <= MAX_ERROR_RATIO * energy_j)
    if not known.any():
        if energy_j[0] <= 0:
            return {"reason": "the counter did not move"}
        return {
            "reason": "the samples around its edges are too far apart: the error of "
            f"{energy_j[0]:.3g} J would be {error_j[0]:.2g} J"
        }
    total_ns, total_j = int(span_ns[known].sum()), float(energy_j[known].sum())
    return {
        "start_ns": int(start_ns[known][0]),
        "span_ns": total_ns,
        "energy_j": total_j,
        "energy_error_j": float(error_j[known].sum()),
        "power_mean_w": total_j / (total_ns / 1e9),
    }


def _of_phases(events: Events, unit: _Unit) -> list[Row]:
    """Phases of a device's first rank: stretches without a break that last 5 s or more.

    A stretch reaches from the phase's first event to that of the next phase.
    """
    meter = unit.meter
    rows = np.flatnonzero((events.rank == unit.ranks[0]) & (events.phase[0] >= 0))
    if meter is None or not len(rows):
        return []
    rows = rows[np.argsort(events.start_ns[rows], kind="stable")]
    first = rows[run_starts(events.phase[0][rows])]
    starts, end_ns = events.start_ns[first], (events.start_ns + events.dur_ns)[rows].max()
    ends, phase = np.append(starts[1:], end_ns), events.phase[0][first]
    found = []
    for code in np.unique(phase).tolist():
        mine = phase == code
        longest_ns = int((ends - starts)[mine].max())
        # What of a stretch lies within the readings; less than nothing where it does not.
        start = np.maximum(starts[mine], meter.time_ns[0])
        end = np.minimum(ends[mine], meter.time_ns[-1])
        long = (end - start >= MIN_SPAN_NS) & meter.usable(start, end)
        row: Row = {**unit.row, "scope": "phase", "phase": events.phase[1][code]}
        if long.any():
            row |= _over(meter, start[long], end[long])
        elif longest_ns < MIN_SPAN_NS:
            row["reason"] = (
                f"lasts at most {longest_ns / 1e9:.2g} s without interruption; {_TOO_SHORT}"
            )
        else:
            row["reason"] = "samples cover no uninterrupted 5 s of it"
        found.append(row)
    return found


def _of_windows(run: Attribution) -> list[Row]:
    """Spans that another tool measured and named, by device and over all of them."""
    rows = []
    for rank in run.recording.ranks:
        windows: dict[tuple[int, int, str], list[Row]] = {}
        for one in run.recording.table(rank, "energy_window").to_pylist():
            window, span_ns, energy_j = one["window"], one["span_ns"], one["energy_j"]
            start_ns = one["time_ns"] - span_ns // 2
            row: Row = {
                "scope": "window",
                "source": f"device {one['device_id']}",
                "host": run.recording.part(rank).hostname,
                "ranks": ranges([rank]),
                "step_count": 0,
                "window": window,
                "span_ns": span_ns,
                "start_ns": start_ns if start_ns > _SINCE_1970_NS else None,
                "basis": "counter",
            }
            if span_ns < MIN_SPAN_NS:
                row["reason"] = f"lasts {span_ns / 1e9:.2g} s; {_TOO_SHORT}"
            elif not energy_j:
                row["reason"] = "the counter did not move"
            else:
                row |= {"energy_j": energy_j, "power_mean_w": energy_j / (span_ns / 1e9)}
            windows.setdefault((one["time_ns"], span_ns, window), []).append(row)
        for same in windows.values():
            rows += [_together(same), *same] if len(same) > 1 else same
    return rows


def _all_devices(run: Attribution, devices: list[tuple[_Unit, Row]]) -> Row:
    """Return the row of all devices, where tokens that several ranks work on count once."""
    ranks = {rank for unit, _ in devices for rank in unit.ranks}
    own = {*with_own_tokens(run, tuple(sorted(ranks)))}
    together = _together([row for _, row in devices])
    if "tokens_count" in together:
        tokens_count = per_step = 0.0
        for unit, row in devices:
            counted = with_own_tokens(run, unit.ranks)
            tokens = row["tokens_count"] * len(own.intersection(counted)) / len(counted)
            tokens_count += tokens
            per_step += tokens / row["step_count"]
        together["tokens_count"] = round(tokens_count)
        together["energy_per_token_j"] = together["energy_per_step_j"] / per_step
    return together | {"ranks": ranges(ranks)}


def _together(rows: list[Row]) -> Row:
    """Return the row of all devices; with the reasons where one of them is not known."""
    row: Row = {name: rows[0].get(name) for name in ("scope", "window", "ranks")}
    row |= {"source": "all devices", "step_count": min(r["step_count"] for r in rows)}
    known = all("energy_j" in r for r in rows)
    refused: dict[str, dict[str, None]] = {}
    for one in rows:
        if "reason" in one and (known or "energy_j" not in one):
            refused.setdefault(one["reason"], {})[one["source"]] = None
    # What holds of all devices needs no names.
    told = (
        reason if len(names) == len(rows) else f"{some(list(names))}: {reason}"
        for reason, names in refused.items()
    )
    row["reason"] = "; ".join(told) or None
    if not known:
        return row
    names = ("energy_j", "power_mean_w", "energy_error_j", "energy_per_step_j", "tokens_count")
    row |= {n: sum(r[n] for r in rows) for n in names if all(r.get(n) for r in rows)}
    starts = [r["start_ns"] for r in rows if r["start_ns"] is not None]
    row |= {
        "span_ns": max(r["span_ns"] for r in rows),
        "start_ns": min(starts, default=None),
        "first_step": max((r["first_step"] for r in rows if "first_step" in r), default=None),
        "last_step": min((r["last_step"] for r in rows if "last_step" in r), default=None),
        "basis": " and ".join(sorted({r["basis"] for r in rows})),
    }
    if "tokens_count" in row:
        row["tokens_from"] = rows[0]["tokens_from"]
    return row
