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

MEMORY_OVER_TIME = Table(
    "memory_over_time",
    1,
    "Most memory of each kind in each step (in each of equal spans, where there are no steps): what "
    "torch's allocator says, what the driver says, and the host's.",
    (
        _column("rank", "int32", "Rank."),
        _maybe("step", "int64", "Step number; null for spans."),
        _ns("since_ns", "Start, since the first row's."),
        _ns("dur_ns", "Length of the step or span."),
        _maybe("allocated_bytes", "int64", "Held by tensors.", "bytes"),
        _maybe("reserved_bytes", "int64", "Held by the allocator.", "bytes"),
        _maybe("device_used_bytes", "int64", "In use on the device, by all processes.", "bytes"),
        _maybe(
            "host_process_bytes",
            "int64",
            "Resident on the host: the rank and the processes that it started.",
            "bytes",
        ),
        _maybe("host_available_bytes", "int64", "Least that the host had left.", "bytes"),
    ),
)

MEMORY_SEGMENTS = Table(
    "memory_segments",
    1,
    "What the allocator held from the driver when a snapshot was taken, and the gaps in it.",
    (
        _column("rank", "int32", "Rank."),
        _column("device", "string", "`device N`."),
        _maybe("kind", "string", "small (blocks of up to 1 MiB) or large."),
        _maybe("stream_id", "int64", "Stream that the segments serve."),
        _count("segment_count", "Segments."),
        _column("reserved_bytes", "int64", "Their size.", "bytes"),
        _column("allocated_bytes", "int64", "Of that, held by tensors.", "bytes"),
        _maybe("fragmentation_ratio", "float64", "(reserved − allocated) / reserved.", "ratio"),
        _count("gap_count", "Gaps between tensors, free segments included."),
        _column("largest_gap_bytes", "int64", "The largest: more needs a new segment.", "bytes"),
        _column(
            "whole_free_bytes",
            "int64",
            "In segments that no tensor uses: torch.cuda.empty_cache() returns these.",
            "bytes",
        ),
        _maybe(
            "rounding_bytes",
            "int64",
            "Held beyond what was asked for; null where that was not recorded.",
            "bytes",
        ),
    ),
)

MEMORY_HOLDERS = Table(
    "memory_holders",
    1,
    "Memory in use when a snapshot was taken, by the line of Python that allocated it.",
    (
        _column("rank", "int32", "Rank."),
        _column("device", "string", "`device N`."),
        _column("held_bytes", "int64", "Held by its tensors.", "bytes"),
        _column("share_ratio", "float64", "Of all in use on the device.", "ratio"),
        _count("block_count", "Blocks."),
        _column("largest_bytes", "int64", "The largest of them.", "bytes"),
        _maybe("where", "text", "file:line: function; null where no stack was recorded."),
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

COLLECTIVES = Table(
    "collectives",
    1,
    "One row per collective that was matched on all ranks of its group. Times of ranks are in one "
    "clock; bandwidths as nccl-tests define them.",
    (
        _column("collective", "string", "Normalized name: allreduce, reducescatter, sendrecv …"),
        _maybe("ranks", "string", "Global ranks that took part."),
        _maybe("step", "int64", "Step number, where the straggler's event began."),
        _ns("waiting_ns", "What the ranks waited for the last one, summed over them."),
        _column("straggler_rank", "int32", "Rank that came last."),
        _ns("exposed_waiting_ns", "The part of the waiting that nothing hid, summed over ranks."),
        _ns("transfer_ns", "From the last arrival to the last end."),
        _maybe("message_bytes", "int64", "Size: the whole array.", "bytes"),
        _maybe("bus_bytes_per_s", "float64", "Bus bandwidth.", "bytes_per_s"),
        _maybe("at_peak_ratio", "float64", "Bus bandwidth over the link's peak.", "ratio"),
        _ns("exposed_ns", "Waiting and transfer that nothing hid, summed over ranks."),
        _maybe("algorithm_bytes_per_s", "float64", "Size over transfer time.", "bytes_per_s"),
        _column("phase", "string", "Phase of the straggler's event."),
        _maybe("layer", "string", "Layer of the straggler's event."),
        _maybe("op", "string", "Operator of the straggler's event."),
        _maybe("group", "string", "Name of the process group."),
        _maybe("sequence_id", "int64", "Number within the group, where recorded."),
        _count("rank_count", "Ranks that took part."),
        _ns("first_arrival_ns", "When the first rank came, Unix time."),
        _ns("last_arrival_ns", "When the last rank came, Unix time."),
        _ns("last_end_ns", "When the last rank left, Unix time."),
    ),
)

STRAGGLERS = Table(
    "stragglers",
    1,
    "Waiting at matched collectives by the rank that came last and by what it spent longer on than "
    "the others since the group's collective before.",
    (
        _column("straggler_rank", "int32", "Rank that came last."),
        _maybe(
            "cause", "string", "Leaf cause; null for what came before its window, or no excess."
        ),
        _ns("waiting_ns", "Waiting of the other ranks, summed; shared among causes by excess."),
        _column("share_ratio", "float64", "Of all waiting.", "ratio"),
        _ns("exposed_waiting_ns", "The part of the waiting that nothing hid."),
        _ns("excess_ns", "How much longer than the others' mean it spent on the cause, in total."),
        _count("collective_count", "Collectives at which this was its largest excess."),
        _count("late_collective_count", "Collectives at which it came last, whatever the cause."),
        _column("late_ratio", "float64", "The same, of all at which anybody waited.", "ratio"),
    ),
)

EXPOSED_COMMUNICATION = Table(
    "exposed_communication",
    1,
    "Communication by group, collective, phase and layer, summed over ranks and steps: what no "
    "computing hid, and what it did.",
    (
        _column("collective", "string", "Normalized name: allreduce, reducescatter, sendrecv …"),
        _maybe("ranks", "string", "Global ranks that take part."),
        _column("phase", "string", "Phase of the events."),
        _maybe("layer", "string", "Layer of the events."),
        _count("event_count", "Events."),
        _ns("exposed_ns", "Time in which no computing ran beside it."),
        _column("share_ratio", "float64", "Exposed, of the observed time.", "ratio"),
        _ns("hidden_ns", "Time in which computing ran beside it."),
        _ns("elapsed_ns", "Time that the events ran; more than both where they overlap."),
        _ns("waiting_ns", "Of the exposed: before the last rank came."),
        _ns("at_peak_ns", "Of the exposed: what the bytes need at the link's peak."),
        _ns("below_peak_ns", "Of the exposed: transfer beyond that."),
        _ns("no_peak_ns", "Of the exposed: transfer, peak or bytes unknown."),
        _ns("unseparated_ns", "Of the exposed: not matched, wait and transfer together."),
        _maybe("group", "string", "Name of the process group."),
    ),
)

OVERLAP = Table(
    "overlap",
    1,
    "Computing kernels by operator, shapes and kernel: how much of their time communication ran "
    "beside them on the same device, and whether they took longer then. Alone is no overlap at "
    "all, beside is half of the time or more.",
    (
        _maybe("op", "string", "Operator."),
        _maybe("input_dims", "string", "Shapes of its inputs, JSON as recorded."),
        _count("instance_count", "Instances."),
        _column("overlap_ratio", "float64", "Overlapped, of the time of all.", "ratio"),
        _maybe("slowdown_factor", "float64", "Median beside over median alone.", "factor"),
        _maybe("spearman", "float64", "Rank correlation of overlap with duration."),
        _maybe("pearson", "float64", "Linear correlation of overlap with duration."),
        _maybe("median_alone_ns", "int64", "Median duration alone.", "ns"),
        _maybe("median_beside_ns", "int64", "Median duration beside communication.", "ns"),
        _count("alone_instance_count", "Instances alone."),
        _count("beside_instance_count", "Instances beside communication."),
        _ns("overlap_ns", "Overlapped time of all."),
        _ns("time_ns", "Time of all."),
        _column("kernel", "string", "Kernel."),
    ),
)

LEAD = Table(
    "lead",
    1,
    "Latest start over the ranks less this rank's start, of the same collective or kernel.",
    (
        _column("rank", "int32", "Rank."),
        _maybe("step", "int64", "Step number."),
        _column("kind", "string", "collective or kernel."),
        _ns("median_ns", "Median lead."),
        _ns("p95_ns", "95th percentile of the lead."),
        _column("last_ratio", "float64", "Share of them in which this rank came last.", "ratio"),
        _count("event_count", "Events compared."),
    ),
)

_CLOCKS = (
    _ns("time_ns", "Computing time that they alone account for (level 1)."),
    _maybe("clock_mean_hz", "int64", "Mean SM clock, weighted by time.", "hz"),
    _ns("loss_ns", "Attributed to a clock below the reference."),
    _ns(
        "loss_error_ns",
        "How far that may be off: error of the sensitivity and of clocks between samples, added up.",
    ),
    _maybe("clock_p5_hz", "int64", "5 % of the time was at this clock or below.", "hz"),
    _maybe("clock_median_hz", "int64", "Half of the time was.", "hz"),
    _maybe("clock_p95_hz", "int64", "95 % of the time was.", "hz"),
    _maybe("power_mean_w", "float64", "Mean power of the whole board in that time.", "w"),
    _maybe("power_cap_ratio", "float64", "Share of the time under a power limit.", "ratio"),
    _maybe("thermal_ratio", "float64", "Share under a thermal limit.", "ratio"),
    _maybe("application_ratio", "float64", "Share at a clock that was set.", "ratio"),
    _maybe("idle_ramp_ratio", "float64", "Share at a clock still low from idling.", "ratio"),
    _maybe("host_limited_ratio", "float64", "Share in which nothing held it down.", "ratio"),
    _maybe("unlabelled_ratio", "float64", "Share whose reason was not recorded.", "ratio"),
    _column("known_ratio", "float64", "Share of the time whose clock is known.", "ratio"),
    _maybe("clock_error_hz", "int64", "Bound of a kernel's clock from sampling, mean.", "hz"),
    _maybe("sensitivity_ratio", "float64", "Mean dependence on the clock, 0 to 1.", "ratio"),
)

CLOCK_BY_PHASE = Table(
    "clock_by_phase",
    1,
    "SM clock, power and what held the clock, by rank and phase. Percentiles are of the kernels' "
    "mean clocks, weighted by their time.",
    (
        _column("rank", "int32", "Rank."),
        _column("phase", "string", "forward, recompute, backward, optimizer, data or other."),
        *_CLOCKS,
        _ns("at_reference_ns", "What the same kernels would take at the reference clock."),
    ),
)

CLOCK_BY_OPERATOR = Table(
    "clock_by_operator",
    1,
    "SM clock, power and what held the clock, by operator: which kernels run at a low clock.",
    (
        _maybe("op", "string", "Operator; null for kernels that no operator launched."),
        *_CLOCKS,
        _ns("at_reference_ns", "What the same kernels would take at the reference clock."),
    ),
)

CLOCK_BY_KERNEL = Table(
    "clock_by_kernel",
    1,
    "SM clock and what held the clock, by operator, shapes of its inputs and kernel, over all ranks. "
    "Power is the whole board's while they ran, never the kernel's own: the sensor averages over "
    "many of them.",
    (
        _maybe("op", "string", "Operator; null for kernels that no operator launched."),
        _maybe("input_dims", "string", "Shapes of its inputs, JSON as recorded."),
        *_CLOCKS,
        _ns("at_reference_ns", "What the same kernels would take at the reference clock."),
        _column("kernel", "string", "Kernel."),
    ),
)

CLOCK_BY_STEP = Table(
    "clock_by_step",
    1,
    "SM clock by rank and step, and what the step would take at the reference clock.",
    (
        _column("rank", "int32", "Rank."),
        _maybe("number", "int64", "Step; null for a whole trace."),
        _ns("observed_ns", "Length of the step."),
        _ns(
            "at_reference_ns",
            "Its length less what its kernels would be faster at the reference clock (more, where "
            "they ran above it); idle and communication as they were.",
        ),
        *_CLOCKS,
    ),
)

_WORK = (
    _column("rank", "int32", "Rank."),
    _maybe("op", "string", "Operator; null where none launched it."),
    _column("kernel", "string", "Kernel. Same operator, shapes, kernel and grid are one row."),
)

CLOCK_SENSITIVITY = Table(
    "clock_sensitivity",
    1,
    "How much kernels depend on the SM clock: duration grows as clock to the power of minus so "
    "much. Where one work ran at several clocks, the slope decides, else its place under the "
    "roofline.",
    (
        *_WORK,
        _ns("time_ns", "Device time of all instances."),
        _column("sensitivity_ratio", "float64", "What is used, 0 to 1.", "ratio"),
        _column("sensitivity_error_ratio", "float64", "Its standard error.", "ratio"),
        _maybe("slope_ratio", "float64", "Slope that the run shows; null without enough.", "ratio"),
        _maybe("slope_error_ratio", "float64", "Its standard error.", "ratio"),
        _column("roofline_ratio", "float64", "Ideal over roofline time.", "ratio"),
        _count("count", "Instances."),
        _count("used_count", "Instances that ran alone at a known clock."),
        _maybe("clock_low_hz", "int64", "Lowest of their clocks.", "hz"),
        _maybe("clock_high_hz", "int64", "Highest of their clocks.", "hz"),
    ),
)

CONTENTION = Table(
    "contention",
    1,
    "Kernels that ran beside others: what the same work takes alone and together, clocks made "
    "equal.",
    (
        *_WORK,
        _maybe("slowdown_ratio", "float64", "Mean slowdown; null without a baseline.", "ratio"),
        _ns("loss_ns", "Attributed to contention; 0 where the slowdown is within noise."),
        _maybe("alone_ns", "int64", "Median of those that ran alone; null below three.", "ns"),
        _maybe("overlapped_ns", "int64", "Median of the others.", "ns"),
        _count("alone_count", "Instances that ran alone."),
        _count("overlapped_count", "Instances that did not."),
        _maybe(
            "bound_ns",
            "int64",
            "Without a baseline: time beyond the instance that overlapped least. Contention took "
            "at least that.",
            "ns",
        ),
        _count("count", "Instances."),
        _ns("time_ns", "Device time of all instances."),
    ),
)

WAVE_QUANTIZATION = Table(
    "wave_quantization",
    1,
    "Products whose blocks do not fill their last round on the device's units.",
    (
        *_WORK,
        _column(
            "slowdown_ratio",
            "float64",
            "Blocks of the fullest unit over the mean, less what the roofline has of it already.",
            "ratio",
        ),
        _ns("loss_ns", "Attributed to it."),
        _column("grid", "string", "Blocks per grid as recorded."),
        _maybe("block", "string", "Threads per block as recorded."),
        _count("blocks_count", "Blocks."),
        _count("units_count", "Units (SMs) of the device."),
        _maybe("resident_count", "int64", "Blocks that one unit holds at a time.", "count"),
        _maybe("waves_ratio", "float64", "Blocks over those resident at a time.", "ratio"),
        _maybe(
            "slowdown_limit_ratio",
            "float64",
            "The loss if resident blocks did not slow each other: ⌈waves⌉ ÷ waves.",
            "ratio",
        ),
        _count("count", "Instances."),
        _ns("time_ns", "Device time of all instances."),
    ),
)

THROTTLE_EPISODES = Table(
    "throttle_episodes",
    2,
    "Times in which the driver said that it held the clock, and what ran then. A reading stands for "
    "the time half-way to its neighbours. Where a driver gives no reasons, its counters of throttled "
    "time tell the episodes, to the time between their readings.",
    (
        _column("rank", "int32", "Rank."),
        _maybe("device_id", "int32", "Device ordinal of the rank."),
        _column("reason", "string", "power_cap, thermal or application."),
        _ns("dur_ns", "How long it lasted."),
        _ns("loss_ns", "Attributed to the clock of kernels in the middle of which it held."),
        _maybe("clock_mean_hz", "int64", "Mean SM clock.", "hz"),
        _maybe("clock_low_hz", "int64", "Lowest reading.", "hz"),
        _maybe("power_mean_w", "float64", "Mean power of the board.", "w"),
        _maybe(
            "held_ns",
            "int64",
            "Of it, throttled by the driver's own count of time; null where it counts none.",
            "ns",
        ),
        _count("kernel_count", "Computing kernels that it hit."),
        _ns("time_ns", "Their exclusive time."),
        _maybe("op", "string", "Operator that lost most; without a loss, that ran longest."),
        _maybe(
            "kernels", "text", "The three kernels that lost most, with their share of the loss."
        ),
        _maybe("step", "int32", "Index of the step in which its first kernel ran."),
        _column("source", "string", "reasons, or counters."),
        _ns("start_ns", "Start, Unix time."),
    ),
)

ENERGY = Table(
    "energy",
    1,
    "Energy by device and by domain of the host's processors, from differences of counters over at "
    "least 5 s; nothing is said of less. Ranks on parts of one device share its counter. Boards are "
    "off by up to 5 % each, which no reading shows.",
    (
        _column(
            "scope", "string", "run (all steps read), phase, or steps (a group of at least 5 s)."
        ),
        _column(
            "source", "string", "all devices, device N, or a domain: package-0, package-0/dram."
        ),
        _column("ranks", "string", "Ranks that compute on it."),
        _maybe("energy_per_step_j", "float64", "Mean of the steps.", "j"),
        _maybe("energy_per_token_j", "float64", "Over the tokens of these steps.", "j"),
        _maybe("power_mean_w", "float64", "Energy over time.", "w"),
        _maybe("energy_j", "float64", "In all.", "j"),
        _maybe(
            "energy_error_j",
            "float64",
            "Bound of the error for readings around the edges and the counter's own steps.",
            "j",
        ),
        _maybe("span_ns", "int64", "Time that it was taken over.", "ns"),
        _count("step_count", "Steps within."),
        _maybe("phase", "string", "Phase, of rows about one."),
        _maybe("first_step", "int64", "First step within."),
        _maybe("last_step", "int64", "Last step within."),
        _maybe("tokens_count", "int64", "Tokens of these steps, of all its ranks.", "count"),
        _maybe(
            "tokens_from", "string", "program (prof.step(tokens=…)), or embeddings of traced steps."
        ),
        _maybe("basis", "string", "counter, or power (readings integrated)."),
        _maybe("host", "string", "Host."),
        _maybe("start_ns", "int64", "Start, Unix time.", "ns"),
        _maybe("reason", "text", "Why nothing is claimed."),
    ),
)

LINKS = Table(
    "links",
    1,
    "What links carried, and what speaks of congestion on them: rows without a step are the whole "
    "run. Ports and interfaces are their host's, shared by its ranks; device links are a rank's own. "
    "Steps shorter than the time between readings have no row.",
    (
        _column("link", "string", "Port, interface, or the links of the rank's device."),
        _maybe("step", "int64", "Step; null for the whole run."),
        _maybe("signal", "text", "What speaks of congestion, in words."),
        _maybe("tx_bytes_per_s", "float64", "Sent.", "bytes_per_s"),
        _maybe("rx_bytes_per_s", "float64", "Received.", "bytes_per_s"),
        _maybe("pause_ratio", "float64", "Share of the time in which sending was paused.", "ratio"),
        _maybe("cnp_handled_hz", "float64", "Congestion notifications obeyed as sender.", "hz"),
        _maybe("retransmit_ratio", "float64", "Bytes sent again, of those sent (EFA).", "ratio"),
        _column("ranks", "string", "Ranks that share it."),
        _column("kind", "string", "port, interface, flow control, device link or PCIe."),
        _column("rank", "int32", "Rank whose steps these are."),
        _ns("span_ns", "Time that it was taken over."),
        _maybe("sent_pause_ratio", "float64", "Share in which others were told to pause.", "ratio"),
        _maybe("cnp_sent_hz", "float64", "Congestion notifications sent as receiver.", "hz"),
        _maybe("ecn_marked_hz", "float64", "Packets that a switch had marked.", "hz"),
        _maybe(
            "tx_wait_hz", "float64", "Ticks of waiting for credits (InfiniBand), a second.", "hz"
        ),
        _maybe("retransmits_per_byte", "float64", "Retransmits (RoCE) over bytes sent."),
        _maybe("retransmit_count", "int64", "Order errors, timeouts, adaptive resends.", "count"),
        _maybe("out_of_sequence_count", "int64", "Packets that came out of order.", "count"),
        _maybe("error_count", "int64", "Discards, link and CRC errors, replays.", "count"),
        _maybe("tx_bytes", "int64", "Sent in all.", "bytes"),
        _maybe("rx_bytes", "int64", "Received in all.", "bytes"),
    ),
)

SCHEDULING = Table(
    "scheduling",
    1,
    "Whether threads had a core when they wanted one, over all recorded steps. A row without a "
    "thread is the rank: its waiting is that of the training thread that waited most, its running "
    "that of all of its threads; switches, faults and misses count its children, too.",
    (
        _column("rank", "int32", "Rank."),
        _maybe("thread", "string", "Name of the thread; null for the rank."),
        _maybe("training", "bool", "Whether the trace shows it run operators or launch."),
        _maybe("waiting_ratio", "float64", "Share of the time ready, but without a core.", "ratio"),
        _maybe("running_ratio", "float64", "Share of the time on a core.", "ratio"),
        _maybe(
            "throttled_ratio", "float64", "Held back by the cgroup's quota, over time.", "ratio"
        ),
        _maybe("steal_ratio", "float64", "Taken by the hypervisor, mean of the cores.", "ratio"),
        _maybe(
            "pressure_cpu_ratio", "float64", "Some task of the host waited for a core.", "ratio"
        ),
        _maybe("waiting_ns", "int64", "Waited in all.", "ns"),
        _maybe("running_ns", "int64", "Ran in all.", "ns"),
        _ns("span_ns", "From the first step to the last."),
        _maybe("slice_count", "int64", "Times that it was put on a core.", "count"),
        _maybe("context_switch_count", "int64", "Context switches.", "count"),
        _maybe("migration_count", "int64", "Moves to another core.", "count"),
        _maybe("page_fault_count", "int64", "Page faults.", "count"),
        _maybe("major_fault_count", "int64", "Page faults that read from a disk.", "count"),
        _maybe("cache_miss_count", "int64", "Misses of the last cache.", "count"),
        _maybe("instructions_per_cycle", "float64", "Instructions over cycles."),
        _maybe("pressure_memory_ratio", "float64", "Some task waited for memory.", "ratio"),
        _maybe("pressure_io_ratio", "float64", "Some task waited for I/O.", "ratio"),
        _maybe("tid", "int64", "The thread, as the kernel numbers it."),
        _maybe("reason", "text", "Why nothing is claimed."),
    ),
)

CRITICAL_PATH = Table(
    "critical_path",
    1,
    "The critical path of a run by leaf cause, by and by what ran or was waited for: a replay's "
    "longest chain of dependencies to the end of the last step. Its times sum to the path.",
    (
        _column("cause", "string", "Id of a leaf cause."),
        _column("name", "string", "Operator, kernel or host work."),
        _ns("time_ns", "Time on the path."),
        _maybe("share_ratio", "float64", "Of the path.", "ratio"),
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
    MEMORY_OVER_TIME,
    MEMORY_SEGMENTS,
    MEMORY_HOLDERS,
    MEMORY_STEPS,
    MEMORY_DETERMINISM,
    COLLECTIVES,
    STRAGGLERS,
    EXPOSED_COMMUNICATION,
    OVERLAP,
    CRITICAL_PATH,
    LEAD,
    CLOCK_BY_PHASE,
    CLOCK_BY_OPERATOR,
    CLOCK_BY_KERNEL,
    CLOCK_BY_STEP,
    CLOCK_SENSITIVITY,
    CONTENTION,
    WAVE_QUANTIZATION,
    THROTTLE_EPISODES,
    ENERGY,
    SCHEDULING,
    LINKS,
)
