"""The walls of ``chopper estimate limits`` as a page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from chopper.analyzers.estimates.limits import DAY_S, PUBLISHED, Hardware, Laws, Limits, Point
from chopper.reports.estimates.parts import estimate_page, lines_figure, listing
from chopper.reports.page import Column, Figure, Page, Section

if TYPE_CHECKING:
    from collections.abc import Callable


def page(result: Limits) -> Page:
    """Return utilization by size, the layouts behind it, and both walls."""
    last = result.last_feasible_flop
    return estimate_page(
        result,
        title="Limits of a training run",
        headline=f"The data-movement wall: {_data_wall(result)}. The latency wall: "
        f"{result.latency_wall_flop:.1e} FLOP.",
        facts=(
            f"latency wall, closed form: {result.latency_wall_flop:.2e} FLOP (layers × steps × "
            f"{result.hardware.layer_latency_s * 1e6:g} µs fill {_days(result):g} days)",
            *((f"largest size for which a layout finishes: {last:.1e} FLOP",) if last else ()),
        ),
        figures=(_figure(result),),
        sections=(_points(result),),
    )


def _days(result: Limits) -> float:
    return result.time_allowed_s / DAY_S


def _data_wall(result: Limits) -> str:
    wall, ratio = result.data_wall_flop, result.data_wall_utilization_ratio
    if wall is not None:
        return f"utilization falls below {ratio:.0%} at {wall:.1e} FLOP"
    if result.points and (result.points[0].utilization_ratio or 0) < ratio:
        first = result.points[0].shape.flop
        return f"utilization is below {ratio:.0%} already at {first:.1e} FLOP"
    return f"utilization does not fall below {ratio:.0%} at the sizes tried"


def _is_published(result: Limits) -> bool:
    """Return whether the reference search had these laws and devices, and some of the sizes."""
    return (
        _alike(result.hardware, Hardware())
        and _alike(result.laws, Laws())
        and math.isclose(result.time_allowed_s, 90 * DAY_S)
        and math.isclose(result.devices_step_ratio, 1.04)
        and any(p.shape.flop in PUBLISHED for p in result.points)
    )


def _alike(left: msgspec.Struct, right: msgspec.Struct) -> bool:
    """Compare numbers but for what reading them as text rounds off."""
    return all(math.isclose(getattr(left, f), getattr(right, f)) for f in left.__struct_fields__)


def _published(point: Point) -> str:
    if point.shape.flop not in PUBLISHED:
        return "–"
    ratio = PUBLISHED[point.shape.flop]
    return "infeasible" if ratio is None else f"{ratio:.2f}"


def _points(result: Limits) -> Section:
    published = _is_published(result)
    columns: dict[str | Column, Callable[[Point], str]] = {
        "FLOP": lambda p: f"{p.shape.flop:.1e}",
        "parameters": lambda p: f"{p.shape.parameters_count:.2e}",
        "devices": lambda p: f"{p.devices_count:.2e}" if p.feasible else "–",
        "utilization": lambda p: f"{p.utilization_ratio:.2f}" if p.feasible else "infeasible",
        **({"published": _published} if published else {}),
        "dp": lambda p: f"{p.data_parallel_count:.0f}" if p.feasible else "–",
        "tp": lambda p: str(p.tensor_parallel_count or "–"),
        "pp": lambda p: str(p.pipeline_parallel_count or "–"),
        "microb.": lambda p: str(p.microbatches_count or "–"),
        "bound by": lambda p: p.bound_by or "–",
    }
    return listing(
        f"Runs of {_days(result):g} days: the fewest devices, and how well they are used",
        result.points,
        columns,
        note="dp, tp, pp: data, tensor and pipeline parallel. "
        + ("Published: the reference search; – for sizes that it does not have. " * published)
        + "A run that does not finish in time is infeasible.",
    )


def _figure(result: Limits) -> Figure:
    feasible = [(c, u) for c, u in result.curve if u is not None]
    wall = result.data_wall_flop
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
        marks={"latency wall": result.latency_wall_flop}
        | ({"data-movement wall": wall} if wall is not None else {}),
    )
    return Figure(name="limits", title="Utilization by size of the run", figure=figure)
