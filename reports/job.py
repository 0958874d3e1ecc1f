"""The job's part of a report: its layout, its schedule beside the ideal one, its worst parts."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np

from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.jobs.model import Job
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


def _worst(run: Attribution, job: Job, slowdown: JobSlowdown) -> Table:
    """Return the parts that slow the step most, with what they do longer, and what to try."""
    named = {one.name: one for each in (slowdown.workers, slowdown.stages) for one in each}
    for one in slowdown.replicas if len(slowdown.replicas) > 1 else ():
        # A replica that is as slow as one of its ranks is that rank's.
        if all(abs(one.slowdown_ratio - w.slowdown_ratio) > 1e-9 for w in slowdown.workers):
            named[one.name] = one
    worst = sorted(named.values(), key=lambda one: -one.slowdown_ratio)[:_WORST]
    rows = []
    for one in (one for one in worst if one.slowdown_ratio >= _LEAST_SLOWDOWN):
        kind, _, number = one.name.partition(" ")
        operation, factor = _longest(job, one)
        fix = f"chopper whatif {shlex.quote(run.source)} --fix {kind}={number}"
        told = f"{operation} takes {fmt.factor(factor)} as long as elsewhere"
        rows.append(
            (
                one.name,
                f"{one.slowdown_ratio:.3f}",
                told if factor >= _LEAST_LONGER else "no operation stands out",
                Cell(text=fix, code=True),
            )
        )
    columns = (
        Column("Slowest", kind="name"),
        "Slowdown",
        Column("Evidence", kind="name"),
        Column("What mending it saves", kind="id"),
    )
    return Table(columns=columns, rows=rows, words=3)


def _longest(job: Job, part: Slowdown) -> tuple[str, float]:
    """Return the compute operation that takes longest in a part, and over the median of others."""
    nodes = job.nodes
    kind, _, number = part.name.partition(" ")
    of_worker = {"rank": nodes.ranks, "stage": nodes.stage, "replica": nodes.replica}[kind]
    mine = (of_worker == int(number))[nodes.worker]
    best = ("", 1.0)
    for code, name in enumerate(nodes.types):
        of_type = (nodes.type == code) & np.isin(nodes.role, COMPUTE)
        here, others = job.own_ns[of_type & mine], job.own_ns[of_type & ~mine]
        if here.size and others.size and np.median(others) > 0:
            factor = float(here.mean() / np.median(others))
            best = max(best, (name, factor), key=lambda pair: pair[1])
    return best


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
