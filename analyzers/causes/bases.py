"""The basis of each cause's number (a measurement, a peak, a model), in words."""

from __future__ import annotations

from collections.abc import Sequence

from chopper.analyzers.causes.attribute import RankResult
from chopper.attribution import Basis, RankSummary
from chopper.causes import CAUSES, LEAVES, inherited


def bases_of(ranks: Sequence[RankSummary], results: Sequence[RankResult]) -> dict[str, Basis]:
    """Return what each leaf cause rests on; those that are missing rest on recorded times."""
    factors = [r.factors for r in results if r.factors is not None]
    one_clock = any(f.clocks.known.any() for f in factors)
    words = {
        "peak": "; ".join(sorted({r.peak_source for r in ranks if r.peak_source}))
        or "no peak known",
        "clocks": ", normalized to one clock"
        if one_clock
        else "; clocks were not measured and may differ",
        "unmeasured": _unmeasured([f.unmeasured for f in factors]),
        "unmeasured_vector": _unmeasured(
            [{n: f.unmeasured[n] for n in _OF_VECTOR if n in f.unmeasured} for f in factors]
        ),
    }
    return {
        leaf: Basis(basis.format(**words), CAUSES[leaf].measured)
        for leaf in LEAVES
        if (basis := inherited(leaf, "basis"))
    }


_OF_VECTOR = ("clock", "contention")
"""Factors of work that is no product."""


def _unmeasured(reasons: Sequence[dict[str, str]]) -> str:
    """Name the factors that are in the rest because they were not measured, and why."""
    by_factor: dict[str, dict[str, None]] = {}
    for of_rank in reasons:
        for name, why in of_rank.items():
            by_factor.setdefault(name, {})[why] = None
    said = "; ".join(f"{name} not measured ({', '.join(why)})" for name, why in by_factor.items())
    return f"; {said}" if said else ""
