"""Operations, operators, kernels and their launches, steps and the host: how the time was used."""

from __future__ import annotations

from chopper.tables._base import Table
from chopper.tables.views._columns import column, count, maybe, ns

_SPREAD = (
    ns("median_ns", "Median of one call."),
    ns("min_ns", "Fastest call."),
    ns("max_ns", "Slowest call."),
    ns("std_ns", "Standard deviation of the sample of calls; 0 for a single one."),
)

_KERNEL_SHARE = maybe("share_ratio", "float64", "Of the sum over all rows.", "ratio")

_FLOP_RATE = maybe(
    "compute_rate_flop_per_s", "float64", "FLOP over the time of the device events.", "flop_per_s"
)

_BYTES_RATE = maybe(
    "memory_rate_bytes_per_s", "float64", "Bytes over the time of the device events.", "bytes_per_s"
)

OPERATIONS = Table(
    "operations",
    1,
    "Calls of operators with the same arguments in the same phase, over all ranks and steps. A "
    "call's time is that in which device events that it launched itself ran.",
    (
        maybe("op", "string", "Operator; null for events that no operator launched."),
        maybe("input_dims", "string", "Shapes of its inputs, JSON as recorded."),
        column("phase", "string", "forward, backward, optimizer, evaluation …"),
        count("call_count", "Calls."),
        ns("time_ns", "Sum over all calls."),
        _KERNEL_SHARE,
        ns("mean_ns", "Mean of one call."),
        _FLOP_RATE,
        _BYTES_RATE,
        maybe("ideal_ns", "int64", "What one call of a product needs at the peak.", "ns"),
        maybe("roofline_ns", "int64", "What one call needs at the roofline.", "ns"),
        maybe("input_types", "string", "Data types of its inputs, JSON as recorded."),
        maybe("concrete_inputs", "string", "Values of its scalar inputs, JSON as recorded."),
        maybe("dtype", "string", "Arithmetic of a product: the peak that it is held against."),
        maybe("math_flop", "int64", "FLOP of one call that the mathematics needs.", "flop"),
        maybe("traffic_bytes", "int64", "Least traffic with memory of one call.", "bytes"),
        maybe("flop_per_byte", "float64", "FLOP per byte of that traffic."),
        *_SPREAD,
    ),
)

OPERATORS = Table(
    "operators",
    1,
    "Operators by name over all ranks and steps, whatever their arguments and phase.",
    (
        maybe("op", "string", "Operator; null for events that no operator launched."),
        count("call_count", "Calls."),
        count("kernel_count", "Device events that they launched."),
        ns("time_ns", "Time in which these events ran, summed over calls."),
        _KERNEL_SHARE,
        ns("mean_ns", "Mean of one call."),
        _FLOP_RATE,
        _BYTES_RATE,
        *_SPREAD,
        maybe("ideal_ns", "int64", "What all calls of a product need at the peak.", "ns"),
        maybe("roofline_ns", "int64", "What all calls need at the roofline.", "ns"),
        maybe("math_flop", "int64", "FLOP of all calls.", "flop"),
        maybe("traffic_bytes", "int64", "Least traffic with memory of all calls.", "bytes"),
    ),
)

KERNELS = Table(
    "kernels",
    1,
    "Device events by name and by the operator that launched them, over all ranks and steps.",
    (
        column("kernel", "string", "Name as recorded."),
        maybe("op", "string", "Operator that launched it; null: none recorded."),
        count("call_count", "Device events."),
        ns("time_ns", "Sum of their durations, what ran beside them included."),
        _KERNEL_SHARE,
        ns("mean_ns", "Mean duration."),
        column("work_class", "string", "compute, communication or copy."),
        *_SPREAD,
    ),
)

UNMODELLED = Table(
    "unmodelled",
    1,
    "Computing time without an ideal or a roofline, by kernel, operator and reason, over all ranks "
    "and steps.",
    (
        maybe("kernel", "string", "Name as recorded."),
        ns("time_ns", "Attributed (exclusive) time."),
        maybe("share_ratio", "float64", "Of all computing time.", "ratio"),
        column("reason", "string", "Why its work, or the time that it should take, is not known."),
        maybe("op", "string", "Operator that launched it; null: none recorded."),
        count("call_count", "Device events."),
        column("cause", "string", "Cause that the time is attributed to."),
    ),
)

LAUNCHES = Table(
    "launches",
    1,
    "Launch overhead of compute kernels by operator and phase, as the Chopper paper defines it: "
    "from the end of the compute kernels before, in the order of their start per device and step, "
    "to the kernel's start. Communication under that gap does not shorten it.",
    (
        maybe("op", "string", "Operator that launched the kernels; null: none recorded."),
        column("phase", "string", "forward, backward, optimizer, evaluation …"),
        count("kernel_count", "Compute kernels."),
        ns("overhead_ns", "Preparation, call and what could not be split."),
        column("share_ratio", "float64", "Of the observed time of all ranks.", "ratio"),
        ns("preparation_ns", "Before the launching call: the host was late."),
        ns("call_ns", "From the launching call to the kernel's start."),
        ns("unsplit_ns", "Overhead of kernels whose launch was not recorded."),
        ns("mean_ns", "Overhead per kernel."),
        ns("running_ns", "Time of the kernels themselves."),
    ),
)

QUEUE_DEPTH = Table(
    "queue_depth",
    1,
    "Launches that wait or run on each stream: how many, for how long. A replayed graph counts as "
    "one. The phase at a time is that of the latest launch before it.",
    (
        column("rank", "int32", "Rank."),
        column("stream_id", "int64", "Stream."),
        column("phase", "string", "Phase that the host was launching."),
        ns("time_ns", "Time in that phase, in the step windows' span."),
        column("empty_ratio", "float64", "Share of the time with nothing queued.", "ratio"),
        column("mean_depth", "float64", "Mean over time."),
        column("median_depth", "int64", "Half of the time at most this many."),
        column("p95_depth", "int64", "95 % of the time at most this many."),
        column("max_depth", "int64", "Most at once."),
        column(
            "full_ratio",
            "float64",
            "Share of the time with at least 1024 queued: CUDA's queue is full then, and launching "
            "calls block.",
            "ratio",
        ),
        column("device_id", "int32", "Device ordinal."),
    ),
)

CPU_USE = Table(
    "cpu_use",
    1,
    "Cores of the host in use, from samples: over the whole run, per phase over all steps, and per "
    "step. Time until a launch belongs to the phase of that launch. Means over time.",
    (
        column("rank", "int32", "Rank whose steps and phases these are."),
        maybe("step", "int64", "Step number; null: over all steps."),
        maybe("phase", "string", "Phase of the host; null: all phases."),
        ns("time_ns", "Time looked at."),
        maybe("active_cores", "float64", "Cores that were busy at all in a sample."),
        maybe("minimum_cores", "float64", "Cores that the same work would fill: sum of shares."),
        maybe("rank_cores", "float64", "Cores that the rank with its children used."),
        maybe("children_cores", "float64", "The children's part of it (data loader workers)."),
        maybe("system_cores", "float64", "Cores' worth of time in the kernel."),
        maybe("stolen_cores", "float64", "Cores' worth of time taken by the hypervisor."),
        maybe("reason", "text", "Why values are null."),
    ),
)

UTILIZATION = Table(
    "utilization",
    2,
    "Model and hardware FLOP utilization against the theoretical ceiling (table of devices) and the "
    "achievable one (`chopper calibrate`). MFU = Σ F_d / (P_d · T), HFU = Σ H_d / (P_d · T), with "
    "F_d the FLOP of type d that the model needs, H_d those with recomputation and the optimizer's "
    "products, P_d the ceiling for that type, T the time of the same steps without a trace where such "
    "steps were recorded, else the observed time.",
    (
        maybe("rank", "int32", "Rank; null: all ranks together."),
        column("ceiling", "string", "theoretical or achievable."),
        maybe("dtype", "string", "Data type; null: all types, each at its own peak."),
        maybe("mfu_ratio", "float64", "Model FLOP utilization.", "ratio"),
        maybe("hfu_ratio", "float64", "Hardware FLOP utilization.", "ratio"),
        maybe(
            "peak_flop_per_s",
            "float64",
            "The ceiling for this mix of types: FLOP over the time that they need at it.",
            "flop_per_s",
        ),
        maybe(
            "tokens_per_s",
            "float64",
            "Tokens that the rank's embedding looked up; null where "
            "that cannot be told from one table's shapes.",
        ),
        maybe(
            "model_flop", "int64", "FLOP that the model needs; null where none are known.", "flop"
        ),
        maybe("hardware_flop", "int64", "The same with recomputation.", "flop"),
        maybe("model_needs_ns", "int64", "Time that the model's FLOP need at the ceiling.", "ns"),
        maybe("hardware_needs_ns", "int64", "Time that all FLOP need at the ceiling.", "ns"),
        ns(
            "time_ns",
            "T, summed over ranks: the observed time, scaled to the median step without a trace.",
        ),
        ns("observed_ns", "Observed time of the traced steps, summed over ranks."),
        maybe("reason", "text", "Why values are null, or a lower bound."),
        maybe("source", "text", "Where the ceiling comes from."),
    ),
)

STEPS = Table(
    "steps",
    1,
    "Step windows of each rank: the four exclusive states sum to the observed time.",
    (
        maybe("step", "int64", "Step number; null for a whole trace."),
        column("rank", "int32", "Rank."),
        ns("observed_ns", "Length of the window."),
        maybe("ideal_ns", "int64", "Model math at peak; null without a peak.", "ns"),
        ns("compute_ns", "A compute kernel was running."),
        ns("communication_ns", "Exposed communication."),
        ns("copy_ns", "Exposed copies."),
        ns("idle_ns", "Nothing was running."),
        maybe(
            "outlier",
            "bool",
            "Further from the rank's median than 3.5 robust standard deviations and than 2 %; null "
            "with fewer than five steps.",
        ),
        maybe("deviation_ratio", "float64", "Difference to the rank's median step.", "ratio"),
    ),
)

SCHEDULING = Table(
    "scheduling",
    1,
    "Whether threads had a core when they wanted one, over all recorded steps. A row without a "
    "thread is the rank: its waiting is that of the training thread that waited most, its running "
    "that of all of its threads; switches, faults and misses count its children, too.",
    (
        column("rank", "int32", "Rank."),
        maybe("thread", "string", "Name of the thread; null for the rank."),
        maybe("training", "bool", "Whether the trace shows it run operators or launch."),
        maybe("waiting_ratio", "float64", "Share of the time ready, but without a core.", "ratio"),
        maybe("running_ratio", "float64", "Share of the time on a core.", "ratio"),
        maybe("throttled_ratio", "float64", "Held back by the cgroup's quota, over time.", "ratio"),
        maybe("steal_ratio", "float64", "Taken by the hypervisor, mean of the cores.", "ratio"),
        maybe("pressure_cpu_ratio", "float64", "Some task of the host waited for a core.", "ratio"),
        maybe("waiting_ns", "int64", "Waited in all.", "ns"),
        maybe("running_ns", "int64", "Ran in all.", "ns"),
        ns("span_ns", "From the first step to the last."),
        maybe("slice_count", "int64", "Times that it was put on a core.", "count"),
        maybe("context_switch_count", "int64", "Context switches.", "count"),
        maybe("migration_count", "int64", "Moves to another core.", "count"),
        maybe("page_fault_count", "int64", "Page faults.", "count"),
        maybe("major_fault_count", "int64", "Page faults that read from a disk.", "count"),
        maybe("cache_miss_count", "int64", "Misses of the last cache.", "count"),
        maybe("instructions_per_cycle", "float64", "Instructions over cycles."),
        maybe("pressure_memory_ratio", "float64", "Some task waited for memory.", "ratio"),
        maybe("pressure_io_ratio", "float64", "Some task waited for I/O.", "ratio"),
        maybe("tid", "int64", "The thread, as the kernel numbers it."),
        maybe("reason", "text", "Why nothing is claimed."),
    ),
)

CRITICAL_PATH = Table(
    "critical_path",
    1,
    "The critical path of a run by leaf cause, and by what ran or was waited for: a replay's "
    "longest chain of dependencies to the end of the last step. Its times sum to the path.",
    (
        column("cause", "string", "Id of a leaf cause."),
        column("name", "string", "Operator, kernel or host work."),
        ns("time_ns", "Time on the path."),
        maybe("share_ratio", "float64", "Of the path.", "ratio"),
    ),
)

CRITICAL_PATH_TIMELINE = Table(
    "critical_path_timeline",
    1,
    "The critical path of a run in order of time: which rank everything waited for, and for what. "
    "Stretches of the host lie on it where it was the host that was waited for.",
    (
        column("rank", "int32", "Rank on which the stretch lies."),
        ns("start_ns", "Start, from that of the path, in the clock of the rank."),
        ns("dur_ns", "Duration."),
        column(
            "cause", "string", "Id of a leaf cause: of what ran, the one with most of its time."
        ),
        column("name", "string", "Operator, kernel, host span, or what a wait led to."),
        maybe("event_row", "int64", "Device event that ran."),
        maybe("span_row", "int64", "Host span that ran."),
    ),
)
