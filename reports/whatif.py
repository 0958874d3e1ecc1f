"""The page of a prediction: a changed run beside the observed one."""

from __future__ import annotations

from collections.abc import Callable

from chopper import wording as fmt
from chopper.analyzers.actions import actions as ranked
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.jobs.whatif import Bubble, JobSlowdown
from chopper.analyzers.replay.answers import WhatIf
from chopper.analyzers.replay.replay import Replay
from chopper.analyzers.replay.whatif_options import not_fixable
from chopper.causes import CAUSES
from chopper.reports import actions
from chopper.reports.labels import cause_cell, color, full_label
from chopper.reports.page import Cell, Column, Item, Items, Page, Paragraph, Section, Table

_PATH_ROWS = 8
_RECOVERABLE_ROWS = 20
_JOB_ROWS = 4
_LEAST_SHARE = 5e-4
"""Causes below this share of the step are left out."""
_LEAST_CHANGE_NS = 500


def page(prediction: WhatIf, replayed: Callable[[], Replay]) -> Page:
    """Return the page of a prediction; without changes, what to try and what causes give back.

    Args:
        prediction: what to show.
        replayed: returns the replay of the observed run's launches.
    """
    blocks: list[Items | Paragraph] = []
    if prediction.changes:
        blocks.append(Items(items=prediction.changes))
    if prediction.reference_rank is not None and len(prediction.observed.ranks) > 1:
        rank = prediction.reference_rank
        blocks.append(Paragraph(f"Every rank is assumed to be as fast as rank {rank}.", "dim"))
    blocks += [Paragraph(line) for line in _details(prediction)]
    if prediction.notes:
        blocks.append(Items(items=[Item(note, "warning") for note in prediction.notes]))
    sections: list[Section] = []
    if prediction.model == "launches" and prediction.changes:
        sections.append(_causes(prediction))
    elif prediction.model == "launches":
        replay, observed = replayed(), prediction.observed
        told = actions.tell(observed, ranked(observed, replay), _unit(prediction))
        sections += [actions.section(*told), _recoverable(prediction, replay)]
    return Page(
        title=prediction.source,
        headline=_headline(prediction),
        summary=blocks,
        sections=(*sections, *_job(prediction), *_critical_path(prediction)),
    )


def notebook_page(prediction: WhatIf) -> Page:
    """Return the page of a prediction, the observed run replayed again."""
    return page(prediction, lambda: Replay(prediction.observed))


def _unit(prediction: WhatIf) -> str:
    unit = "step" if next(iter(prediction.steps), None) is not None else "window"
    is_traced = prediction.pace == 1 and prediction.observed.step_time().untraced is not None
    return f"traced {unit}" if is_traced else unit


def _headline(prediction: WhatIf) -> str:
    observed = f"A {_unit(prediction)} takes {fmt.duration(prediction.observed_step_ns)}"
    predicted = fmt.duration(prediction.predicted_step_ns)
    if prediction.pace < 1:
        takes = fmt.duration(prediction.observed_step_ns)
        observed = f"Replayed without tracing, a {_unit(prediction)} takes {takes}"
    if not prediction.changes:
        again = f"; replayed without changes, {predicted}" if prediction.pace == 1 else ""
        return f"{observed}{again}."
    if prediction.predicted_ci95_ns is not None:
        predicted += f" ({fmt.interval(prediction.predicted_ci95_ns)})"
    saved = prediction.saved_ratio
    change = "no change"
    if abs(saved) >= 0.0005:
        change = f"{fmt.ratio(abs(saved))} {'less' if saved > 0 else 'more'}"
    return f"{observed}; predicted {predicted}: {change}."


def _details(prediction: WhatIf) -> list[str]:
    lines = []
    unit, following = _unit(prediction), prediction.next_bottleneck
    if prediction.changes and prediction.saved_ci95_ns is not None:
        saved = prediction.observed_step_ns - prediction.predicted_step_ns
        lines.append(
            f"Saved per {unit}: {fmt.duration(saved)}, 95 % interval over {unit}s "
            f"{fmt.interval(prediction.saved_ci95_ns)}."
        )
    if prediction.changes and following is not None:
        lines.append(
            f"Next bottleneck: {CAUSES[following.id].label} ({following.id}), "
            f"{fmt.ratio(following.share_ratio)} of the remaining time."
        )
    step = prediction.observed.step_time()
    if step.untraced is not None:
        takes = fmt.duration(step.untraced.value_ns)
        line = f"A step without a trace takes {takes}"
        if prediction.pace < 1:
            line = (
                f"The steps without a trace took {takes}, those with one "
                f"{fmt.duration(step.traced_mean_ns)}. The host's work is taken to last "
                f"{fmt.ratio(prediction.pace)} of its traced time, or less"
            )
        elif prediction.changes and step.is_slowed_by_tracing:
            line += f"; scaled to it, predicted {fmt.duration(prediction.untraced_step_ns)}"
        lines.append(f"{line}.")
    return lines


def _per_window(attribution: Attribution) -> dict[str, float]:
    windows = max(int(attribution.windows.num_rows), 1)
    return {c.id: c.time_ns / windows for c in attribution.causes()}


def _causes(prediction: WhatIf) -> Section:
    """Show the causes of both, per rank and step, in the order of the tree."""
    before, after = _per_window(prediction.unchanged), _per_window(prediction.attribution)
    total = max(sum(v for c, v in before.items() if "." not in c), 1.0)
    rows = []
    for cause in CAUSES:
        a, b = before.get(cause, 0.0), after.get(cause, 0.0)
        if max(a, b) >= total * _LEAST_SHARE:
            name = cause_cell(cause, CAUSES[cause].label)
            change = fmt.duration(b - a) if abs(b - a) >= _LEAST_CHANGE_NS else ""
            rows.append((name, fmt.duration(a), fmt.duration(b), change))
    observed = "Observed" if prediction.pace == 1 else "Replayed"
    table = Table(columns=("Cause", observed, "Predicted", "Change"), rows=rows)
    return Section(title="Causes, per rank and step", blocks=(table,))


def _recoverable(prediction: WhatIf, replay: Replay) -> Section:
    """Show the predicted saving of each cause, the largest first."""
    saving, attribution = replay.recoverable(), prediction.observed
    before = _per_window(prediction.unchanged)
    if replay.job is not None:
        attribution = replay.whole
        before = _per_window(attribution)
    windows = max(int(attribution.windows.num_rows), 1)
    step_ns = attribution.observed_ns / windows or 1
    if prediction.pace < 1:
        step_ns = prediction.observed_step_ns or 1
    leaves = [row for row in attribution.causes() if row.id in saving]
    # A parent with the time of its only child says nothing more.
    same = {(row.time_ns, row.parent) for row in leaves}
    known = [
        (row, saved_ns)
        for row in leaves
        if (saved_ns := saving[row.id].step_ns) is not None and (row.time_ns, row.id) not in same
    ]
    known.sort(key=lambda pair: -pair[1])
    fix = Column("--fix", kind="id")
    interval = Column("95 % interval", wide=True)
    table = Table(
        columns=("Cause", fix, "Time", "Recoverable", "Share of step", interval),
        rows=[
            (
                Cell(text=full_label(row.id), color=color(row.id), hint=CAUSES[row.id].doc),
                Cell(text=row.id, code=True),
                fmt.duration(before.get(row.id, 0.0)),
                fmt.duration(saved_ns),
                fmt.ratio(saved_ns / step_ns),
                Cell(text=fmt.interval(saving[row.id].ci95_ns), dim=True),
            )
            for row, saved_ns in known[:_RECOVERABLE_ROWS]
        ],
        note="Savings overlap; time at peak cannot be removed: docs/concepts/replay.md"
        "#what-can-be-changed",
    )
    reasons = [
        f"{full_label(row.id)} ({saving[row.id].reason})"
        for row in leaves
        if saving[row.id].reason is not None and not not_fixable(row.id)
    ]
    unknown = (Items(items=reasons, title="Not predicted"),) if reasons else ()
    return Section(title="Recoverable time, per rank and step", blocks=(table, *unknown))


def _job(prediction: WhatIf) -> list[Section]:
    """Show how much slower the job is than its ideal, and what slows it."""
    job = prediction.job
    if job is None:
        return []
    parts = {
        "Worker": job.workers,
        "Stage": job.stages,
        "Replica": job.replicas,
        "Operation": job.types,
        "Dimension": job.dimensions,
    }
    rows = [
        (kind if at == 0 else "", one.name, f"{one.slowdown_ratio:.3f}")
        for kind, ranking in parts.items()
        for at, one in enumerate(ranking[:_JOB_ROWS])
    ]
    table = Table(
        columns=(Column("By", kind="name"), Column("Part", kind="name"), "Slowdown"),
        rows=rows,
        words=2,
        note="Slowdown of the step if only this part keeps its own durations; not additive. "
        "--json lists all parts.",
    )
    notes = (Items(items=[Item(note, "info") for note in job.notes]),) if job.notes else ()
    section = (*map(Paragraph, job_lines(job)), *notes, table)
    return [Section(title="Slowdown of the job", blocks=section, id="job", short="Job")]


def job_lines(job: JobSlowdown) -> list[str]:
    """Return how much slower a job is than its ideal, and what its schedule leaves idle."""
    simulated, ideal = fmt.duration(job.simulated_step_ns), fmt.duration(job.ideal_step_ns)
    lines = [
        f"Slowdown S = {job.slowdown_ratio:.3f}: a step takes {simulated} without launch delays; "
        f"in the ideal job, with every operation at the mean of its type (communication: at its "
        f"median transfer), {ideal}.",
        f"Replayed unchanged, launch delays kept: {fmt.duration(job.replayed_step_ns)} for "
        f"{fmt.duration(job.recorded_step_ns)}, {fmt.ratio(job.replay_error_ratio)} off, over "
        f"{fmt.plural(job.steps_count, 'step')}.",
    ]
    ranks = ", ".join(map(str, job.worst_workers))
    shares = {
        "worst_workers_share_ratio": f"the worst 3 % of the workers (rank {ranks}; M_W)",
        "last_stage_share_ratio": "the last stage (M_S)",
    }
    for name, what in shares.items():
        share = getattr(job, name)
        told = f"withheld: {job.reasons.get(name)}" if share is None else fmt.percent(share)
        lines.append(f"Share of the excess that goes with {what}: {told}.")
    if job.bubble is not None:
        lines.append(_bubble(job.bubble))
    return lines


def _bubble(bubble: Bubble) -> str:
    shape = (
        f"{fmt.plural(bubble.stages, 'stage')}, {fmt.plural(bubble.micro_batches, 'micro-batch')}"
    )
    if bubble.virtual_stages > 1:
        shape += f", {bubble.virtual_stages} virtual stages per rank"
    bound = "no closed form" if bubble.bound_ns is None else fmt.duration(bubble.bound_ns)
    return (
        f"Schedule: {bubble.schedule or 'not recognized'} ({shape}). Idle per rank and step: "
        f"{fmt.duration(bubble.recorded_ns)}; in the ideal job, its bubble: "
        f"{fmt.duration(bubble.ideal_ns)}; bound of the schedule: {bound}."
    )


def _critical_path(prediction: WhatIf) -> list[Section]:
    total = sum(time for _, _, time in prediction.path)
    if not total:
        return []
    rest = len(prediction.path) - _PATH_ROWS
    table = Table(
        columns=("What", Column("Cause", kind="id"), "Share"),
        rows=[
            (
                Cell(text=fmt.kernel_name(name), hint=name),
                Cell(text=CAUSES[cause].label),
                Cell(text=fmt.ratio(time / total), share_ratio=time / total, color=color(cause)),
            )
            for cause, name, time in prediction.path[:_PATH_ROWS]
        ],
        rest=f"… {rest} more: --json lists all of them" if rest > 0 else "",
    )
    of = " of the prediction" if prediction.changes else ""
    return [Section(title=f"Critical path{of}", blocks=(table,))]
