"""The basis of each cause's number (a measurement, a peak, a model), in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper.attribution import Basis
from chopper.causes import CAUSES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chopper.analyzers.causes.attribute import RankResult
    from chopper.attribution import RankSummary


def bases_of(ranks: Sequence[RankSummary], results: Sequence[RankResult]) -> dict[str, Basis]:
    """Return what each leaf cause rests on; those that are missing rest on recorded times."""
    sources = sorted({r.peak_source for r in ranks if r.peak_source})
    peak = "; ".join(sources) or "no peak known"
    clock = Basis(
        "clock samples joined in time, reference clock of the peak; weighted by how much the "
        "kernel depends on the clock, as its like show at other clocks, else by its roofline",
        False,
    )
    return {
        "compute.ideal": Basis(f"FLOP from recorded shapes, peak of {peak}", False),
        "compute.roofline": Basis(f"bytes from recorded shapes, bandwidth of {peak}", False),
        **{cause: clock for cause in CAUSES if cause.startswith("compute.clock.")},
        "compute.contention": Basis(
            "recorded times against the median of the same work that ran alone"
            + (
                ", brought to one clock"
                if any(r.factors is not None and r.factors.clocks.known.any() for r in results)
                else "; clocks were not measured and may differ"
            ),
            False,
        ),
        "compute.efficiency.wave_quantization": Basis(
            "recorded grids against the units of the device", False
        ),
        "compute.efficiency.instructions": Basis(
            "hardware counters of another run, matched by kernel name and order", False
        ),
        "compute.efficiency.tensor_core": Basis(
            "hardware counters of another run, matched by kernel name and order; less what the "
            "roofline and the last wave explain",
            False,
        ),
        "compute.efficiency.rest": Basis(
            f"recorded time less the factors above{_unmeasured(results)}", False
        ),
        "compute.vector.roofline": Basis(f"bytes from recorded shapes, bandwidth of {peak}", False),
        "compute.vector.excess": Basis(
            f"recorded time less the roofline{_unmeasured(results, 'clock', 'contention')}", False
        ),
        "compute.no_peak": Basis("recorded times; peak or shapes unknown", True),
        "communication.unseparated": Basis(
            "recorded times; not matched on all ranks, so waiting is not told from transfer", True
        ),
        "communication.wait": Basis(
            "recorded times; the same collective matched on all ranks of its group (of the world, "
            "where the trace names no group)",
            True,
        ),
        "communication.transfer.at_peak": Basis(
            f"bytes times nccl-tests' bus factor, link of {peak}", False
        ),
        "communication.transfer.below_peak": Basis(
            "recorded time after the last rank came, less the time at link peak", False
        ),
    }


def _unmeasured(results: Sequence[RankResult], *only: str) -> str:
    """Name the factors that are in the rest because they were not measured, and why."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        for name, why in (result.factors.unmeasured if result.factors is not None else {}).items():
            if (not only or name in only) and why not in reasons.setdefault(name, []):
                reasons[name].append(why)
    said = "; ".join(f"{name} not measured ({', '.join(why)})" for name, why in reasons.items())
    return f"; {said}" if said else ""
