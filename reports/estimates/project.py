"""A projection as a page."""

from __future__ import annotations

from chopper import wording as fmt
from chopper.analyzers.estimates.project import Projection
from chopper.reports.estimates.page import Grid, Page, Plot, lines_figure, stacked_figure

_TOLD_RATIO = 0.02
"""Of the time: what has less without a model needs no range."""


def page(found: Projection) -> Page:
    """Classes on both devices, the check, and the step at each scale."""
    checked = found.checked_ns is not None
    columns = ["class", "calls", "recorded", "projected", "roofline"]
    if checked:
        columns += ["there", "error"]
    rows = []
    for c in found.classes:
        row = [
            c.operator_class,
            fmt.count(c.calls_count),
            fmt.duration(c.recorded_ns),
            fmt.duration(c.projected_ns),
            fmt.duration(c.roofline_ns),
        ]
        if checked:
            error = c.projected_ns / c.checked_ns - 1 if c.checked_ns else None
            row += [fmt.duration(c.checked_ns), "–" if error is None else f"{error:+.1%}"]
        rows.append(tuple(row))
    if checked and found.operators_error_ratio is not None:
        sums = [
            sum(ns or 0 for ns in of)
            for of in (
                (c.recorded_ns for c in found.classes),
                (c.projected_ns for c in found.classes),
                (c.roofline_ns for c in found.classes),
                (c.checked_ns for c in found.classes),
            )
        ]
        rows.append(
            (
                "all operators",
                "",
                *(fmt.duration(ns) for ns in sums),
                f"{found.operators_error_ratio:+.1%}",
            )
        )
    for name, here, there in (
        ("idle, as recorded", found.idle_ns, found.idle_ns),
        ("exposed copies", found.copy_ns, found.projected_copy_ns),
        ("exposed communication", found.communication_ns, found.projected_communication_ns),
    ):
        if here:
            rest = ("–", "–", "–") if checked else ("–",)
            rows.append((name, "", fmt.duration(here), fmt.duration(there), *rest))
    total = [
        "in total",
        "",
        fmt.duration(found.recorded_ns),
        fmt.duration(found.projected_ns),
        fmt.duration(found.roofline_ns),
    ]
    if checked:
        total += [fmt.duration(found.checked_ns), f"{found.error_ratio:+.1%}"]
    rows.append(tuple(total))
    grids = []
    plots = []
    facts = []
    if found.classes:
        grids.append(
            Grid(
                title="Time by class of operators, per step or trace",
                columns=tuple(columns),
                rows=rows,
                strong=frozenset((len(rows) - 1,)),
                note="roofline: uncalibrated, the target's datasheet peaks and nothing else. Classes "
                "are sums over operators; kernels that run at once count in full, so they can exceed "
                "the total",
            )
        )
        plots.append(_bars(found))
    if found.recorded_reach and found.target_reach:
        facts += [
            f"recorded on {found.recorded_device}: products reach "
            f"{fmt.ratio(found.recorded_reach.products)}, memory "
            f"{fmt.ratio(found.recorded_reach.memory)} of the peak ({found.recorded_reach.source})",
            f"target {found.target_device}: {fmt.ratio(found.target_reach.products)} and "
            f"{fmt.ratio(found.target_reach.memory)} ({found.target_reach.source})",
        ]
    elif found.target_reach:
        facts.append(
            f"products reach {fmt.ratio(found.target_reach.products)}, memory "
            f"{fmt.ratio(found.target_reach.memory)} of the peak ({found.target_reach.source})"
        )
    if found.unmodelled_ratio:
        captured = found.recorded_ns is None
        of = "calls" if captured else "time"
        said = f"{fmt.ratio(found.unmodelled_ratio)} of operators' {of} has no model"
        if found.unmodelled_operators and (captured or found.unmodelled_ratio >= _TOLD_RATIO):
            said += f" ({', '.join(found.unmodelled_operators)})"
        if captured:
            said += ": of these there is a launch in the step and no more"
        if found.projected_between_ns and found.unmodelled_ratio >= _TOLD_RATIO:
            low, high = map(fmt.duration, found.projected_between_ns)
            said += (
                f" and is scaled as the rest: {low} to {high} in total, should it go with memory or with "
                "products"
            )
        facts.append(said)
    if checked:
        facts.append(_against_the_check(found))
    if found.scales:
        grids.append(_scales(found))
        labelled = found.scales[:: 2 if len(found.scales) > _MOST_TICKS else 1]
        xs = [float(s.ranks_count) for s in found.scales]
        plots.append(
            Plot(
                name="scales",
                title="Step by number of ranks",
                figure=lines_figure(
                    {
                        "step": (xs, [s.step_ns / 1e6 for s in found.scales]),
                        "exposed transfer": (xs, [s.transfer_ns / 1e6 for s in found.scales]),
                        "waiting": (xs, [s.waiting_ns / 1e6 for s in found.scales]),
                    },
                    x="ranks",
                    y="ms per step",
                    log_x=True,
                    x_ticks={float(s.ranks_count): fmt.count(s.ranks_count) for s in labelled},
                    marks={"knee": float(found.knee_ranks_count)}
                    if found.knee_ranks_count
                    else None,
                ),
            )
        )
        facts.append(
            f"knee at {fmt.count(found.knee_ranks_count)} ranks, by {found.knee_cause}"
            if found.knee_ranks_count
            else "no knee: efficiency stays above 80 % at every scale"
        )
        if found.recorded_scale_error_ratio is not None:
            facts.append(
                f"recorded: {fmt.duration(found.recorded_ns)} on "
                f"{fmt.plural(found.recorded_ranks_count or 0, 'rank')}, of it waiting for other ranks "
                f"{fmt.duration(found.recorded_waiting_ns)}{_told(found)}; the estimate for as many on "
                f"this network is off by {found.recorded_scale_error_ratio:+.1%}"
            )
    return Page(
        title="Projection",
        verdict=_verdict(found),
        facts=tuple(facts),
        grids=tuple(grids),
        plots=tuple(plots),
        assumptions=found.assumptions,
    )


def _told(found: Projection) -> str:
    """What of the waiting is for ranks that are always late."""
    if not found.recorded_waiting_ns:
        return ""
    always = found.recorded_waiting_always_ns
    if always is None:
        return " (too few steps to tell ranks that are always late from chance)"
    chance = max(found.recorded_waiting_ns - always, 0)
    return f" ({fmt.duration(always)} for ranks that are always late, {fmt.duration(chance)} by chance)"


def _against_the_check(found: Projection) -> str:
    error, roofline = found.error_ratio or 0.0, found.roofline_error_ratio or 0.0
    said = f"against {found.checked_run}: {error:+.1%}; the uncalibrated roofline {roofline:+.1%}"
    # Nearer than a tenth of a per cent is luck.
    return f"{said}, {abs(roofline) / max(abs(error), 1e-3):.1f} times as far off"


_MOST_TICKS = 10
_REST = "not computing"


def _bars(found: Projection) -> Plot:
    parts = {}
    if found.recorded_ns is not None:
        parts[f"recorded, {found.recorded_device}"] = {
            c.operator_class: (c.recorded_ns or 0) / 1e6 for c in found.classes
        } | {_REST: (found.idle_ns + found.copy_ns + found.communication_ns) / 1e6}
    there = found.idle_ns + found.projected_copy_ns + found.projected_communication_ns
    parts[f"projected, {found.target_device}"] = {
        c.operator_class: c.projected_ns / 1e6 for c in found.classes
    } | ({_REST: there / 1e6} if found.recorded_ns is not None else {})
    if found.checked_ns is not None:
        classes = {c.operator_class: c.checked_ns or 0 for c in found.classes}
        rest = max(0, found.checked_ns - sum(classes.values()))
        parts["recorded there"] = {k: ns / 1e6 for k, ns in classes.items()} | {_REST: rest / 1e6}
    return Plot(
        name="project", title="By class", figure=stacked_figure(parts, x="ms per step or trace")
    )


def _verdict(found: Projection) -> str:
    if found.recorded_ns is None:
        return (
            f"A training step of {found.run}: {'at least ' if found.unmodelled_ratio else ''}"
            f"{fmt.duration(found.projected_ns)} on {found.target_device}, not calibrated."
        )
    if found.target_device is not None:
        return (
            f"{fmt.duration(found.recorded_ns)} on {found.recorded_device} become "
            f"{fmt.duration(found.projected_ns)} on {found.target_device}."
        )
    first, last = found.scales[0], found.scales[-1]
    return (
        f"A step of {fmt.duration(first.step_ns)} on {fmt.count(first.ranks_count)} ranks becomes "
        f"{fmt.duration(last.step_ns)} on {fmt.count(last.ranks_count)}."
    )


def _scales(found: Projection) -> Grid:
    return Grid(
        title="One step at each scale, by cause",
        columns=(
            "ranks",
            "step",
            "compute",
            "idle",
            "copies",
            "always late",
            "by chance",
            "transfer",
            "efficiency",
            "others differ",
        ),
        left=0,
        rows=[
            (
                fmt.count(s.ranks_count),
                fmt.duration(s.step_ns),
                fmt.duration(s.compute_ns),
                fmt.duration(s.idle_ns),
                fmt.duration(s.copy_ns),
                fmt.duration(s.waiting_always_ns),
                fmt.duration(s.waiting_ns - s.waiting_always_ns),
                fmt.duration(s.transfer_ns),
                fmt.ratio(s.efficiency_ratio),
                fmt.duration(s.others_differ_step_ns),
            )
            for s in found.scales
        ],
        note="waiting for ranks that are always late, and by chance; transfer that nothing hides; efficiency "
        "against the fewest ranks; the step if ranks beyond the recorded ones differ as much as those do",
    )
