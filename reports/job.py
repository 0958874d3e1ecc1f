"""The job's part of a report: its layout, its schedule beside the ideal one, its worst parts."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np

from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.jobs.model import Job, Nodes
from chopper.analyzers.jobs.prediction import OperationReplay, operations_or_reason
from chopper.analyzers.jobs.schedules import COMPUTE, FORWARD
from chopper.analyzers.jobs.whatif import JobSlowdown, Slowdown
from chopper.causes import PHASE_COLORS
from chopper.reports.figures import GREY, layout, plain
from chopper.reports.page import Cell, Column, Figure, Paragraph, Section, Table
from chopper.reports.whatif import job_lines

_WORST = 3
_MOST_BARS = 2_000
"""Passes of a step that are drawn; of a longer one, the first."""
_LABELLED = 200
"""From so many bars on, numbers of micro-batches stand in the tooltips only."""
_LONG_NS = 5_000_000_000
"""Of a step, whose axis counts seconds then."""
_LEAST_SLOWDOWN, _LEAST_LONGER = 1.005, 1.05


def section(run: Attribution) -> Section | None:
    """Return the section on a job; None of a run without a pipeline that can be modelled."""
    if not any(
        one.dimension == "pipeline" and one.size > 1
        for part in run.recording.manifest.ranks
        for one in part.coordinates
    ):
        return None
    modelled = operations_or_reason(run)
    if isinstance(modelled, str):
        text = f"Stages and schedule are not compared with the ideal job: {modelled}."
        return Section(title="Job", blocks=(Paragraph(text),), id="job")
    if not modelled.has_pipeline:
        return None
    return _of_model(modelled)


def _of_model(modelled: OperationReplay) -> Section:
    job, slowdown = modelled.job, modelled.slowdown
    replica = _shown_replica(job, slowdown)
    return Section(
        title="Job",
        id="job",
        intro="Each operation of the pipeline beside the ideal job, in which all of a type take as "
        "long as their mean and the schedule stays.",
        blocks=(
            *map(Paragraph, job_lines(slowdown)),
            _worst(modelled.run, job, slowdown),
            Figure(
                name="job-layout",
                title="Layout: slowdown of the step by each rank alone",
                figure=_grid(job, slowdown),
                label="Stages by replicas, coloured by slowdown; whatif --json has the numbers",
            ),
            _dimensions(slowdown),
            Figure(
                name="job-schedule",
                title=f"A median step as it ran, and in the ideal job (replica {replica})",
                figure=_gantt(job, replica),
                label="Passes of each stage over time, as recorded and in the ideal job",
                note="Numbers are micro-batches.",
            ),
        ),
    )


def _worst(run: Attribution, job: Job, slowdown: JobSlowdown) -> Table | Paragraph:
    """Return the parts that slow the step most, with what they do longer, and what to try."""
    rows = []
    for one, operation, factor in _slow_parts(job, slowdown)[:_WORST]:
        kind, _, number = one.name.partition(" ")
        fix = f"chopper whatif {shlex.quote(run.source)} --fix {kind}={number}"
        peers = "the others of its stage" if kind == "rank" else f"in other {kind}s"
        told = f"{operation} takes {fmt.factor(factor)} as long as {peers}"
        rows.append((one.name, f"{one.slowdown_ratio:.3f}", told, Cell(text=fix, code=True)))
    if not rows:
        return Paragraph("No rank, stage or replica takes 5 % longer than its peers.")
    columns = (
        Column("Slowest", kind="name"),
        "Slowdown",
        Column("Evidence", kind="name"),
        Column("What mending it saves", kind="id"),
    )
    return Table(columns=columns, rows=rows, words=3)


def _slow_parts(job: Job, slowdown: JobSlowdown) -> list[tuple[Slowdown, str, float]]:
    """Return the parts with an operation longer than their peers', the slowest first, with it.

    A rank is compared with the others of its stage. A stage or a replica is as slow as its rank in
    the middle, so that one slow rank does not count as either; the ranks of a slow replica are not
    named again.
    """
    nodes = job.nodes
    longest: dict[str, tuple[str, float]] = {}
    for code, operation in enumerate(nodes.types):
        rows = (nodes.type == code) & np.isin(nodes.role, COMPUTE)
        count = np.bincount(nodes.worker[rows], minlength=len(nodes.ranks))
        if count.any():
            own = np.bincount(nodes.worker[rows], job.own_ns[rows].mean(axis=1), len(nodes.ranks))
            with np.errstate(invalid="ignore"):
                factors = _factors(nodes, own / count)
            for name, factor in factors.items():
                if factor > longest.get(name, ("", 1.0))[1]:
                    longest[name] = operation, factor
    slow = {name: one for name, one in longest.items() if one[1] >= _LEAST_LONGER}
    ranked = sorted(
        (*slowdown.workers, *slowdown.stages, *slowdown.replicas),
        key=lambda one: -one.slowdown_ratio,
    )
    replica_of = {
        f"rank {r}": f"replica {n}" for r, n in zip(nodes.ranks, nodes.replica, strict=True)
    }
    return [
        (one, *slow[one.name])
        for one in ranked
        if one.name in slow
        and one.slowdown_ratio >= _LEAST_SLOWDOWN
        and replica_of.get(one.name) not in slow
    ]


def _factors(nodes: Nodes, own_ns: np.ndarray) -> dict[str, float]:
    """Return how many times as long as its peers' an operation takes in each part.

    Args:
        nodes: with the places of the workers.
        own_ns: the operation's mean on each worker; NaN where it did not run.
    """
    stages, replicas = (np.unique(of) for of in (nodes.stage, nodes.replica))
    by_rank = np.full(len(own_ns), np.nan)
    for at in stages:
        of = np.flatnonzero(nodes.stage == at)
        by_rank[of] = _over_others(own_ns[of])
    by_stage = _over_others(np.array([_middle(own_ns[nodes.stage == at]) for at in stages]))
    by_replica = [_middle(by_rank[nodes.replica == at]) for at in replicas]
    return {
        **{f"stage {at}": float(f) for at, f in zip(stages, by_stage, strict=True)},
        **{f"replica {at}": f for at, f in zip(replicas, by_replica, strict=True)},
        **{f"rank {rank}": float(f) for rank, f in zip(nodes.ranks, by_rank, strict=True)},
    }


def _over_others(values: np.ndarray) -> np.ndarray:
    """Return each value over the lower median of the others; NaN without any."""
    others = [_middle(np.delete(values, i)) for i in range(len(values))]
    return np.asarray(values / np.array(others))


def _middle(values: np.ndarray) -> float:
    """Return the lower median of what is known: of two, the quicker; NaN where nothing is."""
    known = np.sort(values[~np.isnan(values)])
    return float(known[(len(known) - 1) // 2]) if len(known) else float("nan")


def _dimensions(slowdown: JobSlowdown) -> Table:
    """Return the slowdown if operations differ along one dimension only."""
    most = max((one.slowdown_ratio - 1 for one in slowdown.dimensions), default=0.0)
    rows = [
        (
            one.name,
            Cell(
                text=f"{one.slowdown_ratio:.3f}",
                share_ratio=max(one.slowdown_ratio - 1, 0.0) / max(most, 1e-9),
            ),
        )
        for one in slowdown.dimensions
    ]
    note = "Slowdown of the step if operations differ along this dimension only; not additive."
    columns = (Column("Dimension", kind="name"), "Slowdown")
    return Table(columns=columns, rows=rows, words=1, note=note)


def _shown_replica(job: Job, slowdown: JobSlowdown) -> int:
    """Return the replica of the slowest worker."""
    rank = int(slowdown.workers[0].name.partition(" ")[2])
    return int(job.nodes.replica[np.flatnonzero(job.nodes.ranks == rank)[0]])


def _grid(job: Job, slowdown: JobSlowdown) -> dict[str, Any]:
    """Return stages by replicas, coloured by the slowdown of each rank."""
    nodes = job.nodes
    by_rank = {one.name: one.slowdown_ratio for one in slowdown.workers}
    stages, replicas = np.unique(nodes.stage), np.unique(nodes.replica)
    ratio: list[list[float | None]] = [[None] * len(replicas) for _ in stages]
    text = [[""] * len(replicas) for _ in stages]
    for rank, stage, replica in zip(nodes.ranks, nodes.stage, nodes.replica, strict=True):
        at = int(np.searchsorted(stages, stage)), int(np.searchsorted(replicas, replica))
        ratio[at[0]][at[1]] = round(by_rank[f"rank {rank}"], 4)
        text[at[0]][at[1]] = f"rank {rank}"
    heat = {
        "type": "heatmap",
        "z": ratio,
        "x": [f"replica {n}" for n in replicas],
        "y": [f"stage {n}" for n in stages],
        "text": text,
        "texttemplate": "%{text}" if len(replicas) <= 16 else "",
        "hovertemplate": "%{text}: %{y}, %{x}<br>slowdown %{z:.3f}<extra></extra>",
        "colorscale": "Viridis",
        "zmin": 1.0,
        "colorbar": {"title": {"text": "slowdown"}},
    }
    axes: dict[str, Any] = {
        "yaxis": {"autorange": "reversed", "automargin": True},
        "xaxis": {"nticks": 24},
    }
    return {"data": [heat], "layout": layout(90 + min(40 * len(stages), 480), 70, 8, **axes)}


def _gantt(job: Job, replica: int) -> dict[str, Any]:
    """Return the passes of the stages of one replica in a median step, and in the ideal job."""
    nodes = job.nodes
    step = int(np.argsort(job.recorded_ns, kind="stable")[len(job.recorded_ns) // 2])
    ran = job.graph.simulate(job.own_ns[:, [step]], job.delay_ns[:, [step]])[:, 0]
    ideal = job.graph.simulate(job.ideal_ns)[:, 0]
    passes = np.flatnonzero(np.isin(nodes.role, COMPUTE) & (nodes.replica[nodes.worker] == replica))
    passes = passes[np.argsort(ran[passes], kind="stable")][:_MOST_BARS]
    unit, scale = ("s", 1e9) if ran.max() > _LONG_NS else ("ms", 1e6)
    data = []
    for role in COMPUTE:
        rows = passes[nodes.role[passes] == role]
        if not len(rows):
            continue
        phase = "forward" if role == FORWARD else "optimizer" if "weight" in role else "backward"
        stage = nodes.stage[nodes.worker[rows]]
        ends = np.concatenate([ran[rows], ideal[rows]])
        took = np.concatenate([job.own_ns[rows, step], job.ideal_ns[rows, 0]])
        numbers = [str(turn) for turn in nodes.turn[rows]] * 2
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "meta": "schedule",
                "name": plain(role.replace("_", " ")),
                "base": [round(float(t) / scale, 4) for t in ends - took],
                "x": [round(float(t) / scale, 4) for t in took],
                "y": [*(f"stage {n}" for n in stage), *(f"stage {n}, ideal" for n in stage)],
                "text": numbers if len(passes) <= _LABELLED else [""] * len(numbers),
                "customdata": [
                    [number, fmt.duration(end - time_ns), fmt.duration(time_ns)]
                    for number, end, time_ns in zip(numbers, ends, took, strict=True)
                ],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "insidetextfont": {"color": "#ffffff"},
                "marker": {"color": PHASE_COLORS.get(phase, GREY), "line": {"width": 0}},
                "hovertemplate": f"%{{y}}, {plain(role)} of micro-batch "
                "%{customdata[0]}<br>from %{customdata[1]}, for %{customdata[2]}<extra></extra>",
            }
        )
    stages = np.unique(nodes.stage)
    order = [*(f"stage {n}" for n in stages), *(f"stage {n}, ideal" for n in stages)]
    figure_layout = layout(
        120 + 26 * len(order),
        8,
        24,
        legend=True,
        barmode="overlay",
        bargap=0.15,
        xaxis={"title": {"text": f"{unit} of the step"}},
        yaxis={
            "type": "category",
            "categoryorder": "array",
            "categoryarray": order,
            "autorange": "reversed",
            "automargin": True,
        },
    )
    return {"data": data, "layout": figure_layout}
