"""Largest size of a run: the data-movement and latency walls.

After Erdil and Schneider-Joseph, "Data movement limits to frontier model training" (arXiv
2411.01137): a dense transformer of N parameters sees D = 20 N tokens, so it costs C = 6 N D = 120
N² FLOP; layers and the critical batch grow with the cube root of N. For a count of devices, every
layout of data, tensor and pipeline parallelism is tried, and the fewest devices that finish in
time are kept. Utilization is C ÷ (devices × peak × time allowed).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from chopper import wording as fmt
from chopper.analyzers.estimates import Estimate, Option, OptionsOf, assumed
from chopper.cli import _options
from chopper.errors import UsageError
from chopper.hardware.devices import named
from chopper.quantities import between, positive
from chopper.reports.estimate import estimate_page, listing
from chopper.reports.page import Page

DAY_S = 86400.0
_TIMES_S, _SIZES = (60.0, 3.2e11), (1e15, 1e40)
"""Beyond these the laws mean nothing and the search would only climb."""
_TOKENS_PER_PARAMETER = 20.0
_REFERENCE_PARAMETERS, _REFERENCE_LAYERS, _REFERENCE_BATCH_TOKENS = 1.8e12, 120.0, 6e7
"""One model with its layers and batch (said of GPT-4), from which the laws extrapolate."""
_LAYER_LATENCY_S = 400e-6
"""Forward and backward of one layer, in the latency wall's closed form."""
_NODE_HOP_S, _KERNEL_LATENCY_S = 9.2e-6, 4.5e-6
"""All-reduce of nothing among the 8 devices of a node, and a kernel of nothing."""
_DEVICES_STEP_RATIO = 1.04
"""Factor by which the count of devices climbs; it reproduces the published table."""
_CLIMBS = 118
"""Counts that are tried: to a utilization of 1 %, below which a size is called infeasible."""
WALL_UTILIZATION_RATIO = 2 / 3
"""Utilization that defines the data-movement wall: the published 2e28 is a point on a slope."""

_PARTS = ("compute", "memory", "network", "latency")
SIZES_FLOP = (5e27, 1e28, 1.5e28, 2e28, 5e28, 1e31, 2.5e31, 3e31)
"""Those of the published table."""


class Hardware(msgspec.Struct, kw_only=True, frozen=True):
    """One device and its links; the defaults are an H100 with NVLink and one 400 Gb/s port."""

    flop_per_s: Annotated[float, Option("Peak of one device.", "peak", metavar="FLOP/S")] = 989e12
    memory_bytes_per_s: Annotated[float, Option("Of one device.", "memory-bandwidth")] = 3.35e12
    node_link_bytes_per_s: Annotated[float, Option("Links in a node, one direction.")] = 450e9
    network_bytes_per_s: Annotated[float, Option("Network per device, one direction.")] = 50e9

    def __post_init__(self) -> None:
        """Raise UsageError, which names the field, for an impossible device."""
        for name in self.__struct_fields__:
            positive(getattr(self, name), f"hardware: {name}")


class Options(_options.Options, kw_only=True, frozen=True):
    """Show how large a training run can get before data movement and latency stop it.

    For each budget of FLOP, the smallest number of devices that finishes in time is searched over
    all layouts of data, tensor and pipeline parallelism. The device and the network are options.

    \b
    Examples:
      chopper estimate limits
      chopper estimate limits --device b200 --network 100GB/s
      chopper estimate limits --flop 1e27 --flop 1e28 --time 180d --json
    """

    flop: Annotated[
        tuple[float, ...],
        Option("FLOP of a run, may be repeated.  [default: the published table]", metavar="C"),
    ] = SIZES_FLOP
    time_s: Annotated[float, Option("Maximum duration of a run.")] = 90 * DAY_S
    device: Annotated[str | None, Option("Take its peak, memory and links.", metavar="NAME")] = None
    hardware: Annotated[dict[str, Any], OptionsOf(Hardware)] = msgspec.field(default_factory=dict)


def _hardware(options: Options) -> Hardware:
    """Return the given rates; those of the device, where there is one, replace the defaults."""
    if options.device is None:
        return Hardware(**options.hardware)
    device = named(options.device)
    link = device.link_bytes_per_s.value  # quoted as the sum of both directions
    rates: dict[str, Any] = {
        "flop_per_s": device.flop_per_s("bf16") or device.flop_per_s("fp16"),
        "memory_bytes_per_s": device.memory_bandwidth_bytes_per_s.value,
        "node_link_bytes_per_s": link and link / 2,
    } | options.hardware
    if unknown := {name: True for name, rate in rates.items() if rate is None}:
        raise UsageError(
            f"--device {options.device}: a rate of {device.label} is unknown; give "
            f"{_options.written(Hardware, unknown)} as well"
        )
    return Hardware(**{name: float(rate) for name, rate in rates.items()})


class Point(msgspec.Struct, kw_only=True, frozen=True):
    """The fewest devices that finish a budget in time; all null when none does."""

    flop: float
    parameters_count: float
    utilization_ratio: float | None = None
    devices_count: float | None = None
    data_parallel_count: float | None = None
    tensor_parallel_count: int | None = None
    pipeline_parallel_count: int | None = None
    microbatches_count: int | None = None
    bound_by: str | None = None
    """Longest of the overlapping times: compute, memory, network or latency."""


class Limits(Estimate, kw_only=True, frozen=True):
    """Utilization by size, and the two walls."""

    SCHEMA: ClassVar[str] = "chopper.estimate.limits/2"

    hardware: Hardware
    time_allowed_s: float
    points: tuple[Point, ...]
    data_wall_flop: float | None
    """Size at which utilization falls below two thirds; null: not within the sizes tried."""
    last_feasible_flop: float | None
    """The largest size for which some layout finishes in time; null: all or none do."""
    latency_wall_flop: float
    """Closed form: steps × layers × latency of a layer fill the time allowed."""


class Model(NamedTuple):
    """Model and batch that a budget buys under the laws."""

    parameters_count: float
    layers_count: float
    width: float
    batch_tokens_count: float


def model_of(flop: float) -> Model:
    """Return the model of C = 120 N²: width h from N = 12 h² L, layers and batch by their laws."""
    between(flop, *_SIZES, "FLOP of the run")
    n = float(np.sqrt(flop / (6 * _TOKENS_PER_PARAMETER)))
    growth = (n / _REFERENCE_PARAMETERS) ** (1 / 3)
    layers = _REFERENCE_LAYERS * growth
    return Model(n, layers, float(np.sqrt(n / (12 * layers))), _REFERENCE_BATCH_TOKENS * growth)


def step_times(
    model: Model, hardware: Hardware, layouts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of a step by layout, and its four overlapping parts before the bubble.

    ``layouts`` are data, tensor and pipeline parallel devices, and microbatches: [4, layouts].
    """
    dp, tp, pp, m = layouts
    _, layers, h, batch = model
    b, per_stage = batch / (dp * m), layers / pp
    passes = m * per_stage
    node, net = hardware.node_link_bytes_per_s, hardware.network_bytes_per_s
    compute = passes * 72 * h**2 * b / (tp * hardware.flop_per_s)
    memory = passes * (72 * h**2 + 240 * b * h) / (tp * hardware.memory_bytes_per_s)
    tensor = np.where(
        tp <= 8,
        passes * 16 * b * h * (tp - 1) / tp / node,
        passes * 96 * b * h / np.sqrt(tp) * 0.5 * (1 / node + 1 / net),
    )
    stages = m * np.maximum(1, per_stage) * 4 * b * h / (tp * net)
    gradients = 48 * h**2 * layers / (pp * tp * net)
    far_s = (3 + 2 * (1.65 + 5 * np.maximum(0, np.log2(np.sqrt(tp) / 2.75)))) * 1e-6
    hop = np.where(tp == 1, 0.0, np.where(tp <= 8, _NODE_HOP_S, far_s))
    latency = passes * 8 * (_KERNEL_LATENCY_S + hop)
    parts = np.stack([compute, memory, tensor + stages + gradients, latency])
    bubble = 1 + (pp - 1) / (m * np.maximum(1, per_stage))
    floor = 8 * layers * (_KERNEL_LATENCY_S + hop)
    return np.maximum(parts.max(0) * bubble, floor), parts


def at_size(flop: float, hardware: Hardware, time_allowed_s: float) -> Point:
    """Return the fewest devices that finish a run in time, and their utilization."""
    between(time_allowed_s, *_TIMES_S, "time allowed in s")
    model = model_of(flop)
    n, layers, _, batch = model
    step_allowed_s = time_allowed_s * batch / (_TOKENS_PER_PARAMETER * n)
    tp, pp, m = 2.0 ** np.indices((21, 15, 25)).reshape(3, -1)
    at_full = flop / (hardware.flop_per_s * time_allowed_s)
    # More devices are never slower by more than a layout's rounding, but not monotone either:
    # every count is tried, lowest first.
    for climb in range(_CLIMBS):
        devices = at_full * _DEVICES_STEP_RATIO**climb
        dp = devices / (tp * pp)
        fits = (pp <= layers) & (dp >= 1) & (dp * m <= batch)
        layouts = np.stack([dp, tp, pp, m])[:, fits]
        times, parts = step_times(model, hardware, layouts)
        if times.min(initial=np.inf) <= step_allowed_s:
            fastest = int(times.argmin())
            return Point(
                flop=flop,
                parameters_count=n,
                utilization_ratio=flop / (devices * hardware.flop_per_s * time_allowed_s),
                devices_count=devices,
                data_parallel_count=float(layouts[0, fastest]),
                tensor_parallel_count=int(layouts[1, fastest]),
                pipeline_parallel_count=int(layouts[2, fastest]),
                microbatches_count=int(layouts[3, fastest]),
                bound_by=_PARTS[int(parts[:, fastest].argmax())],
            )
    return Point(flop=flop, parameters_count=n)


def estimate(options: Options) -> Limits:
    """Return the utilization of each size, and both walls, located by halving their logarithm.

    The latency wall is in closed form, (D/B)·L·t_ℓ = T solved for C: batch and layers grow as the
    same power of N and cancel, N = T·B₀ ÷ (20·L₀·t_ℓ).
    """
    hardware, time_allowed_s = _hardware(options), options.time_s
    points = tuple(at_size(flop, hardware, time_allowed_s) for flop in sorted(options.flop))

    def wall(least_ratio: float) -> float | None:
        """Return the size up to which utilization is above a ratio."""

        def above(point: Point) -> bool:
            return (point.utilization_ratio or 0) > least_ratio

        crossing = (pair for pair in pairwise(points) if above(pair[0]) and not above(pair[1]))
        low, high = next(crossing, (None, None))
        while low and high and high.flop / low.flop > 1.01:
            middle = at_size(float(np.sqrt(low.flop * high.flop)), hardware, time_allowed_s)
            low, high = (middle, high) if above(middle) else (low, middle)
        return low.flop if low else None

    latency_s = _TOKENS_PER_PARAMETER * _REFERENCE_LAYERS * _LAYER_LATENCY_S
    parameters = time_allowed_s * _REFERENCE_BATCH_TOKENS / latency_s
    return Limits(
        assumptions=assumed("limits"),
        hardware=hardware,
        time_allowed_s=time_allowed_s,
        points=points,
        data_wall_flop=wall(WALL_UTILIZATION_RATIO),
        last_feasible_flop=wall(0),
        latency_wall_flop=6 * _TOKENS_PER_PARAMETER * parameters**2,
    )


def page(result: Limits) -> Page:
    """Return utilization by size, the layouts behind it, and both walls."""
    days, last = f"{result.time_allowed_s / DAY_S:g}", result.last_feasible_flop
    limit = f"latency wall at {result.latency_wall_flop:.1e} FLOP"
    ratio, first = fmt.percent(WALL_UTILIZATION_RATIO, ".0f"), result.points[0]
    feasible = [p for p in result.points if p.devices_count]
    remedy = "--network or --node-link of another network, --device of another device"
    if not feasible:
        headline, remedy = f"No size finishes in {days} days.", "another --flop, or more --time"
    elif result.data_wall_flop is not None:
        headline = f"Utilization falls below {ratio} at {result.data_wall_flop:.1e} FLOP."
    elif (first.utilization_ratio or 0) < WALL_UTILIZATION_RATIO:
        headline = f"Utilization is below {ratio} already at {first.flop:.1e} FLOP."
    else:
        headline = f"Utilization does not fall below {ratio} at the sizes tried."
    if feasible:
        limit = f"{feasible[-1].bound_by} at {feasible[-1].flop:.1e} FLOP; {limit}"
    if last:
        remedy = f"at most {last:.1e} FLOP, or more --time"
    points = listing(
        f"Runs of {days} days: the fewest devices, and their utilization",
        result.points,
        {
            "FLOP": lambda p: f"{p.flop:.1e}",
            "parameters": lambda p: f"{p.parameters_count:.2e}",
            "devices": lambda p: f"{p.devices_count:.2e}" if p.devices_count else "–",
            "utilization": lambda p: f"{p.utilization_ratio:.2f}" if p.bound_by else "infeasible",
            "dp": lambda p: f"{p.data_parallel_count:.0f}" if p.devices_count else "–",
            "tp": lambda p: str(p.tensor_parallel_count or "–"),
            "pp": lambda p: str(p.pipeline_parallel_count or "–"),
            "microb.": lambda p: str(p.microbatches_count or "–"),
            "bound by": lambda p: p.bound_by or "–",
        },
        note="dp, tp, pp: data, tensor and pipeline parallel. A run that does not finish in time "
        "is infeasible.",
    )
    return estimate_page(
        result,
        title="Limits of a training run",
        headline=headline,
        limit=limit,
        assumes=f"{days} days, perfect overlap, devices of "
        f"{fmt.flops(result.hardware.flop_per_s)} at their peak",
        remedy=remedy,
        facts=(
            f"latency wall, closed form: {result.latency_wall_flop:.2e} FLOP (layers × steps × "
            f"{_LAYER_LATENCY_S * 1e6:g} µs fill {days} days)",
            *((f"largest size for which a layout finishes: {last:.1e} FLOP",) if last else ()),
        ),
        sections=(points,),
    )
