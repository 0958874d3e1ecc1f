"""A projection as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chopper import wording as fmt
from chopper.reports.estimates.parts import estimate_page, lines_figure, listing, stacked_figure
from chopper.reports.page import Figure, Page, Section, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chopper.analyzers.estimates.project import OfClass, Projection

_NEGLIGIBLE_RATIO = 0.02
"""Share of operators' time: where less than this has no model, it needs no range."""
_MOST_TICKS = 10
_REST = "not computing"


def page(result: Projection) -> Page:
    """Return classes on both devices, the check, and the step at each scale."""
    return estimate_page(
        result,
        title="Projection",
        headline=_headline(result),
        facts=_facts(result),
        figures=(
            *((_classes_figure(result),) if result.classes else ()),
            *((_scales_figure(result),) if result.scales else ()),
        ),
        sections=(
            *((_classes(result),) if result.classes else ()),
            *((_scales(result),) if result.scales else ()),
        ),
    )


def _headline(result: Projection) -> str:
    if result.recorded_ns is None:
        return (
            f"A training step of {result.run}: {'at least ' if result.unmodelled_ratio else ''}"
            f"{fmt.duration(result.projected_ns)} on {result.target_device}, not calibrated."
        )
    if result.target_device is not None:
        return (
            f"{fmt.duration(result.recorded_ns)} on {result.recorded_device} become "
            f"{fmt.duration(result.projected_ns)} on {result.target_device}."
        )
    first, last = result.scales[0], result.scales[-1]
    return (
        f"A step of {fmt.duration(first.step_ns)} on {fmt.count(first.ranks_count)} ranks becomes "
        f"{fmt.duration(last.step_ns)} on {fmt.count(last.ranks_count)}."
    )


def _facts(result: Projection) -> Iterator[str]:
    recorded, target = result.recorded_reach, result.target_reach
    if recorded and target:
        yield (
            f"recorded on {result.recorded_device}: products reach {fmt.ratio(recorded.products)}, "
            f"memory {fmt.ratio(recorded.memory)} of the peak ({recorded.source})"
        )
        yield (
            f"target {result.target_device}: {fmt.ratio(target.products)} and "
            f"{fmt.ratio(target.memory)} ({target.source})"
        )
    elif target:
        yield (
            f"products reach {fmt.ratio(target.products)}, memory {fmt.ratio(target.memory)} "
            f"of the peak ({target.source})"
        )
    if result.unmodelled_ratio:
        yield _unmodelled(result)
    if result.checked_ns is not None:
        yield _checked(result)
    if not result.scales:
        return
    yield (
        f"knee at {fmt.count(result.knee_ranks_count)} ranks, by {result.knee_cause}"
        if result.knee_ranks_count
        else "no knee: efficiency stays above 80 % at every scale"
    )
    if result.recorded_scale_error_ratio is not None:
        yield (
            f"recorded: {fmt.duration(result.recorded_ns)} on "
            f"{fmt.plural(result.recorded_ranks_count or 0, 'rank')}, of it waiting for other "
            f"ranks {fmt.duration(result.recorded_waiting_ns)}{_kinds_of_waiting(result)}; the "
            f"estimate "
            f"for as many on this network is off by {result.recorded_scale_error_ratio:+.1%}"
        )


def _unmodelled(result: Projection) -> str:
    """Return what is said of operators without a model."""
    captured = result.recorded_ns is None
    of = "calls" if captured else "time"
    matters = result.unmodelled_ratio >= _NEGLIGIBLE_RATIO
    said = f"{fmt.ratio(result.unmodelled_ratio)} of operators' {of} has no model"
    if result.unmodelled_operators and (captured or matters):
        said += f" ({', '.join(result.unmodelled_operators)})"
    if captured:
        said += ": of these there is a launch in the step and no more"
    if result.projected_between_ns and matters:
        low, high = map(fmt.duration, result.projected_between_ns)
        said += (
            f" and is scaled as the rest: {low} to {high} in total, should it go with memory or "
            "with products"
        )
    return said


def _checked(result: Projection) -> str:
    error, roofline = result.error_ratio or 0.0, result.roofline_error_ratio or 0.0
    said = f"against {result.checked_run}: {error:+.1%}; the uncalibrated roofline {roofline:+.1%}"
    # Nearer than a tenth of a per cent is luck.
    return f"{said}, {abs(roofline) / max(abs(error), 1e-3):.1f} times as far off"


def _kinds_of_waiting(result: Projection) -> str:
    """Return how much of the waiting is for ranks that are always late."""
    if not result.recorded_waiting_ns:
        return ""
    always = result.recorded_waiting_always_ns
    if always is None:
        return " (too few steps to tell ranks that are always late from chance)"
    chance = max(result.recorded_waiting_ns - always, 0)
    return (
        f" ({fmt.duration(always)} for ranks that are always late, "
        f"{fmt.duration(chance)} by chance)"
    )


def _error(ratio: float | None) -> str:
    return fmt.UNKNOWN if ratio is None else f"{ratio:+.1%}"


def _class_row(c: OfClass) -> list[str]:
    error = c.projected_ns / c.checked_ns - 1 if c.checked_ns else None
    times = (c.recorded_ns, c.projected_ns, c.roofline_ns, c.checked_ns)
    return [c.operator_class, fmt.count(c.calls_count), *map(fmt.duration, times), _error(error)]


def _classes(result: Projection) -> Section:
    rows = [_class_row(c) for c in result.classes]
    if result.operators_error_ratio is not None:
        sums = (
            sum(getattr(c, name) or 0 for c in result.classes)
            for name in ("recorded_ns", "projected_ns", "roofline_ns", "checked_ns")
        )
        error = _error(result.operators_error_ratio)
        rows.append(["all operators", "", *map(fmt.duration, sums), error])
    for name, here_ns, there_ns in (
        ("idle, as recorded", result.idle_ns, result.idle_ns),
        ("exposed copies", result.copy_ns, result.projected_copy_ns),
        ("exposed communication", result.communication_ns, result.projected_communication_ns),
    ):
        if here_ns:
            rows.append([name, "", *map(fmt.duration, (here_ns, there_ns, None, None)), "–"])
    total = (result.recorded_ns, result.projected_ns, result.roofline_ns, result.checked_ns)
    rows.append(["in total", "", *map(fmt.duration, total), _error(result.error_ratio)])
    columns = ["class", "calls", "recorded", "projected", "roofline", "there", "error"]
    if result.checked_ns is None:
        columns, rows = columns[:-2], [row[:-2] for row in rows]
    table = Table(
        columns=columns,
        rows=rows,
        totals=1,
        note="roofline: uncalibrated, the target's datasheet peaks and nothing else. Classes are "
        "sums over operators; kernels that run at once count in full, so they can exceed the total",
    )
    return Section(title="Time by class of operators, per step or trace", blocks=(table,))


def _classes_figure(result: Projection) -> Figure:
    bars = {}
    idle_ns = result.idle_ns + result.projected_copy_ns + result.projected_communication_ns
    projected = {c.operator_class: c.projected_ns / 1e6 for c in result.classes}
    if result.recorded_ns is not None:
        bars[f"recorded, {result.recorded_device}"] = {
            c.operator_class: (c.recorded_ns or 0) / 1e6 for c in result.classes
        } | {_REST: (result.idle_ns + result.copy_ns + result.communication_ns) / 1e6}
        projected[_REST] = idle_ns / 1e6
    bars[f"projected, {result.target_device}"] = projected
    if result.checked_ns is not None:
        classes = {c.operator_class: c.checked_ns or 0 for c in result.classes}
        rest_ns = max(0, result.checked_ns - sum(classes.values()))
        bars["recorded there"] = {k: ns / 1e6 for k, ns in classes.items()} | {_REST: rest_ns / 1e6}
    figure = stacked_figure(bars, x="ms per step or trace")
    return Figure(name="project", title="By class", figure=figure)


def _scales(result: Projection) -> Section:
    return listing(
        "One step at each scale, by cause",
        result.scales,
        {
            "ranks": lambda s: fmt.count(s.ranks_count),
            "step": lambda s: fmt.duration(s.step_ns),
            "compute": lambda s: fmt.duration(s.compute_ns),
            "idle": lambda s: fmt.duration(s.idle_ns),
            "copies": lambda s: fmt.duration(s.copy_ns),
            "always late": lambda s: fmt.duration(s.waiting_always_ns),
            "by chance": lambda s: fmt.duration(s.waiting_ns - s.waiting_always_ns),
            "transfer": lambda s: fmt.duration(s.transfer_ns),
            "efficiency": lambda s: fmt.ratio(s.efficiency_ratio),
            "others differ": lambda s: fmt.duration(s.others_differ_step_ns),
        },
        words=0,
        note="waiting for ranks that are always late, and by chance; transfer that nothing hides; "
        "efficiency against the fewest ranks; the step if ranks beyond the recorded ones differ as "
        "much as those do",
    )


def _scales_figure(result: Projection) -> Figure:
    labelled = result.scales[:: 2 if len(result.scales) > _MOST_TICKS else 1]
    ranks = [float(s.ranks_count) for s in result.scales]
    figure = lines_figure(
        {
            "step": (ranks, [s.step_ns / 1e6 for s in result.scales]),
            "exposed transfer": (ranks, [s.transfer_ns / 1e6 for s in result.scales]),
            "waiting": (ranks, [s.waiting_ns / 1e6 for s in result.scales]),
        },
        x="ranks",
        y="ms per step",
        log_x=True,
        x_ticks={float(s.ranks_count): fmt.count(s.ranks_count) for s in labelled},
        marks={"knee": float(result.knee_ranks_count)} if result.knee_ranks_count else None,
    )
    return Figure(name="scales", title="Step by number of ranks", figure=figure)
