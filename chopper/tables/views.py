"""Tables of the views: one declaration per entry of :mod:`chopper.views`.

Columns stand in order of importance: a narrow terminal shows the first ones.
"""

from __future__ import annotations

from chopper.tables._base import Column, ColumnType, Table


def _column(name: str, kind: ColumnType, doc: str, unit: str | None = None) -> Column:
    return Column(name=name, type=kind, unit=unit, doc=doc)


def _maybe(name: str, kind: ColumnType, doc: str, unit: str | None = None) -> Column:
    """A column that is null where it is not known."""
    return Column(name=name, type=kind, unit=unit, doc=doc, nullable=True)


def _ns(name: str, doc: str) -> Column:
    return Column(name=name, type="int64", unit="ns", doc=doc)


def _count(name: str, doc: str) -> Column:
    return Column(name=name, type="int64", unit="count", doc=doc)


_SPREAD = (
    _ns("median_ns", "Median of one call."),
    _ns("min_ns", "Fastest call."),
    _ns("max_ns", "Slowest call."),
    _ns("std_ns", "Standard deviation of the sample of calls; 0 for a single one."),
)
_KERNEL_SHARE = _maybe(
    "share_ratio", "float64", "Of the time of all device events in the step windows.", "ratio"
)
_FLOP_RATE = _maybe(
    "compute_rate_flop_per_s", "float64", "FLOP over the time of the device events.", "flop_per_s"
)
_BYTES_RATE = _maybe(
    "memory_rate_bytes_per_s", "float64", "Bytes over the time of the device events.", "bytes_per_s"
)

OPERATIONS = Table(
    "operations",
    1,
    "Calls of operators with the same arguments in the same phase, over all ranks and steps. Time "
    "is that of the device events that the call launched itself, what ran beside them included.",
    (
        _maybe("op", "string", "Operator; null for events that no operator launched."),
        _maybe("input_dims", "string", "Shapes of its inputs, JSON as recorded."),
        _column("phase", "string", "forward, recompute, backward, optimizer, data or other."),
        _count("call_count", "Calls."),
        _ns("time_ns", "Sum over all calls."),
        _KERNEL_SHARE,
        _ns("mean_ns", "Mean of one call."),
        _FLOP_RATE,
        _BYTES_RATE,
        _maybe("ideal_ns", "int64", "What one call of a product needs at the peak.", "ns"),
        _maybe("roofline_ns", "int64", "What one call needs at the roofline.", "ns"),
        _maybe("input_types", "string", "Data types of its inputs, JSON as recorded."),
        _maybe("concrete_inputs", "string", "Values of its scalar inputs, JSON as recorded."),
        _maybe("dtype", "string", "Arithmetic of a product: the peak that it is held against."),
        _maybe("math_flop", "int64", "FLOP of one call that the mathematics needs.", "flop"),
        _maybe("traffic_bytes", "int64", "Least traffic with memory of one call.", "bytes"),
        _maybe("flop_per_byte", "float64", "FLOP per byte of that traffic."),
        *_SPREAD,
    ),
)

OPERATORS = Table(
    "operators",
    1,
    "Operators by name over all ranks and steps, whatever their arguments and phase.",
    (
        _maybe("op", "string", "Operator; null for events that no operator launched."),
        _count("call_count", "Calls."),
        _count("kernel_count", "Device events that they launched."),
        _ns("time_ns", "Time of these events, what ran beside them included."),
        _KERNEL_SHARE,
        _ns("mean_ns", "Mean of one call."),
        _FLOP_RATE,
        _BYTES_RATE,
        *_SPREAD,
        _maybe("ideal_ns", "int64", "What all calls of a product need at the peak.", "ns"),
        _maybe("roofline_ns", "int64", "What all calls need at the roofline.", "ns"),
        _maybe("math_flop", "int64", "FLOP of all calls.", "flop"),
        _maybe("traffic_bytes", "int64", "Least traffic with memory of all calls.", "bytes"),
    ),
)

KERNELS = Table(
    "kernels",
    1,
    "Device events by name and by the operator that launched them, over all ranks and steps.",
    (
        _column("kernel", "string", "Name as recorded."),
        _maybe("op", "string", "Operator that launched it; null: none recorded."),
        _count("call_count", "Device events."),
        _ns("time_ns", "Sum of their durations, what ran beside them included."),
        _KERNEL_SHARE,
        _ns("mean_ns", "Mean duration."),
        _column("work_class", "string", "compute, communication or copy."),
        *_SPREAD,
    ),
)

VIEW_TABLES: tuple[Table, ...] = (
    OPERATIONS,
    OPERATORS,
    KERNELS,
)
