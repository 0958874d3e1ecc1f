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
_KERNEL_SHARE = _maybe("share_ratio", "float64", "Of the sum over all rows.", "ratio")
_FLOP_RATE = _maybe(
    "compute_rate_flop_per_s", "float64", "FLOP over the time of the device events.", "flop_per_s"
)
_BYTES_RATE = _maybe(
    "memory_rate_bytes_per_s", "float64", "Bytes over the time of the device events.", "bytes_per_s"
)

OPERATIONS = Table(
    "operations",
    1,
    "Calls of operators with the same arguments in the same phase, over all ranks and steps. A "
    "call's time is that in which device events that it launched itself ran.",
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
        _ns("time_ns", "Time in which these events ran, summed over calls."),
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

LAUNCHES = Table(
    "launches",
    1,
    "Launch overhead of compute kernels by operator and phase, as the Chopper paper defines it: "
    "from the end of the compute kernels before, in the order of their start per device and step, "
    "to the kernel's start. Communication under that gap does not shorten it.",
    (
        _maybe("op", "string", "Operator that launched the kernels; null: none recorded."),
        _column("phase", "string", "forward, recompute, backward, optimizer, data or other."),
        _count("kernel_count", "Compute kernels."),
        _ns("overhead_ns", "Preparation, call and what could not be split."),
        _column("share_ratio", "float64", "Of the observed time of all ranks.", "ratio"),
        _ns("preparation_ns", "Before the launching call: the host was late."),
        _ns("call_ns", "From the launching call to the kernel's start."),
        _ns("unsplit_ns", "Overhead of kernels whose launch was not recorded."),
        _ns("mean_ns", "Overhead per kernel."),
        _ns("running_ns", "Time of the kernels themselves."),
    ),
)

QUEUE_DEPTH = Table(
    "queue_depth",
    1,
    "Launches that wait or run on each stream: how many, for how long. A replayed graph counts as "
    "one. The phase at a time is that of the latest launch before it.",
    (
        Column(name="rank", type="int32", doc="Rank."),
        _column("stream_id", "int64", "Stream."),
        _column("phase", "string", "Phase that the host was launching."),
        _ns("time_ns", "Time in that phase, in the step windows' span."),
        _column("empty_ratio", "float64", "Share of the time with nothing queued.", "ratio"),
        _column("mean_depth", "float64", "Mean over time."),
        _column("median_depth", "int64", "Half of the time at most this many."),
        _column("p95_depth", "int64", "95 % of the time at most this many."),
        _column("max_depth", "int64", "Most at once."),
        _column(
            "full_ratio",
            "float64",
            "Share of the time with at least 1024 queued: CUDA's queue is full then, and launching "
            "calls block.",
            "ratio",
        ),
        Column(name="device_id", type="int32", doc="Device ordinal."),
    ),
)

CPU_USE = Table(
    "cpu_use",
    1,
    "Cores of the host in use, from samples: over the whole run, per phase over all steps, and per "
    "step. Time until a launch belongs to the phase of that launch. Means over time.",
    (
        Column(name="rank", type="int32", doc="Rank whose steps and phases these are."),
        _maybe("step", "int64", "Step number; null: over all steps."),
        _maybe("phase", "string", "Phase of the host; null: all phases."),
        _ns("time_ns", "Time looked at."),
        _maybe("active_cores", "float64", "Cores that were busy at all in a sample."),
        _maybe("minimum_cores", "float64", "Cores that the same work would fill: sum of shares."),
        _maybe("rank_cores", "float64", "Cores that the rank with its children used."),
        _maybe("children_cores", "float64", "The children's part of it (data loader workers)."),
        _maybe("system_cores", "float64", "Cores' worth of time in the kernel."),
        _maybe("stolen_cores", "float64", "Cores' worth of time taken by the hypervisor."),
        _maybe("reason", "text", "Why values are null."),
    ),
)

UTILIZATION = Table(
    "utilization",
    1,
    "Model and hardware FLOP utilization against the theoretical ceiling (table of devices) and the "
    "achievable one (`chopper calibrate`). MFU = Σ F_d / (P_d · T), HFU = Σ H_d / (P_d · T), with "
    "F_d the FLOP of type d that the model needs, H_d those with recomputation and the optimizer's "
    "products, P_d the ceiling for that type, T the observed time.",
    (
        Column(name="rank", type="int32", nullable=True, doc="Rank; null: all ranks together."),
        _column("ceiling", "string", "theoretical or achievable."),
        _maybe("dtype", "string", "Data type; null: all types, each at its own peak."),
        _maybe("mfu_ratio", "float64", "Model FLOP utilization.", "ratio"),
        _maybe("hfu_ratio", "float64", "Hardware FLOP utilization.", "ratio"),
        _maybe(
            "peak_flop_per_s",
            "float64",
            "The ceiling for this mix of types: FLOP over the time that they need at it.",
            "flop_per_s",
        ),
        _maybe(
            "tokens_per_s",
            "float64",
            "Tokens that the rank's embedding looked up; null where "
            "that cannot be told from one table's shapes.",
        ),
        _column("model_flop", "int64", "FLOP that the model needs.", "flop"),
        _column("hardware_flop", "int64", "The same with recomputation.", "flop"),
        _maybe("model_needs_ns", "int64", "Time that the model's FLOP need at the ceiling.", "ns"),
        _maybe("hardware_needs_ns", "int64", "Time that all FLOP need at the ceiling.", "ns"),
        _ns("observed_ns", "Observed time, summed over ranks."),
        _maybe("reason", "text", "Why values are null, or a lower bound."),
        _maybe("source", "text", "Where the ceiling comes from."),
    ),
)

STEPS = Table(
    "steps",
    1,
    "Step windows of each rank: the four exclusive states sum to the observed time.",
    (
        _maybe("step", "int64", "Step number; null for a whole trace."),
        Column(name="rank", type="int32", doc="Rank."),
        _ns("observed_ns", "Length of the window."),
        _maybe("ideal_ns", "int64", "Model math at peak; null without a peak.", "ns"),
        _ns("compute_ns", "A compute kernel was running."),
        _ns("communication_ns", "Exposed communication."),
        _ns("copy_ns", "Exposed copies."),
        _ns("idle_ns", "Nothing was running."),
        _maybe(
            "outlier",
            "bool",
            "Further from the rank's median than 3.5 robust standard deviations and than 2 %; null "
            "with fewer than five steps.",
        ),
        _maybe("deviation_ratio", "float64", "Difference to the rank's median step.", "ratio"),
    ),
)

UNMODELLED = Table(
    "unmodelled",
    1,
    "Computing time without an ideal or a roofline, by kernel, operator and reason, over all ranks "
    "and steps.",
    (
        _maybe("kernel", "string", "Name as recorded."),
        _ns("time_ns", "Attributed (exclusive) time."),
        _maybe("share_ratio", "float64", "Of all computing time.", "ratio"),
        _column("reason", "string", "Why its work, or the time that it should take, is not known."),
        _maybe("op", "string", "Operator that launched it; null: none recorded."),
        _count("call_count", "Device events."),
        _column("cause", "string", "Cause that the time is attributed to."),
    ),
)

MEMORY = Table(
    "memory",
    1,
    "Memory by rank, device and phase. Counts and times are per step; peaks are the highest of all "
    "steps.",
    (
        _column("rank", "int32", "Rank."),
        _column("device", "string", "`device N`, or `host`."),
        _column(
            "phase",
            "string",
            "forward, recompute, backward, optimizer, data, other; `all` for whole steps.",
        ),
        _maybe("peak_allocated_bytes", "int64", "Most that tensors held.", "bytes"),
        _maybe("peak_reserved_bytes", "int64", "Most that the allocator held.", "bytes"),
        _maybe(
            "fragmentation_ratio",
            "float64",
            "(reserved − allocated) / reserved at the peak of allocated.",
            "ratio",
        ),
        _maybe(
            "median_fragmentation_ratio", "float64", "Median of the same over all events.", "ratio"
        ),
        _maybe("allocation_count", "int64", "Allocations per step.", "count"),
        _maybe("requested_bytes", "int64", "Bytes allocated per step, reused blocks too.", "bytes"),
        _maybe(
            "allocator_call_count",
            "float64",
            "Runtime calls that allocate or free (cudaMalloc, hipFree …) per step.",
            "count",
        ),
        _maybe("allocator_ns", "int64", "Host time in these calls per step.", "ns"),
        _column("source", "string", "What the figures come from."),
    ),
)

MEMORY_STEPS = Table(
    "memory_steps",
    1,
    "Allocations of each traced step by rank and device, and the device's clock in it.",
    (
        _column("rank", "int32", "Rank."),
        _column("device", "string", "`device N`, or `host`."),
        _column("step", "int64", "Number of the step."),
        _maybe(
            "similarity_ratio",
            "float64",
            "To the step before: Dice's coefficient of runs of three successive events.",
            "ratio",
        ),
        _maybe("same_as_previous", "bool", "The same sizes in the same order as the step before."),
        _count("event_count", "Allocations and frees."),
        _count("distinct_sizes_count", "Different sizes of blocks among them."),
        _column("requested_bytes", "int64", "Bytes allocated.", "bytes"),
        _maybe("peak_allocated_bytes", "int64", "Most that tensors held.", "bytes"),
        _maybe("peak_reserved_bytes", "int64", "Most that the allocator held.", "bytes"),
        _count("clock_count", "Clock samples in the step."),
        _maybe("clock_mean_hz", "int64", "Mean of the device's clock.", "hz"),
        _maybe("clock_std_hz", "int64", "Standard deviation of its samples.", "hz"),
        _column("sequence", "text", "Hash of the signed sizes in order: equal for equal steps."),
    ),
)

MEMORY_DETERMINISM = Table(
    "memory_determinism",
    1,
    "How much the allocations of steps vary, by rank and device, and whether the device's clock "
    "varies with them.",
    (
        _column("rank", "int32", "Rank."),
        _column("device", "string", "`device N`, or `host`."),
        _count("steps_count", "Traced steps."),
        _maybe(
            "similarity_ratio", "float64", "Mean similarity of a step to the one before.", "ratio"
        ),
        _maybe(
            "identical_ratio",
            "float64",
            "Share of steps that allocate exactly as the one before.",
            "ratio",
        ),
        _count("event_count", "Allocations and frees per step."),
        _count("distinct_sizes_count", "Different sizes of blocks per step."),
        _maybe("peak_mean_bytes", "int64", "Mean over steps of the most tensors held.", "bytes"),
        _maybe("peak_std_bytes", "int64", "Standard deviation of it over steps.", "bytes"),
        _maybe("clock_mean_hz", "int64", "Mean of the steps' mean clocks.", "hz"),
        _maybe("clock_std_hz", "int64", "Mean of the clock's deviations within steps.", "hz"),
        _maybe(
            "clock_correlation",
            "float64",
            "Pearson's r over steps of 1 − similarity and the clock's deviation.",
        ),
        _maybe("no_correlation", "text", "Why there is no correlation."),
    ),
)

VIEW_TABLES: tuple[Table, ...] = (
    OPERATIONS,
    OPERATORS,
    KERNELS,
    UNMODELLED,
    LAUNCHES,
    QUEUE_DEPTH,
    CPU_USE,
    UTILIZATION,
    STEPS,
    MEMORY,
    MEMORY_STEPS,
    MEMORY_DETERMINISM,
)
