"""MFU and HFU against the theoretical and the achievable ceiling.

    MFU = Σ_d F_d / (P_d · T)        HFU = Σ_d H_d / (P_d · T)

with, per data type d: F_d the FLOP that the model's mathematics needs (products, convolutions and
attention of forward and backward; of a causal mask only the pairs that it keeps), H_d the same with
what was computed again (recomputation) and the optimizer's products, P_d the ceiling for that type,
and T the time: of the same steps without a trace where such were recorded, since tracing slows the
host and not the model, else the observed time. Each FLOP is held against the peak of its own type,
so that a run of bf16 and fp32 is not flattered by either. Products whose FLOP or peak is unknown
count nothing: the value is a lower bound then, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.tokens import tokens_of
from chopper.analyzers.trace.columns import ints, matching, strings
from chopper.analyzers.trace.phases import phases_outside_training
from chopper.analyzers.views import View
from chopper.hardware.ceilings import MOST_OF_A_PEAK, Ceiling
from chopper.tables import column, optional

Row = dict[str, Any]

CEILINGS = ("theoretical", "achievable")
_NOT_THE_MODELS = ("recompute", "optimizer")
_SAID_RATIO = 0.001
"""Smaller shares of unknown FLOP or peaks are not worth a remark."""
_UNKNOWN: Row = dict.fromkeys(
    ("mfu_ratio", "hfu_ratio", "peak_flop_per_s", "model_needs_ns", "hardware_needs_ns")
)

VIEW = View(
    "utilization",
    __doc__,
    (
        optional("rank", "Global rank; null for all ranks together.", "int32"),
        column("ceiling", "Ceiling of the comparison: theoretical or achievable."),
        optional("dtype", "Data type; null for all types, each held against its own peak."),
        optional("mfu_ratio", "Model FLOP utilization (MFU)."),
        optional("hfu_ratio", "Hardware FLOP utilization (HFU)."),
        optional("peak_flop_per_s", "Ceiling for this mix of data types."),
        optional(
            "tokens_per_s",
            "Tokens that the rank's embedding looked up per second; null where one table's shapes "
            "do not tell that.",
            "float64",
        ),
        optional("model_flop", "FLOP that the model's mathematics needs."),
        optional("hardware_flop", "FLOP including recomputation and the optimizer's."),
        optional("model_needs_ns", "Time that the model's FLOP need at the ceiling."),
        optional("hardware_needs_ns", "Time that all FLOP need at the ceiling."),
        column(
            "time_ns",
            "Time T of the definition, summed over ranks: the observed time, scaled to the median "
            "step without a trace.",
        ),
        column("observed_ns", "Observed time of the traced steps, summed over ranks."),
        optional("reason", "Reason why values are null or lower bounds.", "text"),
        optional("source", "Origin of the ceiling's value.", "text"),
    ),
    version=2,
    title="Utilization",
    section="Steps and host",
)


@dataclass(frozen=True)
class _Math:
    """FLOP of one rank's products.

    Attributes:
        flop: data type, "" for unknown → FLOP that the model needs, and all of them.
        time_ns: time that they are held against.
        unknown_ratio: share of the products' time whose FLOP are not known.
        products_ns: time of the device events whose FLOP are known.
        reason: why there are no FLOP, where there are none.
    """

    flop: dict[str, tuple[float, float]]
    time_ns: int
    unknown_ratio: float = 0.0
    products_ns: int = 0
    reason: str = "no matrix product, convolution or attention was recognised"

    def sums(self) -> tuple[float, float]:
        """Return the FLOP of all types together."""
        return sum(m for m, _ in self.flop.values()), sum(h for _, h in self.flop.values())


def utilization(run: Attributed) -> pa.Table:
    """EVENT_LINK, DEVICE_EVENT, WINDOW -> UTILIZATION.

    The whole run first (``rank`` null), then its data types, then each rank, for both ceilings.
    """
    scale = run.step_time().scale
    math = {r.rank: _math(run, r.rank, round(r.observed_ns * scale)) for r in run.ranks}
    tokens = {rank: tokens_of(run, rank) for rank in math}
    rows: list[Row] = []
    for name in CEILINGS:
        per_rank = []
        for summary in run.ranks:
            rank, time_ns = summary.rank, math[summary.rank].time_ns
            found = _rows(run, rank, name, math[rank])
            for row in found:
                row["observed_ns"] = summary.observed_ns
            known = tokens[rank]
            if known is not None and time_ns:
                found[0]["tokens_per_s"] = known / (time_ns / 1e9)
            per_rank.append(found)
        rows += _of_run(per_rank, name)
        if len(per_rank) > 1:
            rows += [found[0] for found in per_rank]
    return VIEW.of_rows(rows)


def _math(run: Attributed, rank: int, time_ns: int) -> _Math:
    work, links = run.work.get(rank), run.links.get(rank)
    if work is None or links is None:
        return _Math({}, time_ns)
    rows = np.flatnonzero(work.math & links["step_index"].is_valid().to_numpy())
    if not len(rows):
        return _Math({}, time_ns)
    flop = work.work_flop[rows]
    known = ~np.isnan(flop)
    dur = ints(run.joined[rank].device_event, "dur_ns")[rows]
    phase, phases = strings(links, "phase")
    outside = phases_outside_training({phases[code] for code in np.unique(phase) if code >= 0})
    trained = ~matching(phase[rows][known], phases, outside.__contains__)
    own = ~matching(phase[rows][known], phases, _NOT_THE_MODELS.__contains__)
    names = [*work.dtypes, ""]
    codes = work.dtype[rows][known] % len(names)
    hardware = np.bincount(codes, weights=flop[known] * trained, minlength=len(names))
    model = np.bincount(codes, weights=flop[known] * (own & trained), minlength=len(names))
    # The sum over ranks is a whole number, too.
    if hardware.sum() >= 2**63 / len(run.ranks):
        reason = "the recorded shapes cannot be right: they give more FLOP than 64 bits hold"
        return _Math({}, time_ns, 1.0, reason=reason)
    by_type = zip(names, model.tolist(), hardware.tolist(), strict=True)
    return _Math(
        {name: (of_model, of_all) for name, of_model, of_all in by_type if of_all},
        time_ns,
        float(1 - dur[known].sum() / dur.sum() if dur.sum() else 0.0),
        int(dur[known].sum()),
        "the FLOP of no product are known: shapes were not recorded",
    )


def _rows(run: Attributed, rank: int, name: str, math: _Math) -> list[Row]:
    """One rank against one ceiling: all its FLOP, then by data type."""
    ceilings = run.ceilings.get(rank)
    ceiling: Ceiling | None = getattr(ceilings, name, None)
    sums = math.sums()
    row: Row = {
        "rank": rank,
        "ceiling": name,
        "model_flop": round(sums[0]) if math.flop else None,
        "hardware_flop": round(sums[1]) if math.flop else None,
        "time_ns": math.time_ns,
        "source": None if ceiling is None else ceiling.source,
    }
    if ceiling is None:
        return [row | {"reason": getattr(ceilings, f"{name}_reason", None) or "not known"}]
    if not math.flop or not math.time_ns:
        return [row | {"reason": math.reason}]
    peaks = {dtype: ceiling.flop_per_s.get(dtype) if dtype else None for dtype in math.flop}
    row |= _against(math.flop, peaks, math.time_ns) | {"reason": _bound(math, peaks)}
    beyond = _beyond(row, math)
    if beyond is not None:
        return [row | {"mfu_ratio": None, "hfu_ratio": None, "reason": beyond}]
    by_type = [
        {
            **row,
            "dtype": dtype or "unknown",
            "model_flop": round(flop[0]),
            "hardware_flop": round(flop[1]),
            "reason": None if peaks[dtype] else "no peak is known for this type",
            **_against({dtype: flop}, peaks, math.time_ns),
        }
        for dtype, flop in sorted(math.flop.items(), key=lambda of: -of[1][1])
    ]
    return [row, *by_type]


def _against(
    flop: dict[str, tuple[float, float]], peaks: dict[str, float | None], time_ns: int
) -> Row:
    """Utilization of one or more data types, None where no peak is known for any."""
    covered = [(*of, peak) for dtype, of in flop.items() if (peak := peaks[dtype])]
    if not covered:
        return _UNKNOWN
    model_ns = sum(model / peak * 1e9 for model, _, peak in covered)
    hardware_ns = sum(hardware / peak * 1e9 for _, hardware, peak in covered)
    return {
        "mfu_ratio": model_ns / time_ns,
        "hfu_ratio": hardware_ns / time_ns,
        "peak_flop_per_s": sum(hardware for _, hardware, _ in covered) / hardware_ns * 1e9,
        "model_needs_ns": round(model_ns),
        "hardware_needs_ns": round(hardware_ns),
    }


def _beyond(row: Row, math: _Math) -> str | None:
    """Reason to withhold the values: the products ran faster than the ceiling allows."""
    ratio = (row["hardware_needs_ns"] or 0) / max(min(math.products_ns, math.time_ns), 1)
    if ratio <= MOST_OF_A_PEAK:
        return None
    remedy = (
        "measure it again with nothing else running (chopper calibrate --force), or "
        if row["ceiling"] == "achievable"
        else ""
    )
    return (
        f"withheld: the products ran {ratio:.3g} times as fast as the {row['ceiling']} ceiling "
        f"allows; {remedy}check the peak, the data types, the shapes and the times"
    )


def _bound(math: _Math, peaks: dict[str, float | None]) -> str | None:
    """Reason why the values are lower bounds, None where they are not."""
    parts = []
    if math.unknown_ratio > _SAID_RATIO:
        parts.append(f"the FLOP of {math.unknown_ratio:.1%} of the products' time are not known")
    lacking = {dtype: of[1] for dtype, of in math.flop.items() if not peaks[dtype]}
    share = sum(lacking.values()) / math.sums()[1]
    if share > _SAID_RATIO:
        names = ", ".join(sorted(dtype or "an unknown type" for dtype in lacking))
        if share == 1:
            return f"no peak is known for {names}"
        parts.append(f"no peak is known for {names}, {share:.1%} of the FLOP")
    return "a lower bound: " + "; ".join(parts) if parts else None


def _of_run(per_rank: list[list[Row]], name: str) -> list[Row]:
    """All ranks together: their FLOP against their own ceilings, over their time."""
    if len(per_rank) == 1:
        return [{**row, "rank": None} for row in per_rank[0]]
    firsts = [rows[0] for rows in per_rank]
    row: Row = {"rank": None, "ceiling": name}
    for text in ("source", "reason"):
        row[text] = "; ".join(dict.fromkeys(r[text] for r in firsts if r[text])) or None
    row |= {name: sum(r[name] for r in firsts) for name in ("time_ns", "observed_ns")}
    for amount in ("model_flop", "hardware_flop"):
        known = [r[amount] for r in firsts if r[amount] is not None]
        row[amount] = sum(known) if known else None
    typed = [r for rows in per_rank for r in rows[1:]]
    by_type = []
    for dtype in sorted({r["dtype"] for r in typed}):
        mine = [r for r in typed if r["dtype"] == dtype]
        flop = {n: sum(r[n] for r in mine) for n in ("model_flop", "hardware_flop")}
        of_type = {"dtype": dtype, "reason": mine[0]["reason"], **_summed(mine, row["time_ns"])}
        by_type.append(row | flop | of_type)
    whole = row | _summed(firsts, row["time_ns"])
    return [whole, *sorted(by_type, key=lambda r: -r["hardware_flop"])]


def _summed(rows: list[Row], time_ns: int) -> Row:
    """Utilization of several rows over a time; null where one of them is not known."""
    if not time_ns or any(r.get("hfu_ratio") is None for r in rows):
        return _UNKNOWN
    model_ns = sum(r["model_needs_ns"] for r in rows)
    hardware_ns = sum(r["hardware_needs_ns"] for r in rows)
    flop = sum(r["peak_flop_per_s"] * r["hardware_needs_ns"] for r in rows)
    return {
        "mfu_ratio": model_ns / time_ns,
        "hfu_ratio": hardware_ns / time_ns,
        "peak_flop_per_s": flop / hardware_ns if hardware_ns else None,
        "model_needs_ns": model_ns,
        "hardware_needs_ns": hardware_ns,
    }
