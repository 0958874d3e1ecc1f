"""The page of a prediction: a changed run beside the observed one."""

from __future__ import annotations

from chopper import wording as fmt
from chopper.analyzers.actions import actions as ranked
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.replay.answers import WhatIf
from chopper.analyzers.replay.replay import Replay
from chopper.analyzers.replay.whatif_options import not_fixable
from chopper.causes import CAUSES
from chopper.reports import actions
from chopper.reports.labels import cause_cell, color, full_label
from chopper.reports.page import Cell, Column, Item, Items, Page, Paragraph, Section, Table

_PATH_ROWS = 8
_RECOVERABLE_ROWS = 20
_LEAST_SHARE = 5e-4
"""Causes below this share of the step are left out."""
_LEAST_CHANGE_NS = 500


def page(prediction: WhatIf, replay: Replay) -> Page:
    """Return the page of a prediction; without changes, what to try and what causes give back.

    Args:
        prediction: what to show.
        replay: of the observed run.
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
    return Page(
        title=prediction.source,
        headline=_headline(prediction),
        summary=blocks,
        sections=(
            *(
                (_causes(prediction),)
                if prediction.changes
                else (
                    actions.section(
                        *actions.tell(
                            prediction.observed,
                            ranked(prediction.observed, replay),
                            _unit(prediction),
                        )
                    ),
                    _recoverable(prediction, replay),
                )
            ),
            *_critical_path(prediction),
        ),
    )


def notebook_page(prediction: WhatIf) -> Page:
    """Return the page of a prediction, the observed run replayed again."""
    return page(prediction, Replay(prediction.observed))


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
