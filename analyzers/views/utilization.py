"""The view of utilization."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.steps import tokens_of
from chopper.analyzers.trace.columns import ints, matching, strings
from chopper.analyzers.trace.phases import phases_outside_training
from chopper.analyzers.views import Rows, view
from chopper.hardware.ceilings import MOST_OF_A_PEAK, Ceiling, Ceilings

Row = dict[str, Any]

_NOT_THE_MODELS = ("recompute", "optimizer")
_SAID_RATIO = 0.001
"""Smaller shares of unknown FLOP or peaks are not worth a remark."""
_NEEDS = ("model_needs_ns", "hardware_needs_ns")


class _Math(msgspec.Struct, frozen=True):
    """FLOP of one rank's products.

    Attributes:
        flop: data type, "" for unknown → FLOP that the model needs, and all of them.
        unknown_ratio: share of the products' time whose FLOP are not known.
        products_ns: time of the device events whose FLOP are known.
        reason: why there are no FLOP, where there are none.
    """

    flop: dict[str, tuple[float, float]]
    unknown_ratio: float = 0.0
    products_ns: int = 0
    reason: str = "no matrix product, convolution or attention was recognized"


@view
def utilization(run: Attribution) -> Rows:
    """MFU and HFU against the theoretical and the achievable ceiling.

        MFU = Σ_d F_d / (P_d · T)        HFU = Σ_d H_d / (P_d · T)

    with, per data type d: F_d the model FLOP (matrix products, convolutions and attention of
    forward and backward; with a causal mask only the pairs that it keeps), H_d the same including
    recomputation and the optimizer's products, P_d the ceiling for that type, and T the time: that
    of the same steps without a trace if such steps were recorded, since tracing slows the host but
    not the model, otherwise the observed time. Each FLOP counts against the peak of its own type,
    so that a mix of bf16 and fp32 is not distorted. Products with unknown FLOP or peak do not
    count: the value is then a lower bound, and says so.

    title: Utilization
    section: Steps and host
    version: 2
    columns:
      rank, int32, null: Global rank; null for all ranks together.
      ceiling: Ceiling of the comparison: theoretical or achievable.
      dtype, null: Data type; null for all types, each held against its own peak.
      mfu_ratio, null: Model FLOPs utilization (MFU); null with a reason.
      hfu_ratio, null: Hardware FLOPs utilization (HFU); null with a reason.
      peak_flop_per_s, null: Ceiling for this mix of data types; null where unknown.
      tokens_per_s, float64, null: Tokens looked up per second; null where unknown.
      model_flop, null: Model FLOP; null with a reason.
      hardware_flop, null: FLOP including recomputation and the optimizer's.
      model_needs_ns, null: Time that the model's FLOP need at the ceiling.
      hardware_needs_ns, null: Time that all FLOP need at the ceiling.
      time_ns: Time T of the definition, summed over ranks.
      observed_ns: Observed time of the traced steps, summed over ranks.
      reason, text, null: Reason why values are null or lower bounds.
      source, text, null: Origin of the ceiling's value; null where unknown.
    """
    scale = run.step_time().scale
    if not run.observed_ns:
        return []
    # A rank whose windows are all left out of the step time says nothing of its FLOP.
    traced = {r.rank for r in run.all_steps.ranks if r.steps}
    ranks = [r for r in run.ranks if r.steps or r.rank not in traced]
    math = {r.rank: _math(run, r.rank) for r in ranks}
    tokens = {rank: tokens_of(run, rank) for rank in math}
    # What the device did while its state is unknown is no part of its utilization.
    unknown_ns = {group.key: group.causes.get("idle.device_unknown", 0) for group in run.by("rank")}
    rows: list[Row] = []
    for name in ("theoretical", "achievable"):
        per_rank = []
        for summary in ranks:
            rank = summary.rank
            time_ns = round((summary.observed_ns - unknown_ns.get(rank, 0)) * scale)
            row: Row = {"rank": rank, "ceiling": name, "time_ns": time_ns}
            row["observed_ns"] = summary.observed_ns
            found = _of_rank(math[rank], run.ceilings.get(rank), row)
            for one in found:
                one |= {needs: round(one[needs]) for needs in _NEEDS if needs in one}
            known = tokens[rank]
            if known is not None and time_ns:
                found[0]["tokens_per_s"] = known / (time_ns / 1e9)
            per_rank.append(found)
        rows += _of_run(per_rank)
        if len(per_rank) > 1:
            rows += [found[0] for found in per_rank]
    return rows


def _math(run: Attribution, rank: int) -> _Math:
    work, links = run.work.get(rank), run.links.get(rank)
    if work is None or links is None:
        return _Math({})
    rows = np.flatnonzero(work.math & links["step_index"].is_valid().to_numpy())
    if not len(rows):
        return _Math({})
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
        return _Math({}, reason="the recorded shapes cannot be right: their FLOP exceed 64 bits")
    by_type = zip(names, model.tolist(), hardware.tolist(), strict=True)
    return _Math(
        {name: (of_model, of_all) for name, of_model, of_all in by_type if of_all},
        float(1 - dur[known].sum() / dur.sum() if dur.sum() else 0.0),
        int(dur[known].sum()),
        "the FLOP are unknown: shapes were not recorded",
    )


def _of_rank(math: _Math, ceilings: Ceilings | None, row: Row) -> list[Row]:
    """One rank against one ceiling: all its FLOP, then by data type."""
    name = row["ceiling"]
    ceiling: Ceiling | None = getattr(ceilings, name, None)
    if math.flop:
        model, hardware = (sum(of) for of in zip(*math.flop.values(), strict=True))
        row |= {"model_flop": round(model), "hardware_flop": round(hardware)}
    if ceiling is None:
        return [row | {"reason": getattr(ceilings, f"{name}_reason", None) or "unknown"}]
    row["source"] = ceiling.source
    if not math.flop or not row["time_ns"]:
        return [row | {"reason": math.reason}]
    types = []
    for dtype, (model, hardware) in math.flop.items():
        one = row | {"dtype": dtype or "unknown"}
        one |= {"model_flop": round(model), "hardware_flop": round(hardware)}
        peak = ceiling.flop_per_s.get(dtype) if dtype else None
        if peak:
            needs = {
                "model_needs_ns": model / peak * 1e9,
                "hardware_needs_ns": hardware / peak * 1e9,
            }
            one |= _against([{"peak_flop_per_s": peak, **needs}], row["time_ns"])
        else:
            one["reason"] = "the peak for this data type is unknown"
        types.append(one)
    row |= _against(types, row["time_ns"])
    beyond = _beyond(row, math)
    if beyond is not None:
        return [row | {"mfu_ratio": None, "hfu_ratio": None, "reason": beyond}]
    row["reason"] = _bound(math, types)
    return [row, *sorted(types, key=lambda one: -one["hardware_flop"])]


def _against(rows: list[Row], time_ns: int) -> Row:
    """Utilization over a time of the rows whose peaks are known, together; nothing without any."""
    known = [row for row in rows if "hardware_needs_ns" in row]
    if not known:
        return {}
    model_ns, hardware_ns = (sum(row[name] for row in known) for name in _NEEDS)
    flop = sum(row["peak_flop_per_s"] * row["hardware_needs_ns"] for row in known)
    return {
        "mfu_ratio": model_ns / time_ns,
        "hfu_ratio": hardware_ns / time_ns,
        "peak_flop_per_s": flop / hardware_ns if hardware_ns else None,
        "model_needs_ns": model_ns,
        "hardware_needs_ns": hardware_ns,
    }


def _beyond(row: Row, math: _Math) -> str | None:
    """Reason to withhold the values: the products ran faster than the ceiling allows."""
    ratio = row.get("hardware_needs_ns", 0) / max(min(math.products_ns, row["time_ns"]), 1)
    if ratio <= MOST_OF_A_PEAK:
        return None
    remedy = ""
    if row["ceiling"] == "achievable":
        remedy = "measure it again with nothing else running (chopper calibrate --force), or "
    return (
        f"withheld: the products ran at {ratio:.3g} times the {row['ceiling']} ceiling; "
        f"{remedy}check the peak, the data types, the shapes and the times"
    )


def _bound(math: _Math, types: list[Row]) -> str | None:
    """Reason why the values are lower bounds, None where they are not."""
    parts = []
    if math.unknown_ratio > _SAID_RATIO:
        parts.append(
            f"the FLOP of {fmt.ratio(math.unknown_ratio)} of the products' time are unknown"
        )
    lacking = [row for row in types if "hardware_needs_ns" not in row]
    share = sum(r["hardware_flop"] for r in lacking) / sum(r["hardware_flop"] for r in types)
    if share > _SAID_RATIO:
        names = ", ".join(sorted(r["dtype"] for r in lacking)).replace("unknown", "an unknown type")
        if share == 1:
            return f"the peak of {names} is unknown"
        parts.append(f"the peak of {names}, {fmt.ratio(share)} of the FLOP, is unknown")
    return "a lower bound: " + "; ".join(parts) if parts else None


def _of_run(per_rank: list[list[Row]]) -> list[Row]:
    """All ranks together, then by data type: their FLOP against their own ceilings."""
    if len(per_rank) == 1:
        return [{**row, "rank": None} for row in per_rank[0]]
    firsts = [rows[0] for rows in per_rank]
    times = {name: sum(r[name] for r in firsts) for name in ("time_ns", "observed_ns")}
    typed: dict[str, list[Row]] = {}
    for row in (row for rows in per_rank for row in rows[1:]):
        typed.setdefault(row["dtype"], []).append(row)
    by_type = [_of_ranks(typed[dtype], times) | {"dtype": dtype} for dtype in sorted(typed)]
    return [_of_ranks(firsts, times), *sorted(by_type, key=lambda r: -r["hardware_flop"])]


def _of_ranks(rows: list[Row], times: Row) -> Row:
    """Rows of several ranks as one; without utilization where one of them has none."""
    row: Row = {"rank": None, "ceiling": rows[0]["ceiling"], **times}
    for text in ("source", "reason"):
        row[text] = "; ".join(dict.fromkeys(r[text] for r in rows if r.get(text))) or None
    for amount in ("model_flop", "hardware_flop"):
        known = [r[amount] for r in rows if amount in r]
        row[amount] = sum(known) if known else None
    if times["time_ns"] and all(r.get("hfu_ratio") is not None for r in rows):
        row |= _against(rows, times["time_ns"])
    return row
