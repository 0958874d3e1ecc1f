"""The tables that sum up a run: causes, the same time by level, ranks, actions and findings.

Python, CSV, JSON and exports show the same columns and values. A time per step is the mean over
ranks and steps, in whole nanoseconds that sum to the step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pyarrow as pa

from chopper.analyzers.actions import Actions
from chopper.analyzers.actions import actions as actions_of
from chopper.analyzers.attribution import Attribution, Recoverable
from chopper.analyzers.causes.compute import apportion
from chopper.analyzers.compare.runs import apportion as per_window
from chopper.analyzers.replay.replay import Replay, recoverable
from chopper.causes import CAUSES, CODES, LEVELS, Level
from chopper.hardware.ceilings import Ceiling
from chopper.hardware.devices import DTYPES
from chopper.quantities import one_of
from chopper.reports.actions import to_json as actions_json
from chopper.storage.manifest import DIMENSIONS, Finding
from chopper.storage.parts import SubRun
from chopper.tables import ColumnType, Table, column, optional

_IDEAL = "compute.ideal"
_SAVED = (
    optional(
        "recoverable_step_ns",
        "Predicted saving per step if only this were removed, by a replay, as `chopper whatif` "
        "gives it. Savings overlap, so they do not add up. Null if unknown.",
    ),
    optional("recoverable_step_ci95_low_ns", "Low end of its 95 % interval over steps."),
    optional(
        "recoverable_step_ci95_high_ns",
        "High end of that interval; both are null with fewer than three steps.",
    ),
)

CAUSE = Table(
    "causes",
    "All causes with time in them, parents before their leaves. The leaves sum to the step.",
    (
        column("id", "Id of the cause."),
        optional("parent", "Id of its parent; null at the top."),
        column("label", "Name for people."),
        column("is_leaf", "True for a leaf. A parent is the sum of its leaves.", "bool"),
        column("step_ns", "Time per step, mean over ranks and steps."),
        optional("step_ci95_low_ns", "Low end of its 95 % interval, from resampled steps."),
        optional(
            "step_ci95_high_ns",
            "High end of that interval; both are null with fewer than three steps.",
        ),
        column("time_ns", "Time, summed over all ranks and steps."),
        optional("share_ratio", "Share of the observed time; null when nothing was observed."),
        *_SAVED,
        optional("recoverable_reason", "Why the saving is unknown."),
        column("basis", "What the number rests on."),
        column(
            "measured",
            "True if it comes from recorded times alone, false if a model has a part in it.",
            "bool",
        ),
        optional("withheld", "Why the data cannot support this cause; null if it can."),
    ),
)

RANK = Table(
    "ranks",
    "One row per rank: its device, its step and its ideal.",
    (
        column("rank", "Global rank.", "int64"),
        column("label", "Name of the rank in reports."),
        optional(
            "device", "Name of its device; null if it computes on the host, or it is unknown."
        ),
        optional(
            "device_reason",
            "Why the device is another than the trace names: the user named it. Null otherwise.",
        ),
        optional("peak_source", "Source of the device's peaks; null if they are unknown."),
        column("steps_count", "Its step windows."),
        column("step_ns", "Mean length of these windows."),
        optional(
            "ideal_step_ns", "The part of it that model math needs at peak; null if withheld."
        ),
        column("observed_ns", "Time of all its windows."),
        optional("ideal_ns", "The part of it that model math needs at peak; null if withheld."),
    ),
)

ACTION = Table(
    "actions",
    "What to try, the most recoverable time first.",
    (
        column("detector", "Name of the pattern."),
        column("title", "What was seen, in words."),
        *_SAVED,
        column("share_ratio", "Saving as a share of the step, or of the loop, see `of`."),
        column("of", "`step`, or `loop`: all recorded steps and what follows them."),
        optional("phase", "Phase that holds most of its time; null if none does."),
        optional("layer", "Layer that does."),
        optional("op", "Operator that does."),
        optional("line", "Python frame around most of its calls; null without stacks."),
        column("evidence", "What was seen, with its numbers, in a sentence.", "text"),
        column("events_count", "Device events that it is about."),
        column("remedy", "How to try it.", "text"),
        column("view", "View that shows its rows."),
    ),
)

FINDING = Table(
    "findings",
    "What the data can and cannot support, most severe first.",
    (
        column("code", "Stable dotted id of the finding."),
        column("severity", "`info`, `warning` or `error`."),
        column("message", "One line.", "text"),
        optional("rank", "Rank that it is about; null for the run.", "int64"),
        optional("count", "How many; null if there is nothing to count.", "int64"),
        optional("share_ratio", "Part of the time or of the events that it is about."),
    ),
)

DECLARED = (CAUSE, RANK, ACTION, FINDING)


def causes(
    run: Attribution, saving: Mapping[str, Recoverable], *, leaves: bool = False
) -> pa.Table:
    """Return the causes of a run.

    Args:
        run: the attribution.
        saving: cause → what removing it would save.
        leaves: only the leaves, largest first; else the whole tree in its order.
    """
    found = run.leaves()
    windows = max(run.windows.num_rows, 1)
    totals_ns = np.array([row.time_ns for row in found], dtype=np.int64)
    step_ns = dict(zip((r.id for r in found), per_window(totals_ns, windows).tolist(), strict=True))
    rows = []
    for row in found if leaves else run.causes():
        below = [leaf for leaf in step_ns if leaf == row.id or leaf.startswith(f"{row.id}.")]
        low_ns, high_ns = row.ci95_ns or (None, None)
        rows.append(
            {
                "id": row.id,
                "parent": row.parent,
                "label": row.label,
                "is_leaf": row.id in CODES,
                "step_ns": sum(step_ns[leaf] for leaf in below),
                "step_ci95_low_ns": None if low_ns is None else round(low_ns / windows),
                "step_ci95_high_ns": None if high_ns is None else round(high_ns / windows),
                "time_ns": row.time_ns,
                "share_ratio": row.share_ratio,
                **_saved(saving[row.id]),
                "recoverable_reason": saving[row.id].reason,
                "basis": row.basis,
                "measured": row.measured,
                "withheld": row.withheld,
            }
        )
    return CAUSE.of_rows(rows)


def _saved(found: Recoverable) -> dict[str, int | None]:
    names = [declared.name for declared in _SAVED]
    return dict(zip(names, (found.step_ns, *(found.ci95_ns or (None, None))), strict=True))


def level_declaration(level: Level, leaves: Sequence[str]) -> Table:
    """Declare the table of the time by a level, which has a column for each leaf cause."""
    key_type: ColumnType = "int64" if level in ORDERED else "string"
    per = {"step": "Mean over its ranks.", "rank": "Mean over its steps."}
    per |= dict.fromkeys(DIMENSIONS, "Mean over its ranks and steps.")
    return Table(
        f"by_{level}",
        f"The time of a step by {level}, and each row's time by cause.",
        (
            optional(level, "Value of the level; null gathers what has none.", key_type),
            column("step_ns", f"Time per step. {per.get(level, 'Mean over ranks and steps.')}"),
            optional("share_ratio", "Share of the observed time; null when nothing was observed."),
            optional(
                "own_step_ns",
                "Duration of its device events per step, without the waiting before them, "
                "whatever ran at the same time; null for steps, ranks and their places.",
            ),
            optional("events_count", "Device events; null for steps, ranks and their places."),
            column("time_ns", "Time, summed over all ranks and steps."),
            *(column(f"{leaf}_ns", f"Part of `step_ns`: {CAUSES[leaf].label}.") for leaf in leaves),
        ),
    )


def by(run: Attribution, level: str) -> tuple[Table, pa.Table]:
    """Return the time of a run by a level: the declaration of the table, and its rows.

    Raises:
        UsageError: no such level, or no rank's place in that dimension is known.
    """
    chosen = cast("Level", one_of("level", level, LEVELS))
    run.check_level(chosen)
    groups = run.by(chosen)
    leaves = [row.id for row in run.leaves()]
    totals_ns = np.array([g.time_ns for g in groups], dtype=np.int64)
    counts = windows_of_groups(run, chosen)
    windows = np.array([counts[g.key] for g in groups], dtype=np.int64)
    if chosen in ORDERED:
        step_ns = totals_ns // windows
    else:
        step_ns = per_window(totals_ns, int(windows[0])) if len(groups) else totals_ns
    weights = [np.array([g.causes.get(c, 0) for g in groups], dtype=np.float64) for c in leaves]
    parts = apportion(step_ns, weights) if leaves else []
    observed_ns = run.observed_ns
    declared = level_declaration(chosen, leaves)
    own = [(g.own_ns, int(n)) for g, n in zip(groups, windows, strict=True)]
    values = {
        chosen: [g.key for g in groups],
        "step_ns": step_ns.tolist(),
        "share_ratio": [g.time_ns / observed_ns if observed_ns else None for g in groups],
        "own_step_ns": [None if own_ns is None else round(own_ns / n) for own_ns, n in own],
        "events_count": [g.events_count for g in groups],
        "time_ns": totals_ns.tolist(),
        **{f"{leaf}_ns": part.tolist() for leaf, part in zip(leaves, parts, strict=True)},
    }
    names = declared.arrow.names
    return declared, declared.of_rows(
        [
            dict(zip(names, row, strict=True))
            for row in zip(*(values[n] for n in names), strict=True)
        ]
    )


ORDERED: tuple[Level, ...] = ("step", "rank", *DIMENSIONS)
"""Levels whose groups have numbers, and are shown in their order."""


def windows_of_groups(run: Attribution, level: Level) -> dict[str | int | None, int]:
    """Return how many windows the time of each group is the sum of; at least 1."""
    whole = max(run.windows.num_rows, 1)
    counts: dict[str | int | None, int] = defaultdict(lambda: whole)
    if level == "step":
        counts |= Counter(run.windows["number"].to_pylist())
    elif level == "rank":
        counts |= {rank.rank: max(rank.steps, 1) for rank in run.ranks}
    elif level in DIMENSIONS:
        places = run.places(level)
        of_places = Counter({places.get(r.rank): 0 for r in run.ranks})
        for rank in run.ranks:
            of_places[places.get(rank.rank)] += rank.steps
        counts |= {place: max(count, 1) for place, count in of_places.items()}
    return counts


def every(run: Attribution, replay: Replay | str) -> Iterator[pa.Table]:
    """Yield all these tables of a run, each with its name in its metadata.

    Args:
        run: the attributed run.
        replay: of the run; or why it cannot be replayed.
    """
    yield causes(run, recoverable(run, replay))
    yield ranks(run)
    yield actions(None if isinstance(replay, str) else actions_of(run, replay))
    yield findings(run.findings)
    known = {"phase", "layer", "op", "kernel", "step", "rank", *run.dimensions}
    yield from (by(run, level)[1] for level in LEVELS if level in known)


def ranks(run: Attribution) -> pa.Table:
    """Return the ranks of a run."""
    rows = []
    for rank in run.ranks:
        windows = max(rank.steps, 1)
        ideal_ns = None if run.withholds(_IDEAL, rank.rank) else rank.ideal_ns
        rows.append(
            {
                "rank": rank.rank,
                "label": rank.label,
                "device": rank.device,
                "device_reason": rank.device_reason,
                "peak_source": rank.peak_source,
                "steps_count": rank.steps,
                "step_ns": rank.observed_ns // windows,
                "ideal_step_ns": None if ideal_ns is None else ideal_ns // windows,
                "observed_ns": rank.observed_ns,
                "ideal_ns": ideal_ns,
            }
        )
    return RANK.of_rows(rows)


def actions(tried: Actions | None) -> pa.Table:
    """Return what to try; without rows where the run cannot be replayed."""
    names = {declared.name for declared in ACTION.columns}
    rows = [] if tried is None else actions_json(tried.ranked)
    return ACTION.of_rows([{n: v for n, v in row.items() if n in names} for row in rows])


def findings(found: Sequence[Finding]) -> pa.Table:
    """Return findings, in their order."""
    return FINDING.of_rows(
        [{n: v for n, v in msgspec.structs.asdict(f).items() if n in _FINDING} for f in found]
    )


_FINDING = frozenset(declared.name for declared in FINDING.columns)


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
            row | {"causes_ns": by_rank.get(row["rank"], {})} for row in ranks(answer).to_pylist()
        ],
        "processes": [
            {"path": str(p.path), "pid": p.pid, "ranks": p.ranks, "steps": p.steps}
            for p in processes
        ],
        "causes": causes(answer, recoverable).to_pylist(),
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
            "link": {"bytes_per_s": both.link.bytes_per_s, "source": both.link.source},
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
