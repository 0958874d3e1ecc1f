"""The walls of ``chopper estimate limits`` as a page."""

from __future__ import annotations

import math

import msgspec

from chopper.analyzers.estimates.limits import DAY_S, PUBLISHED, Hardware, Laws, Limits, Point
from chopper.reports.estimates.page import Grid, Page, Plot, lines_figure


def page(found: Limits) -> Page:
    """Utilization by size, the layouts behind it, and both walls."""
    days = found.time_allowed_s / 86400
    wall = found.data_wall_flop
    ratio = found.data_wall_utilization_ratio
    if wall is not None:
        data_wall = f"utilization falls below {ratio:.0%} at {wall:.1e} FLOP"
    elif found.points and (found.points[0].utilization_ratio or 0) < ratio:
        data_wall = (
            f"utilization is below {ratio:.0%} already at {found.points[0].shape.flop:.1e} FLOP"
        )
    else:
        data_wall = f"utilization does not fall below {ratio:.0%} at the sizes tried"
    last = found.last_feasible_flop
    facts = [
        f"latency wall, closed form: {found.latency_wall_flop:.2e} FLOP (layers × steps × "
        f"{found.hardware.layer_latency_s * 1e6:g} µs fill {days:g} days)",
    ]
    if last is not None:
        facts.append(f"largest size for which a layout finishes: {last:.1e} FLOP")
    standard = (
        _alike(found.hardware, Hardware())
        and _alike(found.laws, Laws())
        and math.isclose(found.time_allowed_s, 90 * DAY_S)
        and math.isclose(found.devices_step_ratio, 1.04)
    )
    known = standard and any(p.shape.flop in PUBLISHED for p in found.points)
    grid = Grid(
        title=f"Runs of {days:g} days: the fewest devices, and how well they are used",
        columns=(
            "FLOP",
            "parameters",
            "devices",
            "utilization",
            *(("published",) if known else ()),
            "dp",
            "tp",
            "pp",
            "microb.",
            "bound by",
        ),
        rows=[_row(p, known) for p in found.points],
        note="dp, tp, pp: data, tensor and pipeline parallel. "
        + ("Published: the reference search; – for sizes that it does not have. " if known else "")
        + "A run that does not finish in time is infeasible.",
    )
    feasible = [(c, u) for c, u in found.curve if u is not None]
    marks = {"latency wall": found.latency_wall_flop}
    if wall is not None:
        marks["data-movement wall"] = wall
    figure = lines_figure(
        {
            "utilization": (
                [float(f"{c:.6g}") for c, _ in feasible],
                [float(f"{u:.4g}") for _, u in feasible],
            )
        },
        x="FLOP of the run",
        y="utilization",
        log_x=True,
        marks=marks,
    )
    return Page(
        title="Limits of a training run",
        verdict=f"The data-movement wall: {data_wall}. The latency wall: "
        f"{found.latency_wall_flop:.1e} FLOP.",
        facts=tuple(facts),
        grids=(grid,),
        plots=(Plot(name="limits", title="Utilization by size of the run", figure=figure),),
        assumptions=found.assumptions,
    )


def _alike(given: msgspec.Struct, default: msgspec.Struct) -> bool:
    """The same numbers, but for what reading them as text rounds off."""
    return all(
        math.isclose(getattr(given, f), getattr(default, f)) for f in default.__struct_fields__
    )


def _row(point: Point, known: bool) -> tuple[str, ...]:
    published = PUBLISHED.get(point.shape.flop)
    listed = "infeasible" if published is None else f"{published:.2f}"
    said = ((listed if point.shape.flop in PUBLISHED else "–"),) if known else ()
    size = (f"{point.shape.flop:.1e}", f"{point.shape.parameters_count:.2e}")
    if not point.feasible:
        return (*size, "–", "infeasible", *said, "–", "–", "–", "–", "–")
    return (
        *size,
        f"{point.devices_count:.2e}",
        f"{point.utilization_ratio:.2f}",
        *said,
        f"{point.data_parallel_count:.0f}",
        str(point.tensor_parallel_count),
        str(point.pipeline_parallel_count),
        str(point.microbatches_count),
        point.bound_by or "–",
    )
