"""Largest size of a run: the data-movement and latency walls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from chopper import wording as fmt
from chopper.analyzers.estimates import Option, OptionsOf
from chopper.analyzers.estimates.limits import (
    DAY_S,
    PUBLISHED,
    Hardware,
    Laws,
    Limits,
    Point,
    limits,
)
from chopper.cli import _options
from chopper.errors import UsageError
from chopper.reports.estimate import estimate_page, listing
from chopper.reports.figures import lines
from chopper.reports.page import Column, Figure, Page, Section


class Options(_options.Options, kw_only=True, frozen=True):
    """Show how large a training run can get before data movement and latency stop it.

    For each budget of FLOP, the smallest number of devices that finishes in time is searched over
    all layouts of data, tensor and pipeline parallelism. The scaling laws of model and batch, the
    device and the network are options.

    \b
    Examples:
      chopper estimate limits
      chopper estimate limits --device b200 --network 100GB/s
      chopper estimate limits --flop 1e27 --flop 1e28 --time 180d --json
    """

    flop: Annotated[
        tuple[float, ...],
        Option("FLOP of a run, may be repeated.  [default: the published table]", metavar="C"),
    ] = tuple(PUBLISHED)
    time_s: Annotated[float, Option("Maximum duration of a run.")] = 90 * DAY_S
    device: Annotated[
        str | None,
        Option(
            "Use the peak, memory and link rates of this device from the table.", metavar="NAME"
        ),
    ] = None
    hardware: Annotated[dict[str, Any], OptionsOf(Hardware)] = msgspec.field(default_factory=dict)
    laws: Annotated[dict[str, Any], OptionsOf(Laws)] = msgspec.field(default_factory=dict)
    wall_utilization_ratio: Annotated[
        float, Option("Utilization that defines the data-movement wall. [default: 2/3]")
    ] = 2 / 3
    search_step_ratio: Annotated[
        float, Option("Factor by which the number of devices increases.")
    ] = 1.04


def estimate(options: Options) -> Limits:
    """Return utilization by size, and both walls."""
    for rate in ("flop_per_s", "memory_bytes_per_s", "node_link_bytes_per_s"):
        options.contradict("device", rate)
    of_device = _of_device(options.device) if options.device else {}
    return limits(
        options.flop,
        hardware=Hardware(**options.hardware, **of_device),
        laws=Laws(**options.laws),
        time_allowed_s=options.time_s,
        devices_step_ratio=options.search_step_ratio,
        data_wall_utilization_ratio=options.wall_utilization_ratio,
    )


def _of_device(name: str) -> dict[str, float]:
    """Return a device's peak, its memory's rate, and one direction of its links."""
    from chopper.hardware.devices import named

    device = named(name)
    peak = device.flop_per_s("bf16") or device.flop_per_s("fp16")
    memory = device.memory_bandwidth_bytes_per_s.value
    link = device.link_bytes_per_s.value
    known = {"peak for bf16": peak, "memory bandwidth": memory, "link rate": link}
    unknown = [what for what, rate in known.items() if rate is None]
    if peak is None or memory is None or link is None:
        raise UsageError(
            f"--device {name}: {device.label} has no known {' and '.join(unknown)}; "
            "give --peak, --memory-bandwidth and --node-link instead"
        )
    # Links are quoted as the sum of both directions.
    return {
        "flop_per_s": float(peak),
        "memory_bytes_per_s": float(memory),
        "node_link_bytes_per_s": float(link) / 2,
    }


def page(result: Limits) -> Page:
    """Return utilization by size, the layouts behind it, and both walls."""
    last = result.last_feasible_flop
    return estimate_page(
        result,
        title="Limits of a training run",
        headline=_headline(result),
        limit=_limit(result),
        assumes=f"{_days(result):g} days, perfect overlap, devices of "
        f"{fmt.flops(result.hardware.flop_per_s)} at their peak",
        remedy=_remedy(result),
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


def _headline(result: Limits) -> str:
    most = [p for p in result.points if p.feasible]
    if not most:
        return f"No size finishes in {_days(result):g} days."
    wall = _data_wall(result)
    return f"{wall[0].upper()}{wall[1:]}."


def _limit(result: Limits) -> str:
    wall = f"latency wall at {result.latency_wall_flop:.1e} FLOP"
    most = [p for p in result.points if p.feasible]
    if not most:
        return wall
    return f"{most[-1].bound_by} at {most[-1].shape.flop:.1e} FLOP; {wall}"


def _remedy(result: Limits) -> str:
    """Return the nearest that finishes, where a size does not."""
    if result.last_feasible_flop:
        return f"at most {result.last_feasible_flop:.1e} FLOP, or more --time"
    if not any(p.feasible for p in result.points):
        return "a larger --flop: sizes this small leave too few tokens in a batch"
    return "--network or --node-link of another network, --device of another device"


def _data_wall(result: Limits) -> str:
    wall, ratio = result.data_wall_flop, result.data_wall_utilization_ratio
    if wall is not None:
        return f"utilization falls below {fmt.percent(ratio, '.0f')} at {wall:.1e} FLOP"
    if result.points and (result.points[0].utilization_ratio or 0) < ratio:
        first = result.points[0].shape.flop
        return f"utilization is below {fmt.percent(ratio, '.0f')} already at {first:.1e} FLOP"
    return f"utilization does not fall below {fmt.percent(ratio, '.0f')} at the sizes tried"


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
        f"Runs of {_days(result):g} days: the fewest devices, and their utilization",
        result.points,
        columns,
        note="dp, tp, pp: data, tensor and pipeline parallel. "
        + ("Published: the reference search; – for sizes that it does not cover. " * published)
        + "A run that does not finish in time is infeasible.",
    )


def _figure(result: Limits) -> Figure:
    feasible = [(c, u) for c, u in result.curve if u is not None]
    wall = result.data_wall_flop
    figure = lines(
        {"utilization": ([c for c, _ in feasible], [u for _, u in feasible])},
        x="FLOP of the run",
        y="utilization",
        log_x=True,
        marks={"latency wall": result.latency_wall_flop}
        | ({"data-movement wall": wall} if wall is not None else {}),
    )
    return Figure(name="limits", title="Utilization by size of the run", figure=figure)
