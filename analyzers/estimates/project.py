"""Project a recorded run onto another device.

Each operator's time has two parts: a fixed time that any kernel takes, which stays the same, and
work, which scales with the ratio of the two devices' rates, each at the share that well-shaped work
reaches (`Reach`). What else the recorded run lost to shapes and libraries is assumed to be lost
on the target too: this is the calibration, per operator and thus per class. Idle time depends on
the host and stays the same.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar, NamedTuple

import msgspec
import pyarrow as pa

from chopper.analyzers.estimates import Estimate, assumed
from chopper.errors import InputError
from chopper.hardware.ceilings import MOST_OF_A_PEAK
from chopper.hardware.devices import DevicePeaks, Reach, host_rates_of

_MOST_FIXED_NS = 10_000.0
"""No kernel takes longer than this for being a kernel."""
_MOST_NAMED = 4
LARGEST_ERROR_RATIO = 0.143
"""Of the total, in ten projections between devices that were held against runs there."""
_SMALL_RATIO = 0.25
"""A class's fixed time is read off operators that reach less than this of the roofline."""


class OfClass(msgspec.Struct, kw_only=True, frozen=True):
    """One class of operators on both devices."""

    operator_class: str
    calls_count: int = 0
    recorded_ns: int
    projected_ns: int = 0
    roofline_ns: int = 0
    """On the target at its datasheet peak, without calibration."""
    of_roofline_ratio: float | None = None
    """Of the recorded time, what the roofline of the recorded device explains."""
    checked_ns: int | None = None
    """On the target as recorded there, when such a run was given."""


class Projection(Estimate, kw_only=True, frozen=True):
    """Times of a recorded run on another device."""

    SCHEMA: ClassVar[str] = "chopper.estimate.project/2"

    run: str
    recorded_device: str
    target_device: str
    recorded_reach: Reach
    target_reach: Reach
    classes: tuple[OfClass, ...]
    unmodelled_ratio: float = 0.0
    """Of the operators' time, what has no FLOP or bytes; it is scaled as the rest."""
    unmodelled_operators: tuple[str, ...] = ()
    """Those, most time first; the first few."""
    idle_ns: int = 0
    copy_ns: int = 0
    communication_ns: int = 0
    projected_copy_ns: int = 0
    projected_communication_ns: int = 0
    """Exposed transfer goes with the links' rates, copies between host and device with PCIe."""
    recorded_ns: int
    projected_ns: int
    projected_between_ns: tuple[int, int] | None = None
    """With what has no model going as memory and as products do: which it is, is not known. Null
    where all has a model."""
    roofline_ns: int
    """Uncalibrated: all operators at the target's datasheet peak, and nothing else."""
    checked_run: str | None = None
    checked_ns: int | None = None
    error_ratio: float | None = None
    roofline_error_ratio: float | None = None
    operators_error_ratio: float | None = None
    """Of the operators' times alone: what idle time, which stays as recorded, has no part in."""
    operators_roofline_error_ratio: float | None = None


def between_ns(projection: Projection) -> tuple[float, float]:
    """Return the range of a projected time: operators without a model, and the method's error."""
    time_ns = projection.projected_ns
    low, high = projection.projected_between_ns or (time_ns, time_ns)
    return low * (1 - LARGEST_ERROR_RATIO), high * (1 + LARGEST_ERROR_RATIO)


_CLASS_BY_FAMILY = {
    "gemm": "products",
    "conv": "convolutions",
    "sdpa": "attention",
    "moe": "experts",
}
_CLASS_BY_NAME = {
    "norm": "normalization",
    "softmax": "normalization",
    **dict.fromkeys(("copy", "cat", "embedding", "index", "gather"), "copies"),
    **dict.fromkeys(("sum", "mean", "max", "all"), "reduction"),
    "adam": "optimizer",
}


def operator_class(op: str | None, family: str | None) -> str:
    """products, convolutions, attention, experts, normalization, reduction, copies, or elementwise.

    Args:
        op: the operator's name.
        family: that models its work, as :func:`chopper.analyzers.work.family` names it.
    """
    if family is None:
        return "unmodelled"
    name = (op or "").lower()
    by_name = (kind for part, kind in _CLASS_BY_NAME.items() if part in name)
    return _CLASS_BY_FAMILY.get(family) or next(by_name, "elementwise")


class Side(NamedTuple):
    """A device, what work reaches of its peaks, and the clock; None for the reference clock."""

    device: DevicePeaks
    reach: Reach
    clock_hz: float | None = None

    def rates(self, dtype: str | None) -> tuple[float | None, float | None]:
        """Return reached FLOP/s of a type, and bytes/s; None where the peak is not known."""
        peak = self.device.flop_per_s(dtype, self.clock_hz) if dtype else None
        if peak is None and dtype == "bf16":
            # Before bf16 existed, programs ran in fp16.
            peak = self.device.flop_per_s("fp16", self.clock_hz)
        bandwidth = self.device.memory_bandwidth_bytes_per_s.value
        return (
            None if peak is None else peak * self.reach.products,
            None if bandwidth is None else float(bandwidth) * self.reach.memory,
        )

    def bound_ns(
        self, dtype: str | None, flop: float | None, size_bytes: float | None
    ) -> float | None:
        """Return the longer of FLOP ÷ F and bytes ÷ B; None when neither is known."""
        parts = [
            amount / rate * 1e9
            for amount, rate in zip((flop, size_bytes), self.rates(dtype), strict=True)
            if amount is not None and rate is not None and amount == amount
        ]
        return max(parts, default=None)

    def calibrated_ns(
        self, kind: str, dtype: str | None, flop: float | None, size_bytes: float | None
    ) -> float | None:
        """Return the bound of an operator of a class, as :meth:`bound_ns` but for attention.

        Fused attention keeps its operands in caches: the matrix units pace it, whatever its bytes
        say; for the uncalibrated roofline they count.
        """
        return self.bound_ns(dtype, flop, None if kind == "attention" and flop else size_bytes)

    def at_datasheet(self) -> Side:
        """Return the device where all of its peaks are reached."""
        return Side(self.device, Reach(products=1.0, memory=1.0, source="datasheet"))


class _Operator(NamedTuple):
    """All calls of an operator on both devices."""

    kind: str
    calls_count: int
    recorded_ns: float
    projected_ns: float | None
    """None: no model; it goes as the mean of those with one."""
    roofline_ns: float = 0.0
    """On the target by its datasheet."""
    bound_ns: float = 0.0
    """Least time on the recorded device."""


def operators(table: pa.Table, here: Side, there: Side) -> tuple[tuple[OfClass, ...], float]:
    """Carry each operator over, and sum by class. OPERATIONS -> classes.

    Returns:
        Classes, most recorded time first; and the share of time without a model.

    Raises:
        InputError: no operator has a time.
    """
    from chopper.analyzers.trace.names import is_communication, is_host_communication
    from chopper.analyzers.work import family

    calls: list[tuple[str, int, float, float | None, float | None, float | None]] = []
    fixed: dict[str, float] = {}
    columns = ["op", "dtype", "call_count", "time_ns", "math_flop", "traffic_bytes"]
    for row in table.select(columns).to_pylist():
        name, dtype, count = row["op"] or "", row["dtype"], row["call_count"]
        # Transfer has causes of its own, and mostly hides.
        if is_communication(name) or is_host_communication(name):
            continue
        kind = operator_class(row["op"], family(name))
        flop, size = row["math_flop"], row["traffic_bytes"]
        bounds = (side.calibrated_ns(kind, dtype, flop, size) for side in (here, there))
        here_ns, there_ns = bounds
        mean_ns = row["time_ns"] / max(1, count)
        # Each class's shortest kernel far from the roofline tells what any of it takes.
        if here_ns and 0 < mean_ns <= _MOST_FIXED_NS and here_ns / mean_ns < _SMALL_RATIO:
            fixed[kind] = min(fixed.get(kind, mean_ns), mean_ns)
        roofline_ns = there.at_datasheet().bound_ns(dtype, flop, size)
        calls.append((kind, count, mean_ns, here_ns, there_ns, roofline_ns))
    if not calls:
        raise InputError("no operator of the run has device time; nothing can be projected")
    ops = []
    for kind, count, mean_ns, here_ns, there_ns, roofline_ns in calls:
        if not (here_ns and there_ns and mean_ns > 0):
            ops.append(_Operator(kind, count, mean_ns * count, None))
            continue
        base = min(mean_ns, fixed.get(kind, 0.0))
        projected_ns = (base + (mean_ns - base) * there_ns / here_ns) * count
        roofline_ns = (roofline_ns or 0.0) * count
        ops.append(
            _Operator(kind, count, mean_ns * count, projected_ns, roofline_ns, here_ns * count)
        )
    known_ns = sum(op.recorded_ns for op in ops if op.projected_ns is not None)
    everything_ns = sum(op.recorded_ns for op in ops)
    if not known_ns:
        raise InputError(
            f"no operator of the run has FLOP or bytes that {here.device.label} and "
            f"{there.device.label} have known rates for; record with shapes"
        )
    return _by_class(ops), 1 - known_ns / everything_ns if everything_ns else 0.0


def _by_class(ops: list[_Operator]) -> tuple[OfClass, ...]:
    """Sum operators by class, the longest recorded first."""
    known = [op for op in ops if op.projected_ns is not None]
    known_ns = sum(op.recorded_ns for op in known)
    ratio = sum(op.projected_ns or 0.0 for op in known) / known_ns if known_ns else 1.0
    classes = []
    for kind in dict.fromkeys(op.kind for op in ops):
        of = [op for op in ops if op.kind == kind]
        time_ns = sum(op.recorded_ns for op in of)
        unknown_ns = sum(op.recorded_ns for op in of if op.projected_ns is None)
        bound_ns, modelled_ns = sum(op.bound_ns for op in of), time_ns - unknown_ns
        # More than there is says that the roofline does not hold for it.
        reached = modelled_ns > 0 and bound_ns <= MOST_OF_A_PEAK * modelled_ns
        projected_ns = sum(op.projected_ns or 0.0 for op in of) + unknown_ns * ratio
        classes.append(
            OfClass(
                operator_class=kind,
                calls_count=sum(op.calls_count for op in of),
                recorded_ns=round(time_ns),
                projected_ns=round(projected_ns),
                roofline_ns=round(sum(op.roofline_ns for op in of)),
                of_roofline_ratio=bound_ns / modelled_ns if reached else None,
            )
        )
    return tuple(sorted(classes, key=lambda c: -c.recorded_ns))


def project(
    *,
    run: str,
    operations: pa.Table,
    causes_ns: dict[str, int],
    windows_count: int,
    here: Side,
    there: Side,
    checked: tuple[str, pa.Table, dict[str, int]] | None = None,
    checked_windows_count: int = 1,
) -> Projection:
    """Project a run onto a device, and compare it with a run recorded there.

    Times are per window (a step of a rank, or the whole trace).

    Raises:
        InputError: nothing in the run can be projected.
    """
    classes, unmodelled = operators(operations, here, there)
    n = windows_count
    listed_ns = sum(c.recorded_ns for c in classes)
    scale = sum(c.projected_ns for c in classes) / listed_ns if listed_ns else 1.0
    transfer_ns = _carried(causes_ns, here, there)
    busy_ns, idle_ns = _under(causes_ns, "compute"), _under(causes_ns, "idle")
    recorded_ns = sum(causes_ns.values()) // n
    projected_ns = round((busy_ns * scale + idle_ns + sum(transfer_ns.values())) / n)
    between = None
    if unmodelled > 0:
        without_ns = projected_ns - busy_ns * scale * unmodelled / n
        between = _between(here, there, without_ns, busy_ns * unmodelled / n, projected_ns)
    roofline_ns = round(sum(c.roofline_ns for c in classes) / n)
    check: dict[str, Any] = {}
    if checked is not None:
        classes, check = _check(
            classes, there, checked, checked_windows_count, n, projected_ns, roofline_ns
        )
    return Projection(
        assumptions=assumed("project", "reach"),
        run=run,
        recorded_device=here.device.label,
        target_device=there.device.label,
        recorded_reach=here.reach,
        target_reach=there.reach,
        classes=tuple(_per_window(c, n) for c in classes),
        unmodelled_ratio=unmodelled,
        unmodelled_operators=_unmodelled_operators(operations) if unmodelled else (),
        idle_ns=idle_ns // n,
        copy_ns=_under(causes_ns, "copy") // n,
        communication_ns=_under(causes_ns, "communication") // n,
        projected_copy_ns=round(transfer_ns["copy"] / n),
        projected_communication_ns=round(transfer_ns["communication"] / n),
        recorded_ns=recorded_ns,
        projected_ns=projected_ns,
        projected_between_ns=between,
        roofline_ns=roofline_ns,
        **check,
    )


def _under(causes_ns: dict[str, int], prefix: str) -> int:
    return sum(t for c, t in causes_ns.items() if c.split(".")[0] == prefix)


def _per_window(c: OfClass, windows_count: int) -> OfClass:
    return msgspec.structs.replace(
        c,
        calls_count=c.calls_count // windows_count or c.calls_count,
        recorded_ns=c.recorded_ns // windows_count,
        projected_ns=c.projected_ns // windows_count,
        roofline_ns=c.roofline_ns // windows_count,
    )


def _between(
    here: Side, there: Side, without_ns: float, unmodelled_ns: float, projected_ns: int
) -> tuple[int, int] | None:
    """Return the total with operators without a model bound by memory, or by 16-bit products."""
    rates = zip(here.rates("bf16"), there.rates("bf16"), strict=True)
    ratios = sorted(a / b for a, b in rates if a and b)
    if not ratios:
        return None
    low, high = (round(without_ns + unmodelled_ns * r) for r in (ratios[0], ratios[-1]))
    return min(low, projected_ns), max(high, projected_ns)


def _check(
    classes: tuple[OfClass, ...],
    there: Side,
    checked: tuple[str, pa.Table, dict[str, int]],
    checked_windows_count: int,
    windows_count: int,
    projected_ns: int,
    roofline_ns: int,
) -> tuple[tuple[OfClass, ...], dict[str, Any]]:
    """Return the classes with their times on the target, and the errors of the projection."""
    run, operations, causes_ns = checked
    here = Side(there.device, there.reach)
    theirs, _ = operators(operations, here, here)
    per_class = {c.operator_class: c.recorded_ns // checked_windows_count for c in theirs}
    classes = tuple(
        msgspec.structs.replace(c, checked_ns=per_class.pop(c.operator_class, None))
        for c in classes
    ) + tuple(
        # Classes that only the run on the target has.
        OfClass(operator_class=kind, recorded_ns=0, checked_ns=time_ns)
        for kind, time_ns in per_class.items()
    )
    checked_ns = sum(causes_ns.values()) // checked_windows_count
    check: dict[str, Any] = {
        "checked_run": run,
        "checked_ns": checked_ns,
        "error_ratio": projected_ns / checked_ns - 1,
        "roofline_error_ratio": roofline_ns / checked_ns - 1,
    }
    busy_ns = sum(c.checked_ns or 0 for c in classes)
    if busy_ns:
        sum_ns = sum(c.projected_ns for c in classes) / windows_count
        check["operators_error_ratio"] = sum_ns / busy_ns - 1
        check["operators_roofline_error_ratio"] = roofline_ns / busy_ns - 1
    return classes, check


def _unmodelled_operators(table: pa.Table) -> tuple[str, ...]:
    """Return names of operators without FLOP and bytes, most time first."""
    times: Counter[str] = Counter()
    for row in table.select(["op", "time_ns", "math_flop", "traffic_bytes"]).to_pylist():
        if row["op"] and row["math_flop"] is None and row["traffic_bytes"] is None:
            times[row["op"]] += row["time_ns"]
    return tuple(op for op, _ in times.most_common(_MOST_NAMED))


def _carried(causes_ns: dict[str, int], here: Side, there: Side) -> dict[str, float]:
    """Return copies and exposed communication on the target; as recorded without known rates."""
    link, host = 1.0, [1.0, 1.0]
    recorded, target = here.device, there.device
    links = recorded.link_bytes_per_s.value, target.link_bytes_per_s.value
    if links[0] and links[1]:
        link = links[0] / links[1]
    rates = host_rates_of(recorded), host_rates_of(target)
    if rates[0] and rates[1]:
        host = [before / after for before, after in zip(rates[0][:2], rates[1][:2], strict=True)]
    carried_ns = {"copy": 0.0, "communication": 0.0}
    for cause, time_ns in causes_ns.items():
        kind = cause.split(".")[0]
        if kind == "copy":
            ways = ("copy.host_to_device", "copy.device_to_host")
            carried_ns[kind] += time_ns * (host[ways.index(cause)] if cause in ways else 1.0)
        elif kind == "communication":
            carried_ns[kind] += time_ns * (link if "transfer" in cause else 1.0)
    return carried_ns


LAUNCH_S = 4.5e-6
"""Launch latency of one kernel, as in the data-movement paper (arXiv 2411.01137)."""


def captured_ns(
    operators: list[dict[str, Any]], element_bytes: int, there: Side
) -> tuple[float, float]:
    """Return the time of a captured program on a device, and its roofline there: ns, ns.

    Each operator takes its bound and a launch; the roofline is of the datasheet's peaks alone.

    Args:
        operators: those of :func:`chopper.collectors.fake_tensors.rows_of`.
        element_bytes: of a parameter, for lists of tensors of unknown types.
        there: the device.

    Raises:
        InputError: no operator has FLOP or bytes.
    """
    from chopper.analyzers.work import estimate

    projected_ns = total_roofline_ns = 0.0
    for op in operators:
        work = estimate(op["op"], op["input_dims"], op["input_types"], op["concrete_inputs"])
        size = flop = dtype = None
        if work is not None:
            size, flop, dtype = work.bytes_count, work.flop_count, work.dtype
            if size is None and work.unsized_element_count:
                size = work.unsized_element_count * element_bytes
        kind, n = operator_class(op["op"], work.family if work else None), op["call_count"]
        bound_ns = there.calibrated_ns(kind, dtype, flop, size) or 0.0
        projected_ns += n * (bound_ns + LAUNCH_S * 1e9)
        total_roofline_ns += n * (there.at_datasheet().bound_ns(dtype, flop, size) or 0.0)
    if not total_roofline_ns:
        raise InputError("none of the captured operators has FLOP or bytes")
    return projected_ns, total_roofline_ns
