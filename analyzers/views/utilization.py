"""Model and hardware FLOP utilization against the two ceilings.

    MFU = Σ_d F_d / (P_d · T)        HFU = Σ_d H_d / (P_d · T)

with, per data type d: F_d the FLOP that the model's mathematics needs (products, convolutions and
attention of forward and backward; of a causal mask only the pairs that it keeps), H_d the same with
what was computed again (recomputation) and the optimizer's products, P_d the ceiling for that type,
and T the time: of the same steps without a trace where such were recorded, since tracing slows the
host and not the model, else the observed time. Each FLOP is held against the peak of its own type,
so that a run of bf16 and fp32 is not flattered by either. Products whose FLOP or peak is unknown count nothing: the value
is a lower bound then, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.analyzers.trace.columns import ints, strings
from chopper.analyzers.trace.join import phases_outside_training
from chopper.errors import JSON_ERRORS
from chopper.hardware.ceilings import MOST_OF_A_PEAK
from chopper.tables import TABLES

if TYPE_CHECKING:
    from chopper.attribution import Attribution
    from chopper.hardware.ceilings import Ceiling

CEILINGS = ("theoretical", "achievable")
_NOT_THE_MODELS = ("recompute", "optimizer")
_NO_PRODUCT = "no matrix product, convolution or attention was recognised"
_SAID_RATIO = 0.001
"""Smaller shares of unknown FLOP or peaks are not worth a remark."""


@dataclass(frozen=True)
class _Math:
    """FLOP of one rank's products by data type, "" for an unknown type."""

    model: dict[str, float]
    hardware: dict[str, float]
    unknown_ratio: float
    """Share of the products' time whose FLOP are not known."""
    time_ns: int
    """What they are held against."""
    products_ns: int = 0
    """Time of the device events whose FLOP are known."""
    unknown_reason: str = _NO_PRODUCT
    """Why there are no FLOP, where there are none."""


def utilization(attribution: Attribution) -> pa.Table:
    """MFU and HFU of the run, of its data types, and of each rank, against both ceilings.

    EVENT_LINK, DEVICE_EVENT, WINDOW -> UTILIZATION. The whole run comes first (``rank`` null).
    """
    scale = attribution.step_time().scale
    math = {
        r.rank: _math(attribution, r.rank, round(r.observed_ns * scale)) for r in attribution.ranks
    }
    observed = {r.rank: r.observed_ns for r in attribution.ranks}
    tokens = {rank: tokens_of(attribution, rank) for rank in math}
    rows: list[dict[str, object]] = []
    for name in CEILINGS:
        per_rank = {rank: _rows(attribution, rank, name, math[rank]) for rank in math}
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
    return pa.Table.from_pylist(rows, schema=TABLES["utilization"].arrow)


def _math(attribution: Attribution, rank: int, time_ns: int) -> _Math:
    work, links = attribution.work.get(rank), attribution.links.get(rank)
    if work is None or links is None:
        return _Math({}, {}, 0.0, time_ns)
    rows = np.flatnonzero(work.math & links["step_index"].is_valid().to_numpy())
    flop = work.work_flop[rows]
    known = ~np.isnan(flop)
    dur = ints(attribution.run.table(rank, "device_event"), "dur_ns")[rows]
    time = dur.sum()
    unknown = 1 - dur[known].sum() / time if time else 0.0
    phase, phases = strings(links, "phase")
    present = {phases[code] for code in np.unique(phase) if code >= 0}
    outside = phases_outside_training(present)
    trained = np.array([p not in outside for p in phases] + [True])[phase[rows][known]]
    own = np.array([p not in _NOT_THE_MODELS for p in phases] + [True])[phase[rows][known]]
    names = [*work.dtypes, ""]
    codes = work.dtype[rows][known] % len(names)
    hardware = np.bincount(codes, weights=flop[known] * trained, minlength=len(names))
    model = np.bincount(codes, weights=flop[known] * (own & trained), minlength=len(names))
    if hardware.sum() >= 2**63 / len(
        attribution.ranks
    ):  # the sum over ranks is a whole number, too
        reason = "the recorded shapes cannot be right: they give more FLOP than 64 bits hold"
        return _Math({}, {}, 1.0, time_ns, unknown_reason=reason)
    reason = "the FLOP of no product are known: shapes were not recorded"
    return _Math(
        {n: f for n, f in zip(names, model.tolist(), strict=True) if f},
        {n: f for n, f in zip(names, hardware.tolist(), strict=True) if f},
        float(unknown),
        time_ns,
        int(dur[known].sum()),
        reason if len(rows) else _NO_PRODUCT,
    )


def _rows(attribution: Attribution, rank: int, name: str, math: _Math) -> list[dict[str, object]]:
    """One rank against one ceiling: all its FLOP, then by data type."""
    ceilings = attribution.ceilings.get(rank)
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
    peaks = {d: ceiling.flop_per_s(d) if d else None for d in math.hardware}
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
        return {
            "mfu_ratio": None,
            "hfu_ratio": None,
            "peak_flop_per_s": None,
            "model_needs_ns": None,
            "hardware_needs_ns": None,
        }
    return {
        "mfu_ratio": needed_ns(model) / time_ns,
        "hfu_ratio": needed_ns(hardware) / time_ns,
        "peak_flop_per_s": covered / needed_ns(hardware) * 1e9,
        "model_needs_ns": round(needed_ns(model)),
        "hardware_needs_ns": round(needed_ns(hardware)),
    }


def _beyond(row: dict[str, object], math: _Math) -> str | None:
    """Why the values cannot be: the products needed longer at the ceiling than they took."""
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
    """Why the values are lower bounds, None where they are not."""
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
    observed = sum(_number(r, "time_ns") for r in firsts)
    row: dict[str, object] = {
        "rank": None,
        "ceiling": name,
        "model_flop": _known_sum(firsts, "model_flop"),
        "hardware_flop": _known_sum(firsts, "hardware_flop"),
        "time_ns": observed,
        "source": "; ".join(sources) or None,
        "reason": "; ".join(reasons) or None,
    }
    rows = [row]
    if firsts and observed and all(r.get("hfu_ratio") is not None for r in firsts):
        row |= _summed(firsts, observed)
    types = {str(r["dtype"]) for found in per_rank for r in found[1:]}
    for dtype in sorted(types):
        mine = [r for found in per_rank for r in found[1:] if r["dtype"] == dtype]
        whole: dict[str, object] = {
            **row,
            "dtype": dtype,
            "model_flop": sum(_number(r, "model_flop") for r in mine),
            "hardware_flop": sum(_number(r, "hardware_flop") for r in mine),
            "reason": mine[0].get("reason"),
            "mfu_ratio": None,
            "hfu_ratio": None,
            "peak_flop_per_s": None,
            "model_needs_ns": None,
            "hardware_needs_ns": None,
        }
        if all(r.get("hfu_ratio") is not None for r in mine):
            whole |= _summed(mine, observed)
        rows.append(whole)
    return [row, *sorted(rows[1:], key=lambda r: -_number(r, "hardware_flop"))]


def _summed(rows: list[dict[str, object]], time_ns: float) -> dict[str, object]:
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
    """Of the ranks that know it; None where none does."""
    known = [_number(r, name) for r in rows if r[name] is not None]
    return sum(known) if known else None


def _number(row: dict[str, object], name: str) -> float:
    value = row.get(name)
    return value if isinstance(value, int | float) else 0


def tokens_of(attribution: Attribution, rank: int) -> int | None:
    """Tokens that a rank looked up in its steps, None where that cannot be told.

    The elements of the indices of its ``aten::embedding`` calls, when all of these use one table
    of the same shape: a second one (positions, types) would count the same tokens again.
    """
    spans = attribution.run.table(rank, "host_span")
    codes, names = strings(spans, "name")
    if "aten::embedding" not in names:
        return None
    rows = np.flatnonzero(codes == names.index("aten::embedding"))
    steps = attribution.run.table(rank, "step")
    steps = steps.filter(steps["traced"]) if steps.num_rows else steps
    if steps.num_rows and attribution.whole is not attribution:
        steps = steps.filter(pc.is_in(steps["number"], value_set=attribution.windows["number"]))
    if steps.num_rows:
        at = ints(spans, "start_ns")[rows]
        step = np.searchsorted(ints(steps, "start_ns"), at, side="right") - 1
        rows = rows[(step >= 0) & (at < ints(steps, "end_ns")[np.maximum(step, 0)])]
    dims, texts = strings(spans, "input_dims")
    found, counts = np.unique(dims[rows], return_counts=True)
    tokens = 0
    tables = set()
    for code, count in zip(found.tolist(), counts.tolist(), strict=True):
        shapes = _shapes(texts[code]) if code >= 0 else None
        if shapes is None:
            return None
        tables.add(tuple(shapes[0]))
        tokens += count * int(np.prod(shapes[1]))
    return tokens if len(tables) == 1 else None


def _shapes(text: str) -> list[list[int]] | None:
    """Shapes of the table and the indices of an embedding."""
    try:
        dims = msgspec.json.decode(text)
        return msgspec.convert(dims[:2], type=list[list[int]]) if len(dims) >= 2 else None
    except (*JSON_ERRORS, TypeError):
        return None
