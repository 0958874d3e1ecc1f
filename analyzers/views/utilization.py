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
from typing import TYPE_CHECKING

import numpy as np

from chopper.analyzers.trace.columns import ints, matching, strings
from chopper.analyzers.trace.phases import phases_outside_training
from chopper.analyzers.views import View
from chopper.analyzers.views._tokens import tokens_of
from chopper.hardware.ceilings import MOST_OF_A_PEAK
from chopper.tables import column, optional

if TYPE_CHECKING:
    import pyarrow as pa

    from chopper.analyzers.attributed import Attributed
    from chopper.hardware.ceilings import Ceiling

CEILINGS = ("theoretical", "achievable")
_NOT_THE_MODELS = ("recompute", "optimizer")
_NO_PRODUCT = "no matrix product, convolution or attention was recognised"
_SAID_RATIO = 0.001
"""Smaller shares of unknown FLOP or peaks are not worth a remark."""
_UNKNOWN: dict[str, object] = dict.fromkeys(
    ("mfu_ratio", "hfu_ratio", "peak_flop_per_s", "model_needs_ns", "hardware_needs_ns")
)

VIEW = View(
    "utilization",
    2,
    "Model and hardware FLOP utilization against the theoretical ceiling (table of devices) and "
    "the achievable one (`chopper calibrate`). MFU = Σ F_d / (P_d · T), HFU = Σ H_d / (P_d · T), "
    "with F_d the FLOP of type d that the model needs, H_d those with recomputation and the "
    "optimizer's products, P_d the ceiling for that type, T the time of the same steps without a "
    "trace where such steps were recorded, else the observed time.",
    (
        optional("rank", "Global rank; null for all ranks together.", "int32"),
        column("ceiling", "Ceiling of the comparison: theoretical or achievable."),
        optional("dtype", "Data type; null for all types, each held against its own peak."),
        optional("mfu_ratio", "Model FLOP utilization (MFU)."),
        optional("hfu_ratio", "Hardware FLOP utilization (HFU)."),
        optional(
            "peak_flop_per_s",
            "Ceiling for this mix of data types: FLOP over the time that they need at their peaks.",
        ),
        optional(
            "tokens_per_s",
            "Tokens that the rank's embedding looked up per second; null where one table's shapes "
            "do not tell that.",
            "float64",
        ),
        optional(
            "model_flop", "FLOP that the model's mathematics needs; null where none are known."
        ),
        optional(
            "hardware_flop",
            "FLOP including recomputation and the optimizer's; null where none are known.",
        ),
        optional("model_needs_ns", "Time that the model's FLOP need at the ceiling."),
        optional(
            "hardware_needs_ns", "Time that all FLOP, recomputation included, need at the ceiling."
        ),
        column(
            "time_ns",
            "Time T of the definition, summed over ranks: the observed time, scaled to the median "
            "step without a trace.",
        ),
        column("observed_ns", "Observed time of the traced steps, summed over ranks."),
        optional("reason", "Reason why values are null or lower bounds.", "text"),
        optional("source", "Origin of the ceiling's value.", "text"),
    ),
    module_doc=__doc__,
    title="Utilization",
    section="Steps and host",
)


@dataclass(frozen=True)
class _Math:
    """FLOP of one rank's products by data type, "" for an unknown type."""

    model: dict[str, float]
    hardware: dict[str, float]
    unknown_ratio: float
    """Share of the products' time whose FLOP are not known."""
    time_ns: int
    """Time that they are held against."""
    products_ns: int = 0
    """Time of the device events whose FLOP are known."""
    unknown_reason: str = _NO_PRODUCT
    """Why there are no FLOP, where there are none."""


def utilization(run: Attributed) -> pa.Table:
    """EVENT_LINK, DEVICE_EVENT, WINDOW -> UTILIZATION.

    The whole run first (``rank`` null), then its data types, then each rank, for both ceilings.
    """
    scale = run.step_time().scale
    math = {r.rank: _math(run, r.rank, round(r.observed_ns * scale)) for r in run.ranks}
    observed = {r.rank: r.observed_ns for r in run.ranks}
    tokens = {rank: tokens_of(run, rank) for rank in math}
    rows: list[dict[str, object]] = []
    for name in CEILINGS:
        per_rank = {rank: _rows(run, rank, name, math[rank]) for rank in math}
        for rank, found in per_rank.items():
            seconds, known = math[rank].time_ns / 1e9, tokens[rank]
            if known is not None and seconds:
                found[0]["tokens_per_s"] = known / seconds
        rows += _of_run(list(per_rank.values()), name)
        if len(per_rank) > 1:
            rows += [found[0] for found in per_rank.values()]
    for row in rows:
        of = row["rank"]
        row["observed_ns"] = sum(observed.values()) if of is None else observed[int(str(of))]
    return VIEW.of_rows(rows)


def _math(run: Attributed, rank: int, time_ns: int) -> _Math:
    work, links = run.work.get(rank), run.links.get(rank)
    if work is None or links is None:
        return _Math({}, {}, 0.0, time_ns)
    rows = np.flatnonzero(work.math & links["step_index"].is_valid().to_numpy())
    flop = work.work_flop[rows]
    known = ~np.isnan(flop)
    dur = ints(run.joined[rank].device_event, "dur_ns")[rows]
    time = dur.sum()
    phase, phases = strings(links, "phase")
    present = {phases[code] for code in np.unique(phase) if code >= 0}
    outside = phases_outside_training(present)
    trained = ~matching(phase[rows][known], phases, outside.__contains__)
    own = ~matching(phase[rows][known], phases, _NOT_THE_MODELS.__contains__)
    names = [*work.dtypes, ""]
    codes = work.dtype[rows][known] % len(names)
    hardware = np.bincount(codes, weights=flop[known] * trained, minlength=len(names))
    model = np.bincount(codes, weights=flop[known] * (own & trained), minlength=len(names))
    # The sum over ranks is a whole number, too.
    if hardware.sum() >= 2**63 / len(run.ranks):
        reason = "the recorded shapes cannot be right: they give more FLOP than 64 bits hold"
        return _Math({}, {}, 1.0, time_ns, unknown_reason=reason)
    reason = "the FLOP of no product are known: shapes were not recorded"
    return _Math(
        {n: f for n, f in zip(names, model.tolist(), strict=True) if f},
        {n: f for n, f in zip(names, hardware.tolist(), strict=True) if f},
        float(1 - dur[known].sum() / time if time else 0.0),
        time_ns,
        int(dur[known].sum()),
        reason if len(rows) else _NO_PRODUCT,
    )


def _rows(run: Attributed, rank: int, name: str, math: _Math) -> list[dict[str, object]]:
    """One rank against one ceiling: all its FLOP, then by data type."""
    ceilings = run.ceilings.get(rank)
    ceiling: Ceiling | None = getattr(ceilings, name, None)
    row: dict[str, object] = {
        "rank": rank,
        "ceiling": name,
        "model_flop": round(sum(math.model.values())) if math.hardware else None,
        "hardware_flop": round(sum(math.hardware.values())) if math.hardware else None,
        "time_ns": math.time_ns,
        "source": None if ceiling is None else ceiling.source,
    }
    if ceiling is None:
        row["reason"] = getattr(ceilings, f"{name}_reason", None) or "not known"
        return [row]
    if not math.hardware or not math.time_ns:
        row["reason"] = math.unknown_reason
        return [row]
    peaks = {d: ceiling.flop_per_s.get(d) if d else None for d in math.hardware}
    row |= _against(math.model, math.hardware, peaks, math.time_ns)
    row["reason"] = _bound(math, peaks)
    beyond = _beyond(row, math)
    if beyond is not None:
        return [row | {"mfu_ratio": None, "hfu_ratio": None, "reason": beyond}]
    by_type = []
    for dtype, flop in sorted(math.hardware.items(), key=lambda kv: -kv[1]):
        model = math.model.get(dtype, 0.0)
        by_type.append(
            {
                **row,
                "dtype": dtype or "unknown",
                "model_flop": round(model),
                "hardware_flop": round(flop),
                "reason": None if peaks[dtype] else "no peak is known for this type",
                **_against({dtype: model}, {dtype: flop}, peaks, math.time_ns),
            }
        )
    return [row, *by_type]


def _against(
    model: dict[str, float],
    hardware: dict[str, float],
    peaks: dict[str, float | None],
    time_ns: int,
) -> dict[str, object]:
    """Utilization of one or more data types, None where no peak is known for any."""

    def needed_ns(flop: dict[str, float]) -> float:
        return sum(f / p * 1e9 for d, f in flop.items() if (p := peaks.get(d)))

    covered = sum(f for d, f in hardware.items() if peaks.get(d))
    if not covered:
        return _UNKNOWN
    return {
        "mfu_ratio": needed_ns(model) / time_ns,
        "hfu_ratio": needed_ns(hardware) / time_ns,
        "peak_flop_per_s": covered / needed_ns(hardware) * 1e9,
        "model_needs_ns": round(needed_ns(model)),
        "hardware_needs_ns": round(needed_ns(hardware)),
    }


def _beyond(row: dict[str, object], math: _Math) -> str | None:
    """Reason to withhold the values: the products ran faster than the ceiling allows."""
    took_ns = min(math.products_ns, math.time_ns)
    ratio = _number(row, "hardware_needs_ns") / max(took_ns, 1)
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
    total = sum(math.hardware.values())
    lacking = {d: f for d, f in math.hardware.items() if not peaks[d]}
    if sum(lacking.values()) > _SAID_RATIO * total:
        names = ", ".join(sorted(d or "an unknown type" for d in lacking))
        share = sum(lacking.values()) / total
        if share == 1:
            return f"no peak is known for {names}"
        parts.append(f"no peak is known for {names}, {share:.1%} of the FLOP")
    return "a lower bound: " + "; ".join(parts) if parts else None


def _of_run(per_rank: list[list[dict[str, object]]], name: str) -> list[dict[str, object]]:
    """All ranks together: their FLOP against their own ceilings, over their time."""
    if len(per_rank) == 1:
        return [{**row, "rank": None} for row in per_rank[0]]
    firsts = [rows[0] for rows in per_rank]
    reasons = list(dict.fromkeys(str(r["reason"]) for r in firsts if r.get("reason")))
    sources = list(dict.fromkeys(str(r["source"]) for r in firsts if r.get("source")))
    time_ns = sum(_number(r, "time_ns") for r in firsts)
    row: dict[str, object] = {
        "rank": None,
        "ceiling": name,
        "model_flop": _known_sum(firsts, "model_flop"),
        "hardware_flop": _known_sum(firsts, "hardware_flop"),
        "time_ns": time_ns,
        "source": "; ".join(sources) or None,
        "reason": "; ".join(reasons) or None,
    }
    if firsts and time_ns:
        row |= _summed(firsts, time_ns)
    by_type = []
    for dtype in sorted({str(r["dtype"]) for found in per_rank for r in found[1:]}):
        mine = [r for found in per_rank for r in found[1:] if r["dtype"] == dtype]
        by_type.append(
            {
                **row,
                "dtype": dtype,
                "model_flop": sum(_number(r, "model_flop") for r in mine),
                "hardware_flop": sum(_number(r, "hardware_flop") for r in mine),
                "reason": mine[0].get("reason"),
                **_UNKNOWN,
                **_summed(mine, time_ns),
            }
        )
    return [row, *sorted(by_type, key=lambda r: -_number(r, "hardware_flop"))]


def _summed(rows: list[dict[str, object]], time_ns: float) -> dict[str, object]:
    """Utilization of several rows over a time; nothing where one of them is not known."""
    if any(r.get("hfu_ratio") is None for r in rows):
        return {}
    model = sum(_number(r, "model_needs_ns") for r in rows)
    hardware = sum(_number(r, "hardware_needs_ns") for r in rows)
    flop = sum(_number(r, "peak_flop_per_s") * _number(r, "hardware_needs_ns") for r in rows)
    return {
        "mfu_ratio": model / time_ns,
        "hfu_ratio": hardware / time_ns,
        "peak_flop_per_s": flop / hardware if hardware else None,
        "model_needs_ns": round(model),
        "hardware_needs_ns": round(hardware),
    }


def _known_sum(rows: list[dict[str, object]], name: str) -> float | None:
    """Sum over the ranks that know it; None where none does."""
    known = [_number(r, name) for r in rows if r[name] is not None]
    return sum(known) if known else None


def _number(row: dict[str, object], name: str) -> float:
    value = row.get(name)
    return value if isinstance(value, int | float) else 0
