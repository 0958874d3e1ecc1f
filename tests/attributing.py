"""Attribution runs made by hand: tables of pieces and windows in the place of an analysis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from chopper.analyzers.attribution import (
    Attribution,
    Basis,
    RankSummary,
    Recoverable,
    cause_rows_of,
    groups_of,
)
from chopper.analyzers.causes.step_time import step_time
from chopper.analyzers.replay.replay import recoverable, replay_or_reason
from chopper.analyzers.trace.rank_join import join_rank
from chopper.analyzers.trace.totals import totals_of
from chopper.claims import withheld
from chopper.pipeline import rank_input, rank_steps
from chopper.reports.story import Story
from chopper.reports.verdict import Verdict, verdict
from chopper.storage.manifest import Finding
from chopper.storage.run import Run
from chopper.tables import TABLES


def assembled(
    run: Run,
    *,
    pieces: pa.Table,
    windows: pa.Table,
    ranks: Sequence[RankSummary],
    gaps: pa.Table | None = None,
    links: dict[int, pa.Table] | None = None,
    findings: Sequence[Finding] = (),
    coverage: dict[str, float | None] | None = None,
    bases: Mapping[str, Basis] | None = None,
    claims: bool = False,
    **made: Any,
) -> Attribution:
    """Make an attribution of a run in memory; its step time and intervals follow from the tables.

    Args:
        claims: withhold what the findings withhold.
    """
    joined = {rank: join_rank(rank_input(run, rank)) for rank in run.ranks}
    held = withheld([*findings]) if claims else []
    totals = totals_of(
        pieces,
        windows,
        {r: (j.device_event, (links or {}).get(r, j.event_link)) for r, j in joined.items()},
    )
    by_step = {g.key: g.causes for g in groups_of(totals, "step")}
    values: dict[str, Any] = {
        "source": run.source,
        "pieces": pieces,
        "windows": windows,
        "totals": totals,
        "gaps": TABLES["gap"].empty() if gaps is None else gaps,
        "communication": TABLES["communication"].empty(),
        "links": links or {rank: j.event_link for rank, j in joined.items()},
        "ranks": [*ranks],
        "cause_rows": cause_rows_of(totals, dict(bases or {}), held),
        "step": step_time([rank_steps(run, rank) for rank in run.ranks], windows, by_step),
        "findings": [*findings],
        "withheld": held,
        "coverage": coverage or {},
        "bases": dict(bases or {}),
        "ceilings": {},
        "recording": run,
        "joined": joined,
        "matched": {},
        "work": {},
        "factors": {},
    }
    return Attribution(**{**values, **made})


def again(found: Attribution) -> Attribution:
    """Make the attribution anew after tables of its recording were changed."""
    found, run = found.all_steps, found.recording
    assert isinstance(run, Run)
    return assembled(
        run,
        pieces=found.pieces,
        windows=found.windows,
        ranks=found.ranks,
        gaps=found.gaps,
        links=found.links,
        findings=found.findings,
        coverage=found.coverage,
        bases=found.bases,
    )


def recoverable_of(run: Attribution) -> dict[str, Recoverable]:
    """Predict what removing each cause alone would save."""
    return recoverable(run, replay_or_reason(run))


def verdict_of(run: Attribution) -> Verdict:
    """Say what bounds a run."""
    return verdict(Story(run), replay_or_reason(run))
