"""Clocks and what held them, contention, last waves and energy."""

from __future__ import annotations

from chopper.tables._base import Table
from chopper.tables.views._columns import column, count, maybe, ns

_CLOCKS = (
    ns("time_ns", "Computing time that they alone account for (level 1)."),
    maybe("clock_mean_hz", "int64", "Mean SM clock, weighted by time.", "hz"),
    maybe(
        "loss_ns",
        "int64",
        "Attributed to a clock below the reference; null where the clock or the reference is not "
        "known of any of it.",
        "ns",
    ),
    maybe(
        "loss_error_ns",
        "int64",
        "How far that may be off: error of the sensitivity and of clocks between samples, added up.",
        "ns",
    ),
    maybe("clock_p5_hz", "int64", "5 % of the time was at this clock or below.", "hz"),
    maybe("clock_median_hz", "int64", "Half of the time was.", "hz"),
    maybe("clock_p95_hz", "int64", "95 % of the time was.", "hz"),
    maybe("power_mean_w", "float64", "Mean power of the whole board in that time.", "w"),
    maybe(
        "power_cap_ratio",
        "float64",
        "Share under a power limit, as the four below of the time whose reason was recorded; null "
        "where none was.",
        "ratio",
    ),
    maybe("thermal_ratio", "float64", "Share under a thermal limit.", "ratio"),
    maybe("application_ratio", "float64", "Share at a clock that was set.", "ratio"),
    maybe("idle_ramp_ratio", "float64", "Share at a clock still low from idling.", "ratio"),
    maybe("host_limited_ratio", "float64", "Share in which nothing held it down.", "ratio"),
    maybe(
        "unlabelled_ratio",
        "float64",
        "Share of all that time whose reason was not recorded.",
        "ratio",
    ),
    column("known_ratio", "float64", "Share of the time whose clock is known.", "ratio"),
    maybe("clock_error_hz", "int64", "Bound of a kernel's clock from sampling, mean.", "hz"),
    maybe("sensitivity_ratio", "float64", "Mean dependence on the clock, 0 to 1.", "ratio"),
)
_AT_REFERENCE = maybe(
    "at_reference_ns",
    "int64",
    "What the same kernels would take at the reference clock; null as the loss.",
    "ns",
)

CLOCK_BY_PHASE = Table(
    "clock_by_phase",
    1,
    "SM clock, power and what held the clock, by rank and phase. Percentiles are of the kernels' "
    "mean clocks, weighted by their time.",
    (
        column("rank", "int32", "Rank."),
        column("phase", "string", "forward, backward, optimizer, evaluation …"),
        *_CLOCKS,
        _AT_REFERENCE,
    ),
)

CLOCK_BY_OPERATOR = Table(
    "clock_by_operator",
    1,
    "SM clock, power and what held the clock, by operator: which kernels run at a low clock.",
    (
        maybe("op", "string", "Operator; null for kernels that no operator launched."),
        *_CLOCKS,
        _AT_REFERENCE,
    ),
)

CLOCK_BY_KERNEL = Table(
    "clock_by_kernel",
    1,
    "SM clock and what held the clock, by operator, shapes of its inputs and kernel, over all ranks. "
    "Power is the whole board's while they ran, never the kernel's own: the sensor averages over "
    "many of them.",
    (
        maybe("op", "string", "Operator; null for kernels that no operator launched."),
        maybe("input_dims", "string", "Shapes of its inputs, JSON as recorded."),
        *_CLOCKS,
        _AT_REFERENCE,
        column("kernel", "string", "Kernel."),
    ),
)

CLOCK_BY_STEP = Table(
    "clock_by_step",
    1,
    "SM clock by rank and step, and what the step would take at the reference clock.",
    (
        column("rank", "int32", "Rank."),
        maybe("number", "int64", "Step; null for a whole trace."),
        ns("observed_ns", "Length of the step."),
        maybe(
            "at_reference_ns",
            "int64",
            "Its length less what its kernels would be faster at the reference clock (more, where "
            "they ran above it); idle and communication as they were. Null as the loss.",
            "ns",
        ),
        *_CLOCKS,
    ),
)

_WORK = (
    column("rank", "int32", "Rank."),
    maybe("op", "string", "Operator; null where none launched it."),
    column("kernel", "string", "Kernel. Same operator, shapes, kernel and grid are one row."),
)

CLOCK_SENSITIVITY = Table(
    "clock_sensitivity",
    1,
    "How much kernels depend on the SM clock: duration grows as clock to the power of minus so "
    "much. Where one work ran at several clocks, the slope decides, else its place under the "
    "roofline.",
    (
        *_WORK,
        ns("time_ns", "Device time of all instances."),
        column("sensitivity_ratio", "float64", "What is used, 0 to 1.", "ratio"),
        column("sensitivity_error_ratio", "float64", "Its standard error.", "ratio"),
        maybe("slope_ratio", "float64", "Slope that the run shows; null without enough.", "ratio"),
        maybe("slope_error_ratio", "float64", "Its standard error.", "ratio"),
        column("roofline_ratio", "float64", "Ideal over roofline time.", "ratio"),
        count("count", "Instances."),
        count("used_count", "Instances that ran alone at a known clock."),
        maybe("clock_low_hz", "int64", "Lowest of their clocks.", "hz"),
        maybe("clock_high_hz", "int64", "Highest of their clocks.", "hz"),
    ),
)

CONTENTION = Table(
    "contention",
    1,
    "Kernels that ran beside others: what the same work takes alone and together, clocks made "
    "equal.",
    (
        *_WORK,
        maybe("slowdown_ratio", "float64", "Mean slowdown; null without a baseline.", "ratio"),
        ns("loss_ns", "Attributed to contention; 0 where the slowdown is within noise."),
        maybe("alone_ns", "int64", "Median of those that ran alone; null below three.", "ns"),
        maybe("overlapped_ns", "int64", "Median of the others.", "ns"),
        count("alone_count", "Instances that ran alone."),
        count("overlapped_count", "Instances that did not."),
        maybe(
            "bound_ns",
            "int64",
            "Without a baseline: time beyond the instance that overlapped least. Contention took "
            "at least that.",
            "ns",
        ),
        count("count", "Instances."),
        ns("time_ns", "Device time of all instances."),
    ),
)

WAVE_QUANTIZATION = Table(
    "wave_quantization",
    1,
    "Products whose blocks do not fill their last round on the device's units.",
    (
        *_WORK,
        column(
            "slowdown_ratio",
            "float64",
            "Blocks of the fullest unit over the mean, less what the roofline has of it already.",
            "ratio",
        ),
        ns("loss_ns", "Attributed to it."),
        column("grid", "string", "Blocks per grid as recorded."),
        maybe("block", "string", "Threads per block as recorded."),
        count("blocks_count", "Blocks."),
        count("units_count", "Units (SMs) of the device."),
        maybe("resident_count", "int64", "Blocks that one unit holds at a time.", "count"),
        maybe("waves_ratio", "float64", "Blocks over those resident at a time.", "ratio"),
        maybe(
            "slowdown_limit_ratio",
            "float64",
            "The loss if resident blocks did not slow each other: ⌈waves⌉ ÷ waves.",
            "ratio",
        ),
        count("count", "Instances."),
        ns("time_ns", "Device time of all instances."),
    ),
)

THROTTLE_EPISODES = Table(
    "throttle_episodes",
    2,
    "Times in which the driver said that it held the clock, and what ran then. A reading stands for "
    "the time half-way to its neighbours. Where a driver gives no reasons, its counters of throttled "
    "time tell the episodes, to the time between their readings.",
    (
        column("rank", "int32", "Rank."),
        maybe("device_id", "int32", "Device ordinal of the rank."),
        column("reason", "string", "power_cap, thermal or application."),
        ns("dur_ns", "How long it lasted."),
        maybe(
            "loss_ns",
            "int64",
            "Attributed to the clock of kernels in the middle of which it held; null where none is "
            "in the trace.",
            "ns",
        ),
        maybe("clock_mean_hz", "int64", "Mean SM clock.", "hz"),
        maybe("clock_low_hz", "int64", "Lowest reading.", "hz"),
        maybe("power_mean_w", "float64", "Mean power of the board.", "w"),
        maybe(
            "held_ns",
            "int64",
            "Of it, throttled by the driver's own count of time; null where it counts none.",
            "ns",
        ),
        count("kernel_count", "Computing kernels that it hit."),
        ns("time_ns", "Their exclusive time."),
        maybe("op", "string", "Operator that lost most; without a loss, that ran longest."),
        maybe("kernels", "text", "The three kernels that lost most, with their share of the loss."),
        maybe("step", "int32", "Index of the step in which its first kernel ran."),
        column("source", "string", "reasons, or counters."),
        ns("start_ns", "Start, Unix time."),
    ),
)

ENERGY = Table(
    "energy",
    1,
    "Energy by device and by domain of the host's processors, from differences of counters over at "
    "least 5 s; nothing is said of less. Ranks on parts of one device share its counter. Boards are "
    "off by up to 5 % each, which no reading shows.",
    (
        column(
            "scope",
            "string",
            "run (all steps read), phase, steps (a group of at least 5 s), or window (a span that "
            "another tool measured).",
        ),
        column(
            "source", "string", "all devices, device N, or a domain: package-0, package-0/dram."
        ),
        column("ranks", "string", "Ranks that compute on it."),
        maybe("energy_per_step_j", "float64", "Mean of the steps.", "j"),
        maybe("energy_per_token_j", "float64", "Over the tokens of these steps.", "j"),
        maybe("power_mean_w", "float64", "Energy over time.", "w"),
        maybe("energy_j", "float64", "In all.", "j"),
        maybe(
            "energy_error_j",
            "float64",
            "Bound of the error for readings around the edges and the counter's own steps.",
            "j",
        ),
        maybe("span_ns", "int64", "Time that it was taken over.", "ns"),
        count("step_count", "Steps within."),
        maybe("phase", "string", "Phase, of rows about one."),
        maybe("window", "string", "Name of the window, of rows about one."),
        maybe("first_step", "int64", "First step within."),
        maybe("last_step", "int64", "Last step within."),
        maybe("tokens_count", "int64", "Tokens of these steps, of all its ranks.", "count"),
        maybe(
            "tokens_from", "string", "program (prof.step(tokens=…)), or embeddings of traced steps."
        ),
        maybe("basis", "string", "counter, or power (readings integrated)."),
        maybe("host", "string", "Host."),
        maybe("start_ns", "int64", "Start, Unix time.", "ns"),
        maybe("reason", "text", "Why nothing is claimed, or nothing per token."),
    ),
)
