"""The documented JSON form of an attribution, schema ``chopper.attribution/4``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from chopper.analyzers.attribution import Attribution, Recoverable
from chopper.hardware.ceilings import Ceiling
from chopper.hardware.devices import DTYPES
from chopper.reports import tables
from chopper.storage.parts import SubRun

SCHEMA = "chopper.attribution/4"


def attribution_json(
    answer: Attribution,
    verdict: Mapping[str, Any],
    recoverable: Mapping[str, Recoverable],
    actions: Sequence[Mapping[str, Any]] | None,
    utilization: Sequence[Mapping[str, Any]] = (),
    processes: Sequence[SubRun] = (),
    dropped: Sequence[Mapping[str, Any]] | None = None,
    failed: Mapping[str, str] | None = None,
    pace: float | None = None,
) -> dict[str, Any]:
    """Return the JSON form of an attribution.

    Args:
        verdict: what bounds the run.
        recoverable: cause → what removing it would save.
        actions: what to try, the most recoverable time first; None where it cannot be replayed.
        utilization: rows of the view of that name.
        processes: of the run that are no ranks.
        dropped: patterns that were seen but are no actions, with the reason.
        failed: pattern → why it could not be looked for.
        pace: share of its traced time that the host's work takes in the step of savings.
    """
    by_rank = {g.key: g.causes for g in answer.by("rank")}
    return {
        "schema": SCHEMA,
        "run": answer.source,
        "verdict": dict(verdict),
        "observed_ns": answer.observed_ns,
        "ideal_ns": None if answer.withholds("compute.ideal") else answer.ideal_ns,
        "steps": answer.steps,
        "all_kinds": _all_kinds(answer.all_steps),
        "step_time": answer.step_time().to_dict(),
        "step_time_ns": answer.step_time_ns(),
        "ranks": [
            row | {"causes_ns": by_rank.get(row["rank"], {})}
            for row in tables.ranks(answer).to_pylist()
        ],
        "processes": [
            {"path": str(p.path), "pid": p.pid, "ranks": p.ranks, "steps": p.steps}
            for p in processes
        ],
        "causes": tables.causes(answer, recoverable).to_pylist(),
        "host_pace_ratio": pace,
        "actions": None if actions is None else [*actions],
        "actions_dropped": None if dropped is None else [*dropped],
        "actions_failed": dict(failed or {}),
        "ceilings": _ceilings(answer),
        "utilization": [*utilization],
        "coverage": answer.coverage,
        "quality": [
            msgspec.structs.asdict(f) | {"withholds": list(f.withholds)} for f in answer.findings
        ],
        "withheld": [
            {
                "claim": held.id,
                "title": held.claim.title,
                "effect": held.claim.effect,
                "reason": held.reason,
                "codes": list(held.codes),
                "ranks": None if held.ranks is None else list(held.ranks),
            }
            for held in answer.withheld
        ],
    }


def _all_kinds(whole: Attribution) -> dict[str, Any]:
    return {
        "observed_ns": whole.observed_ns,
        "ideal_ns": None if whole.withholds("compute.ideal") else whole.ideal_ns,
        "steps": whole.steps,
        "causes_ns": {row.id: row.time_ns for row in whole.leaves()},
    }


def _ceilings(answer: Attribution) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "theoretical": _ceiling(both.theoretical, both.theoretical_reason),
            "achievable": _ceiling(both.achievable, both.achievable_reason),
        }
        for rank, both in answer.ceilings.items()
    ]


def _ceiling(ceiling: Ceiling | None, reason: str | None) -> dict[str, Any]:
    rates = ("memory_bytes_per_s", "link_bytes_per_s", "source")
    known = ceiling.flop_per_s if ceiling is not None else {}
    return {
        "flop_per_s": {d: known[d] for d in DTYPES if known.get(d) is not None},
        **{name: getattr(ceiling, name, None) for name in rates},
        "reason": reason,
    }
