"""The documented JSON form of an attribution, schema ``chopper.attribution/2``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chopper.hardware.devices import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from chopper.attribution import Attribution, Recoverable
    from chopper.hardware.ceilings import Ceiling, Ceilings
    from chopper.storage.manifest import Finding
    from chopper.storage.processes import SubRun

SCHEMA = "chopper.attribution/2"


def attribution_json(
    answer: Attribution,
    recoverable: Mapping[str, Recoverable],
    utilization: Sequence[Mapping[str, Any]] = (),
    processes: Sequence[SubRun] = (),
) -> dict[str, Any]:
    """Return the JSON form of an attribution.

    Args:
        answer: the attribution.
        recoverable: cause → what removing it would save.
        utilization: rows of the view of that name.
        processes: of the run that are no ranks.
    """
    by_rank = {g.key: g.causes for g in answer.by("rank")}
    whole = answer.whole
    return {
        "schema": SCHEMA,
        "run": answer.source,
        "observed_ns": answer.observed_ns,
        "ideal_ns": None if answer.withholds("compute.ideal") else answer.ideal_ns,
        "steps": answer.steps,
        "all_kinds": {
            "observed_ns": whole.observed_ns,
            "ideal_ns": None if whole.withholds("compute.ideal") else whole.ideal_ns,
            "steps": whole.steps,
            "causes_ns": {row.id: row.time_ns for row in whole.leaves()},
        },
        "step_time": answer.step_time().to_dict(),
        "step_time_ns": answer.step_time_ns(),
        "ranks": [
            {
                "rank": r.rank,
                "label": r.label,
                "device": r.device,
                "peak_source": r.peak_source,
                "observed_ns": r.observed_ns,
                "ideal_ns": None if answer.withholds("compute.ideal", r.rank) else r.ideal_ns,
                "steps": r.steps,
                "causes_ns": by_rank.get(r.rank, {}),
            }
            for r in answer.ranks
        ],
        "processes": [
            {"path": str(p.path), "pid": p.pid, "ranks": p.ranks, "steps": p.steps}
            for p in processes
        ],
        "causes": [
            {
                "id": c.id,
                "parent": c.parent,
                "label": c.label,
                "time_ns": c.time_ns,
                "share_ratio": c.share_ratio,
                "ci95_ns": list(c.ci95_ns) if c.ci95_ns else None,
                "basis": c.basis,
                "measured": c.measured,
                "recoverable_ns": recoverable[c.id].time_ns,
                "recoverable_reason": recoverable[c.id].reason,
                "withheld": c.withheld,
            }
            for c in answer.causes()
        ],
        "ceilings": [_ceilings_dict(rank, c) for rank, c in answer.ceilings.items()],
        "utilization": [*utilization],
        "coverage": answer.coverage,
        "quality": [_finding_dict(f) for f in answer.findings],
        "withheld": [
            {
                "claim": held.claim.id,
                "title": held.claim.title,
                "effect": held.claim.effect,
                "reason": held.reason,
                "codes": list(held.codes),
                "ranks": None if held.ranks is None else list(held.ranks),
            }
            for held in answer.withheld
        ],
    }


def _ceilings_dict(rank: int, ceilings: Ceilings) -> dict[str, Any]:
    def one(ceiling: Ceiling | None, reason: str | None) -> dict[str, Any]:
        return {
            "flop_per_s": {}
            if ceiling is None
            else {d: rate for d in DTYPES if (rate := ceiling.flop_per_s.get(d)) is not None},
            "memory_bytes_per_s": None if ceiling is None else ceiling.memory_bytes_per_s,
            "link_bytes_per_s": None if ceiling is None else ceiling.link_bytes_per_s,
            "source": None if ceiling is None else ceiling.source,
            "reason": reason,
        }

    return {
        "rank": rank,
        "theoretical": one(ceilings.theoretical, ceilings.theoretical_reason),
        "achievable": one(ceilings.achievable, ceilings.achievable_reason),
    }


def _finding_dict(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": finding.severity,
        "message": finding.message,
        "rank": finding.rank,
        "count": finding.count,
        "withholds": list(finding.withholds),
    }
