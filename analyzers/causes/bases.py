"""The basis of each cause's number (a measurement, a peak, a model), in words."""

from __future__ import annotations

from collections.abc import Sequence

from chopper.attribution import Basis, RankSummary
from chopper.causes import CAUSES, LEAVES, inherited


def bases_of(
    ranks: Sequence[RankSummary], *, is_clocked: bool, unmeasured: Sequence[dict[str, str]]
) -> dict[str, Basis]:
    """Return what each leaf cause rests on; those that are missing rest on recorded times.

    Args:
        ranks: with the sources of their peaks.
        is_clocked: clocks of some device were measured.
        unmeasured: of each rank, factor → why it was not measured.
    """
    words = {
        "peak": "; ".join(sorted({r.peak_source for r in ranks if r.peak_source}))
        or "no peak known",
        "clocks": ", normalized to one clock"
        if is_clocked
        else "; clocks were not measured and may differ",
        "unmeasured": _unmeasured(unmeasured),
        "unmeasured_vector": _unmeasured(
            [{n: why[n] for n in _OF_VECTOR if n in why} for why in unmeasured]
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
    listed = "; ".join(f"{name} not measured ({', '.join(why)})" for name, why in by_factor.items())
    return f"; {listed}" if listed else ""
