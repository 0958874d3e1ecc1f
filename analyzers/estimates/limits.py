"""Limits of the size of a training run: the data-movement wall and the latency wall.

After Erdil and Schneider-Joseph, "Data movement limits to frontier model training" (arXiv
2411.01137): a dense transformer of N parameters sees D = 20 N tokens, so it costs C = 6 N D = 120
N² FLOP; layers and the critical batch grow with N by laws that are parameters here. For a count of
devices, every layout of data, tensor and pipeline parallelism is tried, and the fewest devices
that finish in time are kept. Utilization is C ÷ (devices × peak × time allowed).
"""

from __future__ import annotations

from itertools import count, pairwise, takewhile
from typing import Annotated, ClassVar

import msgspec
import numpy as np

from chopper.analyzers.estimates import Estimate, Option, assumed
from chopper.errors import UsageError
from chopper.quantities import between, positive

DAY_S = 86400.0
_CURVE_POINTS = 40
_LEAST_UTILIZATION_RATIO = 0.01
"""Where the search for devices ends and a size is called infeasible."""
_TIME_ALLOWED_S = (60.0, 3.2e11)
MIN_FLOP, MAX_FLOP = 1e15, 1e40
"""Beyond these the laws mean nothing and the search would only climb."""


class Laws(msgspec.Struct, kw_only=True, frozen=True):
    """Growth of model and batch with the parameters N, each a power of N ÷ reference."""

    tokens_per_parameter_ratio: Annotated[
        float, Option("D ÷ N, 20 after Hoffmann et al., 2203.15556.")
    ] = 20.0

    reference_parameters_count: float = 1.8e12
    """The N at which the model has the layers and batch below (said of GPT-4)."""

    reference_layers_count: float = 120.0
    reference_batch_tokens_count: Annotated[
        float,
        Option("Tokens of a batch of the model of 1.8e12 parameters.", "batch-at-reference"),
    ] = 6e7
    layers_exponent: Annotated[
        float, Option("Power of N by which layers grow.  [default: 1/3]")
    ] = 1 / 3
    batch_exponent: Annotated[
        float, Option("Power of N by which the batch grows.  [default: 1/3]")
    ] = 1 / 3

    def __post_init__(self) -> None:
        """Raise UsageError, which names the field, for what is no law of a model."""
        for name, least, most in (
            ("tokens_per_parameter_ratio", 1e-2, 1e6),
            ("reference_parameters_count", 1e3, 1e18),
            ("reference_layers_count", 1, 1e5),
            ("reference_batch_tokens_count", 1, 1e15),
            ("layers_exponent", 1e-6, 3),
            ("batch_exponent", 1e-6, 3),
        ):
            between(getattr(self, name), least, most, f"laws: {name}")


class Hardware(msgspec.Struct, kw_only=True, frozen=True):
    """One device and its links; the defaults are an H100 with NVLink and one 400 Gb/s port."""

    flop_per_s: Annotated[float, Option("Peak of one device.", "peak", metavar="FLOP/S")] = 989e12
    memory_bytes_per_s: Annotated[
        float, Option("Memory bandwidth of one device.", "memory-bandwidth")
    ] = 3.35e12
    node_link_bytes_per_s: Annotated[float, Option("Links in a node, one direction.")] = 450e9
    network_bytes_per_s: Annotated[float, Option("Network per device, one direction.")] = 50e9
    kernel_latency_s: Annotated[float, Option("Latency of one kernel.")] = 4.5e-6
    node_hop_s: float = 9.2e-6
    """All-reduce of nothing among the 8 devices of a node."""
    layer_latency_s: Annotated[
        float, Option("Forward and backward of one layer, in the latency wall's closed form.")
    ] = 400e-6

    def __post_init__(self) -> None:
        """Raise UsageError, which names the field, for what is no device."""
        between(self.flop_per_s, 1e9, 1e24, "hardware: flop_per_s")
        for name in self.__struct_fields__[1:]:
            least, most = (1e3, 1e18) if name.endswith("_bytes_per_s") else (1e-12, 3600)
            between(getattr(self, name), least, most, f"hardware: {name}")


LAWS, H100 = Laws(), Hardware()


class Shape(msgspec.Struct, kw_only=True, frozen=True):
    """The run that a budget of FLOP buys under the laws."""

    flop: float
    parameters_count: float
    tokens_count: float
    layers_count: float
    width: float
    batch_tokens_count: float
    steps_count: float


class Point(msgspec.Struct, kw_only=True, frozen=True):
    """The fewest devices that finish a budget in time; all null when none does."""

    shape: Shape
    feasible: bool
    utilization_ratio: float | None = None
    devices_count: float | None = None
    time_s: float | None = None
    data_parallel_count: float | None = None
    tensor_parallel_count: int | None = None
    pipeline_parallel_count: int | None = None
    microbatches_count: int | None = None
    bound_by: str | None = None
    """Name of the longest of the overlapping times."""
    parts_s: dict[str, float] | None = None
    """Of one step, before the pipeline's bubble."""


class Limits(Estimate, kw_only=True, frozen=True):
    """Utilization by size, and the two walls."""

    SCHEMA: ClassVar[str] = "chopper.estimate.limits/1"

    laws: Laws
    hardware: Hardware
    time_allowed_s: float
    devices_step_ratio: float
    points: tuple[Point, ...]
    curve: tuple[tuple[float, float | None], ...]
    """FLOP and utilization between the smallest and the largest size, for a figure."""
    data_wall_flop: float | None
    """Size at which utilization falls below `data_wall_utilization_ratio`; null: not within the
    sizes tried."""
    data_wall_utilization_ratio: float
    last_feasible_flop: float | None
    """The largest size for which some layout finishes in time."""
    latency_wall_flop: float
    """Closed form: steps × layers × latency of a layer fill the time allowed."""


def shape_of(flop: float, laws: Laws = LAWS) -> Shape:
    """The model, batch and steps that a budget buys.

    C = 6 N D with D = 20 N; layers and batch follow their laws; width h from N = 12 h² L.
    """
    between(flop, MIN_FLOP, MAX_FLOP, "FLOP of the run")
    n = float(np.sqrt(flop / (6 * laws.tokens_per_parameter_ratio)))
    size = n / laws.reference_parameters_count
    try:
        layers = laws.reference_layers_count * size**laws.layers_exponent
        batch = laws.reference_batch_tokens_count * size**laws.batch_exponent
    except OverflowError:
        layers = batch = np.inf
    positive(layers, "laws: layers of the model")
    positive(batch, "laws: tokens of a batch")
    width = float(np.sqrt(n / (12 * layers)))
    if width < 1:
        raise UsageError(
            f"laws: {layers:.3g} layers of {n:.3g} parameters are {width:.2g} wide; expected 1 "
            f"or more"
        )
    tokens = laws.tokens_per_parameter_ratio * n
    return Shape(
        flop=flop,
        parameters_count=n,
        tokens_count=tokens,
        layers_count=layers,
        width=width,
        batch_tokens_count=batch,
        steps_count=tokens / batch,
    )


def latency_wall_flop(
    *, time_allowed_s: float = 90 * DAY_S, laws: Laws = LAWS, layer_latency_s: float = 400e-6
) -> float:
    """The size whose steps × layers × latency fill the time: (D/B)·L·t_ℓ = T, solved for C.

    With batch and layers growing as the same power of N they cancel, and N = T·B₀ ÷ (20·L₀·t_ℓ).
    """
    between(time_allowed_s, *_TIME_ALLOWED_S, "time allowed in s")
    positive(layer_latency_s, "latency of a layer")
    power = 1 + laws.layers_exponent - laws.batch_exponent
    if power <= 0:
        raise UsageError(
            f"laws: steps × layers grow as N^{power:g}; the latency wall needs a power above zero"
        )
    at_reference_s = (
        laws.tokens_per_parameter_ratio
        * laws.reference_parameters_count
        / laws.reference_batch_tokens_count
        * laws.reference_layers_count
        * layer_latency_s
    )
    n = laws.reference_parameters_count * (time_allowed_s / at_reference_s) ** (1 / power)
    return float(6 * laws.tokens_per_parameter_ratio * n**2)


_PARTS = ("compute", "memory", "network", "latency")


def _layouts(shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tensor, pipeline and microbatch counts: all powers of two, stages at most layers."""
    tp, pp, m = (
        x.ravel()
        for x in np.meshgrid(
            2.0 ** np.arange(21), 2.0 ** np.arange(15), 2.0 ** np.arange(25), indexing="ij"
        )
    )
    fits = pp <= shape.layers_count
    return tp[fits], pp[fits], m[fits]


def step_times(
    shape: Shape,
    hardware: Hardware,
    *,
    dp: np.ndarray,
    tp: np.ndarray,
    pp: np.ndarray,
    m: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Times of one step for each layout, all arrays of one length.

    Returns:
        Seconds of a step, and its four overlapping parts before the bubble, [4, layouts]: compute,
        memory, network (tensor + pipeline + data parallel), latency.
    """
    h, layers = shape.width, shape.layers_count
    b = shape.batch_tokens_count / (dp * m)
    per_stage = layers / pp
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
    hop = np.where(tp == 1, 0.0, np.where(tp <= 8, hardware.node_hop_s, far_s))
    latency = passes * 8 * (hardware.kernel_latency_s + hop)
    parts = np.stack([compute, memory, tensor + stages + gradients, latency])
    bubble = 1 + (pp - 1) / (m * np.maximum(1, per_stage))
    floor = 8 * layers * (hardware.kernel_latency_s + hop)
    return np.maximum(parts.max(0) * bubble, floor), parts


def at_size(
    flop: float,
    *,
    hardware: Hardware = H100,
    laws: Laws = LAWS,
    time_allowed_s: float = 90 * DAY_S,
    devices_step_ratio: float = 1.04,
) -> Point:
    """The fewest devices that finish a run in time, and how well they are used.

    Args:
        flop: of the whole run.
        hardware: of each device.
        laws: of model and batch.
        time_allowed_s: from first to last step.
        devices_step_ratio: the count climbs from C ÷ (peak × time) by this factor; 1.04 gives the
            published table, nearer to 1 finds a few per cent fewer devices.
    """
    between(time_allowed_s, *_TIME_ALLOWED_S, "time allowed in s")
    if not 1.0005 <= devices_step_ratio <= 2:
        raise UsageError(
            f"step of the search: found {devices_step_ratio:g}, expected 1.0005 to 2 (times)"
        )
    shape = shape_of(flop, laws)
    tp, pp, m = _layouts(shape)
    step_allowed_s = time_allowed_s / shape.steps_count
    at_full = flop / (hardware.flop_per_s * time_allowed_s)
    climbs = int(np.log(1 / _LEAST_UTILIZATION_RATIO) / np.log(devices_step_ratio)) + 1

    # More devices are never slower by more than a layout's rounding, but not monotone either:
    # every rung is looked at, lowest first.
    for climb in range(climbs):
        devices = at_full * devices_step_ratio**climb
        dp = devices / (tp * pp)
        fits = np.flatnonzero((dp >= 1) & (dp * m <= shape.batch_tokens_count))
        if not len(fits):
            continue
        times, layouts = step_times(
            shape, hardware, dp=dp[fits], tp=tp[fits], pp=pp[fits], m=m[fits]
        )
        fastest = int(times.argmin())
        if times[fastest] > step_allowed_s:
            continue
        at, parts = int(fits[fastest]), layouts[:, fastest]
        return Point(
            shape=shape,
            feasible=True,
            utilization_ratio=flop / (devices * hardware.flop_per_s * time_allowed_s),
            devices_count=devices,
            time_s=float(times[fastest]) * shape.steps_count,
            data_parallel_count=float(devices / (tp[at] * pp[at])),
            tensor_parallel_count=int(tp[at]),
            pipeline_parallel_count=int(pp[at]),
            microbatches_count=int(m[at]),
            bound_by=_PARTS[int(parts.argmax())],
            parts_s={name: float(v) for name, v in zip(_PARTS, parts, strict=True)},
        )
    return Point(shape=shape, feasible=False)


PUBLISHED: dict[float, float | None] = {
    5e27: 0.92,
    1e28: 0.85,
    1.5e28: 0.76,
    2e28: 0.65,
    5e28: 0.51,
    1e31: 0.18,
    2.5e31: 0.11,
    3e31: None,
}
"""FLOP → utilization of the reference search; None is infeasible."""


def limits(
    sizes_flop: tuple[float, ...] = tuple(PUBLISHED),
    *,
    hardware: Hardware = H100,
    laws: Laws = LAWS,
    time_allowed_s: float = 90 * DAY_S,
    devices_step_ratio: float = 1.04,
    data_wall_utilization_ratio: float = 2 / 3,
) -> Limits:
    """Return the utilization of each size, and both walls.

    The data-movement wall is the size at which utilization first falls below a ratio, found
    between the sizes tried by halving their logarithm; two thirds is Chopper's definition, because
    the published 2e28 is a point on a slope and not a threshold.

    Raises:
        UsageError: anything not positive, or a ratio outside of (0, 1).
    """
    if not 0.01 < data_wall_utilization_ratio < 1:
        raise UsageError(
            f"utilization of the wall: found {data_wall_utilization_ratio:g}, expected 0.01 to 1"
        )

    def point(flop: float) -> Point:
        return at_size(
            flop,
            hardware=hardware,
            laws=laws,
            time_allowed_s=time_allowed_s,
            devices_step_ratio=devices_step_ratio,
        )

    if not sizes_flop:
        raise UsageError("FLOP of the run: none given; expected one size or more")
    points = tuple(point(flop) for flop in sorted(sizes_flop))

    def below(found: Point) -> bool:
        return (found.utilization_ratio or 0) < data_wall_utilization_ratio

    def between(low: float, high: float, gone: bool) -> float:
        """The size where a wall lies, known to be passed at `high` and not at `low`."""
        while high / low > 1.01:
            middle = float(np.sqrt(low * high))
            found = point(middle)
            passed = not found.feasible if gone else below(found)
            low, high = (low, middle) if passed else (middle, high)
        return low

    data_wall = last = None
    for before, after in pairwise(points):
        if data_wall is None and not below(before) and below(after):
            data_wall = between(before.shape.flop, after.shape.flop, gone=False)
        if before.feasible and not after.feasible:
            last = between(before.shape.flop, after.shape.flop, gone=True)
    if not any(p.feasible for p in points):
        smaller = takewhile(
            lambda c: c >= MIN_FLOP, (points[0].shape.flop / 10**k for k in count(1))
        )
        found = next((c for c in smaller if point(c).feasible), None)
        last = None if found is None else between(found, 10 * found, gone=True)
    ends = points[0].shape.flop, points[-1].shape.flop
    sizes = np.geomspace(*ends, _CURVE_POINTS) if ends[0] < ends[1] else ()
    return Limits(
        assumptions=assumed("limits"),
        laws=laws,
        hardware=hardware,
        time_allowed_s=time_allowed_s,
        devices_step_ratio=devices_step_ratio,
        points=points,
        curve=tuple((float(c), point(float(c)).utilization_ratio) for c in sizes),
        data_wall_flop=data_wall,
        data_wall_utilization_ratio=data_wall_utilization_ratio,
        last_feasible_flop=last,
        latency_wall_flop=latency_wall_flop(
            time_allowed_s=time_allowed_s, laws=laws, layer_latency_s=hardware.layer_latency_s
        ),
    )
