"""A recorded run on another device, and what that makes of more ranks.

Each operator's time is cut in two: what any kernel takes however little it does, which stays, and
work, which goes with the rate that bounds it. Work is carried over by the ratio of the two
devices' rates, each as far as well-shaped work reaches it (`Reach`). What the recorded run lost to
shapes and libraries beyond that is assumed to be lost again: that is the calibration, per operator
and so per class. Idle time is the host's and stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from chopper.analyzers.estimates import Estimate
from chopper.analyzers.estimates.network import Topology
from chopper.analyzers.estimates.scaling import (
    SCALE_ASSUMPTIONS,
    AtScale,
    Step,
    at_scale,
    on_device,
    waits,
)
from chopper.errors import InputError, UsageError
from chopper.hardware.achievable import Reach
from chopper.hardware.ceilings import MOST_OF_A_PEAK

if TYPE_CHECKING:
    import pyarrow as pa

    from chopper.hardware.devices import DevicePeaks

_MOST_FIXED_NS = 10_000.0
"""No kernel takes longer than this for being a kernel."""
_MOST_NAMED = 4
_SMALL_RATIO = 0.25
"""A class's fixed time is read off operators that reach less than this of the roofline."""


class OfClass(msgspec.Struct, kw_only=True, frozen=True):
    """One class of operators on both devices."""

    operator_class: str
    calls_count: int
    recorded_ns: int | None
    """Null for a captured module, which never ran."""
    projected_ns: int
    roofline_ns: int
    """On the target at its datasheet peak, without calibration."""
    of_roofline_ratio: float | None
    """Of the recorded time, what the roofline of the recorded device explains."""
    checked_ns: int | None = None
    """On the target as recorded there, when such a run was given."""


class Projection(Estimate, kw_only=True, frozen=True):
    """A run carried to another device, and to more ranks."""

    SCHEMA: ClassVar[str] = "chopper.estimate.project/1"

    run: str
    recorded_device: str | None
    """Null: not known, and the run was only carried to more ranks."""
    target_device: str | None
    recorded_reach: Reach | None
    target_reach: Reach | None
    classes: tuple[OfClass, ...]
    unmodelled_ratio: float
    """Of the operators' time (captured: calls), what has no FLOP or bytes; it is scaled as the rest."""
    unmodelled_operators: tuple[str, ...]
    """Those, most time (captured: calls) first; the first few."""
    idle_ns: int
    copy_ns: int
    communication_ns: int
    projected_copy_ns: int
    projected_communication_ns: int
    """Exposed transfer goes with the links' rates, copies between host and device with PCIe."""
    recorded_ns: int | None
    projected_ns: int
    projected_between_ns: tuple[int, int] | None
    """With what has no model going as memory and as products do: which it is, is not known. Null where all
    has a model, or no device was given."""
    roofline_ns: int
    """Uncalibrated: all operators at the target's datasheet peak, and nothing else."""
    checked_run: str | None
    checked_ns: int | None
    error_ratio: float | None
    roofline_error_ratio: float | None
    operators_error_ratio: float | None
    """Of the operators' times alone: what idle time, which stays as recorded, has no part in."""
    operators_roofline_error_ratio: float | None
    scales: tuple[AtScale, ...]
    knee_ranks_count: int | None
    knee_cause: str | None
    recorded_ranks_count: int | None = None
    """Null: no scales were asked for."""
    recorded_scale_error_ratio: float | None = None
    """The estimate for as many ranks as were recorded, on the network given, over the recorded step; null
    also where they do not fill its nodes."""
    recorded_waiting_ns: int | None = None
    """That a rank waited for others in the recorded step."""
    recorded_waiting_always_ns: int | None = None
    """Of it, for ranks that are always late; null where too few steps tell that from chance."""


ASSUMPTIONS = (
    "the same operators run on both devices: fused, compiled or vendor-specific ones differ",
    "fused attention goes with the rate of matrix products, whatever its bytes say",
    "what an operator lost to its shape and library on the recorded device, it loses on the target",
    "a kernel's fixed time is the same on both devices, at most 10 µs",
    "the host is as fast, and idle time stays as recorded; a faster device may uncover more of it",
    "exposed transfer goes with the devices' links, copies between host and device with their PCIe "
    "generation; a network between nodes, and communication that one rank's trace cannot separate from "
    "waiting, stay",
    "clocks are those at which the datasheets' rates hold",
    "what well-shaped work reaches of a peak is public knowledge per device, not measured here",
)


def operator_class(op: str | None, family: str | None) -> str:
    """products, convolutions, attention, experts, normalization, reduction, copies, or elementwise.

    Args:
        op: the operator's name.
        family: that models its work, as :func:`chopper.analyzers.work.family` names it.
    """
    fixed = {"gemm": "products", "conv": "convolutions", "sdpa": "attention", "moe": "experts"}
    if family in fixed:
        return fixed[family]
    if family is None:
        return "unmodelled"
    name = (op or "").lower()
    for part, of in (
        ("norm", "normalization"),
        ("softmax", "normalization"),
        ("copy", "copies"),
        ("cat", "copies"),
        ("embedding", "copies"),
        ("index", "copies"),
        ("gather", "copies"),
        ("sum", "reduction"),
        ("mean", "reduction"),
        ("max", "reduction"),
        ("all", "reduction"),
        ("adam", "optimizer"),
    ):
        if part in name:
            return of
    return "elementwise"


def _rates(
    device: DevicePeaks, dtype: str | None, reach: Reach, clock_hz: float | None = None
) -> tuple[float | None, float | None]:
    """Reached FLOP/s for a type, and bytes/s; None where the peak is not known."""
    peak = device.flop_per_s(dtype, clock_hz) if dtype else None
    if peak is None and dtype == "bf16":
        # Before bf16 existed, programs ran in fp16.
        peak = device.flop_per_s("fp16", clock_hz)
    bandwidth = device.memory_bandwidth_bytes_per_s.value
    return (
        None if peak is None else peak * reach.products,
        None if bandwidth is None else float(bandwidth) * reach.memory,
    )


def _bound_ns(
    flop: float | None, size: float | None, rates: tuple[float | None, float | None]
) -> float | None:
    """Roofline: the longer of FLOP ÷ F and bytes ÷ B; None when neither is known."""
    parts = [
        amount / rate * 1e9
        for amount, rate in ((flop, rates[0]), (size, rates[1]))
        if amount is not None and rate is not None and amount == amount
    ]
    return max(parts, default=None)


_WHOLE = Reach(products=1.0, memory=1.0, source="datasheet")


def operators(
    table: pa.Table,
    recorded: DevicePeaks,
    target: DevicePeaks,
    *,
    recorded_reach: Reach,
    target_reach: Reach,
    target_clock_hz: float | None = None,
) -> tuple[tuple[OfClass, ...], float]:
    """Carry each operator over, and sum by class. OPERATIONS -> classes.

    Args:
        table: the view ``operations`` of the run.
        recorded: device of the run.
        target: device to be projected onto.
        recorded_reach: what work reaches on the one.
        target_reach: and on the other.
        target_clock_hz: at which the target runs; None for its reference clock.

    Returns:
        Classes, most recorded time first; and the share of time without a model.

    Raises:
        InputError: no operator has a time.
    """
    from chopper.analyzers.trace.names import is_communication, is_host_communication
    from chopper.analyzers.work import family

    rows = [
        row
        for row in table.select(
            ["op", "dtype", "call_count", "time_ns", "math_flop", "traffic_bytes"]
        ).to_pylist()
        # Transfer has causes of its own, and mostly hides.
        if not (is_communication(row["op"] or "") or is_host_communication(row["op"] or ""))
    ]
    if not rows:
        raise InputError("no operator of the run has device time; nothing can be projected")
    ops: list[tuple[str, int, float, float | None, float | None, float | None]] = []
    for row in rows:
        kind = operator_class(row["op"], family(row["op"] or ""))
        flop, size = row["math_flop"], row["traffic_bytes"]
        # Fused attention keeps its operands in caches: the matrix units pace it, whatever its
        # bytes say; for the uncalibrated roofline they count.
        calibrated_size = None if kind == "attention" and flop else size
        rates = [
            _bound_ns(flop, calibrated_size, _rates(recorded, row["dtype"], recorded_reach)),
            _bound_ns(
                flop, calibrated_size, _rates(target, row["dtype"], target_reach, target_clock_hz)
            ),
            _bound_ns(flop, size, _rates(target, row["dtype"], _WHOLE)),
        ]
        ops.append((kind, row["call_count"], row["time_ns"] / max(1, row["call_count"]), *rates))
    fixed = _fixed_ns(ops)
    totals: dict[str, list[float]] = {}
    known = [0.0, 0.0]
    for kind, calls, mean, here, there, roof in ops:
        total = totals.setdefault(kind, [0.0] * 6)
        total[0] += calls
        total[1] += mean * calls
        if here and there and mean > 0:
            base = min(mean, fixed[kind])
            projected = base + (mean - base) * there / here
            total[2] += projected * calls
            total[3] += (roof or 0.0) * calls
            total[4] += here * calls
            known[0] += mean * calls
            known[1] += projected * calls
        else:
            total[5] += mean * calls
    if not known[0]:
        raise InputError(
            f"no operator of the run has FLOP or bytes that {recorded.label} and {target.label} have "
            "known rates for; record with shapes"
        )
    ratio = known[1] / known[0]
    classes = []
    for kind, (count, time, projected, roofline, bound, unknown) in totals.items():
        classes.append(
            OfClass(
                operator_class=kind,
                calls_count=int(count),
                recorded_ns=round(time),
                projected_ns=round(projected + unknown * ratio),
                roofline_ns=round(roofline),
                of_roofline_ratio=_of_roofline(bound, time - unknown),
            )
        )
    everything = sum(mean * calls for _, calls, mean, *_ in ops)
    return (
        tuple(sorted(classes, key=lambda c: -(c.recorded_ns or 0))),
        1 - known[0] / everything if everything else 0.0,
    )


def _of_roofline(bound_ns: float, time_ns: float) -> float | None:
    """Share of the roofline that was reached; None where it is more than there is."""
    if time_ns <= 0 or bound_ns > MOST_OF_A_PEAK * time_ns:
        return None
    return bound_ns / time_ns


def _fixed_ns(
    ops: list[tuple[str, int, float, float | None, float | None, float | None]],
) -> dict[str, float]:
    """Fixed time of each class: its shortest kernel far from the roofline, at most 10 µs."""
    found: dict[str, float] = {}
    for kind, _, mean, here, _, _ in ops:
        found.setdefault(kind, 0.0)
        if here and mean > 0 and here / mean < _SMALL_RATIO and mean <= _MOST_FIXED_NS:
            found[kind] = min(found[kind] or mean, mean)
    return found


def project(
    *,
    run: str,
    operations: pa.Table,
    causes_ns: dict[str, int],
    windows_count: int,
    recorded: DevicePeaks | None,
    target: DevicePeaks | None,
    recorded_reach: Reach | None,
    target_reach: Reach | None,
    target_clock_hz: float | None = None,
    checked: tuple[str, pa.Table, dict[str, int]] | None = None,
    checked_windows_count: int = 1,
    step: Step | None = None,
    scales_count: tuple[int, ...] = (),
    topology: Topology | None = None,
) -> Projection:
    """Carry a run to a device, check it against a run there, and to more ranks.

    Times are per window (a step of a rank, or the whole trace). Without devices, operators stay as
    they are and the run is only carried to more ranks.

    Raises:
        InputError: nothing in the run can be projected.
    """
    classes: tuple[OfClass, ...] = ()
    unmodelled = 0.0
    if recorded and target and recorded_reach and target_reach:
        classes, unmodelled = operators(
            operations,
            recorded,
            target,
            recorded_reach=recorded_reach,
            target_reach=target_reach,
            target_clock_hz=target_clock_hz,
        )

    def under(of: dict[str, int], prefix: str) -> int:
        return sum(t for c, t in of.items() if c.split(".")[0] == prefix)

    busy = under(causes_ns, "compute")
    listed = sum(c.recorded_ns or 0 for c in classes)
    scale = sum(c.projected_ns for c in classes) / listed if listed else 1.0
    rest = {name: under(causes_ns, name) for name in ("idle", "copy", "communication")}
    there = _carried(causes_ns, recorded, target)
    n = windows_count
    recorded_ns = sum(causes_ns.values()) // n
    projected_ns = round((busy * scale + rest["idle"] + sum(there.values())) / n)
    between = None
    if recorded and target and recorded_reach and target_reach and unmodelled > 0:
        ends = _unmodelled_ratios(recorded, target, recorded_reach, target_reach, target_clock_hz)
        kept = projected_ns - busy * scale * unmodelled / n
        if ends is not None:
            low, high = (round(kept + busy * unmodelled * end / n) for end in ends)
            between = min(low, projected_ns), max(high, projected_ns)
    roofline_ns = round(sum(c.roofline_ns for c in classes) / n)
    checked_ns = error = roofline_error = operators_error = operators_roofline = None
    if checked is not None and target and target_reach:
        _, other, other_causes = checked
        theirs, _ = operators(
            other, target, target, recorded_reach=target_reach, target_reach=target_reach
        )
        per_class = {
            c.operator_class: (c.recorded_ns or 0) // checked_windows_count for c in theirs
        }
        classes = tuple(
            msgspec.structs.replace(c, checked_ns=per_class.pop(c.operator_class, None))
            for c in classes
        ) + tuple(_only_there(kind, ns) for kind, ns in per_class.items())
        checked_ns = sum(other_causes.values()) // checked_windows_count
        error = projected_ns / checked_ns - 1
        roofline_error = roofline_ns / checked_ns - 1
        busy_there = sum(c.checked_ns or 0 for c in classes)
        if busy_there:
            operators_error = sum(c.projected_ns for c in classes) / n / busy_there - 1
            operators_roofline = roofline_ns / busy_there - 1
    classes = tuple(
        msgspec.structs.replace(
            c,
            calls_count=c.calls_count // n or c.calls_count,
            recorded_ns=(c.recorded_ns or 0) // n,
            projected_ns=c.projected_ns // n,
            roofline_ns=c.roofline_ns // n,
        )
        for c in classes
    )
    scales: tuple[AtScale, ...] = ()
    knee = cause = scale_error = None
    if step is not None:
        try:
            (same,), _, _ = at_scale(step, (step.ranks_count,), topology or Topology())
            scale_error = same.step_ns / recorded_ns - 1 if recorded_ns else None
        except UsageError:
            scale_error = None
        network = topology or Topology()
        scales, knee, cause = at_scale(on_device(step, scale), scales_count, network)
    return Projection(
        assumptions=(ASSUMPTIONS if classes else ()) + (SCALE_ASSUMPTIONS if scales else ()),
        run=run,
        recorded_device=recorded.label if recorded else None,
        target_device=target.label if target else None,
        recorded_reach=recorded_reach,
        target_reach=target_reach,
        classes=classes,
        unmodelled_ratio=unmodelled,
        unmodelled_operators=_unmodelled_operators(operations) if unmodelled else (),
        idle_ns=rest["idle"] // n,
        copy_ns=rest["copy"] // n,
        communication_ns=rest["communication"] // n,
        projected_copy_ns=round(there["copy"] / n),
        projected_communication_ns=round(there["communication"] / n),
        recorded_ns=recorded_ns,
        projected_ns=projected_ns,
        projected_between_ns=between,
        roofline_ns=roofline_ns,
        checked_run=checked[0] if checked else None,
        checked_ns=checked_ns,
        error_ratio=error,
        roofline_error_ratio=roofline_error,
        operators_error_ratio=operators_error,
        operators_roofline_error_ratio=operators_roofline,
        scales=scales,
        knee_ranks_count=knee,
        knee_cause=cause,
        recorded_ranks_count=step.ranks_count if step else None,
        recorded_scale_error_ratio=scale_error,
        recorded_waiting_ns=round(causes_ns.get("communication.wait", 0) / n) if step else None,
        recorded_waiting_always_ns=_always(step) if step else None,
    )


def _always(step: Step) -> int | None:
    """What the mean recorded rank waits for ranks that are always late; None where that is not told."""
    if not any(place.told for place in step.places):
        return None
    return round(waits(step, step.ranks_count).always_ns)


def _unmodelled_operators(table: pa.Table) -> tuple[str, ...]:
    """Names of operators without FLOP and bytes, most time first."""
    times: dict[str, int] = {}
    for row in table.select(["op", "time_ns", "math_flop", "traffic_bytes"]).to_pylist():
        if row["op"] and row["math_flop"] is None and row["traffic_bytes"] is None:
            times[row["op"]] = times.get(row["op"], 0) + row["time_ns"]
    return tuple(sorted(times, key=lambda op: -times[op]))[:_MOST_NAMED]


def _only_there(kind: str, checked_ns: int) -> OfClass:
    """A class that the run on the target has, and the one that was carried over does not."""
    return OfClass(
        operator_class=kind,
        calls_count=0,
        recorded_ns=0,
        projected_ns=0,
        roofline_ns=0,
        of_roofline_ratio=None,
        checked_ns=checked_ns,
    )


def _unmodelled_ratios(
    recorded: DevicePeaks,
    target: DevicePeaks,
    recorded_reach: Reach,
    target_reach: Reach,
    target_clock_hz: float | None,
) -> tuple[float, float] | None:
    """Time there over time here of what is bound by memory and by products in 16 bits, shorter first."""
    here = _rates(recorded, "bf16", recorded_reach)
    there = _rates(target, "bf16", target_reach, target_clock_hz)
    found = sorted(a / b for a, b in zip(here, there, strict=True) if a and b)
    return (found[0], found[-1]) if found else None


def _carried(
    causes_ns: dict[str, int], recorded: DevicePeaks | None, target: DevicePeaks | None
) -> dict[str, float]:
    """Copies and exposed communication on the target; as recorded where a rate is not known."""
    link = pcie = 1.0
    if recorded is not None and target is not None:
        links = recorded.link_bytes_per_s.value, target.link_bytes_per_s.value
        if links[0] and links[1]:
            link = links[0] / links[1]
        generations = recorded.pcie_generation.value, target.pcie_generation.value
        if generations[0] and generations[1]:
            # Each generation doubles the rate.
            pcie = 2.0 ** (generations[0] - generations[1])
    found = {"copy": 0.0, "communication": 0.0}
    for cause, time_ns in causes_ns.items():
        kind = cause.split(".")[0]
        if kind == "copy":
            between = cause in ("copy.host_to_device", "copy.device_to_host")
            found[kind] += time_ns * (pcie if between else 1.0)
        elif kind == "communication":
            found[kind] += time_ns * (link if "transfer" in cause else 1.0)
    return found


LAUNCH_S = 4.5e-6
"""Of one kernel, as in the data-movement paper (arXiv 2411.01137)."""
CAPTURED_ASSUMPTIONS = (
    "not calibrated: the module never ran. Each operator takes max(FLOP ÷ F, bytes ÷ B) + a launch, "
    "with what well-shaped work reaches of both peaks",
    "operators as a CPU has them under fake tensors: a GPU fuses norms, and a compiler more",
    "the host keeps up, one operator after the other, on one rank",
    ASSUMPTIONS[-1],
)
RECURRENT_ASSUMPTION = (
    "a recurrent layer runs at the rate of large products; its time steps wait for each other, so short "
    "sequences in small batches take longer"
)


def project_captured(
    *,
    module: str,
    operators: list[dict[str, Any]],
    element_bytes: int,
    target: DevicePeaks,
    target_reach: Reach,
    target_clock_hz: float | None = None,
    launch_s: float = LAUNCH_S,
) -> Projection:
    """One training step of a captured module on a device: roofline and launch, by class.

    Args:
        module: its name.
        operators: as :func:`chopper.collectors.fake_ops.capture_operators` has them.
        element_bytes: of a parameter, for lists of tensors whose types are not told.
        target: the device.
        target_reach: what work reaches on it.
        target_clock_hz: at which it runs; None for its reference clock.
        launch_s: of one kernel.

    Raises:
        InputError: no operator has a model.
    """
    from chopper.analyzers.work import estimate

    totals: dict[str, list[float]] = {}
    nameless: dict[str, int] = {}
    calls = unmodelled = 0
    for op in operators:
        work = estimate(op["op"], op["input_dims"], op["input_types"], op["concrete_inputs"])
        size = None if work is None else work.bytes_count
        if work is not None and size is None and work.unsized_element_count:
            size = work.unsized_element_count * element_bytes
        flop = None if work is None else work.flop_count
        dtype = None if work is None else work.dtype
        kind = operator_class(op["op"], work.family if work else None)
        used = None if kind == "attention" and flop else size
        bound = _bound_ns(flop, used, _rates(target, dtype, target_reach, target_clock_hz))
        roof = _bound_ns(flop, size, _rates(target, dtype, _WHOLE))
        n = op["call_count"]
        calls += n
        if bound is None:
            unmodelled += n
            nameless[op["op"]] = nameless.get(op["op"], 0) + n
        total = totals.setdefault(kind, [0.0] * 3)
        total[0] += n
        total[1] += n * ((bound or 0.0) + launch_s * 1e9)
        total[2] += n * (roof or 0.0)
    if not calls or unmodelled == calls:
        raise InputError(f"--module {module}: none of its operators has FLOP or bytes")
    classes = tuple(
        OfClass(
            operator_class=kind,
            calls_count=int(n),
            recorded_ns=None,
            projected_ns=round(projected),
            roofline_ns=round(roof),
            of_roofline_ratio=None,
        )
        for kind, (n, projected, roof) in sorted(totals.items(), key=lambda item: -item[1][1])
    )
    return Projection(
        assumptions=CAPTURED_ASSUMPTIONS
        + ((RECURRENT_ASSUMPTION,) if any("_rnn" in op["op"] for op in operators) else ()),
        run=module,
        recorded_device=None,
        target_device=target.label,
        recorded_reach=None,
        target_reach=target_reach,
        classes=classes,
        unmodelled_ratio=unmodelled / calls,
        unmodelled_operators=tuple(sorted(nameless, key=lambda op: -nameless[op]))[:_MOST_NAMED],
        idle_ns=0,
        copy_ns=0,
        communication_ns=0,
        projected_copy_ns=0,
        projected_communication_ns=0,
        recorded_ns=None,
        projected_ns=sum(c.projected_ns for c in classes),
        projected_between_ns=None,
        roofline_ns=sum(c.roofline_ns for c in classes),
        checked_run=None,
        checked_ns=None,
        error_ratio=None,
        roofline_error_ratio=None,
        operators_error_ratio=None,
        operators_roofline_error_ratio=None,
        scales=(),
        knee_ranks_count=None,
        knee_cause=None,
    )
